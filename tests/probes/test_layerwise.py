"""The layer-wise probe: a planted signal is found where it stands, controls stay at chance, groups never leak."""

from __future__ import annotations

import dataclasses
import inspect

import english
import numpy as np
import planted
import pytest
import torch
from helpers import model_of
from planted import LANGUAGE, T
from sklearn.base import clone
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import StratifiedGroupKFold, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import hybridscope as hs
from hybridscope.probes import layerwise
from hybridscope.probes.features import extract
from hybridscope.probes.layerwise import measure

CHANCE = 0.25
NEAR_CHANCE = 0.45  # 160 samples, 5 splits: far above what chance gives, far below what is planted


@pytest.fixture(scope="module")
def model():
    return planted.planted()


@pytest.fixture(scope="module")
def prompts():
    return hs.make_needles(160, T, values=4, language=LANGUAGE)


@pytest.fixture(scope="module")
def table(model, prompts):
    return hs.probe_layers(model, prompts, where=("pre", "mid", "post", "delta"))


def accuracy(table, where, control="none"):
    rows = table.query("where == @where and control == @control")
    return rows.set_index("layer")["accuracy"].to_dict()


# What is found, and where


def test_the_value_is_found_after_the_layer_that_reads_it_and_not_before(table):
    assert max(accuracy(table, "pre")[0], accuracy(table, "mid")[0], accuracy(table, "post")[0]) < NEAR_CHANCE
    assert accuracy(table, "pre")[1] < NEAR_CHANCE
    assert min(accuracy(table, "mid")[1], accuracy(table, "post")[1]) == 1
    assert min(accuracy(table, "pre")[2], accuracy(table, "mid")[2], accuracy(table, "post")[2]) == 1


def test_what_a_mixer_adds_is_read_by_itself(table):
    """The mixer of layer 1 adds the value; that of layer 2 adds nothing."""
    delta = accuracy(table, "delta")
    assert delta[1] == 1
    assert max(delta[0], delta[2]) < NEAR_CHANCE


@pytest.mark.parametrize("control", ["shuffled", "removed"])
def test_controls_come_out_at_chance(table, control):
    rows = table.query("control == @control")
    assert set(rows["layer"]) == {0, 1, 2}
    assert (rows["accuracy"] < NEAR_CHANCE).all()
    assert (rows["chance"] == CHANCE).all()


def test_gain_is_what_the_mixer_makes_of_it(table):
    mid = table.query("where == 'mid'")
    for control in ("none", "shuffled", "removed"):
        before = accuracy(table, "pre", control)
        for row in mid.query("control == @control").itertuples():
            assert row.gain == row.accuracy - before[row.layer]
    assert table.query("where != 'mid'")["gain"].isna().all()
    assert mid.query("layer == 1 and control == 'none'")["gain"].iloc[0] > 0.5


def test_the_interval_holds_the_accuracy_and_narrows_where_nothing_varies(table):
    assert (table["low"] <= table["accuracy"]).all()
    assert (table["accuracy"] <= table["high"]).all()
    perfect = table.query("accuracy == 1")
    assert (perfect["low"] == 1).all()
    assert (table.query("accuracy < 0.5")["high"] > table.query("accuracy < 0.5")["accuracy"]).all()


def test_rows_name_layer_kind_and_mixer(table):
    first = table.query("control == 'none' and where == 'pre'")
    assert first["kind"].tolist() == ["window", "full", "full"]
    assert first["mixer"].tolist() == ["swa:2", "nope", "full"]
    assert (table["n"] == 160).all()


def test_a_layer_of_parallel_mixers_is_named_after_all_of_them(prompts):
    torch.manual_seed(0)
    model = hs.HybridLM(hs.HybridConfig(["swa:3|gdn", "gdn+nope"], 2, 16, 2, LANGUAGE.vocab_size))
    table = hs.probe_layers(model, prompts, where=("mid",), controls=(), seeds=1)
    named = table[["layer", "kind", "mixer"]].itertuples(index=False, name=None)
    assert list(named) == [(0, "recurrent", "swa:3+gdn"), (1, "full", "gdn+nope")]


def test_the_target_is_the_label_asked_for(model, prompts):
    """With the two labels swapped, the planted value is found under the name of the other."""
    swapped = dataclasses.replace(
        prompts, labels={"depth": prompts.labels["value"], "value": prompts.labels["depth"].clamp(max=3)}
    )
    found = hs.probe_layers(model, swapped, "depth", where=("mid",), controls=(), seeds=2)
    assert accuracy(found, "mid")[1] == 1
    assert (found["target"] == "depth").all()
    other = hs.probe_layers(model, swapped, "value", where=("mid",), controls=(), seeds=2)
    assert max(accuracy(other, "mid").values()) < 0.9
    assert other["chance"].iloc[0] > 0.5  # the commonest class


