"""Ranking retrieval heads: how sure the ranks are, which prompts count, and which heads are ranked."""

from __future__ import annotations

import inspect

import planted
import pytest
import torch
from helpers import model_of
from planted import LANGUAGE, MASS, T, needles
from retrieval_prompts import CLOSE, score_of, told, unanswerable

import hybridscope as hs
from hybridscope.probes.retrieval import emitted


@pytest.fixture(scope="module")
def model():
    return planted.planted()


@pytest.fixture(scope="module")
def prompts():
    return needles(24, depth=(0.1, 0.9))


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


def test_one_prompt_says_nothing_of_how_sure_the_ranking_is(model, prompts):
    table = hs.retrieval_heads(model, prompts[:1], "mass")
    assert table[["low", "high"]].isna().all(axis=None)
    assert set(zip(table["rank_low"], table["rank_high"], strict=True)) == {(1, len(table))}


def test_more_prompts_narrow_the_intervals(model):
    def width(n: int) -> float:
        made = unanswerable(needles(n), slice(0, n // 2))
        best = hs.retrieval_heads(model, made, "mass", only_answered=False).iloc[0]
        return best["high"] - best["low"]

    assert width(64) < 0.7 * width(16)


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
        ({"score": "qr", "null_query": "why"}, "null_query"),
        ({"bootstrap": 0}, "bootstrap=0"),
    ],
)
def test_unknown_choices_are_errors(model, prompts, options, named):
    with pytest.raises(ValueError, match=named):
        inspect.unwrap(hs.retrieval_heads)(model, prompts, **options)
