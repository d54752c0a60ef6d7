"""The short depthwise convolution of recurrent mixers, with its SiLU: shifted products in torch, fla's kernel on CUDA.

    y_t = silu(bias + sum over i < c of weight[:, c-1-i] * x_{t-i})

Both are exact and local: token t reads tokens t-c+1 to t and nothing else, so that what lies further back cannot leak
in. The kernel reads x once where the compiled sum of products is bound by its loads; it is an op of its own, which a
compiled model keeps as one node. Products are summed in fp32 (torch: in the wider of x and weight).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from . import dispatch, fused


def short_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, history: Tensor | None = None, silu: bool = False
) -> Tensor:
    """x [B,T,D], weight [D,c], bias [D], history [B,c-1,D] (the inputs before x; None: zeros) -> [B,T,D] in x's dtype.

    On the path that `use_kernels` says; one token without gradients is a few products anywhere.
    """
    path, _ = dispatch.choose("elementwise", x.device, x.dtype)  # no matrix products: exact in fp32 on either path
    one = x.shape[1] == 1 and not fused.is_training(x, weight, bias, history)
    if path == "fused" and x.numel() and not one:
        state = None if history is None else F.pad(history.to(x.dtype).transpose(1, 2), (1, 0)).contiguous()
        return _conv(x, weight, bias, state, silu)
    return short_conv_torch(x, weight, bias, history, silu)


def short_conv_torch(x: Tensor, weight: Tensor, bias: Tensor | None, history: Tensor | None, silu: bool) -> Tensor:
    """The same as a sum of c shifted products."""
    T, width = x.shape[1], weight.shape[1]
    front = x.new_zeros(x.shape[0], width - 1, x.shape[-1]) if history is None else history.to(x.dtype)
    padded = torch.cat([front, x], 1)
    taps = [padded[:, i : i + T] * weight[:, i] for i in range(width)]
    out = sum(taps[1:], taps[0])
    out = (out if bias is None else out + bias).to(x.dtype)  # autocast's weights are wider than x
    return F.silu(out) if silu else out


@torch.library.custom_op(
    "hybridscope::short_conv", mutates_args=(),
    schema="(Tensor x, Tensor weight, Tensor? bias, Tensor? state, bool silu) -> Tensor",
)  # fmt: skip
def _conv(x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor | None, silu: bool) -> Tensor:
    """`state` [B,D,c]: the last c inputs before x, of which the first is not read."""
    forward = fused.fla_op("causal_conv1d_fwd")
    out, _ = forward(
        x=x.contiguous(), weight=weight.contiguous(), bias=bias, residual=None, initial_state=state,
        activation="silu" if silu else None,
    )  # fmt: skip
    return out


@_conv.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor | None, silu: bool) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.custom_op(
    "hybridscope::short_conv_backward", mutates_args=(),
    schema="(Tensor grad, Tensor x, Tensor weight, Tensor? bias, Tensor? state, bool silu) -> Tensor[]",
)  # fmt: skip
def _conv_backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor | None, silu: bool
) -> list[Tensor]:
    """Gradients of x, weight, and of bias and state where there are any."""
    backward = fused.fla_op("causal_conv1d_bwd")
    dx, dw, db, _, ds = backward(
        x=x.contiguous(), dy=grad.contiguous(), dht=None, weight=weight.contiguous(), bias=bias, residual=None,
        initial_state=state, activation="silu" if silu else None,
    )  # fmt: skip
    return [dx, dw, *([] if bias is None else [db]), *([] if state is None else [ds.to(state.dtype)])]


@_conv_backward.register_fake
def _(grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor | None, silu: bool) -> list[Tensor]:
    there = [y for y in (x, weight, bias, state) if y is not None]
    return [torch.empty_like(y, memory_format=torch.contiguous_format) for y in there]


def _setup(ctx: torch.autograd.function.FunctionCtx, inputs: tuple, output: Tensor) -> None:
    *tensors, ctx.silu = inputs  # type: ignore[attr-defined]
    ctx.save_for_backward(*tensors)


def _gradients(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, bias, state = ctx.saved_tensors  # type: ignore[attr-defined]
    dx, dw, *rest = _conv_backward(grad, x, weight, bias, state, ctx.silu)  # type: ignore[attr-defined]
    db = None if bias is None else rest.pop(0)
    return dx, dw, db, None if state is None else rest.pop(0), None


_conv.register_autograd(_gradients, setup_context=_setup)
