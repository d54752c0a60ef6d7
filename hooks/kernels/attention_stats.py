"""What each query row of a softmax head looks at, without a T x T matrix.

Per row: log-sum-exp, entropy, number of visible keys, mass on labelled key sets, top-1 key and its
probability, mean distance. Rows are handled in chunks of bounded size, over the keys that the window lets
them reach. With m the row maximum, l = sum e^(s-m) and c = sum e^(s-m) (s-m), the entropy is log l - c/l: no
difference of large numbers, and exactly 0 where one key is visible.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from .attention import visible as visible_keys

CHUNK_ELEMENTS = 2**22  # scores held at once, over batch, heads, rows and keys


@dataclasses.dataclass
class AttentionStats:
    """Statistics of R query rows, each [B,R,H] (`mass` [B,R,H,sets]); entropies and lse in nats.

    `top1` is the key's index, `distance` the mean distance back in tokens, `sink_mass` the share of a
    learnable sink logit (0 without one). Entropy and mass are over the real keys plus that sink.
    """

    lse: Tensor
    entropy: Tensor
    visible: Tensor
    mass: Tensor
    top1: Tensor
    top1_prob: Tensor
    distance: Tensor
    sink_mass: Tensor

    @property
    def entropy_norm(self) -> Tensor:
        """Entropy over log(visible keys), the sink counted as one more where there is one; 0 for one key."""
        keys = self.visible + (self.sink_mass > 0)
        return torch.where(keys > 1, self.entropy / keys.clamp(min=2).log(), torch.zeros_like(self.entropy))

    def fields(self) -> dict[str, Tensor]:
        """Name to tensor."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}

    @classmethod
    def cat(cls, parts: Sequence[AttentionStats], dim: int) -> AttentionStats:
        """Concatenate along batch (0) or rows (1)."""
        return cls(**{f.name: torch.cat([getattr(p, f.name) for p in parts], dim) for f in dataclasses.fields(cls)})


