"""Gated linear attention (arXiv 2312.06635): one decay a channel, from a low-rank projection.

    S_t = diag(alpha_t) S_{t-1} + k_t v_t^T,   o_t = S_t^T q_t / sqrt(K),   log alpha = logsigmoid(gate) / 16

In the reference recurrence: A_t = diag(alpha_t), alpha = exp(log_decay); q / sqrt(K); read after the write.
State: H K V numbers a sequence (4 H K V bytes in fp32).
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from ..config import HybridConfig, Slot
from ..passes import Pass
from .layers import RMSNorm, wide
from .recurrent import Recurrent

SOFTEN = 16  # divides the gate's log


class GatedLinearAttention(Recurrent):
    """x [B,T,D] -> [B,T,D]. Options: heads, key_dim (head_dim / 2), value_dim (head_dim), gate_rank (16)."""

    def __init__(self, config: HybridConfig, slot: Slot) -> None:
        o = config.options("gla")
        D, H = config.d_model, o["heads"] or slot.heads
        K, V = o["key_dim"] or max(1, slot.head_dim // 2), o["value_dim"] or slot.head_dim
        super().__init__(slot, heads=H, key_dim=K, value_dim=V, points=("log_decay",))
        self.q_proj = nn.Linear(D, H * K, bias=False)
        self.k_proj = nn.Linear(D, H * K, bias=False)
        self.v_proj = nn.Linear(D, H * V, bias=False)
        self.gate_proj = nn.Linear(D, H * V, bias=False)
        self.decay_in = nn.Linear(D, o["gate_rank"], bias=False)
        self.decay_out = nn.Linear(o["gate_rank"], H * K)
        self.out_norm = RMSNorm(V, config.norm_eps)
        self.o_proj = nn.Linear(H * V, D, bias=False)

    def terms(self, x: Tensor, mixed: Tensor | None, run: Pass) -> tuple[dict[str, Tensor], Any]:
        H, K, V = self.site.heads, self.site.key_dim, self.site.value_dim
        log_decay = F.logsigmoid(wide(self.decay_out(self.decay_in(x)))) / SOFTEN
        terms = {
            "q": self.hook("q", self.q_proj(x).unflatten(-1, (H, K))) * K**-0.5,
            "k": self.hook("k", self.k_proj(x).unflatten(-1, (H, K))),
            "v": self.hook("v", self.v_proj(x).unflatten(-1, (H, V))),
            "log_decay": self.hook("log_decay", log_decay.unflatten(-1, (H, K))),
        }
        return terms, self.gate_proj(x).unflatten(-1, (H, V))

    def finish(self, out: Tensor, rest: Tensor) -> Tensor:
        return self.out_norm(out) * F.silu(rest)
