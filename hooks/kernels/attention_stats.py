"""What each query row of a softmax head looks at, without a T x T matrix.

Per row: log-sum-exp, entropy, number of visible keys, mass on labelled key sets, top-1 key and its
probability, mean distance, distance histogram. One signature, three paths: `triton` (CUDA, one pass over the keys),
`torch` (any device, chunks of rows) and `reference` (dense, in fp64).
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from . import attention_stats_torch, dispatch
from . import stats_arguments as arguments
from .fused import DTYPES, INSTALL

CHUNK_ELEMENTS = 2**22  # scores that the torch path holds at once, over batch, heads, rows and keys
BITS = 8  # key sets that the kernel reads at once
Impl = Literal["auto", "torch", "triton", "reference"]


@dataclasses.dataclass
class AttentionStats:
    """Statistics of R query rows, each [B,R,H] (`mass` [B,R,H,sets]); entropies and lse in nats.

    `top1` is the key's index (of equal scores, any one's), `distance` the mean distance back in tokens, `sink_mass` the
    share of a learnable sink logit (0 without one). Entropy and mass are over the real keys plus that sink.
    `histogram` [B,R,H,bins] is the share of attention by distance: bin 0 distance 0, bin n 2^(n-1) to 2^n - 1; with
    the sink's share it sums to 1. What was not asked for has a last dimension of 0.
    """

    lse: Tensor
    entropy: Tensor
    visible: Tensor
    mass: Tensor
    top1: Tensor
    top1_prob: Tensor
    distance: Tensor
    sink_mass: Tensor
    histogram: Tensor

    @property
    def entropy_norm(self) -> Tensor:
        """Entropy over log(visible keys), the sink counted as one more where there is one; 0 for one key."""
        keys = self.visible + (self.sink_mass > 0)
        return torch.where(keys > 1, self.entropy / keys.clamp(min=2).log(), torch.zeros_like(self.entropy))

    def fields(self) -> dict[str, Tensor]:
        """Name to tensor, of what was asked for."""
        every = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {name: value for name, value in every.items() if value.shape[-1]}

    @classmethod
    def cat(cls, parts: Sequence[AttentionStats], dim: int) -> AttentionStats:
        """Concatenate along batch (0) or rows (1); histograms of shorter contexts get empty bins."""
        bins = max(p.histogram.shape[-1] for p in parts)
        joined = {f.name: [getattr(p, f.name) for p in parts] for f in dataclasses.fields(cls)}
        joined["histogram"] = [F.pad(x, (0, bins - x.shape[-1])) for x in joined["histogram"]]
        return cls(**{name: torch.cat(tensors, dim) for name, tensors in joined.items()})


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
    cu_seqlens: Int[Tensor, " ends"] | Sequence[int] | None = None,
    blocked: Bool[Tensor, "B R S"] | Bool[Tensor, "B R _ S"] | None = None,
    top1: bool = True,
    distance: bool = True,
    histogram: bool = False,
    impl: Impl = "auto",
) -> AttentionStats:
    """Attention statistics of the query rows `rows` (indices into T, shared [R] or [B,R]; None: all).

    `window` counts the query; the first `sinks` keys stay visible under it (within `limit`, a hard bound);
    `sink_logits` [H] join the denominator; `softcap` c bounds scores as c tanh(s/c). `labels` puts keys in
    sets: bool [B,S] (one set), bool [B,S,sets], or uint8 [B,S], bit n for set n, as many as the highest bit says.
    `q_pos` [B,T], `k_pos` [B,S]: token positions where queries and keys are not the same tokens 0..T-1 (negative key
    position: padding); `q_seg`, `k_seg`: only keys of the query's own segment are visible. `cu_seqlens` [n+1]: n
    documents packed into a batch of one, each as if alone (0, ends, T). `blocked` hides single edges, [B,R,S] or per
    head [B,R,H,S].
    `top1`, `distance` and `histogram` say which of these to find: the first two cost a kernel some time, all rows
    of a histogram T x bins numbers. Values are detached, also under grad; arithmetic is fp32, or fp64 for fp64 inputs.

    `impl="auto"` is the Triton kernel for CUDA tensors in fp32, bf16 or fp16; torch elsewhere, under
    `use_kernels("torch")`, for `blocked` and for head dims past 256. `reference` is dense and in fp64.

    Raises ValueError for a row outside T, a window < 1 or without `causal`, shapes that do not go together, or a kernel
    asked for that cannot run; ImportError where it wants Triton and that is not installed.

    >>> s = attention_stats(torch.randn(1, 8, 2, 4), torch.randn(1, 8, 1, 4), rows=[7])
    >>> s.entropy.shape
    torch.Size([1, 1, 2])
    """
    arguments.check_inputs(q, k, sink_logits)
    B, T = q.shape[:2]
    S = k.shape[1]
    wanted = None if rows is None else arguments.row_indices(rows, B, T, q.device)
    sets = None if labels is None else KeySets(labels, B, S)
    return stats_of_rows(
        q, k, wanted, sets, scale=scale, causal=causal, window=window, sinks=sinks, limit=limit,
        sink_logits=sink_logits, softcap=softcap, q_pos=q_pos, k_pos=k_pos, q_seg=q_seg, k_seg=k_seg,
        cu_seqlens=cu_seqlens, blocked=blocked, top1=top1, distance=distance, histogram=histogram, impl=impl,
    )  # fmt: skip


@torch.no_grad()
def stats_of_rows(
    q: Tensor, k: Tensor, rows: Tensor | None, key_sets: KeySets | None, *, scale: Any = None, causal: bool = True,
    window: Any = None, sinks: Any = 0, limit: Any = None, sink_logits: Tensor | None = None, softcap: Any = None,
    q_pos: Tensor | None = None, k_pos: Tensor | None = None, q_seg: Tensor | None = None,
    k_seg: Tensor | None = None, cu_seqlens: Any = None, blocked: Tensor | None = None, top1: bool = True,
    distance: bool = True, histogram: bool = False, impl: Any = "auto",
) -> AttentionStats:  # fmt: skip
    """`attention_stats` of `rows` [1 or B,R] that are checked and on q's device, which many layers may share; the other
    arguments are checked here."""
    window, sinks, limit = arguments.span(causal=causal, window=window, sinks=sinks, limit=limit, histogram=histogram)
    arguments.check_score(scale=scale, softcap=softcap)
    B, T, H, D = q.shape
    S = k.shape[1]
    arguments.check_blocked(blocked, B, T if rows is None else rows.shape[1], H, S)
    if cu_seqlens is not None:
        if q_pos is not None or k_pos is not None or q_seg is not None or k_seg is not None:
            raise ValueError("cu_seqlens: give it alone, or positions and segments")
        q_seg, q_pos = arguments.document_places(cu_seqlens, B, T, S, q.device)
        k_seg, k_pos = q_seg, q_pos
    arguments.check_places(B, T, S, q_pos=q_pos, k_pos=k_pos, q_seg=q_seg, k_seg=k_seg)
    path = _path(impl, q, k, blocked)
    bins = 0
    if histogram:  # enough for the longest distance that can occur
        bins = (S - 1 if q_pos is None or cu_seqlens is not None else max(int(q_pos.max()), 0)).bit_length() + 1
    options: dict[str, Any] = {
        "scale": D**-0.5 if scale is None else float(scale), "causal": causal, "window": window, "sinks": sinks,
        "limit": limit, "sink_logits": sink_logits, "softcap": softcap, "q_pos": q_pos, "k_pos": k_pos,
        "q_seg": q_seg, "k_seg": k_seg, "top1": top1, "distance": distance, "bins": bins,
    }  # fmt: skip
    if path == "triton":
        return _with_sink(_triton(q, k, rows, key_sets, options), sink_logits)
    wide = torch.float64 if path == "reference" else torch.promote_types(q.dtype, torch.float32)
    sets = None if key_sets is None else key_sets.sets
    elements = None if path == "reference" else CHUNK_ELEMENTS
    rows = arguments.row_indices(None, B, T, q.device) if rows is None else rows
    parts = attention_stats_torch.chunks(
        q=q.to(wide), k=k.to(wide), rows=rows, sets=sets, blocked=blocked, elements=elements, **options
    )
    return _with_sink(AttentionStats.cat([AttentionStats(**part) for part in parts], 1), sink_logits)


def _with_sink(stats: AttentionStats, sink_logits: Tensor | None) -> AttentionStats:
    """A sink's share is never quite 0, however small: `entropy_norm` knows by it that there is one."""
    if sink_logits is not None:
        least = torch.finfo(stats.sink_mass.dtype).tiny
        stats.sink_mass = stats.sink_mass.clamp(min=least) * (sink_logits > -torch.inf)
    return stats


