"""record(): residual-stream vectors and states at chosen positions, and attention statistics of chosen rows.

What is recorded is detached. Only what was asked for is kept: a position is picked out of the residual stream
as it passes, and statistics are computed per row beside the fused attention call, never from a stored T x T
pattern. Under reduce="mean" the rows of a long context are summed a few thousand at a time and not kept.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from .attend import edges
from .caps import refuse_opaque
from .columns import backward_pass, batches, local_columns, spread
from .documents import Documents
from .kernels.attention import ROWS
from .kernels.attention_stats import AttentionStats, KeySets, label_sets, stats_of_rows
from .kernels.implicit_stats import implicit_stats
from .kernels.recurrence import Read
from .kernels.stats_arguments import to_device
from .passes import Pass, View
from .reduce import ROWS as MEAN_ROWS
from .reduce import Mean
from .sites import Site, switched
from .states import States

if TYPE_CHECKING:
    import pandas as pd

Where = Literal["pre", "mid", "post", "delta"]


@dataclasses.dataclass
class Stats:
    """What to record of attention.

    `rows`: query columns, a list or [B,R]; negative ones count from the call's end; None: all. `labels` [B,T]: sets
    of keys, bool or the bits of a uint8, by key column, as they are when the recording begins. `top1`, `distance`:
    whether to find the top key and the mean distance of softmax rows; without them a kernel over all rows takes a
    quarter less time. `histogram`: also the share of attention by log-spaced distance. `reduce="mean"`: only the mean
    over each sample's rows, padding left out (`reduce.MeanStats`), in O(1) memory a head. `recurrent`: also the
    implicit attention of recurrent sites (`kernels/implicit_stats.py`: weights that are signed and no probabilities),
    which needs the whole context in one call. Of packed documents in our own models each is a sample, and rows count
    within it; labels are those of the packed tokens.
    """

    rows: Sequence[int] | Tensor | None = None
    labels: Tensor | None = None
    top1: bool = True
    distance: bool = True
    histogram: bool = False
    reduce: str | None = None
    recurrent: bool = False

    def __post_init__(self) -> None:
        if self.reduce not in (None, "mean"):
            raise ValueError(f'reduce={self.reduce!r}: expected "mean" or None')
        if self.labels is not None and (not isinstance(self.labels, Tensor) or self.labels.ndim not in (2, 3)):
            what = tuple(self.labels.shape) if isinstance(self.labels, Tensor) else type(self.labels).__name__
            raise ValueError(f"labels: {what}; expected a bool or uint8 tensor [B,T] (or bool [B,T,sets])")


class Record:
    """What a `record()` block saw, over all forward passes inside it."""

    def __init__(self, model: Any, resid: Any, stats: Stats | None, states: Any = None) -> None:
        self._sites = {(s.layer, s.index): s for s in model.sites}
        self._depth: int = model.depth
        self._positions = resid.cpu() if isinstance(resid, Tensor) else resid
        rows = None if stats is None else stats.rows
        self._rows = rows.cpu() if isinstance(rows, Tensor) else rows
        self._spec = stats
        labels = None if stats is None else stats.labels
        self._labels = None if labels is None else label_sets(labels, *labels.shape[:2]).clone()
        self._resid: dict[tuple[int, str], list[tuple[Tensor, bool]]] = {}
        self._stats: dict[tuple[int, int], list[tuple[tuple[Tensor, AttentionStats], bool]]] = {}
        self._means: dict[tuple[int, int], list[Mean]] = {}
        wants = stats is not None and stats.recurrent
        self._recurrent = [s for s in model.sites if wants and s.kind == "recurrent"]
        for site in self._recurrent:
            refuse_opaque(site, "record(stats=hs.Stats(recurrent=True))")
        self._states = None if states is None else States(model, states)
        self._last: Tensor | None = None
        self._first = 0
        self._inside = backward_pass()
        self._places: dict[str, tuple[tuple[int, ...], Tensor | None]] = {}
        self._moved: tuple[Tensor | None, dict[torch.device, Tensor]] = None, {}
        self._sets: tuple[tuple[Any, ...], KeySets | None] = (), None

    # Read-out

    def resid(self, layer: int, where: Where = "post") -> Tensor:
        """Residual stream [N,P,D] at the positions asked for: batches concatenated, cached calls along P.

        `pre`: before the mixer; `mid`: after it; `post`: after the MLP (in the last layer, before the final
        norm); `delta`: mid - pre, what the mixer adds.
        """
        if where == "delta":
            mid = self.resid(layer, "mid")
            return mid - self.resid(layer, "pre").to(mid.device)  # a layer's input may come from another device
        if where not in ("pre", "mid", "post"):
            raise ValueError(f'where={where!r}: expected "pre", "mid", "post" or "delta"')
        if self._positions is None:
            raise ValueError("resid: not recorded; ask for it with record(resid=...)")
        if not 0 <= layer < self._depth:
            raise ValueError(f"layer {layer} does not exist; this model has layers 0..{self._depth - 1}")
        if (layer, where) not in self._resid and (layer, "pre") in self._resid:
            raise ValueError(f"resid: no {where!r} point is known in layer {layer} of this model; pre and post are")
        if (layer, where) not in self._resid:
            raise ValueError("resid: no forward pass ran inside the record() block")
        joined = [torch.cat(b, 1) for b in batches(self._resid[layer, where])]
        if len({b.shape[1] for b in joined}) > 1:
            raise ValueError("resid: passes of this block recorded different numbers of positions; record them apart")
        return torch.cat(joined)

    def stats(self, layer: int, site: int = 0) -> AttentionStats:
        """Statistics [N,R,H] of one site: batches concatenated, cached calls along the rows.

        Of a recurrent site `ImplicitStats`; under reduce="mean" `MeanStats` [N,1,H], over all rows of all calls.
        """
        return self._read(layer, site)[1]

    def state(self, layer: int, site: int = 0) -> Tensor:
        """States [N,P,H,K,V] of a recurrent site after the columns asked for: batches concatenated, cached calls along
        P. At padding it is the state after the last real token before it."""
        if self._states is None:
            raise ValueError("states: not recorded; ask for them with record(states=...)")
        return self._states.read(layer, site)

    def rows(self, layer: int, site: int = 0) -> Tensor:
        """Columns of the recorded query rows, [1 or N, R]."""
        rows = self._read(layer, site)[0]
        if rows is None:
            raise ValueError('rows: none are kept under reduce="mean"; stats(...).rows counts them')
        return rows

    def table(self) -> pd.DataFrame:
        """One record per sample, layer, site, head and row; mass on key set n is column `mass_n`.

        `kind` is the site's: in rows of kind "recurrent" mass, entropy and distance are those of shares of absolute
        weight, not of a probability. Under reduce="mean" there is one record per sample, layer, site and head, with
        `rows` counted in place of `row`, and no `top1`.
        """
        import pandas as pd

        frames = []
        for layer, index in sorted({**self._stats, **self._means}):
            rows, s = self._read(layer, index)
            N, R, H = s.entropy.shape
            grid = torch.meshgrid(torch.arange(N), torch.arange(R), torch.arange(H), indexing="ij")
            data: dict[str, Any] = {
                "sample": grid[0].flatten(), "layer": layer, "site": index, "kind": self._sites[layer, index].kind,
                "head": grid[2].flatten(),
            }  # fmt: skip
            if rows is not None:
                data["row"] = rows.expand(N, R)[..., None].expand(N, R, H).flatten().cpu()
            for name, value in {**s.fields(), "entropy_norm": s.entropy_norm}.items():
                if value.ndim == 4:  # sets or bins
                    data.update({f"{name}_{n}": value[..., n].flatten().cpu() for n in range(value.shape[-1])})
                else:
                    data[name] = value.flatten().cpu()
            frames.append(pd.DataFrame(data))
        if not frames:
            raise ValueError("table: no attention statistics were recorded; ask for them with record(stats=...)")
        return pd.concat(frames, ignore_index=True)

    def _read(self, layer: int, index: int) -> tuple[Tensor | None, AttentionStats]:
        site = self._sites.get((layer, index))
        if site is None:
            raise ValueError(f"layer {layer} site {index} does not exist in this model")
        if not site.softmax and site not in self._recurrent:
            more = "; hs.Stats(recurrent=True) records its implicit attention" if site.kind == "recurrent" else ""
            raise ValueError(f"{site.name} is {site.kind} ({site.mixer}): it has no softmax statistics{more}")
        if means := self._means.get((layer, index)):
            return None, Mean.of(means)
        parts = self._stats.get((layer, index))
        if not parts:
            raise ValueError("stats: nothing recorded; ask with record(stats=...) and run a forward pass inside")
        joined = [(torch.cat([r for r, _ in b], 1), _cat([s for _, s in b], 1)) for b in batches(parts)]
        if len({s.entropy.shape[1] for _, s in joined}) > 1:
            raise ValueError("stats: passes of this block recorded different numbers of rows; record them apart")
        if len(joined) == 1:
            return joined[0]
        rows = torch.cat([r.expand(s.entropy.shape[0], -1) for r, s in joined])
        return rows, _cat([s for _, s in joined], 0)

    # Called from forward passes

    def start(self, real: Tensor | None, first: int = 0, shape: tuple[int, int] | None = None) -> None:
        """A forward pass over `shape` (B, T) begins at column `first`; `real` [B,T] marks its tokens that are not
        padding."""
        self._first = first
        if self._states is not None:
            self._states.first = first
        if first and self._recurrent and shape is not None and self._wanted(*shape, first) is not None:
            raise ValueError(
                f"stats: {self._recurrent[0].name} is recurrent, and its state holds no keys of the {first} tokens of "
                "earlier calls; with recurrent=True give the whole context in one call"
            )
        self._last = None if real is None else (torch.arange(real.shape[1], device=real.device) * real).amax(1)

    def keep(self, layer: int, where: str, x: Tensor) -> None:
        """Pick the wanted columns out of a residual stream x [B,T,D]."""
        if self._positions is None or backward_pass() != self._inside:
            return
        B, T, D = x.shape
        if isinstance(self._positions, str):
            p = torch.full((B, 1), T - 1, device=x.device) if self._last is None else self._last[:, None].to(x.device)
        else:
            p = self._place("resid: positions", self._positions, B, T, self._first)
            p = None if p is None else to_device(p, x.device)
        if p is not None:
            picked = x.detach().gather(1, p.expand(B, -1)[..., None].expand(-1, -1, D))
            self._resid.setdefault((layer, where), []).append((picked, self._first > 0))

    @torch.no_grad()
    def tap(
        self, site: Site, q: Tensor, k: Tensor, view: View | None, scale: float | None = None,
        softcap: float | None = None, sink_logits: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Statistics of the wanted rows of one call of `site`, under its window, cap and knockouts."""
        assert self._spec is not None
        B, T = q.shape[:2]
        first = 0 if view is None else view.first
        local = self._wanted(B, T, first)
        if local is None:
            return
        k_col = None if view is None else view.k_col
        options: dict[str, Any] = {
            "scale": scale, "softcap": softcap, "sink_logits": sink_logits,
            "top1": self._spec.top1, "distance": self._spec.distance, "histogram": self._spec.histogram, **site.span,
            **({} if view is None else view.where),
        }  # fmt: skip
        q, k, every = q.detach(), k.detach(), self._spec.rows is None
        sets = self._key_sets(k_col, B, k.shape[1], k.device, None if view is None else view.documents)

        def some(rows: Tensor) -> AttentionStats:
            if site.knockout:
                options["blocked"] = _hidden(site, rows + first, view, B, k.shape[1])
            stats = stats_of_rows(q, k, None if every and rows.shape[1] == T else rows, sets, **options)
            if view is not None:
                stats.top1 = view.k_col.expand(B, -1).gather(1, stats.top1.flatten(1)).view_as(stats.top1)
            return stats

        # Hidden edges take rows x keys: a few rows at a time.
        rows, real = self._there(local, q.device), None if view is None else view.real
        self._store(site, some, rows, first, real, ROWS if site.knockout else None)

    @torch.no_grad()
    def tap_recurrent(self, site: Site, terms: dict[str, Tensor], run: Pass, read: Read) -> None:
        """The same of a recurrent site, from the compacted terms of its recurrence, under its cap."""
        assert self._spec is not None
        B, T, device = run.batch, run.length, terms["q"].device
        local = self._wanted(B, T, self._first)
        if local is None:
            return
        assert self._first == 0  # `start` refused
        order, histogram = run.order, self._spec.histogram
        k_col = order
        if order is None and run.cache is not None:
            k_col = torch.arange(T, device=device)[None]
        place = None if order is None else order.argsort(1)  # where each column went
        sets = self._key_sets(k_col, B, T, device, run.documents)
        labels = None if sets is None else sets.labels
        terms = {name: x.detach() for name, x in terms.items() if name != "v"}

        def some(rows: Tensor) -> AttentionStats:
            at = rows if place is None else place.gather(1, rows.expand(B, -1))
            stats = implicit_stats(
                **terms, rows=at, labels=labels, cap=site.cap, conv=site.conv, read=read, histogram=histogram
            )
            if order is not None and run.real is not None:
                stats.top1 = order.gather(1, stats.top1.flatten(1)).view_as(stats.top1)
                stats.visible = stats.visible * run.real.gather(1, rows.expand(B, -1))[..., None]
            return stats

        self._store(site, some, self._there(local, device), 0, run.real)

    def _wanted(self, B: int, T: int, first: int) -> Tensor | None:
        """Indices of the rows to record, [1 or B,R], in a call of T tokens that starts at column `first`; on the CPU,
        where checking them waits for no GPU."""
        return self._place("stats: rows", self._rows, B, T, first)

    def _place(self, what: str, columns: Any, *call: int) -> Tensor | None:
        """`local_columns` of a call (B, T, first), None for all of them, found once and not in every layer."""
        if self._places.get(what, (None,))[0] != call:
            found = torch.arange(call[1])[None] if columns is None else local_columns(what, columns, *call)
            self._places[what] = call, found
        return self._places[what][1]

    def _there(self, rows: Tensor, device: torch.device) -> Tensor:
        """Rows on a device, moved once a call and not by every layer."""
        if self._moved[0] is not rows:
            self._moved = rows, {}
        moved = self._moved[1]
        if device not in moved:
            moved[device] = to_device(rows, device)
        return moved[device]

    def _key_sets(
        self, k_col: Tensor | None, B: int, keys: int, device: torch.device, documents: Documents | None
    ) -> KeySets | None:
        """The labels of a call's keys, by key index; made once for layers that keep the same keys."""
        if self._labels is None:
            return None
        call, had = (k_col, documents, B, keys, device), self._sets[0]
        if not had or any(x is not y for x, y in zip(call[:2], had[:2], strict=True)) or call[2:] != had[2:]:
            labels = to_device(self._labels, device)
            labels = spread(labels if documents is None else documents.labels(labels), k_col, B, keys)
            self._sets = call, KeySets(labels, B, keys)
        return self._sets[1]

    def _store(
        self, site: Site, some: Callable[[Tensor], AttentionStats], rows: Tensor, first: int, real: Tensor | None,
        at_once: int | None = None,
    ) -> None:  # fmt: skip
        """Keep the statistics that `some` makes of a few rows [1 or B,r] of this call, or add them to the mean."""
        assert self._spec is not None
        key = (site.layer, site.index)
        if self._spec.reduce is None:
            step = max(1, at_once or rows.shape[1])
            stats = _cat([some(r) for r in rows.split(step, 1)], 1)
            self._stats.setdefault(key, []).append(((rows + first if first else rows, stats), first > 0))
            return
        means = self._means.setdefault(key, [])
        if not (first and means):
            means.append(Mean())
        for r in rows.split(min(at_once or MEAN_ROWS, MEAN_ROWS), 1):
            kept = None if real is None else real.gather(1, r.expand(real.shape[0], -1))
            means[-1].add(some(r), kept)


