"""Sweeps: one TOML is many runs, their names and widths are what the papers give, and every mistake is named."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from hybridscope.experiments import cli
from hybridscope.experiments.config import load_config
from hybridscope.experiments.sweeps import compressed, describe, expand, is_sweep, load_sweep, on_meta, parameters

BASE = """
[model]
n_layers = 4
d_model = 16
n_heads = 2
d_ff = 16

[data]
length = 32
vocab_size = 24
keys = 4
values = 4
needles = 2

[train]
steps = 4
batch = 8
warmup = 2
saves = 2
"""

SWEEP = """
[sweep.axes.size.s1]
model.d_model = 16

[sweep.axes.size.s2]
model.d_model = 32
train.steps = 6

[sweep.axes.mixer]
full = { without = ["ratio"], model.pattern = ["full"] }
swa = { model.pattern.mixer = "swa:4" }
gdn = { model.pattern.mixer = "gdn" }

[sweep.axes.ratio]
pure = { model.pattern.full_at = [] }
3to1 = { model.pattern.ratio = "3:1" }
"""


@pytest.fixture
def write(tmp_path):
    def write(*parts: str) -> Path:
        file = tmp_path / "grid.toml"
        file.write_text(BASE + "".join(parts))
        return file

    return write


# Expansion


def test_runs_are_the_product_of_the_axes_named_by_their_values(write):
    runs = expand(write(SWEEP))
    assert list(runs) == [
        f"{size}-{rest}"
        for size in ("s1", "s2")
        for rest in ("full", "swa-pure", "swa-3to1", "gdn-pure", "gdn-3to1")
    ]  # fmt: skip
    run = runs["s2-gdn-3to1"]
    assert (run.model.d_model, run.train.steps, run.data.length) == (32, 6, 32)
    assert run.hybrid().layers == ("gdn", "gdn", "gdn", "full")
    assert runs["s1-swa-pure"].hybrid().layers == ("swa:4",) * 4
    assert runs["s1-full"].train.steps == 4


def test_runs_can_be_left_out_and_set_apart(write):
    more = """
