"""The one recurrence behind every linear mixer: the slow loop (the specification) and a chunked torch path.

    S_t = A_t S_{t-1} + k_t v_t^T,   A_t = diag(exp(log_decay_t)) + b_t a_t^T,   S in R^{K x V}
    o_t = S_t^T q_t   (read="after")   or   o_t = S_{t-1}^T q_t   (read="before")

Shapes: q, k [B,T,H,K]; v [B,T,H,V]; log_decay [B,T,H,K] (per channel) or [B,T,H,1] (one scalar), all <= 0;
or None (no decay); a, b [B,T,H,K] or None (no erasure); state [B,H,K,V] or None (zero). Both return the outputs o
[B,T,H,V] and the final state. Computation is in fp32, or fp64 where the inputs are.

`beta` [B,T,H] instead of a and b asks for the delta rule with decay alpha (arXiv 2412.06464, 2510.26692):

    A_t = (I - beta_t k_t k_t^T) diag(alpha_t),   and beta_t v_t for v_t:   a = alpha k,  b = -beta k
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Literal, ParamSpec, TypeVar

import torch
from torch import Tensor

Read = Literal["after", "before"]
P = ParamSpec("P")
R = TypeVar("R")


def without_autocast(function: Callable[P, R]) -> Callable[P, R]:
    """Keep autocast from lowering the products of a function that promises fp32."""

    @functools.wraps(function)
    def exact(*args: P.args, **kwargs: P.kwargs) -> R:
        device = next(x.device.type for x in kwargs.values() if isinstance(x, Tensor))
        with torch.autocast(device, enabled=False):
            return function(*args, **kwargs)

    return exact


def plain(
    *, k: Tensor, v: Tensor, log_decay: Tensor | None = None, beta: Tensor | None = None, a: Tensor | None = None,
    b: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """v, log_decay, a and b with the delta rule and a missing decay written out."""
    if log_decay is None:
        log_decay = torch.zeros(*k.shape[:3], 1, dtype=torch.promote_types(k.dtype, torch.float32), device=k.device)
    if beta is None:
        return v, log_decay, a, b
    assert a is None
    assert b is None
    return beta[..., None] * v, log_decay, log_decay.exp() * k, -beta[..., None] * k


@without_autocast
def recurrence_reference(
    *, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None = None, beta: Tensor | None = None,
    a: Tensor | None = None, b: Tensor | None = None, state: Tensor | None = None, read: Read = "after",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The specification: a loop over time."""
    out_dtype = v.dtype
    v, log_decay, a, b = plain(k=k, v=v, log_decay=log_decay, beta=beta, a=a, b=b)
    dtype = torch.promote_types(q.dtype, torch.float32)
    S = _initial(k, v, state, dtype)
    outputs = []
    for t in range(q.shape[1]):
        before = S
        S = log_decay[:, t].to(dtype).exp()[..., None] * before + _outer(k[:, t], v[:, t], dtype)
        if a is not None and b is not None:
            erased = torch.einsum("bhk,bhkv->bhv", a[:, t].to(dtype), before)
            S = S + _outer(b[:, t], erased, dtype)
        outputs.append(torch.einsum("bhk,bhkv->bhv", q[:, t].to(dtype), S if read == "after" else before))
    out = torch.stack(outputs, 1) if outputs else v.new_zeros(v.shape, dtype=dtype)
    return out.to(out_dtype), S


