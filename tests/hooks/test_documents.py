"""Packed documents: each is what it is alone, to every mixer, switch and recorder."""

from __future__ import annotations

import contextlib

import pytest
import torch
from helpers import VOCAB, assert_close, model_of, tokens_of
from hybrid import HYBRID, MIXERS

from hybridscope.hooks.passes import Cache

T = 26


@pytest.mark.parametrize("w", [None, 4, 6])
@pytest.mark.parametrize("mixer", [*MIXERS, "swa:4|gdn", "full+mamba2"])
def test_packed_documents_never_see_each_other(mixer: str, w: int | None) -> None:
    """Each is what it is alone, caps, sinks, states, convolutions and token shifts included; padding stands between."""
    model = model_of(mixer, "full", n_kv_heads=2)
    rows = [tokens_of(1, n, seed=n) for n in (9, 1, 7, 12, 5)]
    tokens, mask = tokens_of(2, 21, seed=3), torch.zeros(2, 21, dtype=torch.int64)
    ids = torch.zeros(2, 21, dtype=torch.int64)
    places = [(0, [0, 1, 2, 3, 5, 6, 7, 8, 9]), (0, [10]), (0, list(range(13, 20))), (1, list(range(12)))]
    places.append((1, list(range(14, 19))))
    for number, ((sample, at), row) in enumerate(zip(places, rows, strict=True)):
        tokens[sample, at], mask[sample, at], ids[sample, at] = row[0], 1, number % 2
    caps = {} if w is None else {site.kind: w for site in model.sites}
    with model.cap(**caps) if caps else contextlib.nullcontext():
        out = model(tokens, mask, documents=ids)
        for (sample, at), row in zip(places, rows, strict=True):
            assert_close(out[sample, at], model(row)[0], "model")
        other = tokens.clone()
        other[0, 7] = (other[0, 7] + 1) % VOCAB
        changed = (model(other, mask, documents=ids) != out).any(-1)
    assert changed[0, 7]
    assert not changed[1].any()
    assert not changed[0, 10:].any()


def test_one_document_is_the_plain_pass() -> None:
    model, tokens = model_of(*HYBRID), tokens_of(2, T)
    assert torch.equal(model(tokens, documents=torch.ones_like(tokens)), model(tokens))


def test_documents_are_samples_for_recorders() -> None:
    model, tokens = model_of(*HYBRID), tokens_of(1, 10)
    ids = torch.tensor([[0] * 6 + [1] * 4])
    with model.record(stats=True, resid="last") as rec:
        model(tokens, documents=ids)
    with model.record(stats=True, resid="last") as alone:
        model(tokens[:, 6:])
    assert_close(rec.stats(3).entropy[1:, :4], alone.stats(3).entropy, "model")
    assert_close(rec.resid(3)[1], alone.resid(3)[0], "model")


def test_mistakes_about_documents_are_named() -> None:
    model, tokens = model_of(*HYBRID), tokens_of(1, 8)
    with pytest.raises(ValueError, match="documents are for whole passes"):
        model(tokens, cache=Cache(), documents=torch.zeros_like(tokens))
    with pytest.raises(ValueError, match=r"documents: torch.int64 of shape \(1, 7\)"):
        model(tokens, documents=torch.zeros(1, 7, dtype=torch.int64))
    with pytest.raises(ValueError, match="documents: torch\\.float32"):
        model(tokens, documents=torch.zeros(1, 8))
    with pytest.raises(ValueError, match="attention_mask: shape"):
        model(tokens, torch.ones(1, 7), documents=torch.zeros_like(tokens))
    with pytest.raises(ValueError, match="outside the vocabulary"):
        model(tokens + VOCAB, documents=torch.zeros_like(tokens))
