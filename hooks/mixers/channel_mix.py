"""RWKV's channel mix, the MLP of its layers: squared ReLU on a mixture of each token and the one before it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config import HybridConfig
from ..passes import Pass, Shapes
from .layers import shift
from .recurrent import init_linears
from .rwkv6 import Depth


class ChannelMix7(nn.Module):
    """x [B,T,D] -> down(relu(up(x + shift (before - x)))^2), of RWKV-7 (arXiv 2503.14456)."""

    def __init__(self, config: HybridConfig, layer: int) -> None:
        super().__init__()
        assert config.d_ff is not None
        self.name = f"blocks.{layer}.mlp"
        self.depth = Depth(layer, config.n_layers)
        self.shift = nn.Parameter(torch.empty(config.d_model))
        self.up_proj = nn.Linear(config.d_model, config.d_ff, bias=False)
        self.down_proj = nn.Linear(config.d_ff, config.d_model, bias=False)

    def before(self, x: Tensor, run: Pass) -> Tensor:
        """The token before each one, minus it: [B,T,D]."""
        old = run.state(self.name)
        inputs = run.compact(x)
        before = run.restore(shift(inputs, None if old is None else old.conv))
        run.keep(self.name, old, inputs, 2)
        return before - x

    def cached(self, batch: int) -> dict[str, Shapes]:
        """What a cache of this channel mix holds."""
        return {self.name: {"last inputs": (batch, 1, self.shift.numel())}}

    def forward(self, x: Tensor, run: Pass) -> Tensor:
        return self.down_proj(F.relu(self.up_proj(x + self.before(x, run) * self.shift)).square())

    @torch.no_grad()
    def init_weights(self, std: float) -> None:
        init_linears(self, std)
        self.shift.copy_(1 - self._channel() ** self.depth.fading**4)

    def _channel(self) -> Tensor:
        return torch.arange(self.shift.numel(), device=self.shift.device) / self.shift.numel()


class ChannelMix6(ChannelMix7):
    """The same of RWKV-6 (arXiv 2404.05892), under a sigmoid gate that has a mixture of its own."""

    def __init__(self, config: HybridConfig, layer: int) -> None:
        super().__init__(config, layer)
        self.gate_shift = nn.Parameter(torch.empty(config.d_model))
        self.gate_proj = nn.Linear(config.d_model, config.d_model, bias=False)

    def forward(self, x: Tensor, run: Pass) -> Tensor:
        delta = self.before(x, run)
        out = self.down_proj(F.relu(self.up_proj(x + delta * self.shift)).square())
        return self.gate_proj(x + delta * self.gate_shift).sigmoid() * out

    @torch.no_grad()
    def init_weights(self, std: float) -> None:
        init_linears(self, std)
        for weight in (self.shift, self.gate_shift):
            weight.copy_(1 - self._channel() ** self.depth.fading)
