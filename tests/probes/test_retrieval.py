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
from hybridscope.probes.causal import random_heads
from hybridscope.probes.retrieval import emitted, head_scores, published_prompts

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


# How sure the ranking is


def test_intervals_hold_the_score_and_the_rank(model, prompts):
    half = unanswerable(prompts, slice(0, 12))
    table = hs.retrieval_heads(model, half, "mass", only_answered=False)
    assert ((table["low"] < table["score"] + CLOSE) & (table["score"] < table["high"] + CLOSE)).all()
    best, second = table.iloc[0], table.iloc[1]
    assert best["high"] - best["low"] > 0.1  # 0.9 on half of the prompts
    assert best[["rank_low", "rank_high"]].tolist() == [1, 1]  # ... and yet the best on every draw
    assert second[["rank_low", "rank_high"]].tolist() == [2, 2]


def test_heads_that_cannot_be_told_apart_share_their_ranks(model, prompts):
    table = hs.retrieval_heads(model, prompts)  # copy: two score 1 on every prompt, the others 0
    assert table["rank_low"].tolist() == [1] * 2 + [3] * 6
    assert table["rank_high"].tolist() == [2] * 2 + [8] * 6
    assert (table["low"] == table["high"]).all()


def test_at_chance_no_head_is_surely_the_best():
    """A random model on random prompts: the leader's interval of ranks is not [1, 1]."""
    made = hs.make_needles(40, 40, values=LANGUAGE.values, language=LANGUAGE)
    table = hs.retrieval_heads(model_of("full", "full", heads=8, d_model=32), made, "mass", only_answered=False)
    assert table["rank_high"].iloc[0] > 1
    assert (table["score"] < 0.2).all()


def test_more_prompts_narrow_the_intervals(model):
    def width(n: int) -> float:
        made = unanswerable(needles(n), slice(0, n // 2))
        best = hs.retrieval_heads(model, made, "mass", only_answered=False).iloc[0]
        return best["high"] - best["low"]

    assert width(64) < 0.7 * width(16)


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
    [
        ({"score": "sum"}, "score='sum'"),
        ({"rows": "all"}, "rows='all'"),
        ({"rows": "published"}, 'score="mass"'),
        ({"rows": "published", "score": "qr"}, 'score="mass"'),
        ({"compat": "wu2024"}, "compat='wu2024'"),
        ({"compat": "qiao2026", "score": "copy"}, 'goes with score="mass"'),
        ({"null_query": [3]}, "null_query"),
        ({"score": "qr", "null_query": []}, "null_query"),
        ({"bootstrap": 0}, "bootstrap=0"),
    ],
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
    top = effect.query("ablated == 'top'").iloc[0]
    assert top[["effect", "effect_low", "effect_high"]].tolist() == [1, 1, 1]
    assert effect["effect"].notna().sum() == 1
    assert ((effect["low"] <= effect["accuracy"]) & (effect["accuracy"] <= effect["high"])).all()
    assert top["high"] == pytest.approx(1.96**2 / (16 + 1.96**2), abs=1e-4)  # none of 16 is not surely none


def test_heads_that_do_nothing_have_no_effect(model, prompts):
    heads = hs.retrieval_heads(model, prompts, "mass", full_only=True)
    idle = heads[heads["layer"] == 2]
    effect = hs.causal_check(model, prompts, idle, k=2, draws=3)
    assert effect.query("ablated == 'top'")[["effect", "effect_low", "effect_high"]].to_numpy().tolist() == [[0, 0, 0]]


def test_a_model_that_answers_nothing_has_nothing_to_lose_and_says_so(model, prompts):
    heads = hs.retrieval_heads(model, prompts)
    with pytest.warns(UserWarning, match="answers none of the 24 prompts"):
        effect = hs.causal_check(planted.planted({}), prompts, heads, k=1, draws=2)
    assert (effect["accuracy"] == 0).all()


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
