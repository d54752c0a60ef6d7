"""Token columns that the user names, as indices into one call; what is said of columns, as said of keys; and what calls
recorded, joined into batches."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor

_Item = TypeVar("_Item")


def local_columns(what: str, columns: Any, B: int, T: int, first: int) -> Tensor | None:
    """Columns [P] or [B,P] as indices [1 or B,P] into a call of T tokens that starts at column `first`.

    Negative ones count from the call's end. A call that continues a context takes those of its own tokens;
    None where it has none.
    """
    p = torch.as_tensor(columns)
    if p.dtype == torch.bool or (p.is_floating_point() and p.numel()):
        raise ValueError(f"{what}: {p.dtype}; expected columns as whole numbers")
    p = p.long()
    p = p[None] if p.ndim == 1 else p
    if p.ndim != 2 or p.shape[0] not in (1, B):
        raise ValueError(f"{what} of shape {tuple(p.shape)}; expected one list, or one for each of {B} samples")
    p = torch.where(p < 0, p + T, p - first)
    inside = (p >= 0) & (p < T)
    if first == 0:
        if not bool(inside.all()):
            raise ValueError(f"{what} {torch.as_tensor(columns).tolist()} do not fit {T} tokens")
        return p
    if p.shape[0] > 1:
        return p if bool(inside.all()) else None
    p = p[:, inside[0]]
    return p if p.shape[1] else None


def spread(labels: Tensor, k_col: Tensor | None, batch: int, keys: int) -> Tensor:
    """Key sets by column [1 or B,T,sets] as key sets by key index [B,S,sets], keys at columns `k_col` [1 or B,S];
    columns beyond the labels are in no set."""
    if labels.shape[0] not in (1, batch) or (k_col is None and labels.shape[1] != keys):
        raise ValueError(f"labels: shape {tuple(labels.shape[:2])}; expected [{batch},{keys}]")
    labels = labels.expand(batch, -1, -1)
    if k_col is None:
        return labels
    last = labels.shape[1] - 1
    column = k_col.expand(batch, -1)[..., None]
    return labels.gather(1, column.clamp(max=last).expand(-1, -1, labels.shape[2])) & (column <= last)


def backward_pass() -> int:
    """The backward pass that this code runs in (-1: none): where one begins inside a recording, the forward code in it
    is activation checkpointing, which repeats what was recorded."""
    return torch._C._current_graph_task_id()


def batches(parts: list[tuple[_Item, bool]]) -> list[list[_Item]]:
    """Group what calls recorded: a call that continues a cached context joins the one before it."""
    found: list[list[_Item]] = []
    for item, continues in parts:
        if continues and found:
            found[-1].append(item)
        else:
            found.append([item])
    return found
