"""Statistics of transformers models under packed documents and every kind of cache: those of each text by itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from softmax_families import CLOSE, T, gap, padding, pair, tokens_of

import hybridscope as hs

LENGTHS = (7, 10, 7)


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3_text", "llama4_text", "minicpm3"])
def test_packed_documents_are_each_as_if_alone(family: str) -> None:
    model, loaded = pair(family)
    tokens = tokens_of()
    positions = torch.cat([torch.arange(n) for n in LENGTHS])[None].expand(2, -1)
    labels = torch.zeros(2, T, 2, dtype=torch.bool)
    labels[:, 2, 0] = labels[:, 9, 1] = True
    with torch.no_grad(), loaded.record(stats=hs.Stats(labels=labels, histogram=True)) as packed:
        model(tokens, position_ids=positions, use_cache=False)
    start = 0
    for n in LENGTHS:
        part = slice(start, start + n)
        with torch.no_grad(), loaded.record(stats=hs.Stats(labels=labels[:, part], histogram=True)) as alone:
            model(tokens[:, part], use_cache=False)
        for layer in range(4):
            got, expected = packed.stats(layer), alone.stats(layer)
            for name in ("entropy", "lse", "mass", "top1_prob", "distance"):
                assert gap(getattr(got, name)[:, part], getattr(expected, name)) <= CLOSE, (layer, name)
            assert torch.equal(got.visible[:, part], expected.visible)
            assert torch.equal(got.top1[:, part], expected.top1 + start)
            bins = expected.histogram.shape[-1]
            assert gap(got.histogram[:, part, :, :bins], expected.histogram) <= CLOSE
            assert (got.histogram[:, part, :, bins:] == 0).all()
        start += n


@pytest.mark.parametrize("side", [None, "left"])
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3_text", "gpt_oss", "llama4_text"])
def test_a_static_cache_holds_what_a_growing_one_does(family: str, side: str | None) -> None:
    """Its keys have places that nothing fills yet, and a window's cache turns round: neither is seen or counted."""
    model, loaded = pair(family)
    labels = torch.zeros(2, T, dtype=torch.bool)
    labels[:, 20] = True
    options: dict[str, Any] = {"max_new_tokens": 10, "do_sample": False, "eos_token_id": None, "disable_compile": True}
    recordings = []
    for kind in ("dynamic", "static"):
        with torch.no_grad(), loaded.record(stats=hs.Stats(labels=labels, histogram=True)) as rec:
            model.generate(tokens_of(), attention_mask=padding(side), cache_implementation=kind, **options)
        recordings.append(rec)
    growing, static = recordings
    real = torch.ones(2, T + 9, dtype=torch.bool)
    if side is not None:
        real[0, :5] = False
    for layer in range(4):
        a, b = growing.stats(layer), static.stats(layer)
        assert growing.rows(layer).tolist() == static.rows(layer).tolist() == [list(range(T + 9))]
        for name in ("entropy", "lse", "mass", "top1_prob", "distance", "sink_mass"):
            assert gap(getattr(a, name)[real], getattr(b, name)[real]) <= CLOSE, (layer, name)
        assert torch.equal(a.visible[real], b.visible[real])
        assert torch.equal(a.top1[real], b.top1[real])
        bins = min(a.histogram.shape[-1], b.histogram.shape[-1])
        assert gap(a.histogram[real][..., :bins], b.histogram[real][..., :bins]) <= CLOSE
