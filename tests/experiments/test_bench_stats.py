"""bench stats, as far as a machine without a GPU shows: cells, records, resuming, tables. No timings."""

from __future__ import annotations

import contextlib
import functools
import io
import json

import pandas as pd
import pytest
import torch

from hybridscope.experiments.bench import stats, stats_cells, tables, workers

pytest.importorskip("triton", reason="the extra `gpu` is not installed")
CELLS = ["op/64/16/1", "op/64/16/4/8", "model/80"]


@pytest.fixture
def small(monkeypatch):
    """A tiny model, one repeat, and workers in this process; returns the cells that each was given."""
    monkeypatch.setattr(stats_cells, "MODEL", {"n_layers": 2, "d_model": 16, "n_heads": 2, "vocab_size": 32})
    for name in ("timed", "walled"):
        monkeypatch.setattr(stats_cells, name, functools.partial(getattr(stats_cells, name), seconds=0.0))
    given = []

    def follow(arguments, keep, *, errors, patience, environment=None):
        out = io.StringIO()
        given.append(json.loads(arguments[arguments.index("--worker") + 1]))
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
            stats.main(arguments[1:])
        for line in out.getvalue().splitlines():
            patience()
            keep(json.loads(line))
        return 0

    monkeypatch.setattr(workers, "follow", follow)
    return given


def test_a_run_is_saved_tabled_and_resumed(small, tmp_path):
    file = tmp_path / "attention_stats.json"
    result = stats.bench(file, CELLS, "cpu", 60.0)
    assert json.loads(file.read_text()) == json.loads(json.dumps(result))
    assert set(result["cell_seconds"]) == set(CELLS)
    rows = {(row["cell"], row["path"]): row for row in result["rows"]}
    assert rows["op/64/16/1", "cudnn"]["status"] == "failed"  # needs CUDA, and the rest went on
    ours = rows["op/64/16/1", "stats: + distance"]
    assert ours["status"] == "ok"
    assert ours["flops"] == 2 * 16 * 16 * 64 * 65 / 2  # queries, keys that they see, products
    assert rows["op/64/16/4/8", "stats: 64 rows"]["G"] == 4
    assert rows["model/80", "plain"]["ratio"] == 1
    assert {
        rows["model/80", f"{how}, {which} rows"]["status"] for how in ("stats", "record()") for which in ("all", 64)
    }
    assert {row["status"] for row in result["rows"] if row["cell"] == "model/80"} == {"ok"}
    table = pd.read_csv(file.with_suffix(".csv"))
    assert len(table) == len(result["rows"]) >= 6
    assert {"kind", "T", "D", "path", "ms"} <= set(table.columns)
    text = tables.markdown(tables.load(file))
    assert "### T = 64, D = 16, 16 heads over 4, window 8" in text
    assert "| stats, 64 rows" in text
    stats.bench(file, [*CELLS, "op/32/16/1"], "cpu", 60.0)
    assert small == [CELLS, ["op/32/16/1"]]


def test_a_cell_that_fails_is_a_record(small, tmp_path, monkeypatch):
    def broken(T, device):
        raise RuntimeError("no such thing")

    monkeypatch.setattr(stats_cells, "whole_model", broken)
    result = stats.bench(tmp_path / "a.json", ["model/8", "op/16/16/1"], "cpu", 60.0)
    assert result["rows"][0]["exception"] == "RuntimeError: no such thing"
    assert result["not_run"] == []
    assert "model/8" in tables.markdown(result)


def test_whole_models_are_timed_in_turn_and_one_may_fail_late():
    calls = []

    def path(name, most):
        def f():
            calls.append(name)
            if calls.count(name) > most:
                raise torch.cuda.OutOfMemoryError("no room")

        return f

    paths = {"a": path("a", 99), "late": path("late", 3), "never": path("never", 0)}
    rows = list(stats_cells.walled(paths, {"kind": "model"}, torch.device("cpu"), seconds=0.0))
    assert [(row["path"], row["status"]) for row in rows] == [
        ("a", "ok"), ("late", "out of memory"), ("never", "out of memory"),
    ]  # fmt: skip
    assert rows[0]["repeats"] == 3
    assert calls == ["a"] * 2 + ["late"] * 2 + ["never"] + ["a", "late"] * 2 + ["a"]


def test_a_check_in_numbers(monkeypatch):
    """The oracle against itself is within its bound, and against other inputs is not."""
    real = stats_cells.attention_stats
    monkeypatch.setitem(stats_cells.CASES, "tiny", {"T": 40, "K": 8, "cu_seqlens": [0, 11, 40], "histogram": True})

    def torch_path(q, k, *, impl, **options):
        return real(q, k, impl="reference" if impl == "reference" else "torch", **options)

    monkeypatch.setattr(stats_cells, "attention_stats", torch_path)
    row = stats_cells.check("fp32", "tiny", torch.device("cpu"))
    assert row["ok"]
    assert set(row["errors"]) > {"lse", "entropy", "mass", "visible", "top1_differs", "histogram"}
    monkeypatch.setattr(
        stats_cells, "attention_stats", lambda q, k, **o: torch_path(q * (1 + (o["impl"] == "triton")), k, **o)
    )
    assert not stats_cells.check("fp32", "tiny", torch.device("cpu"))["ok"]


def test_the_plan():
    assert len(set(stats_cells.PLAN)) == len(stats_cells.PLAN)
    kinds = {name.split("/")[0] for name in stats_cells.PLAN}
    assert kinds == {"check", "op", "flex", "model"}
    ops = {tuple(map(int, n.split("/")[1:4])) for n in stats_cells.PLAN if n.startswith("op") and n.count("/") == 3}
    assert ops == {(T, D, g) for T in (4096, 16_384, 65_536, 131_072) for D in (64, 128) for g in (1, 4)}
    tiles = {tile for d in (64, 128) for tile in stats.candidates(d)}
    assert all(m % 64 == 0 and n >= 16 and registers in (None, 128, 168) for m, n, _, _, registers in tiles)


def test_it_needs_a_gpu(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="needs a CUDA device"):
        stats.main([])
