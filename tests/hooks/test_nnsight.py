"""nnsight on loaded models: traces see and change what the model computes, under the switches that are on."""

from __future__ import annotations

import gc
import inspect
from typing import Any

import pytest
import torch
from families import build
from nnsight import NNsight, TransformersModel
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, PreTrainedTokenizerFast

import hybridscope as hs
from hybridscope.hooks.mixers.attention import Attention

X = torch.arange(3, 17)[None]


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> hs.HybridLM:
    """Without the checks of shapes that the tests put around every function: `.source` would show those."""
    monkeypatch.setattr(Attention, "forward", inspect.unwrap(Attention.forward))
    return hs.HybridLM(hs.HybridConfig(("gdn", "full"), 4, 16, 4, 41)).eval()


@pytest.fixture
def theirs() -> Any:
    config = Gemma3TextConfig(
        vocab_size=41, hidden_size=16, intermediate_size=24, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=4, sliding_window=8, pad_token_id=0,
        layer_types=["sliding_attention", "full_attention"] * 2,
    )  # fmt: skip
    return hs.load(Gemma3ForCausalLM(config).eval())


def test_own_models_are_traced_and_changed(own: hs.HybridLM) -> None:
    with own.record(resid=list(range(14))) as rec:
        plain = own(X)
    traced = hs.to_nnsight(own)
    with traced.trace(X):
        hidden = traced.blocks[1].output.save()
        logits = traced.output.save()
    assert torch.equal(logits, plain)
    assert torch.equal(hidden, rec.resid(1, "post"))
    with traced.trace(X):
        traced.blocks[1].attn.hook_z.output[:, :, 2] = 0
        changed = traced.output.save()
    with own.ablate([(1, 2)]):
        assert torch.equal(own(X), changed)
    assert torch.equal(own(X), plain)


def test_own_models_under_caps_and_recording(own: hs.HybridLM) -> None:
    traced = hs.to_nnsight(own)
    with own.cap(full=2, recurrent=4), own.record(resid="last", stats=True) as rec:
        capped = own(X)
        with traced.trace(X):
            z = traced.blocks[1].attn.source.attend_0.output.save()
            logits = traced.output.save()
    assert torch.equal(logits, capped)
    assert z.shape == (1, 14, 4, 4)
    assert rec.stats(1).visible.max() == 2
    assert rec.resid(1, "post").shape[0] == 2  # both calls
    assert not torch.equal(own(X), capped)


def test_source_changes_the_kernels_inputs(own: hs.HybridLM) -> None:
    """Queries of the only head changed inside the layer: other rows' attention, without a hook point."""
    traced = hs.to_nnsight(own)
    with own.cap(full=4):
        capped = own(X)
        with traced.trace(X):
            traced.blocks[3].attn.source.rope_0.output[:] = 0
            changed = traced.output.save()
    assert not torch.equal(changed, capped)


def test_transformers_models_under_caps_and_recording(theirs: Any) -> None:
    plain = theirs(X)
    traced = hs.to_nnsight(theirs)
    assert isinstance(traced, NNsight)
    with traced.trace(X):
        logits = traced.lm_head.output.save()
    assert torch.equal(logits, plain)
    with theirs.cap(full=2), theirs.record(stats=True) as rec:
        capped = theirs(X)
        with traced.trace(X):
            z = traced.model.layers[1].self_attn.source.attention_interface_1.output[0].save()
            logits = traced.lm_head.output.save()
    assert torch.equal(logits, capped)
    assert not torch.equal(capped, plain)
    assert z.shape == (1, 14, 4, 4)
    assert rec.stats(1).visible.max() == 2


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning:transformers")
@pytest.mark.parametrize("inside", [False, True])
def test_the_source_of_a_recurrent_mixer_under_caps(inside: bool) -> None:
    """nnsight runs a copy of a forward whose source was asked for, from then on: caps reach it there."""
    theirs = hs.load(build("qwen3_next"))
    plain, traced = theirs(X), hs.to_nnsight(theirs)
    with theirs.cap(recurrent=6):
        capped = theirs(X)
    mixer = traced.model.layers[0].linear_attn
    if not inside:
        assert "torch_chunk_gated_delta_rule_0" in str(mixer.source)
    with theirs.cap(recurrent=6), theirs.record(stats=hs.Stats(rows=[-1], recurrent=True)) as rec:
        with traced.trace(X):
            read = mixer.source.torch_chunk_gated_delta_rule_0.output[0].save()
            logits = traced.lm_head.output.save()
        with traced.trace(X):
            mixer.source.torch_chunk_gated_delta_rule_0.output[0][:] = 0
            changed = traced.lm_head.output.save()
    assert torch.equal(logits, capped)
    assert not torch.allclose(capped, plain, atol=1e-4)
    assert not torch.allclose(changed, capped, atol=1e-4)
    assert read.shape == (1, 14, 4, 8)
    assert rec.stats(0).visible.unique().tolist() == [6 - 4 + 1]
    for cap in (None, 6):  # and before and after it is off
        with theirs.cap(recurrent=cap):
            assert torch.allclose(theirs(X), plain if cap is None else capped, atol=1e-6)
    with traced.trace(X):
        logits = traced.lm_head.output.save()
    assert torch.allclose(logits, plain, atol=1e-5)


def test_transformers_models_are_changed_as_ablate_does(theirs: Any) -> None:
    traced = hs.to_nnsight(theirs)
    with traced.trace(X):
        traced.model.layers[1].self_attn.o_proj.input[:, :, 8:12] = 0  # head 2
        changed = traced.lm_head.output.save()
    with theirs.ablate([(1, 2)]):
        assert torch.allclose(theirs(X), changed, atol=1e-6)
    assert not torch.allclose(theirs(X), changed, atol=1e-6)


def test_models_with_a_tokenizer_take_text(theirs: Any) -> None:
    words = Tokenizer(models.WordLevel({str(n): n for n in range(41)}, unk_token="0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    theirs.tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="2", pad_token="0")
    traced = hs.to_nnsight(theirs)
    assert isinstance(traced, TransformersModel)
    with theirs.cap(full=2), traced.trace("3 4 5 6 7"):
        logits = traced.lm_head.output.save()
    with theirs.cap(full=2):
        assert torch.allclose(logits, theirs(torch.arange(3, 8)[None]), atol=1e-6)


def test_memory_is_flat_over_traces(own: hs.HybridLM) -> None:
    traced = hs.to_nnsight(own)

    def passes(n: int) -> int:
        for _ in range(n):
            with own.record(resid="last", stats=[-1]), traced.trace(X):
                traced.blocks[1].output.save()
        gc.collect()
        return sum(type(x) is torch.Tensor for x in gc.get_objects())

    assert passes(3) >= passes(20)


def test_compiled_models_are_refused(own: hs.HybridLM) -> None:
    own._compiled_call_impl = own._call_impl  # as own.compile() does
    with pytest.raises(RuntimeError, match="uncompiled module"):
        hs.to_nnsight(own)
