"""HGRN (arXiv 2311.04823): a gated recurrence of single channels, with forget gates bounded from below by depth.

    h_t = f_t h_{t-1} + (1 - f_t) silu(i_t)

In the reference recurrence every channel is a head of its own with K = V = 1: A_t = f_t, k_t = 1 - f_t, v_t =
silu(i_t), q_t = 1; read after the write.
State: D numbers a sequence (4 D bytes in fp32).
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


class HGRN(Recurrent):
    """x [B,T,D] -> [B,T,D]. Options: width (d_model over the layer's share of the heads), lower_bounds (True)."""

    def __init__(self, config: HybridConfig, slot: Slot) -> None:
        o = config.options("hgrn")
        D = config.d_model
        width = o["width"] or D * slot.heads // config.n_heads
        super().__init__(slot, heads=width, key_dim=1, value_dim=1, points=("log_decay",))
        check_bounds("hgrn", o["lower_bounds"], width, D)
        self.bounded = o["lower_bounds"]
        self.v_proj = nn.Linear(D, width, bias=False)
        self.decay_proj = nn.Linear(D, width, bias=False)
        self.gate_proj = nn.Linear(D, width, bias=False)
        self.out_norm = RMSNorm(width, config.norm_eps)
        self.o_proj = nn.Linear(width, D, bias=False)

    def terms(self, x: Tensor, mixed: Tensor | None, run: Pass) -> tuple[dict[str, Tensor], Any]:
        log_decay = forget(self.decay_proj(x), run, self.site.layer if self.bounded else 0)
        log_decay = self.hook("log_decay", log_decay[..., None])
        v = self.hook("v", F.silu(self.v_proj(x))[..., None])
        terms = {
            "q": self.hook("q", torch.ones_like(v)),
            "k": self.hook("k", -torch.expm1(log_decay).to(v.dtype)),
            "v": v,
            "log_decay": log_decay,
        }
        return terms, self.gate_proj(x)

    def finish(self, out: Tensor, rest: Tensor) -> Tensor:
        return (self.out_norm(out.flatten(-2)) * F.silu(rest)).view_as(out)


def cumulative(lower_bounds: Tensor) -> Tensor:
    """Forget gates' lower bounds [L,D] from the model's parameter [L,D]: 0 in the first layer, rising with depth."""
    share = wide(lower_bounds).softmax(0)
    return share.cumsum(0) - share[0]


def forget(gate: Tensor, run: Pass, layer: int) -> Tensor:
    """log f with f = bound + (1 - bound) sigmoid(gate), gate [B,T,D]; layer 0 has no bound."""
    log_f = F.logsigmoid(wide(gate))
    if layer == 0:
        return log_f
    bound = run.shared["lower_bounds"][layer, : gate.shape[-1]]
    return torch.logaddexp(bound.log(), torch.log1p(-bound) + log_f)


def check_bounds(mixer: str, bounded: bool, width: int, d_model: int) -> None:
    """ValueError where the model's lower bounds [L,D] do not reach all of a mixer's channels."""
    if bounded and width > d_model:
        raise ValueError(
            f"mixers: {mixer} has {width} forget gates, but lower bounds for d_model={d_model} channels only; "
            f"set mixers.{mixer}.lower_bounds to false"
        )
