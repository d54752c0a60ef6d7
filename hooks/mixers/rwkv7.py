"""RWKV-7 (Goose, arXiv 2503.14456): a decay a channel, and a removal key apart from the key that is written.

    S_t = (diag(w_t) - (rate_t * c_t) c_t^T) S_{t-1} + k_t v_t^T,   o_t = S_t^T r_t

with c the unit removal key (per head), rate in (0, 1) per channel, w = exp(-0.6065 sigmoid(.)) in (0.545, 1); the key
that is written is k (1 + (rate - 1) kappa). Later layers blend their values with those of the model's first RWKV-7
layer. In the reference recurrence: log_decay = log w, a = -c, b = rate * c; q = r, unscaled; read after the write.
A bonus (r . (rho * k)) v for the present token is added after the norm.
State: H K V numbers a sequence (4 H K V bytes in fp32), and the last input.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config import HybridConfig, Slot
from ..passes import Pass
from .layers import HeadNorm, shift, wide
from .recurrent import Recurrent
from .rwkv6 import Depth

SLOWEST = 0.6065306597126334  # e^-0.5
MIXES = ("r", "w", "k", "v", "a", "g")


class LowRank(nn.Module):
    """x [B,T,D] -> out(activation(in(x)))."""

    def __init__(self, width: int, rank: int, out: int, activation: Any = None, bias: bool = True) -> None:
        super().__init__()
        self.enter = nn.Linear(width, rank, bias=False)
        self.leave = nn.Linear(rank, out, bias=bias)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        low = self.enter(x)
        return self.leave(low if self.activation is None else self.activation(low))

    @torch.no_grad()
    def init_weights(self) -> None:
        """As published: zero in, orthogonal out at a tenth."""
        nn.init.zeros_(self.enter.weight)
        out, rank = self.leave.weight.shape
        nn.init.orthogonal_(self.leave.weight, gain=0.1 * max(1.0, rank / out) ** 0.5)
        if self.leave.bias is not None:
            nn.init.zeros_(self.leave.bias)


class RWKV7(Recurrent):
    """x [B,T,D] -> [B,T,D]. Options: heads, key_dim and value_dim (head_dim), and the ranks decay_rank, rate_rank,
    value_rank, gate_rank (None: as published, about 2.5, 2.5, 1.7 and 5 sqrt(D) in steps of 32)."""

    def __init__(self, config: HybridConfig, slot: Slot) -> None:
        o = config.options("rwkv7")
        D, H = config.d_model, o["heads"] or slot.heads
        K, V = o["key_dim"] or slot.head_dim, o["value_dim"] or slot.head_dim
        super().__init__(slot, heads=H, key_dim=K, value_dim=V, conv=2, points=("rate", "log_decay"))

        def rank(name: str, share: float) -> int:
            return o[name] or max(32, round(share * D**0.5 / 32) * 32)

        grow = K / 64
        self.depth = Depth(slot.layer, config.n_layers)
        same = [s for layer in range(slot.layer + 1) for s in config.slots(layer) if s.mixer == "rwkv7"]
        self.first = next(s for s in same if s.heads == slot.heads) == slot
        self.shared = f"rwkv7 values of {slot.heads} heads"
        self.shifts = nn.Parameter(torch.empty(len(MIXES), D))
        self.q_proj = nn.Linear(D, H * K, bias=False)
        self.k_proj = nn.Linear(D, H * K, bias=False)
        self.v_proj = nn.Linear(D, H * V, bias=False)
        self.decay = LowRank(D, rank("decay_rank", 2.5 * grow), H * K, torch.tanh)
        self.rate = LowRank(D, rank("rate_rank", 2.5 * grow), H * K)
        self.gate = LowRank(D, rank("gate_rank", 5.0), H * V, torch.sigmoid, bias=False)
        if not self.first:
            self.blend = LowRank(D, rank("value_rank", 1.7 * grow), H * V)
        self.removal = nn.Parameter(torch.empty(H * K))
        self.kappa = nn.Parameter(torch.empty(H * K))
        self.bonus = nn.Parameter(torch.empty(H, K))
        self.out_norm = HeadNorm(H, V, K * config.norm_eps)
        self.o_proj = nn.Linear(H * V, D, bias=False)

    def inputs(self, x: Tensor) -> Tensor:
        return x

    def mix(self, inputs: Tensor, history: Tensor | None) -> Tensor:
        return shift(inputs, history)

    def terms(self, x: Tensor, mixed: Tensor | None, run: Pass) -> tuple[dict[str, Tensor], Any]:
        assert mixed is not None
        H, K, V = self.site.heads, self.site.key_dim, self.site.value_dim
        delta = mixed - x
        x_r, x_w, x_k, x_v, x_a, x_g = (x + delta * m for m in self.shifts)
        v = self.v_proj(x_v)
        if self.first:
            run.shared[self.shared] = v
        else:
            v = torch.lerp(v, run.shared[self.shared], self.blend(x_v).sigmoid())
        k = self.k_proj(x_k)
        rate = self.hook("rate", self.rate(x_a).sigmoid().unflatten(-1, (H, K)))
        removal = F.normalize((k * self.removal).unflatten(-1, (H, K)), dim=-1)
        k = k.unflatten(-1, (H, K)) * (1 + (rate - 1) * self.kappa.view(H, K))
        q, k = self.hook("q", self.q_proj(x_r).unflatten(-1, (H, K))), self.hook("k", k)
        v = self.hook("v", v.unflatten(-1, (H, V)))
        log_decay = -SLOWEST * wide(self.decay(x_w)).sigmoid().unflatten(-1, (H, K))
        terms = {
            "q": q, "k": k, "v": v, "log_decay": self.hook("log_decay", log_decay), "a": -removal, "b": removal * rate,
        }  # fmt: skip
        bonus = (q * self.bonus * k).sum(-1, keepdim=True) * v
        return terms, (bonus, self.gate(x_g))

    def finish(self, out: Tensor, rest: tuple[Tensor, Tensor]) -> Tensor:
        bonus, gate = rest
        return (self.out_norm(out) + bonus) * gate.view_as(out)

    @torch.no_grad()
    def init_weights(self, std: float) -> None:
        """Shifts, decays, rates and norms by channel and depth, as published."""
        super().init_weights(std)
        rising, fading = self.depth.rising, self.depth.fading
        device, D = self.shifts.device, self.shifts.shape[1]
        channel = torch.arange(D, device=device) / D
        powers = {"r": 0.2, "w": 0.9, "k": 0.7, "v": 0.7, "a": 0.9, "g": 0.2}
        for name, row in zip(MIXES, self.shifts, strict=True):
            row.copy_(1 - channel ** (powers[name] * fading))
        for low in (self.decay, self.rate, self.gate, *([] if self.first else [self.blend])):
            low.init_weights()
        H, K, V = self.site.heads, self.site.key_dim, self.site.value_dim
        place = _place(H * K, device)
        within = 2 * _place(K, device).repeat(H) - 1  # -1 to 1 inside each head
        within = within * within.abs()
        self.decay.leave.bias.copy_(-5.5 + 6 * place ** (1 + rising**0.3) + 2.5 * within)
        self.rate.leave.bias.copy_(-0.19 + 0.3 * within + 0.4 * (place - 0.5))
        if not self.first:
            self.blend.leave.bias.copy_(0.73 - 0.4 * (_place(H * V, device) - 0.5))
        self.removal.copy_(0.71 - 0.1 * (place - 0.5))
        nn.init.constant_(self.kappa, 1.02)
        nn.init.constant_(self.bonus, -0.04)
        nn.init.constant_(self.out_norm.weight, self.depth.reached**0.7)


def _place(n: int, device: torch.device) -> Tensor:
    """0 to 1 over n channels."""
    return torch.arange(n, device=device) / max(1, n - 1)
