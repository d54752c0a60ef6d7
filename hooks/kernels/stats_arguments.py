"""What attention_stats() is asked for, checked before a kernel reads memory by it. Nothing here waits for a GPU, but
for rows that lie on one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..config import whole_number


def check_inputs(q: Tensor, k: Tensor, sink_logits: Tensor | None) -> None:
    """Raises ValueError for queries, keys or sinks whose shapes do not go together."""
    if q.ndim != 4 or k.ndim != 4:
        raise ValueError(f"q, k: shapes {tuple(q.shape)}, {tuple(k.shape)}; expected [B,T,H,K] and [B,S,G,K]")
    B, _, H, D = q.shape
    if k.shape[0] != B or k.shape[3] != D:
        raise ValueError(f"k: shape {tuple(k.shape)}; expected [{B},S,G,{D}], as q is {tuple(q.shape)}")
    if not k.shape[2] or H % k.shape[2]:
        raise ValueError(f"k has {k.shape[2]} heads, which do not divide q's {H}")
    if sink_logits is not None and sink_logits.shape != (H,):
        raise ValueError(f"sink_logits: shape {tuple(sink_logits.shape)}; expected one for each head, [{H}]")


def check_blocked(blocked: Tensor | None, B: int, R: int, H: int, S: int) -> None:
    """Raises ValueError for hidden edges that are not those of the R rows asked for."""
    if blocked is None:
        return
    fits = tuple(blocked.shape)[1:] in ((R, S), (R, H, S), (R, 1, S)) and len(blocked) in (1, B)
    if blocked.dtype != torch.bool or not fits:
        what = f"{blocked.dtype} of shape {tuple(blocked.shape)}"
        raise ValueError(
            f"blocked: {what}; expected bool {(B, R, S)} or {(B, R, H, S)}, an edge for each row asked for"
        )


def span(*, causal: bool, window: Any, sinks: Any, limit: Any, histogram: bool) -> tuple[int | None, int, int | None]:
    """Window, sinks and limit as ints. Raises ValueError for what is no such count of tokens."""
    if not causal and (window is not None or limit is not None):
        raise ValueError(f"window={window}, limit={limit}: windows look back; they need causal=True")
    if histogram and not causal:
        raise ValueError("histogram=True: distances look back; it needs causal=True")
    first = whole_number(sinks)
    if first is None or first < 0:
        raise ValueError(f"sinks={sinks!r}: expected a whole number >= 0")
    return _length("window", window), first, _length("limit", limit)


def _length(name: str, value: Any) -> int | None:
    number = whole_number(value)
    if value is not None and (number is None or number < 1):
        raise ValueError(f"{name}={value!r}: expected a whole number >= 1 (the query itself counts) or None")
    return number


def check_score(*, scale: float | None, softcap: float | None) -> None:
    """Raises ValueError for a scale that is no number, or a soft cap that is not positive."""
    if scale is not None and not math.isfinite(scale):
        raise ValueError(f"scale={scale}: expected a finite number or None")
    if softcap is not None and not (math.isfinite(softcap) and softcap > 0):
        raise ValueError(f"softcap={softcap}: expected a number > 0 or None")


def check_places(B: int, T: int, S: int, **places: Tensor | None) -> None:
    """Positions and segments q_pos, q_seg [1 or B,T] and k_pos, k_seg [1 or B,S]: both of a kind, or ValueError."""
    for kind in ("pos", "seg"):
        q, k = places[f"q_{kind}"], places[f"k_{kind}"]
        if (q is None) != (k is None):
            raise ValueError(f"give both q_{kind} and k_{kind}, or neither")
    if places["q_pos"] is None and T != S:
        raise ValueError(f"q has {T} tokens and k {S}: give both q_pos and k_pos")
    for name, value in places.items():
        n = T if name[0] == "q" else S
        if value is not None and (value.ndim != 2 or value.shape[0] not in (1, B) or value.shape[1] != n):
            raise ValueError(f"{name}: shape {tuple(value.shape)}; expected [1 or {B},{n}]")


def row_indices(rows: Tensor | Sequence[int] | None, B: int, T: int, device: torch.device) -> Tensor:
    """Row indices as [1 or B, R], negative ones counted from the end."""
    if rows is None:
        return torch.arange(T, device=device)[None]
    r = torch.as_tensor(rows)  # on its own device: a list is checked without waiting for a GPU
    if r.dtype == torch.bool or (r.is_floating_point() and r.numel()):
        raise ValueError(f"rows: {r.dtype}; expected indices, as whole numbers")
    r = r.long()
    r = r[None] if r.ndim == 1 else r
    if r.ndim != 2 or r.shape[0] not in (1, B):
        raise ValueError(f"rows: shape {tuple(r.shape)}; expected [R] or [{B}, R]")
    if r.numel() and (int(r.min()) < -T or int(r.max()) >= T):
        raise ValueError(f"rows: {int(r.min())}..{int(r.max())} do not fit {T} query rows")
    return to_device(torch.where(r < 0, r + T, r), device)


def document_places(
    cu_seqlens: Tensor | Sequence[int], B: int, T: int, S: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Document of each token and its position there, [1,T] each."""
    ends = torch.as_tensor(cu_seqlens, device=device)
    if B != 1 or T != S:
        raise ValueError(
            f"cu_seqlens: packed documents are one sample of the same tokens; got {B} samples of {T} and {S}"
        )
    whole = not (ends.is_floating_point() or ends.dtype == torch.bool) and ends.ndim == 1 and len(ends) > 1
    if not whole or int(ends[0]) or int(ends[-1]) != T or bool((ends.diff() < 0).any()):
        raise ValueError(f"cu_seqlens={ends.tolist()}: expected 0, the documents' ends in order, {T}")
    at = torch.arange(T, device=device)
    document = torch.bucketize(at, ends[1:], right=True)
    return document[None], (at - ends[document])[None]


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """x on `device`; from the CPU to a GPU without waiting for the work that is queued there."""
    if x.device.type == "cpu" and device.type == "cuda":
        x = x.pin_memory()
    return x.to(device, non_blocking=True)
