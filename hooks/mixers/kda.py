"""Kimi Delta Attention (arXiv 2510.26692): the gated delta rule with one decay a channel.

    S_t = (I - beta_t k_t k_t^T) diag(alpha_t) S_{t-1} + beta_t k_t v_t^T,   o_t = S_t^T q_t / sqrt(K)

In the reference recurrence: A_t = (I - beta_t k_t k_t^T) diag(alpha_t), alpha = exp(log_decay) per channel; k_t of unit
length; q / sqrt(K); read after the write.
State: H K V numbers a sequence (4 H K V bytes in fp32), and c-1 inputs of the convolution.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..config import HybridConfig, Slot
from ..passes import Pass
from .layers import DecayRate, RMSNorm, ShortConv, unit
from .recurrent import Recurrent


class KimiDeltaAttention(Recurrent):
    """x [B,T,D] -> [B,T,D]. Options: heads, value_heads (a multiple), key_dim (head_dim), value_dim (key_dim; also the
    rank of the decay's and the gate's projections), conv (4), negative_eigenvalues (beta in [0, 2])."""

    def __init__(self, config: HybridConfig, slot: Slot) -> None:
        o = config.options("kda")
        D = config.d_model
        key_heads = o["heads"] or slot.heads
        H = o["value_heads"] or key_heads
        K = o["key_dim"] or slot.head_dim
        V = o["value_dim"] or K
        if H % key_heads:
            raise ValueError(f"mixers: kda value_heads={H} must be a multiple of heads={key_heads}")
        super().__init__(slot, heads=H, key_dim=K, value_dim=V, conv=o["conv"])
        self.key_heads = key_heads
        self.beta_scale = 2.0 if o["negative_eigenvalues"] else 1.0
        self.q_proj = nn.Linear(D, key_heads * K, bias=False)
        self.k_proj = nn.Linear(D, key_heads * K, bias=False)
        self.v_proj = nn.Linear(D, H * V, bias=False)
        self.gate_in = nn.Linear(D, V, bias=False)
        self.gate_out = nn.Linear(V, H * V)
        self.beta_proj = nn.Linear(D, H, bias=False)
        self.decay_in = nn.Linear(D, V, bias=False)
        self.decay_out = nn.Linear(V, H * K, bias=False)
        self.decay = DecayRate(H, K)
        self.conv = ShortConv(2 * key_heads * K + H * V, o["conv"])
        self.out_norm = RMSNorm(V, config.norm_eps)
        self.o_proj = nn.Linear(H * V, D, bias=False)

    def inputs(self, x: Tensor) -> Tensor:
        return torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x)], -1)

    def mix(self, inputs: Tensor, history: Tensor | None) -> Tensor:
        return self.conv(inputs, history)

    def terms(self, x: Tensor, mixed: Tensor | None, run: Pass) -> tuple[dict[str, Tensor], Any]:
        assert mixed is not None
        H, K, V = self.site.heads, self.site.key_dim, self.site.value_dim
        q, k, v = mixed.split([self.key_heads * K, self.key_heads * K, H * V], -1)
        q, k = (unit(y.unflatten(-1, (self.key_heads, K))) for y in (q, k))
        q, k = (y.repeat_interleave(H // self.key_heads, 2) for y in (q, k))
        log_decay = self.decay(self.decay_out(self.decay_in(x)).unflatten(-1, (H, K)))
        terms = {
            "q": self.hook("q", q) * K**-0.5,
            "k": self.hook("k", k),
            "v": self.hook("v", v.unflatten(-1, (H, V))),
            "beta": self.hook("beta", self.beta_scale * self.beta_proj(x).sigmoid()),
            "log_decay": self.hook("log_decay", log_decay),
        }
        return terms, self.gate_out(self.gate_in(x)).unflatten(-1, (H, V))

    def finish(self, out: Tensor, rest: Tensor) -> Tensor:
        return self.out_norm(out) * rest.sigmoid()

    def init_weights(self, std: float) -> None:
        super().init_weights(std)
        self.conv.init_weights()
        self.decay.init_weights()
