"""Retrieval heads, on a model whose heads were set by hand: scores in closed form, ranks, and what ablation shows."""

from __future__ import annotations

import dataclasses
import inspect
import math

import numpy as np
import planted
import pytest
import torch
from helpers import model_of
from planted import HEAD, LANGUAGE, MASS, STRONG, WEAK, T, needles

import hybridscope as hs
from hybridscope.probes.retrieval import emitted, head_scores, random_heads

CLOSE = 1e-9
SINGLE = 1e-7  # what is normalised by a log taken in fp32


@pytest.fixture(scope="module")
def model():
    return planted.planted()


@pytest.fixture(scope="module")
def prompts():
    return needles(24, depth=(0.1, 0.9))


def score_of(table, layer, head) -> float:
    return float(table.query("layer == @layer and head == @head")["score"].iloc[0])


def unanswerable(prompts: hs.Needles, which: slice) -> hs.Needles:
    """The same prompts, some without their needle."""
    tokens = prompts.tokens.clone()
    tokens[which] = prompts.removed[which]
    return dataclasses.replace(prompts, tokens=tokens)


def told(value: list[int], key: int = 3) -> hs.Needles:
    """One prompt with a value of several tokens."""
    filler = LANGUAGE.first_filler
    start = [0, filler, filler + 1, LANGUAGE.MARKER, key]
    tokens = torch.tensor([[*start, *value, filler + 2, filler + 3, LANGUAGE.MARKER, key, *value[:-1]]])
    A, end = len(value), tokens.shape[1]
    span = torch.tensor([[len(start), len(start) + A]])
    none = torch.tensor([-1])
    return hs.Needles(
        tokens=tokens, answer_rows=torch.arange(end - A, end)[None], answers=torch.tensor([value]),
        spans={"needle": span + torch.tensor([-2, 0]), "value": span}, labels={"value": none, "depth": none},
        group=torch.tensor([0]), depth=torch.tensor([0.5]),
    )  # fmt: skip


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


# Which prompts count


def test_only_prompts_that_the_model_answers_count_unless_asked(model, prompts):
    half = unanswerable(prompts, slice(0, 12))
    found = hs.retrieval_heads(model, half, "mass")
    assert (found["n"] == 12).all()
    assert score_of(found, 1, 0) == pytest.approx(MASS, abs=CLOSE)
    everything = hs.retrieval_heads(model, half, "mass", only_answered=False)
    assert (everything["n"] == 24).all()
    assert score_of(everything, 1, 0) == pytest.approx((MASS + 1 / T) / 2, abs=CLOSE)


def test_a_model_that_answers_nothing_is_an_error_that_says_what_to_do(prompts):
    silent = planted.planted({})
    with pytest.raises(ValueError, match=r"answers none of the 24 prompts.*only_answered=False"):
        hs.retrieval_heads(silent, prompts)
    assert (hs.retrieval_heads(silent, prompts, only_answered=False)["score"] == 0).all()


def test_decoding_agrees_with_teacher_forcing_where_the_model_answers(model):
    short = hs.make_needles(12, T - 1, values=8, language=LANGUAGE)
    forced, decoded = (hs.retrieval_heads(model, short, generate=g) for g in (False, True))
    assert forced.equals(decoded)


def test_decoding_scores_what_the_model_says():
    """A random model says something else; its own answer is then what it answers."""
    model = model_of("gdn", "full", n_kv_heads=2)
    made = told([18, 19, 20])
    own = emitted(model, made)
    start = int(made.query_row[0]) + 1
    says = model.generate(made.tokens[:, :start], 3)[:, start:]
    assert torch.equal(own.answers, says)
    assert not torch.equal(own.answers, made.answers)
    assert hs.needle_accuracy(model, own) == 1
    assert torch.equal(own.tokens[:, :start], made.tokens[:, :start])


def test_window_heads_are_ranked_on_request_only(model, prompts):
    table = hs.retrieval_heads(model, prompts, full_only=False)
    assert set(table["kind"]) == {"full", "window"}
    with pytest.raises(ValueError, match="no full sites to rank; it has: window"):
        hs.retrieval_heads(model_of("swa:4", "swa:8"), prompts)
    with pytest.raises(ValueError, match="no softmax sites to rank; it has: recurrent"):
        hs.retrieval_heads(model_of("gdn"), prompts, full_only=False)


@pytest.mark.parametrize(
    ("options", "named"),
    [({"score": "qr"}, "score='qr'"), ({"rows": "all"}, "rows='all'"), ({"rows": "published"}, 'score="mass"')],
)
def test_unknown_choices_are_errors(model, prompts, options, named):
    with pytest.raises(ValueError, match=named):
        inspect.unwrap(hs.retrieval_heads)(model, prompts, **options)


# The causal check


def test_ablating_the_planted_head_kills_accuracy_and_random_heads_do_not(model, prompts):
    heads = hs.retrieval_heads(model, prompts, "mass")
    effect = hs.causal_check(model, needles(16, seed=9), heads, k=1, draws=4)
    accuracy = effect.groupby("ablated")["accuracy"].agg(["min", "max"])
    assert accuracy.loc["none"].tolist() == [1, 1]
    assert accuracy.loc["top"].tolist() == [0, 0]
    assert accuracy.loc["random"].tolist() == [1, 1]
    assert (effect["ablated"] == "random").sum() == 4


def test_random_heads_come_from_the_same_sites_and_spare_the_top_where_they_can(model):
    for seed in range(20):
        picked = random_heads(model, [HEAD, (2, 0, 1), (2, 0, 2)], np.random.default_rng(seed))
        assert sorted(layer for layer, _, _ in picked) == [1, 2, 2]
        assert len(set(picked)) == 3
        assert HEAD not in picked
        assert {(2, 0, 0), (2, 0, 3)} == {h for h in picked if h[0] == 2}
    crowded = random_heads(model, [(1, 0, 0), (1, 0, 1), (1, 0, 2)], np.random.default_rng(0))
    assert (1, 0, 3) in crowded
    assert len(set(crowded)) == 3


@pytest.mark.parametrize("k", [0, 9])
def test_more_heads_than_the_table_has_is_an_error(model, prompts, k):
    heads = hs.retrieval_heads(model, prompts)
    with pytest.raises(ValueError, match=rf"k={k}: expected 1\.\.8"):
        hs.causal_check(model, prompts, heads, k=k)
