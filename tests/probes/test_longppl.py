"""LongPPL by hand, and on a planted model whose key tokens are known: the answers of far needles."""

from __future__ import annotations

import math

import planted
import pytest
import torch
from helpers import model_of, tokens_of
from planted import needles

from hybridscope.probes.longppl import key_tokens, long_perplexity


def documents(n: int = 6, **options) -> torch.Tensor:
    """Needle prompts with the answer at their end: row T-2 predicts it, from a needle more than 24 tokens back."""
    made = needles(n, depth=(0, 0.4), **options)
    return torch.cat([made.tokens, made.answers], 1)[:, 1:]


def louder(strength: float = 60.0):
    """A planted model sure of what it reads."""
    model = planted.planted()
    model.unembed.weight *= strength
    return model


def test_key_tokens_are_those_that_gain_two_nats_and_cost_less_than_two():
    model = model_of("full", "gdn")
    for parameter in model.parameters():  # sure enough of itself for context to matter by nats
        parameter *= 3
    tokens = tokens_of(4, 30)
    found = key_tokens(model, tokens, name="itself", context=4)
    expected = torch.zeros(4, 29, dtype=torch.bool)
    for b in range(4):
        for t in range(4, 29):
            long = -model(tokens[b : b + 1, : t + 1])[0, -1].log_softmax(-1)[tokens[b, t + 1]]
            short = -model(tokens[b : b + 1, t - 3 : t + 1])[0, -1].log_softmax(-1)[tokens[b, t + 1]]
            expected[b, t] = short - long > 2 and long < 2
    assert expected.any()
    assert torch.equal(found.keys, expected)
    assert (found.evaluator, found.context, found.scored) == ("itself", 4, 4 * 25)


def test_the_answers_of_far_needles_are_key_tokens_and_nothing_else_at_the_end():
    tokens = documents()
    found = key_tokens(louder(), tokens, name="planted", context=20)
    assert found.keys[:, -1].all()
    assert not found.keys[:, :20].any()


def test_long_ppl_is_the_perplexity_over_key_tokens_alone():
    model, tokens = louder(), documents()
    keys = key_tokens(model, tokens, name="planted", context=20)
    row = long_perplexity(model, tokens, keys).iloc[0]
    losses = model.loss(tokens, per_token=True)
    assert row["log_long_ppl"] == pytest.approx(float(losses[keys.keys].mean()))
    assert row["long_ppl"] == pytest.approx(math.exp(row["log_long_ppl"]))
    assert row["ppl"] == pytest.approx(float(losses[:, 20:].mean().exp()))
    assert row["n"] == int(keys.keys.sum())
    assert row["share"] == pytest.approx(row["n"] / keys.scored)
    assert row["low"] <= row["log_long_ppl"] <= row["high"]
    assert row["evaluator"] == "planted"


def test_under_one_evaluator_a_model_without_long_context_is_worse_on_the_same_tokens():
    tokens = documents()
    keys = key_tokens(louder(), tokens, name="planted", context=20)
    with (model := louder()).cap(full=20):
        capped = long_perplexity(model, tokens, keys).iloc[0]
    whole = long_perplexity(louder(), tokens, keys).iloc[0]
    assert capped["n"] == whole["n"]
    assert capped["log_long_ppl"] > whole["log_long_ppl"] + 1


def test_an_evaluator_may_be_a_checkpoint_and_is_named_after_it(tmp_path):
    louder().save(tmp_path / "judge")
    row = long_perplexity(planted.planted(), documents(), str(tmp_path / "judge"), context=20).iloc[0]
    assert row["evaluator"] == str(tmp_path / "judge")


def test_one_document_has_no_interval():
    assert long_perplexity(louder(), documents(1), louder(), name="x", context=20)["low"].isna().all()


def test_no_key_tokens_is_said_and_nothing_is_divided_by_zero():
    with pytest.raises(ValueError, match=r"evaluator idle: none of \d+ tokens gains 2 nats.*nothing to average"):
        long_perplexity(louder(), documents(), planted.planted({}), name="idle", context=20)


def test_mistakes_are_named():
    model, tokens = louder(), documents()
    with pytest.raises(ValueError, match="give name="):
        long_perplexity(model, tokens, model)
    keys = key_tokens(model, tokens, name="planted", context=20)
    with pytest.raises(ValueError, match="the key tokens are of"):
        long_perplexity(model, tokens[:2], keys)
    with pytest.raises(ValueError, match="a vocabulary of 24, the model's is of 41"):
        long_perplexity(model_of("full"), tokens, keys)
    with pytest.raises(ValueError, match="they must be >= 62"):
        key_tokens(model, tokens, name="planted", context=60)
