"""Packed documents: several texts in one row of tokens, none of which sees another.

Every document becomes a row of its own, padded on the right, so that positions, states, convolutions, token shifts and
caps start with it, as if it were alone. A pass costs as many tokens as there are documents times the longest of them.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class Documents:
    """Where N tokens of [B,T] stand among the rows: `at` [N] counts over B x T, `row` and `place` [N] are in
    [rows, longest]; `mask` marks the places that are taken. `shape`: B, T."""

    at: Tensor
    row: Tensor
    place: Tensor
    mask: Tensor
    shape: tuple[int, int]

    @classmethod
    def of(cls, ids: Tensor, real: Tensor | None) -> Documents:
        """A document is a stretch of equal ids [B,T] among the real tokens of a row."""
        keep = torch.ones_like(ids, dtype=torch.bool) if real is None else real
        at = keep.flatten().nonzero()[:, 0]
        sample, own = at // ids.shape[1], ids.flatten()[at]
        first = torch.ones_like(at, dtype=torch.bool)
        first[1:] = (sample[1:] != sample[:-1]) | (own[1:] != own[:-1])
        row = first.cumsum(0) - 1
        place = torch.arange(len(at), device=at.device) - first.nonzero()[:, 0][row]
        rows, longest = (int(x.max()) + 1 if len(at) else 0 for x in (row, place))
        mask = torch.zeros(rows, longest, dtype=torch.bool, device=at.device)
        mask[row, place] = True
        return cls(at, row, place, mask, (ids.shape[0], ids.shape[1]))

    def unpack(self, tokens: Tensor) -> Tensor:
        """What tokens carry [B,T,...] as [rows, longest, ...]; zeros behind each document."""
        out = tokens.new_zeros(*self.mask.shape, *tokens.shape[2:])
        out[self.row, self.place] = tokens.flatten(0, 1)[self.at]
        return out

    def labels(self, labels: Tensor) -> Tensor:
        """Key sets [1 or B,T,sets] of the packed tokens, or [1 or rows,longest,sets] of documents; as the latter."""
        n, columns = labels.shape[:2]
        if n in (1, self.shape[0]) and columns == self.shape[1]:
            return self.unpack(labels.expand(self.shape[0], -1, -1))
        if n in (1, len(self.mask)) and columns == self.mask.shape[1]:
            return labels
        raise ValueError(
            f"labels: shape {(n, columns)}; expected {self.shape}, by column of the packed tokens, or "
            f"{tuple(self.mask.shape)}, by column of each document"
        )

    def pack(self, x: Tensor) -> Tensor:
        """Vectors [rows, longest, D] as [B,T,D], zeros at padding."""
        out = x.new_zeros(self.shape[0] * self.shape[1], x.shape[-1])
        return out.index_copy(0, self.at, x[self.row, self.place]).view(*self.shape, -1)
