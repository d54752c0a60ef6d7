"""Layers of flash-linear-attention as the tests need them: how to build them, and names and shapes of their parameters,
so that weights of that layout can be made without fla (which is not installed where tests run on a CPU)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

D, H = 16, 4
RANKS = {"decay_low_rank_dim": 3, "gate_low_rank_dim": 5, "a_low_rank_dim": 2, "v_low_rank_dim": 7}

# Per source of hooks/adapters/keys.py: module, class and arguments in fla; our mixer's options; names and shapes.
LAYERS: dict[str, tuple[str, str, dict[str, Any], dict[str, Any], dict[str, tuple[int, ...]]]] = {
    "gla": (
        "fla.layers", "GatedLinearAttention", {"num_heads": H, "gate_low_rank_dim": 3}, {"gate_rank": 3},
        {
            "q_proj.weight": (8, D), "k_proj.weight": (8, D), "v_proj.weight": (16, D), "g_proj.weight": (16, D),
            "gk_proj.0.weight": (3, D), "gk_proj.1.weight": (8, 3), "gk_proj.1.bias": (8,), "o_proj.weight": (D, 16),
            "g_norm_swish_gate.weight": (4,),
        },
    ),
    "hgrn": (
        "fla.layers", "HGRNAttention", {}, {},
        {
            "i_proj.weight": (16, D), "f_proj.weight": (16, D), "g_proj.weight": (16, D), "g_norm.weight": (16,),
            "o_proj.weight": (D, 16),
        },
    ),
    "hgrn2": (
        "fla.layers", "HGRN2Attention", {"num_heads": H, "expand_ratio": None}, {},
        {
            "q_proj.weight": (16, D), "f_proj.weight": (16, D), "i_proj.weight": (16, D), "g_norm.weight": (16,),
            "o_proj.weight": (D, 16),
        },
    ),
    "retnet": (
        "fla.layers", "MultiScaleRetention", {"num_heads": H}, {},
        {
            "q_proj.weight": (16, D), "k_proj.weight": (16, D), "v_proj.weight": (32, D), "g_proj.weight": (32, D),
            "o_proj.weight": (D, 32), "g_norm_swish_gate.weight": (8,),
        },
    ),
    "deltanet": (
        "fla.layers", "DeltaNet", {"num_heads": H, "expand_v": 1.5}, {"value_dim": 6},
        {
            "q_proj.weight": (16, D), "k_proj.weight": (16, D), "v_proj.weight": (24, D), "b_proj.weight": (4, D),
            "q_conv1d.weight": (16, 1, 4), "k_conv1d.weight": (16, 1, 4), "v_conv1d.weight": (24, 1, 4),
            "o_norm.weight": (6,), "o_proj.weight": (D, 24),
        },
    ),
    "gdn": (
        "fla.layers", "GatedDeltaNet", {"num_heads": 2, "num_v_heads": 4, "head_dim": 4, "expand_v": 1.5},
        {"heads": 2, "value_heads": 4, "key_dim": 4, "value_dim": 6},
        {
            "q_proj.weight": (8, D), "k_proj.weight": (8, D), "v_proj.weight": (24, D), "a_proj.weight": (4, D),
            "b_proj.weight": (4, D), "A_log": (4,), "dt_bias": (4,), "q_conv1d.weight": (8, 1, 4),
            "k_conv1d.weight": (8, 1, 4), "v_conv1d.weight": (24, 1, 4), "g_proj.weight": (24, D),
            "o_norm.weight": (6,), "o_proj.weight": (D, 24),
        },
    ),
    "kda": (
        "fla.layers", "KimiDeltaAttention", {"num_heads": 2, "num_v_heads": 4, "head_dim": 4, "expand_v": 1.5},
        {"heads": 2, "value_heads": 4, "key_dim": 4, "value_dim": 6},
        {
            "q_proj.weight": (8, D), "k_proj.weight": (8, D), "v_proj.weight": (24, D), "f_proj.0.weight": (6, D),
            "f_proj.1.weight": (16, 6), "b_proj.weight": (4, D), "A_log": (4,), "dt_bias": (16,),
            "q_conv1d.weight": (8, 1, 4), "k_conv1d.weight": (8, 1, 4), "v_conv1d.weight": (24, 1, 4),
            "g_proj.0.weight": (6, D), "g_proj.1.weight": (24, 6), "g_proj.1.bias": (24,), "o_norm.weight": (6,),
            "o_proj.weight": (D, 24),
        },
    ),
    "rwkv6": (
        "fla.layers", "RWKV6Attention", {"num_heads": H, "proj_low_rank_dim": 3, "gate_low_rank_dim": 5},
        {"key_dim": 2, "mix_rank": 3, "decay_rank": 5},
        {
            "x_bias": (5, D), "bonus": (4, 2), "x_proj.0.mu": (D,), "x_proj.0.linear.weight": (15, D),
            "x_proj.2.weight": (D, 15), "r_proj.linear.weight": (8, D), "w_proj.linear.lora.0.weight": (5, D),
            "w_proj.linear.lora.2.weight": (8, 5), "w_proj.linear.lora.2.bias": (8,), "k_proj.linear.weight": (8, D),
            "v_proj.linear.weight": (16, D), "g_proj.linear.weight": (16, D), "g_norm.weight": (16,),
            "g_norm.bias": (16,), "o_proj.weight": (D, 16),
        },
    ),
    "rwkv6.mlp": (
        "fla.models.rwkv6.modeling_rwkv6", "RWKV6FeedForward", {"intermediate_size": 24}, {},
        {
            "key.mu": (D,), "key.linear.weight": (24, D), "value.weight": (D, 24), "receptance.mu": (D,),
            "receptance.linear.weight": (D, D),
        },
    ),
    "rwkv7": (
        "fla.layers", "RWKV7Attention", {"head_dim": None, "num_heads": H, **RANKS},
        {"decay_rank": 3, "gate_rank": 5, "rate_rank": 2, "value_rank": 7},
        {
            **{f"x_{mix}": (1, 1, D) for mix in "rwkvag"}, "k_k": (16,), "k_a": (16,), "r_k": (4, 4),
            "r_proj.weight": (16, D), "k_proj.weight": (16, D), "v_proj.weight": (16, D), "o_proj.weight": (D, 16),
            "w_lora.lora.0.weight": (3, D), "w_lora.lora.2.weight": (16, 3), "w_lora.lora.2.bias": (16,),
            "v_lora.lora.0.weight": (7, D), "v_lora.lora.2.weight": (16, 7), "v_lora.lora.2.bias": (16,),
            "a_lora.lora.0.weight": (2, D), "a_lora.lora.2.weight": (16, 2), "a_lora.lora.2.bias": (16,),
            "g_lora.lora.0.weight": (5, D), "g_lora.lora.2.weight": (16, 5), "g_norm.weight": (16,),
            "g_norm.bias": (16,),
        },
    ),
    "rwkv7.mlp": (
        "fla.models.rwkv7.modeling_rwkv7", "RWKV7FeedForward", {"intermediate_size": 24}, {},
        {"x_k": (D,), "key.weight": (24, D), "value.weight": (D, 24)},
    ),
}  # fmt: skip
MIXERS = [source for source in LAYERS if "." not in source]


def weights(source: str) -> dict[str, Tensor]:
    """Random fp64 weights in the layout of fla's layer, at which everything matters."""
    return {name: 0.4 * torch.randn(shape, dtype=torch.float64) for name, shape in LAYERS[source][-1].items()}
