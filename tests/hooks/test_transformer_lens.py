"""TransformerLens on loaded models: a bridge on the same weights with the same logits, beside an untouched model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformer_lens import HookedRootModule
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import hybridscope as hs
from hybridscope.hooks.adapters.pretrained import without_fla

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning:transformers")

BASE: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
HEADS = {**BASE, "head_dim": 8}
GDN = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
}  # fmt: skip
WINDOWS = {"sliding_window": 8, "layer_types": ["sliding_attention"] * 3 + ["full_attention"]}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 8, "mamba_chunk_size": 16}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_next": {
        **HEADS, **GDN, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
    },
    "qwen3_5_text": {**HEADS, **GDN},
    "olmo_hybrid": {**BASE, **GDN, "linear_num_key_heads": 4},
    "falcon_h1": {**BASE, **MAMBA, "mamba_d_ssm": 64},
    "bamba": {**BASE, **MAMBA, "attn_layer_indices": [3]},
    "lfm2": {**BASE, "layer_types": ["conv"] * 3 + ["full_attention"], "block_multiple_of": 16},
    "olmo3": {**BASE, **WINDOWS},
    "gemma3_text": {**HEADS, **WINDOWS, "query_pre_attn_scalar": 8},
    "gpt_oss": {**HEADS, **WINDOWS, "num_local_experts": 4, "num_experts_per_tok": 2},
    "smollm3": {**BASE, "no_rope_layers": [1, 1, 1, 0]},
}  # fmt: skip
X = torch.arange(3, 17)[None]


def tiny(family: str) -> Any:
    with without_fla():
        return AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**FAMILIES[family])).eval()


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_logits_on_the_same_weights(family: str) -> None:
    theirs = tiny(family)
    model = hs.load(theirs)
    before = model(X)
    bridge = hs.to_transformer_lens(model)
    theirs.set_attn_implementation("eager")  # as the bridge does
    assert torch.equal(bridge(X), theirs(X, use_cache=False).logits)
    assert {id(p) for p in bridge.parameters()} == {id(p) for p in theirs.parameters()}
    logits, cache = bridge.run_with_cache(X)
    assert cache["blocks.3.hook_resid_pre"].shape == (1, 14, 32)
    changed = bridge.run_with_hooks(X, fwd_hooks=[("blocks.2.hook_resid_pre", lambda x, hook: x * 0)])
    assert not torch.equal(changed, logits)
    assert torch.equal(model(X), before)  # the bridge rewired a tree of its own
    with model.cap({3: 4}):
        assert not torch.equal(model(X), before)
        assert torch.equal(bridge(X), logits)


def test_folding_weights_in_the_bridge_leaves_the_model_alone() -> None:
    model = hs.load(AutoModelForCausalLM.from_config(CONFIG_MAPPING["llama"](**BASE)).eval())
    before = model(X)
    folded = hs.to_transformer_lens(model)
    folded.enable_compatibility_mode()
    assert torch.equal(model(X), before)
    assert torch.allclose(folded(X).log_softmax(-1), before.log_softmax(-1), atol=1e-5)
    assert torch.allclose(hs.to_transformer_lens(model)(X), before, atol=1e-5)


def test_the_tokenizer_comes_along() -> None:
    words = Tokenizer(models.WordLevel({str(n): n for n in range(64)}, unk_token="0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    model = hs.load(tiny("olmo3"))
    model.tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, bos_token="1", eos_token="2", pad_token="0")
    bridge = hs.to_transformer_lens(model)
    assert bridge.to_tokens("7 8", prepend_bos=False).tolist() == [[7, 8]]
    assert bridge.to_tokens("7 8").tolist() == [[1, 7, 8]]  # TransformerLens' habit
    assert torch.equal(bridge("7 8", prepend_bos=False), bridge(torch.tensor([[7, 8]])))


def test_our_own_models_are_hooked_root_modules() -> None:
    model = hs.HybridLM(hs.HybridConfig(("gdn", "full"), 2, 16, 4, 41))
    assert hs.to_transformer_lens(model) is model
    assert isinstance(model, HookedRootModule)
    logits, cache = model.run_with_cache(X)
    assert cache["blocks.1.attn.hook_z"].shape == (1, 14, 4, 4)

    def silence(z: torch.Tensor, hook: Any) -> torch.Tensor:
        z[:, :, 2] = 0
        return z

    hooked = model.run_with_hooks(X, fwd_hooks=[("blocks.1.attn.hook_z", silence)])
    with model.ablate([(1, 2)]):
        assert torch.equal(model(X), hooked)
    assert not torch.equal(hooked, logits)


def test_unknown_families_are_named() -> None:
    config = CONFIG_MAPPING["ministral"](**HEADS, **WINDOWS)
    model = hs.load(AutoModelForCausalLM.from_config(config).eval())
    with pytest.raises(ValueError, match="TransformerLens has no adapter for MinistralForCausalLM"):
        hs.to_transformer_lens(model)
