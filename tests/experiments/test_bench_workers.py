"""What bench caps and bench stats share: cells that a worker measures, fails at, or dies of. No process is started."""

import json

import pytest

from hybridscope.experiments.bench import workers


def drive(tmp_path, monkeypatch, answers, names=("a", "b"), **more):
    """Run `workers.drive` on workers that answer with (lines, exit status); returns the result and their cells."""
    given = []

    def follow(arguments, keep, *, errors, patience, environment=None):
        cells = json.loads(arguments[arguments.index("--worker") + 1])
        given.append(cells)
        lines, code = answers[len(given) - 1]
        for line in lines:
            keep(line)
        return code

    monkeypatch.setattr(workers, "follow", follow)
    result = {"rows": [], "not_run": [], "cell_seconds": {}, "peak": None, **more}
    workers.drive(
        tmp_path / "x.json", result, list(names), ["module"], budget=60.0, limit=5.0, line_of=lambda row: row["cell"],
        save_as=lambda: None,
    )  # fmt: skip
    return result, given


def test_cells_are_kept_and_those_that_are_done_left_out(tmp_path, monkeypatch):
    lines = [{"facts": {"peak": 7}}, {"start": "b"}, {"row": {"cell": "b", "ms": 1}}, {"done": "b", "seconds": 2.0}]
    result, given = drive(tmp_path, monkeypatch, [(lines, 0)], cell_seconds={"a": 1.0})
    assert given == [["b"]]
    assert result["rows"] == [{"cell": "b", "ms": 1}]
    assert (result["cell_seconds"], result["not_run"], result["peak"]) == ({"a": 1.0, "b": 2.0}, [], 7)


@pytest.mark.parametrize(("code", "why"), [("stopped", "no result within 5 s"), (-11, "worker ended with -11")])
def test_a_cell_that_a_worker_dies_of_is_a_record_and_another_goes_on(tmp_path, monkeypatch, code, why):
    second = [{"start": "b"}, {"row": {"cell": "b", "ms": 1}}, {"done": "b", "seconds": 2.0}]
    result, given = drive(tmp_path, monkeypatch, [([{"start": "a"}], code), (second, 0)])
    assert given == [["a", "b"], ["b"]]
    assert [row["cell"] for row in result["rows"]] == ["a", "b"]
    assert why in result["rows"][0]["exception"]
    assert result["cell_seconds"] == {"a": None, "b": 2.0}


def test_a_cell_that_a_worker_died_of_is_tried_again_by_the_next_call_after_the_others(tmp_path, monkeypatch):
    failed = {"cell": "a", "status": "failed", "exception": "no result within 5 s"}
    lines = [
        line for name in ("c", "a")
        for line in ({"start": name}, {"row": {"cell": name, "ms": 1}}, {"done": name, "seconds": 2.0})
    ]  # fmt: skip
    before = {"rows": [failed], "cell_seconds": {"a": None, "b": 1.0}}
    result, given = drive(tmp_path, monkeypatch, [(lines, 0)], names=("a", "b", "c"), **before)
    assert given == [["c", "a"]]
    assert result["rows"] == [{"cell": "c", "ms": 1}, {"cell": "a", "ms": 1}]
    assert result["cell_seconds"] == {"a": 2.0, "b": 1.0, "c": 2.0}


def test_a_cell_that_is_tried_again_keeps_its_record_until_there_is_another(tmp_path, monkeypatch):
    failed = {"cell": "a", "status": "failed", "exception": "no result within 5 s"}
    monkeypatch.setattr(workers.time, "monotonic", iter(range(0, 1000, 59)).__next__)  # the second call is too late
    before = {"rows": [failed], "cell_seconds": {"a": None}}
    result, _ = drive(tmp_path, monkeypatch, [([{"start": "a"}], "stopped")], names=("a",), **before)
    assert (result["rows"], result["not_run"]) == ([failed], ["a"])


def test_a_broken_gpu_is_one_record(tmp_path, monkeypatch, capsys):
    """The worker has said why before it ended."""

    def broken(name):
        raise RuntimeError("CUDA error: an illegal memory access")

    with pytest.raises(SystemExit) as ended:
        workers.work(["a", "b"], broken)
    assert ended.value.code == workers.BROKEN
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    result, given = drive(tmp_path, monkeypatch, [(printed, workers.BROKEN), ([{"start": "b"}], 1)])
    assert given == [["a", "b"], ["b"]]
    assert [row["cell"] for row in result["rows"]] == ["a", "b"]
    assert "illegal memory access" in result["rows"][0]["exception"]


def test_a_worker_that_ends_before_any_cell_is_an_error(tmp_path, monkeypatch):
    with pytest.raises(RuntimeError, match="ended with 1 before any cell"):
        drive(tmp_path, monkeypatch, [([], 1)])
