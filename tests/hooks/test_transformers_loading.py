"""Loading transformers models: the caller's object stays as it was, and what cannot be loaded says what is wrong."""

from __future__ import annotations

import copy
import json
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from softmax_families import CLOSE, T, V, build, gap, pair, tokens_of
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from hybridscope.hooks import checkpoint
from hybridscope.hooks.adapters import transformers
from hybridscope.hooks.adapters.pretrained import without_fla
from hybridscope.hooks.record import Stats

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning:transformers")


# The caller's object


def test_the_model_is_as_it_was() -> None:
    model, tokens = build("llama"), tokens_of()

    def hooks() -> int:
        return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())

    with torch.no_grad():
        before = model(tokens, output_attentions=True)  # leaves hooks of transformers' own behind
        own_hooks = hooks()
        loaded = transformers.load(model)
        with loaded.cap(full=4), loaded.record(resid="last", stats=True):
            assert gap(model(tokens).logits, before.logits) > 1e-2  # while a switch is on, it is on
        after = model(tokens, output_attentions=True)
    assert torch.equal(after.logits, before.logits)
    assert after.attentions[0].shape == (2, 4, T, T)
    assert model.config._attn_implementation == "eager"
    assert hooks() == own_hooks
    assert not model.training
    with pytest.raises(ZeroDivisionError), loaded.record(resid="last"):
        raise ZeroDivisionError
    assert model.config._attn_implementation == "eager"
    assert hooks() == own_hooks


def test_training_mode_survives_loading() -> None:
    model = build("gemma3_text").train()
    transformers.load(model)
    assert all(module.training for module in model.modules())


def test_loading_twice_is_idempotent() -> None:
    model = build("gemma3_text")
    first = transformers.load(model)
    tokens = tokens_of()
    with torch.no_grad():
        before = first(tokens)
        second = transformers.load(model)
        assert [a is b for a, b in zip(first.sites, second.sites, strict=True)] == [True] * 4
        assert torch.equal(second(tokens), before)
        assert torch.equal(first(tokens), before)
        with first.cap(full=3):
            capped = first(tokens)
            with second.cap(window=2):
                pass
            assert torch.equal(first(tokens), capped)
            assert torch.equal(second(tokens), capped)
    assert transformers.load(first).sites == first.sites


def test_a_copy_has_its_own_switches() -> None:
    _, loaded = pair("llama")
    tokens = tokens_of()
    with torch.no_grad():
        plain = loaded(tokens)
        with loaded.cap(full=3), loaded.record(resid="last") as rec:
            clone = copy.deepcopy(loaded)
            assert torch.equal(clone(tokens), plain)
            with pytest.raises(ValueError, match="no forward pass"):
                rec.resid(0)
        with clone.cap(full=3), clone.record(resid="last") as rec:
            capped = clone(tokens)
            assert torch.equal(loaded(tokens), plain)
        assert rec.resid(0).shape == (2, 1, 32)
        assert gap(capped, plain) > 1e-2


# Folders


def test_a_folder_round_trip(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models

    model, _ = pair("llama")
    model.save_pretrained(tmp_path)
    words = {f"w{n}": n for n in range(V)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w3"))
    assert checkpoint.load(tmp_path).tokenizer is None
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w3").save_pretrained(tmp_path)
    loaded = checkpoint.load(str(tmp_path), dtype="float64", context=40)
    assert loaded.tokenizer("w7")["input_ids"] == [7]
    with torch.no_grad():
        assert gap(loaded(tokens_of()).float(), model(tokens_of()).logits) <= CLOSE
    with pytest.raises(ValueError, match="longer than the model's context of 40"):
        loaded(tokens_of(1, 41))


def _nothing(folder: Path) -> None:
    (folder / "config.json").unlink()


def _not_json(folder: Path) -> None:
    (folder / "config.json").write_text("{")


def _type(kind: str | None) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "model_type": kind}))

    return spoil


def _truncated(folder: Path) -> None:
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])


