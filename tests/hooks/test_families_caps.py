"""Caps of recurrent sites in every family that has them: what a cap leaves alone, and a refusal of another cap."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest
import torch
from families import CAP, CLOSE, FAMILIES, RECURRENT, T, build, gap, left_padding, pair, tokens_of
from torch import Tensor

from hybridscope.hooks.adapters import transformers
from hybridscope.hooks.adapters.transformers import TransformersLM

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning:transformers"),
    pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning"),
]

PROMPT = 10  # tokens of T, before decoding
COUNTS_PADDING = ("recurrent_gemma",)  # whose mixers are not told of it


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@functools.cache
def loaded_in(family: str, dtype: torch.dtype) -> TransformersLM:
    return pair(family)[1] if dtype == torch.float32 else transformers.load(build(family).to(dtype))


def continued(loaded: TransformersLM, cache: transformers.DecodeCache, tokens: Tensor, mask: Tensor) -> Tensor:
    return torch.cat([loaded(tokens[:, t : t + 1], mask[:, t : t + 1], cache=cache) for t in range(PROMPT, T)], 1)


def rows_before(cap: int, mask: Tensor) -> Tensor:
    """The rows [B,T] that see fewer than `cap` tokens before them; padding is none of them."""
    return (mask.cumsum(1) <= cap) & mask.bool()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", RECURRENT)
def test_what_a_cap_leaves_alone_is_the_uncapped_pass_to_the_last_bit(family: str, dtype: torch.dtype) -> None:
    """All of it under a cap of the context's length, else its first rows; with a cache and without, under padding."""
    loaded, tokens = loaded_in(family, dtype), tokens_of()
    for mask in (torch.ones_like(tokens), left_padding()):
        free = loaded(tokens, mask)
        early = rows_before(CAP, torch.ones_like(mask) if family in COUNTS_PADDING else mask)
        for cached in (False, True):
            with loaded.cap(recurrent=T):
                assert torch.equal(loaded(tokens, mask, cache=loaded.new_cache() if cached else None), free)
            with loaded.cap(recurrent=CAP):
                got = loaded(tokens, mask, cache=loaded.new_cache() if cached else None)
            assert torch.equal(got[early], free[early])
            assert not torch.equal(got[~early], free[~early])


@pytest.mark.parametrize("family", RECURRENT)
def test_a_prompt_within_its_cap_continues_as_the_whole_pass(family: str) -> None:
    """Token by token, past the cap, one sample with padding before it."""
    loaded, tokens, mask = pair(family)[1], tokens_of(), left_padding()
    with loaded.cap(recurrent=16):
        whole = loaded(tokens, mask)
        cache = loaded.new_cache()
        prompt = loaded(tokens[:, :PROMPT], mask[:, :PROMPT], cache=cache)
        assert gap(torch.cat([prompt, continued(loaded, cache, tokens, mask)], 1), whole, mask) <= CLOSE


# Another cap in the middle of a context


@pytest.mark.parametrize("family", [f for f in RECURRENT if f != "recurrent_gemma"])  # which returns no cache
def test_a_refused_cap_leaves_the_cache_as_it_was(family: str) -> None:
    """On the last recurrent site, behind layers that would have added to the cache; by our call and by the model's."""
    model, loaded = pair(family)
    tokens, mask = tokens_of(), left_padding()
    last = [site for site in loaded.sites if site.kind == "recurrent"][-1]
    for begun in (None, CAP):
        outs = []
        for refused in (False, True):
            with loaded.cap({(last.layer, last.index): begun}):
                cache = loaded.new_cache()
                loaded(tokens[:, :PROMPT], mask[:, :PROMPT], cache=cache)
                with loaded.cap({(last.layer, last.index): CAP + 1}):
                    if refused:
                        with pytest.raises(ValueError, match="cannot change in the middle"):
                            loaded.hidden(tokens[:, PROMPT:], mask[:, PROMPT:], cache=cache)
                        with pytest.raises(ValueError, match="cannot change in the middle"):
                            model(tokens[:, PROMPT:], **{loaded._cache_name: cache.past}, use_cache=True)
                outs.append(continued(loaded, cache, tokens, mask))
        assert torch.equal(*outs), begun


def test_a_cache_that_starts_again_takes_another_cap() -> None:
    """A reset cache, as static ones are used, holds no context."""
    model, loaded = pair("qwen3_next")
    tokens = tokens_of()
    with loaded.cap(recurrent=CAP):
        past = model(tokens, use_cache=True).past_key_values
    past.reset()
    with loaded.cap(recurrent=CAP + 1):
        assert gap(model(tokens, past_key_values=past, use_cache=True).logits, loaded(tokens)) <= CLOSE


def test_a_single_mixer_behind_attention_starts_afresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """The attention before it has begun the cache by then; the context has not been begun under another cap."""
    options, mixers = FAMILIES["qwen3_next"]
    layers = {"layer_types": ["full_attention", "linear_attention"], "num_hidden_layers": 2}
    monkeypatch.setitem(FAMILIES, "qwen3_next", ({**options, **layers}, mixers))
    model = build("qwen3_next")
    loaded, tokens = transformers.load(model), tokens_of()
    with loaded.cap(recurrent=CAP):
        whole = loaded(tokens)
        cache = loaded.new_cache()
        split = torch.cat([loaded(part, cache=cache) for part in tokens.split(PROMPT, 1)], 1)
        assert gap(split, whole) <= CLOSE
        out = model.generate(tokens, max_new_tokens=3, do_sample=False, eos_token_id=None)
        assert torch.equal(out, loaded.generate(tokens, 3))
