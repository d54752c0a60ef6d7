"""Retrieval heads, on a model whose heads were set by hand: scores in closed form."""

from __future__ import annotations

import dataclasses
import math

import planted
import pytest
import torch
from planted import LANGUAGE, MASS, STRONG, WEAK, T, needles
from retrieval_prompts import CLOSE, score_of, told, unanswerable

import hybridscope as hs
from hybridscope.probes.retrieval import head_scores, published_prompts

SINGLE = 1e-7  # what is normalised by a log taken in fp32


@pytest.fixture(scope="module")
def model():
    return planted.planted()


@pytest.fixture(scope="module")
def prompts():
    return needles(24, depth=(0.1, 0.9))


# Scores


def test_mass_is_the_softmax_probability_of_the_value(model, prompts):
    table = hs.retrieval_heads(model, prompts, "mass")
    assert score_of(table, 1, 0) == pytest.approx(MASS, abs=CLOSE)
    assert score_of(table, 1, 2) == pytest.approx(0.5, abs=CLOSE)
    for layer, head in ((1, 1), (1, 3), (2, 0), (2, 3)):  # heads that attend evenly
        assert score_of(table, layer, head) == pytest.approx(1 / T, abs=CLOSE)


def test_copy_counts_answer_rows_whose_top_key_is_the_token_in_the_needle(model, prompts):
    table = hs.retrieval_heads(model, prompts)
    assert [score_of(table, 1, h) for h in range(4)] == [1, 0, 1, 0]
    assert table["retrieval"].tolist() == [True, True] + [False] * 6
    assert (table["n"] == 24).all()


def test_heads_come_best_first(model, prompts):
    table = hs.retrieval_heads(model, prompts, "mass")
    assert table[["layer", "site", "head"]].to_numpy()[:2].tolist() == [[1, 0, 0], [1, 0, 2]]
    assert table["score"].is_monotonic_decreasing
    assert len(table) == 8  # the window site is left out


def test_entropy_matches_its_closed_form(model, prompts):
    scores = head_scores(model, prompts, model.sites[1:2], last_rows=1)[model.sites[1]]
    strong = math.log(math.exp(STRONG) + T - 1) - MASS * STRONG
    weak = math.log(2 * (T - 1)) - 0.5 * WEAK
    expected = torch.tensor([strong, math.log(T), weak, math.log(T)], dtype=torch.float64)
    assert (scores["entropy"] - expected).abs().max() < CLOSE
    assert (scores["entropy_norm"] - expected / math.log(T)).abs().max() < SINGLE


def test_the_entropy_of_even_attention_is_the_log_of_what_is_visible(model, prompts):
    """Also under a window, whose rows see fewer keys."""
    window, even = head_scores(model, prompts, [model.sites[0], model.sites[2]], last_rows=4).values()
    assert (even["entropy"] - sum(math.log(T - i) for i in range(4)) / 4).abs().max() < CLOSE
    assert (even["entropy_norm"] - 1).abs().max() < SINGLE
    assert (window["entropy"] - math.log(2)).abs().max() < CLOSE
    assert (window["entropy_norm"] - 1).abs().max() < SINGLE


def test_mass_over_several_answer_rows_is_their_mean(model):
    """Each row finds one of the value's two columns; the other one draws as little as any."""
    value = [LANGUAGE.first_value, LANGUAGE.first_value + 1]
    made = told(value)
    table = hs.retrieval_heads(model, made, "mass")
    strong = math.exp(STRONG)
    first, second = ((strong + 1) / (strong + int(row)) for row in made.answer_rows[0])
    assert score_of(table, 1, 0) == pytest.approx((first + second) / 2, abs=CLOSE)
    assert score_of(hs.retrieval_heads(model, made), 1, 0) == 1


def test_the_published_row_is_the_one_before_the_prompts_last(model):
    """There the token is the marker, whose follower in the needle is the key: no mass on the value."""
    made = needles(8)
    table = hs.retrieval_heads(model, made, "mass", rows="published")
    visible = T - 1
    others = math.exp(STRONG) + visible - 1  # the marker came once before: one key matches
    assert score_of(table, 1, 0) == pytest.approx(1 / others, abs=CLOSE)
    assert score_of(table, 1, 1) == pytest.approx(1 / visible, abs=CLOSE)


def test_repeated_tokens_are_never_counted_above_one(model):
    v, w = LANGUAGE.first_value, LANGUAGE.first_value + 1
    made = told([v, w, v, w])
    table = hs.retrieval_heads(model, made, only_answered=False)
    assert table["score"].max() <= 1
    assert score_of(table, 1, 0) > 0.5
    once = hs.retrieval_heads(model, told([v, w]), only_answered=False)
    assert score_of(once, 1, 0) == 1


def test_looking_at_the_right_token_outside_the_needle_is_no_copy(model):
    made = told([LANGUAGE.first_value])
    moved = dataclasses.replace(made, spans={**made.spans, "value": made.spans["value"] - 3})
    assert score_of(hs.retrieval_heads(model, moved), 1, 0) == 0


def test_looking_into_the_needle_at_another_token_is_no_copy(model):
    made = told([LANGUAGE.first_value])
    wrong = dataclasses.replace(made, answers=made.answers + 1)
    table = hs.retrieval_heads(model, wrong, only_answered=False)
    assert score_of(table, 1, 0) == 0


