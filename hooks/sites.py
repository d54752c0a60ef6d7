"""Site: one mixer in one layer, what it is, and its run-time switches.

The switches are plain attributes that a forward pass reads; `caps.py` and `record.py` set them inside
context managers and restore them on exit. They never touch weights.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from .config import whole_number


@dataclasses.dataclass(eq=False)
class Site:
    """One mixer in one layer.

    Static: `layer` and `name` (module path), `kind` (full, window, recurrent, conv), `mixer`, query heads
    `heads` (H), `kv_heads` (G), `key_dim` (K), `value_dim` (V), native `window` (None: none),
    `rope`, `conv` (width of its short convolution; 1: none), `index` within the layer, `opaque` (a foreign
    mixer whose inside is not reached: it takes neither cap nor ablation).

    Run time: `cap` (reach limit in tokens), `sinks` (first keys kept visible), `knockout` (hidden edges),
    `edit` (changes outputs z [B,T,H,V], told which tokens [B,T] are real), `tap` (sees queries and keys).
    """

    layer: int
    name: str
    kind: str
    mixer: str
    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None = None
    rope: bool = False
    conv: int = 1
    index: int = 0
    opaque: bool = False

    cap: int | None = dataclasses.field(default=None, repr=False)
    sinks: int = dataclasses.field(default=0, repr=False)
    knockout: tuple[Any, ...] = dataclasses.field(default=(), repr=False)
    edit: Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor] | None = dataclasses.field(
        default=None, repr=False
    )
    tap: Callable[..., None] | None = dataclasses.field(default=None, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        """A copied (or pickled) model starts with its switches off, whatever is active on the original."""
        return {f.name: getattr(self, f.name) if f.repr else f.default for f in dataclasses.fields(self)}

    @property
    def active(self) -> bool:
        """Whether any switch is set."""
        return self.cap is not None or bool(self.knockout or self.edit or self.tap)

    @property
    def softmax(self) -> bool:
        """Whether the site attends with a softmax over keys (and so has attention statistics)."""
        return self.kind in ("full", "window")

    @property
    def reach(self) -> int | None:
        """How many tokens back its output depends on its input, itself counted; None: unbounded."""
        bounds = [b for b in (self.window, self.cap) if b is not None]
        if self.softmax and self.cap is not None and self.sinks:
            return self.window  # the first tokens stay visible from everywhere
        if not bounds:
            return None
        return min(bounds) + (self.conv - 1 if self.softmax else 0)  # keys and queries made of several tokens

    @property
    def span(self) -> dict[str, Any]:
        """What a softmax site sees, for kernels: window and cap in one, sinks within the native window."""
        bounds = [b for b in (self.window, self.cap) if b is not None]
        window = min(bounds) if bounds else None
        sinks = self.sinks if self.cap is not None else 0
        return {"window": window, "sinks": sinks, "limit": self.window if sinks else None}


class Sites(list[Site]):
    """The sites of a model; printing it shows them as a table."""

    def __repr__(self) -> str:
        columns = (
            "layer",
            "index",
            "name",
            "kind",
            "mixer",
            "heads",
            "kv_heads",
            "key_dim",
            "value_dim",
            "window",
            "rope",
        )
        rows = [
            columns,
            *[tuple("-" if (v := getattr(s, c)) is None else str(v) for c in columns) for s in self],
        ]
        widths = [max(len(row[i]) for row in rows) for i in range(len(columns))]
        return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows)

    def select(self, layer: Any, index: Any = None) -> list[Site]:
        """The sites of one layer (or the one with `index`); ValueError names what is not there."""
        if whole_number(layer) is None or (index is not None and whole_number(index) is None):
            site = "" if index is None else f" site {index!r}"
            raise ValueError(f"layer {layer!r}{site}: expected whole numbers")
        found = [s for s in self if s.layer == layer and index in (None, s.index)]
        if not found:
            layers = sorted({s.layer for s in self})
            if layer in layers:
                last = max(s.index for s in self if s.layer == layer)
                raise ValueError(f"layer {layer} site {index} does not exist; it has sites 0..{last}")
            raise ValueError(f"layer {layer} does not exist; this model has sites in layers {layers[0]}..{layers[-1]}")
        return found

    def head(self, head: Any) -> tuple[Site, int]:
        """The site and head number that (layer, head) or (layer, site, head) names; ValueError where it names neither,
        and where the layer has several sites and none is named."""
        try:
            numbers = [_number(part) for part in head]
        except TypeError:
            numbers = []
        if len(numbers) not in (2, 3) or None in numbers:
            raise ValueError(f"head {head!r}: expected (layer, head) or (layer, site, head), whole numbers")
        layer, *index, number = (n for n in numbers if n is not None)
        site, *others = self.select(layer, *index)
        if others:
            count = 1 + len(others)
            raise ValueError(f"head {tuple(head)}: layer {layer} has {count} sites; expected (layer, site, head)")
        if not 0 <= number < site.heads:
            raise ValueError(f"head {tuple(head)}: {site.name} has heads 0..{site.heads - 1}")
        return site, number


def _number(part: Any) -> int | None:
    """A layer, site or head number; a table's columns may hold them as floats."""
    return whole_number(int(part) if isinstance(part, float) and part.is_integer() else part)


_owners: weakref.WeakKeyDictionary[Any, tuple[int, int]] = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def switched(model: Any, changes: list[tuple[Any, str, Any]]) -> Iterator[None]:
    """Set attributes (object, name, value) for the length of a block, then restore them whatever happens.

    One thread at a time: a second one entering while switches are active gets a RuntimeError, since the
    attributes are shared by every forward pass of the model. A compiled model is refused: compiling
    freezes the switches.
    """
    me = threading.get_ident()
    owner, depth = _owners.get(model, (me, 0))
    if owner != me:
        raise RuntimeError("another thread is inside cap/record/ablate/knockout on this model; use a copy of it")
    refuse_compiled(model)
    before = [(target, name, getattr(target, name)) for target, name, _ in changes]
    _owners[model] = (me, depth + 1)
    try:
        for target, name, value in changes:
            setattr(target, name, value)
        yield
    finally:
        for target, name, value in reversed(before):
            setattr(target, name, value)
        if depth:
            _owners[model] = (me, depth)
        else:
            _owners.pop(model, None)


def refuse_compiled(model: Any) -> None:
    """RuntimeError when `model` is compiled in place."""
    if getattr(model, "_compiled_call_impl", None) is not None:
        refuse_switches()


def refuse_switches() -> None:
    """RuntimeError: what a compiled model answers to a switch."""
    if torch.compiler.is_compiling():
        from torch import _dynamo  # costs a second, and is there when compiling

        _dynamo.graph_break()  # leave the graph, so that the error is raised and not traced
    raise RuntimeError("cap, record, ablate, knockout and hooks need the uncompiled module: torch.compile freezes them")
