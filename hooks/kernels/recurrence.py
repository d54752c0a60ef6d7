"""The one recurrence behind every linear mixer: the slow loop (the specification) and a chunked torch path.

    S_t = A_t S_{t-1} + k_t v_t^T,   A_t = diag(exp(log_decay_t)) + b_t a_t^T,   S in R^{K x V}
    o_t = S_t^T q_t   (read="after")   or   o_t = S_{t-1}^T q_t   (read="before")

Shapes: q, k [B,T,H,K]; v [B,T,H,V]; log_decay [B,T,H,K] (per channel) or [B,T,H,1] (one scalar), all <= 0;
a, b [B,T,H,K] or None (no erasure); state [B,H,K,V] or None (zero). Both return (o [B,T,H,V], state [B,H,K,V]).
The delta rule with decay alpha and strength beta (arXiv 2412.06464) is a = k, b = -alpha beta k, and beta v for v.
Computation is in fp32, or fp64 where the inputs are.
"""  # fmt: skip

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Read = Literal["after", "before"]


def recurrence_reference(
    *, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, a: Tensor | None = None, b: Tensor | None = None,
    state: Tensor | None = None, read: Read = "after",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The specification: a loop over time."""
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
    return out.to(v.dtype), S


def recurrence(
    *, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, a: Tensor | None = None, b: Tensor | None = None,
    state: Tensor | None = None, read: Read = "after", chunk: int | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The same, chunk by chunk: matrices within `chunk` tokens, a short loop over chunks.

    Decays enter only as exp of differences that are <= 0, so nothing overflows however strong the decay.
    With u_t = a_t^T S_{t-1}, the erasure is one more (key, value) pair (b_t, u_t); u solves a unit
    lower-triangular system within the chunk.
    """
    B, T, H, K = q.shape
    V = v.shape[-1]
    dtype = torch.promote_types(q.dtype, torch.float32)
    S = _initial(k, v, state, dtype)
    if T == 0:
        return v.new_zeros(v.shape), S
    C = min(T, chunk or (32 if log_decay.shape[-1] == 1 else 16))
    pad = -T % C

    def fold(x: Tensor) -> Tensor:  # [B,T,H,D] -> [B,H,N,C,D]; the padding neither writes, decays nor erases
        x = torch.nn.functional.pad(x.to(dtype), (0, 0, 0, 0, 0, pad))
        return x.view(B, -1, C, H, x.shape[-1]).permute(0, 3, 1, 2, 4)

    q_, k_, v_ = fold(q), fold(k), fold(v)
    decay = fold(log_decay).cumsum(-2)  # log of the decay from the chunk's start through t
    before = decay - fold(log_decay)  # ... through t-1
    q_decay = decay if read == "after" else before
    to_end = (decay[..., -1:, :] - decay).exp()
    q_diagonal = 0 if read == "after" else -1

    q_state = q_ * q_decay.exp()
    qk = _scores(q_, k_, q_decay, decay, q_diagonal)
    k_end = k_ * to_end
    if a is None or b is None:
        within = qk @ v_
        write = k_end.transpose(-1, -2) @ v_
        a_state = solved = qb = b_end = None
    else:
        a_, b_ = fold(a), fold(b)
        erase = _scores(a_, b_, before, decay, -1)
        eye = torch.eye(C, dtype=dtype, device=q.device)
        right = torch.cat([a_ * before.exp(), _scores(a_, k_, before, decay, -1) @ v_], -1)
        right = torch.linalg.solve_triangular(eye - erase, right, upper=False, unitriangular=True)
        a_state, solved = right.split([K, V], -1)  # u = a_state @ S + solved
        qb, b_end = _scores(q_, b_, q_decay, decay, q_diagonal), b_ * to_end
        within = qk @ v_ + qb @ solved
        write = k_end.transpose(-1, -2) @ v_ + b_end.transpose(-1, -2) @ solved
        q_state = q_state + qb @ a_state

    keep = decay[..., -1, :].exp()[..., None]  # [B,H,N,K or 1,1]
    states = []
    for n in range(q_.shape[2]):
        states.append(S)
        carried = keep[:, :, n] * S
        if a_state is not None and b_end is not None:
            carried = carried + b_end[:, :, n].transpose(-1, -2) @ (a_state[:, :, n] @ S)
        S = carried + write[:, :, n]
    out = within + q_state @ torch.stack(states, 2)
    return out.permute(0, 2, 3, 1, 4).reshape(B, T + pad, H, V)[:, :T].to(v.dtype), S


def _scores(x: Tensor, y: Tensor, x_decay: Tensor, y_decay: Tensor, diagonal: int) -> Tensor:
    """x_t . (exp(x_decay_t - y_decay_i) * y_i) for i <= t + diagonal, 0 elsewhere: [B,H,N,C,C]."""
    C = x.shape[-2]
    keep = torch.ones(C, C, dtype=torch.bool, device=x.device).tril(diagonal)
    if x_decay.shape[-1] == 1:
        gaps = (x_decay - y_decay.transpose(-1, -2)).masked_fill(~keep, -torch.inf)
        return (x @ y.transpose(-1, -2)) * gaps.exp()
    gaps = (x_decay[..., :, None, :] - y_decay[..., None, :, :]).masked_fill(~keep[..., None], -torch.inf)
    return torch.einsum("...td,...id,...tid->...ti", x, y, gaps.exp())


def _outer(x: Tensor, y: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype)[..., :, None] * y.to(dtype)[..., None, :]


def _initial(k: Tensor, v: Tensor, state: Tensor | None, dtype: torch.dtype) -> Tensor:
    if state is not None:
        return state.to(dtype)
    return torch.zeros(k.shape[0], k.shape[2], k.shape[-1], v.shape[-1], dtype=dtype, device=k.device)
