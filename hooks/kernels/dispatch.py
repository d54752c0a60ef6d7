"""Which path a recurrence takes: plain torch, chunked torch, or fused; chosen by policy, never by failure.

`auto` is fused for CUDA tensors in bf16 or fp16 and torch elsewhere. fp32 goes to the fused path where torch may
use TF32 for its own products (`torch.set_float32_matmul_precision("high")`), since the kernels do; otherwise torch
keeps fp32 exact. Elementwise scans have no products and are fused in fp32 too.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor

from . import fused as kernels
from .recurrence import Read, plain, recurrence, without_autocast

POLICIES = ("auto", "torch", "fused")
VARIABLE = "HYBRIDSCOPE_KERNELS"

_policy: str = os.environ.get(VARIABLE, "auto")


@contextmanager
def use_kernels(path: str) -> Iterator[None]:
    """Choose the path of every recurrence inside the block: "auto", "torch", or "fused" (an error where it cannot
    run). The environment variable HYBRIDSCOPE_KERNELS sets it for a whole process.

    >>> with use_kernels("torch"):
    ...     pass
    """
    global _policy
    _check(path, "use_kernels")
    before, _policy = _policy, path
    try:
        yield
    finally:
        _policy = before


def policy() -> str:
    """The policy in force: auto, torch or fused."""
    _check(_policy, VARIABLE)
    return _policy


def choose(family: kernels.Family, device: torch.device, dtype: torch.dtype) -> tuple[Literal["torch", "fused"], str]:
    """The path under the present policy and why. Raises ValueError where "fused" was asked for and cannot be."""
    asked = policy()
    if asked == "torch":
        return "torch", 'use_kernels("torch")'
    on_gpu, taken = device.type == kernels.DEVICE, dtype in kernels.DTYPES
    if asked == "fused":
        if not on_gpu:
            raise ValueError(f'use_kernels("fused"), but the tensors are on {device.type}: fused kernels need CUDA')
        if not taken:
            raise ValueError(f'use_kernels("fused"), but the tensors are {dtype}: expected fp32, bf16 or fp16')
        return "fused", 'use_kernels("fused")'
    if not on_gpu:
        return "torch", "not on CUDA"
    if not taken:
        return "torch", "no fused kernel computes in fp64"
    if dtype == torch.float32 and family != "elementwise" and torch.get_float32_matmul_precision() == "highest":
        return "torch", 'fp32 stays exact; torch.set_float32_matmul_precision("high") allows TF32 kernels'
    return "fused", "on CUDA"


def recur(
    *, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None = None, beta: Tensor | None = None,
    a: Tensor | None = None, b: Tensor | None = None, state: Tensor | None = None, read: Read = "after",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`recurrence` on the path that the policy chooses. One token without gradients is a plain step anywhere."""
    family = kernels.family_of(k=k, v=v, log_decay=log_decay, beta=beta, a=a, read=read)
    path, _ = choose(family, q.device, kernels.compute_dtype(v))
    if q.shape[1] == 1 and not kernels.is_training(q, k, v, log_decay, beta, a, b, state):
        return step(q=q, k=k, v=v, log_decay=log_decay, beta=beta, a=a, b=b, state=state, read=read)
    f, dtype = kernels.fused if path == "fused" else recurrence, v.dtype
    if path == "fused" and family != "elementwise":  # here and not behind the kernels' graph break: fused with what
        low = kernels.compute_dtype(v)  # makes these tensors, they are written once, in 16 bits
        q, k, v = q.to(low), k.to(low), v.to(low)
        a, b = (None if x is None else x.to(low) for x in (a, b))
    out, state = f(q=q, k=k, v=v, log_decay=log_decay, beta=beta, a=a, b=b, state=state, read=read)
    return out.to(dtype), state  # a strength in fp32 promotes beta v in the torch path


@without_autocast
def step(
    *, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None = None, beta: Tensor | None = None,
    a: Tensor | None = None, b: Tensor | None = None, state: Tensor | None = None, read: Read = "after",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`recurrence` for one token: nothing to chunk, nothing to compile."""
    value, log_decay, a, b = plain(k=k, v=v, log_decay=log_decay, beta=beta, a=a, b=b)
    dtype = torch.promote_types(q.dtype, torch.float32)
    q_, k_, v_, g = (x[:, 0].to(dtype) for x in (q, k, value, log_decay))  # [B,H,D]
    after = k_[..., :, None] * v_[..., None, :]
    if state is None:
        before = torch.zeros_like(after)
    else:
        before = state.to(dtype)
        after = after + g.exp()[..., None] * before
        if a is not None and b is not None:
            erased = a[:, 0].to(dtype)[..., None, :] @ before  # [B,H,1,V]
            after = after + b[:, 0].to(dtype)[..., None] * erased
    out = q_[..., None, :] @ (after if read == "after" else before)
    return out.transpose(1, 2).to(v.dtype), after


def _check(policy: str, source: str) -> None:
    if policy not in POLICIES:
        raise ValueError(f"{source}: {policy!r}; expected one of {', '.join(POLICIES)}")
