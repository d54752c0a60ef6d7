"""The causal check, on a model whose heads were set by hand: what ablating the best heads shows."""

from __future__ import annotations

import numpy as np
import pandas as pd
import planted
import pytest
from planted import HEAD, needles

import hybridscope as hs
from hybridscope.probes.causal import random_heads


@pytest.fixture(scope="module")
def model():
    return planted.planted()


@pytest.fixture(scope="module")
def prompts():
    return needles(24, depth=(0.1, 0.9))


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


def test_a_head_twice_is_not_two_heads(model, prompts):
    heads = hs.retrieval_heads(model, prompts)
    with pytest.raises(ValueError, match=r"\(1, 0, [0-3]\) stands several times in the top 3"):
        hs.causal_check(model, prompts, pd.concat([heads.head(2), heads]), k=3, draws=1)


def test_one_prompt_has_no_interval_of_the_effect(model, prompts):
    effect = hs.causal_check(model, prompts[:1], hs.retrieval_heads(model, prompts, "mass"), k=1, draws=3)
    top = effect.query("ablated == 'top'").iloc[0]
    assert top["effect"] == 1
    assert top[["effect_low", "effect_high"]].isna().all()


@pytest.mark.parametrize("k", [0, 9])
def test_more_heads_than_the_table_has_is_an_error(model, prompts, k):
    heads = hs.retrieval_heads(model, prompts)
    with pytest.raises(ValueError, match=rf"k={k}: expected 1\.\.8"):
        hs.causal_check(model, prompts, heads, k=k)
