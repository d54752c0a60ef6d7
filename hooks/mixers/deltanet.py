"""DeltaNet (arXiv 2102.11174, 2406.06484): a state that erases before it writes.

    S_t = (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T,   o_t = S_t^T q_t / sqrt(K)

In the reference recurrence: A_t = I - beta_t k_t k_t^T, no decay; k_t of unit length; q / sqrt(K); read after
the write.
State: H K V numbers a sequence (4 H K V bytes in fp32), and c-1 inputs of the convolution.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..config import HybridConfig, Slot
from ..passes import Pass
from .layers import RMSNorm, ShortConv, unit
from .recurrent import Recurrent


class DeltaNet(Recurrent):
    """x [B,T,D] -> [B,T,D]. Options: heads, key_dim and value_dim (head_dim), conv (4), negative_eigenvalues (beta in
    [0, 2], arXiv 2411.12537)."""

    def __init__(self, config: HybridConfig, slot: Slot) -> None:
        o = config.options("deltanet")
        D, H = config.d_model, o["heads"] or slot.heads
        K, V = o["key_dim"] or slot.head_dim, o["value_dim"] or slot.head_dim
        super().__init__(slot, heads=H, key_dim=K, value_dim=V, conv=o["conv"], points=("beta",))
        self.beta_scale = 2.0 if o["negative_eigenvalues"] else 1.0
        self.q_proj = nn.Linear(D, H * K, bias=False)
        self.k_proj = nn.Linear(D, H * K, bias=False)
        self.v_proj = nn.Linear(D, H * V, bias=False)
        self.beta_proj = nn.Linear(D, H, bias=False)
        self.conv = ShortConv(2 * H * K + H * V, o["conv"])
        self.out_norm = RMSNorm(V, config.norm_eps)
        self.o_proj = nn.Linear(H * V, D, bias=False)

    def inputs(self, x: Tensor) -> Tensor:
        return torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x)], -1)

    def mix(self, inputs: Tensor, history: Tensor | None) -> Tensor:
        return self.conv(inputs, history)

    def terms(self, x: Tensor, mixed: Tensor | None, run: Pass) -> tuple[dict[str, Tensor], Any]:
        assert mixed is not None
        H, K, V = self.site.heads, self.site.key_dim, self.site.value_dim
        q, k, v = (y.unflatten(-1, (H, -1)) for y in mixed.split([H * K, H * K, H * V], -1))
        terms = {
            "q": self.hook("q", unit(q)) * K**-0.5,
            "k": self.hook("k", unit(k)),
            "v": self.hook("v", v),
            "beta": self.hook("beta", self.beta_scale * self.beta_proj(x).sigmoid()),
        }
        return terms, None

    def finish(self, out: Tensor, rest: Any) -> Tensor:
        return self.out_norm(out)

    def init_weights(self, std: float) -> None:
        super().init_weights(std)
        self.conv.init_weights()