# Positions


def test_at_the_value_the_embedding_already_tells(model, prompts):
    at = hs.probe_layers(model, prompts, where=("pre",), position=prompts.spans["value"][:, 0], controls=(), seeds=1)
    assert accuracy(at, "pre")[0] == 1
    before = hs.probe_layers(
        model, prompts, where=("post",), position=prompts.spans["value"][:, 0] - 1, controls=(), seeds=1
    )
    assert max(accuracy(before, "post").values()) < NEAR_CHANCE  # causal: the token before cannot know


def test_features_are_the_residual_stream_at_the_prompts_last_token(model, prompts):
    """Against TransformerLens' cache; the last layer's before the final norm."""
    names = {"pre": "hook_resid_pre", "mid": "hook_resid_mid", "post": "hook_resid_post", "delta": "hook_attn_out"}
    places = [(layer, where) for layer in range(3) for where in names]
    features = extract(model, prompts, places, batch=50)
    _, cache = model.run_with_cache(prompts.tokens)
    for (layer, where), got in zip(places, features, strict=True):
        expected = cache[f"blocks.{layer}.{names[where]}"][:, -1].float().numpy()
        assert np.abs(got - expected).max() < 1e-6


def test_positions_are_taken_sample_by_sample(model, prompts):
    position = prompts.spans["key"][:, 0]
    features = extract(model, prompts, [(0, "pre")], position=position, batch=7)[0]
    tokens = prompts.tokens.gather(1, position[:, None])[:, 0]
    assert np.array_equal(features, model.embed.weight[tokens].float().numpy())


# The split and the classifier


def test_groups_never_stand_on_both_sides_of_the_split():
    """Ten copies of each prompt, each prompt with a class of its own: only a leak can tell them."""
    model = model_of("full", d_model=64)
    made = hs.make_needles(24, 30, values=8)
    made = made[torch.arange(24).repeat_interleave(10)]
    made.tokens %= 41
    made.labels["value"] = (torch.randperm(24, generator=torch.Generator().manual_seed(0)) % 2).repeat_interleave(10)
    options = {"where": ("post",), "controls": (), "seeds": 3}
    kept = hs.probe_layers(model, made, **options)
    assert kept["accuracy"].iloc[0] < 0.75
    leaking = dataclasses.replace(made, group=torch.arange(240))
    assert hs.probe_layers(model, leaking, **options)["accuracy"].iloc[0] > 0.95


def test_it_agrees_with_a_plain_scikit_learn_pipeline(model, prompts):
    noisy = model_of("gdn", "full", n_kv_heads=2)
    made = dataclasses.replace(prompts, tokens=prompts.tokens % 41)
    table = hs.probe_layers(noisy, made, where=("mid",), controls=(), position=made.spans["value"][:, 1], seeds=3)
    _, cache = noisy.run_with_cache(made.tokens)
    y, group = made.labels["value"].numpy(), made.group.numpy()
    rows = torch.arange(160)
    for layer in (0, 1):
        X = cache[f"blocks.{layer}.hook_resid_mid"][rows, made.spans["value"][:, 1]].float().numpy()
        hits = []
        for seed in range(3):
            split = StratifiedGroupKFold(5, shuffle=True, random_state=seed)
            train, test = next(split.split(X, y, group))
            plain = make_pipeline(StandardScaler(), LogisticRegression(C=0.1, max_iter=1000))
            hits.append(plain.fit(X[train], y[train]).predict(X[test]) == y[test])
        expected = np.concatenate(hits).mean()
        assert accuracy(table, "mid")[layer] == pytest.approx(expected, abs=0.005)
        assert 0.3 < expected < 1  # something to agree about


def data(n=60, layers=3, classes=3):
    rng = np.random.default_rng(0)
    y = np.arange(n) % classes
    X = rng.normal(size=(layers, n, 6))
    X[1, np.arange(n), y] += 8
    return X, y


def test_the_estimator_finds_the_layer_that_holds_the_classes():
    X, y = data()
    probe = hs.LayerwiseProbe().fit(X[:, :40], y[:40])
    scores = probe.score_layers(X[:, 40:], y[40:])
    assert scores.argmax() == 1
    assert scores[1] == 1
    assert max(scores[0], scores[2]) < 0.7
    assert probe.score(X[:, 40:], y[40:]) == 1
    assert probe.predict(X).shape == (3, 60)
    assert probe.classes_.tolist() == [0, 1, 2]


