"""Retention (RetNet, arXiv 2307.08621): linear attention under RoPE with one fixed decay a head.

    S_t = gamma_h S_{t-1} + k_t v_t^T,   o_t = S_t^T q_t / sqrt(K),   gamma_h = 1 - 2^(-5-h)

In the reference recurrence: A_t = gamma_h; q / sqrt(K); read after the write.
State: H K V numbers a sequence (4 H K V bytes in fp32).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config import HybridConfig, Slot
from ..passes import Pass
from .layers import RMSNorm, rope, wide
from .recurrent import Recurrent

ROPE_BASE = 10_000.0


class RetNet(Recurrent):
    """x [B,T,D] -> [B,T,D]. Options: heads, key_dim (head_dim; even), value_dim (2 head_dim)."""

    def __init__(self, config: HybridConfig, slot: Slot) -> None:
        o = config.options("retnet")
        D, H = config.d_model, o["heads"] or slot.heads
        K, V = o["key_dim"] or slot.head_dim, o["value_dim"] or 2 * slot.head_dim
        if K % 2:
            raise ValueError(f"mixers: retnet key_dim={K} must be even: RoPE rotates pairs of dimensions")
        super().__init__(slot, heads=H, key_dim=K, value_dim=V, rope=True, points=("rot_q", "rot_k", "log_decay"))
        self.q_proj = nn.Linear(D, H * K, bias=False)
        self.k_proj = nn.Linear(D, H * K, bias=False)
        self.v_proj = nn.Linear(D, H * V, bias=False)
        self.gate_proj = nn.Linear(D, H * V, bias=False)
        self.out_norm = RMSNorm(V, config.norm_eps)
        self.o_proj = nn.Linear(H * V, D, bias=False)

    def terms(self, x: Tensor, mixed: Tensor | None, run: Pass) -> tuple[dict[str, Tensor], Any]:
        H, K, V = self.site.heads, self.site.key_dim, self.site.value_dim
        position = run.positions(self.site)
        q = self.hook("q", self.q_proj(x).unflatten(-1, (H, K)))
        k = self.hook("k", self.k_proj(x).unflatten(-1, (H, K)))
        log_decay = torch.log1p(-(2.0 ** (-5 - torch.arange(H, dtype=torch.float64, device=x.device))))
        terms = {
            "q": self.hook("rot_q", rope(q, position, ROPE_BASE, run)) * K**-0.5,
            "k": self.hook("rot_k", rope(k, position, ROPE_BASE, run)),
            "v": self.hook("v", self.v_proj(x).unflatten(-1, (H, V))),
            "log_decay": self.hook("log_decay", log_decay.to(wide(x[:0]).dtype).expand(*x.shape[:2], H))[..., None],
        }
        return terms, self.gate_proj(x).unflatten(-1, (H, V))

    def finish(self, out: Tensor, rest: Tensor) -> Tensor:
        return self.out_norm(out) * F.silu(rest)
