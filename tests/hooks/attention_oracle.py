"""What attention_stats() must say: a dense fp64 oracle, row by row, from the definitions."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hybridscope import AttentionStats

EPS = torch.finfo(torch.float32).eps
Oracle = dict[str, np.ndarray]


def oracle(
    q: Tensor, k: Tensor, *, rows: Any = None, scale: float | None = None, window: int | None = None,
    sinks: int = 0, limit: int | None = None, sink_logits: Tensor | None = None, softcap: float | None = None,
    labels: Tensor | None = None, causal: bool = True,
) -> Oracle:  # fmt: skip
    """Definitions, in numpy fp64: visible keys, softmax, -sum p log p, ... one row of one head at a time."""
    B, T, H, K = q.shape
    group = H // k.shape[2]
    qn, kn = q.double().numpy(), k.double().numpy()
    rows_ = np.broadcast_to(
        np.arange(T) if rows is None else np.asarray(rows), (B, T if rows is None else np.shape(rows)[-1])
    )
    sets = _sets(labels)
    names = ("lse", "entropy", "visible", "top1", "top1_prob", "distance", "sink_mass", "largest", "gap")
    out = {name: np.zeros((B, rows_.shape[1], H)) for name in names}
    out["mass"] = np.zeros((B, rows_.shape[1], H, sets.shape[-1] if sets is not None else 0))
    for b, r, h in np.ndindex(B, rows_.shape[1], H):
        i = int(rows_[b, r]) % T
        seen = list(range(k.shape[1]))
        if causal:
            seen = [j for j in seen if j <= i and (window is None or i - j < window or j < sinks)]
            seen = [j for j in seen if limit is None or i - j < limit]
        s = kn[b, seen, h // group] @ qn[b, i, h] * (K**-0.5 if scale is None else scale)
        if softcap is not None:
            s = softcap * np.tanh(s / softcap)
        whole = s if sink_logits is None else np.append(s, float(sink_logits[h]))
        lse = whole.max() + math.log(np.exp(whole - whole.max()).sum())
        p = np.exp(whole - lse)
        out["lse"][b, r, h] = lse
        out["entropy"][b, r, h] = -sum(x * math.log(x) for x in p if x > 0)
        out["visible"][b, r, h] = len(seen)
        out["top1"][b, r, h] = seen[int(s.argmax())]
        out["top1_prob"][b, r, h] = p[: len(seen)].max()
        out["distance"][b, r, h] = (p[: len(seen)] * (i - np.array(seen))).sum()
        out["sink_mass"][b, r, h] = 0 if sink_logits is None else p[-1]
        out["largest"][b, r, h] = np.abs(whole).max()
        ordered = np.sort(s)
        out["gap"][b, r, h] = np.inf if len(s) == 1 else ordered[-1] - ordered[-2]
        if sets is not None:
            out["mass"][b, r, h] = (p[: len(seen), None] * sets[b, seen]).sum(0)
    return out


def _sets(labels: Tensor | None) -> np.ndarray | None:
    if labels is None:
        return None
    if labels.dtype == torch.bool:
        return labels.numpy()[..., None] if labels.ndim == 2 else labels.numpy()
    bits = int(labels.max()).bit_length()
    return np.stack([(labels.numpy() >> n) & 1 for n in range(bits)], -1)


def check(got: AttentionStats, expected: Oracle) -> None:
    """Every field within 1e-5 (1 + |ref|) + 16 eps max|s|; a distance carries its own size into the second
    term."""
    slack = 16 * EPS * expected["largest"].max()
    for name in ("lse", "entropy", "mass", "top1_prob", "distance", "sink_mass"):
        value, ref = getattr(got, name).double().numpy(), expected[name]
        assert value.shape == ref.shape, name
        bound = 1e-5 * (1 + np.abs(ref)) + slack * (1 + np.abs(ref) if name == "distance" else 1)
        assert (np.abs(value - ref) <= bound).all(), f"{name}: {(np.abs(value - ref) / bound).max():.2f} of the bound"
    assert (got.visible.numpy() == expected["visible"]).all()
    clear = expected["gap"] > 2 * slack + 1e-6
    assert (got.top1.numpy()[clear] == expected["top1"][clear]).all()


def qk(
    T: int = 33,
    B: int = 2,
    H: int = 4,
    G: int = 2,
    K: int = 8,
    size: float = 1.0,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    return size * torch.randn(B, T, H, K, dtype=dtype), torch.randn(B, T, G, K, dtype=dtype)
