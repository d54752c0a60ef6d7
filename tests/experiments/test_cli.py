"""The command line: every command leaves its table and figure."""

from __future__ import annotations

import json
from pathlib import Path

import commands
import english
import numpy as np
import pandas as pd
import planted
import pytest
from commands import DATA, PNG, refused, run, written
from planted import STRONG
from transformers import LlamaConfig, LlamaForCausalLM

import hybridscope as hs
from hybridscope.experiments import cli
from hybridscope.experiments.tables import read_table
from hybridscope.hooks.checkpoint import Checkpoint, save


@pytest.fixture(scope="module")
def work(tmp_path_factory) -> Path:
    return commands.fill(tmp_path_factory.mktemp("work"))


@pytest.fixture
def here(work, monkeypatch) -> Path:
    monkeypatch.chdir(work)
    return work


# Help


@pytest.mark.parametrize("command", [None, *cli.COMMANDS])
def test_help(capsys, command):
    with pytest.raises(SystemExit) as stop:
        cli.main([*([] if command is None else [command]), "--help"])
    assert stop.value.code == 0
    out = " ".join(capsys.readouterr().out.replace("│", " ").split())
    if command is None:
        assert all(f" {name} " in out for name in cli.COMMANDS)
    else:
        first = cli.COMMANDS[command].__doc__.splitlines()[0]
        assert " ".join(first.split()[:5]) in out
        for name in [n.removesuffix("_") for n in cli.COMMANDS[command].__annotations__ if n != "return"]:
            assert name.replace("_", "-") in out.lower()


def test_a_command_that_is_not_there(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["prob"])
    assert stop.value.code == 2
    assert "probe" in capsys.readouterr().err


# Commands


def test_cost(here, capsys):
    source = "runs/tiny/ladder/step-000006"
    context = Checkpoint(here / source, 6).config()["model"]["context"] or 64
    out = run(capsys, "cost", source, "--length", "4,8", "--batch", "2")
    table = written(out, "cost", here / source)
    assert table["length"].tolist() == [4, 4, 8, 8]
    assert (table["measured_kv_bytes"] == table["kv_bytes"]).all()
    by_config = written(run(capsys, "cost", "tiny.toml", "--no-measure", "--length", "4,8", "--batch", "2"), "cost")
    assert by_config["kv_bytes"].tolist() == table["kv_bytes"].tolist()
    assert by_config["decode_ms"].isna().all()
    assert "context" in refused(capsys, "cost", source, "--length", str(10 * context))
    tokens = 2 * 2 * 4 * 4  # keys and values of 2 heads of 4, fp32
    LlamaForCausalLM(LlamaConfig(
        vocab_size=20, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
    )).save_pretrained(here / "llama")  # fmt: skip
    foreign = written(run(capsys, "cost", "llama", "--no-measure", "--length", "4"), "cost")
    assert foreign["kv_bytes"].tolist() == [4 * tokens] * 2


def test_cost_of_a_run_of_a_sweep(here, capsys):
    kept = {}
    for run_of in ("340m-gdn-12to1", "340m-gdn-3to1"):
        out = run(capsys, "cost", "wang2025", "--only", run_of, "--no-measure", "--length", "64")
        assert f"cost/wang2025-{run_of}.parquet" in out
        hybrid, full = written(out, "cost")["kv_bytes"]
        kept[run_of] = 24 * hybrid // full
    assert kept == {"340m-gdn-12to1": 2, "340m-gdn-3to1": 8}  # full layers of 24: one in every N


def test_train_leaves_a_ladder_and_goes_on_where_it_is(here, capsys):
    ladder = hs.ladder("runs/tiny/ladder")
    assert ladder.steps == [0, 3, 6]
    assert run(capsys, "train", "tiny.toml", "--set", "train.steps=6", "--set", "train.saves=2").strip() == str(
        Path("runs/tiny/ladder")
    )


