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
    [rows, longest]; `mask` marks the places that are taken."""

    at: Tensor
    row: Tensor
    place: Tensor
    mask: Tensor

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
        return cls(at, row, place, mask)

    def unpack(self, tokens: Tensor) -> Tensor:
        """Tokens [B,T] as [rows, longest]; zeros behind each."""
        out = tokens.new_zeros(self.mask.shape)
        out[self.row, self.place] = tokens.flatten()[self.at]
        return out

    def pack(self, x: Tensor, shape: torch.Size) -> Tensor:
        """Vectors [rows, longest, D] as [B,T,D], zeros at padding."""
        out = x.new_zeros(shape.numel(), x.shape[-1])
        return out.index_copy(0, self.at, x[self.row, self.place]).view(*shape, -1)
