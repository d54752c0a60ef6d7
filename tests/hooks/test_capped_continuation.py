"""Many tokens that continue a capped context go through the ring together, and leave it as one by one would."""

from __future__ import annotations

import itertools
from unittest import mock

import pytest
import torch
from helpers import RECURRENT, assert_close, error, tokens_of
from hybrid import one
from torch import Tensor

from hybridscope.hooks.kernels.windowed import Ring
from hybridscope.hooks.mixers import recurrent
from hybridscope.hooks.passes import Cache, StateCache

B, T = 3, 40
CUTS = (0, 5, 7, 26, 27, T)  # a prompt shorter than most caps, two tokens, many, one, many


def padded() -> Tensor:
    """Samples without padding; with it in the middle of calls; and in front, all of the first call and more."""
    mask = torch.ones(B, T, dtype=torch.int64)
    mask[1, [2, 6, 9, 10, 25, 30, 39]] = 0
    mask[2, :9] = 0
    return mask


def in_parts(mixer: str, cap: int, mask: Tensor | None, few: int) -> tuple[Tensor, Tensor, list[Ring]]:
    """Logits of the whole pass and of the parts, and the ring that each part left."""
    model, tokens, cache = one(mixer), tokens_of(B, T), Cache()
    rings, parts = [], []
    with model.cap(recurrent=cap), mock.patch.object(recurrent, "FEW", few):
        whole = model(tokens, mask)
        for start, stop in itertools.pairwise(CUTS):
            part = None if mask is None else mask[:, start:stop]
            parts.append(model(tokens[:, start:stop], part, cache=cache))
            entry = cache.sites[model.sites[0].name]
            assert isinstance(entry, StateCache)
            assert entry.ring is not None
            ring = entry.ring
            rings.append(Ring(ring.cap, ring.conv, ring.keys.clone(), ring.values.clone(), ring.seen.clone()))
    return whole, torch.cat(parts, 1), rings


@pytest.mark.parametrize("cap", [4, 9, 30, 64])
@pytest.mark.parametrize("mixer", RECURRENT)
def test_together_is_one_by_one(mixer: str, cap: int) -> None:
    """In outputs, kept keys and values; unpadded and with samples of different lengths."""
    for mask in (None, padded()):
        whole, one_by_one, rings = in_parts(mixer, cap, mask, 10**6)
        _, together, others = in_parts(mixer, cap, mask, -(10**6))
        real = slice(None) if mask is None else mask.bool()
        assert_close(together[real], whole[real], "model")
        assert_close(together[real], one_by_one[real], "model")
        for ring, other in zip(rings, others, strict=True):
            assert error(other.keys, ring.keys) < 1e-12
            assert error(other.values, ring.values) < 1e-12
            assert torch.equal(other.seen, ring.seen)


@pytest.mark.parametrize("mixer", RECURRENT)
def test_many_tokens_are_not_stepped_through(mixer: str) -> None:
    """A loop over tokens would take twenty times as long."""
    model, tokens, cache = one(mixer), tokens_of(1, 120), Cache()
    with model.cap(recurrent=8):
        whole = model(tokens)
        model(tokens[:, :20], cache=cache)
        with mock.patch.object(Ring, "step", side_effect=AssertionError("a loop over tokens")):
            rest = model(tokens[:, 20:], cache=cache)
    assert_close(rest, whole[:, 20:], "model")


@pytest.mark.parametrize("mixer", RECURRENT)
def test_together_is_blind_to_what_left_the_window(mixer: str) -> None:
    """Bitwise, from the first row whose window begins after what was changed."""
    model, tokens, cap = one(mixer), tokens_of(1, T), 8
    other = tokens.clone()
    other[:, :10] = tokens_of(1, 10, seed=5)
    outs = []
    with model.cap(recurrent=cap), mock.patch.object(recurrent, "FEW", -(10**6)):
        for source in (tokens, other):
            cache = Cache()
            model(source[:, :12], cache=cache)
            outs.append(model(source[:, 12:], cache=cache)[:, 10 + cap - 1 - 12 :])
    assert torch.equal(*outs)