def test_it_is_a_scikit_learn_estimator():
    probe = hs.LayerwiseProbe(C=2.0)
    assert probe.get_params() == {"C": 2.0, "max_iter": 1000, "solver": "auto"}
    X, y = data()
    copy = clone(probe.fit(X, y))
    assert copy.get_params() == probe.get_params()
    assert not hasattr(copy, "estimators_")
    assert copy.set_params(C=0.5).C == 0.5


def test_scikit_learns_tools_cross_validate_one_place():
    X, y = data()
    scores = cross_val_score(hs.LayerwiseProbe(), X[1], y, cv=3)
    assert scores.tolist() == [1.0, 1.0, 1.0]
    probe = hs.LayerwiseProbe().fit(X[1], y)
    assert probe.predict(X[1]).shape == (60,)
    assert np.array_equal(probe.predict(X[1:2])[0], probe.predict(X[1]))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_features_that_are_no_numbers_name_the_first_layer(value):
    X, y = data()
    X[1, 5, 0] = value
    X[2, 0, 0] = value
    with pytest.raises(ValueError, match="index 1"):
        hs.LayerwiseProbe().fit(X, y)


@pytest.mark.parametrize("shape", [(59, 6), (3, 59, 6), (60,)])
def test_features_of_another_shape_are_an_error(shape):
    with pytest.raises(ValueError, match=r"expected \[layers, 60, features\]"):
        hs.LayerwiseProbe().fit(np.zeros(shape), np.arange(60) % 2)


def test_one_class_is_nothing_to_tell_apart():
    with pytest.raises(ValueError, match="two classes"):
        hs.LayerwiseProbe().fit(np.zeros((1, 5, 2)), np.zeros(5))


# Errors


def test_activations_that_are_no_numbers_name_the_first_layer(prompts):
    broken = planted.planted()
    broken.layers[1].attn.o_proj.weight[0] = torch.nan
    with pytest.raises(ValueError, match=r"layer 1 \(mid\): activations are NaN"):
        hs.probe_layers(broken, prompts, controls=())


def test_too_few_samples_or_classes_or_groups_are_errors_that_say_so(model, prompts):
    classes = [(prompts.labels["value"] == c).nonzero()[:, 0] for c in range(4)]
    with pytest.raises(ValueError, match="24 samples over 3 classes of 'value', the smallest with 4"):
        hs.probe_layers(model, prompts[torch.cat([classes[0][:4], classes[1][:10], classes[3][:10]])])
    with pytest.raises(ValueError, match="over 1 classes"):
        hs.probe_layers(model, prompts[prompts.labels["value"] == 1])
    none = dataclasses.replace(prompts, labels={**prompts.labels, "value": torch.full((160,), -1)})
    with pytest.raises(ValueError, match="no 'value' classes"):
        hs.probe_layers(model, none)
    with pytest.raises(ValueError, match="4 groups"):
        hs.probe_layers(model, dataclasses.replace(prompts, group=torch.arange(160) % 4))


def test_prompts_without_a_needle_are_needed_for_that_control_only(model, prompts):
    bare = dataclasses.replace(prompts, removed=None)
    with pytest.raises(ValueError, match="leave 'removed' out"):
        hs.probe_layers(model, bare)
    table = hs.probe_layers(model, bare, where=("mid",), controls=("shuffled",), seeds=1)
    assert set(table["control"]) == {"none", "shuffled"}


def test_an_unknown_target_is_an_error(model, prompts):
    with pytest.raises(ValueError, match='"value" or "depth"'):
        inspect.unwrap(measure)(model, prompts, "key")


# All targets, haystacks and features


@pytest.mark.parametrize("haystack", ["repeat", "essay"])
@pytest.mark.parametrize("target", ["value", "depth"])
def test_haystacks_of_text_are_probed_for_either_target(haystack, target):
    """At the value itself, where the embedding tells it; of the depth an embedding tells nothing."""
    tokenizer = english.tokenizer("bytes")
    made = hs.make_needles(60, 260, haystack=haystack, tokenizer=tokenizer, values=3, depth_bins=3, texts=english.TEXTS)
    torch.manual_seed(0)
    model = hs.HybridLM(hs.HybridConfig(("swa:8", "full"), 2, 64, 2, tokenizer.vocab_size)).eval()
    at = made.spans["value"][:, 1] - 1
    table = hs.probe_layers(model, made, target, where=("pre", "mid", "post", "delta"), position=at, seeds=2)
    assert len(table) == 2 * 4 * 3
    found = accuracy(table, "pre")[0]
    assert found == 1 if target == "value" else found < 0.8


# Solvers


