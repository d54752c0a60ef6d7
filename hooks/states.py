"""States of recurrent sites after chosen tokens, for record(states=...).

A site's tap gets the terms of its recurrence. They are run once more, from one wanted token to the next, and only the
states there are kept: the pass itself stays as it was, bitwise, and T states never exist at once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .caps import refuse_opaque
from .columns import batches, local_columns
from .kernels.dispatch import recur
from .kernels.recurrence import Read
from .passes import Pass
from .sites import Site

TERMS = {"q", "k", "v", "log_decay", "beta", "a", "b"}


class States:
    """States after token columns `columns`: "last", a list [P], or [B,P]."""

    def __init__(self, model: Any, columns: Any) -> None:
        self.sites = [site for site in model.sites if site.kind == "recurrent"]
        if not self.sites:
            raise ValueError(f"states: this model has no recurrent sites; its mixers: {_mixers(model)}")
        for site in self.sites:
            refuse_opaque(site, "record(states=...)")
        self._columns = columns.cpu() if isinstance(columns, Tensor) else columns
        self._kept: dict[tuple[int, int], list[tuple[Tensor, bool]]] = {}
        self.first = 0  # column at which the running call starts

    def read(self, layer: int, index: int) -> Tensor:
        """States [N,P,H,K,V] of one site: batches concatenated, cached calls along P."""
        if all((site.layer, site.index) != (layer, index) for site in self.sites):
            places = ", ".join(str((site.layer, site.index)) for site in self.sites)
            raise ValueError(f"layer {layer} site {index} is not recurrent; (layer, site) that are: {places}")
        parts = self._kept.get((layer, index))
        if not parts:
            raise ValueError("states: nothing recorded; run a forward pass inside the record() block")
        joined = [torch.cat(parts, 1) for parts in batches(parts)]
        if len({states.shape[1] for states in joined}) > 1:
            raise ValueError("states: passes of this block recorded different numbers of states; record them apart")
        return torch.cat(joined)

    @torch.no_grad()
    def tap(self, site: Site, terms: dict[str, Tensor], run: Pass, read: Read) -> None:
        """The wanted states of one call of `site`, from the compacted terms of its recurrence."""
        if site.cap is not None:
            raise ValueError(
                f"states: {site.name} is capped at {site.cap} tokens, and under a cap every token reads a sum of its "
                f"own, so there is no single state; record outside the cap, or lift it: cap({{{site.layer}: None}})"
            )
        if self.first and run.cache is None:
            raise ValueError(f"states: {site.name} continues a foreign cache; give the whole context in one call")
        count = self._counts(run)
        if count is None:
            return
        terms = {name: x.detach() for name, x in terms.items() if name in TERMS}
        old = run.state(site.name)
        state = None if old is None else old.state
        B, H, K, V = run.batch, site.heads, terms["k"].shape[-1], terms["v"].shape[-1]
        dtype = torch.promote_types(terms["v"].dtype, torch.float32) if state is None else state.dtype
        kept = torch.zeros(B, count.shape[1], H, K, V, dtype=dtype, device=terms["v"].device)
        at = 0
        for stop in count.unique().tolist():
            if stop > at:
                _, state = recur(**{name: x[:, at:stop] for name, x in terms.items()}, state=state, read=read)
            if state is not None:  # None: nothing was read yet
                sample, place = (count == stop).nonzero(as_tuple=True)
                kept[sample, place] = state[sample].to(dtype)
            at = stop
        self._kept.setdefault((site.layer, site.index), []).append((kept, self.first > 0))

    def _counts(self, run: Pass) -> Tensor | None:
        """How many real tokens of this call lie before each wanted state, [B,P]; None: no state is wanted of it."""
        real = run.real
        if isinstance(self._columns, str):
            return run.count.expand(run.batch)[:, None]
        p = local_columns("states: columns", self._columns, run.batch, run.length, self.first)
        if p is None:
            return None
        p = p.to(run.local.device).expand(run.batch, -1)
        return p + 1 if real is None else real.cumsum(1).gather(1, p)


def _mixers(model: Any) -> str:
    return ", ".join(dict.fromkeys(site.mixer for site in model.sites))
