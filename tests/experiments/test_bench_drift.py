"""bench drift on a ladder of a few kilobytes: bytes counted, ways compared, tables, nothing left behind. No timings."""

from __future__ import annotations

import json

import pytest

from hybridscope.experiments.bench import command, drift, tables
from hybridscope.hooks.projections import qk_projections

SMALL = drift.Options(steps=2, layers=4, width=64, vocab=50)


@pytest.fixture(autouse=True)
def _once(monkeypatch):
    monkeypatch.setattr(drift, "REPEATS", 1)


def test_a_run_is_saved_and_tabled_and_its_ladder_removed(tmp_path):
    file = tmp_path / "drift.json"
    result = drift.bench(file, SMALL, 60.0)
    assert json.loads(file.read_text()) == json.loads(json.dumps(result))
    assert [path.name for path in tmp_path.iterdir()] == ["drift.json"]
    rows = {(row["heads"], row["way"], row["cache"]): row for row in result["rows"]}
    assert len(rows) == 2 * len(drift.WAYS) * 2 - len(result["not_run"])
    needed = 2 * 2 * 64 * 64 * 2  # steps; q and k of the one full layer, 64 x 64 in bf16
    for way in ("slices", "checkpoints", "qk_drift"):
        row = rows["all heads", way, "warm"]
        assert row["bytes"] == needed
        assert row["bytes_per_s"] == needed / row["seconds"]
    whole = rows["all heads", "sequential", "warm"]
    assert whole["bytes"] == result["ladder"]["bytes"] > 2 * needed
    assert whole["of_sequential"] == rows["one head", "checkpoints", "warm"]["vs_checkpoints"] == 1
    text = tables.markdown(tables.load(file))
    assert text.count("`slices`") == sum(row["way"] == "slices" for row in result["rows"])
    assert "2 checkpoints of a 3:1 GDN hybrid" in text


def test_the_rows_counted_are_those_that_drift_reads(tmp_path, monkeypatch):
    ladder = drift.make_ladder(tmp_path, SMALL)
    (site,) = qk_projections(ladder[0])
    read: list[tuple[str, int]] = []
    tensor = type(ladder[0]).tensor

    def watched(self, name, rows=slice(None)):
        found = tensor(self, name, rows)
        if name in (site.q, site.k):
            read.append((name, found.numel() * found.element_size()))
        return found

    monkeypatch.setattr(type(ladder[0]), "tensor", watched)
    wanted = [(site, [0])]
    for way in ("slices", "qk_drift"):
        read.clear()
        drift._job(way, ladder, wanted)()
        per_step = drift._row_bytes(site, [0])
        reads = len(ladder) + (way == "qk_drift")  # the reference as well
        assert sum(size for _, size in read) == per_step * reads


def test_what_is_not_begun_in_time_is_listed(tmp_path, capsys):
    assert "one head, slices, warm" in drift.bench(tmp_path / "drift.json", SMALL, -1.0)["not_run"]
    assert "Not run" in tables.markdown(tables.load(tmp_path / "drift.json"))


def test_the_command(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(drift.Options, "__init__", lambda self, *_: self.__dict__.update(vars(SMALL)))
    command.bench("drift", out=tmp_path / "x.json")
    assert "| one head" in capsys.readouterr().out
