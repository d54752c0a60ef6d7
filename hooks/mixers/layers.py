"""Pieces that mixers share: RMS norm, rotary positions, the short causal convolution."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension; the rms in fp32 or wider (arXiv 1910.07467)."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype) * self.weight


def rope(x: Tensor, position: Tensor, base: float) -> Tensor:
    """Rotate dimension pairs (d, d + K/2) of x [B,T,H,K] by position * base^(-2d/K) (arXiv 2104.09864)."""
    half = x.shape[-1] // 2
    dtype = torch.promote_types(x.dtype, torch.float32)
    frequency = base ** (-torch.arange(half, dtype=torch.float64, device=x.device) / half)
    angle = (position[..., None].double() * frequency)[:, :, None]
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    left, right = x.to(dtype).split(half, -1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], -1).to(x.dtype)


class ShortConv(nn.Module):
    """Depthwise causal convolution of width c over time, then SiLU; x [B,T,D], history [B,c-1,D].

    A sum of c shifted products: exact and local, so that what lies further back cannot leak in.
    """

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.width = width
        self.weight = nn.Parameter(torch.empty(channels, width))

    def forward(self, x: Tensor, history: Tensor | None) -> Tensor:
        front = x.new_zeros(x.shape[0], self.width - 1, x.shape[-1]) if history is None else history.to(x.dtype)
        padded = torch.cat([front, x], 1)
        taps = [padded[:, i : i + x.shape[1]] * self.weight[:, i] for i in range(self.width)]
        return nn.functional.silu(sum(taps[1:], taps[0]))

    @torch.no_grad()
    def init_weights(self) -> None:
        bound = self.width**-0.5
        nn.init.uniform_(self.weight, -bound, bound)
