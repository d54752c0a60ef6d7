"""Lightning attention (arXiv 2401.04658, as in MiniMax-01, 2501.08313): linear attention with one fixed decay a head.

    S_t = exp(-s) S_{t-1} + k_t v_t^T,   o_t = S_t^T q_t,   q, k, v = silu(projections)

with slopes s_h = 2^(-8 (h+1) / H), scaled over depth by 1 - l / (L-1) so that the last layer hardly forgets. In the
reference recurrence: A_t = exp(-s_h); q unscaled; read after the write.
State: H K^2 numbers a sequence (4 H K^2 bytes in fp32).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config import HybridConfig, Slot
from ..passes import Pass
from .layers import RMSNorm, wide
from .recurrent import Recurrent


class LightningAttention(Recurrent):
    """x [B,T,D] -> [B,T,D]. Options: heads, key_dim (head_dim; also the value dim)."""

    def __init__(self, config: HybridConfig, slot: Slot) -> None:
        o = config.options("lightning")
        D, H, K = config.d_model, o["heads"] or slot.heads, o["key_dim"] or slot.head_dim
        super().__init__(slot, heads=H, key_dim=K, value_dim=K, points=("log_decay",))
        self.depth = 1 - slot.layer / (config.n_layers - 1 + 1e-5) + 1e-5
        self.q_proj = nn.Linear(D, H * K, bias=False)
        self.k_proj = nn.Linear(D, H * K, bias=False)
        self.v_proj = nn.Linear(D, H * K, bias=False)
        self.gate_proj = nn.Linear(D, H * K, bias=False)
        self.out_norm = RMSNorm(H * K, config.norm_eps)
        self.o_proj = nn.Linear(H * K, D, bias=False)

    def terms(self, x: Tensor, mixed: Tensor | None, run: Pass) -> tuple[dict[str, Tensor], Any]:
        H, K = self.site.heads, self.site.key_dim
        slope = self.depth * 2.0 ** (-8 * (torch.arange(H, dtype=torch.float64, device=x.device) + 1) / H)
        q, k, v = (F.silu(linear(x)).unflatten(-1, (H, K)) for linear in (self.q_proj, self.k_proj, self.v_proj))
        terms = {
            "q": self.hook("q", q),
            "k": self.hook("k", k),
            "v": self.hook("v", v),
            "log_decay": self.hook("log_decay", (-slope).to(wide(x[:0]).dtype).expand(*x.shape[:2], H))[..., None],
        }
        return terms, self.gate_proj(x)

    def finish(self, out: Tensor, rest: Tensor) -> Tensor:
        return (rest.sigmoid() * self.out_norm(out.flatten(-2))).view_as(out)
