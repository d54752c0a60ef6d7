"""bench probe on a CPU at a tiny size: both solvers on the same data, the same accuracy, a table. No timings."""

from __future__ import annotations

import json

import pytest

from hybridscope.experiments import cli
from hybridscope.experiments.bench import probe, tables


def test_it_runs_compares_and_prints_a_table(tmp_path, capsys):
    file = tmp_path / "probe.json"
    cli.main(["bench", "probe", "--out", str(file), "--device", "cpu", "--problem", "3,200,24,4,2"])
    result = json.loads(file.read_text())
    assert [row["layer"] for row in result["rows"]] == [0, 1, 2]
    assert result["summary"]["cpu"]["accuracy_off"] <= 0.005
    assert abs(result["summary"]["cpu"]["loss_off"]) <= 1e-4
    seconds = result["seconds"]
    assert result["summary"]["cpu"]["ratio"] == pytest.approx(seconds["scikit-learn"] / seconds["cpu"])
    assert all(row["seconds"] > 0 for row in result["rows"])
    accuracy = [row["accuracy"] for row in result["rows"]]
    assert accuracy[0] < 0.45 < accuracy[2]  # from chance upwards
    printed = capsys.readouterr().out
    assert tables.markdown(tables.load(file)) in printed
    assert "3 layers x 200 samples x 24 x 4 classes x 2 seeds" in printed


def test_layers_beyond_the_budget_are_named_and_not_compared(tmp_path):
    result = probe.bench(tmp_path / "probe.json", (2, 100, 8, 2, 1), "cpu", budget=0.0)
    assert result["not_run"] == [0, 1]
    assert result["summary"]["cpu"]["ratio"] is None
    assert "Not run with scikit-learn: layers 0, 1." in tables.markdown(result)
    result["rows"], result["not_run"] = [{"layer": 0, "seconds": 9.0, "accuracy": 0.5, "ours": {"cpu": OURS}}], [1]
    result["seconds"] = {"scikit-learn": 3.0, "cpu": 2.0}
    assert probe.compare(result)["summary"]["cpu"]["ratio"] == 3.0  # one layer in 3 s; two in 2 s


OURS = {"accuracy": 0.5, "loss_off": 0.0, "iterations": 1}


@pytest.mark.parametrize(("text", "why"), [("1,2,3", "expected layers,samples"), ("1,9,3,2,1", "five samples each")])
def test_a_problem_that_is_none(text, why, capsys):
    with pytest.raises(SystemExit):
        cli.main(["bench", "probe", "--device", "cpu", "--problem", text])
    assert why in " ".join(capsys.readouterr().err.split())
