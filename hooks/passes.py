"""One forward pass over [B,T] tokens: padding, positions, and the decode cache of each site.

Positions count real tokens, so padding on the left, on the right or in the middle changes nothing for the
tokens that are there. *Columns* are indices into the caller's token matrix, padding included; cached calls
count on. Users name rows and keys by column; kernels work with positions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .documents import Documents
from .kernels.windowed import Ring

if TYPE_CHECKING:
    from .sites import Site


Shapes = dict[str, tuple[int, ...]]
"""What an entry of a cache holds, by name: its shape, without the tokens that keys and values are kept of."""


class Cache:
    """Decode state, one entry per site, and the columns seen; grows as the model is called with `cache=`."""

    def __init__(self) -> None:
        self.sites: dict[str, KVCache | StateCache] = {}
        self.columns = 0

    def check_caps(self, sites: Iterable[Site]) -> None:
        """ValueError where a recurrent site's cap is not the one its state was made under; before any site runs, so
        that the refusal leaves the cache as it was."""
        for site in sites:
            entry = self.sites.get(site.name)
            if isinstance(entry, StateCache) and entry.cap != site.cap:
                raise ValueError(
                    f"{site.name}: the cap of a recurrent site cannot change in the middle of a context "
                    f"(cache made with cap={entry.cap}, now {site.cap}); start a new cache"
                )

    def check_shapes(self, expected: Mapping[str, Shapes]) -> None:
        """ValueError where the cache is of another model or another number of samples; before any site runs, too."""
        if not self.sites:
            return
        for name in [*expected, *(name for name in self.sites if name not in expected)]:
            entry = self.sites.get(name)
            found, wanted = {} if entry is None else entry.shapes(), expected.get(name, {})
            if found != wanted:
                raise ValueError(
                    f"{name}: the cache holds {_listed(found)}; this model expects {_listed(wanted)} (the first axis: "
                    "samples). It was made by another model or with other samples; start a new cache"
                )


@dataclasses.dataclass
class KVCache:
    """Keys [B,S,G,K] and values [B,S,G,V], their positions (padding: -1) and columns [1 or B,S]. `plain`: they are
    neighbours, in order and without padding, so that nobody has to look at positions; not so once keys are taken out.

    A window site keeps the keys that its native window can still reach; caps mask, they drop nothing.
    """

    k: Tensor
    v: Tensor
    position: Tensor
    column: Tensor
    seen: Tensor
    columns: int
    plain: bool = False

    def shapes(self) -> Shapes:
        return {name: (x.shape[0], *x.shape[2:]) for name, x in (("keys", self.k), ("values", self.v))}

    def trim(self, window: int) -> None:
        """Drop keys that no later query of a window site can see."""
        if self.plain:
            first = self.k.shape[1] - (window - 1)
            if first > 0:  # copies: views would keep what is dropped alive
                kept = (x[:, first:].clone() for x in (self.k, self.v, self.position, self.column))
                self.k, self.v, self.position, self.column = kept
            return
        newest = self.position.amax(1, keepdim=True)
        keep = (self.position > newest + 1 - window) & (self.position >= 0)
        n = int(keep.sum(1).max())
        if n == self.k.shape[1]:
            return
        order = keep.int().argsort(dim=1, stable=True)[:, keep.shape[1] - n :]  # kept keys last, in order
        kept = keep.gather(1, order)
        self.position = torch.where(kept, self.position.gather(1, order), -1)
        self.column = self.column.expand_as(keep).gather(1, order)
        wide = order.expand(self.k.shape[0], n)[..., None, None]
        self.k = self.k.gather(1, wide.expand(-1, -1, *self.k.shape[2:]))
        self.v = self.v.gather(1, wide.expand(-1, -1, *self.v.shape[2:]))


@dataclasses.dataclass
class StateCache:
    """State [B,H,K,V] (or, under a cap, a Ring), the last inputs of the convolution or token shift [B,c-1,D], and
    how many tokens each row has seen [B]."""

    state: Tensor | None
    ring: Ring | None
    conv: Tensor | None
    cap: int | None
    seen: Tensor

    def shapes(self) -> Shapes:
        held = {} if self.state is None else {"state": tuple(self.state.shape)}
        if self.ring is not None:
            for name, x in (("keys", self.ring.keys), ("values", self.ring.values)):
                held[name] = (*x.shape[:2], *x.shape[3:])
        return held if self.conv is None else {**held, "last inputs": tuple(self.conv.shape)}


@dataclasses.dataclass
class View:
    """Where a call's queries and keys stand: positions and columns, each [1 or B, T or S].

    With segments (packed documents, attention chunks) a query sees only keys of its own segment. `real` [B,T]
    marks the queries that are not padding (None: all are). `plain`: queries and keys are the same tokens 0..T-1, which
    kernels are faster on where nobody gives them positions. `newest`: the one query is the last of the keys' tokens,
    which are neighbours, in order. `documents`: what the samples were unpacked from. `first`: the first query's column.
    """

    q_pos: Tensor
    k_pos: Tensor
    q_col: Tensor
    k_col: Tensor
    q_seg: Tensor | None = None
    k_seg: Tensor | None = None
    real: Tensor | None = None
    plain: bool = False
    newest: bool = False
    documents: Documents | None = None
    first: int = 0

    @property
    def where(self) -> dict[str, Tensor | None]:
        """What the kernels take of it."""
        if self.plain:
            return {}
        return {"q_pos": self.q_pos, "k_pos": self.k_pos, "q_seg": self.q_seg, "k_seg": self.k_seg}


class Pass:
    """What the mixers of one pass share. `real` [B,T] marks tokens that are not padding (None: all are); `documents`:
    what its samples were unpacked from."""

    def __init__(
        self, real: Tensor | None, cache: Cache | None, batch: int, length: int, device: torch.device,
        documents: Documents | None = None,
    ) -> None:  # fmt: skip
        self.real = real
        self.documents = documents
        self.cache = cache
        self.length = length
        self.batch = batch
        self.shared: dict[str, Tensor] = {}  # what layers pass on beside the residual stream
        self._made: dict[tuple[Any, ...], tuple[Any, Any]] = {}  # see `once`
        if real is None:
            self.local = torch.arange(length, device=device)[None]
            self.count = torch.full((1,), length, device=device)
            self.order = None
        else:
            self.local = (real.cumsum(1) - 1).clamp(min=0)
            self.count = real.sum(1)
            self.order = (~real).int().argsort(dim=1, stable=True)  # real tokens first, in order

    def attend_to(self, site: Site, k: Tensor, v: Tensor, position: Tensor) -> tuple[Tensor, Tensor, View | None]:
        """Keys and values with those of the cache before them, and the view; None where it is just 0..T-1."""
        if self.cache is None and self.real is None and self.documents is None:
            return k, v, None
        real = self.real
        k_pos = position if real is None else self.once("k_pos", lambda: torch.where(real, position, -1), position)
        columns = self.once("local", lambda: torch.arange(self.length, device=k.device)[None])
        if self.cache is None:
            plain = self.real is None
            view = View(position, k_pos, columns, columns, real=self.real, plain=plain, documents=self.documents)
            return k, v, view
        old = self.cache.sites.get(site.name)
        assert old is None or isinstance(old, KVCache)
        if old is None:
            new = KVCache(k, v, k_pos, columns, self.count, self.length, self.real is None)
        else:
            before = old.columns, old.column, old.position
            columns, column, places = self.once("keys", lambda: self._go_on(old, k_pos), *before, k_pos)
            new = KVCache(
                torch.cat([old.k, k], 1), torch.cat([old.v, v], 1), places, column, self._seen(old.seen),
                old.columns + self.length, old.plain and self.real is None,
            )  # fmt: skip
        self.cache.sites[site.name] = new
        view = View(
            position, new.position, columns, new.column, real=self.real, plain=new.plain and old is None,
            newest=new.plain and self.length == 1, first=new.columns - self.length,
        )  # fmt: skip
        k, v = new.k, new.v
        if site.window is not None:
            new.trim(site.window)
        return k, v, view

    def positions(self, site: Site) -> Tensor:
        """Position of each token of this call, [1 or B,T]."""
        old = self.cache.sites.get(site.name) if self.cache is not None else None
        if old is None:
            return self.local
        return self.once("positions", lambda: self.local + old.seen[:, None], old.seen)

    def once(self, name: str, make: Callable[[], Any], *sources: Any) -> Any:
        """`make()`, or what it gave to another layer that asked for `name` with the same sources, the very tensors.

        Where gradients are wanted each layer makes its own: activation checkpointing may count a layer's operations, as
        its first run and again. torch.compile finds what is equal by itself.
        """
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            return make()
        key = (name, *(id(source) if isinstance(source, Tensor) else source for source in sources))
        if key not in self._made:
            self._made[key] = (make(), sources)  # kept, so that their ids stay theirs
        return self._made[key][0]

    def _seen(self, before: Tensor) -> Tensor:
        return self.once("seen", lambda: before + self.count, before)

    def _go_on(self, old: KVCache, k_pos: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Columns of this call's tokens; columns and positions of all keys."""
        columns = torch.arange(self.length, device=k_pos.device)[None] + old.columns
        return columns, _cat(old.column, columns), _cat(old.position, k_pos)

    def state(self, name: str) -> StateCache | None:
        """What the recurrent site (or token shift) `name` left for this call."""
        old = self.cache.sites.get(name) if self.cache is not None else None
        assert old is None or isinstance(old, StateCache)
        return old

    def keep(self, name: str, old: StateCache | None, inputs: Tensor | None, width: int, **what: Any) -> None:
        """Store what the next call needs: `what`, and the last width-1 of the compacted `inputs` [B,T,D]."""
        if self.cache is None:
            return
        conv = None if inputs is None else self.last(inputs, width - 1, None if old is None else old.conv)
        conv = None if conv is None else conv.clone()  # a view would keep the inputs of the whole call alive
        first = self.once("count", lambda: self.count.expand(self.batch))
        seen = first if old is None else self._seen(old.seen)
        self.cache.sites[name] = StateCache(**{"state": None, "ring": None, "cap": None, **what}, conv=conv, seen=seen)

    def compact(self, x: Tensor) -> Tensor:
        """Move each row's real tokens to the front ([B,T,...]); what trails is padding."""
        if self.order is None:
            return x
        return x.gather(1, self._index(x))

    def restore(self, x: Tensor) -> Tensor:
        """Undo `compact`; padding comes back as zeros."""
        if self.order is None:
            return x
        assert self.real is not None
        out = torch.zeros_like(x).scatter(1, self._index(x), x)
        return out * self.real.view(*self.real.shape, *[1] * (x.ndim - 2)).to(x.dtype)

    def mute(self, x: Tensor) -> Tensor:
        """Zero the padding of a compacted tensor, so that a recurrence passes over it."""
        if self.order is None:
            return x
        steps = torch.arange(self.length, device=x.device)
        return x * (steps < self.count[:, None]).view(*x.shape[:2], *[1] * (x.ndim - 2)).to(x.dtype)

    def last(self, x: Tensor, n: int, before: Tensor | None = None) -> Tensor:
        """The last n real tokens of each row of a compacted tensor [B,T,...]; where there are fewer, `before`
        [B,n,...] (zeros without it) supplies what came earlier."""
        front = x.new_zeros(x.shape[0], n, *x.shape[2:]) if before is None else before
        x = torch.cat([front, x], 1)
        if self.order is None:
            return x[:, x.shape[1] - n :]
        index = (self.count[:, None] + torch.arange(n, device=x.device)).view(-1, n, *[1] * (x.ndim - 2))
        return x.gather(1, index.expand(-1, -1, *x.shape[2:]))

    def _index(self, x: Tensor) -> Tensor:
        assert self.order is not None
        return self.order.view(*self.order.shape, *[1] * (x.ndim - 2)).expand_as(x)


def _listed(shapes: Shapes) -> str:
    return " and ".join(f"{name} {list(shape)}" for name, shape in shapes.items()) or "nothing"


def _cat(x: Tensor, y: Tensor) -> Tensor:
    rows = max(x.shape[0], y.shape[0])
    return torch.cat([x.expand(rows, -1), y.expand(rows, -1)], 1)