@torch.no_grad()
def attention_stats(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B S G K"],
    *,
    rows: Int[Tensor, " R"] | Int[Tensor, "_ R"] | Sequence[int] | None = None,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    sinks: int = 0,
    limit: int | None = None,
    sink_logits: Float[Tensor, " H"] | None = None,
    softcap: float | None = None,
    labels: Tensor | None = None,
    q_pos: Int[Tensor, "_ T"] | None = None,
    k_pos: Int[Tensor, "_ S"] | None = None,
    q_seg: Int[Tensor, "_ T"] | None = None,
    k_seg: Int[Tensor, "_ S"] | None = None,
    blocked: Bool[Tensor, "B R S"] | Bool[Tensor, "B R _ S"] | None = None,
    impl: Literal["auto", "torch", "reference"] = "auto",
) -> AttentionStats:
    """Attention statistics of the query rows `rows` (indices into T, shared [R] or [B,R]; None: all).

    `window` counts the query; the first `sinks` keys stay visible under it (within `limit`, a hard bound);
    `sink_logits` [H] join the denominator; `softcap` c bounds scores as c tanh(s/c). `labels` puts keys in
    sets: bool [B,S] (one set), bool [B,S,sets], or uint8 [B,S], bit n for set n. `q_pos` [B,T], `k_pos`
    [B,S]: token positions where queries and keys are not the same tokens 0..T-1 (negative key position:
    padding); `q_seg`, `k_seg`: only keys of the query's own segment are visible. `blocked` hides single
    edges, [B,R,S] or per head [B,R,H,S]. Values are detached; arithmetic is fp32, or fp64 for fp64 inputs.
    `impl="reference"` is dense and in fp64.

    Raises ValueError for a row outside T, a window < 1 or without `causal`, or labels of another shape.

    >>> s = attention_stats(torch.randn(1, 8, 2, 4), torch.randn(1, 8, 1, 4), rows=[7])
    >>> s.entropy.shape
    torch.Size([1, 1, 2])
    """
    B, T, H, _ = q.shape
    S = k.shape[1]
    if H % k.shape[2]:
        raise ValueError(f"k has {k.shape[2]} heads, which do not divide q's {H}")
    if window is not None and window < 1:
        raise ValueError(f"window={window}: expected >= 1 (the query itself counts) or None")
    if not causal and (window is not None or limit is not None):
        raise ValueError(f"window={window}, limit={limit}: windows look back; they need causal=True")
    if (q_pos is None) != (k_pos is None) or (q_pos is None and T != S):
        raise ValueError(f"q has {T} tokens and k {S}: give both q_pos and k_pos")
    rows_ = _rows(rows, B, T, q.device)
    sets = None if labels is None else label_sets(labels, B, S)
    wide = torch.float64 if impl == "reference" else torch.promote_types(q.dtype, torch.float32)
    k = k.to(wide)
    banded = q_pos is None and causal  # keys of a chunk can be cut to the span its rows reach
    positions_q = torch.arange(T, device=q.device)[None] if q_pos is None else q_pos
    positions_k = torch.arange(S, device=q.device)[None] if k_pos is None else k_pos
    R = rows_.shape[1]
    step = R if impl == "reference" else _rows_at_once(B * H, S, window if banded else None)
    parts: list[AttentionStats] = []
    start = 0
    while start < R or not parts:
        r = rows_[:, start : start + step]
        keys = _span(r, S, window, sinks, banded)
        fit = max(1, CHUNK_ELEMENTS // (B * H * max(1, len(keys))))
        if fit < r.shape[1] and impl != "reference":  # rows that lie far apart reach more keys
            r = r[:, :fit]
            keys = _span(r, S, window, sinks, banded)
        picked = r.expand(B, -1)
        pos_q = positions_q.expand(B, T).gather(1, picked)
        pos_k = positions_k.index_select(1, keys)
        if causal:
            seg: dict[str, Tensor] = {}
            if q_seg is not None and k_seg is not None:
                seg = {"q_seg": q_seg.expand(B, T).gather(1, picked), "k_seg": k_seg.index_select(1, keys)}
            mask = visible_keys(pos_q, pos_k, window=window, sinks=sinks, limit=limit, **seg)
        else:
            mask = (pos_k >= 0)[:, None].expand(B, r.shape[1], -1)
        mask = mask[:, :, None]
        if blocked is not None:
            hidden = blocked[:, start : start + r.shape[1]].index_select(-1, keys)
            mask = mask & ~(hidden if hidden.ndim == 4 else hidden[:, :, None])
        part = _chunk(
            q.gather(1, picked[:, :, None, None].expand(-1, -1, *q.shape[2:])).to(wide),
            k.index_select(1, keys), mask, pos_q, pos_k,
            None if sets is None else sets.index_select(1, keys),
            q.shape[-1] ** -0.5 if scale is None else scale, softcap, sink_logits,
        )  # fmt: skip
        part.top1 = keys[part.top1]
        parts.append(part)
        start += max(1, r.shape[1])
    return AttentionStats.cat(parts, 1)


def _rows_at_once(heads: int, S: int, window: int | None) -> int:
    """Rows of a chunk where they are neighbours: as many as a window's width, within CHUNK_ELEMENTS."""
    if window is None or 2 * window >= S:
        return max(1, CHUNK_ELEMENTS // (heads * S))
    return max(1, min(window, CHUNK_ELEMENTS // (heads * 2 * window)))


def _span(rows: Tensor, S: int, window: int | None, sinks: int, banded: bool) -> Tensor:
    """Indices of the keys that these rows can reach."""
    keys = torch.arange(S, device=rows.device)
    if not banded or not rows.numel():
        return keys
    low = 0 if window is None else max(0, int(rows.min()) - window + 1)
    return torch.cat([keys[: min(sinks, low)], keys[low : int(rows.max()) + 1]])


def _chunk(
    q: Tensor, k: Tensor, mask: Tensor, q_pos: Tensor, k_pos: Tensor, sets: Tensor | None,
    scale: float, softcap: float | None, sink_logits: Tensor | None,
) -> AttentionStats:  # fmt: skip
    """Dense over the chunk: q [B,R,H,K], k [B,S,G,K], mask [B,R,1 or H,S], sets [B,S,sets]."""
    B, R, H, K = q.shape
    G = k.shape[2]
    scores = torch.einsum("brgnk,bsgk->brgns", q.view(B, R, G, H // G, K), k)
    scores = scores.reshape(B, R, H, k.shape[1]) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~mask, -torch.inf)
    top, index = scores.max(-1)
    peak = top if sink_logits is None else torch.maximum(top, sink_logits.to(scores.dtype))
    peak = peak.clamp(min=torch.finfo(scores.dtype).min)  # a row that sees nothing
    shifted = scores - peak[..., None]
    weights = shifted.exp()
    total = weights.sum(-1)
    centred = (weights * shifted.masked_fill(~mask, 0)).sum(-1)
    sink = torch.zeros_like(total)
    if sink_logits is not None:
        gap = sink_logits.to(scores.dtype) - peak
        sink = gap.exp()
        total, centred = total + sink, centred + sink * gap
    safe = total.clamp(min=torch.finfo(scores.dtype).tiny)
    distance = (q_pos[:, :, None] - k_pos[:, None]).to(scores.dtype)
    mass = weights.new_zeros(B, R, H, 0)
    if sets is not None:
        mass = torch.einsum("brhs,bsn->brhn", weights, sets.to(weights.dtype)) / safe[..., None]
    return AttentionStats(
        lse=torch.where(total > 0, peak + safe.log(), -torch.inf),
        entropy=(safe.log() - centred / safe).clamp(min=0),
        visible=mask.sum(-1).expand(B, R, H).contiguous(),
        mass=mass,
        top1=index,
        top1_prob=(top - peak).exp() / safe,
        distance=torch.einsum("brhs,brs->brh", weights, distance) / safe,
        sink_mass=sink / safe,
    )


def label_count(labels: Tensor) -> int:
    """Number of key sets that `labels` (bool, or bits of a uint8) speaks of."""
    if labels.dtype == torch.bool:
        return 1 if labels.ndim < 3 else labels.shape[2]
    return max(1, int(labels.max()).bit_length()) if labels.numel() else 1


def label_sets(labels: Tensor, B: int, S: int) -> Tensor:
    """Labels of keys as bool [B,S,sets]; ValueError for another dtype or shape."""
    if labels.dtype not in (torch.bool, torch.uint8):
        raise ValueError(f"labels: dtype {labels.dtype}; expected bool, or uint8 with one bit per key set")
    if labels.shape[:2] != (B, S) or labels.ndim > (3 if labels.dtype == torch.bool else 2):
        raise ValueError(f"labels: shape {tuple(labels.shape)}; expected {(B, S)}, one per key")
    if labels.dtype == torch.bool:
        return labels if labels.ndim == 3 else labels[..., None]
    bits = torch.arange(label_count(labels), device=labels.device, dtype=torch.uint8)
    return (labels[..., None] >> bits) & 1 == 1


def _rows(rows: Tensor | Sequence[int] | None, B: int, T: int, device: torch.device) -> Tensor:
    """Row indices as [1 or B, R], negative ones counted from the end."""
    if rows is None:
        return torch.arange(T, device=device)[None]
    r = torch.as_tensor(rows, device=device, dtype=torch.int64)
    r = r[None] if r.ndim == 1 else r
    if r.ndim != 2 or r.shape[0] not in (1, B):
        raise ValueError(f"rows: shape {tuple(r.shape)}; expected [R] or [{B}, R]")
    if r.numel() and (int(r.min()) < -T or int(r.max()) >= T):
        raise ValueError(f"rows: {int(r.min())}..{int(r.max())} do not fit {T} query rows")
    return torch.where(r < 0, r + T, r)
