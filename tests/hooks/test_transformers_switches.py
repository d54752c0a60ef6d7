"""Caps, knockouts and ablations of transformers models do what a dense mask would, in one pass and while decoding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import Largest
from softmax_families import CLOSE, T, V, build, gap, padding, pair, tokens_of
from torch import Tensor, nn

from hybridscope.hooks.adapters import transformers

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning:transformers")

# One family of each kind of mask, score and head layout, for the tests of switches.
KINDS = ["llama", "smollm3", "gemma2", "gemma3_text", "cohere2", "gpt_oss", "llama4_text", "minicpm3"]
MAPPED = (
    "gemma2",
    "gemma3_text",
    "olmo3",
    "cohere2",
    "gpt_oss",
    "llama4_text",
)  # take one mask per layer type


def dense(
    family: str, model: Any, tokens: Tensor, full: int | None = None, window: int | None = None,
    sinks: int = 0, real: Tensor | None = None, hidden: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The model's own eager logits under dense masks: caps by kind, sinks, padding, and hidden edges
    [T,T]."""
    at = torch.arange(tokens.shape[1])
    back = at[:, None] - at[None, :]
    real = torch.ones_like(tokens) if real is None else real
    left = (real.cumsum(1) == 0).sum(1)
    first = (at[None] - left[:, None])[:, None, :]  # [B,1,T]: distance from the first real token

    def additive(seen: Tensor) -> Tensor:
        seen = (seen & real.bool()[:, None, :])[:, None]
        return torch.where(seen, 0.0, torch.finfo(torch.float32).min)

    def mask(native: Tensor, cap: int | None) -> Tensor:
        seen = native.expand(len(tokens), -1, -1)
        if cap is not None:
            seen = seen & ((back < cap) | (first < sinks))
        return additive(seen if hidden is None else seen & ~hidden)

    causal = (back >= 0)[None]
    if family == "llama4_text":
        chunk = first // 8
        windowed = causal & (chunk == chunk.transpose(1, 2))
    else:
        windowed = causal & (back < 8)
    if family not in MAPPED:
        is_windowed = pair(family)[1].sites[0].kind == "window"
        masks: Any = mask(windowed, window) if is_windowed else mask(causal, full)
    else:
        name = "chunked_attention" if family == "llama4_text" else "sliding_attention"
        masks = {"full_attention": mask(causal, full), name: mask(windowed, window)}
    with torch.no_grad():
        return model(tokens, attention_mask=masks, use_cache=False).logits


def kinds_of(model: transformers.TransformersLM, **caps: int) -> dict[str, int]:
    present = {site.kind for site in model.sites}
    return {kind: cap for kind, cap in caps.items() if kind in present}


@pytest.mark.parametrize("side", [None, "left"])
@pytest.mark.parametrize("family", [*KINDS, "mistral", "olmo3"])
def test_a_cap_equals_a_dense_mask(family: str, side: str | None) -> None:
    model, loaded = pair(family)
    tokens, mask = tokens_of(), padding(side)
    for caps, sinks in (
        ({"full": 5}, 0),
        ({"window": 3}, 0),
        ({"full": 5, "window": 3}, 2),
        ({"full": 1}, 0),
    ):
        chosen = kinds_of(loaded, **caps)
        if not chosen:
            continue
        with torch.no_grad():
            plain = loaded(tokens, attention_mask=mask)
            with loaded.cap(**chosen, sinks=sinks):
                capped = loaded(tokens, attention_mask=mask)
            own = dense(family, model, tokens, **caps, sinks=sinks, real=mask)
        assert gap(capped, own, mask) <= CLOSE
        assert gap(capped, plain, mask) > 1e-2
        assert torch.equal(loaded(tokens, attention_mask=mask), plain)  # and it is off again


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gpt_oss", "cohere2"])
def test_nothing_beyond_the_cap_matters(family: str) -> None:
    """One layer: token t - w changes nothing at t, bitwise; token t - w + 1 does."""
    types_ = {"layer_types": ["full_attention"]} if family in MAPPED else {}
    loaded = transformers.load(build(family, num_hidden_layers=1, **types_))
    (site,) = loaded.sites
    w, tokens = 5, tokens_of(1)
    with torch.no_grad(), loaded.cap(**{site.kind: w}):
        before = loaded(tokens)
        for t in range(10, T):
            beyond, inside = tokens.clone(), tokens.clone()
            beyond[0, : t - w + 1] = 3 + (beyond[0, : t - w + 1] + 7) % (V - 3)
            inside[0, t - w + 1] = 3 + (inside[0, t - w + 1] + 7) % (V - 3)
            assert torch.equal(loaded(beyond)[0, t], before[0, t])
            assert not torch.equal(loaded(inside)[0, t], before[0, t])


