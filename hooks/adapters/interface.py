"""The capture point in transformers models: an attention function and a mask function registered as
"hybridscope".

The attention function gets q, k and v exactly as a kernel would, after norms and RoPE, and hands them to
`attend` with the Site that the module carries. The mask function builds no mask: it hands over what the mask
would say (padding, offsets, window, segments), once per forward pass and kind of mask.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function, sdpa_mask

from ..attend import attend
from ..passes import View
from ..sites import Site
from .recurrences import MARK, framed, standing_in
from .rings import checked

NAME = "hybridscope"
SITE = "hybridscope_site"  # attribute of a module that attends

_local = threading.local()
_switching = threading.Lock()


class Mask(BlockMask):
    """What the mask of one forward pass says: which keys are padding, where queries and keys start, which
    window.

    Positions are columns counted from the row's first real token, so windows span columns as they do in
    transformers; padding has key position -1. Segments come from asking the mask function about neighbours: a
    key that its next token may not see starts one (a packed document, or a chunk).

    A BlockMask in name only: that is the one object beside a 4-D tensor that transformers hands on as it is
    where it makes masks ahead of the forward pass (generation with static caches).
    """

    def __init__(self, spec: dict[str, Any]) -> None:
        # Static caches count their tokens in a tensor that they move on in place: read it now.
        offsets = {name: int(spec.get(name, 0)) for name in ("q_offset", "kv_offset")}
        self.spec = {**spec, **offsets}
        self.window: int | None = spec.get("local_size")
        self._views: dict[torch.device, View | None] = {}

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the mask that it stands for."""
        return self.spec["batch_size"], 1, self.spec["q_length"], self.spec["kv_length"]

    def to(self, *_: Any, **__: Any) -> Mask:
        """Itself: views move to where they are asked for."""
        return self

    def __repr__(self) -> str:
        return f"Mask{self.shape}"

    @functools.cached_property
    def causal(self) -> bool:
        """Whether no query sees a later key; False also for mask functions that cannot be asked."""
        if self.spec.get("use_vmap"):
            return False
        return self._function is causal_mask_function or not bool(self._ask(ahead=1).any())

    @property
    def chunked(self) -> bool:
        """Whether the window is a chunk: bounded by multiples of its size, not by distance."""
        n = self.window
        if n is None or n < 2:
            return False
        zero = torch.zeros(1, dtype=torch.int64, device=self.spec.get("device", "cpu"))
        return not bool(self._function(zero, zero, zero + n, zero + n - 1).all())

    def view(self, device: torch.device, keys: int) -> tuple[View | None, int]:
        """Where queries and keys stand (None: both are tokens 0..T-1), and how many of the `keys` to use."""
        if keys > self.spec["kv_offset"] + self.spec["kv_length"] and not self.spec["q_offset"]:
            # A cache that asks its first layer how long it is, and that layer holds a state: its keys know better.
            queries = self.spec["q_length"]
            return Mask({**self.spec, "q_offset": keys - queries, "kv_length": keys}).view(device, keys)
        if device not in self._views:
            self._views[device] = self._view(device)
        view = self._views[device]
        if view is None:  # a static cache holds room for later keys
            return None, self.spec["q_length"]
        if keys > view.k_pos.shape[1]:
            raise ValueError(f"attention got {keys} keys under a mask made for {view.k_pos.shape[1]}")
        if keys < view.k_pos.shape[1]:
            k_seg = None if view.k_seg is None else view.k_seg[:, :keys]
            part = {"k_pos": view.k_pos[:, :keys], "k_col": view.k_col[:, :keys], "k_seg": k_seg}
            view = dataclasses.replace(view, **part)
        return view, keys

    def dense(self) -> Tensor | None:
        """The mask itself, for modules that are not ours (image towers)."""
        return sdpa_mask(**self.spec)

    @property
    def _function(self) -> Callable[..., Tensor]:
        return self.spec.get("mask_function", causal_mask_function)

    @property
    def _columns(self) -> tuple[int, int, int, int]:
        start, offset = self.spec["q_offset"], self.spec["kv_offset"]
        return start, start + self.spec["q_length"], offset, offset + self.spec["kv_length"]

    def _ask(self, ahead: int) -> Tensor:
        """Whether a query at each column sees the key `ahead` columns later, [B,n-1], over all columns in
        play."""
        start, stop, first, last = self._columns
        columns = torch.arange(min(start, first), max(stop, last), device=self.spec.get("device", "cpu"))
        earlier, later = columns[None, :-1], columns[None, 1:]
        query, key = (earlier, later) if ahead > 0 else (later, earlier)
        batch = torch.arange(self.spec["batch_size"], device=columns.device)[:, None]
        seen = self._function(batch, torch.zeros_like(batch), query, key)
        return seen.expand(len(batch), columns.shape[0] - 1)

    def _view(self, device: torch.device) -> View | None:
        if not self.causal:
            raise ValueError("attention: this model's mask is not causal; only causal masks are supported")
        start, stop, first, last = self._columns
        segments = None
        if self._function is not causal_mask_function and self.window != 1:
            follows = self._ask(ahead=-1)
            if not bool(follows.all()):
                segments = torch.nn.functional.pad((~follows).cumsum(1), (1, 0)).to(device)
        padding = self.spec.get("attention_mask")
        if padding is not None and bool(padding.all()):
            padding = None
        if padding is None and segments is None and start == first == 0 and stop <= last:
            return None
        q_col = torch.arange(start, stop, device=device)[None]
        k_col = torch.arange(first, last, device=device)[None]
        q_pos, k_pos = q_col, k_col
        real = None
        if padding is not None:
            padding = padding.to(device=device, dtype=torch.bool)
            left = (padding.cumsum(1) == 0).sum(1, keepdim=True)
            padding = torch.nn.functional.pad(padding, (0, max(0, last - padding.shape[1])))
            q_pos = q_col - left
            k_pos = torch.where(padding[:, first:last], k_col - left, -1)
            real = padding[:, start:stop]
        if segments is None:
            return View(q_pos, k_pos, q_col, k_col, real=real, first=int(start))
        low = min(start, first)
        q_seg, k_seg = segments[:, start - low : stop - low], segments[:, first - low : last - low]
        return View(q_pos, k_pos, q_col, k_col, q_seg, k_seg, real, first=int(start))


