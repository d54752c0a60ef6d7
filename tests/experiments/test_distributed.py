"""Two processes under torchrun do what one does: same losses, weights and files; either may go on for the other."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
import torch
import workers
from tiny import losses, weights

import hybridscope as hs
from hybridscope.experiments import train as module
from hybridscope.experiments.distributed import Team
from hybridscope.experiments.train import STATE, train

SAVED = [0, 4, 8, 12]
each = pytest.mark.parametrize("case", workers.CASES)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """For every case the ladders of one process (-alone) and of two (-team), and runs that were killed."""
    folder = tmp_path_factory.mktemp("runs")
    for case in workers.CASES:
        workers.run(folder / f"{case}-alone", case)
        workers.kill(folder / f"{case}-halted", case)
        shutil.copytree(folder / f"{case}-halted", folder / f"{case}-joined")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    out = subprocess.run(
        [*torchrun, workers.__file__, str(folder)], env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=300,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert out.returncode == 0, out.stderr
    return folder


def assert_close(a: Path, b: Path, atol: float = 1e-10) -> None:
    """Losses (computed in float32) and every checkpoint's weights."""
    assert [row["step"] for row in losses(a)] == list(range(1, 13))
    for x, y in zip(losses(a), losses(b), strict=True):
        assert x["loss"] == pytest.approx(y["loss"], rel=1e-6)
        assert x["lr"] == y["lr"]
    for step in SAVED:
        theirs = weights(b, step)
        for name, w in weights(a, step).items():
            assert torch.allclose(w, theirs[name], rtol=0, atol=atol), (step, name)


@each
def test_two_processes_train_like_one(runs, case):
    assert_close(runs / f"{case}-team", runs / f"{case}-alone")
    moved = [w - weights(runs / f"{case}-alone", 0)[name] for name, w in weights(runs / f"{case}-team", 12).items()]
    assert min(float(d.abs().max()) for d in moved) > 1e-3  # ten million times the tolerance


@each
def test_they_leave_the_same_files(runs, case):
    team, alone = runs / f"{case}-team", runs / f"{case}-alone"
    files = sorted(p.relative_to(alone) for p in alone.rglob("*") if p.is_file())
    assert sorted(p.relative_to(team) for p in team.rglob("*") if p.is_file()) == files
    for file in files:
        if file.suffix == ".json" or file.parent.name == "step-000000":
            assert (team / file).read_bytes() == (alone / file).read_bytes(), file
    assert hs.ladder(team).steps == SAVED
    tokens = torch.arange(24).reshape(2, 12)
    for (_, a), (_, b) in zip(hs.ladder(team), hs.ladder(alone), strict=True):
        assert torch.allclose(a.load()(tokens), b.load()(tokens), atol=1e-8)


@each
def test_the_state_to_resume_from_is_that_of_one_process(runs, case):
    left, halted = (torch.load(runs / f"{case}-{how}" / STATE, weights_only=True) for how in ("left", "halted"))
    assert_same(left, halted)


def assert_same(a, b) -> None:
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert torch.allclose(a, b, rtol=0, atol=1e-10)
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)
    else:
        assert a == b


@each
def test_a_killed_run_goes_on_as_if_nothing_had_happened(runs, case):
    team, resumed = runs / f"{case}-team", runs / f"{case}-resumed"
    assert losses(resumed) == losses(team)
    assert all(torch.equal(w, weights(team, 12)[name]) for name, w in weights(resumed, 12).items())


@each
def test_the_number_of_processes_may_change_on_resuming(runs, case):
    workers.run(runs / f"{case}-left", case)
    assert_close(runs / f"{case}-left", runs / f"{case}-alone")
    assert_close(runs / f"{case}-joined", runs / f"{case}-alone")


def test_compiled_processes_train_like_one_too(runs):
    workers.run(runs / "small-alone", "fsdp", *workers.SMALL)
    assert_close(runs / "small-compiled", runs / "small-alone")


def test_a_batch_that_the_processes_cannot_split_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    run = tiny.config(tmp_path, "train.accumulate=4")
    with pytest.raises(ValueError, match=r"train\.batch=8: expected a multiple of 4 processes x train\.accumulate=4"):
        train(run, tmp_path / "ladder", progress=False)
    assert not (tmp_path / "ladder").exists()


def test_a_matrix_that_the_processes_cannot_share_under_muon_is_an_error(tmp_path, monkeypatch):
    """Three heads on five processes: neither a row for each, nor 24 columns in equal parts."""
    five = Team(torch.device("cpu"), size=5, parallel="fsdp")
    monkeypatch.setattr(module, "team", lambda *_: five)
    model = ('model.pattern=["gdn", "full"]', "model.d_model=24", "model.n_heads=3", "model.head_dim=8")
    run = tiny.config(tmp_path, *model, "train.parallel=fsdp", "train.optimizer=muon")
    named = r"5 processes cannot share blocks\.0\.attn\.\w+_proj\.weight \[3, 24\]; expected at most 3 processes, a div"
    with pytest.raises(ValueError, match=named):
        train(run, tmp_path / "ladder", progress=False)
    assert not (tmp_path / "ladder").exists()
    three_by_24 = {"weight": torch.zeros(3, 24)}
    for size, parallel in ((1, "fsdp"), (3, "fsdp"), (4, "fsdp"), (24, "fsdp"), (5, "ddp")):
        Team(torch.device("cpu"), size=size, parallel=parallel).check_muon(three_by_24)


def test_one_process_under_torchrun_is_a_plain_run(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "1")
    train(tiny.config(tmp_path, "train.steps=1", "train.saves=1"), tmp_path / "ladder", progress=False)
    assert not torch.distributed.is_initialized()
