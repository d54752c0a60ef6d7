"""Inputs of recurrences, and what windows and caps must give: the loop over time, restarted at every token."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hybridscope.hooks.kernels.recurrence import Read, recurrence_reference

Inputs = dict[str, Any]
KINDS = ["scalar", "vector", "delta", "vector+low rank"]
T = 23


def inputs(kind: str, length: int = T, *, B: int = 2, H: int = 2, K: int = 4, V: int = 3) -> Inputs:
    """Signed fp64 inputs with every |A_t| <= 1; `vector+low rank` has an A_t that is not symmetric."""
    width = K if kind.startswith("vector") else 1
    k = torch.nn.functional.normalize(torch.randn(B, length, H, K).double(), dim=-1)
    x: Inputs = {
        "q": torch.randn(B, length, H, K).double(),
        "k": k,
        "v": torch.randn(B, length, H, V).double(),
    }
    x["log_decay"] = -0.4 * torch.rand(B, length, H, width).double()
    if kind == "delta":
        x.update(a=k, b=-x["log_decay"].exp() * 2 * torch.rand(B, length, H, 1).double() * k)
    if kind == "vector+low rank":
        a, b = (torch.nn.functional.normalize(torch.randn(B, length, H, K).double(), dim=-1) for _ in range(2))
        x.update(a=a, b=0.5 * b)
    return x


def restarts(x: Inputs, read: Read = "after") -> list[Tensor]:
    """The loop over time restarted at every token s: restarts(x)[s][:, t - s] is row t from tokens s..t
    alone."""
    length = x["q"].shape[1]
    return [recurrence_reference(**{name: y[:, s:] for name, y in x.items()}, read=read)[0] for s in range(length)]


def rows_from(table: list[Tensor], starts: list[int]) -> Tensor:
    """Row t restarted at starts[t]."""
    return torch.stack([table[s][:, t - s] for t, s in enumerate(starts)], 1)


def window_rows(table: list[Tensor], w: int) -> Tensor:
    return rows_from(table, [max(0, t - w + 1) for t in range(len(table))])


def cap_rows(table: list[Tensor], cap: int, conv: int) -> Tensor:
    """Row t: uncapped where t < cap, else restarted cap - conv + 1 tokens back."""
    return rows_from(table, [0 if t < cap else t - (cap - conv + 1) + 1 for t in range(len(table))])