@contextlib.contextmanager
def record(
    model: Any, *, resid: Any, stats: bool | Sequence[int] | Tensor | Stats, states: Any = None
) -> Iterator[Record]:
    """See `Instrumented.record`."""
    for name, columns in (("resid", resid), ("states", states)):
        if isinstance(columns, str) and columns != "last":
            raise ValueError(f'{name}={columns!r}: expected "last", a list of columns, [B,P], or None')
    spec: Stats | None
    if isinstance(stats, bool):
        spec = Stats() if stats else None
    else:
        if isinstance(stats, str | dict):
            raise ValueError(f"stats={stats!r}: expected True, a list of rows, [B,R], or hs.Stats(...)")
        spec = stats if isinstance(stats, Stats) else Stats(rows=stats)
    rec = Record(model, resid, spec, states)
    taps: list[tuple[Site, Callable[..., None]]] = []
    if spec is not None:
        taps += [(s, rec.tap) for s in model.sites if s.softmax]
        taps += [(s, rec.tap_recurrent) for s in rec._recurrent]
    if rec._states is not None:
        taps += [(s, rec._states.tap) for s in rec._states.sites]
    joined = {s: s.tap for s, _ in taps}
    for site, tap in taps:
        joined[site] = _both(joined[site], tap)
    changes: list[tuple[Any, str, Any]] = [(site, "tap", tap) for site, tap in joined.items()]
    if resid is not None or states is not None or (spec is not None and spec.recurrent):
        changes.append((model, "recorders", (*model.recorders, rec)))
    with switched(model, changes):
        yield rec


def _both(outer: Callable[..., None] | None, inner: Callable[..., None]) -> Callable[..., None]:
    inside = backward_pass()

    def tap(*args: Any, **score: Any) -> None:
        if outer is not None:
            outer(*args, **score)
        if backward_pass() == inside:
            inner(*args, **score)

    return tap


def _cat(parts: list[AttentionStats], dim: int) -> AttentionStats:
    return parts[0] if len(parts) == 1 else type(parts[0]).cat(parts, dim)


def _hidden(site: Site, rows: Tensor, view: View | None, batch: int, keys: int) -> Tensor:
    """Edges hidden from the query columns `rows`, [B,R,1 or H,S]."""
    hidden = edges(site, rows, view, batch, keys)
    assert hidden is not None
    return hidden.expand(batch, -1, -1, -1)