@pytest.mark.parametrize("family", KINDS)
def test_a_cap_that_cannot_bind_changes_nothing(family: str) -> None:
    _, loaded = pair(family)
    for side in (None, "left"):
        mask = padding(side)
        with torch.no_grad():
            plain = loaded(tokens_of(), attention_mask=mask)
            with loaded.cap(**kinds_of(loaded, full=T, window=T), sinks=2):
                assert torch.equal(loaded(tokens_of(), attention_mask=mask), plain)


@pytest.mark.parametrize("family", KINDS)
def test_a_knockout_equals_a_dense_mask(family: str) -> None:
    model, loaded = pair(family)
    hidden = torch.zeros(T, T, dtype=torch.bool)
    hidden[20:22, 14:19] = True
    with torch.no_grad():
        with loaded.knockout(rows=[20, 21], keys=[14, 15, 16, 17, 18]):
            out = loaded(tokens_of())
        assert gap(out, dense(family, model, tokens_of(), hidden=hidden)) <= CLOSE
        assert gap(out, loaded(tokens_of())) > 1e-2


@pytest.mark.parametrize("family", KINDS)
def test_ablating_heads_is_zeroing_the_output_projections_input(family: str) -> None:
    model, loaded = pair(family)
    site = loaded.sites[1]
    projection: nn.Module = model.get_submodule(site.name).o_proj
    for heads in (range(4), [2]):
        wide = [h * site.value_dim + d for h in heads for d in range(site.value_dim)]

        def zero(_m: nn.Module, args: tuple[Tensor, ...], wide: list[int] = wide) -> tuple[Tensor, ...]:
            z = args[0].clone()
            z[..., wide] = 0
            return (z,)

        handle = projection.register_forward_pre_hook(zero)
        with torch.no_grad():
            own = model(tokens_of(), use_cache=False).logits
            handle.remove()
            with loaded.ablate([(1, h) for h in heads]):
                assert gap(loaded(tokens_of()), own) <= CLOSE
            assert gap(loaded(tokens_of()), own) > 1e-3


