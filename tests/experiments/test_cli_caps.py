"""`hybridscope cap`: what is measured is kept whatever its figure does, and lists mean what they say."""

from __future__ import annotations

from pathlib import Path

import commands
import planted
import pytest
from commands import run, written

from hybridscope import figures
from hybridscope.experiments import cli
from hybridscope.experiments.tables import read_table
from hybridscope.hooks.checkpoint import save

SOURCE = "planted/step-000020"


@pytest.fixture(scope="module")
def work(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("work")


@pytest.fixture
def here(work, monkeypatch) -> Path:
    monkeypatch.chdir(work)
    if not (work / "planted").exists():
        save(planted.planted(), work / SOURCE, {"step": 20, "data": commands.DATA})
        save(planted.planted(last="gdn"), work / "gdn/step-000020", {"step": 20, "data": commands.DATA})
    return work


def test_what_is_given_twice_is_run_once(here, capsys):
    lists = ["--window", "8,8,4", "--sinks", "0,0", "--kind", "full,full"]
    table = written(run(capsys, "cap", SOURCE, *lists, "--n", "4"), "cap")
    whole = table[table["distance_low"].isna()]
    assert whole["window"].iloc[1:].tolist() == [8, 4]
    assert (table["positions"] > 0).equals(table["log_ppl"].notna())


@pytest.mark.parametrize("name", ["cap_distance", "cap_curves"])
def test_a_table_is_kept_whatever_its_figures_do(here, capsys, monkeypatch, name):
    def fail(*args, **options):
        raise ValueError("this figure cannot be drawn")

    monkeypatch.setattr(figures, name, fail)
    with pytest.raises(SystemExit):
        cli.main(["cap", SOURCE, "--window", "8", "--n", "4", "--out", f"{name}.parquet"])
    assert "cannot be drawn" in capsys.readouterr().err
    table, facts = read_table(f"{name}.parquet")
    assert set(table["kind"]) == {"none", "window", "full"}
    assert facts["measurement"] == "cap"


def test_windows_by_default_are_no_narrower_than_a_convolution(here, capsys):
    """A sixteenth of 48 tokens is 3, the convolution 4 wide."""
    table = written(run(capsys, "cap", "gdn/step-000020", "--length", "48", "--n", "4"), "cap")
    assert table["window"].dropna().unique().tolist() == [24, 12, 6, 4]


@pytest.mark.parametrize("name", ["window", "sinks", "kind"])
def test_a_list_that_holds_nothing_is_a_mistake(here, capsys, name):
    assert f"--{name} ,: expected at least one" in commands.refused(capsys, "cap", SOURCE, f"--{name}", ",")