def mask(**spec: Any) -> Mask:
    """The mask function: keeps what it was told."""
    return Mask(spec)


def attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None,
    scaling: float | None = None, dropout: float = 0.0, softcap: float | None = None,
    s_aux: Tensor | None = None, position_bias: Tensor | None = None, **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """The attention function: q [B,H,T,K], k [B,G,S,K], v [B,G,S,V] to z [B,T,H,V] under the module's Site.

    Raises ValueError for what has no meaning here: dropout, position biases, 4-D masks.
    """
    listener = getattr(_local, "listener", None)
    causal = kwargs.get("is_causal", getattr(module, "is_causal", True)) is not False
    ours = attention_mask.causal if isinstance(attention_mask, Mask) else attention_mask is None and causal
    if listener is not None and ours:
        listener(module, query, key, value, attention_mask, kwargs.get("sliding_window"))
    site = module.__dict__.get(SITE)
    if site is None and not (ours and isinstance(attention_mask, Mask)):
        dense = attention_mask.dense() if isinstance(attention_mask, Mask) else attention_mask
        return sdpa_attention_forward(
            module, query, key, value, dense, dropout=dropout, scaling=scaling, softcap=softcap,
            position_bias=position_bias, **kwargs,
        )  # fmt: skip
    name = type(module).__name__ if site is None else site.name
    if dropout:
        raise ValueError(f"{name}: attention dropout {dropout} is on; call model.eval() first")
    if position_bias is not None:
        raise ValueError(f"{name}: attention with a position bias is not supported")
    q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    view = None
    if site is None:
        site = site_of(attention_mask, query, key, value)
    if isinstance(attention_mask, Mask):
        if site.window != attention_mask.window:
            raise ValueError(f"{name}: window {site.window}, but its mask has {attention_mask.window}")
        view, keys = attention_mask.view(q.device, k.shape[1])
        k, v = k[:, :keys], v[:, :keys]
    elif attention_mask is not None or q.shape[1] != k.shape[1]:
        raise ValueError(f"{name}: give the padding mask [B,T]; masks of another shape are not supported")
    softcap = None if softcap is None else float(softcap)
    z = attend(site, q, k, v, view=view, scale=scaling, softcap=softcap, sink_logits=s_aux)
    return z.contiguous(), None