def test_padding_on_the_left_changes_nothing(model, prompts):
    pad = 5
    short = dataclasses.replace(prompts, tokens=prompts.tokens[:, pad:])  # leaves room within the context
    short.spans = {n: s - pad for n, s in prompts.spans.items()}
    short.answer_rows = prompts.answer_rows - pad
    short = short[(short.spans["needle"] >= 0).all(1)]
    filled = torch.randint(0, 24, (len(short), pad))
    mask = torch.ones(len(short), T, dtype=torch.bool)
    mask[:, :pad] = False
    padded = dataclasses.replace(
        short, tokens=torch.cat([filled, short.tokens], 1), attention_mask=mask, answer_rows=short.answer_rows + pad,
        spans={n: s + pad for n, s in short.spans.items()},
    )  # fmt: skip
    for name in ("copy", "mass", "entropy", "entropy_norm"):
        one = head_scores(model, short, model.sites, last_rows=4)
        two = head_scores(model, padded, model.sites, last_rows=4)
        for site in model.sites:
            assert (one[site][name] - two[site][name]).abs().max() < CLOSE


def test_rows_of_shorter_answers_are_not_counted(model):
    """Answers of one token beside one of two: each its own mean."""
    one, two = told([LANGUAGE.first_value]), told([LANGUAGE.first_value, LANGUAGE.first_value + 1])
    pad = two.tokens.shape[1] - one.tokens.shape[1]
    mask = torch.ones(2, two.tokens.shape[1], dtype=torch.bool)
    mask[0, :pad] = False
    both = dataclasses.replace(
        two, attention_mask=mask,
        tokens=torch.cat([torch.cat([torch.zeros(1, pad, dtype=torch.int64), one.tokens], 1), two.tokens]),
        answer_rows=torch.tensor([[one.answer_rows[0, 0] + pad, -1], two.answer_rows[0].tolist()]),
        answers=torch.tensor([[LANGUAGE.first_value, -1], two.answers[0].tolist()]),
        spans={n: torch.cat([one.spans[n] + pad, two.spans[n]]) for n in two.spans},
    )  # fmt: skip
    for name in ("copy", "mass"):
        got = head_scores(model, both, model.sites[1:2])[model.sites[1]][name]
        alone = [head_scores(model, x, model.sites[1:2])[model.sites[1]][name] for x in (one, two)]
        assert (got - torch.cat(alone)).abs().max() < CLOSE


# The QR score


def test_the_qr_score_is_attention_on_the_needle_minus_that_under_a_question_that_asks_nothing(model, prompts):
    """Against patterns computed in the open, for a null query of our own and for the haystack's text."""
    filler = LANGUAGE.first_filler
    for null in ([filler, filler + 1], None):
        table = hs.retrieval_heads(model, prompts, "qr", null_query=null, full_only=False)
        empty = prompts.tokens.clone()
        haystack = prompts.removed.gather(1, prompts.spans["needle"][:, :1] + torch.arange(2))
        empty[:, -2:] = haystack if null is None else torch.tensor(null)
        for layer in range(3):
            expected = 0
            for sign, tokens in ((1, prompts.tokens), (-1, empty)):
                with model.record(stats=hs.Stats(rows=[T - 2, T - 1], labels=prompts.key_labels() >> 1)) as rec:
                    model(tokens)
                expected = expected + sign * rec.stats(layer).mass[..., 0].mean(1).mean(0)
            got = [score_of(table, layer, head) for head in range(4)]
            assert (torch.tensor(got, dtype=torch.float64) - expected).abs().max() < CLOSE


def test_heads_that_attend_evenly_have_no_qr_score(model, prompts):
    table = hs.retrieval_heads(model, prompts, "qr")
    assert table[["layer", "head"]].iloc[0].tolist() == [1, 0]
    assert score_of(table, 1, 0) > 0.4
    for layer, head in ((1, 1), (2, 0)):
        assert abs(score_of(table, layer, head)) < CLOSE


def test_the_qr_score_needs_to_know_the_question(model):
    with pytest.raises(ValueError, match="needs to know the question"):
        hs.retrieval_heads(model, told([LANGUAGE.first_value]), "qr")


# compat="qiao2026"


def test_compat_counts_every_occurrence_of_the_value_from_the_row_before_the_last(model):
    """A head that attends evenly puts 1/(T-1) on each: twice that where a distractor has the same value."""
    made = needles(60, distractors=3)
    table = hs.retrieval_heads(model, made, "mass", compat="qiao2026")
    value = made.answers[:, 0, None]
    times = (made.tokens == value).sum(1)
    assert times.max() > 1
    assert score_of(table, 2, 0) == pytest.approx(float(times.double().mean()) / (T - 1), abs=CLOSE)
    ours = hs.retrieval_heads(model, made, "mass", rows="published", only_answered=False)
    assert score_of(ours, 2, 0) == pytest.approx(1 / (T - 1), abs=CLOSE)


def test_compat_leaves_out_prompts_without_the_value_and_all_after_the_first_200(model):
    made = needles(210)
    table = hs.retrieval_heads(model, unanswerable(made, slice(0, 50)), "mass", compat="qiao2026")
    assert (table["n"] == 150).all()
    with pytest.raises(ValueError, match="stand in none of the 8 prompts"):
        hs.retrieval_heads(model, unanswerable(made, slice(0, 8))[:8], "mass", compat="qiao2026")


def test_compat_finds_values_of_several_tokens_and_not_their_parts():
    v = LANGUAGE.first_value
    once, where = published_prompts(told([v, v + 1]))
    assert where[0].nonzero()[:, 0].tolist() == list(range(*once.spans["value"][0].tolist()))
    _, overlapping = published_prompts(told([v, v, v]))
    assert int(overlapping.sum()) == 3