def _no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def _missing_shard(folder: Path) -> None:
    index = {"metadata": {}, "weight_map": {"lm_head.weight": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _layers(n: int) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": n, "layer_types": None}))

    return spoil


def _wider(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "intermediate_size": 48}))


@pytest.mark.parametrize(
    ("spoil", "error", "message"),
    [
        (_nothing, FileNotFoundError, "config.json: missing"),
        (_not_json, ValueError, "config.json: not valid JSON"),
        (_type("lamma"), ValueError, "model_type 'lamma' is unknown"),
        (_type(None), ValueError, "has no model_type"),
        (_type("vit"), ValueError, "model_type 'vit' is not a causal language model"),
        (_truncated, ValueError, "model.safetensors: truncated"),
        (_no_weights, FileNotFoundError, "model.safetensors: missing"),
        (_missing_shard, FileNotFoundError, "model-00002-of-00002.safetensors: missing"),
        (_layers(5), ValueError, "lacks tensor 'model.layers.4"),
        (_layers(3), ValueError, r"has 'model\.layers\.3.*but its config has 3 layers"),
        (_wider, ValueError, "mlp|size mismatch|mismatch"),
    ],
)
def test_a_broken_folder_says_what_is_wrong(
    tmp_path: Path, spoil: Callable[[Path], None], error: type[Exception], message: str
) -> None:
    pair("llama")[0].save_pretrained(tmp_path)
    spoil(tmp_path)
    with pytest.raises(error, match=message) as caught:
        transformers.load(tmp_path)
    assert "\n" not in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_other_bad_input(tmp_path: Path) -> None:
    model, loaded = pair("llama")
    for source in (tmp_path / "nowhere", "/no/such/folder", "./nowhere", "a/b/c"):
        with pytest.raises(FileNotFoundError, match="no such folder"):
            transformers.load(source)
    with pytest.raises(OSError, match="somebody/something: no such folder, and not to be had from the hub") as caught:
        transformers.load("somebody/something")
    assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="revisoin: unknown option"):
        transformers.load(model, revisoin="main")
    with pytest.raises(ValueError, match="only for models loaded from disk"):
        transformers.load(model, dtype="float32")
    with pytest.raises(ValueError, match="no decoder under a language-model head"):
        transformers.load(model.model)
    spoiled = build("llama")
    spoiled.model.layers[2].mlp.up_proj.weight[3, 4] = float("nan")
    with pytest.raises(ValueError, match=r"model\.layers\.2\.mlp\.up_proj\.weight holds NaN"):
        transformers.load(spoiled)
    with pytest.raises(ValueError, match="129 are longer than the model's context of 128"):
        loaded(tokens_of(1, 129))
    with pytest.raises(ValueError, match="longer than the model's context"):
        loaded.generate(tokens_of(1, 120), 10)
    with pytest.raises(ValueError, match=r"ids 3\.\.64 outside the vocabulary"):
        loaded(torch.tensor([[3, V]]))
    with pytest.raises(ValueError, match="attention_mask: shape"):
        loaded(tokens_of(), attention_mask=torch.ones(2, 3))
    with pytest.raises(ValueError, match=r"attention_mask: has -5; expected 1 \(real\) or 0"):
        loaded(tokens_of(1, 3), attention_mask=torch.tensor([[0, 1, -5]]))
    with pytest.raises(ValueError, match="this model has no 'window' sites"), loaded.cap(window=3):
        pass
    dropping = build("llama", attention_dropout=0.1).train()
    with pytest.raises(ValueError, match=r"attention dropout 0\.1 is on"):
        transformers.load(dropping)(tokens_of())


def test_attention_that_bypasses_the_interface_is_refused() -> None:
    config = CONFIG_MAPPING["bloom"](vocab_size=V, hidden_size=32, n_layer=2, n_head=4)
    with pytest.raises(ValueError, match="BloomForCausalLM: its attention bypasses"):
        transformers.load(AutoModelForCausalLM.from_config(config))