@pytest.mark.parametrize("classes", [2, 3])
def test_the_solvers_agree(classes):
    """All that scikit-learn's estimators offer, from either."""
    X, y = data(n=90, classes=classes)
    names = np.array(["a", "b", "c"])[y]
    ours, theirs = (hs.LayerwiseProbe(solver=s).fit(X[:, :60], names[:60]) for s in ("torch", "sklearn"))
    assert np.array_equal(ours.predict(X[:, 60:]), theirs.predict(X[:, 60:]))
    for a, b in zip(ours.estimators_, theirs.estimators_, strict=True):
        assert np.abs(a[-1].coef_ - b[-1].coef_).max() < 0.01
        assert np.abs(a.predict_proba(X[0]) - b.predict_proba(X[0])).max() < 0.01
        assert a[-1].classes_.tolist() == b[-1].classes_.tolist()


def test_the_table_is_the_same_from_either_solver(model, prompts, table):
    made = hs.probe_layers(model, prompts, where=("pre", "mid"), solver="sklearn")
    ours = table[table["where"].isin(["pre", "mid"])].reset_index(drop=True)
    assert made.drop(columns=["accuracy", "low", "high", "gain", "gain_low", "gain_high"]).equals(ours[DESCRIBED])
    assert (made["accuracy"] - ours["accuracy"]).abs().max() <= 0.005


DESCRIBED = ["layer", "kind", "mixer", "where", "target", "control", "chance", "n"]


def test_an_unknown_solver_is_an_error():
    with pytest.raises(ValueError, match='"auto", "torch" or "sklearn"'):
        inspect.unwrap(layerwise._checked)("liblinear")


def test_as_many_classes_as_samples_is_an_error():
    with pytest.raises(ValueError, match="6 samples of 6 classes"):
        hs.LayerwiseProbe().fit(np.random.default_rng(0).normal(size=(1, 6, 2)), np.arange(6))


# Gains


def test_the_interval_of_a_gain_holds_it(table):
    mid = table.query("where == 'mid'")
    assert (mid["gain_low"] <= mid["gain"]).all()
    assert (mid["gain"] <= mid["gain_high"]).all()
    planted_here = mid.query("layer == 1 and control == 'none'").iloc[0]
    assert planted_here["gain_low"] > 0.4
    last = mid.query("layer == 2 and control == 'none'").iloc[0]
    assert (last["gain"], last["gain_low"], last["gain_high"]) == (0, 0, 0)  # paired: right before and after


def test_gains_concentrate_at_the_middle_full_layer_that_reads_the_value(model, prompts):
    gains = hs.probe_gains(model, prompts)
    assert gains.columns.tolist() == ["control", "quantity", "layers", "gain", "low", "high", "seeds_above"]
    found = gains.query("control == 'none'").set_index("quantity")
    assert found["layers"].to_dict()["middle full"] == 1
    assert found.loc["middle full", "low"] > 0.4
    assert found.loc["middle full - all others", "low"] > 0.4
    assert found.loc["middle full - all others", "seeds_above"] == 1
    sums = found["gain"]
    assert sums["middle full - outer full"] == pytest.approx(sums["middle full"] - sums["outer full"])
    assert sums["all others"] == pytest.approx((sums["outer full"] + sums["outer efficient"]) / 2)
    for control in ("shuffled", "removed"):
        none = gains[gains["control"] == control].set_index("quantity").loc["middle full - all others"]
        assert none["low"] < 0.05
        assert none["gain"] < 0.2


def test_the_claim_fails_where_the_layer_that_reads_lies_outside(model, prompts):
    gains = hs.probe_gains(model, prompts, middle=(0.7, 1.0), controls=()).set_index("quantity")
    assert gains.loc["middle full - all others", "high"] < 0
    with pytest.raises(ValueError, match="no full layer of this model's 3"):
        hs.probe_gains(model, prompts, middle=(0.0, 0.3), controls=(), seeds=1)
    with pytest.raises(ValueError, match="nothing but full layers"):
        hs.probe_gains(model_of("full"), dataclasses.replace(prompts, tokens=prompts.tokens % 41), middle=(0.0, 1.0),
                       controls=(), seeds=1)  # fmt: skip
    with pytest.raises(ValueError, match="'pre' and 'mid'"):
        hs.probe_gains(model, prompts, where=("post",), controls=(), seeds=1)


# Answered prompts


def test_only_answered_prompts_are_probed(model, prompts):
    right = hs.needle_accuracy(model, prompts)
    table = hs.probe_layers(model, prompts, where=("mid",), controls=(), seeds=1, only_answered=True)
    assert table["n"].iloc[0] == round(right * 160)
    wrong = dataclasses.replace(prompts, answers=(prompts.answers + 1) % 24)
    with pytest.raises(ValueError, match="answers none of the 160 prompts"):
        hs.probe_layers(model, wrong, only_answered=True)
