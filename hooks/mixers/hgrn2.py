"""HGRN2 (arXiv 2404.07904): HGRN with its state expanded to a matrix a head, the input gate tied to the forget gate.

    S_t = diag(f_t) S_{t-1} + (1 - f_t) v_t^T,   o_t = S_t^T q_t / sqrt(K)

In the reference recurrence: A_t = diag(f_t), k_t = 1 - f_t, q = silu(projection) / sqrt(K); read after the write.
State: H K V numbers a sequence (4 H K V bytes in fp32).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config import HybridConfig, Slot
from ..passes import Pass
from .hgrn import check_bounds, forget
from .layers import RMSNorm
from .recurrent import Recurrent


class HGRN2(Recurrent):
    """x [B,T,D] -> [B,T,D]. Options: heads, key_dim and value_dim (head_dim; published: 128), lower_bounds (True)."""

    def __init__(self, config: HybridConfig, slot: Slot) -> None:
        o = config.options("hgrn2")
        D, H = config.d_model, o["heads"] or slot.heads
        K, V = o["key_dim"] or slot.head_dim, o["value_dim"] or slot.head_dim
        super().__init__(slot, heads=H, key_dim=K, value_dim=V, points=("log_decay",))
        check_bounds("hgrn2", o["lower_bounds"], H * K, D)
        self.bounded = o["lower_bounds"]
        self.q_proj = nn.Linear(D, H * K, bias=False)
        self.decay_proj = nn.Linear(D, H * K, bias=False)
        self.v_proj = nn.Linear(D, H * V, bias=False)
        self.out_norm = RMSNorm(H * V, config.norm_eps)
        self.o_proj = nn.Linear(H * V, D, bias=False)

    def terms(self, x: Tensor, mixed: Tensor | None, run: Pass) -> tuple[dict[str, Tensor], Any]:
        H, K, V = self.site.heads, self.site.key_dim, self.site.value_dim
        log_decay = forget(self.decay_proj(x), run, self.site.layer if self.bounded else 0)
        log_decay = self.hook("log_decay", log_decay.unflatten(-1, (H, K)))
        terms = {
            "q": self.hook("q", F.silu(self.q_proj(x)).unflatten(-1, (H, K))) * K**-0.5,
            "k": self.hook("k", -torch.expm1(log_decay).to(x.dtype)),
            "v": self.hook("v", self.v_proj(x).unflatten(-1, (H, V))),
            "log_decay": log_decay,
        }
        return terms, None

    def finish(self, out: Tensor, rest: Any) -> Tensor:
        return self.out_norm(out.flatten(-2)).view_as(out)