[[sweep.override]]
runs = { size = "s1", mixer = ["gdn", "swa"] }
model.d_ff = 24
[[sweep.published]]
runs = { size = "s1" }
non_embedding = 1_000
note = "of all"
[[sweep.published]]
runs = { size = "s1", mixer = "full" }
total = 2_000
note = "of one"
"""
    left_out = '[sweep]\nexclude = [{ size = "s2", ratio = ["pure", "3to1"] }, { mixer = "swa", ratio = "pure" }]\n'
    sweep = load_sweep(write(left_out, SWEEP, more))
    assert list(sweep.runs) == ["s1-full", "s1-swa-3to1", "s1-gdn-pure", "s1-gdn-3to1", "s2-full"]
    assert {name: run.model.d_ff for name, run in sweep.runs.items() if "full" not in name.split("-")} == {
        "s1-swa-3to1": 24, "s1-gdn-pure": 24, "s1-gdn-3to1": 24,
    }  # fmt: skip
    assert sweep.runs["s1-full"].model.d_ff == 16
    claim = sweep.published["s1-full"]
    assert (claim.non_embedding, claim.total, claim.notes) == (1_000, 2_000, ("of all", "of one"))
    assert sweep.published["s2-full"].non_embedding is None


def test_overrides_reach_every_run(write):
    assert {run.train.seed for run in expand(write(SWEEP), ["train.seed=3"]).values()} == {3}
    with pytest.raises(ValueError, match=r"run s1-full: --set model\.pattern\.full=nope: 'pattern' is a value"):
        expand(write(SWEEP), ["model.pattern.full=nope"])


def test_only_one_run_can_be_read(write):
    runs = load_sweep(write(SWEEP), ["model.pattern.full=nope"], only="s1-gdn-3to1").runs
    assert list(runs) == ["s1-gdn-3to1"]
    assert runs["s1-gdn-3to1"].hybrid().layers == ("gdn", "gdn", "gdn", "nope")
    with pytest.raises(ValueError, match="--only: unknown 's1-gnd-3to1'; the nearest is 's1-gdn-3to1'"):
        load_sweep(write(SWEEP), only="s1-gnd-3to1")


@pytest.mark.parametrize(
    ("before", "after", "named"),
    [
        ("[sweep.axes.size.s1]", "[sweep.axis.size.s1]", r"'sweep\.axis'; the nearest valid key is 'sweep\.axes'"),
        ("model.d_model = 16", "modle.d_model = 16", r"sweep\.axes\.size\.s1: unknown 'modle'; the nearest is 'model'"),
        ("model.d_model = 16", "model.d_modle = 16", r"run s1-full: .*'model\.d_modle'.*'model\.d_model'"),
        ("model.d_model = 16", 'model.d_model = "x"', r"run s1-full: .*model\.d_model='x'; expected int"),
        ("model.d_model = 16", "model = 16", r"sweep\.axes\.size\.s1\.model=16; expected a section"),
        ("model.d_model = 16", "model.d_model = 15", "run s1-full: d_model=15 is not a multiple"),
        ('["ratio"]', '["ration"]', r"mixer\.full\.without: unknown 'ration'; the nearest is 'ratio'"),
        ('["ratio"]', "3", r"without=3; expected a name or a list"),
        ('"gdn" }', '"gnd" }', "run s1-gdn-pure: .*unknown mixer 'gnd'"),
        ("pattern.ratio", "pattern.ration", r"'model\.pattern\.ration'; the nearest .* 'model\.pattern\.ratio'"),
        ('"3:1"', '"3-1"', "run s1-swa-3to1: ratio: n='3-1'; expected N:1 or pure"),
        ('"3:1"', '"4:1"', r"5 layers; expected at most model\.n_layers=4"),
        ('ratio = "3:1"', "full_at = [4]", r"full_at=\[4\]: expected layers of 0\.\.n_layers-1, n_layers=4"),
        ('ratio = "3:1"', 'full = "full"', "expected either full_at or ratio"),
        ("3to1 =", '"3:1" =', r"value '3:1'; expected letters"),
        ("swa = {", "full-pure = {}\nswa = {", "run s1-full-pure-pure: config: missing key"),
    ],
)  # fmt: skip
def test_mistakes_in_a_sweep(write, before, after, named):
    assert before in SWEEP
    with pytest.raises(ValueError, match=named):
        expand(write(SWEEP.replace(before, after, 1)))


@pytest.mark.parametrize(
    ("section", "named"),
    [
        ('[[sweep.published]]\nruns = { siez = "s1" }', r"sweep\.published\[0\]: axis: unknown 'siez'.*'size'"),
        (
            '[[sweep.published]]\nruns = { size = "s3" }',
            r"sweep\.published\[0\]: size: unknown 's3'; the nearest is 's",
        ),
        ("[[sweep.published]]\nruns = { size = 1 }", r"size=1; expected a name"),
        ("[[sweep.published]]\nnon_embedding = 1", r"missing key 'sweep\.published\[0\]\.runs'"),
        ('[[sweep.published]]\nruns = { size = "s1" }\nnonembedding = 1', r"nearest .*\.non_embedding'"),
        ('[[sweep.override]]\nrun = { size = "s1" }', r"sweep\.override\[0\]: runs=None; expected a table"),
        ('[[sweep.override]]\nruns = { size = "s1" }\nwithout = []', r"unknown 'without'"),
        ('[[sweep.override]]\nruns = { mixer = "full", ratio = "pure" }', "matches no run"),
    ],
)
def test_mistakes_in_what_is_said_of_some_runs(write, section, named):
    with pytest.raises(ValueError, match=named):
        expand(write(SWEEP, section))


def test_a_sweep_without_runs_is_an_error(write):
    with pytest.raises(ValueError, match="leaves no run"):
        expand(write("[sweep]\nexclude = [{ size = ['s1', 's2'] }]\n", SWEEP))
    for axes in ("[sweep.axes]\n", "[sweep.axes.size]\n"):
        with pytest.raises(ValueError, match=r"sweep\.axes: .* expected axes with values"):
            expand(write(axes))


def test_two_runs_of_one_name_are_an_error(write):
    axes = "[sweep.axes.a]\nx = {}\nx-y = {}\n[sweep.axes.b]\ny-z = {}\nz = {}\n"
    with pytest.raises(ValueError, match="two runs are called 'x-y-z'"):
        expand(write(axes))


def test_a_sweep_is_not_a_run_nor_a_run_a_sweep(write):
    file = write(SWEEP)
    assert is_sweep(file)
    assert not is_sweep("demo")
    with pytest.raises(ValueError, match=r"a sweep of many runs; name one: .* --only RUN"):
        load_config(file)
    with pytest.raises(ValueError, match=r"demo: has no \[sweep\] section"):
        expand("demo")
    with pytest.raises(FileNotFoundError, match=r"those that come with hybridscope: demo, .*qiao2026, .*wang2025"):
        expand("wang2026")


# The published sweeps

QIAO = {"s1": 14_999_424, "s2": 31_470_080, "s3": 64_901_760, "s4": 104_427_264}


@pytest.mark.parametrize("size", QIAO)
def test_the_published_counts_of_qiao_are_reproduced_exactly(size):
    sweep = load_sweep("qiao2026")
    for rest in ("full", "swa128-1to1", "swa2048-3to1", "swa128-nope"):
        assert parameters(sweep.runs[f"{size}-{rest}"].hybrid())[1] == QIAO[size]
        assert sweep.published[f"{size}-{rest}"].non_embedding == QIAO[size]
        assert sweep.published[f"{size}-{rest}"].notes


def test_the_rounded_counts_of_qiao_are_reproduced_to_their_digits():
    runs = expand("qiao2026")
    total, inner = parameters(runs["s5-full"].hybrid())
    assert round(inner / 1e6) == 477
    assert f"{total / 1e9:.2f}" == "0.66"
    assert f"{parameters(runs['s4-swa128-nope'].hybrid())[0] / 1e9:.2f}" == "0.22"


def test_qiao_runs_by_size_and_module():
    runs = expand("qiao2026")
    modules = ("swa128", "swa512", "swa2048", "lightning", "mamba2", "gdn")
    names = {"full", "swa128-nope", *(f"{module}-{ratio}" for module in modules for ratio in ("1to1", "3to1"))}
    assert set(runs) == {f"s{i}-{name}" for i in range(1, 6) for name in names}
    assert runs["s1-swa512-1to1"].hybrid().layers == ("swa:512", "full") * 5
    assert runs["s2-gdn-3to1"].hybrid().layers == ("gdn", "gdn", "gdn", "full") * 3
    assert runs["s1-swa128-nope"].hybrid().layers == ("swa:128", "nope") * 5
    assert {run.data.length for run in runs.values()} == {16_384}


def test_wang_runs_by_size_variant_and_ratio():
    runs = expand("wang2025")
    variants = ("hgrn", "hgrn2", "retnet", "gla", "deltanet", "gdn")
    ratios = {"pure": 0, "24to1": 1, "12to1": 2, "6to1": 4, "3to1": 8}  # full layers of 24
    names = {"transformer", *(f"{variant}-{ratio}" for variant in variants for ratio in ratios)}
    assert set(runs) == {f"{size}-{name}" for size in ("340m", "1.3b") for name in names}
    for name, run in runs.items():
        layers = run.hybrid().layers
        assert len(layers) == 24
        if not name.endswith("transformer"):
            _, variant, ratio = name.split("-")
            assert Counter(layers) == Counter({variant: 24 - ratios[ratio], "full": ratios[ratio]})
            assert ratio == "pure" or layers[-1] == "full"
        tokens = run.train.steps * run.train.batch * run.data.length
        assert tokens == pytest.approx(20e9 if name.startswith("340m") else 100e9, rel=1e-4)
        assert run.data.dataset == "HuggingFaceFW/fineweb-edu"


def test_the_published_gdn_checkpoint_has_as_many_parameters():
    assert parameters(expand("wang2025")["1.3b-gdn-pure"].hybrid())[0] == 1_466_343_808


SMALLEST = {"qiao2026": "s1-", "wang2025": "340m-"}


@pytest.mark.parametrize("source", SMALLEST)
def test_every_smallest_run_can_be_built(source):
    for name, run in expand(source).items():
        if name.startswith(SMALLEST[source]):
            assert on_meta(run.hybrid()).sites


@pytest.mark.slow
@pytest.mark.parametrize("source", SMALLEST)
def test_every_run_can_be_built_near_the_published_count(source):
    table = describe(load_sweep(source))
    assert table["run"].is_unique
    near = table.dropna(subset="published")
    assert (near["difference"].abs() / near["published"] < 0.02).all()


# The table


@pytest.mark.parametrize(
    ("layers", "text"),
    [
        (("full",), "full"),
        (("gdn",) * 4, "gdn*4"),
        (("gdn", "full") * 3, "(gdn full)*3"),
        (("gdn", "gdn", "full") * 2 + ("gdn", "gdn"), "(gdn*2 full)*2 gdn*2"),
        (("gdn",) * 23 + ("full",), "gdn*23 full"),
        (("full", "gdn", "gdn", "swa:4", "full"), "full gdn*2 swa:4 full"),
    ],
)
def test_layer_lists_in_short(layers, text):
    assert compressed(layers) == text


def test_no_weights_are_allocated():
    assert {p.device.type for p in on_meta(expand("wang2025")["340m-gdn-3to1"].hybrid()).parameters()} == {"meta"}


def test_the_table_counts_what_a_model_has(write):
    from hybridscope.hooks.model import HybridLM

    more = '[[sweep.published]]\nruns = { mixer = "full" }\nnon_embedding = 5_000\ntotal = 7_000\nnote = "why"\n'
    sweep = load_sweep(write(SWEEP, more))
    table = describe(sweep).set_index("run")
    for name, run in sweep.runs.items():
        model = HybridLM(run.hybrid())
        total = sum(p.numel() for p in model.parameters())
        row = table.loc[name]
        assert row["parameters"] == total
        assert row["non_embedding"] == total - model.embed.weight.numel() - model.unembed.weight.numel()
        assert row["tokens"] == run.train.steps * 8 * 32
    assert table.loc["s1-full", "difference"] == table.loc["s1-full", "non_embedding"] - 5_000
    assert table.loc["s1-full", "difference_total"] == table.loc["s1-full", "parameters"] - 7_000
    assert table["note"].notna().sum() == 2


def dry_run(capsys, *args) -> str:
    cli.main(["train", *map(str, args), "--dry-run"])
    return capsys.readouterr().out


def test_a_dry_run_lists_the_runs_with_published_counts_and_why(write, capsys):
    more = """