def site_of(mask: Mask | int | None, query: Tensor, key: Tensor, value: Tensor, **known: Any) -> Site:
    """A Site for one attention call, as its tensors and its mask (or window) show it."""
    window = mask.window if isinstance(mask, Mask) else mask
    what: dict[str, Any] = {"layer": -1, "name": "", "rope": False, **known}
    if window is None:
        what |= {"kind": "full", "mixer": "full" if what["rope"] else "nope"}
    else:
        chunked = isinstance(mask, Mask) and mask.chunked
        what |= {"kind": "window", "mixer": f"{'chunk' if chunked else 'swa'}:{window}", "window": window}
    what |= {"heads": query.shape[1], "kv_heads": key.shape[1], "key_dim": key.shape[-1]}
    return Site(**what, value_dim=value.shape[-1])


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, mask)


@contextlib.contextmanager
def listening(listener: Callable[..., None]) -> Iterator[None]:
    """Call `listener(module, q, k, v, mask, window)` at every causal attention call of this thread."""
    before = getattr(_local, "listener", None)
    _local.listener = listener
    try:
        yield
    finally:
        _local.listener = before


class Attachment:
    """Turns our attention on in a transformers model, and off again: all of its configs name it, and stand-ins wait
    at the ops of its recurrent mixers, while `on()`.

    One per model, whoever wraps it. Outside, the model runs the attention it came with.
    """

    def __init__(self, model: Any) -> None:
        configs = [model.config, model.config.get_text_config(decoder=True)]
        configs += [m.config for m in model.modules() if hasattr(getattr(m, "config", None), "_attn_implementation")]
        self.configs = list({id(config): config for config in configs}.values())
        self.own = [config._attn_implementation for config in self.configs]
        self.depth = 0
        self.mixers: list[nn.Module] | None = None  # recurrent ones that a survey marked; None: look again
        self.whole: list[nn.Module] = []  # what runs all of them: the model, its backbone
        self._block = contextlib.ExitStack()

    @classmethod
    def of(cls, model: Any) -> Attachment:
        """The model's one, made on first use."""
        found = model.__dict__.get("hybridscope_attachment")
        if found is None:
            found = cls(model)
            model.__dict__["hybridscope_attachment"] = found
        if found.mixers is None and not found.depth:
            found.mixers = [m for m in model.modules() if MARK in m.__dict__]
            models = (m for m in model.modules() if isinstance(m, PreTrainedModel))
            found.whole = [m for m in models if found.mixers and set(found.mixers) <= {*m.modules()}]
        return found

    def __reduce__(self) -> tuple[Any, ...]:
        """A copied model makes its own; one copied while ours is on keeps ours, which computes the same."""
        return type(None), ()

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        """Our attention for the length of a block; nests."""
        with _switching:
            if self.depth == 0:
                self.own = [config._attn_implementation for config in self.configs]
                self._set([NAME] * len(self.own))
                self._block.enter_context(standing_in(self.mixers or ()))
                self._block.enter_context(framed(self.mixers or ()))
                self._block.enter_context(checked(self.whole, [m.__dict__[MARK].site for m in self.mixers or ()]))
            self.depth += 1
        try:
            yield
        finally:
            with _switching:
                self.depth -= 1
                if self.depth == 0:
                    self._set(self.own)
                    self._block.close()

    def _set(self, names: list[str | None]) -> None:
        for config, name in zip(self.configs, names, strict=True):
            config._attn_implementation_internal = name
