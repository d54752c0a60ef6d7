"""Layer importance: the layer that was given the retrieval comes first, by as much as its attention says."""

from __future__ import annotations

import inspect
import math

import numpy as np
import planted
import pytest
import torch
from helpers import model_of
from planted import LANGUAGE, STRONG, T, needles

import hybridscope as hs
from hybridscope.probes.needles import score_answers


@pytest.fixture(scope="module")
def model():
    return planted.planted()


@pytest.fixture(scope="module")
def prompts():
    return needles(30)


@pytest.fixture(scope="module")
def hybrid():
    """Three full sites, one of them beside a window, and prompts in its language."""
    made = hs.make_needles(6, 24)
    made.tokens %= 41
    made.answers %= 41
    return model_of("full", "swa:4+full", "gdn", "nope", n_kv_heads=2), made


def expected_loss(prompts, window: int) -> torch.Tensor:
    """Loss [N] of the planted model, layer 1 seeing `window` keys: from its attention, e**STRONG on the value and 1 on
    every other visible key, the values read, and the last norm."""
    V, D = LANGUAGE.vocab_size, 3 * LANGUAGE.vocab_size
    out = []
    for tokens, (value, _), answer in zip(
        prompts.tokens, prompts.spans["value"].tolist(), prompts.answers, strict=True
    ):
        weight = torch.ones(T, dtype=torch.float64)
        weight[value] = math.exp(STRONG)
        weight[: T - window] = 0
        before = torch.cat([tokens[:1], tokens[:-1]])
        size = torch.where(tokens == before, (1.5 / 2) ** 0.5, 1.0).double()  # such a token has a longer residual
        read = torch.zeros(V, dtype=torch.float64).index_add(0, tokens, weight / weight.sum() * size)
        logits = read * (D / (1.5 + read.square().sum())) ** 0.5
        out.append(-logits.log_softmax(0)[answer[0]])
    return torch.stack(out)


def test_the_layer_that_retrieves_comes_first_by_its_closed_form(model, prompts):
    table = hs.layer_importance(model, prompts, windows=[10, 30])
    uncapped = expected_loss(prompts, T).mean().item()
    for window in (10, 30):
        first, second = table[table["window"] == window].itertuples()
        assert (first.layer, first.rank, first.mixer) == (1, 1, "nope")
        assert (second.layer, second.rank, second.mixer) == (2, 2, "full")
        loss = expected_loss(prompts, window).mean().item()
        assert first.answer_loss == pytest.approx(loss, rel=1e-9)
        assert first.importance == pytest.approx(loss - uncapped, rel=1e-9)
        assert first.importance > 0.1
        assert second.importance == 0
        assert first.delta_needle_accuracy == pytest.approx((prompts.distance < window).float().mean().item() - 1)


@pytest.mark.parametrize("others", ["uncapped", "capped"])
def test_it_is_the_difference_that_one_cap_makes(hybrid, others):
    model, made = hybrid
    keys = [(0, 0), (1, 1), (3, 0)]
    table = hs.layer_importance(model, made, windows=[5], sinks=(0, 2), others=others)
    assert len(table) == 6
    for row in table.itertuples():
        at = (row.layer, row.site)
        with model.cap({key: 5 for key in keys if others == "capped" or key == at}, sinks=row.sinks):
            capped = score_answers(model, made)[1].mean().item()
            with model.cap({at: None}):
                free = score_answers(model, made)[1].mean().item()
        assert row.importance == pytest.approx(capped - free, abs=1e-12)
        assert row.answer_loss == pytest.approx(capped if others == "uncapped" else free, abs=1e-12)
        assert row.importance != 0
    for sinks in (0, 2):
        rows = table[table["sinks"] == sinks]
        assert set(zip(rows["layer"], rows["site"], strict=True)) == set(keys)
        assert rows["rank"].tolist() == [1, 2, 3]
        assert rows["importance"].is_monotonic_decreasing
    assert not any(site.active for site in model.sites)


