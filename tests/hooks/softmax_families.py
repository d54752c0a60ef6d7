"""Tiny models of families in transformers that mix by softmax attention alone, and the mixer of each layer."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from hybridscope.hooks.adapters import transformers

V, T = 64, 24
CLOSE = 2e-5
BASE: dict[str, Any] = {
    "vocab_size": V, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
NARROW = {**BASE, "head_dim": 8}
WINDOWED = {**NARROW, "sliding_window": 8}
THREE_TO_ONE = {"layer_types": ["sliding_attention"] * 3 + ["full_attention"]}
EVERY_OTHER = {"layer_types": ["sliding_attention", "full_attention"] * 2}
MOE = {"num_local_experts": 4, "num_experts_per_tok": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": BASE,
    "qwen3": NARROW,  # q and k norms
    "gpt_neox": {**BASE, "num_key_value_heads": None},  # fused QKV, RoPE on a part, MLP beside attention
    "smollm3": {**BASE, "no_rope_layers": [1, 1, 1, 0]},
    "mistral": WINDOWED,
    "gemma2": {**WINDOWED, **EVERY_OTHER, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 2.0},
    "gemma3_text": {**WINDOWED, **THREE_TO_ONE, "query_pre_attn_scalar": 8},
    "olmo3": {**BASE, "sliding_window": 8, **THREE_TO_ONE},  # norms behind mixer and MLP
    "cohere2": {**WINDOWED, **THREE_TO_ONE},  # MLP beside attention; full layers without RoPE
    "gpt_oss": {**WINDOWED, **EVERY_OTHER, **MOE},  # learnable sinks
    "llama4_text": {
        **NARROW, "intermediate_size_mlp": 64, "num_local_experts": 2, "num_experts_per_tok": 1,
        "attention_chunk_size": 8, "interleave_moe_layer_step": 4, "no_rope_layers": [1, 1, 1, 0],
    },
    "minicpm3": {  # MLA: keys wider than values
        **BASE, "num_key_value_heads": 4, "kv_lora_rank": 8, "q_lora_rank": 16, "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8, "v_head_dim": 8,
    },
}  # fmt: skip
MIXERS = {
    "llama": "full full full full",
    "qwen3": "full full full full",
    "gpt_neox": "full full full full",
    "smollm3": "full full full nope",
    "mistral": "swa:8 swa:8 swa:8 swa:8",
    "gemma2": "swa:8 full swa:8 full",
    "gemma3_text": "swa:8 swa:8 swa:8 full",
    "olmo3": "swa:8 swa:8 swa:8 full",
    "cohere2": "swa:8 swa:8 swa:8 nope",
    "gpt_oss": "swa:8 full swa:8 full",
    "llama4_text": "chunk:8 chunk:8 chunk:8 nope",
    "minicpm3": "full full full full",
}


def build(family: str, attention: str = "eager", **changes: Any) -> Any:
    """A tiny model of one family whose weights are large enough for every token to matter to every later
    one."""
    torch.manual_seed(0)
    options = {k: v for k, v in {**FAMILIES[family], **changes}.items() if v is not None}
    config = CONFIG_MAPPING[family](**options)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if parameter.ndim >= 2 or name.endswith("sinks"):
            nn.init.normal_(parameter, std=0.15 if parameter.ndim >= 2 else 1.0)
    return model


@functools.cache
def pair(family: str) -> tuple[Any, transformers.TransformersLM]:
    """A model with its own eager attention, and the same object instrumented."""
    model = build(family)
    return model, transformers.load(model)


def tokens_of(batch: int = 2, length: int = T, seed: int = 1) -> Tensor:
    return torch.randint(3, V, (batch, length), generator=torch.Generator().manual_seed(seed))


def padding(side: str | None) -> Tensor | None:
    if side is None:
        return None
    mask = torch.ones(2, T, dtype=torch.int64)
    mask[0, slice(5) if side == "left" else slice(T - 5, T)] = 0
    return mask


def gap(got: Tensor, expected: Tensor, mask: Tensor | None = None) -> float:
    difference = (got - expected).abs()
    return float((difference if mask is None else difference[mask.bool()]).max())
