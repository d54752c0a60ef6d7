"""Loss by position: rows, buckets and padding; and what long context is worth."""

from __future__ import annotations

import pytest
import torch
from helpers import model_of, pad, tokens_of
from torch import Tensor

from hybridscope.probes.perplexity import long_context_gain, perplexity


def row_losses(model, tokens: Tensor) -> Tensor:
    """[B,T-1] by hand."""
    chances = model(tokens).log_softmax(-1)
    return -chances[:, :-1].gather(-1, tokens[:, 1:, None])[..., 0]


@pytest.fixture
def model():
    return model_of("swa:3", "full", "gdn")


def test_one_bucket_a_position_is_the_loss_of_each_row(model):
    tokens = tokens_of(5, 9)
    table = perplexity(model, tokens, buckets=range(9), batch_size=2)
    assert list(table.columns) == ["position_low", "position_high", "loss", "low", "high", "n"]
    expected = row_losses(model, tokens)
    assert list(table.position_low) == list(range(8))  # row 8 predicts nothing
    assert (table.n == 5).all()
    assert torch.allclose(torch.tensor(table.loss), expected.mean(0), rtol=1e-12)
    assert ((table.low <= table.loss) & (table.loss <= table.high)).all()


def test_intervals_are_over_documents_however_many_rows_they_have(model):
    """The sampling spread of a mean of documents; that of rows would be many times too narrow where they agree."""
    tokens = tokens_of(16, 20)
    table = perplexity(model, tokens, buckets=[0, 19])
    spread = row_losses(model, tokens).mean(1).std(correction=0) / 16**0.5
    assert float(table.high[0] - table.low[0]) / (2 * 1.96) == pytest.approx(float(spread), rel=0.15)
    assert perplexity(model, tokens[:1]).low.isna().all()
    copies = perplexity(model, tokens[:1].expand(4, -1))
    assert copies.low.to_numpy() == pytest.approx(copies.high.to_numpy())


@pytest.mark.parametrize("buckets", [None, 1, 4, 100])
@pytest.mark.parametrize("length", [2, 3, 8, 33])
def test_buckets_hold_every_predicting_row_once(model, buckets, length):
    tokens = tokens_of(3, length)
    table = perplexity(model, tokens, buckets=buckets)
    assert table.position_low[0] == 0
    assert table.position_high.iloc[-1] == length - 1
    assert (table.position_high[:-1].to_numpy() == table.position_low[1:].to_numpy()).all()
    assert table.n.sum() == 3 * (length - 1)
    assert (table.loss * table.n).sum() / table.n.sum() == pytest.approx(float(model.loss(tokens)))


def test_default_buckets_are_powers_of_two(model):
    table = perplexity(model, tokens_of(1, 20))
    assert list(table.position_low) == [0, 1, 2, 4, 8, 16]


def test_given_buckets_leave_out_what_lies_outside(model):
    tokens = tokens_of(2, 12)
    table = perplexity(model, tokens, buckets=[2, 5, 9, 50, 60])
    losses = row_losses(model, tokens)
    assert list(table.n) == [6, 8, 4]  # the bucket [50,60) is empty
    assert table.loss[1] == pytest.approx(float(losses[:, 5:9].mean()))


def test_padding_counts_nowhere_and_shifts_no_position(model):
    rows = [tokens_of(1, n, seed=n)[0] for n in (10, 6, 8)]
    tokens, mask = pad(rows, [range(2, 12), range(6, 12), range(8)], 12)  # left, left, right
    table = perplexity(model, tokens, buckets=range(10), attention_mask=mask).set_index("position_low")
    alone = [row_losses(model, r[None])[0] for r in rows]
    for position in range(9):
        there = [float(a[position]) for a in alone if position < len(a)]
        assert table.n[position] == len(there)
        assert table.loss[position] == pytest.approx(sum(there) / len(there))


def test_a_cap_moves_only_rows_beyond_it():
    model = model_of("full")
    tokens = tokens_of(2, 20)
    free = perplexity(model, tokens, buckets=range(20)).loss
    with model.cap(full=6):
        capped = perplexity(model, tokens, buckets=range(20)).loss
    assert (free[:6] == capped[:6]).all()
    assert ((free[6:] - capped[6:]).abs() > 1e-9).all()


@pytest.mark.parametrize("buckets", [0, -1, [], [3], [0, 0, 4], [4, 2], [-1, 4], [11, 12]])
def test_bad_buckets_are_named(model, buckets):
    with pytest.raises(ValueError, match="buckets"):
        perplexity(model, tokens_of(1, 12), buckets=buckets)


def test_other_mistakes_are_named(model):
    with pytest.raises(ValueError, match="T >= 2"):
        perplexity(model, tokens_of(1, 1))
    with pytest.raises(ValueError, match="attention_mask"):
        perplexity(model, tokens_of(1, 5), attention_mask=torch.ones(1, 4))
    with pytest.raises(ValueError, match="no row"):
        perplexity(model, tokens_of(1, 5), attention_mask=torch.tensor([[1, 0, 1, 0, 1]]))


# What long context is worth


@pytest.mark.parametrize("stride", [1, 3])
def test_gain_by_hand(model, stride):
    tokens = tokens_of(2, 15)
    full = row_losses(model, tokens)
    gains = [
        float(row_losses(model, tokens[b : b + 1, t - 3 : t + 2])[0, -1] - full[b, t])
        for b in range(2)
        for t in range(4, 14, stride)
    ]
    table = long_context_gain(model, tokens, context=4, stride=stride, batch_size=3)
    assert list(table.columns) == ["context", "gain", "low", "high", "loss", "short_loss", "n"]
    assert table.gain[0] == pytest.approx(sum(gains) / len(gains))
    assert table.short_loss[0] - table.loss[0] == pytest.approx(table.gain[0])
    documents = [sum(half) / len(half) for half in (gains[: len(gains) // 2], gains[len(gains) // 2 :])]
    assert [table.low[0], table.high[0]] == pytest.approx(sorted(documents))  # of two, all draws of one of them
    assert table.n[0] == len(gains)


def test_a_model_that_cannot_see_further_gains_nothing():
    model = model_of("swa:3", "swa:4")
    tokens = tokens_of(2, 40)
    assert model.reach() == 6
    assert long_context_gain(model, tokens, context=6, stride=1).gain[0] == pytest.approx(0, abs=1e-12)
    assert abs(long_context_gain(model, tokens, context=5, stride=1).gain[0]) > 1e-6


def test_gain_needs_text_longer_than_the_context(model):
    assert long_context_gain(model, tokens_of(1, 8), context=6).gain[0] != 0
    with pytest.raises(ValueError, match="8"):
        long_context_gain(model, tokens_of(1, 7), context=6)
    for wrong in ({"context": 0}, {"context": 2, "stride": 0}):
        with pytest.raises(ValueError, match="expected >= 1"):
            long_context_gain(model, tokens_of(1, 9), **wrong)
