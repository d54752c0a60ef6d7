"""Softmax attention under windows, caps and sinks, through SDPA, without a T x T mask.

Shapes: q [B,T,H,K], k [B,S,G,K], v [B,S,G,V] with H a multiple of G. Key j is visible to query i iff
0 <= pos(i) - pos(j) < window; the first `sinks` positions are exempt from the window, though not from `limit`,
a hard bound of the same form. Positions count real tokens; a negative key position marks padding. Where
positions are not given, queries and keys are the same tokens 0..T-1.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

ROWS = 256  # query rows a masked call handles at once: bounds its mask at ROWS x (ROWS + window)


def attention_reference(
    *, q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, window: int | None = None, sinks: int = 0,
    limit: int | None = None, q_pos: Tensor | None = None, k_pos: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The specification: the dense masked softmax, in fp64. Returns [B,T,H,V]; rows that see no key are 0."""
    q_pos, k_pos = _positions(q, k, q_pos, k_pos)
    group = q.shape[2] // k.shape[2]
    keys = k.double().repeat_interleave(group, 2)
    values = v.double().repeat_interleave(group, 2)
    scores = torch.einsum("bthk,bshk->bhts", q.double(), keys) * (q.shape[-1] ** -0.5 if scale is None else scale)
    mask = visible(q_pos, k_pos, window=window, sinks=sinks, limit=limit)[:, None]
    weights = scores.masked_fill(~mask, -torch.inf).softmax(-1).nan_to_num(0.0)
    return torch.einsum("bhts,bshv->bthv", weights, values).to(v.dtype)


def attention(
    *, q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, window: int | None = None, sinks: int = 0,
    limit: int | None = None, q_pos: Tensor | None = None, k_pos: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Causal attention [B,T,H,V] through SDPA; same arguments as `attention_reference`.

    Without a window (or with one that cannot bind) and without positions this is one fused causal call.
    Otherwise blocks of ROWS query rows see the span of keys they can reach, under a small mask.
    """
    T = q.shape[1]
    if q_pos is None and k_pos is None:
        if window is None or window >= T:
            return _sdpa(q, k, v, None, scale)
        return torch.cat([_banded(q, k, v, start, scale, window, sinks, limit) for start in range(0, T, ROWS)], 1)
    q_pos, k_pos = _positions(q, k, q_pos, k_pos)
    rows = [
        _sdpa(
            q[:, a : a + ROWS], k, v,
            visible(q_pos[:, a : a + ROWS], k_pos, window=window, sinks=sinks, limit=limit)[:, None], scale,
        )
        for a in range(0, T, ROWS)
    ]  # fmt: skip
    return rows[0] if len(rows) == 1 else torch.cat(rows, 1)


def visible(
    q_pos: Tensor, k_pos: Tensor, *, window: int | None, sinks: int = 0, limit: int | None = None
) -> Tensor:
    """Which keys each query sees: [B,T,S] bool from positions q_pos [B,T] and k_pos [B,S] (negative: padding)."""
    distance = q_pos[:, :, None] - k_pos[:, None, :]
    seen = (distance >= 0) & (k_pos >= 0)[:, None, :]
    if window is not None:
        seen &= (distance < window) | (k_pos < sinks)[:, None, :]
    if limit is not None:
        seen &= distance < limit
    return seen


def _banded(
    q: Tensor, k: Tensor, v: Tensor, start: int, scale: float | None, window: int, sinks: int, limit: int | None
) -> Tensor:
    """Rows start..start+ROWS under a window, over the keys that those rows can reach."""
    stop = min(start + ROWS, q.shape[1])
    low = max(0, start - window + 1)
    keep = min(sinks, low)
    positions = torch.arange(low, stop, device=q.device)
    keys, values = k[:, low:stop], v[:, low:stop]
    if keep:
        positions = torch.cat([torch.arange(keep, device=q.device), positions])
        keys, values = torch.cat([k[:, :keep], keys], 1), torch.cat([v[:, :keep], values], 1)
    rows = torch.arange(start, stop, device=q.device)
    mask = visible(rows[None], positions[None], window=window, sinks=sinks, limit=limit)[:, None]
    return _sdpa(q[:, start:stop], keys, values, mask, scale)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask, is_causal=mask is None,
        scale=scale, enable_gqa=q.shape[2] != k.shape[2],
    )  # fmt: skip
    return out.transpose(1, 2)


def _positions(q: Tensor, k: Tensor, q_pos: Tensor | None, k_pos: Tensor | None) -> tuple[Tensor, Tensor]:
    if (q_pos is None) != (k_pos is None):
        raise ValueError("q_pos and k_pos: give both or neither")
    if q_pos is None or k_pos is None:
        if q.shape[1] != k.shape[1]:
            raise ValueError(f"q has {q.shape[1]} tokens and k {k.shape[1]}: give q_pos and k_pos")
        q_pos = k_pos = torch.arange(q.shape[1], device=q.device)[None]
    return q_pos, k_pos