class _RunningMean(nn.Module):
    """A mixer that nobody has seen: neither attention nor a recurrence by any name known here."""

    def forward(self, hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
        return hidden_states.cumsum(1) / torch.arange(1, hidden_states.shape[1] + 1)[:, None], None


class _OwnRecurrence(_RunningMean):
    """One with the parameters of a state, whose recurrence is inside its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.A_log = nn.Parameter(torch.zeros(4))


def test_a_model_that_nobody_has_seen_gets_what_can_be_had() -> None:
    """Logits, residual stream, attention; and a message for the layers whose inside is out of reach."""
    model = build("llama")
    model.model.layers[1].self_attn = _RunningMean()
    model.model.layers[2].self_attn = _OwnRecurrence()
    tokens = tokens_of()
    with torch.no_grad():
        own = model(tokens, use_cache=False).logits
    with pytest.warns(UserWarning, match=r"layer 1 \(LlamaDecoderLayer\) mixes tokens in a way"):
        loaded = transformers.load(model)
    assert [(s.layer, s.kind, s.mixer, s.opaque) for s in loaded.sites] == [
        (0, "full", "full", False),
        (1, "unknown", "unknown", True),
        (2, "recurrent", "unknown", True),
        (3, "full", "full", False),
    ]
    assert loaded.reach() is None
    with torch.no_grad():
        with loaded.record(resid="last", stats=True) as rec:
            assert gap(loaded(tokens), own) <= CLOSE
        assert rec.resid(1, "post").shape == rec.resid(2, "pre").shape == (2, 1, 32)
        assert rec.stats(3).entropy.shape == (2, T, 4)
        with loaded.cap(full=3):
            assert gap(loaded(tokens), own) > 1e-3
    for layer in (1, 2):
        with pytest.raises(ValueError, match="whose inside is not reached"), loaded.cap({layer: 3}):
            pass
        with pytest.raises(ValueError, match="whose inside is not reached"), loaded.ablate([(layer, 0)]):
            pass
    with pytest.raises(ValueError, match="whose inside is not reached"), loaded.record(stats=Stats(recurrent=True)):
        pass


def test_an_op_that_is_bypassed_is_an_error_and_not_a_silent_no(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mixer whose training path fuses convolution and scan calls no op that could be capped."""
    from families import pair as family_pair

    model, loaded = family_pair("bamba")
    mixer = type(model.model.layers[0].mamba)
    monkeypatch.setattr(mixer, "forward", lambda self, hidden_states, **_: hidden_states)
    loaded(tokens_of())
    with pytest.raises(ValueError, match=r"layers\.0\.mamba: its op was bypassed"), loaded.cap(recurrent=6):
        loaded(tokens_of())


def test_ops_are_as_they_were_outside_and_after_an_error() -> None:
    from families import pair as family_pair

    model, loaded = family_pair("qwen3_next")
    names = sys.modules[type(model).__module__].__dict__
    before = names["torch_chunk_gated_delta_rule"]
    with loaded.cap(recurrent=6):
        assert names["torch_chunk_gated_delta_rule"] is not before
        copied = copy.deepcopy(loaded)
        assert torch.equal(copied(tokens_of()), model(tokens_of()).logits) is False  # the copy's switches are off
    assert names["torch_chunk_gated_delta_rule"] is before
    with pytest.raises(ZeroDivisionError), loaded.cap(recurrent=6):
        raise ZeroDivisionError
    assert names["torch_chunk_gated_delta_rule"] is before
    assert not any(m._forward_pre_hooks for m in model.modules() if type(m).__name__.endswith("GatedDeltaNet"))


def test_flash_linear_attention_is_hidden_while_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setitem(sys.modules, "fla", types.ModuleType("fla"))
    with without_fla(), pytest.raises(ImportError):
        import fla  # noqa: F401
    assert isinstance(sys.modules["fla"], types.ModuleType)
    monkeypatch.delitem(sys.modules, "fla")
    with without_fla():
        assert sys.modules["fla"] is None
    assert "fla" not in sys.modules