@without_autocast
def recurrence(
    *, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None = None, beta: Tensor | None = None,
    a: Tensor | None = None, b: Tensor | None = None, state: Tensor | None = None, read: Read = "after",
    chunk: int | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The same, chunk by chunk: matrices within `chunk` tokens, a short loop over chunks.

    Decays enter only as exp of sums over spans, each <= 0 and each summed by itself: nothing overflows, and
    weak decays keep their precision beside strong ones (even -inf, a reset). With u_t = a_t^T S_{t-1}, the
    erasure is one more (key, value) pair (b_t, u_t); u solves a unit lower-triangular system in the chunk.
    """
    out_dtype = v.dtype
    v, log_decay, a, b = plain(k=k, v=v, log_decay=log_decay, beta=beta, a=a, b=b)
    B, T, H, K = q.shape
    V = v.shape[-1]
    dtype = torch.promote_types(q.dtype, torch.float32)
    S = _initial(k, v, state, dtype)
    if T == 0:
        return v.new_zeros(v.shape, dtype=out_dtype), S
    if chunk is None:  # heads of one channel have no matrix products to gain: a chunk of 32 takes 4x the time of 8
        chunk = 8 if K == 1 else 32 if log_decay.shape[-1] == 1 else 16
    C = min(T, chunk)
    pad = -T % C

    def fold(x: Tensor) -> Tensor:  # [B,T,H,D] -> [B,H,N,C,D]; the padding neither writes, decays nor erases
        x = torch.nn.functional.pad(x.to(dtype), (0, 0, 0, 0, 0, pad))
        return x.view(B, (T + pad) // C, C, H, x.shape[-1]).permute(0, 3, 1, 2, 4)

    q_, k_, v_, g = fold(q), fold(k), fold(v), fold(log_decay)
    from_start = g.cumsum(-2).exp()  # [B,H,N,C,K or 1]: decay from the chunk's start through t
    spans = _spans(g)  # ... of what token i wrote, through t
    before, spans_before = _before(from_start, -2, 1.0), _before(spans, -3, 0.0)  # ... through t-1
    q_from_start, q_spans = (from_start, spans) if read == "after" else (before, spans_before)
    to_end = spans[..., -1, :, :]

    q_state = q_ * q_from_start
    qk = _scores(q_, k_, q_spans)
    k_end = k_ * to_end
    if a is None or b is None:
        within = qk @ v_
        write = k_end.transpose(-1, -2) @ v_
        a_state = b_end = None
    else:
        a_, b_ = fold(a), fold(b)
        erase = _scores(a_, b_, spans_before)
        eye = torch.eye(C, dtype=dtype, device=q.device)
        right = torch.cat([a_ * before, _scores(a_, k_, spans_before) @ v_], -1)
        right = torch.linalg.solve_triangular(eye - erase, right, upper=False, unitriangular=True)
        a_state, solved = right.split([K, V], -1)  # u = a_state @ S + solved
        qb, b_end = _scores(q_, b_, q_spans), b_ * to_end
        within = qk @ v_ + qb @ solved
        write = k_end.transpose(-1, -2) @ v_ + b_end.transpose(-1, -2) @ solved
        q_state = q_state + qb @ a_state

    keep = from_start[..., -1, :][..., None]  # [B,H,N,K or 1,1]
    states = []
    for n in range(q_.shape[2]):
        states.append(S)
        carried = keep[:, :, n] * S
        if a_state is not None and b_end is not None:
            carried = carried + b_end[:, :, n].transpose(-1, -2) @ (a_state[:, :, n] @ S)
        S = carried + write[:, :, n]
    out = within + q_state @ torch.stack(states, 2)
    return out.permute(0, 2, 3, 1, 4).reshape(B, T + pad, H, V)[:, :T].to(out_dtype), S


def _spans(g: Tensor) -> Tensor:
    """exp(g_{i+1} + ... + g_t) for i <= t, 0 elsewhere: [..., C (t), C (i), D] from g [..., C, D]."""
    gap = torch.arange(g.shape[-2], device=g.device)
    gap = (gap[:, None] - gap)[..., None]  # t - i
    sums = g[..., :, None, :].masked_fill(gap <= 0, 0).cumsum(-3)
    return sums.masked_fill(gap < 0, -torch.inf).exp()


def _before(x: Tensor, dim: int, first: float) -> Tensor:
    """Entry t-1 in the place of entry t along `dim`."""
    start = torch.full_like(x.narrow(dim, 0, 1), first)
    return torch.cat([start, x.narrow(dim, 0, x.shape[dim] - 1)], dim)


def _scores(x: Tensor, y: Tensor, spans: Tensor) -> Tensor:
    """x_t . (spans_ti * y_i): [B,H,N,C,C]."""
    if spans.shape[-1] == 1:
        return (x @ y.transpose(-1, -2)) * spans[..., 0]
    return ((x[..., :, None, :] * spans) * y[..., None, :, :]).sum(-1)  # backward 4x faster than an einsum's


def _outer(x: Tensor, y: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype)[..., :, None] * y.to(dtype)[..., None, :]


def _initial(k: Tensor, v: Tensor, state: Tensor | None, dtype: torch.dtype) -> Tensor:
    if state is not None:
        return state.to(dtype)
    return torch.zeros(k.shape[0], k.shape[2], k.shape[-1], v.shape[-1], dtype=dtype, device=k.device)
