"""bench caps on a CPU, tiny: cells, records, ratios, resuming, the table. No timings."""

from __future__ import annotations

import functools
import json

import pytest
import torch

from hybridscope.experiments.bench import caps, caps_cells, tables, workers
from hybridscope.experiments.cli import main

TINY = ["gdn/96/16", "kda/96/16", "lightning/96/16", "gla/96/16", "hgrn/96/16", "rwkv6/96/16", "rwkv7/96/16"]
PATHS = {"uncapped", "exact cap", "overlapped segments"}


@pytest.fixture
def tiny(monkeypatch):
    """Few, narrow heads, one repeat."""
    monkeypatch.setattr(caps_cells, "USUAL", (2, 16, 16))
    monkeypatch.setattr(caps_cells, "HEADS", {"hgrn": (4, 1, 1)})
    monkeypatch.setattr(caps_cells, "SMALL", 100)
    monkeypatch.setattr(caps_cells, "measure", functools.partial(caps_cells.measure, seconds=0.0))
    caps_cells.drawn.cache_clear()


def measured(name):
    return list(caps_cells.measure(caps_cells.Cell(name), torch.device("cpu")))


@pytest.mark.parametrize("name", TINY)
def test_every_family_is_exact_and_timed(tiny, name):
    found, *times = measured(name)
    assert found["ok"], found
    assert found["leaks"] == 0
    assert {row["path"] for row in times} == PATHS
    assert {row["status"] for row in times} == {"ok"}


def test_softmax_attention_with_and_without_sinks(tiny):
    found, *times = measured("full/96/16")
    assert found["ok"]
    assert [row["path"] for row in times] == ["uncapped", "exact cap", "exact cap, 4 sinks"]


def test_a_leak_is_found(tiny, monkeypatch):
    """A recurrence that is not capped at all, and overlapped segments, which see less."""
    monkeypatch.setattr(caps_cells, "exact", lambda cell, x: caps_cells.uncapped(cell, x))
    assert measured("lightning/96/16")[0]["leaks"] > 0
    monkeypatch.setattr(caps_cells, "exact", lambda cell, x: caps_cells.segments(cell, x))
    row = measured("lightning/96/16")[0]
    assert row["leaks"] == 0
    assert row["error"] > 0.01
    assert not row["ok"]


def test_a_run_in_a_worker_is_saved_tabled_and_resumed(tmp_path, capsys):
    """As a user runs it, at the real head shapes, which is why the sequences are short."""
    file = tmp_path / "caps.json"
    main(["bench", "caps", "--out", str(file), "--device", "cpu", "--budget", "0"])
    assert json.loads(file.read_text())["not_run"] == caps_cells.PLAN
    result = caps.bench(file, ["hgrn/24/8"], "cpu", 120.0)
    assert [row["status"] for row in result["rows"]] == ["ok"] * 4
    assert [row.get("ratio") is not None for row in result["rows"]] == [False, True, True, True]
    assert caps.bench(file, ["hgrn/24/8"], "cpu", 120.0)["rows"] == result["rows"]
    text = tables.markdown(tables.load(file))
    assert "### T = 24, w = 8" in text
    assert "| `hgrn` | 2048, 1, 1 | overlapped segments" in text
    assert "hgrn/24/8" in capsys.readouterr().out


def test_a_cell_that_fails_is_a_record(tiny, tmp_path, capsys):
    workers.work(["gdn/96/16", "nosuch/96/16"], measured)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert lines[-2]["row"]["exception"].startswith("KeyError")
    rows = [line["row"] for line in lines if "row" in line]
    result = {"device": "cpu", "versions": {}, "untuned": False, "rows": rows, "not_run": ["kda/96/16"]}
    caps.compare(result)
    text = tables.markdown({"bench": "caps", **result})
    assert "nosuch/96/16" in text
    assert "Not run: kda/96/16." in text
    assert all(caps.line_of(row) for row in rows)


def test_the_plan():
    assert len(set(caps_cells.PLAN)) == len(caps_cells.PLAN)
    wanted = {f"{m}/{T}/{w}" for m in caps_cells.FIRST for T in (16_384, 65_536) for w in (512, 2048)}
    assert wanted < set(caps_cells.PLAN)
    assert set(caps_cells.HEADS) | {Cell.mixer for Cell in map(caps_cells.Cell, caps_cells.PLAN)} - {"full"} <= set(
        caps_cells.kernels.MIXERS
    )