[[sweep.published]]
runs = { size = "s1", mixer = "full" }
non_embedding = 7_312
total = 8_100
note = "counted by hand"
[[sweep.published]]
runs = { size = "s2" }
non_embedding = 12_345
note = "counted by another hand"
"""
    total, inner = parameters(expand(write(SWEEP, more))["s1-full"].hybrid())
    assert (total, inner) == (8_080, 7_312)  # 4 (4 16^2 + 3 16^2 + 2 16) + 16, and 2 24 16 more
    lines = dry_run(capsys, write(SWEEP, more)).splitlines()
    rows = {line.split()[0]: line for line in lines[1:-2]}
    assert set(rows) == set(expand(write(SWEEP, more)))
    assert " ".join(rows["s1-full"].split()) == "s1-full full*4 16 8,080 7,312 1,024 7,312 0 8,100 0 as rounded [1]"
    inner = parameters(expand(write(SWEEP, more))["s2-gdn-3to1"].hybrid())[1]
    assert f"12,345 {inner - 12_345:+,} " in " ".join(rows["s2-gdn-3to1"].split())
    assert rows["s2-gdn-3to1"].endswith("[2]")
    assert "[" not in rows["s1-gdn-3to1"]
    assert lines[-2:] == ["[1] counted by hand", "[2] counted by another hand"]


def test_a_dry_run_of_one_run_shows_its_config(write, capsys):
    out = dry_run(capsys, write(SWEEP), "--only", "s1-gdn-3to1", "--set", "train.seed=5")
    resolved = json.loads(out[: out.index("\n}") + 2])
    assert resolved["train"]["seed"] == 5
    assert resolved["model"]["pattern"] == ["gdn", "gdn", "gdn", "full"]
    assert "gdn*3 full" in out
    assert "s2" not in out


def test_one_run_of_a_sweep_trains(write, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.arange(640, dtype="<u4").tofile(tmp_path / "ids.u32")
    data = ["data.dataset=some/text", "data.file=ids.u32", "data.vocab_size=640"]
    cli.main(["train", str(write(SWEEP)), "--only", "s1-gdn-3to1", *(a for d in data for a in ("--set", d))])
    assert capsys.readouterr().out.strip() == str(Path("runs/grid/s1-gdn-3to1/ladder"))
    run = json.loads(Path("runs/grid/s1-gdn-3to1/ladder/run.json").read_text())
    assert run["config"]["data"]["dataset"] == "some/text"
    assert run["steps"] == [0, 2, 4]


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (["wang2025"], "a sweep of 62 runs; name one: --only RUN"),
        (["qiao2026", "--only", "s1-fell"], "--only: unknown 's1-fell'; the nearest is 's1-full'"),
        (["demo", "--only", "s1"], "--only s1: demo is one run, not a sweep"),
        (["wang2025", "--only", "340m-gdn-3to1"], "HuggingFaceFW/fineweb-edu.* nothing is downloaded"),
    ],
)
def test_mistakes_on_the_command_line(args, named, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        cli.main(["train", *args])
    assert stop.value.code == 2
    assert re.search(named, capsys.readouterr().err)
    assert not list(tmp_path.iterdir())