def _path(impl: str, q: Tensor, k: Tensor, blocked: Tensor | None) -> Literal["torch", "triton", "reference"]:
    """The path that `impl` means for these tensors."""
    takes = q.dtype in DTYPES and k.dtype in DTYPES and q.shape[-1] <= 256
    if impl == "triton":
        if blocked is not None:
            raise ValueError('impl="triton": `blocked` edges need the torch path')
        if not takes:
            raise ValueError(
                f'impl="triton": {q.dtype}, head dim {q.shape[-1]}; expected fp32, bf16 or fp16, at most 256'
            )
    elif impl in ("torch", "reference"):
        return impl
    elif impl != "auto":
        raise ValueError(f"impl={impl!r}: expected one of {', '.join(get_args(Impl))}")
    elif not (q.is_cuda and takes and blocked is None) or dispatch.policy() == "torch":
        return "torch"
    if importlib.util.find_spec("triton") is None:
        raise ImportError(
            f"attention_stats' kernel needs triton, which is not installed: {INSTALL}, or choose the slower torch path "
            'with use_kernels("torch")'
        )
    return "triton"


def _triton(
    q: Tensor, k: Tensor, rows: Tensor | None, key_sets: KeySets | None, options: dict[str, Any]
) -> AttentionStats:
    """The kernel, for up to BITS key sets at a time."""
    from . import attention_stats_launch as launch

    if key_sets is None:
        return AttentionStats(**launch.stats(q=q, k=k, rows=rows, labels=None, sets=0, **options))
    first, *more = (
        launch.stats(q=q, k=k, rows=rows, labels=b, sets=min(BITS, key_sets.count - BITS * i), **options)
        for i, b in enumerate(key_sets.bits)
    )
    if more:
        first["mass"] = torch.cat([first["mass"], *(m["mass"] for m in more)], -1)
    return AttentionStats(**first)


