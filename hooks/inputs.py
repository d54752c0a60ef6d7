"""What a forward pass is given, checked: token ids and the mask of padding."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def check_tokens(tokens: Any) -> None:
    """ValueError for what is no tensor of integer ids [B,T]."""
    if not isinstance(tokens, Tensor):
        raise ValueError(f"tokens: a {type(tokens).__name__}; expected a tensor of integer ids [B,T]")
    if tokens.ndim != 2 or tokens.is_floating_point():
        raise ValueError(f"tokens: {tokens.dtype} of shape {tuple(tokens.shape)}; expected integer ids [B,T]")


def check_vocabulary(tokens: Tensor, size: int) -> None:
    """ValueError for ids outside 0..size-1."""
    if tokens.numel() and not 0 <= int(tokens.min()) <= int(tokens.max()) < size:
        raise ValueError(f"tokens: ids {int(tokens.min())}..{int(tokens.max())} outside the vocabulary 0..{size - 1}")


def real_tokens(tokens: Tensor, attention_mask: Tensor) -> tuple[Tensor, bool]:
    """Which tokens are real, [B,T], and whether all are; one wait for the GPU tells that and the mask's values.

    ValueError for a mask of another shape, or with values other than 0 and 1.
    """
    if attention_mask.shape != tokens.shape:
        raise ValueError(f"attention_mask: shape {tuple(attention_mask.shape)}; expected {tuple(tokens.shape)}")
    real = attention_mask.bool()
    everywhere, binary = torch.stack([real.all(), (attention_mask == real).all()]).tolist()
    if not binary:
        values = attention_mask[attention_mask != real].tolist()
        raise ValueError(f"attention_mask: has {values[0]}; expected 1 (real) or 0 (padding) for each token, or bool")
    return real, everywhere
