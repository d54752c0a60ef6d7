"""Softmax attention under windows, caps and sinks, through SDPA, without a T x T mask.

Shapes: q [B,T,H,K], k [B,S,G,K], v [B,S,G,V] with H a multiple of G. Key j is visible to query i iff
0 <= pos(i) - pos(j) < window; the first `sinks` positions are exempt from the window, though not from
`limit`, a hard bound of the same form. Positions count real tokens; a negative key position marks padding.
Where positions are not given, queries and keys are the same tokens 0..T-1. Where segments are given, a query
sees only keys of its own segment. `sink_logits` [H] join the denominator; `softcap` c bounds scores s as
c tanh(s/c).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .flex import attend_blocks
from .fused import compute_dtype, is_training

ROWS = 256  # query rows a masked call handles at once: bounds its mask at ROWS x (ROWS + window)
BANDS = 4096  # tokens from which sinks beside a window are worth the compilation of FlexAttention on a GPU
LONG = 16_384  # ... and from which a window alone is, where no gradients are wanted: flash is slower, but there at once
SCORES = 2**22  # scores held at once where no fused kernel can cap them


def attention_reference(
    *, q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, window: int | None = None, sinks: int = 0,
    limit: int | None = None, q_pos: Tensor | None = None, k_pos: Tensor | None = None,
    q_seg: Tensor | None = None, k_seg: Tensor | None = None, softcap: float | None = None,
    sink_logits: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The specification: the dense masked softmax, in fp64. Returns [B,T,H,V]; rows that see no key are 0."""
    q_pos, k_pos = _positions(q, k, q_pos, k_pos)
    group = q.shape[2] // k.shape[2]
    keys = k.double().repeat_interleave(group, 2)
    values = v.double().repeat_interleave(group, 2)
    scores = torch.einsum("bthk,bshk->bhts", q.double(), keys) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    seen = visible(q_pos, k_pos, window=window, sinks=sinks, limit=limit, q_seg=q_seg, k_seg=k_seg)
    scores = scores.masked_fill(~seen[:, None], -torch.inf)
    if sink_logits is not None:  # one more key, of value zero
        sink = sink_logits.double()[:, None, None].expand(*scores.shape[:-1], 1)
        scores, values = torch.cat([scores, sink], -1), F.pad(values, (0, 0, 0, 0, 0, 1))
    weights = scores.softmax(-1).nan_to_num(0.0)
    return torch.einsum("bhts,bshv->bthv", weights, values).to(v.dtype)


