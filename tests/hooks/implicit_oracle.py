"""What implicit_stats() must say: the products written out, and every statistic by its definition."""

from __future__ import annotations

from typing import Any

import torch
from helpers import assert_close
from torch import Tensor

from hybridscope import ImplicitStats
from hybridscope.hooks.kernels.recurrence import Read, plain

Inputs = dict[str, Any]
KINDS = ["none", "scalar", "vector", "delta", "vector+low rank"]
T = 23


def inputs(kind: str, length: int = T, *, B: int = 2, H: int = 2, K: int = 4) -> Inputs:
    """Signed fp64 inputs; every A_t is at most 1, that of `vector+low rank` not symmetric."""
    k = torch.nn.functional.normalize(torch.randn(B, length, H, K).double(), dim=-1)
    x: Inputs = {"q": torch.randn(B, length, H, K).double(), "k": k}
    if kind != "none":
        x["log_decay"] = -0.4 * torch.rand(B, length, H, K if kind.startswith("vector") else 1).double()
    if kind == "delta":
        x["beta"] = 2 * torch.rand(B, length, H).double()
    if kind == "vector+low rank":
        a, b = (torch.nn.functional.normalize(torch.randn(B, length, H, K).double(), dim=-1) for _ in range(2))
        x.update(a=a, b=0.5 * b)
    return x


def products(x: Inputs, read: Read = "after") -> Tensor:
    """w_tj = q_t^T A_t ... A_{j+1} k_j with every A_t written out, [B,T,H,T]."""
    q, k = x["q"], x["k"]
    written, g, a, b = plain(k=k, v=k, **{name: y for name, y in x.items() if name not in ("q", "k")})
    A = torch.diag_embed(g.exp().expand_as(k))  # type: ignore[union-attr]
    if a is not None and b is not None:
        A = A + b[..., :, None] * a[..., None, :]
    B, length, H, _ = q.shape
    w = torch.zeros(B, length, H, length, dtype=q.dtype)
    for t in range(length):
        back = q[:, t]
        last = t if read == "after" else t - 1
        for j in range(last, -1, -1):
            w[:, t, :, j] = (back * written[:, j]).sum(-1)
            back = torch.einsum("bhij,bhi->bhj", A[:, j], back)
    return w


def windowed(w: Tensor, cap: int, conv: int) -> Tensor:
    """Weights of what a capped row sees: all of it before token `cap`, then the last cap - conv + 1 tokens."""
    t, j = torch.arange(w.shape[1])[:, None], torch.arange(w.shape[1])
    return w * ((t < cap) | (t - j < cap - conv + 1))[:, None]


def of_weights(w: Tensor, sets: Tensor) -> dict[str, Tensor]:
    """Every statistic by its definition, from weights [B,T,H,T]."""
    length = w.shape[-1]
    size = w.abs().sum(-1)
    p = w.abs() / size.clamp(min=1e-300)[..., None]
    distance = (torch.arange(length)[:, None] - torch.arange(length)).clamp(min=0)
    bins = torch.tensor([d.bit_length() for d in range(length)])[distance]  # [T,T]
    wanted = torch.nn.functional.one_hot(bins, (length - 1).bit_length() + 1).double()
    return {
        "lse": size.log(),
        "entropy": -torch.special.xlogy(p, p).sum(-1),
        "mass": torch.einsum("brhs,bsn->brhn", p, sets.double()),
        "top1": p.argmax(-1),
        "top1_prob": p.amax(-1),
        "distance": (p * distance[:, None]).sum(-1),
        "sink_mass": torch.zeros_like(size),
        "histogram": torch.einsum("brhs,rsn->brhn", p, wanted),
        "signed": torch.einsum("brhs,bsn->brhn", w, sets.double()),
        "signed_total": w.sum(-1),
    }


def check(got: ImplicitStats, w: Tensor, sets: Tensor, rows: Any = slice(None)) -> None:
    read = (w != 0).any(-1)[:, rows]
    for name, value in of_weights(w, sets).items():
        found, expected = getattr(got, name), value[:, rows]
        if name == "top1":
            assert torch.equal(found[read], expected[read])
        else:
            assert torch.equal(found[~read], expected[~read])
            assert_close(found[read], expected[read], torch.float64)


def sets_of(length: int = T, B: int = 2) -> Tensor:
    return torch.rand(B, length, 3) < torch.tensor([0.1, 0.5, 1.0])
