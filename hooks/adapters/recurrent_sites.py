"""Which modules of a transformers model are recurrent mixers or short convolutions, and what kind.

A mixer is the topmost module of a layer that holds a state's parameters or a depthwise convolution. What it is, and its
heads and widths, are read off the op that it calls (`recurrences.py`); one that calls no known op is named by its
parameters and stays out of reach (`Site.opaque`).
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from ..sites import Site
from .ops import Read
from .recurrences import MARK, Reached

PARAMETERS = ("A_log", "slope_rate", "recurrent_param")  # of a state


@dataclasses.dataclass
class Seen:
    """What a trial run saw of mixers: the op each called, and the linear map it ended with."""

    reads: dict[int, Read] = dataclasses.field(default_factory=dict)
    outputs: dict[int, str] = dataclasses.field(default_factory=dict)

    def note(self, mixer: nn.Module, read: Read) -> None:
        self.reads[id(mixer)] = read


@contextlib.contextmanager
def watching_outputs(mixers: list[nn.Module], seen: Seen) -> Iterator[None]:
    """Note which linear map of each mixer runs last: its output projection."""
    handles = []
    for mixer in mixers:
        for name, module in mixer.named_modules():
            if isinstance(module, nn.Linear) or (hasattr(module, "in_features") and hasattr(module, "out_features")):

                def after(_m: Any, _args: Any, _out: Any, key: int = id(mixer), name: str = name) -> None:
                    seen.outputs[key] = name

                handles.append(module.register_forward_hook(after))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def recurrent_mixers(layer: nn.Module, path: str, attending: set[int]) -> list[tuple[str, nn.Module]]:
    """Topmost modules of a layer that hold a state's parameters or a short convolution, and do not attend."""
    if id(layer) in attending:
        return []
    if not any(id(m) in attending for m in layer.modules()):
        convs = any(_depthwise(child) for child in layer.children())
        if convs or any(name in _state(layer, deep=False) for name in PARAMETERS):
            return [(path, layer)]
    return [
        found
        for name, child in layer.named_children()
        for found in recurrent_mixers(child, f"{path}.{name}", attending)
    ]


def recurrent_site(module: nn.Module, layer: int, name: str, seen: Seen) -> Site:
    """The Site of a mixer, which carries it from then on; an earlier load's where that says the same."""
    read, output = seen.reads.get(id(module)), seen.outputs.get(id(module))
    convs = [m for m in module.modules() if isinstance(m, nn.Conv1d) and _depthwise(m)]
    known: dict[str, Any] = {"layer": layer, "name": name, "conv": max((m.kernel_size[0] for m in convs), default=1)}
    if read is not None:
        q, v = read.terms["q"], read.terms["v"]
        site = Site(
            kind="recurrent", mixer=read.mixer, heads=v.shape[2], kv_heads=read.key_heads, key_dim=q.shape[-1],
            value_dim=v.shape[-1], **known,
        )  # fmt: skip
    elif any(parameter in _state(module) for parameter in PARAMETERS):
        heads = next(_state(module)[p].shape[0] for p in PARAMETERS if p in _state(module))
        site = Site(
            kind="recurrent", mixer="unknown", heads=heads, kv_heads=heads, key_dim=1, value_dim=1, opaque=True, **known
        )
    else:
        channels = convs[0].in_channels
        site = Site(
            kind="conv", mixer="conv", heads=1, kv_heads=1, key_dim=channels, value_dim=channels,
            window=known["conv"], opaque=output is None, **known,
        )  # fmt: skip
    old: Reached | None = module.__dict__.get(MARK)
    said = [f.name for f in dataclasses.fields(Site) if f.repr and f.name != "index"]
    if old is not None and all(getattr(old.site, name) == getattr(site, name) for name in said):
        return old.site
    module.__dict__[MARK] = Reached(site, output)
    return site


def _depthwise(module: nn.Module) -> bool:
    return isinstance(module, nn.Conv1d) and module.groups == module.in_channels > 1


def _state(module: nn.Module, deep: bool = True) -> dict[str, Tensor]:
    owners = module.modules() if deep else [module]
    return {
        name: tensor
        for owner in owners
        for name, tensor in [*owner.named_parameters(recurse=False), *owner.named_buffers(recurse=False)]
    }
