"""Tables on disk: whole or not at all, and with where their numbers come from."""

from __future__ import annotations

import json

import pandas as pd
import planted
import pyarrow.parquet as pq
import pytest

import hybridscope as hs
from hybridscope.experiments.tables import KEY, needles_hash, provenance, read_table, save_table
from hybridscope.hooks.checkpoint import Checkpoint

TABLE = pd.DataFrame(
    {"layer": [0, 1], "site": 0, "kind": ["full", "gdn"], "x": [0.5, float("nan")], "ok": [True, False]}
)


def test_a_table_comes_back_with_its_provenance(tmp_path):
    facts = {"measurement": "probe", "settings": {"heads": [[1, 0, 2]], "n": 3}}
    path = save_table(TABLE, tmp_path / "deep" / "t.parquet", facts)
    table, back = read_table(path)
    pd.testing.assert_frame_equal(table, TABLE)
    assert back == facts
    pd.testing.assert_frame_equal(pd.read_parquet(path), TABLE)  # an ordinary Parquet file


def test_provenance_names_source_weights_versions_seed_and_command(tmp_path, monkeypatch):
    monkeypatch.setattr("hybridscope.experiments.report.COMMAND", "hybridscope probe x --seed 3")
    planted.planted().save(tmp_path / "step-7")
    facts = provenance("probe", tmp_path / "step-7", seed=3, config={"a": 1})
    assert facts["measurement"] == "probe"
    assert facts["source"] == "step-7"  # not the whole path of somebody's machine
    assert facts["weights"] == Checkpoint(tmp_path / "step-7", 7).weight_hash()
    assert facts["settings"] == {"seed": 3, "config": {"a": 1}}
    assert facts["command"] == "hybridscope probe x --seed 3"
    assert {"python", "torch", "transformers"} <= set(facts["versions"])
    assert facts["machine"]
    assert json.loads(json.dumps(facts)) == facts


@pytest.mark.parametrize("source", ["smollm2", "org/model"])
def test_what_is_no_folder_has_no_weight_hash(source):
    facts = provenance("cap", source)
    assert facts["weights"] is None
    assert facts["source"] == source


def test_a_failure_leaves_the_old_table(tmp_path, monkeypatch):
    path = save_table(TABLE, tmp_path / "t.parquet", {"measurement": "a"})

    def broken(data, file):
        file.write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(pq, "write_table", broken)
    with pytest.raises(OSError, match="disk full"):
        save_table(TABLE, path, {"measurement": "b"})
    monkeypatch.undo()
    assert read_table(path)[1] == {"measurement": "a"}
    assert [p.name for p in tmp_path.iterdir()] == ["t.parquet"]


def test_a_table_of_others_has_no_provenance(tmp_path):
    TABLE.to_parquet(tmp_path / "t.parquet")
    table, facts = read_table(tmp_path / "t.parquet")
    assert facts == {}
    assert len(table) == 2
    assert KEY not in (pq.read_schema(tmp_path / "t.parquet").metadata or {})


@pytest.mark.parametrize("content", [b"", b"not a table at all", b"PAR1" * 20])
def test_what_is_no_table_is_named(tmp_path, content):
    (tmp_path / "t.parquet").write_bytes(content)
    with pytest.raises(ValueError, match=r"t\.parquet: not a Parquet table"):
        read_table(tmp_path / "t.parquet")


def test_a_missing_table_is_named(tmp_path):
    for path in (tmp_path / "none.parquet", tmp_path):
        with pytest.raises(FileNotFoundError, match="no such table"):
            read_table(path)


def test_prompts_are_told_apart_by_tokens_and_answers():
    one, same, other = (hs.make_needles(3, 40, seed=s) for s in (0, 0, 1))
    assert needles_hash(one) == needles_hash(same) != needles_hash(other)
    same.answers[0, 0] += 1
    assert needles_hash(one) != needles_hash(same)