class KeySets:
    """Sets of keys, from `labels` as attention_stats() takes them, in the forms that its paths take; each made once.

    Raises ValueError for another dtype or shape.
    """

    def __init__(self, labels: Tensor, B: int, S: int) -> None:
        _check_labels(labels, B, S)
        self.labels = labels

    @functools.cached_property
    def count(self) -> int:
        return label_count(self.labels)

    @functools.cached_property
    def sets(self) -> Tensor:
        """Bool [B,S,sets]."""
        return label_sets(self.labels, *self.labels.shape[:2])

    @functools.cached_property
    def bits(self) -> list[Tensor]:
        """Uint8 [B,S], BITS sets in each."""
        labels = self.labels
        if labels.dtype == torch.uint8:
            return [labels]
        if labels.ndim == 2:
            return [labels.to(torch.uint8)]
        parts = labels.split(BITS, 2) or [labels.new_zeros(*labels.shape[:2], 1)]
        bits = torch.arange(BITS, device=labels.device, dtype=torch.uint8)
        return [(part << bits[: part.shape[2]]).sum(-1, dtype=torch.uint8) for part in parts]


def label_count(labels: Tensor) -> int:
    """Number of key sets that `labels` (bool, or bits of a uint8) speaks of."""
    if labels.dtype == torch.bool:
        return 1 if labels.ndim < 3 else labels.shape[2]
    return max(1, int(labels.max()).bit_length()) if labels.numel() else 1


def label_sets(labels: Tensor, B: int, S: int) -> Tensor:
    """Labels of keys as bool [B,S,sets]; ValueError for another dtype or shape."""
    _check_labels(labels, B, S)
    if labels.dtype == torch.bool:
        return labels if labels.ndim == 3 else labels[..., None]
    bits = torch.arange(label_count(labels), device=labels.device, dtype=torch.uint8)
    return (labels[..., None] >> bits) & 1 == 1


def _check_labels(labels: Tensor, B: int, S: int) -> None:
    if labels.dtype not in (torch.bool, torch.uint8):
        raise ValueError(f"labels: dtype {labels.dtype}; expected bool, or uint8 with one bit per key set")
    if labels.shape[:2] != (B, S) or labels.ndim > (3 if labels.dtype == torch.bool else 2):
        raise ValueError(f"labels: shape {tuple(labels.shape)}; expected {(B, S)}, one per key")