@pytest.mark.parametrize(("others", "expected"), [("uncapped", 1 + 3), ("capped", 1 + 1 + 3)])
def test_one_pass_per_layer_and_none_for_a_cap_that_cannot_bind(hybrid, others, expected, monkeypatch):
    model, made = hybrid
    passes = []
    hidden = type(model).hidden
    monkeypatch.setattr(type(model), "hidden", lambda self, *args: passes.append(1) or hidden(self, *args))
    table = hs.layer_importance(model, made, windows=[5, 24], others=others)
    assert len(passes) == expected
    free = table[table["window"] == 24]
    assert not free["binds"].any()
    assert (free["importance"] == 0).all()
    assert table[table["window"] == 5]["binds"].all()


def test_a_single_layer_kept_among_capped_ones_is_the_model_itself(hybrid):
    model, made = hybrid
    alone, kept = (
        hs.layer_importance(model, made, windows=[3], kind="window", others=others) for others in ("uncapped", "capped")
    )
    assert len(alone) == len(kept) == 1
    assert alone["importance"].iloc[0] == kept["importance"].iloc[0] != 0
    assert kept["answer_loss"].iloc[0] == score_answers(model, made)[1].mean().item()


def test_recurrent_layers_rank_without_sinks(hybrid):
    model, made = hybrid
    table = hs.layer_importance(model, made, windows=[8], sinks=(0, 4), kind="recurrent")
    assert table[["layer", "sinks", "rank"]].to_numpy().tolist() == [[2, 0, 1]]


def test_loss_on_answers_is_the_mean_over_each_samples_own_tokens(hybrid):
    """Answers of one, two and three tokens."""
    model, made = hybrid
    made = made[:3]
    made.answer_rows = torch.tensor([[20, -1, -1], [20, 21, -1], [20, 21, 22]])
    made.answers = torch.tensor([[3, -1, -1], [4, 5, -1], [6, 7, 8]])
    logp = model(made.tokens).log_softmax(-1)
    expected = [
        -torch.stack([logp[i, 20 + k, made.answers[i, k]] for k in range(i + 1)]).mean().item() for i in range(3)
    ]
    correct, loss = score_answers(model, made, batch=2)
    assert loss.tolist() == pytest.approx(expected, abs=1e-12)
    assert correct.shape == (3,)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"kind": "conv"}, "no 'conv' sites; it has: window, full"),
        ({"windows": []}, "windows"),
        ({"windows": [0]}, "windows"),
        ({"windows": 8}, "windows=8: expected a list of whole numbers >= 1"),
        ({"windows": [8.0]}, r"windows=\[8.0\]: expected"),
        ({"sinks": (-1,)}, r"sinks=\(-1,\): expected a list of whole numbers >= 0"),
        ({"sinks": []}, r"sinks=\[\]: expected"),
        ({"sinks": [True]}, r"sinks=\[True\]: expected"),
        ({"sinks": None}, "sinks=None: expected"),
        ({"batch": 1.5}, "batch=1.5: expected"),
    ],
)
def test_what_cannot_be_ranked_is_an_error(model, prompts, options, named):
    rank = inspect.unwrap(hs.layer_importance)  # without the checks of types that the tests add
    with pytest.raises(ValueError, match=named):
        rank(model, prompts, **{"windows": [8], **options})


def test_settings_that_are_given_twice_are_ranked_once(hybrid):
    model, made = hybrid
    table = hs.layer_importance(model, made, windows=np.array([5, 3, 5]), sinks=[2, 2])
    assert table[["window", "sinks", "rank"]].to_numpy().tolist() == [
        [w, 2, rank] for w in (5, 3) for rank in (1, 2, 3)
    ]


def test_a_capped_model_is_refused(hybrid):
    model, made = hybrid
    with model.cap(window=2), pytest.raises(ValueError, match="capped at 2 already; expected a model outside `cap`"):
        hs.layer_importance(model, made, windows=[5])


def test_options_are_named_where_they_are_wrong(model, prompts):
    rank = inspect.unwrap(hs.layer_importance)  # without the checks of types that the tests add
    with pytest.raises(ValueError, match="others='free'"):
        rank(model, prompts, windows=[8], others="free")