def test_a_dry_run_prints_the_config_and_writes_nothing(here, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    out = run(capsys, "train", "demo", "--dry-run", "--set", "train.seed=5")
    resolved = json.loads(out[: out.index("\n}") + 2])
    assert resolved["train"]["seed"] == 5
    assert "parameters" in out
    assert "swa:8" in out
    assert not list(tmp_path.iterdir())


def test_probe(here, capsys):
    source = "runs/tiny/ladder/step-000006"
    out = run(capsys, "probe", source, "--n", "60", "--seeds", "2")
    table = written(out, "probe", here / source)
    assert set(table["control"]) == {"none", "shuffled", "removed"}
    assert set(table["layer"]) == {0, 1}
    assert (table["n"] == 60).all()
    assert Path("runs/probe/tiny-ladder-step-000006.parquet").is_file()


def test_probe_of_what_the_mixers_add_alone(here, capsys):
    out = run(
        capsys, "probe", "planted/step-000020", "--n", "80", "--seeds", "1", "--where", "delta,mid", "--batch", "16"
    )
    assert written(out, "probe")["where"].unique().tolist() == ["delta", "mid"]


def test_heads_by_decoding_and_from_the_published_row(here, capsys):
    source = "planted/step-000020"
    decoded = written(run(capsys, "heads", source, "--n", "8", "--generate", "--k", "1"), "heads")
    assert decoded["score"].iloc[0] == 1
    early = run(capsys, "heads", source, "--n", "8", "--score", "mass", "--rows", "published", "--k", "0")
    assert written(early, "heads")["score"].max() < 0.1


def test_cap_by_kind_and_by_layer(here, capsys):
    source = "planted/step-000020"
    table = written(
        run(capsys, "cap", source, "--window", "2,16", "40", "--sinks", "0", "--n", "8"), "cap", here / source
    )
    assert table["window"].dropna().unique().tolist() == [2, 16, 40]
    assert set(table["kind"]) == {"none", "window", "full"}
    out = run(capsys, "cap", source, "--window", "8", "--kind", "full", "--by-layer", "--n", "8", "--out", "b.parquet")
    assert written(out, "cap")["layer"].tolist() == [-1, 1, 1, 2, 2]


def test_cap_by_distance(here, capsys):
    """On the planted model: all needles within the cap, none beyond it (layer 1 reads them in one stride)."""
    args = ["--kind", "full", "--window", "16,40,99", "--sinks", "0", "--n", "24", "--out", "distance.parquet"]
    out = run(capsys, "cap", "planted/step-000020", *args)
    rows = written(out, "cap").dropna(subset="distance_low")
    assert (rows["needle_accuracy"] == rows["within"]).all()
    assert set(rows["within"]) == {0, 1}
    grid = out[out.index("needle accuracy by tokens back") :].splitlines()
    assert grid[1].split() == ["kind", "window", "sinks", "0-15", "16-39", "40-44"]
    assert [line.split() for line in grid[2:6]] == [
        ["none", "-", "0", "1.00", "1.00", "1.00"],
        ["full", "16", "0", "1.00", "(0.00)", "(0.00)"],
        ["full", "40", "0", "1.00", "1.00", "(0.00)"],
        ["full", "99", "0", "1.00", "1.00", "1.00"],
    ]
    drawn = Path(grid[6])
    assert drawn == Path("distance-distance.png")
    before = drawn.read_bytes()
    assert run(capsys, "plot", "distance.parquet", "--by-distance", "--out", str(drawn)).strip() == str(drawn)
    assert drawn.read_bytes() == before


def test_cap_ranks_layers(here, capsys):
    source = "planted/step-000020"
    table = written(run(capsys, "cap", source, "--by-layer", "--rank", "--window", "8,48"), "importance", here / source)
    assert table[["window", "sinks", "rank", "layer"]].to_numpy().tolist() == [
        [w, s, rank, rank] for w in (8, 48) for s in (0, 4) for rank in (1, 2)
    ]
    assert table["binds"].tolist() == [True] * 4 + [False] * 4
    assert table["importance"].iloc[0] > 1
    assert Path("runs/importance/planted-step-000020.parquet").is_file()
    ladder = "runs/tiny/ladder/step-000006"
    table = written(run(capsys, "cap", ladder, "--by-layer", "--rank", "--kind", "window", "--n", "4"), "importance")
    assert table["mixer"].unique().tolist() == ["swa:4"]


def test_heads(here, capsys):
    out = run(capsys, "heads", "planted/step-000020", "--n", "16", "--k", "1", "--draws", "2")
    table = written(out, "heads", here / "planted/step-000020")
    assert table[["layer", "head"]].iloc[0].tolist() == [1, 0]
    assert "answers 16 of 16" in out
    accuracy = {
        line.split()[0]: float(line.split()[2]) for line in out.splitlines() if line.split()[0] in ("none", "top")
    }
    assert accuracy == {"none": 1, "top": 0}


def test_heads_by_qr_score_and_as_published(here, capsys):
    options = ["planted/step-000020", "--n", "16", "--k", "1", "--draws", "2"]
    out = run(capsys, "heads", *options, "--score", "qr")
    assert written(out, "heads")[["layer", "head"]].iloc[0].tolist() == [1, 0]
    assert "effect, top over random: 1 [1, 1]" in out
    out = run(capsys, "heads", *options, "--compat", "qiao2026")
    assert (written(out, "heads")["score"] < 0.1).all()  # from the row before the question's last
    assert 'goes with score="mass"' in refused(capsys, "heads", *options, "--score", "copy", "--compat", "qiao2026")


def test_track_says_when_heads_form(here, capsys, tmp_path):
    """Masses at steps 0, 10, 20 are those of planted strengths 0, 2 and STRONG."""
    out = run(capsys, "track", "planted", "--n", "8", "--top", "1", "--out", str(tmp_path / "t.parquet"))
    written(out, "track")
    formed, facts = read_table(tmp_path / "t-formation.parquet")
    assert facts["measurement"] == "formation"
    middle, end = planted.mass_of(2.0), planted.mass_of(STRONG)
    half = formed.query("threshold == 0.5").iloc[0]
    assert half["step"] == pytest.approx(10 + 10 * (0.5 - middle) / (end - middle), abs=1e-6)
    assert half["low"] == pytest.approx(half["high"])
    again = ["--formed", str(tmp_path / "t-formation.parquet"), "--out", str(tmp_path / "again.png")]
    run(capsys, "plot", str(tmp_path / "t.parquet"), *again)
    assert (tmp_path / "again.png").read_bytes()[:4] == PNG


@pytest.mark.parametrize(("heads", "count"), [("each", 3), ("all", 24)])
def test_track_other_heads(here, capsys, tmp_path, heads, count):
    args = ["track", "planted", "--n", "8", "--top", "1", "--heads", heads, "--out", str(tmp_path / "t.parquet")]
    assert len(written(run(capsys, *args), "track")) == count


def test_track_with_activations(here, capsys, tmp_path):
    args = ["track", "planted", "--n", "8", "--top", "1", "--out", str(tmp_path / "t.parquet")]
    run(capsys, *args, "--reference", "final", "--activations")
    for name, column in (("drift", "qk_rel"), ("activations", "score_rel")):
        table, facts = read_table(tmp_path / f"t-{name}.parquet")
        assert facts["settings"]["reference"] == "final"
        values = table.set_index("step")[column]
        assert values[0] > values[10] > values[20] == 0


def test_track_with_its_drift_and_again(here, capsys):
    args = ["track", "planted", "--n", "8", "--top", "2"]
    table = written(run(capsys, *args), "track")
    assert sorted(table["step"].unique()) == [0, 10, 20]
    drift, facts = read_table("runs/track/planted-drift.parquet")
    assert facts["measurement"] == "drift"
    assert set(zip(drift["layer"], drift["head"], strict=True)) == {(1, 0), (1, 2)}
    assert written(run(capsys, *args), "track").equals(table)
    error = refused(capsys, *args, "--seed", "1")
    assert "holds another measurement" in error


@pytest.mark.parametrize("command", ["influence", "perplexity"])
def test_influence_and_perplexity(here, capsys, command):
    source = "runs/tiny/ladder/step-000006"
    table = written(run(capsys, command, source, "--n", "4"), command, here / source)
    assert len(table) > 3


def test_perplexity_over_key_tokens_names_their_evaluator(here, capsys, tmp_path):
    model = planted.planted()
    model.unembed.weight *= 60
    save(model, tmp_path / "judge", {"data": DATA})
    judge, out = str(tmp_path / "judge"), tmp_path / "p.parquet"
    args = ["perplexity", "planted/step-000020", "--n", "16", "--context", "12", "--out", str(out)]
    printed = run(capsys, *args, "--evaluator", judge)
    written(printed, "perplexity")
    assert "what all context is worth over the last tokens alone" in printed
    table, facts = read_table(tmp_path / "p-longppl.parquet")
    assert table["evaluator"].tolist() == [judge]
    assert facts["settings"]["evaluator"] == judge
    out.unlink()
    assert "none of" in refused(capsys, *args, "--evaluator", "planted/step-000000")


def test_fit(here, capsys, tmp_path):
    N, D = (x.ravel() for x in np.meshgrid([1e7, 3e7, 6e7, 1e8], np.geomspace(1e9, 1e10, 5)))
    runs = pd.DataFrame({"parameters": N, "tokens": D, "loss": 3000 / N**0.45 + 1100 / D**0.3})
    runs.to_csv(tmp_path / "runs.tsv", sep="\t", index=False)
    out = run(capsys, "fit", str(tmp_path / "runs.tsv"), "--bootstrap", "3", "--out", str(tmp_path / "fit.parquet"))
    assert "15 runs" in out
    fitted = read_table(tmp_path / "fit.parquet")[0].set_index("parameter")["value"]
    assert fitted[["alpha", "beta"]].tolist() == pytest.approx([0.45, 0.3], abs=0.01)
    assert read_table(tmp_path / "fit-validation.parquet")[0]["error"].abs().max() < 0.01
    assert "no such table" in refused(capsys, "fit", str(tmp_path / "other.csv"))
    assert "no column 'parameters'" in refused(capsys, "fit", str(tmp_path / "fit.parquet"))


@pytest.mark.parametrize(
    ("command", "options"), [("probe", ["--n", "60", "--seeds", "1"]), ("perplexity", ["--n", "4"])]
)
def test_every_measurement_takes_a_model_with_a_tokenizer(tmp_path, capsys, monkeypatch, command, options):
    monkeypatch.chdir(tmp_path)
    model = hs.HybridLM(hs.HybridConfig(["swa:4", "full"], 2, 16, 2, 430, d_ff=8))
    model.tokenizer = english.tokenizer("bytes")
    model.save("model")
    assert len(written(run(capsys, command, "model", "--length", "200", *options), command)) > 3


@pytest.mark.parametrize("name", ["probe", "cap", "rank", "heads", "track", "influence", "perplexity"])
def test_plot_draws_what_belongs_to_a_table(here, capsys, tmp_path, name):
    source = "planted" if name == "track" else "planted/step-000020"
    options = {"probe": ["--n", "80", "--seeds", "1"], "cap": ["--window", "4,16"]}.get(name, ["--n", "8"])
    table = tmp_path / f"{name}.parquet"
    command = ["cap", "--by-layer", "--rank"] if name == "rank" else [name]
    run(capsys, *command, source, *options, "--out", str(table))
    table.with_suffix(".png").unlink()
    more = ["--drift", str(tmp_path / "track-drift.parquet")] if name == "track" else []
    printed = run(capsys, "plot", str(table), *more).strip()
    assert Path(printed) == table.with_suffix(".png")
    assert Path(printed).read_bytes()[:4] == PNG
