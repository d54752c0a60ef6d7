"""NaN activations: every measurement says so, and in which layer they begin."""

from __future__ import annotations

import math

import pytest
import torch
from planted import LANGUAGE, needles, planted

import hybridscope as hs
from hybridscope.probes.capsweep import cap_sweep
from hybridscope.probes.finite import finite_hidden, finite_loss
from hybridscope.probes.tracking import track_step

NEEDLES = needles(6)


@pytest.fixture(params=[0, 1, 2])
def broken(request) -> tuple[hs.HybridLM, int]:
    model = planted()
    model.layers[request.param].attn.v_proj.weight[0, 0] = math.nan
    return model, request.param


MEASURES = {
    "accuracy": lambda m: hs.needle_accuracy(m, NEEDLES),
    "copy": lambda m: hs.retrieval_heads(m, NEEDLES),
    "mass": lambda m: hs.retrieval_heads(m, NEEDLES, "mass", only_answered=False),
    "qr": lambda m: hs.retrieval_heads(m, NEEDLES, "qr", only_answered=False),
    "track": lambda m: track_step(m, NEEDLES, [(1, 0)]),
    "probe": lambda m: hs.probe_layers(m, hs.make_needles(60, 48, values=4, language=LANGUAGE), seeds=1),
    "caps": lambda m: cap_sweep(m, texts=NEEDLES.tokens, kinds=["full"], windows=[4]),
    "influence": lambda m: hs.gradient_influence(m, NEEDLES.tokens),
    "perplexity": lambda m: hs.perplexity(m, NEEDLES.tokens),
    "gain": lambda m: hs.long_context_gain(m, NEEDLES.tokens, context=8),
    "longppl": lambda m: hs.long_perplexity(m, NEEDLES.tokens, m, name="itself", context=8),
    "lens": lambda m: hs.logit_lens(m, NEEDLES.tokens, [-1]),
    "patching": lambda m: hs.patch_heads(m, NEEDLES),
}


@pytest.mark.parametrize("measure", MEASURES.values(), ids=MEASURES)
def test_the_first_layer_is_named(broken, measure):
    model, layer = broken
    with pytest.raises(ValueError, match=f"layer {layer}.*NaN"):
        measure(model)
    assert not any(site.active for site in model.sites)


def test_padding_may_hold_anything_and_real_tokens_may_not():
    model, tokens = planted(), NEEDLES.tokens[:2]
    mask = torch.ones_like(tokens)
    mask[1, :5] = 0
    padding = ~mask.bool()[..., None]
    model.ln_final.register_forward_hook(lambda module, inputs, out: out.masked_fill(padding[-len(out) :], math.nan))
    assert finite_hidden(model, tokens, mask)[mask.bool()].isfinite().all()
    with pytest.raises(ValueError, match="NaN or infinite after the last layer"):
        finite_hidden(model, tokens)


def test_logits_alone_may_be_at_fault():
    model = planted()
    model.unembed.weight[:] = math.inf
    with pytest.raises(ValueError, match="logits"):
        finite_loss(model, NEEDLES.tokens)
