"""Mamba-2 (arXiv 2405.21060): state-space duality, a linear recurrence with one decay a head.

    S_t = exp(-rate dt_t) S_{t-1} + dt_t B_t x_t^T,   y_t = S_t^T C_t + skip x_t

x, B, C after a short convolution and SiLU; B and C shared by the heads of a group; dt = softplus(projection + bias). In
the reference recurrence: A_t = exp(-rate_h dt_t), q = C, k = B, v = dt x (hook_beta is dt as a write strength,
hook_v is x); read after the write.
State: H K V numbers a sequence (4 H K V bytes in fp32), and c-1 inputs of the convolution.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config import HybridConfig, Slot
from ..passes import Pass
from .layers import DecayRate, RMSNorm, ShortConv
from .recurrent import Recurrent


class Mamba2(Recurrent):
    """x [B,T,D] -> [B,T,D]. Options: heads (2 n_heads, an expansion of 2), groups (1), key_dim (the state size, 128),
    value_dim (head_dim), conv (4)."""

    def __init__(self, config: HybridConfig, slot: Slot) -> None:
        o = config.options("mamba2")
        D, H, G = config.d_model, o["heads"] or 2 * slot.heads, o["groups"]
        K, V = o["key_dim"], o["value_dim"] or slot.head_dim
        if H % G:
            raise ValueError(f"mixers: mamba2 groups={G} must divide heads={H}")
        super().__init__(slot, heads=H, key_dim=K, value_dim=V, conv=o["conv"])
        self.groups = G
        self.q_proj = nn.Linear(D, G * K, bias=False)  # C
        self.k_proj = nn.Linear(D, G * K, bias=False)  # B
        self.v_proj = nn.Linear(D, H * V, bias=False)  # x
        self.gate_proj = nn.Linear(D, H * V, bias=False)
        self.decay_proj = nn.Linear(D, H, bias=False)  # dt
        self.decay = DecayRate(H)
        self.skip = nn.Parameter(torch.empty(H))
        self.conv = ShortConv(H * V + 2 * G * K, o["conv"], bias=True)
        self.out_norm = RMSNorm(H * V // G, config.norm_eps, groups=G)
        self.o_proj = nn.Linear(H * V, D, bias=False)

    def inputs(self, x: Tensor) -> Tensor:
        return torch.cat([self.v_proj(x), self.k_proj(x), self.q_proj(x)], -1)

    def mix(self, inputs: Tensor, history: Tensor | None) -> Tensor:
        return self.conv(inputs, history)

    def terms(self, x: Tensor, mixed: Tensor | None, run: Pass) -> tuple[dict[str, Tensor], Any]:
        assert mixed is not None
        H, G, K, V = self.site.heads, self.groups, self.site.key_dim, self.site.value_dim
        v, k, q = mixed.split([H * V, G * K, G * K], -1)
        q, k = (y.unflatten(-1, (G, K)).repeat_interleave(H // G, 2) for y in (q, k))
        v = self.hook("v", v.unflatten(-1, (H, V)))
        step = self.decay_proj(x)
        beta = self.hook("beta", self.decay.step(step))
        terms = {
            "q": self.hook("q", q),
            "k": self.hook("k", k),
            "v": beta[..., None].to(v.dtype) * v,
            "log_decay": self.hook("log_decay", self.decay(step))[..., None],
        }
        return terms, (self.skip[:, None] * v, self.gate_proj(x), beta)

    def finish(self, out: Tensor, rest: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        skipped, gate, _ = rest
        return self.out_norm((out + skipped).flatten(-2) * F.silu(gate)).view_as(out)

    def weighting(self, rest: tuple[Tensor, Tensor, Tensor]) -> dict[str, Tensor]:
        return {"write": rest[2]}  # dt; the skip passes the recurrence by

    def init_weights(self, std: float) -> None:
        super().init_weights(std)
        self.conv.init_weights()
        self.decay.init_weights()
        nn.init.ones_(self.skip)
