"""What the queries of each block of tokens get from the block before it, added to what they have: CUDA, with gradients.

`earlier_block_reference` is the specification. The kernel (earlier_block_triton.py) needs Triton and widths up to 256.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .fused import DTYPES, is_training

MAX_WIDTH = 256


class Tile(NamedTuple):
    """Tokens that a program takes at once, and elements of its state."""

    chunk: int
    state: int
    warps: int
    stages: int


TILES = {16: Tile(64, 2**13, 4, 2), 32: Tile(32, 2**12, 4, 1)}  # by the bits of an element; fit in 227 KiB at any width


def earlier_block_reference(
    *, base: Tensor, q: Tensor, k: Tensor, v: Tensor, q_scale: Tensor | None = None, k_scale: Tensor | None = None,
    reversed_keys: bool = False,
) -> Tensor:  # fmt: skip
    """out[n,t] = base[n,t] + q_scale[n,t] sum over i > t of k_scale[n-1,i] (q[n,t] . k[n-1,i]) v[n-1,i]: [B,N,w,H,V].

    base [B,N,w,H,V], q [B,N,w,H,K] and q_scale [B,N,w,H] have N blocks of w tokens; k [B,N-1,w,H,K], v [B,N-1,w,H,V]
    and k_scale [B,N-1,w,H] the first N-1 of them. `reversed_keys`: k, and only k, has each block's last token first.
    """
    q, k = _scaled(q, k.flip(2) if reversed_keys else k, q_scale, k_scale, torch.float64)
    weights = torch.einsum("bnthk,bnihk->bnhti", q[:, 1:], k).triu(1)
    more = torch.einsum("bnhti,bnihv->bnthv", weights, v.double())
    return torch.cat([base[:, :1], (base[:, 1:].double() + more).to(base.dtype)], 1)


def earlier_block(
    *, base: Tensor, q: Tensor, k: Tensor, v: Tensor, q_scale: Tensor | None = None, k_scale: Tensor | None = None,
    reversed_keys: bool = False,
) -> Tensor:  # fmt: skip
    """`earlier_block_reference` in one kernel: products in the tensors' dtype (fp32: 3 TF32 ones each), sums in fp32.

    q and k are taken in v's dtype. Scales are applied in the kernel, or before it where gradients are wanted. Tokens
    that are not seen change nothing while they are finite. Raises ValueError for widths over 256, and for fp64.
    """
    if max(q.shape[-1], v.shape[-1]) > MAX_WIDTH:
        raise ValueError(f"earlier_block: widths {q.shape[-1]} and {v.shape[-1]}; expected at most {MAX_WIDTH}")
    if v.dtype not in DTYPES:
        raise ValueError(f"earlier_block: v is {v.dtype}; expected fp32, bf16 or fp16")
    q, k = q.to(v.dtype), k.to(v.dtype)
    reverse = "k" if reversed_keys else ""
    if is_training(base, q, k, v, q_scale, k_scale):
        if k_scale is not None and reversed_keys:
            k_scale = k_scale.flip(2)
        q, k = _scaled(q, k, q_scale, k_scale, v.dtype)
        return _EarlierBlock.apply(base, q, k, v, reverse)  # type: ignore[no-any-return]
    return _launch(q, k, v, shift=-1, later=True, reverse=reverse, base=base, q_scale=q_scale, k_scale=k_scale)


def _scaled(
    q: Tensor, k: Tensor, q_scale: Tensor | None, k_scale: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    q, k = (x if scale is None else x * scale[..., None] for x, scale in ((q, q_scale), (k, k_scale)))
    return q.to(dtype), k.to(dtype)


class _EarlierBlock(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, base: Tensor, q: Tensor, k: Tensor, v: Tensor, reverse: str) -> Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.reversed = bool(reverse)
        return _launch(q, k, v, shift=-1, later=True, reverse=reverse, base=base)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v = ctx.saved_tensors
        low = grad.to(v.dtype)
        in_q, in_v, in_out = ("q", "v", "o") if ctx.reversed else ("", "", "")
        _, needs_q, needs_k, needs_v, _ = ctx.needs_input_grad
        d_q = _launch(low, v, k, shift=-1, later=True, reverse=in_v) if needs_q else None
        d_k = _launch(v, low, q, shift=1, later=False, reverse=in_out) if needs_k else None
        d_v = _launch(k, q, low, shift=1, later=False, reverse=in_q) if needs_v else None
        return grad, d_q, d_k, d_v, None


def _launch(
    q: Tensor, k: Tensor, v: Tensor, *, shift: int, later: bool, reverse: str, base: Tensor | None = None,
    q_scale: Tensor | None = None, k_scale: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Block n of q [B,N,w,H,K] over block n + `shift` of k and v, where there is one: [B,N,w,H,V].

    `later`: keys with i > t (else i < t); `reverse` names the tensor that lies in reversed time, if one does.
    """
    import triton

    from . import earlier_block_triton as kernels

    kernel: Any = kernels.earlier_block_kernel
    interpreted = not isinstance(kernel, triton.JITFunction)
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    B, N, w, H, K = q.shape
    V = v.shape[-1]
    out = q.new_empty(B, N, w, H, V, dtype=v.dtype if base is None else base.dtype)
    if not out.numel():
        return out
    added = out if base is None else base if base.stride(-1) == 1 else base.contiguous()
    width = max(16, triton.next_power_of_2(K))
    tile = TILES[8 * q.element_size()]
    block = min(max(16, triton.next_power_of_2(V)), tile.state // width)
    reversed_ = {f"{name.upper()}_REVERSED": name == reverse for name in "qkvo"}
    scales = [q if x is None else x.float() for x in (q_scale, k_scale)]
    strides = [s for x in (q, k, v, added, out, *scales) for s in x.stride()[:4]]
    with torch.cuda.device(q.device if q.is_cuda else -1):
        kernel[(B * N * H, triton.cdiv(V, block))](
            q, k, v, *scales, added, out, N, k.shape[1], w, H, shift, *strides, DK=K, DV=V, BLOCK_K=width,
            BLOCK_V=block, CHUNK=tile.chunk, LATER=later, ADD=base is not None, SCALE_Q=q_scale is not None,
            SCALE_K=k_scale is not None, **reversed_,
            PRECISION="tf32x3" if q.dtype == torch.float32 and not interpreted else "ieee", UPCAST=interpreted,
            num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
    return out
