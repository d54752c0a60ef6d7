"""record(): residual-stream vectors at chosen positions and attention statistics of chosen rows.

What is recorded is detached. Only what was asked for is kept: a position is picked out of the residual stream as it
passes, and statistics are computed per row beside the fused attention call, never from a stored T x T pattern.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from .attend import edges
from .kernels.attention_stats import AttentionStats, attention_stats
from .passes import View
from .sites import Site, switched

if TYPE_CHECKING:
    import pandas as pd

Where = Literal["pre", "mid", "post", "delta"]


@dataclasses.dataclass
class Stats:
    """What to record of softmax attention.

    `rows`: query columns, a list or [B,R]; negative ones count from the call's end; None: all. `labels` [B,T]: key
    sets, bool or the bits of a uint8, by key column.
    """

    rows: Sequence[int] | Tensor | None = None
    labels: Tensor | None = None


class Record:
    """What a `record()` block saw, over all forward passes inside it."""

    def __init__(self, model: Any, resid: Any, stats: Stats | None) -> None:
        self._sites = {(s.layer, s.index): s for s in model.sites}
        self._layers = sorted({s.layer for s in model.sites})
        self._positions = resid
        self._spec = stats
        self._resid: dict[tuple[int, str], list[Tensor]] = {}
        self._stats: dict[tuple[int, int], list[tuple[Tensor, AttentionStats, bool]]] = {}
        self._last: Tensor | None = None

    # Read-out

    def resid(self, layer: int, where: Where = "post") -> Tensor:
        """Residual stream [N,P,D] at the positions asked for, batches concatenated.

        `pre`: before the mixer; `mid`: after it; `post`: after the MLP (the last layer's before the final norm);
        `delta`: mid - pre, what the mixer adds.
        """
        if where == "delta":
            return self.resid(layer, "mid") - self.resid(layer, "pre")
        if where not in ("pre", "mid", "post"):
            raise ValueError(f'where={where!r}: expected "pre", "mid", "post" or "delta"')
        if self._positions is None:
            raise ValueError("resid: not recorded; ask for it with record(resid=...)")
        if layer not in self._layers:
            raise ValueError(f"layer {layer} does not exist; this model has layers 0..{self._layers[-1]}")
        if (layer, where) not in self._resid:
            raise ValueError("resid: no forward pass ran inside the record() block")
        return torch.cat(self._resid[layer, where])

    def stats(self, layer: int, site: int = 0) -> AttentionStats:
        """Statistics [N,R,H] of one softmax site: batches concatenated, cached calls continued along the rows."""
        return self._read(layer, site)[1]

    def rows(self, layer: int, site: int = 0) -> Tensor:
        """Columns of the recorded query rows, [1 or N, R]."""
        return self._read(layer, site)[0]

    def table(self) -> pd.DataFrame:
        """One record per sample, layer, site, head and row; mass on key set n is column `mass_n`."""
        import pandas as pd

        frames = []
        for layer, index in sorted(self._stats):
            rows, s = self._read(layer, index)
            N, R, H = s.entropy.shape
            grid = torch.meshgrid(torch.arange(N), torch.arange(R), torch.arange(H), indexing="ij")
            data: dict[str, Any] = {
                "sample": grid[0].flatten(), "layer": layer, "site": index, "head": grid[2].flatten(),
                "row": rows.expand(N, R)[..., None].expand(N, R, H).flatten().cpu(),
            }  # fmt: skip
            for name, value in {**s.fields(), "entropy_norm": s.entropy_norm}.items():
                if name == "mass":
                    data.update({f"mass_{n}": value[..., n].flatten().cpu() for n in range(value.shape[-1])})
                else:
                    data[name] = value.flatten().cpu()
            frames.append(pd.DataFrame(data))
        if not frames:
            raise ValueError("table: no attention statistics were recorded; ask for them with record(stats=...)")
        return pd.concat(frames, ignore_index=True)

    def _read(self, layer: int, index: int) -> tuple[Tensor, AttentionStats]:
        site = self._sites.get((layer, index))
        if site is None:
            raise ValueError(f"layer {layer} site {index} does not exist in this model")
        if not site.softmax:
            raise ValueError(f"{site.name} is {site.kind} ({site.mixer}): it has no softmax statistics")
        parts = self._stats.get((layer, index))
        if not parts:
            raise ValueError("stats: nothing recorded; ask with record(stats=...) and run a forward pass inside")
        batches: list[list[tuple[Tensor, AttentionStats]]] = []
        for rows, stats, continues in parts:
            if continues and batches:
                batches[-1].append((rows, stats))
            else:
                batches.append([(rows, stats)])
        joined = [(torch.cat([r for r, _ in b], 1), AttentionStats.cat([s for _, s in b], 1)) for b in batches]
        if len({s.entropy.shape[1] for _, s in joined}) > 1:
            raise ValueError("stats: passes of this block recorded different numbers of rows; record them apart")
        if len(joined) == 1:
            return joined[0]
        rows = torch.cat([r.expand(s.entropy.shape[0], -1) for r, s in joined])
        return rows, AttentionStats.cat([s for _, s in joined], 0)

    # Called from forward passes

    def start(self, real: Tensor | None) -> None:
        """A forward pass begins; `real` [B,T] marks its tokens that are not padding."""
        self._last = None if real is None else (torch.arange(real.shape[1], device=real.device) * real).amax(1)

    def keep(self, layer: int, where: str, x: Tensor) -> None:
        """Pick the wanted columns out of a residual stream x [B,T,D]."""
        B, T, D = x.shape
        if isinstance(self._positions, str):
            p = torch.full((B, 1), T - 1, device=x.device) if self._last is None else self._last[:, None]
        else:
            p = torch.as_tensor(self._positions, device=x.device, dtype=torch.int64)
            p = p.expand(B, -1) if p.ndim == 1 else p
            if p.ndim != 2 or p.shape[0] != B:
                raise ValueError(f"resid: positions of shape {tuple(p.shape)}; expected [P] or [{B},P]")
            if p.numel() and (int(p.min()) < -T or int(p.max()) >= T):
                raise ValueError(f"resid: positions {int(p.min())}..{int(p.max())} do not fit {T} tokens")
            p = torch.where(p < 0, p + T, p)
        picked = x.detach().gather(1, p[..., None].expand(-1, -1, D))
        self._resid.setdefault((layer, where), []).append(picked)

    @torch.no_grad()
    def tap(self, site: Site, q: Tensor, k: Tensor, view: View | None, scale: float | None) -> None:
        """Statistics of the wanted rows of one call of `site`, under its window, cap and knockouts."""
        assert self._spec is not None
        B, T = q.shape[:2]
        first = 0 if view is None else int(view.q_col[0, 0])
        local = self._local_rows(B, T, first, q.device)
        if local is None:
            return
        labels = None if self._spec.labels is None else _spread(self._spec.labels.to(k.device), view, B, k.shape[1])
        hidden = edges(site, local + first, view, B, k.shape[1]) if site.knockout else None
        where: dict[str, Any] = {} if view is None else {"q_pos": view.q_pos, "k_pos": view.k_pos}
        stats = attention_stats(
            q.detach(), k.detach(), rows=local, scale=scale, labels=labels, blocked=hidden, **site.span, **where
        )
        if view is not None:
            stats.top1 = view.k_col.expand(B, -1).gather(1, stats.top1.flatten(1)).view_as(stats.top1)
        self._stats.setdefault((site.layer, site.index), []).append((local + first, stats, first > 0))

    def _local_rows(self, B: int, T: int, first: int, device: torch.device) -> Tensor | None:
        assert self._spec is not None
        if self._spec.rows is None:
            return torch.arange(T, device=device)[None]
        rows = torch.as_tensor(self._spec.rows, device=device, dtype=torch.int64)
        rows = rows[None] if rows.ndim == 1 else rows
        if rows.ndim != 2 or rows.shape[0] not in (1, B):
            raise ValueError(f"stats: rows of shape {tuple(rows.shape)}; expected [R] or [{B},R]")
        rows = torch.where(rows < 0, rows + T, rows - first)
        inside = (rows >= 0) & (rows < T)
        if first == 0 and not bool(inside.all()):
            raise ValueError(f"stats: rows {rows[~inside].tolist()} do not fit {T} tokens")
        if first and rows.shape[0] == 1:
            rows = rows[:, inside[0]]
        elif first and not bool(inside.all()):
            return None
        return rows if rows.shape[1] else None


@contextlib.contextmanager
def record(model: Any, *, resid: Any, stats: bool | Sequence[int] | Tensor | Stats) -> Iterator[Record]:
    """See `Instrumented.record`."""
    if isinstance(resid, str) and resid != "last":
        raise ValueError(f'resid={resid!r}: expected "last", a list of columns, [B,P], or None')
    spec: Stats | None
    if isinstance(stats, bool):
        spec = Stats() if stats else None
    else:
        spec = stats if isinstance(stats, Stats) else Stats(rows=stats)
    rec = Record(model, resid, spec)
    changes: list[tuple[Any, str, Any]] = []
    if spec is not None:
        changes += [(s, "tap", _both(s.tap, rec.tap)) for s in model.sites if s.softmax]
    if resid is not None:
        changes.append((model, "recorders", (*model.recorders, rec)))
    with switched(model, changes):
        yield rec


def _both(outer: Callable[..., None] | None, inner: Callable[..., None]) -> Callable[..., None]:
    if outer is None:
        return inner

    def tap(*args: Any) -> None:
        outer(*args)
        inner(*args)

    return tap


def _spread(labels: Tensor, view: View | None, batch: int, keys: int) -> Tensor:
    """Labels by key column [1 or B, T] as labels by key index [B,S]; columns beyond them have none."""
    if view is None:
        if labels.shape[-1] != keys or labels.ndim != 2:
            raise ValueError(f"labels: shape {tuple(labels.shape)}; expected [{batch},{keys}]")
        return labels.expand(batch, -1)
    inside = view.k_col < labels.shape[1]
    picked = labels.expand(batch, -1).gather(1, view.k_col.expand(batch, -1).clamp(max=labels.shape[1] - 1))
    return picked * inside
