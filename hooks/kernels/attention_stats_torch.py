"""attention_stats() in plain torch: dense over chunks of rows, on any device, and in fp64 the reference.

With m the row maximum, l = sum e^(s-m) and c = sum e^(s-m) (s-m), the entropy is log l - c/l: no difference of large
numbers, and exactly 0 where one key is visible.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .attention import visible as visible_keys
from .recurrence import without_autocast

Fields = dict[str, Tensor]


@without_autocast
def chunks(
    *, q: Tensor, k: Tensor, rows: Tensor, scale: float, causal: bool, window: int | None, sinks: int,
    limit: int | None, sink_logits: Tensor | None, softcap: float | None, sets: Tensor | None,
    q_pos: Tensor | None, k_pos: Tensor | None, q_seg: Tensor | None, k_seg: Tensor | None,
    blocked: Tensor | None, top1: bool, distance: bool, bins: int, elements: int | None,
) -> list[Fields]:  # fmt: skip
    """Fields of AttentionStats for the rows [1 or B,R], a chunk after the other, `elements` scores at once (None: all).

    Arithmetic is in the inputs' dtype. `sets` bool [B,S,sets]; other arguments as attention_stats() has checked them.
    """
    B, T, H, _ = q.shape
    S = k.shape[1]
    banded = q_pos is None and causal  # keys of a chunk can be cut to the span its rows reach
    positions_q = torch.arange(T, device=q.device)[None] if q_pos is None else q_pos
    positions_k = torch.arange(S, device=q.device)[None] if k_pos is None else k_pos
    parts: list[Fields] = []
    for start, r, keys in _spans(rows, S, B * H, window, sinks, banded, elements):
        picked = r.expand(B, -1)
        pos_q = positions_q.expand(B, T).gather(1, picked)
        pos_k = positions_k.index_select(1, keys)
        if causal:
            mask = visible_keys(pos_q, pos_k, window=window, sinks=sinks, limit=limit)
        else:
            mask = (pos_k >= 0)[:, None].expand(B, r.shape[1], -1)
        if q_seg is not None and k_seg is not None:
            mask = mask & (q_seg.expand(B, T).gather(1, picked)[:, :, None] == k_seg.index_select(1, keys)[:, None])
        mask = mask[:, :, None]
        if blocked is not None:
            hidden = blocked[:, start : start + r.shape[1]].index_select(-1, keys)
            mask = mask & ~(hidden if hidden.ndim == 4 else hidden[:, :, None])
        part = _chunk(
            q.gather(1, picked[:, :, None, None].expand(-1, -1, *q.shape[2:])), k.index_select(1, keys), mask,
            pos_q[:, :, None] - pos_k[:, None], None if sets is None else sets.index_select(1, keys), scale, softcap,
            sink_logits, top1, distance, bins,
        )  # fmt: skip
        part["top1"] = keys[part["top1"]] if S else part["top1"]
        parts.append(part)
    return parts


def _spans(
    rows: Tensor, S: int, heads: int, window: int | None, sinks: int, banded: bool, elements: int | None
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Chunks of the rows: where they start, their indices, and those of the keys that they can reach."""
    R = rows.shape[1]
    step = R if elements is None else _rows_at_once(heads, S, window if banded else None, elements)
    start = 0
    while start < R or start == 0:
        r = rows[:, start : start + step]
        keys = _span(r, S, window, sinks, banded)
        fit = R if elements is None else max(1, elements // max(1, heads * len(keys)))
        if fit < r.shape[1]:  # rows that lie far apart reach more keys
            r = r[:, :fit]
            keys = _span(r, S, window, sinks, banded)
        yield start, r, keys
        start += max(1, r.shape[1])


def _rows_at_once(heads: int, S: int, window: int | None, elements: int) -> int:
    """Rows of a chunk where they are neighbours: as many as a window's width, within `elements` scores."""
    if window is None or 2 * window >= S:
        return max(1, elements // max(1, heads * S))
    return max(1, min(window, elements // (max(1, heads) * 2 * window)))


def _span(rows: Tensor, S: int, window: int | None, sinks: int, banded: bool) -> Tensor:
    """Indices of the keys that these rows can reach."""
    keys = torch.arange(S, device=rows.device)
    if not banded or not rows.numel():
        return keys
    low = 0 if window is None else max(0, int(rows.min()) - window + 1)
    return torch.cat([keys[: min(sinks, low)], keys[low : int(rows.max()) + 1]])


def _chunk(
    q: Tensor, k: Tensor, mask: Tensor, back: Tensor, sets: Tensor | None, scale: float, softcap: float | None,
    sink_logits: Tensor | None, top1: bool, distance: bool, bins: int,
) -> Fields:  # fmt: skip
    """Dense over the chunk: q [B,R,H,K], k [B,S,G,K], mask [B,R,1 or H,S], distances back [B,R,S], sets [B,S,sets]."""
    B, R, H, K = q.shape
    G, S = k.shape[2], k.shape[1]
    scores = torch.einsum("brgnk,bsgk->brgns", q.view(B, R, G, H // G, K), k).reshape(B, R, H, S) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~mask, -torch.inf)
    top, index = scores.max(-1) if S else (scores.new_full((B, R, H), -torch.inf), mask.new_zeros(B, R, H).long())
    peak = top if sink_logits is None else torch.maximum(top, sink_logits.to(scores.dtype))
    peak = peak.clamp(min=torch.finfo(scores.dtype).min)  # a row that sees nothing
    shifted = scores - peak[..., None]
    weights = shifted.exp()
    total = weights.sum(-1)
    centred = (weights * shifted.masked_fill(~mask, 0)).sum(-1)
    sink = torch.zeros_like(total)
    if sink_logits is not None:
        gap = (sink_logits.to(scores.dtype) - peak).clamp(min=torch.finfo(scores.dtype).min)  # a logit of -inf: no sink
        sink = gap.exp()
        total, centred = total + sink, centred + sink * gap
    safe = total.clamp(min=torch.finfo(scores.dtype).tiny)
    mass, mean = weights.new_zeros(B, R, H, 0), weights.new_zeros(B, R, 0)
    if sets is not None:
        mass = torch.einsum("brhs,bsn->brhn", weights, sets.to(weights.dtype)) / safe[..., None]
    if distance:
        mean = torch.einsum("brhs,brs->brh", weights, back.to(weights.dtype)) / safe
    histogram = weights.new_zeros(B, R, H, bins)
    if bins:
        which = torch.frexp(back.clamp(min=0).double()).exponent.long().clamp(max=bins - 1)  # 0 at 0, 1 at 1, 2 at 2..3
        histogram.scatter_add_(3, which[:, :, None].expand(B, R, H, S), weights / safe[..., None])
    return {
        "lse": torch.where(total > 0, peak + safe.log(), -torch.inf),
        "entropy": (safe.log() - centred / safe).clamp(min=0),
        "visible": mask.sum(-1).expand(B, R, H).contiguous(),
        "mass": mass,
        "top1": index if top1 else index[..., :0],
        "top1_prob": (top - peak).exp() / safe,
        "distance": mean,
        "sink_mass": sink / safe,
        "histogram": histogram,
    }
