"""Attention statistics averaged over rows as they come."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from .kernels.attention_stats import AttentionStats

ROWS = 4096  # rows whose values exist at once where only their mean is kept


@dataclasses.dataclass(kw_only=True)
class MeanStats(AttentionStats):
    """Means over the recorded rows of each sample, each [N,1,H] (`mass` [N,1,H,sets]); padding rows are left out.

    `rows` [N,1,H] counts them; where there is none, means are NaN. `entropy_norm` is the mean of the rows' own;
    `visible` a mean number; `top1` NaN throughout, as a mean of keys is no key. `signed` and `signed_total`: of
    recurrent sites (`ImplicitStats`), else None.
    """

    rows: Tensor
    norm: dataclasses.InitVar[Tensor]
    signed: Tensor | None = None
    signed_total: Tensor | None = None

    def __post_init__(self, norm: Tensor) -> None:
        self._norm = norm

    @property
    def entropy_norm(self) -> Tensor:
        return self._norm

    def fields(self) -> dict[str, Tensor]:
        """Name to tensor, of what was asked for and has a mean."""
        every = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "top1"}
        return {name: value for name, value in every.items() if value is not None and value.shape[-1]}


class Mean:
    """Sums over rows, in fp64: [B,1,H] a field whatever the number of rows."""

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self.rows: Tensor | None = None
        self.dtype = torch.float32

    def add(self, s: AttentionStats, real: Tensor | None) -> None:
        """Statistics of some rows, `real` [B,R] those that are not padding (None: all)."""
        B, R, H = s.entropy.shape
        keep = torch.ones(B, R, dtype=torch.bool, device=s.entropy.device) if real is None else real
        values = {f.name: getattr(s, f.name) for f in dataclasses.fields(s) if f.name != "top1"}
        for name, value in {**values, "norm": s.entropy_norm}.items():
            kept = torch.where(keep.view(B, R, *[1] * (value.ndim - 2)), value, 0)
            total = kept.sum(1, keepdim=True, dtype=torch.float64)
            before = self.sums.get(name)
            self.sums[name] = total if before is None else torch.add(*_aligned([before, total]))
        count = keep.sum(1)[:, None, None].expand(B, 1, H)
        self.rows = count if self.rows is None else self.rows + count
        self.dtype = s.entropy.dtype

    @classmethod
    def of(cls, batches: Sequence[Mean]) -> MeanStats:
        """The means of several batches, one after another."""
        counts = [m.rows for m in batches if m.rows is not None]
        rows = torch.cat(counts)
        means = {}
        for name in batches[0].sums:
            total = torch.cat(_aligned([m.sums[name] for m in batches]))
            if total.numel():  # else it was not asked for
                total = total / rows.view(*rows.shape, *[1] * (total.ndim - 3))
            means[name] = total.to(batches[0].dtype)
        return MeanStats(**means, top1=torch.full_like(means["entropy"], torch.nan), rows=rows)


def _aligned(parts: list[Tensor]) -> list[Tensor]:
    """Sets and bins, the last of four dimensions, as many as the longest has."""
    if parts[0].ndim < 4:
        return parts
    longest = max(p.shape[-1] for p in parts)
    return [F.pad(p, (0, longest - p.shape[-1])) for p in parts]