def test_mean_ablation_is_over_real_tokens() -> None:
    model, loaded = pair("llama")
    mask = padding("left")
    assert mask is not None
    captured: list[Tensor] = []

    def average(_m: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        z = args[0].clone()
        z[..., 8:16] = z[mask.bool()][:, 8:16].mean(0)
        captured.append(z)
        return (z,)

    handle = model.get_submodule(loaded.sites[1].name).o_proj.register_forward_pre_hook(average)
    with torch.no_grad():
        own = model(tokens_of(), attention_mask=mask, use_cache=False).logits
        handle.remove()
        with loaded.ablate([(1, 1)], how="mean"):
            assert gap(loaded(tokens_of(), attention_mask=mask), own, mask) <= CLOSE
    assert len(captured) == 1


@pytest.mark.parametrize("family", KINDS)
def test_generation_equals_the_models_own(family: str) -> None:
    model, loaded = pair(family)
    for side in (None, "left"):
        mask = padding(side)
        given = torch.ones(2, T, dtype=torch.int64) if mask is None else mask
        own = model.generate(tokens_of(), attention_mask=given, max_new_tokens=12, do_sample=False, eos_token_id=None)
        assert torch.equal(loaded.generate(tokens_of(), 12, attention_mask=mask), own)


@pytest.mark.parametrize("family", KINDS)
def test_caps_hold_while_decoding(family: str) -> None:
    """Token by token with a cache, through cached prefill in two parts: as one whole pass."""
    _, loaded = pair(family)
    with torch.no_grad(), loaded.cap(**kinds_of(loaded, full=5, window=3), sinks=1):
        out = loaded.generate(tokens_of(), 12)
        assert torch.equal(loaded(out[:, :-1]).argmax(-1)[:, T - 1 :], out[:, T:])
        whole, cache = loaded(out), loaded.new_cache()
        for start, stop in ((0, 10), (10, 17), (17, 18), (18, T + 12)):
            assert gap(loaded(out[:, start:stop], cache=cache), whole[:, start:stop]) <= CLOSE


def test_padding_may_stand_anywhere_when_generating() -> None:
    _, loaded = pair("gemma3_text")
    rows = tokens_of(1, 11)
    alone = loaded.generate(rows, 8)[:, 11:]
    mask = torch.zeros(1, 16, dtype=torch.int64)
    mask[0, [0, 1, 2, 4, 5, 6, 8, 9, 10, 11, 12]] = 1
    padded = torch.full((1, 16), 9)
    padded[mask.bool()] = rows[0]
    out = loaded.generate(padded, 8, attention_mask=mask)
    assert torch.equal(out[:, 16:], alone)
    assert torch.equal(out[:, :16], padded)
    with loaded.record(resid="last"), pytest.raises(ValueError, match="padding on the left"):
        loaded.generate(padded, 8, attention_mask=mask)


def test_columns_count_on_through_a_cache() -> None:
    for family, side in (("gemma3_text", None), ("llama4_text", "left")):
        _, loaded = pair(family)
        mask = padding(side)
        parts = [mask, mask] if mask is None else [mask[:, :10], mask[:, 10:]]
        with torch.no_grad():
            with loaded.record(resid=[12, 15, 23]) as whole:
                loaded(tokens_of(), attention_mask=mask)
            cache = loaded.new_cache()
            loaded(tokens_of()[:, :10], attention_mask=parts[0], cache=cache)
            with loaded.record(resid=[12, 15, 23]) as split:
                loaded(tokens_of()[:, 10:], attention_mask=parts[1], cache=cache)
        for where in ("pre", "mid", "post"):
            assert gap(split.resid(2, where), whole.resid(2, where)) <= 1e-4


def test_statistics_while_decoding_are_those_of_the_whole_pass() -> None:
    for family in ("gemma3_text", "gpt_oss", "llama4_text"):
        _, loaded = pair(family)
        with torch.no_grad():
            with loaded.record(stats=True) as steps:
                out = loaded.generate(tokens_of(), 6)
            with loaded.record(stats=True) as whole:
                loaded(out[:, :-1])
        for layer in range(4):
            assert steps.rows(layer).tolist() == whole.rows(layer).tolist()
            assert gap(steps.stats(layer).entropy, whole.stats(layer).entropy) <= CLOSE
            assert torch.equal(steps.stats(layer).top1, whole.stats(layer).top1)


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3_text", "gpt_oss", "llama4_text"])
def test_static_caches_and_packed_documents(family: str) -> None:
    """A switch that is on puts our attention under whatever runs the model: here its own generate and
    forward."""
    model, loaded = pair(family)
    far = kinds_of(loaded, full=1000, window=1000)
    options: dict[str, Any] = {
        "attention_mask": padding("left"), "max_new_tokens": 10, "do_sample": False, "eos_token_id": None,
        "cache_implementation": "static", "disable_compile": True, "output_logits": True,
        "return_dict_in_generate": True,
    }  # fmt: skip
    positions = torch.cat([torch.arange(n) for n in (7, 10, 7)])[None].expand(2, -1)
    with torch.no_grad():
        own = model.generate(tokens_of(), **options)
        packed = model(tokens_of(), position_ids=positions, use_cache=False).logits
        with loaded.cap(**far):
            ours = model.generate(tokens_of(), **options)
            assert gap(torch.stack(ours.logits), torch.stack(own.logits)) <= CLOSE
            again = model(tokens_of(), position_ids=positions, use_cache=False).logits
    assert gap(again, packed) <= CLOSE
    assert gap(packed, model(tokens_of(), use_cache=False).logits) > 1e-2


def test_no_quadratic_tensor_anywhere() -> None:
    """1,024 tokens: nothing of a fraction of T x T, under any mask, score or switch."""
    long = 1024
    tokens = tokens_of(1, long)
    for family in ("llama", "gemma2", "gpt_oss", "llama4_text", "minicpm3"):
        small = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1, "num_key_value_heads": 1}
        loaded = transformers.load(build(family, **small, max_position_embeddings=long))
        mask = torch.ones_like(tokens)
        mask[0, :5] = 0
        for given in (None, mask):
            with torch.no_grad(), Largest() as largest, loaded.cap(full=64):
                loaded.hidden(tokens, attention_mask=given)
            with torch.no_grad(), Largest() as uncapped:
                loaded.hidden(tokens, attention_mask=given)
            assert max(largest.elements, uncapped.elements) <= long * long / 2
