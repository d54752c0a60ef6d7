"""Formation steps of curves that are known, of planted ladders, and of runs that never get there."""

from __future__ import annotations

import numpy as np
import pandas as pd
import planted
import pytest
from planted import needles

import hybridscope as hs

STEPS = [0, 100, 200, 400]


def tracked(*curves, kind: str = "full", samples: int = 0, spread: float = 0.0, seed: int = 0) -> pd.DataFrame:
    """A tracking table in which head h has mass curves[h] at STEPS; `samples` prompts that differ by `spread`, each
    by as much at every step."""
    away = spread * np.random.default_rng(seed).standard_normal(max(samples, 1))
    rows = [
        {"step": step, "tokens": 10 * step, "layer": 1, "site": 0, "head": head, "kind": kind, "mass": mass + away[i]}
        | ({"sample": i} if samples else {})
        for head, curve in enumerate(curves)
        for step, mass in zip(STEPS, curve, strict=True)
        for i in range(max(samples, 1))
    ]
    return pd.DataFrame(rows)


def formed(table: pd.DataFrame, threshold: float, **options) -> pd.Series:
    return hs.formation_step(table, [threshold], **options).iloc[0]


def test_the_first_crossing_is_interpolated_in_steps_and_tokens():
    table = hs.formation_step(tracked([0.0, 0.1, 0.5, 0.9]))
    assert table["threshold"].tolist() == [0.25, 0.5, 0.75]
    assert table["step"].to_numpy() == pytest.approx([137.5, 200, 325])
    assert table["tokens"].to_numpy() == pytest.approx([1375, 2000, 3250])
    assert (table["censored"] == "").all()
    assert table[["low", "high", "n"]].isna().all(axis=None)  # means say nothing about prompts


def test_a_fall_after_the_first_crossing_does_not_undo_it():
    assert formed(tracked([0.0, 0.6, 0.2, 0.9]), 0.5)["step"] == pytest.approx(100 * 0.5 / 0.6)


def test_the_best_head_of_each_step_counts():
    assert formed(tracked([0.0, 0.4, 0.4, 0.4], [0.0, 0.0, 0.8, 0.8]), 0.5)["step"] == pytest.approx(125)


def test_thresholds_are_absolute_and_a_run_that_never_gets_there_is_censored_not_dropped():
    table = hs.formation_step(tracked([0.0, 0.1, 0.2, 0.3]))
    assert table["censored"].tolist() == ["", "right", "right"]
    assert table["step"].tolist()[1:] == [400, 400]
    assert table["tokens"].tolist()[1:] == [4000, 4000]


def test_a_head_that_is_there_from_the_start_is_censored_on_the_left():
    row = formed(tracked([0.6, 0.7, 0.8, 0.9]), 0.5)
    assert (row["censored"], row["step"]) == ("left", 0)


def test_window_heads_do_not_form():
    both = pd.concat([tracked([0.0, 0.9, 0.9, 0.9], kind="window"), tracked([0, 0, 0.5, 0.9]).assign(layer=2)])
    assert formed(both, 0.5)["step"] == 200
    with pytest.raises(ValueError, match=r"no full-attention head in the table; it has: \['window'\]"):
        hs.formation_step(tracked([0.0, 0.9, 0.9, 0.9], kind="window"))


def test_the_interval_covers_the_true_step_as_often_as_it_says():
    """Mass rises by 0.1 in 100 steps, so the step is off by 1,000 steps a unit of the prompts' mean."""
    hits = 0
    for seed in range(100):
        row = formed(tracked([0.0, 0.1, 0.2, 0.4], samples=30, spread=0.05, seed=seed), 0.15, bootstrap=300)
        assert row["low"] <= row["step"] <= row["high"]
        hits += row["low"] <= 150 <= row["high"]
    assert 86 <= hits <= 100


def test_an_interval_that_may_lie_past_the_end_is_infinite():
    table = tracked([0.0, 0.1, 0.2, 0.5], samples=20, spread=0.1)
    row = formed(table, 0.5)
    assert row["high"] == np.inf
    assert row["low"] < 400
    assert row["n"] == 20


def test_one_prompt_has_no_interval():
    row = formed(tracked([0.0, 0.1, 0.2, 0.5], samples=1), 0.5)
    assert row["step"] == pytest.approx(400)
    assert row[["low", "high"]].isna().all()


def test_a_planted_ladder_forms_where_its_masses_say(tmp_path):
    """Masses 0.1, 0.4, 0.6 at steps 0, 10, 20, the same for every prompt: half is reached at 15, surely."""
    for step, mass in ((0, 0.1), (10, 0.4), (20, 0.6)):
        strength = np.log(mass / (1 - mass) * (planted.T - 1))
        planted.planted({0: float(strength), 2: 0.5}).save(tmp_path / f"step-{step}")
    table = hs.track(hs.ladder(tmp_path), needles(12), samples=True)
    row = formed(table, 0.5)
    assert row[["step", "low", "high"]].tolist() == pytest.approx([15, 15, 15], abs=1e-6)
    assert formed(table, 0.75)["censored"] == "right"
    means = hs.track(hs.ladder(tmp_path), needles(12))
    assert formed(means, 0.5)["step"] == pytest.approx(15, abs=1e-6)
    assert formed(table, 0.5, measure="copy")["censored"] == "left"  # 0.1 is five times an even share already


def test_a_ladder_that_does_not_change_never_forms(tmp_path):
    """Only an idle head differs, so that the steps are no duplicates."""
    for step in (0, 1, 2):
        planted.planted({0: 1.0, 3: 0.1 * step}).save(tmp_path / f"step-{step}")
    table = hs.track(hs.ladder(tmp_path), needles(8), top=1, samples=True)
    assert table.query("head == 0").groupby("step")["mass"].mean().nunique() == 1
    assert (hs.formation_step(table)["censored"] == "right").all()
    assert (hs.formation_step(table)["low"] == np.inf).all()


def test_tables_that_do_not_fit_are_errors_that_say_why():
    table = tracked([0.0, 0.1, 0.5, 0.9])
    with pytest.raises(ValueError, match="no column 'mass'"):
        hs.formation_step(table.drop(columns="mass"))
    with pytest.raises(ValueError, match="select one run first"):
        hs.formation_step(pd.concat([table, table]))
    with pytest.raises(ValueError, match="thresholds"):
        hs.formation_step(table, [])
    with pytest.raises(ValueError, match="missing for some prompts"):
        hs.formation_step(tracked([0.0, 0.1, 0.5, 0.9], samples=3).iloc[1:])
