"""The main job end to end: `hybridscope demo` trains a hybrid that learns to retrieve, and the measurements say so.

Seeds are fixed; the assertions leave margins, since other machines round otherwise.
"""

import pandas as pd
import pytest

import hybridscope as hs
from hybridscope.experiments.tables import read_table


def test_the_model_learns_to_retrieve(demo) -> None:
    n = demo.numbers
    assert n["probe_chance"] < 1 / 30  # at least 32 candidates: guessing is far from every threshold
    assert n["needle_accuracy_first"] < 0.15
    assert n["needle_accuracy_final"] > 0.9
    assert n["best_head_mass_first"] < 0.1
    assert n["best_head_mass_final"] > 0.5
    assert n["best_head_entropy_final"] < n["best_head_entropy_first"] - 0.5


def test_capping_full_layers_loses_the_needle_and_window_layers_do_not_matter(demo) -> None:
    assert demo.numbers["accuracy_full_capped"] < 0.2
    assert demo.numbers["accuracy_window_capped"] > 0.8
    caps, _ = read_table(demo.folder / "tables/caps.parquet")
    loose = caps.query("kind == 'window' and window >= 8")
    assert not loose["binds"].any()
    assert (loose["delta_needle_accuracy"] == 0).all()


def test_the_probe_reads_the_needle_after_a_full_layer_only(demo) -> None:
    probe, _ = read_table(demo.folder / "tables/probe.parquet")
    real = probe.query("control == 'none'")
    before = real.query("layer == 0")["accuracy"].max()
    assert real.query("kind == 'full' and where != 'pre'")["accuracy"].max() > 0.9
    assert before < 0.2  # a window of 8 cannot see the needle
    controls = probe.query("control != 'none'")
    assert set(controls["control"]) == {"shuffled", "removed"}
    assert controls["accuracy"].max() < 0.15


def test_heads_drift_to_their_final_weights(demo) -> None:
    drift, _ = read_table(demo.folder / "tables/drift.parquet")
    mean = drift.groupby("step")["qk_rel"].mean()
    assert mean.iloc[-1] == 0
    assert mean.iloc[0] > 0.5
    assert (mean.diff().dropna() < 0.05).all()  # falls, give or take noise


def test_ladder_tables_and_figures_are_there(demo) -> None:
    ladder = hs.ladder(demo.folder / "ladder")
    assert len(ladder) >= 12
    assert ladder.steps[0] == 0
    names = ("probe", "caps", "track", "drift", "heads", "influence")
    for name in names:
        table, facts = read_table(demo.folder / f"tables/{name}.parquet")
        assert isinstance(table, pd.DataFrame)
        assert len(table)
        assert facts["versions"]["torch"]
        assert facts["command"].startswith("hybridscope")
    assert len(list((demo.folder / "figures").glob("*.png"))) >= 4


def test_influence_reaches_the_needle(demo) -> None:
    """Beyond the windows' reach only the full layers carry influence, and it is not nothing."""
    influence, _ = read_table(demo.folder / "tables/influence.parquet")
    far = influence.query("distance > 20")
    assert (far["influence"] > 0).all()
    assert far["influence"].max() > 10 * influence["influence"].min()


@pytest.mark.slow
def test_another_seed_learns_too(tmp_path) -> None:
    from hybridscope.experiments.demo import demo as run

    numbers = run(tmp_path / "demo", ["train.seed=1"], progress=False).numbers
    assert numbers["needle_accuracy_final"] > 0.9
    assert numbers["accuracy_full_capped"] < 0.2
