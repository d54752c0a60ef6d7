"""Tiny random models of hybrid families in transformers, and what is in each of their layers."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from hybridscope.hooks.adapters import transformers

V, D, H, G, K = 64, 32, 4, 2, 8
WINDOW = 8
T, CAP = 24, 6
CLOSE = 2e-5

Options = dict[str, Any]
COMMON: Options = {
    "vocab_size": V, "hidden_size": D, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": H,
    "num_key_value_heads": G, "head_dim": K, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
STATES_THEN_FULL = {"layer_types": ["linear_attention"] * 3 + ["full_attention"]}
WINDOWS_THEN_FULL = {"layer_types": ["sliding_attention"] * 3 + ["full_attention"], "sliding_window": WINDOW}
EVERY_OTHER = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": WINDOW}
DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 6, "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}  # fmt: skip
SSM = {
    "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 2, "mamba_d_state": 6, "mamba_d_conv": 4,
    "mamba_expand": 2, "mamba_chunk_size": 16,
}  # fmt: skip
LATENT = {
    "kv_lora_rank": 8, "q_lora_rank": None, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "num_key_value_heads": H,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
SHARED = {**EXPERTS, "shared_expert_intermediate_size": 16}
LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
KDA: Options = {
    **STATES_THEN_FULL, **LATENT, "linear_head_dim": 8, "linear_num_heads": H, "num_experts": 4,
    "num_experts_per_token": 2, "moe_intermediate_size": 16, "mlp_layer_types": ["dense"] + ["sparse"] * 3,
}  # fmt: skip
GONE = object()  # an option of COMMON that a family does not take

# Options of each family, and its mixers: layers apart by spaces, sites of one layer by +, "-" where there is none.
FAMILIES: dict[str, tuple[Options, str]] = {
    "qwen3_next": ({**STATES_THEN_FULL, **DELTA, **SHARED}, "gdn gdn gdn full"),
    "qwen3_5_text": ({**STATES_THEN_FULL, **DELTA}, "gdn gdn gdn full"),
    "qwen3_5_moe_text": ({**STATES_THEN_FULL, **DELTA, **SHARED}, "gdn gdn gdn full"),
    "olmo_hybrid": ({**STATES_THEN_FULL, **DELTA, "linear_num_key_heads": 4, "head_dim": GONE}, "gdn gdn gdn full"),
    "lara_mini": (
        {**DELTA, **SHARED, "layer_types": [f"{k}_attention" for k in ("linear", "sliding", "linear", "full")],
         "sliding_window": WINDOW, "intermediate_size": GONE},
        "gdn swa:8 gdn nope",
    ),
    "kimi_linear": ({**KDA, "max_position_embeddings": GONE, "head_dim": GONE}, "kda kda kda nope"),
    "bailing_hybrid": (
        {**KDA, "num_expert_group": 1, "topk_group": 1, "num_nextn_predict_layers": 0, "max_position_embeddings": GONE,
         "head_dim": GONE},
        "kda kda kda full",
    ),
    "minimax": ({**STATES_THEN_FULL, **LOCAL, "block_size": 16}, "lightning lightning lightning full"),
    "jamba": (
        {"attn_layer_period": 4, "attn_layer_offset": 3, "num_experts": 2, "num_experts_per_tok": 1,
         "mamba_d_state": 6, "mamba_d_conv": 4, "mamba_dt_rank": 4, "head_dim": GONE},
        "mamba mamba mamba nope",
    ),
    "bamba": ({**SSM, "attn_layer_indices": [3], "head_dim": GONE}, "mamba2 mamba2 mamba2 full"),
    "granitemoehybrid": (
        {**SSM, **STATES_THEN_FULL, **LOCAL, "shared_intermediate_size": 32, "head_dim": GONE},
        "mamba2 mamba2 mamba2 nope",
    ),
    "nemotron_h": (
        {"layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"], "ssm_state_size": 6,
         "mamba_num_heads": 8, "mamba_head_dim": 8, "n_groups": 2, "chunk_size": 16, "num_hidden_layers": GONE},
        "mamba2 - nope -",
    ),
    "falcon_h1": ({**SSM, "mamba_d_ssm": 64, "head_dim": GONE}, "full+mamba2 full+mamba2 full+mamba2 full+mamba2"),
    "zamba2": (
        {"layers_block_type": ["linear_attention", "linear_attention", "hybrid", "linear_attention"],
         "n_mamba_heads": 8, "mamba_d_state": 6, "chunk_size": 16, "num_key_value_heads": H, "head_dim": GONE},
        "mamba2 mamba2 nope+mamba2 mamba2",
    ),
    "mamba2": (
        {"num_hidden_layers": 2, "state_size": 6, "num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 16,
         "intermediate_size": GONE, "num_attention_heads": GONE, "num_key_value_heads": GONE},
        "mamba2 mamba2",
    ),
    "mamba": (
        {"num_hidden_layers": 2, "state_size": 6, "intermediate_size": GONE, "num_attention_heads": GONE,
         "num_key_value_heads": GONE, "head_dim": GONE},
        "mamba mamba",
    ),
    "recurrent_gemma": (
        {"num_hidden_layers": 3, "lru_width": D, "attention_window_size": WINDOW,
         "block_types": ["recurrent", "recurrent", "attention"], "max_position_embeddings": GONE},
        "hawk hawk swa:8",
    ),
    "lfm2": (
        {"layer_types": ["conv", "conv", "conv", "full_attention"], "block_multiple_of": 16, "head_dim": GONE},
        "conv conv conv full",
    ),
    "olmo3": ({**WINDOWS_THEN_FULL, "head_dim": GONE}, "swa:8 swa:8 swa:8 full"),
    "gemma2": ({**EVERY_OTHER, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 2.0}, "swa:8 full swa:8 full"),
    "gemma3_text": ({**WINDOWS_THEN_FULL, "query_pre_attn_scalar": 8}, "swa:8 swa:8 swa:8 full"),
    "gemma4_text": (
        {**WINDOWS_THEN_FULL, "vocab_size_per_layer_input": V, "hidden_size_per_layer_input": 8, "global_head_dim": 16},
        "swa:8 swa:8 swa:8 full",
    ),
    "gpt_oss": ({**EVERY_OTHER, **LOCAL}, "swa:8 full swa:8 full"),
    "mistral": ({"sliding_window": WINDOW}, "swa:8 swa:8 swa:8 swa:8"),
    "ministral": (WINDOWS_THEN_FULL, "swa:8 swa:8 swa:8 full"),
    "ministral3": ({}, "full full full full"),
    "cohere2": (WINDOWS_THEN_FULL, "swa:8 swa:8 swa:8 nope"),
    "llama4_text": (
        {"intermediate_size_mlp": 48, "num_local_experts": 2, "num_experts_per_tok": 1, "attention_chunk_size": WINDOW,
         "interleave_moe_layer_step": 4, "no_rope_layers": [1, 1, 1, 0]},
        "chunk:8 chunk:8 chunk:8 nope",
    ),
    "smollm3": ({"no_rope_layers": [1, 1, 1, 0], "head_dim": GONE}, "full full full nope"),
    "exaone4": (WINDOWS_THEN_FULL, "swa:8 swa:8 swa:8 nope"),
    "granite_swa": ({**WINDOWS_THEN_FULL, "head_dim": GONE}, "swa:8 swa:8 swa:8 full"),
    "mimo_v2_flash": (
        {"layer_types": ["full_attention"] + ["sliding_attention"] * 3, "sliding_window": WINDOW, "v_head_dim": 8,
         "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
         "mlp_layer_types": ["dense"] + ["sparse"] * 3},
        "full swa:8 swa:8 swa:8",
    ),
    "zaya": (
        {"num_experts": 2, "moe_intermediate_size": 16, "router_hidden_size": 16, "intermediate_size": GONE},
        "full full full full",
    ),
    "minicpm3": ({**LATENT, "q_lora_rank": 16, "head_dim": GONE}, "full full full full"),
    "hunyuan_v1_dense": ({}, "full full full full"),
    "phi3": ({"sliding_window": None, "head_dim": GONE}, "full full full full"),
    "gpt_neox": ({"num_key_value_heads": GONE, "head_dim": GONE}, "full full full full"),
}  # fmt: skip
KIND = {"full": "full", "nope": "full", "swa": "window", "chunk": "window", "conv": "conv"}  # others: recurrent


def kind_of(mixer: str) -> str:
    return KIND.get(mixer.split(":")[0], "recurrent")


EVERY = list(FAMILIES)
MIXERS = {family: [layer.split("+") for layer in mixers.split()] for family, (_, mixers) in FAMILIES.items()}
RECURRENT = [f for f in EVERY if any(kind_of(m) == "recurrent" for layer in MIXERS[f] for m in layer if m != "-")]
SOFTMAX = [f for f in EVERY if any(kind_of(m) in ("full", "window") for layer in MIXERS[f] for m in layer if m != "-")]


def build(family: str, attention: str = "eager", seed: int = 0) -> Any:
    """A model whose weights are large enough for tokens to matter to one another, norms not all one, states that last
    for a while."""
    torch.manual_seed(seed)
    options = {name: x for name, x in {**COMMON, **FAMILIES[family][0]}.items() if x is not GONE}
    config = CONFIG_MAPPING[family](**options)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    for name, p in model.eval().requires_grad_(False).named_parameters():
        if name.endswith(("A_log", "dt_bias", "dt_proj.bias")):
            nn.init.uniform_(p, -2, -1)
        elif name.endswith("temp"):
            nn.init.uniform_(p, 0.5, 1.5)
        elif p.ndim >= 2 or name.endswith("sinks"):
            nn.init.normal_(p, std=0.2 if p.ndim >= 2 else 1.0)
        elif "norm" in name:
            p.add_(torch.rand_like(p) * 0.5)
        elif name.endswith("bias"):
            nn.init.normal_(p, std=0.1)
    return model


@functools.cache
def pair(family: str) -> tuple[Any, transformers.TransformersLM]:
    """A model with its own eager attention, and the same object instrumented."""
    model = build(family)
    return model, transformers.load(model)


def tokens_of(batch: int = 2, length: int = T, seed: int = 1) -> Tensor:
    return torch.randint(3, V, (batch, length), generator=torch.Generator().manual_seed(seed))


def left_padding() -> Tensor:
    mask = torch.ones(2, T, dtype=torch.int64)
    mask[0, :5] = 0
    return mask


def gap(got: Tensor, expected: Tensor, mask: Tensor | None = None) -> float:
    """Largest difference, in units of how large the expected values are."""
    if not expected.numel():
        return 0.0
    difference = (got - expected).abs()
    return float((difference if mask is None else difference[mask.bool()]).max()) / (1 + float(expected.abs().max()))


def caps_of(loaded: transformers.TransformersLM, cap: int = CAP) -> dict[str, int]:
    return dict.fromkeys(sorted({site.kind for site in loaded.sites}), cap)
