"""Causal attention under a window, with positional sinks or without, through FlexAttention: blocks that no row sees are
skipped.

Its block mask is written down from the window, block by block, without a T x T mask. Window and sinks are tensors that
the compiled kernel captures, so that another window is not another compilation.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo
from torch import Tensor

BLOCK = 128
CONFIGURATIONS = 64  # of heads, widths, dtypes ... that one process may compile


def attend_blocks(
    q: Tensor, k: Tensor, v: Tensor, *, window: int, sinks: int, limit: int | None, scale: float
) -> Tensor:
    """Outputs [B,T,H,V] of q [B,T,H,K] over k, v [B,T,G,...]; `limit` bounds the sinks' reach, and is
    not below the window."""
    T = q.shape[1]
    mask = block_mask(T, window, sinks, limit, q.device)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if torch.compiler.is_compiling():
        return flex()(q, k, v, mask, scale, q.shape[1] != k.shape[1]).transpose(1, 2)
    with torch._dynamo.config.patch(recompile_limit=CONFIGURATIONS):
        return compiled()(q, k, v, mask, scale, q.shape[1] != k.shape[1]).transpose(1, 2)


def flex() -> Callable[..., Any]:
    """FlexAttention. A lambda, like the mask below: what checks types in tests would stand in the compiler's way."""
    from torch.nn.attention.flex_attention import flex_attention

    return lambda q, k, v, mask, scale, grouped: flex_attention(
        q, k, v, block_mask=mask, scale=scale, enable_gqa=grouped
    )


@functools.cache
def compiled() -> Callable[..., Any]:
    """`flex` compiled, once a process. Past the compiler's limit of recompilations it is an error: uncompiled it would
    store every score."""
    return torch.compile(flex(), fullgraph=True)


@functools.lru_cache(maxsize=8)
def block_mask(T: int, window: int, sinks: int, limit: int | None, device: torch.device) -> Any:
    """Which blocks of BLOCK x BLOCK pairs are seen in part and which in whole: (T / BLOCK)^2 numbers."""
    from torch.nn.attention.flex_attention import BlockMask

    w, first, far = (torch.tensor(n, device=device) for n in (window, sinks, T if limit is None else limit))

    start = torch.arange(0, T, BLOCK, device=device)
    nearest = (start[:, None] - start - BLOCK + 1).clamp(min=0)  # distances between rows (down) and keys (across)
    furthest = start[:, None] - start + BLOCK - 1
    before = start[:, None] > start
    some = (before | (start[:, None] == start)) & ((nearest < w) | (start < first)) & (nearest < far)
    whole = before & (furthest < w) & (furthest < far)
    lists = (*_ordered(some & ~whole), *_ordered(whole))
    if not sinks:
        seen = lambda b, h, i, j: (i >= j) & (i - j < w)  # noqa: E731 (see flex)
    else:
        seen = lambda b, h, i, j: (i >= j) & ((i - j < w) | (j < first)) & (i - j < far)  # noqa: E731
    return BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=BLOCK, seq_lengths=(T, T), mask_mod=seen)


def _ordered(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """How many blocks a row has, and which: [1,1,N] and [1,1,N,N], the row's own ones first."""
    order = blocks.int().argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1).int()[None, None], order.int()[None, None].contiguous()
