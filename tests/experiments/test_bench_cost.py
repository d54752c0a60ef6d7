"""bench cost on runs of a few hundred weights: what is measured, saved and tabled, and what was not begun."""

from __future__ import annotations

import json

import pytest

from hybridscope.experiments.bench import cost, tables
from hybridscope.experiments.sweeps import load_sweep

SMALL = ["model.d_model=32", "model.n_heads=2", "model.d_ff=16", "data.vocab_size=50", "model.mixers={}"]
RUN = "340m-gdn-6to1"


def test_the_runs_that_are_measured_by_default_are_in_the_grid():
    assert set(cost.RUNS) <= set(load_sweep("wang2025").runs)


def test_a_run_is_saved_and_tabled_beside_its_all_full_twin(tmp_path):
    file = tmp_path / "cost.json"
    result = cost.bench(file, [RUN, RUN], (8, 16), "cpu", 60.0, overrides=SMALL)
    assert json.loads(file.read_text()) == json.loads(json.dumps(result))
    assert [(row["model"], row["length"]) for row in result["rows"]] == [
        ("hybrid", 8), ("full", 8), ("hybrid", 16), ("full", 16),
    ]  # fmt: skip
    hybrid, full = result["rows"][2:]
    assert full["cache_bytes"] == full["measured_kv_bytes"] == 24 * 16 * 2 * 32 * 4  # layers, tokens, k and v, fp32
    assert hybrid["kv_bytes"] * 6 == full["kv_bytes"]  # one full layer in six
    assert hybrid["prefill_ratio"] == hybrid["prefill_tokens_per_s"] / full["prefill_tokens_per_s"]
    text = tables.markdown(tables.load(file))
    assert text.count(f"`{RUN}`") == text.count("| all full") == 2
    assert f"| {hybrid['cache_ratio']:.2f} " in text
    assert "Not run" not in text


def test_runs_that_are_not_begun_are_listed(tmp_path, monkeypatch):
    file = tmp_path / "cost.json"
    monkeypatch.setattr(cost, "cost", lambda *_, **__: pytest.fail("begun after its budget"))
    result = cost.bench(file, [RUN, "340m-gdn-pure"], (8,), "cpu", -1.0, overrides=SMALL)
    assert result["not_run"] == [RUN, "340m-gdn-pure"]
    assert json.loads(file.read_text())["not_run"] == result["not_run"]
    assert f"Not run: {RUN}, 340m-gdn-pure." in tables.markdown(result)


@pytest.mark.parametrize(
    ("args", "named"),
    [(["--runs", "340m-gnd-6to1"], "nearest is '340m-gdn-6to1'"), (["--device", "cuda"], "needs a CUDA device")],
)
def test_mistakes(tmp_path, capsys, monkeypatch, args, named):
    monkeypatch.setattr(cost.torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match=named):
        cost.main(["--out", str(tmp_path / "x.json"), "--device", "cpu", *args])
    assert not list(tmp_path.iterdir())
