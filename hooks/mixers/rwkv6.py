"""RWKV-6 (Finch, arXiv 2404.05892): one data-dependent decay a channel, and a bonus for the present token.

    o_t = S_{t-1}^T r_t + (r_t . (u * k_t)) v_t,   S_t = diag(exp(-exp(w_t))) S_{t-1} + k_t v_t^T

Every projection reads its own mixture of the token and the one before it (token shift), the mixtures themselves from a
low-rank map of such a mixture. In the reference recurrence: A_t = diag(exp(log_decay)), log_decay = -exp(w); q = r,
unscaled, read *before* the write; the bonus is added outside it.
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

MIXES = ("r", "w", "k", "v", "g")  # receptance (query), decay, key, value, gate


class RWKV6(Recurrent):
    """x [B,T,D] -> [B,T,D]. Options: heads, key_dim and value_dim (head_dim), mix_rank (32), decay_rank (64)."""

    read = "before"

    def __init__(self, config: HybridConfig, slot: Slot) -> None:
        o = config.options("rwkv6")
        D, H = config.d_model, o["heads"] or slot.heads
        K, V = o["key_dim"] or slot.head_dim, o["value_dim"] or slot.head_dim
        super().__init__(slot, heads=H, key_dim=K, value_dim=V, conv=2, points=("log_decay",))
        self.depth = Depth(slot.layer, config.n_layers)
        self.shift = nn.Parameter(torch.empty(D))  # mixture that the low-rank map reads
        self.shifts = nn.Parameter(torch.empty(len(MIXES), D))
        self.mix_in = nn.Linear(D, len(MIXES) * o["mix_rank"], bias=False)
        self.mix_out = nn.Parameter(torch.empty(D, len(MIXES) * o["mix_rank"]))
        self.q_proj = nn.Linear(D, H * K, bias=False)
        self.k_proj = nn.Linear(D, H * K, bias=False)
        self.v_proj = nn.Linear(D, H * V, bias=False)
        self.gate_proj = nn.Linear(D, H * V, bias=False)
        self.decay_in = nn.Linear(D, o["decay_rank"], bias=False)
        self.decay_out = nn.Linear(o["decay_rank"], H * K)
        self.bonus = nn.Parameter(torch.empty(H, K))
        self.out_norm = HeadNorm(H, V, config.norm_eps)
        self.o_proj = nn.Linear(H * V, D, bias=False)

    def inputs(self, x: Tensor) -> Tensor:
        return x

    def mix(self, inputs: Tensor, history: Tensor | None) -> Tensor:
        return shift(inputs, history)

    def terms(self, x: Tensor, mixed: Tensor | None, run: Pass) -> tuple[dict[str, Tensor], Any]:
        assert mixed is not None
        H, K, V = self.site.heads, self.site.key_dim, self.site.value_dim
        delta = mixed - x
        low = self.mix_in(x + delta * self.shift).tanh().unflatten(-1, (len(MIXES), -1))
        mixes = torch.einsum("btnr,dnr->btnd", low, self.mix_out.unflatten(-1, (len(MIXES), -1))) + self.shifts
        r, w, k, v, g = (x + delta * m for m in mixes.unbind(2))
        q = self.hook("q", self.q_proj(r).unflatten(-1, (H, K)))
        k = self.hook("k", self.k_proj(k).unflatten(-1, (H, K)))
        v = self.hook("v", self.v_proj(v).unflatten(-1, (H, V)))
        log_decay = -wide(self.decay_out(self.decay_in(w).tanh())).exp()
        terms = {"q": q, "k": k, "v": v, "log_decay": self.hook("log_decay", log_decay.unflatten(-1, (H, K)))}
        bonus = (q * self.bonus * k).sum(-1)
        return terms, (bonus, v, self.gate_proj(g))

    def finish(self, out: Tensor, rest: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        bonus, v, gate = rest
        return self.out_norm(out + bonus[..., None] * v) * F.silu(gate).view_as(out)

    def weighting(self, rest: tuple[Tensor, Tensor, Tensor]) -> dict[str, Tensor]:
        return {"bonus": rest[0]}

    @torch.no_grad()
    def init_weights(self, std: float) -> None:
        """Token shifts, decays and bonus by channel and depth, as published."""
        super().init_weights(std)
        rising, fading = self.depth.rising, self.depth.fading
        channel = torch.arange(self.shift.numel(), device=self.shift.device) / self.shift.numel()
        self.shift.copy_(1 - channel**fading)
        for name, row in zip(MIXES, self.shifts, strict=True):
            power = fading / 2 if name in "rg" else fading
            row.copy_(1 - channel**power - (0.3 * rising if name == "v" else 0))
        nn.init.zeros_(self.mix_in.weight)
        nn.init.uniform_(self.mix_out, -0.01, 0.01)
        nn.init.zeros_(self.decay_in.weight)
        nn.init.uniform_(self.decay_out.weight, -0.01, 0.01)
        n = torch.arange(self.decay_out.bias.numel(), device=self.shift.device)
        place = n / max(1, n.numel() - 1)
        self.decay_out.bias.copy_(-6 + 5 * place ** (0.7 + 1.3 * rising))
        self.bonus.copy_((rising * (1 - place) + 0.1 * ((n + 1) % 3 - 1)).view_as(self.bonus))


class Depth:
    """How deep a layer lies, as RWKV's initialisation counts it: from 0 to 1, from 1 to 1/L, from 1/L to 1."""

    def __init__(self, layer: int, n_layers: int) -> None:
        self.rising = layer / max(1, n_layers - 1)
        self.fading = 1 - layer / n_layers
        self.reached = (layer + 1) / n_layers
