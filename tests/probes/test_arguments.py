"""Bad input: every measurement says what is wrong before it runs a model, and nothing comes out as NaN or chance."""

from __future__ import annotations

import inspect

import numpy as np
import planted
import pytest
import torch
from sklearn.exceptions import NotFittedError

import hybridscope as hs
from hybridscope.hooks.checkpoint import save
from hybridscope.probes import activation_drift, drift
from hybridscope.probes.arguments import head_tuples
from hybridscope.probes.features import _columns
from hybridscope.probes.influence import _rows
from hybridscope.probes.layerwise import measure
from hybridscope.probes.tracking import Plan


@pytest.fixture(scope="module")
def model():
    return planted.planted()


@pytest.fixture(scope="module")
def prompts():
    return planted.needles(48)


@pytest.fixture(scope="module")
def ladder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ladder")
    for step, strength in ((0, 0.0), (10, planted.STRONG)):
        save(planted.planted({0: strength, 2: 1.0}), folder / f"step-{step:06d}", {"step": step})
    return hs.ladder(folder)


def heads_of(model, prompts):
    return hs.retrieval_heads(model, prompts[:8])


NOTHING = {
    "accuracy": lambda m, n: hs.needle_accuracy(m, n[:0]),
    "probe": lambda m, n: hs.probe_layers(m, n[:0]),
    "copy": lambda m, n: hs.retrieval_heads(m, n[:0]),
    "copy of all": lambda m, n: hs.retrieval_heads(m, n[:0], only_answered=False),
    "causal": lambda m, n: hs.causal_check(m, n[:0], heads_of(m, n), k=1),
    "patching": lambda m, n: hs.patch_heads(m, n[:0]),
    "importance": lambda m, n: hs.layer_importance(m, n[:0], windows=[8]),
}


@pytest.mark.parametrize("name", NOTHING)
def test_no_prompts_are_an_error_and_no_division_by_zero(model, prompts, name):
    with pytest.raises(ValueError, match="no prompts given"):
        NOTHING[name](model, prompts)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"controls": ["shufled"]}, "controls="),
        ({"controls": "shuffled"}, "controls="),
        ({"where": ()}, "where="),
        ({"where": "mid"}, "where="),
        ({"where": ["resid"]}, "where="),
        ({"seeds": 0}, "seeds=0"),
        ({"batch": 0}, "batch=0"),
        ({"C": 0}, "C=0"),
        ({"C": -1.0}, "C=-1"),
        ({"C": float("nan")}, "C=nan"),
    ],
)
def test_options_of_the_probe_are_named(model, prompts, options, named):
    with pytest.raises(ValueError, match=named):
        inspect.unwrap(measure)(model, prompts, **{"seeds": 1, **options})


@pytest.mark.parametrize("position", ["last", 5, torch.zeros(3, dtype=torch.int64), torch.zeros(48)])
def test_a_position_is_a_column_of_every_prompt(prompts, position):
    with pytest.raises(ValueError, match=r"position.*a column for each prompt, \[48\]"):
        inspect.unwrap(_columns)(prompts, position)


def test_the_estimator_says_what_it_was_given():
    rng = np.random.default_rng(0)
    X, y = rng.normal(size=(2, 40, 3)), np.arange(40) % 4
    for call in (lambda p: p.predict(X), lambda p: p.score(X, y)):
        with pytest.raises(NotFittedError):
            call(hs.LayerwiseProbe())
    fitted = hs.LayerwiseProbe().fit(X, y)
    for wrong, call in (
        ("expected \\[2, samples, features\\]", lambda: fitted.predict(X[:1])),
        ("y of length 5", lambda: fitted.score(X, y[:5])),
        ("NaN or infinite features, first at index 0", lambda: fitted.score(X * np.nan, y)),
        ("one class for each sample", lambda: hs.LayerwiseProbe().fit(X, y[:, None])),
        ("none of them NaN", lambda: hs.LayerwiseProbe().fit(X, np.where(y == 0, np.nan, y))),
        ("expected \\[layers", lambda: hs.LayerwiseProbe().fit(X[:0], y)),
        ("C=0: expected", lambda: hs.LayerwiseProbe(C=0).fit(X, y)),
        ("C=-1: expected", lambda: hs.LayerwiseProbe(C=-1, solver="sklearn").fit(X, y)),
    ):
        with pytest.raises(ValueError, match=wrong):
            call()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"heads": []}, "heads: an empty list"),
        ({"heads": "al"}, "heads='al'"),
        ({"heads": [1]}, r"head 1: expected \(layer, head\)"),
        ({"heads": (1, 0)}, r"head 1: expected \(layer, head\)"),
        ({"heads": [(1, 0.5)]}, r"head \(1, 0.5\)"),
        ({"top": 0}, "top=0"),
        ({"last_rows": 0}, "last_rows=0"),
        ({"last_rows": 49}, "last_rows=49: the shortest prompt has 48"),
        ({"batch": 0}, "batch=0"),
    ],
)
def test_options_of_tracking_are_named(ladder, prompts, options, named):
    with pytest.raises(ValueError, match=named):
        inspect.unwrap(Plan.of.__func__)(Plan, ladder, prompts, **options)


