"""Every hybrid family decodes and packs documents as its own code does: with caches, beams, caps and padding."""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from families import CAP, CLOSE, EVERY, RECURRENT, SOFTMAX, T, caps_of, gap, left_padding, pair, tokens_of

from hybridscope.hooks.adapters.interface import Attachment

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning:transformers"),
    pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning"),
]

RUNS_ON = [*RECURRENT, "lfm2", "zaya", "gpt_oss"]  # over the border of packed documents, in transformers' own code


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def takes_positions(model: Any) -> bool:
    return "position_ids" in inspect.signature(type(model).forward).parameters


@pytest.mark.parametrize("family", EVERY)
def test_cached_decoding_equals_one_pass(family: str) -> None:
    """Prefill and single tokens; with caps, under padding, and the logits, not only the token they pick."""
    _, loaded = pair(family)
    tokens = tokens_of()
    caps: list[dict[str, int]] = [{}, caps_of(loaded)]
    for cap in caps:
        with loaded.cap(**cap) if cap else contextlib.nullcontext():
            whole = loaded(tokens)
            cache = loaded.new_cache()
            parts = [loaded(part, cache=cache) for part in tokens.split([T - 4, 1, 1, 2], 1)]
        multi = "mamba" in {s.mixer for s in loaded.sites}  # its scan starts from nothing at several tokens
        parts = parts[:-1] if multi else parts
        got = torch.cat(parts, 1)
        assert gap(got, whole[:, : got.shape[1]]) <= CLOSE


@pytest.mark.parametrize("family", EVERY)
def test_generate_under_caps_and_padding(family: str) -> None:
    _, loaded = pair(family)
    prompt, mask = tokens_of(), left_padding()
    with loaded.cap(**caps_of(loaded)):
        out = loaded.generate(prompt, 5, attention_mask=mask)
        for row, start in ((0, 5), (1, 0)):
            if row == 0 and family in ("recurrent_gemma", "hunyuan_v1_dense"):
                continue  # convolutions that run over padding; a norm behind RoPE, so that columns matter
            context = prompt[row : row + 1, start:]
            for _ in range(5):
                context = torch.cat([context, loaded(context)[:, -1:].argmax(-1)], 1)
            assert torch.equal(out[row, T:], context[0, -5:])


@pytest.mark.parametrize("implementation", ["dynamic", "static"])
@pytest.mark.parametrize("family", EVERY)
def test_their_own_generate_runs_on_our_attention(family: str, implementation: str) -> None:
    """With caches of transformers' choosing, the logits of each step too."""
    model, _ = pair(family)
    prompt = tokens_of()
    options: dict[str, Any] = {
        "max_new_tokens": 5, "do_sample": False, "eos_token_id": None, "pad_token_id": 0, "output_logits": True,
        "return_dict_in_generate": True, **({} if implementation == "dynamic" else {"cache_implementation": "static"}),
    }  # fmt: skip
    own = model.generate(prompt, **options)
    with Attachment.of(model).on():
        ours = model.generate(prompt, **options)
    for a, b in zip(own.logits, ours.logits, strict=True):
        assert gap(b, a) <= CLOSE


@pytest.mark.parametrize("family", ["qwen3_next", "kimi_linear", "minimax", "jamba", "bamba", "falcon_h1", "zamba2"])
def test_beams_take_what_a_cap_keeps_along(family: str) -> None:
    """Beam search with a cache is beam search without one."""
    model, loaded = pair(family)
    prompt = tokens_of()
    options: dict[str, Any] = {
        "attention_mask": torch.ones_like(prompt), "max_new_tokens": 6, "num_beams": 2, "do_sample": False,
        "eos_token_id": None, "pad_token_id": 0,
    }  # fmt: skip
    with loaded.cap(recurrent=CAP):
        cached, whole = (model.generate(prompt, **options, use_cache=use) for use in (True, False))
    assert torch.equal(cached, whole)


def test_beams_over_states_that_are_not_in_the_cache_are_refused() -> None:
    """RecurrentGemma's convolutions keep theirs in the module, and transformers leaves them in the old order."""
    model, loaded = pair("recurrent_gemma")
    options: dict[str, Any] = {"max_new_tokens": 3, "num_beams": 2, "do_sample": False, "pad_token_id": 0}
    with loaded.cap(recurrent=CAP):
        with pytest.raises(ValueError, match="temporal_block keeps a part of its state outside of the cache"):
            model.generate(tokens_of(), **options)
        model.generate(tokens_of(), **options, use_cache=False)


def test_a_copied_cache_goes_on_by_itself() -> None:
    """And is reordered by itself."""
    _, loaded = pair("qwen3_next")
    tokens = tokens_of()
    with loaded.cap(recurrent=CAP):
        cache = loaded.new_cache()
        loaded(tokens[:, :-2], cache=cache)
        expected = loaded(tokens)[:, -2:]
        other = copy.deepcopy(cache)
        other.past.reorder_cache(torch.tensor([1, 0]))
        assert gap(loaded(tokens.flip(0)[:, -2:], cache=other), expected.flip(0)) <= CLOSE
        assert gap(loaded(tokens[:, -2:], cache=cache), expected) <= CLOSE


def test_a_cap_cannot_change_in_the_middle_of_a_context() -> None:
    for family in ("qwen3_next", "bamba", "minimax"):
        _, loaded = pair(family)
        cache = loaded.new_cache()
        with loaded.cap(recurrent=CAP):
            loaded(tokens_of(), cache=cache)
        for cap in (None, CAP + 1):
            with pytest.raises(ValueError, match="cannot change in the middle"), loaded.cap(recurrent=cap):
                loaded(tokens_of(2, 1), cache=cache)


@pytest.mark.parametrize("family", [f for f in SOFTMAX if f not in RUNS_ON])
def test_packed_documents_do_not_see_each_other(family: str) -> None:
    """As position ids that start again say it, with recorded statistics too."""
    model, loaded = pair(family)
    tokens = tokens_of(1)
    positions = torch.cat([torch.arange(10), torch.arange(T - 10)])[None]
    own = model(tokens, position_ids=positions, use_cache=False).logits
    with loaded.record(stats=True) as rec:
        ours = model(tokens, position_ids=positions, use_cache=False).logits
    assert gap(ours, own) <= CLOSE
    assert int(rec.stats(3).visible[0, -1, 0]) <= T - 10 + 1  # (and a sink)


@pytest.mark.parametrize("family", RUNS_ON)
def test_packed_documents_run_as_the_model_itself_runs_them(family: str) -> None:
    """States and convolutions run on across documents in transformers' own code; so they do here."""
    model, _ = pair(family)
    if not takes_positions(model):
        pytest.skip("has no positions")
    tokens = tokens_of(1)
    positions = torch.cat([torch.arange(10), torch.arange(T - 10)])[None]
    own = model(tokens, position_ids=positions, use_cache=False).logits
    with Attachment.of(model).on():
        assert gap(model(tokens, position_ids=positions, use_cache=False).logits, own) <= CLOSE