def attention(
    *, q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, window: int | None = None, sinks: int = 0,
    limit: int | None = None, q_pos: Tensor | None = None, k_pos: Tensor | None = None,
    q_seg: Tensor | None = None, k_seg: Tensor | None = None, softcap: float | None = None,
    sink_logits: Tensor | None = None, newest: bool = False,
) -> Tensor:  # fmt: skip
    """Causal attention [B,T,H,V] through SDPA; same arguments as `attention_reference`, and `newest`: whether q
    is the last of the S tokens that k and v are of, neighbours and of one segment.

    Without positions this is one fused causal call where no window binds, and for 16-bit tensors on a GPU one flash
    call where only a window does, or one FlexAttention call where positional sinks stand beside it or the context is
    LONG. Otherwise blocks of ROWS query rows see the keys they can reach, under a small mask.
    Raises ValueError for a window < 1, or positions that are missing where q and k are not the same tokens.
    """
    if window is not None and window < 1:
        raise ValueError(f"window={window}: expected >= 1 (the query itself counts) or None")
    if limit is not None:
        window = limit if window is None else min(window, limit)
    T, S = q.shape[1], k.shape[1]
    score: dict[str, Any] = {"scale": scale, "softcap": softcap, "sink_logits": sink_logits}
    if newest and not sinks and softcap is None and sink_logits is None:  # needs no mask
        first = 0 if window is None else max(0, S - window)
        return _sdpa(q, k[:, first:], v[:, first:], None, scale)
    if q_pos is None and k_pos is None and q_seg is None and S == T:
        if softcap is None and (window is None or window >= T):
            return _softmax(q, k, v, None, **score)
        if window is not None and softcap is None and sink_logits is None and _flash_takes(q, k, v):
            wide = q.shape[-1] >= 16  # FlexAttention's least
            if not sinks and (T < LONG or not wide or is_training(q, k, v) or torch.compiler.is_compiling()):
                return _flash(q, k, v, window, scale)
            if T >= BANDS and wide:
                return _flex(q, k, v, window, sinks, limit, scale)
        span = T if window is None else window
        rows = [_banded(q, k, v, start, span, sinks, limit, score) for start in range(0, T, ROWS)]
        return torch.cat(rows, 1)
    q_pos, k_pos = _positions(q, k, q_pos, k_pos)
    rows = []
    for a in range(0, T, ROWS):
        part = slice(a, a + ROWS)
        seen = visible(
            q_pos[:, part], k_pos, window=window, sinks=sinks, limit=limit,
            q_seg=None if q_seg is None else q_seg[:, part], k_seg=k_seg,
        )  # fmt: skip
        reach: slice | Tensor = slice(0, S)
        if T > 1:  # leave out the keys that none of these rows sees
            hit = seen.flatten(0, 1).any(0).nonzero()[:, 0]
            first, last = (int(hit[0]), int(hit[-1])) if hit.numel() else (0, 0)
            reach = hit if 2 * hit.numel() < last - first else slice(first, last + 1)  # sinks leave a gap
        rows.append(_softmax(q[:, part], k[:, reach], v[:, reach], seen[:, None, :, reach], **score))
    return rows[0] if len(rows) == 1 else torch.cat(rows, 1)