def test_no_prompts_are_nothing_to_track(ladder, prompts):
    with pytest.raises(ValueError, match="no prompts given"):
        hs.track(ladder, prompts[:0], [(1, 0)])


def test_heads_are_whole_numbers():
    assert head_tuples([(1, 0), [2, 0, 3], np.array([1, 2])]) == [(1, 0), (2, 0, 3), (1, 2)]
    for wrong in ([(1,)], [(1, 0.5)], ["10"], [None], 3 * [1]):
        with pytest.raises(ValueError, match="expected"):
            head_tuples(wrong)


def test_drift_does_not_round_a_head(ladder):
    with pytest.raises(ValueError, match=r"\(1, 0.5\)"):
        inspect.unwrap(drift._choose)(drift._sites(drift.checkpoints_of(ladder)), [(1, 0.5)])


def test_the_causal_check_wants_a_table(model, prompts):
    table = heads_of(model, prompts)
    for wrong in ([(1, 0)], table[["layer", "head"]]):
        with pytest.raises(ValueError, match="columns layer, site, head"):
            inspect.unwrap(hs.causal_check)(model, prompts, wrong, k=1)
    with pytest.raises(ValueError, match="draws=-1"):
        hs.causal_check(model, prompts, table, k=1, draws=-1)


def test_a_single_threshold_is_one(ladder, prompts):
    table = hs.track(ladder, prompts[:8], samples=True)
    one, three = hs.formation_step(table, 0.5), hs.formation_step(table)
    assert one["step"].tolist() == three.loc[three["threshold"] == 0.5, "step"].tolist()


@pytest.mark.parametrize(
    ("function", "given", "options", "named"),
    [
        (hs.logit_lens, lambda x: x[0], {}, r"tokens: shape \(48,\)"),
        (hs.logit_lens, lambda x: x[:0], {}, r"tokens: shape \(0, 48\)"),
        (hs.logit_lens, lambda x: x.tolist(), {}, "tokens: list"),
        (hs.logit_lens, lambda x: x, {"rows": [1.5]}, "whole numbers"),
        (hs.logit_lens, lambda x: x, {"target": [24]}, "ids 24..24 outside the vocabulary 0..23"),
        (hs.logit_lens, lambda x: x, {"target": [-1]}, "ids -1..-1 outside"),
        (hs.logit_lens, lambda x: x, {"batch": 0}, "batch=0"),
        (hs.perplexity, lambda x: x.tolist(), {}, "tokens: list"),
        (hs.perplexity, lambda x: x, {"batch_size": 0}, "batch_size=0"),
        (hs.long_context_gain, lambda x: x, {"context": 8, "batch_size": 0}, "batch_size=0"),
        (hs.gradient_influence, lambda x: x.tolist(), {}, "tokens: list"),
    ],
)
def test_documents_and_rows_are_checked(model, prompts, function, given, options, named):
    with pytest.raises(ValueError, match=named):
        inspect.unwrap(function)(model, given(prompts.tokens[:2]), **options)


def test_rows_of_the_loss_are_a_list():
    with pytest.raises(ValueError, match="rows=-2: expected a list"):
        inspect.unwrap(_rows)(-2, "loss", 48)


@pytest.mark.parametrize("rows", [[1.5], "last", torch.tensor([2.5]), [True]])
def test_rows_are_whole_numbers(rows):
    for function, more in ((_rows, ("loss", 48)), (activation_drift._rows, (48,))):
        with pytest.raises(ValueError, match=r"rows=.*: expected a list of columns, whole numbers"):
            inspect.unwrap(function)(rows, *more)


def test_patching_wants_prompts_with_answers_and_rows_that_are_there(model, prompts):
    some = prompts[:4]
    with pytest.raises(ValueError, match="clean: Tensor; expected Needles"):
        inspect.unwrap(hs.patch_heads)(model, some.tokens, some.removed)
    with pytest.raises(ValueError, match="'c' has column 99; the prompts have 48 tokens"):
        hs.patch_heads(model, some, rows={"c": torch.full((4, 1), 99)})
    with pytest.raises(ValueError, match="batch=0"):
        hs.patch_heads(model, some, batch=0)


def test_cost_takes_one_length_or_whole_numbers():
    config = hs.HybridConfig(["gdn", "full"], 2, 16, 2, 24)
    one = hs.cost(config, 64, measure=False)
    cost = inspect.unwrap(hs.cost)
    assert one.equals(cost(config, np.array([64]), measure=False))
    with pytest.raises(ValueError, match=r"lengths=\[1.5\]"):
        cost(config, [1.5], measure=False)
