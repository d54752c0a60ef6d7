"""Arithmetic that a training step needs, per token: what MFU (arXiv 2204.02311) divides by.

    6 N + 3 sum over mixers,   N: every matrix element but the embedding's, the unembedding counted once

A multiplication and an addition are two operations; the backward pass costs twice the forward pass. Mixers, forward:

    softmax      2 H (K + V) n    n: keys that a query sees on average, (T + 1) / 2 when causal, fewer under a window
    recurrence   4 H K V          write and read of the state; 6 with the delta rule's erasure, 8 with a general one

Causal attention is counted by the keys that are seen, half of the T x T square (`whole`: all of it, PaLM's 12 L H K T,
which flatters). What kernels do beyond this (recomputation, chunked forms, padding) is not counted.
"""

from __future__ import annotations

from ...hooks.config import parse_mixer
from ...hooks.kernels.fused import MIXERS
from ...hooks.model import HybridLM
from ...hooks.sites import Site

NOMINAL = {"NVIDIA H200": 989e12, "NVIDIA H100": 989e12, "NVIDIA A100": 312e12}
"""Dense bf16 FLOP/s by datasheet, by the beginning of the device's name (SXM parts)."""
STATE = {"low rank": 8, "delta": 6, "delta scalar": 6, "delta vector": 6}  # others: 4


def nominal_peak(device: str) -> float | None:
    """Dense bf16 FLOP/s of a device by its datasheet; None where we have none."""
    return next((peak for name, peak in NOMINAL.items() if device.startswith(name)), None)


def matrix_elements(model: HybridLM) -> int:
    """N: elements of matrices, convolutions included; the embedding only where it is also the unembedding."""
    total = sum(p.numel() for p in model.parameters() if p.ndim >= 2)
    return total if model.config.tie_embeddings else total - model.embed.weight.numel()


def mixer_flops(site: Site, length: int, whole: bool = False) -> float:
    """Forward operations a token of one mixer beside its projections, in a sequence of `length`."""
    if site.softmax:
        w = min(length, site.window or length)
        seen = (w * (w + 1) / 2 + (length - w) * w) / length
        if whole and site.window is None:
            seen = length
        return 2.0 * site.heads * (site.key_dim + site.value_dim) * seen
    family = MIXERS[parse_mixer(site.mixer)[0]]
    return 1.0 * STATE.get(family, 4) * site.heads * site.key_dim * site.value_dim


def flops_per_token(model: HybridLM, length: int, whole: bool = False) -> float:
    """Forward and backward operations a token; `whole`: full attention counted as the whole T x T square."""
    return 6.0 * matrix_elements(model) + 3 * sum(mixer_flops(site, length, whole) for site in model.sites)