def visible(
    q_pos: Tensor, k_pos: Tensor, *, window: int | None, sinks: int = 0, limit: int | None = None,
    q_seg: Tensor | None = None, k_seg: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Which keys each query sees: [B,T,S] bool from positions q_pos [B,T] and k_pos [B,S] (negative:
    padding), and from segments of the same shapes."""
    distance = q_pos[:, :, None] - k_pos[:, None, :]
    seen = (distance >= 0) & (k_pos >= 0)[:, None, :]
    if window is not None:
        seen &= (distance < window) | (k_pos < sinks)[:, None, :]
    if limit is not None:
        seen &= distance < limit
    if q_seg is not None and k_seg is not None:
        seen = seen & (q_seg[:, :, None] == k_seg[:, None, :])
    return seen


def _banded(
    q: Tensor, k: Tensor, v: Tensor, start: int, window: int, sinks: int, limit: int | None,
    score: dict[str, Any],
) -> Tensor:  # fmt: skip
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
    return _softmax(q[:, start:stop], keys, values, mask, **score)


def _softmax(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, scale: float | None, softcap: float | None,
    sink_logits: Tensor | None,
) -> Tensor:  # fmt: skip
    """Attention under `mask` [B,1,R,S] (None: causal). A learnable sink is one more key, of value zero, whose
    score an extra channel of q carries, so that the fused call takes it; soft caps have no fused call."""
    if softcap is None and sink_logits is None:
        return _sdpa(q, k, v, mask, scale)
    scale = float(q.shape[-1] ** -0.5) if scale is None else scale
    if softcap is not None:
        assert mask is not None
        rows = max(1, SCORES // (q.shape[0] * q.shape[2] * k.shape[1]))
        parts = [
            _softcapped(q[:, a : a + rows], k, v, mask[:, :, a : a + rows], scale, softcap, sink_logits)
            for a in range(0, q.shape[1], rows)
        ]
        return torch.cat(parts, 1)
    assert sink_logits is not None
    lead = 1 if mask is None else 0  # a causal call needs a query beside the sink, to stay square
    channel = (sink_logits.to(q.dtype) / scale)[:, None].expand(*q.shape[:-1], 1)
    q = F.pad(torch.cat([q, channel], -1), (0, 0, 0, 0, lead, 0))
    k, v = F.pad(k, (0, 1, 0, 0, 1, 0)), F.pad(v, (0, 0, 0, 0, 1, 0))
    k[:, 0, :, -1] = 1
    return _sdpa(q, k, v, None if mask is None else F.pad(mask, (1, 0), value=True), scale)[:, lead:]


def _softcapped(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, softcap: float, sink_logits: Tensor | None
) -> Tensor:
    """Explicit softmax over c tanh(score / c), for a few rows at a time."""
    wide = torch.promote_types(q.dtype, torch.float32)
    grouped = q.unflatten(2, (k.shape[2], -1)).to(wide)
    scores = torch.einsum("brgnk,bsgk->bgnrs", grouped, k.to(wide)).flatten(1, 2) * scale
    scores = (softcap * torch.tanh(scores / softcap)).masked_fill(~mask, -torch.inf)
    if sink_logits is not None:
        spare = sink_logits.to(wide)[:, None, None].expand(*scores.shape[:-1], 1)
    else:  # takes the weight of a row that sees nothing
        spare = torch.zeros_like(scores[..., :1]).masked_fill(mask.any(-1, keepdim=True), -torch.inf)
    weights = torch.cat([scores, spare], -1).softmax(-1)[..., :-1]
    weights = weights.to(v.dtype).unflatten(1, (k.shape[2], -1))
    return torch.einsum("bgnrs,bsgv->brgnv", weights, v).flatten(2, 3)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    K, V = q.shape[-1], v.shape[-1]
    if K != V:  # fused kernels want one width, and without one the scores would be stored; zeros add nothing
        scale = K**-0.5 if scale is None else scale
        q, k, v = (F.pad(x, (0, max(K, V) - x.shape[-1])) for x in (q, k, v))
    causal = True if mask is None and q.shape[1] > 1 else False  # noqa: SIM210, of a length unknown to torch.compile too
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask, scale=scale,
        is_causal=causal, enable_gqa=q.shape[2] != k.shape[2],
    )  # fmt: skip
    return out.transpose(1, 2)[..., :V]


def _flash_takes(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether the flash kernel that torch brings can have these: CUDA, 16 bits after autocast, one width of its own."""
    if not q.is_cuda or torch.cuda.get_device_properties(q.device).major < 8:
        return False
    K = q.shape[-1]
    return compute_dtype(q).itemsize == 2 and v.shape[-1] == K and K % 8 == 0 and K <= 256


def _flash(q: Tensor, k: Tensor, v: Tensor, window: int, scale: float | None) -> Tensor:
    """Causal attention under a window in one call, which a compiled model keeps as one node."""
    dtype = compute_dtype(q)
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    T = q.shape[1]
    out, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, None, None, T, T, 0.0, False, False, scale=scale, window_size_left=window - 1, window_size_right=0
    )
    return out


def _flex(
    q: Tensor, k: Tensor, v: Tensor, window: int, sinks: int, limit: int | None, scale: float | None
) -> Tensor:  # fmt: skip
    """Causal attention under a window with sinks in one call, blocks that no row sees left out."""
    dtype = compute_dtype(q)
    scale = float(q.shape[-1] ** -0.5) if scale is None else scale
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    return attend_blocks(q, k, v, window=window, sinks=sinks, limit=limit, scale=scale)


def _positions(q: Tensor, k: Tensor, q_pos: Tensor | None, k_pos: Tensor | None) -> tuple[Tensor, Tensor]:
    if (q_pos is None) != (k_pos is None):
        raise ValueError("q_pos and k_pos: give both or neither")
    if q_pos is None or k_pos is None:
        if q.shape[1] != k.shape[1]:
            raise ValueError(f"q has {q.shape[1]} tokens and k {k.shape[1]}: give q_pos and k_pos")
        q_pos = k_pos = torch.arange(q.shape[1], device=q.device)[None]
    return q_pos, k_pos
