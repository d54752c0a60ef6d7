"""The command line: every mistake is one line and exit status 2."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import commands
import pandas as pd
import pytest
import torch
from commands import refused, written
from safetensors.torch import load_file, save_file

from hybridscope.experiments import cli
from hybridscope.experiments.tables import read_table
from hybridscope.hooks.checkpoint import write_json

STEP = "ladder/step-000020"


@pytest.fixture(scope="module")
def work(tmp_path_factory) -> Path:
    return commands.fill(tmp_path_factory.mktemp("work"))


@pytest.fixture
def here(work, monkeypatch) -> Path:
    monkeypatch.chdir(work)
    return work


@pytest.fixture
def broken(work, tmp_path, monkeypatch) -> Path:
    """A copy of the planted ladder to spoil, as the working folder."""
    shutil.copytree(work / "planted", tmp_path / "ladder")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "ladder"


def spoil(file: Path) -> None:
    weights = load_file(file)
    weights["embed.weight"][0, 0] = torch.nan
    save_file(weights, file)


@pytest.mark.parametrize("command", ["probe", "cap", "heads", "influence", "perplexity"])
def test_a_missing_checkpoint(broken, capsys, command):
    assert "ladder/step-000099" in refused(capsys, command, "./ladder/step-000099")


def test_a_folder_that_is_no_checkpoint(broken, capsys):
    assert "ladder is a ladder; open it with hs.ladder" in refused(capsys, "probe", "ladder")


@pytest.mark.parametrize("command", ["probe", "cap", "heads", "influence", "perplexity"])
def test_a_truncated_checkpoint(broken, capsys, command):
    file = broken / "step-000020/model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    error = refused(capsys, command, STEP)
    assert "model.safetensors: truncated" in error


@pytest.mark.parametrize("command", ["probe", "heads"])
def test_weights_that_are_no_numbers(broken, capsys, command):
    spoil(broken / "step-000020/model.safetensors")
    assert "embed.weight holds NaN" in refused(capsys, command, STEP)
    assert "embed.weight holds NaN" in refused(capsys, "track", "ladder")


def test_a_config_with_an_unknown_key(here, capsys):
    error = refused(capsys, "train", "tiny.toml", "--set", "train.stpes=4", "--out", "elsewhere")
    assert "'train.stpes'; the nearest valid key is 'train.steps'" in error
    assert "no such config" in refused(capsys, "train", "nowhere.toml")


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("data.length=1", "data.length=1: expected >= 2"),
        ("data.length=20", "data.length=20: 4 needles, each asked again, take 25"),
        ("model.n_heads=3", "d_model=128 is not a multiple of n_heads=3"),
        ("model.mixers.hawk={width = 33}", "hawk width=33 must be a multiple"),
    ],
)
def test_a_dry_run_of_a_config_that_cannot_run_prints_nothing_else(here, capsys, override, named):
    pattern = 'model.pattern=["hawk", "full"]'
    with pytest.raises(SystemExit) as stop:
        cli.main(["train", "demo", "--dry-run", "--set", pattern, "--set", override])
    out, err = capsys.readouterr()
    assert stop.value.code == 2
    assert named in err
    assert out == ""


def test_another_run_in_the_folder(here, capsys):
    error = refused(capsys, "train", "tiny.toml", "--set", "train.lr=1.0", "--out", "runs/tiny/ladder")
    assert "holds another run" in error


@pytest.mark.parametrize("command", ["probe", "cap", "heads", "influence", "perplexity"])
def test_a_prompt_longer_than_the_context(broken, capsys, command):
    error = refused(capsys, command, STEP, "--length", "49")
    assert "length=49: longer than the model's context of 48" in error


@pytest.mark.parametrize("command", ["probe", "heads"])
def test_a_needle_that_does_not_fit(broken, capsys, command):
    assert "need 15 tokens" in refused(capsys, command, STEP, "--length", "14")
    assert "need 15 tokens" in refused(capsys, "track", "ladder", "--length", "14")


def test_an_empty_ladder(broken, capsys):
    Path("empty").mkdir()
    assert "empty: an empty ladder" in refused(capsys, "track", "empty")
    assert "nowhere: no such folder" in refused(capsys, "track", "nowhere")


def test_a_ladder_with_two_identical_steps(broken, capsys):
    shutil.copy(broken / "step-000000/model.safetensors", broken / "step-000010/model.safetensors")
    assert "steps 0 and 10 hold identical weights" in refused(capsys, "track", "ladder")


def test_a_ladder_with_a_broken_step_is_tracked_without_it(broken, capsys):
    spoil(broken / "step-000010/model.safetensors")
    (broken / "step-000000/config.json").unlink()
    with pytest.warns(UserWarning, match="left out") as caught:
        cli.main(["track", "ladder", "--n", "4"])
    assert {str(w.message).split(" left out")[0].split()[-1] for w in caught} == {"0", "10"}
    assert written(capsys.readouterr().out, "track")["step"].unique().tolist() == [20]


def test_a_step_whose_queries_are_no_numbers_is_left_out_of_the_drift_too(broken, capsys):
    file = broken / "step-000010/model.safetensors"
    weights = load_file(file)
    weights["blocks.1.attn.q_proj.weight"][0, 0] = torch.nan
    save_file(weights, file)
    with pytest.warns(UserWarning, match="step 10 left out"):
        cli.main(["track", "ladder", "--n", "4", "--activations"])
    assert written(capsys.readouterr().out, "track")["step"].unique().tolist() == [0, 20]
    for name in ("drift", "activations"):
        assert read_table(f"runs/track/ladder-{name}.parquet")[0]["step"].unique().tolist() == [0, 20]


def test_a_model_that_answers_nothing_has_no_retrieval_heads(broken, capsys):
    error = refused(capsys, "heads", "ladder/step-000000", "--n", "8")
    assert "answers none of the 8 prompts; --all-prompts" in error
    with pytest.warns(UserWarning, match="ablation has nothing to take away"):
        cli.main(["heads", "ladder/step-000000", "--n", "8", "--all-prompts"])
    assert set(written(capsys.readouterr().out, "heads")["n"]) == {8}


def test_a_checkpoint_without_a_language_has_nothing_to_be_asked_in(broken, capsys):
    config = json.loads((broken / "step-000020/config.json").read_text())
    del config["data"]
    write_json(broken / "step-000020/config.json", config)
    assert "no token language" in refused(capsys, "probe", STEP)
    assert "needs a tokenizer" in refused(capsys, "probe", STEP, "--haystack", "essay")


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (["cap", STEP, "--kind", "recurrent"], "no 'recurrent' sites"),
        (["cap", STEP, "--window", "8,x"], "--window x: expected a whole number"),
        (["cap", STEP, "--window", "0"], "windows=[0]"),
        (["cap", STEP, "--rank"], "--rank: ranks layers that are capped one at a time; give --by-layer as well"),
        (["cap", STEP, "--by-layer", "--rank", "--kind", "full,window"], "--kind full,window: --rank ranks the layers"),
        (["probe", STEP, "--n", "10"], "at least 5 samples"),
        (["probe", STEP, "--length", "0"], "--length=0: expected >= 1"),
        (["probe", STEP, "--values", "0"], "--values=0: expected >= 1"),
        (["influence", STEP, "--n", "0"], "--n=0: expected >= 1"),
        (["perplexity", STEP, "--context", "0"], "--context=0: expected >= 1"),
        (["perplexity", STEP, "--context", "47"], "--context 47: documents of 48 tokens are too short"),
        (["cost", "some/where"], "some/where"),
        (["cost", "wang2025"], "a sweep of 62 runs; name one: --only RUN"),
        (["cost", "demo", "--only", "s1"], "--only s1: demo is one run, not a sweep"),
        (["cost", STEP, "--only", "s1"], f"--only s1: {STEP} is a checkpoint, not a config"),
        (["probe", STEP, "--out", "probe.png"], "expected a .parquet file"),
        (["plot", "none.parquet"], "none.parquet: no such table"),
        (["plot", f"{STEP}/config.json"], "not a Parquet table"),
    ],
)
def test_other_mistakes(broken, capsys, args, named):
    assert named in refused(capsys, *args)


def test_a_table_without_a_figure(broken, capsys):
    pd.DataFrame({"x": [1]}).to_parquet("t.parquet")
    assert "measurement None has no figure" in refused(capsys, "plot", "t.parquet")


def test_an_interrupt_is_no_traceback(here, capsys, monkeypatch):
    monkeypatch.setattr("hybridscope.experiments.train.train", lambda *a, **k: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(SystemExit) as stop:
        cli.main(["train", "tiny.toml"])
    assert stop.value.code == 130
    assert capsys.readouterr().err.strip() == "interrupted"
