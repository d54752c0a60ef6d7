"""RG-LRU, the recurrence of Hawk and Griffin (arXiv 2402.19427): single channels with gated decay and input.

    h_t = a_t h_{t-1} + sqrt(1 - a_t^2) i_t x_t,   log a_t = -8 r_t softplus(Lambda)

x after a short convolution; gates i, r = sigmoid(block-diagonal maps of x). A sequence's first token is written whole
(without the square root). In the reference recurrence every channel is a head of its own with K = V = 1: A_t = a_t,
k_t = sqrt(1 - a_t^2) i_t, v_t = x_t, q_t = 1; read after the write.
State: width numbers a sequence (4 width bytes in fp32), and c-1 inputs of the convolution.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config import HybridConfig, Slot
from ..passes import Pass
from .layers import ShortConv, wide
from .recurrent import Recurrent

SHARPEN = 8.0


class BlockLinear(nn.Module):
    """A block-diagonal linear map with bias: x [B,T,width] in `blocks` equal parts."""

    def __init__(self, blocks: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(blocks, width // blocks, width // blocks))  # [block, in, out]
        self.bias = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        blocks = self.weight.shape[0]
        return torch.einsum("btni,nio->btno", x.unflatten(-1, (blocks, -1)), self.weight).flatten(-2) + self.bias

    @torch.no_grad()
    def init_weights(self) -> None:
        nn.init.normal_(self.weight, std=self.weight.shape[-1] ** -0.5)
        nn.init.zeros_(self.bias)


class Hawk(Recurrent):
    """x [B,T,D] -> [B,T,D]. Options: heads (blocks of the gates), width (d_model over the layer's share of the heads),
    conv (4)."""

    def __init__(self, config: HybridConfig, slot: Slot) -> None:
        o = config.options("hawk")
        D, blocks = config.d_model, o["heads"] or slot.heads
        width = o["width"] or D * slot.heads // config.n_heads
        if width % blocks:
            raise ValueError(f"mixers: hawk width={width} must be a multiple of heads={blocks}")
        super().__init__(slot, heads=width, key_dim=1, value_dim=1, conv=o["conv"], points=("log_decay",))
        self.v_proj = nn.Linear(D, width)
        self.gate_proj = nn.Linear(D, width)
        self.conv = ShortConv(width, o["conv"], bias=True, silu=False)
        self.input_gate = BlockLinear(blocks, width)
        self.decay_gate = BlockLinear(blocks, width)
        self.decay_rate = nn.Parameter(torch.empty(width))  # Lambda
        self.o_proj = nn.Linear(width, D)

    def inputs(self, x: Tensor) -> Tensor:
        return self.v_proj(x)

    def mix(self, inputs: Tensor, history: Tensor | None) -> Tensor:
        return self.conv(inputs, history)

    def terms(self, x: Tensor, mixed: Tensor | None, run: Pass) -> tuple[dict[str, Tensor], Any]:
        assert mixed is not None
        gate = wide(self.decay_gate(mixed)).sigmoid()
        log_decay = self.hook("log_decay", -SHARPEN * gate * F.softplus(self.decay_rate.to(gate.dtype)))
        # The floor keeps the root's slope finite where nothing decays.
        scale = (-torch.expm1(2 * log_decay)).clamp(min=1e-7).sqrt()
        scale = torch.where(run.positions(self.site)[..., None] == 0, 1.0, scale)
        k = scale * self.input_gate(mixed).sigmoid()
        v = self.hook("v", mixed[..., None])
        terms = {
            "q": self.hook("q", torch.ones_like(v)),
            "k": self.hook("k", k[..., None].to(v.dtype)),
            "v": v,
            "log_decay": log_decay[..., None],
        }
        return terms, self.gate_proj(x)

    def finish(self, out: Tensor, rest: Tensor) -> Tensor:
        return (out.flatten(-2) * F.gelu(rest, approximate="tanh")).view_as(out)

    @torch.no_grad()
    def init_weights(self, std: float) -> None:
        super().init_weights(std)
        self.conv.init_weights()
        self.input_gate.init_weights()
        self.decay_gate.init_weights()
        # As published: a_t at an open gate, a = exp(-softplus(Lambda)), has a^2 uniform in [0.9^2, 0.999^2].
        squared = torch.empty_like(self.decay_rate).uniform_(0.9**2, 0.999**2)
        self.decay_rate.copy_(torch.log(torch.expm1(-0.5 * squared.log())))
