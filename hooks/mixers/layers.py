"""Pieces that mixers share: RMS norm, rotary positions, the short causal convolution."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ..kernels.short_conv import short_conv

if TYPE_CHECKING:
    from ..passes import Pass


def wide(x: Tensor) -> Tensor:
    """x in fp32, or fp64 where it is: what decays and norms are computed in."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def unit(x: Tensor) -> Tensor:
    """x / sqrt(|x|^2 + 1e-6) over the last dimension: never longer than 1."""
    y = wide(x)
    return (y * torch.rsqrt(y.square().sum(-1, keepdim=True) + 1e-6)).to(x.dtype)


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension, or over each of `groups` equal parts of it `width` wide; the rms in
    fp32 or wider (arXiv 1910.07467)."""

    def __init__(self, width: int, eps: float, groups: int = 1) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(groups * width))
        self.eps = eps
        self.groups = groups

    def forward(self, x: Tensor) -> Tensor:
        y = wide(x) if self.groups == 1 else wide(x).unflatten(-1, (self.groups, -1))
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)
        return y.reshape(x.shape).to(x.dtype) * self.weight


def rope(x: Tensor, position: Tensor, base: float, run: Pass | None = None) -> Tensor:
    """Rotate dimension pairs (d, d + K/2) of x [B,T,H,K] by position * base^(-2d/K) (arXiv 2104.09864). The cosines and
    sines are made once for all of `run` that is turned alike."""
    half = x.shape[-1] // 2
    dtype = torch.promote_types(x.dtype, torch.float32)

    def turns() -> list[Tensor]:
        return [y[:, :, None].to(dtype) for y in _rotations(position, half, base)]

    cos, sin = turns() if run is None else run.once("rotations", turns, position, half, base, dtype)
    left, right = x.to(dtype).split(half, -1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], -1).to(x.dtype)


@torch.library.custom_op("hybridscope::rotations", mutates_args=(), schema="(Tensor p, int n, float base) -> Tensor[]")
def _rotations(position: Tensor, half: int, base: float) -> list[Tensor]:
    """cos and sin of position * base^(-d/half) in fp64, [1 or B,T,half].

    An op of its own, so that torch.compile computes it once a token: it would put the powers and cosines, all in fp64,
    into the loops over heads and samples, forward and backward.
    """
    frequency = base ** (-torch.arange(half, dtype=torch.float64, device=position.device) / half)
    angle = position[..., None].double() * frequency
    return [angle.cos(), angle.sin()]


@_rotations.register_fake
def _(position: Tensor, half: int, base: float) -> list[Tensor]:
    shape = (*position.shape, half)
    return [torch.empty(shape, dtype=torch.float64, device=position.device) for _ in range(2)]


class ShortConv(nn.Module):
    """Depthwise causal convolution of width c over time, and a SiLU where asked for; x [B,T,D], history [B,c-1,D]."""

    def __init__(self, channels: int, width: int, *, bias: bool = False, silu: bool = True) -> None:
        super().__init__()
        self.width = width
        self.silu = silu
        self.weight = nn.Parameter(torch.empty(channels, width))
        self.bias = nn.Parameter(torch.empty(channels)) if bias else None

    def forward(self, x: Tensor, history: Tensor | None) -> Tensor:
        return short_conv(x, self.weight, self.bias, history, self.silu)

    @torch.no_grad()
    def init_weights(self) -> None:
        bound = self.width**-0.5
        nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class HeadNorm(nn.Module):
    """Layer norm of each head of x [B,T,H,V], with weights and biases of its own (a group norm over H V channels)."""

    def __init__(self, heads: int, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(heads * width))
        self.bias = nn.Parameter(torch.zeros(heads * width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.layer_norm(wide(x), x.shape[-1:], eps=self.eps).to(x.dtype)
        return y * self.weight.view(x.shape[2:]) + self.bias.view(x.shape[2:])


def shift(x: Tensor, history: Tensor | None) -> Tensor:
    """The token before each one: x [B,T,D], history [B,1,D] (None: zeros)."""
    front = torch.zeros_like(x[:, :1]) if history is None else history.to(x.dtype)
    return torch.cat([front, x[:, :-1]], 1) if x.shape[1] else x


class DecayRate(nn.Module):
    """Log decays of the Mamba family, -rate * softplus(x + bias), in fp32 or wider (arXiv 2405.21060).

    One rate a head, from `slowest` to 16 at first; the bias one a head, or one a channel for x [B,T,H,K].
    """

    def __init__(self, heads: int, channels: int | None = None, slowest: float = 1.0) -> None:
        super().__init__()
        self.slowest = slowest
        self.log_rate = nn.Parameter(torch.empty(heads))
        self.bias = nn.Parameter(torch.empty(heads) if channels is None else torch.empty(heads * channels))

    def step(self, x: Tensor) -> Tensor:
        """Time steps softplus(x + bias), x [B,T,H] or [B,T,H,K]."""
        x = wide(x)
        return nn.functional.softplus(x + self.bias.to(x.dtype).view(x.shape[2:]))

    def forward(self, x: Tensor) -> Tensor:
        step = self.step(x)
        rate = self.log_rate.to(step.dtype).exp()
        return -rate.view(-1, *[1] * (x.ndim - 3)) * step

    @torch.no_grad()
    def init_weights(self) -> None:
        """As published: rates uniform up to 16, time steps log-uniform in [1e-3, 1e-1] through the softplus."""
        self.log_rate.uniform_(self.slowest, 16).log_()
        step = torch.exp(torch.empty_like(self.bias).uniform_(math.log(1e-3), math.log(1e-1)))
        self.bias.copy_(step + torch.log(-torch.expm1(-step)))
