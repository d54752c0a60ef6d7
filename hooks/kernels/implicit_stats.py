"""The implicit attention of a recurrence, and its statistics on the scale of a softmax head's.

A recurrence (`recurrence.py`) is linear in its values, so its output is a sum over tokens with weights

    o_t = sum over j <= t of w_tj v_j,   w_tj = q_t . A_t ... A_{j+1} k_j

(read="before": j < t, and the transitions end with A_{t-1}). The weights are signed, do not sum to one and are **not
probabilities** (arXiv 2403.01590 calls them hidden attention). What is compared with softmax heads is each token's
share of the absolute weight, p_tj = |w_tj| / sum_i |w_ti|.

Time is cut into chunks. One pass of the op over a row's own chunk, with the identity for values and for the initial
state, gives the weights in it and the query carried back to its start. Keys of earlier chunks are carried forward to
their chunk's end; the query moves back over a chunk by the product of its transitions. No T x T tensor and nothing
divides: a weight that underflows is zero.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from .attention_stats import AttentionStats, label_sets
from .recurrence import Read, plain, recurrence, without_autocast
from .stats_arguments import row_indices
from .windowed import carried, check_cap

CHUNK = 64  # tokens of a chunk
ELEMENTS = 2**23  # of any tensor held at once, over batch, heads, rows and keys


@dataclasses.dataclass(kw_only=True)
class ImplicitStats(AttentionStats):
    """Statistics of R query rows of a recurrence, each [B,R,H] (`mass`, `signed` [B,R,H,sets]).

    Entropy, mass, top-1, distance (and histogram) are those of the shares |w| / sum |w|; `lse` is log sum |w|;
    `visible` counts the tokens that may carry weight; `sink_mass` is 0. `signed` is the sum of w over a key set,
    `signed_total` over all keys. A row that reads nothing has zeros throughout and lse = -inf.
    """

    signed: Tensor
    signed_total: Tensor


@torch.no_grad()
@without_autocast
def implicit_stats(
    *,
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    log_decay: Float[Tensor, "B T H _"] | None = None,
    beta: Float[Tensor, "B T H"] | None = None,
    a: Float[Tensor, "B T H K"] | None = None,
    b: Float[Tensor, "B T H K"] | None = None,
    write: Float[Tensor, "B T H"] | None = None,
    bonus: Float[Tensor, "B T H"] | None = None,
    rows: Int[Tensor, " R"] | Int[Tensor, "_ R"] | Sequence[int] | None = None,
    labels: Tensor | None = None,
    cap: int | None = None,
    conv: int = 1,
    read: Read = "after",
    histogram: bool = False,
) -> ImplicitStats:
    """Statistics of the implicit attention of the rows `rows` (indices into T, shared [R] or [B,R]; None: all).

    q, k, log_decay, beta, a, b and `read` as in `recurrence`, from a zero state. Weights are on the values that the
    recurrence gets; under the delta rule on v, not beta v. `write`: a factor that is inside those values, so that
    weights are on the values without it. `bonus`: weight of a token on its own value beside the recurrence. `cap` and
    `conv` as in `windowed.capped`: weights outside the cap are zero. `labels` as in `attention_stats`. `histogram`:
    shares by distance; bin 0 is distance 0, bin n is 2^(n-1) <= distance < 2^n. fp32, or fp64 for fp64 inputs.

    Raises ValueError for a row outside T, a cap smaller than `conv`, or labels of another shape.
    """
    x, wanted, low = _prepare(q, k, log_decay, beta, a, b, write, rows, cap, conv)
    B, T, H, K = q.shape
    sets = None if labels is None else label_sets(labels, B, T)
    groups = []
    for r, lo in zip(*(y.split(_rows_at_once(B, T, H, K), 1) for y in (wanted, low)), strict=True):
        own = None if bonus is None else _at(bonus, r).to(x["q"].dtype)
        sums = _Sums(r, 0 if sets is None else sets.shape[2], T, histogram, x["q"])
        for first, w in _sweep(x, r, lo, own, read):
            sums.add(first, w, sets)
        groups.append(sums.fields(r - lo + (read == "after" or bonus is not None)))
    return ImplicitStats(**{name: torch.cat([g[name] for g in groups], 1) for name in groups[0]})


@torch.no_grad()
@without_autocast
def implicit_weights(
    *,
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    log_decay: Float[Tensor, "B T H _"] | None = None,
    beta: Float[Tensor, "B T H"] | None = None,
    a: Float[Tensor, "B T H K"] | None = None,
    b: Float[Tensor, "B T H K"] | None = None,
    write: Float[Tensor, "B T H"] | None = None,
    bonus: Float[Tensor, "B T H"] | None = None,
    rows: Int[Tensor, " R"] | Int[Tensor, "_ R"] | Sequence[int] | None = None,
    cap: int | None = None,
    conv: int = 1,
    read: Read = "after",
) -> Float[Tensor, "B R H T"]:
    """The weights w_tj themselves, for a few rows: o_t = sum_j w_tj v_j. Arguments as in `implicit_stats`."""
    x, r, low = _prepare(q, k, log_decay, beta, a, b, write, rows, cap, conv)
    B, T, H, _ = q.shape
    out = x["q"].new_zeros(B, r.shape[1], H, T)
    for first, w in _sweep(x, r, low, None if bonus is None else _at(bonus, r).to(out.dtype), read):
        out[..., first : first + w.shape[-1]] = w
    return out


def _prepare(
    q: Tensor, k: Tensor, log_decay: Tensor | None, beta: Tensor | None, a: Tensor | None, b: Tensor | None,
    write: Tensor | None, rows: Tensor | Sequence[int] | None, cap: int | None, conv: int,
) -> tuple[dict[str, Tensor], Tensor, Tensor]:  # fmt: skip
    """The recurrence written out in fp32 or fp64 (k: with the write strength), rows [B,R], and the first token that
    each may see."""
    if (a is None) != (b is None):
        raise ValueError("a, b: one of them is None; give both or neither")
    dtype = torch.promote_types(q.dtype, torch.float32)
    q, k = q.to(dtype), k.to(dtype)
    log_decay, beta, a, b = (None if y is None else y.to(dtype) for y in (log_decay, beta, a, b))
    written, log_decay, a, b = plain(k=k, v=k, log_decay=log_decay, beta=beta, a=a, b=b)
    assert log_decay is not None
    if write is not None:
        written = write.to(dtype)[..., None] * written
    x = {"q": q, "k": written, "log_decay": log_decay, **({} if a is None or b is None else {"a": a, "b": b})}
    r = row_indices(rows, q.shape[0], q.shape[1], q.device).expand(q.shape[0], -1)
    low = torch.zeros_like(r)
    if cap is not None:
        check_cap(cap, conv)
        low = torch.where(r < cap, 0, r - cap + conv)
    return x, r, low


def _rows_at_once(B: int, T: int, H: int, K: int) -> int:
    return max(1, ELEMENTS // (B * H * (K + 2 * min(CHUNK, T))))


def _sweep(
    x: dict[str, Tensor], rows: Tensor, low: Tensor, bonus: Tensor | None, read: Read
) -> Iterator[tuple[int, Tensor]]:
    """The weights [B,R,H,n] of n neighbouring keys and the first of them, from the newest keys to the oldest; zero
    outside low..row."""
    B, T, H, K = x["q"].shape
    R = rows.shape[1]
    if not R:
        return
    C = min(CHUNK, T)
    folded = {name: _fold(y, C) for name, y in x.items()}
    home = rows // C
    own, query = _own_chunk(folded, rows, C, read)
    if bonus is not None:
        own = own.scatter_add(-1, (rows % C)[..., None, None].expand(B, R, H, 1), bonus[..., None])
    end, stop = int(home.max()) + 1, int(low.min()) // C
    together = max(1, min(ELEMENTS // (B * R * H * C), ELEMENTS // (16 * B * C * H * K)))
    while end > stop:
        start = max(stop, end - together)
        part = {name: y[:, start:end].flatten(0, 1) for name, y in folded.items() if name != "q"}
        keys, back = (y.unflatten(0, (B, end - start)) for y in carried(**part))
        weights = []
        for n in range(end - start - 1, -1, -1):
            earlier, here = (f[..., None, None] for f in (home > start + n, home == start + n))
            w = torch.einsum("brhk,bchk->brhc", query, keys[:, n])
            weights.append(torch.where(earlier, w, own.masked_fill(~here, 0)))
            query = torch.where(earlier, torch.einsum("bhij,brhj->brhi", back[:, n], query), query)
        w = torch.cat(weights[::-1], -1)[..., : T - start * C]
        token = torch.arange(start * C, start * C + w.shape[-1], device=w.device)
        outside = (token < low[..., None]) | (token > rows[..., None])
        yield start * C, w.masked_fill(outside[:, :, None], 0)
        end = start


def _own_chunk(x: dict[str, Tensor], rows: Tensor, C: int, read: Read) -> tuple[Tensor, Tensor]:
    """Weights of each row on its own chunk's tokens [B,R,H,C], and its query carried back to the chunk's start
    [B,R,H,K]: A_first^T ... A_t^T q_t."""
    B, N, _, H, K = x["q"].shape
    R = rows.shape[1]
    pair = torch.arange(B, device=rows.device)[:, None] * N + rows // C
    chunks, which = pair.unique(return_inverse=True)
    eye = torch.eye(C + K, dtype=x["q"].dtype, device=rows.device)
    values = F.pad(eye[:C, :C], (0, K))[:, None]  # token c's value is the unit vector c
    state = F.pad(eye[:K, :K], (C, 0))
    out = eye.new_zeros(B, R, H, C + K)
    step = max(1, ELEMENTS // (C * H * (C + 16 * K)))  # the op spends 16 K a token
    for first, some in enumerate(chunks.split(step)):
        f: dict[str, Any] = {name: y.flatten(0, 1)[some] for name, y in x.items()}
        n = len(some)
        o, _ = recurrence(**f, v=values.expand(n, C, H, -1), state=state.expand(n, H, -1, -1), read=read)
        here = (which >= first * step) & (which < first * step + n)
        out[here] = o[which[here] - first * step, (rows % C)[here]]
    return out[..., :C], out[..., C:]


class _Sums:
    """Running sums over keys for rows [B,R]. The entropy is kept centred on the largest weight so far:
    H = log(l/m) - a/l with l = sum |w|, a = sum |w| log(|w|/m)."""

    def __init__(self, rows: Tensor, sets: int, T: int, histogram: bool, like: Tensor) -> None:
        shape = (*rows.shape, like.shape[2])
        self.rows = rows
        self.top, self.size, self.centred, self.total, self.far = (like.new_zeros(shape) for _ in range(5))
        self.index = torch.zeros(shape, dtype=torch.int64, device=rows.device)
        self.mass, self.signed = like.new_zeros(*shape, sets), like.new_zeros(*shape, sets)
        self.bins = like.new_zeros(*shape, max(0, T - 1).bit_length() + 1 if histogram else 0)
        self.tiny = torch.finfo(like.dtype).tiny

    def add(self, first: int, w: Tensor, sets: Tensor | None) -> None:
        """Weights w [B,R,H,n] of the keys from `first` on."""
        size, n = w.abs(), w.shape[-1]
        peak, at = size.max(-1)
        top = torch.maximum(self.top, peak)
        fell = (self.top / top.clamp(min=self.tiny)).clamp(min=self.tiny).log()
        ratio = (size / top.clamp(min=self.tiny)[..., None]).clamp(min=self.tiny)
        self.centred += self.size * fell + (size * ratio.log()).sum(-1)
        self.index = torch.where(peak >= self.top, first + at, self.index)  # of equal ones the oldest, as argmax
        self.top = top
        self.size += size.sum(-1)
        self.total += w.sum(-1)
        distance = (self.rows[..., None] - torch.arange(first, first + n, device=w.device)).clamp(min=0)
        self.far += torch.einsum("brhs,brs->brh", size, distance.to(w.dtype))
        if sets is not None:
            inside = sets[:, first : first + n].to(w.dtype)
            self.mass += torch.einsum("brhs,bsn->brhn", size, inside)
            self.signed += torch.einsum("brhs,bsn->brhn", w, inside)
        if self.bins.shape[-1]:
            bin_of = torch.frexp(distance.double()).exponent.long()  # 0, 1, 2, 2, 3, ...: the number's bit length
            self.bins.scatter_add_(-1, bin_of[:, :, None].expand_as(size), size)

    def fields(self, visible: Tensor) -> dict[str, Tensor]:
        """What ImplicitStats holds."""
        size = self.size.clamp(min=self.tiny)
        spread = (size / self.top.clamp(min=self.tiny)).log() - self.centred / size
        return {
            "lse": self.size.log(),
            "entropy": spread.clamp(min=0) * (self.size > 0),
            "visible": visible[..., None].expand_as(self.index).contiguous(),
            "mass": self.mass / size[..., None],
            "top1": self.index,
            "top1_prob": self.top / size,
            "distance": self.far / size,
            "sink_mass": torch.zeros_like(size),
            "histogram": self.bins / size[..., None],
            "signed": self.signed,
            "signed_total": self.total,
        }


def _fold(x: Tensor, C: int) -> Tensor:
    """[B,T,H,D] -> [B,chunks,C,H,D]; the padding neither writes, decays nor erases."""
    return F.pad(x, (0, 0, 0, 0, 0, -x.shape[1] % C)).unflatten(1, (-1, C))


def _at(x: Tensor, rows: Tensor) -> Tensor:
    """x [B,T,H] at rows [B,R]."""
    return x.gather(1, rows[..., None].expand(-1, -1, x.shape[2]))
