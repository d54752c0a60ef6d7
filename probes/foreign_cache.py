"""What the decode cache of a transformers model holds, and will hold at any length.

Keys and values are `keys` and `values` in the cache's layers, whatever they hold (in MLA a latent); every other
floating-point tensor in there is state. How much a layer keeps of a token is read off the cache after a few tokens,
how many tokens off its site: all, or under a window of W the last W - 1.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

SHORT = (2, 5)  # tokens of the runs that the sizes are read off


@dataclasses.dataclass(frozen=True)
class CacheSizes:
    """Bytes that a model's cache keeps of one sequence: of each token by layer, and of states in all."""

    token: dict[int, int]
    window: dict[int, int | None]
    state: int
    layers: int
    """Layers with any mixer."""

    def at(self, length: int) -> tuple[int, int]:
        """Bytes of keys and values, and of states, after `length` tokens."""
        return sum(size * kept(length, self.window[n]) for n, size in self.token.items()), self.state

    @property
    def full_token(self) -> int | None:
        """Bytes a token if every layer with a mixer attended to everything: with its own keys and values, where it has
        some, else with those of the model's largest full layer (or window layer). None: nothing attends here."""
        if not self.token:
            return None
        full = [size for n, size in self.token.items() if self.window[n] is None]
        return sum(self.token.values()) + (self.layers - len(self.token)) * max(full or self.token.values())


def kept(length: int, window: int | None) -> int:
    """Tokens that a layer keeps: those that the next query can see."""
    return length if window is None else min(length, window - 1)


@torch.no_grad()
def cache_sizes(model: Any) -> CacheSizes:
    """Of a `TransformersLM`, from two runs of a few tokens. ValueError for a model that keeps no cache, or whose cache
    does not grow as its sites say."""
    name = type(model.model).__name__
    device = next(model.parameters()).device
    windows = {site.layer: site.window for site in model.sites if site.softmax}
    found = []
    for length in SHORT:
        cache = model.new_cache()
        model.hidden(torch.zeros(1, length, dtype=torch.int64, device=device), cache=cache)
        if cache.past is None:
            raise ValueError(f"cost: {name} keeps no cache")
        kv: dict[int, int] = {}
        state = 0
        for layer, kind, tensor in held(cache.past):
            if kind == "kv":
                kv[layer] = kv.get(layer, 0) + tensor.numel() * tensor.element_size()
            else:
                state += tensor.numel() * tensor.element_size()
        found.append((kv, state))
    (kv, state), (later, state_later) = found
    if set(kv) - set(windows) or state != state_later:
        raise ValueError(f"cost: the cache of {name} holds more than its sites' keys, values and states of fixed size")
    token = {n: size // max(1, kept(SHORT[0], windows[n])) for n, size in kv.items() if size}
    if later != {n: size * kept(SHORT[1], windows[n]) for n, size in token.items()}:
        raise ValueError(f"cost: the cache of {name} does not grow by the same keys and values for every token")
    return CacheSizes(token, {n: windows[n] for n in token}, state, len({site.layer for site in model.sites}))


def held(past: Any) -> Iterator[tuple[int, str, Tensor]]:
    """The tensors of a transformers cache: layer (-1 outside of any), "kv" or "state", tensor."""
    layers = list(getattr(past, "layers", ()))
    for number, layer in enumerate(layers):
        for name, value in vars(layer).items():
            for tensor in _tensors(value):
                yield number, "kv" if name in ("keys", "values") else "state", tensor
    for name, value in vars(past).items():
        if name != "layers" and not name.startswith("hybridscope"):
            yield from ((-1, "state", tensor) for tensor in _tensors(value))


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor) and value.is_floating_point() and value.numel():
        yield value
    elif isinstance(value, dict | list | tuple):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _tensors(part)
