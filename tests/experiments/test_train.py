"""Training: it learns, the same seed gives the same weights, and a killed run goes on as if nothing had happened."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch
from tiny import assert_same_run, killed_at, losses, weights

import hybridscope as hs
from hybridscope.experiments import train as module
from hybridscope.experiments.corpus import corpus, data_hash
from hybridscope.experiments.distributed import Team
from hybridscope.experiments.sources import language_of, needles_for
from hybridscope.experiments.train import STATE, schedule, train
from hybridscope.hooks.checkpoint import read_json

SAVED = [0, 4, 8, 12]


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return tiny.config(tmp_path_factory.mktemp("config"))


@pytest.fixture(scope="module")
def whole(config, tmp_path_factory) -> Path:
    """An uninterrupted run."""
    return train(config, tmp_path_factory.mktemp("run") / "ladder", progress=False)


# Learning


def test_the_loss_falls(tmp_path):
    run = tiny.config(tmp_path, "train.steps=60", "train.saves=1", "train.lr=2e-2", "data.copy_share=0")
    log = [row["loss"] for row in losses(train(run, tmp_path / "ladder", progress=False))]
    assert log[0] == pytest.approx(np.log(24), abs=0.4)  # a fresh model knows nothing
    assert np.mean(log[-10:]) < np.mean(log[:5]) - 1  # at least which tokens are values


def test_the_loss_is_the_weighted_mean_over_what_is_scored(whole, config):
    tokens, weight = corpus(config.data).batch(config.train.seed, 0, config.train.batch)
    first = hs.ladder(whole)[0].load()
    with torch.no_grad():
        expected = (first.loss(tokens, per_token=True) * weight).sum() / weight.sum()
    assert losses(whole)[0]["loss"] == pytest.approx(float(expected), rel=1e-5)


def test_the_learning_rate_warms_up_and_falls_to_a_tenth():
    rates = [schedule(step, 10, 200) for step in range(200)]
    assert rates[0] == pytest.approx(0.1)
    assert max(rates) == pytest.approx(1, abs=0.02)
    assert rates[-1] == pytest.approx(0.1, abs=0.01)
    peak = rates.index(max(rates))
    assert rates[: peak + 1] == sorted(rates[: peak + 1])
    assert rates[peak:] == sorted(rates[peak:], reverse=True)


def test_vectors_do_not_decay(config):
    [optimizer] = module.make_optimizers(hs.HybridLM(config.hybrid()), config)
    decays = {p.ndim >= 2: g["weight_decay"] for g in optimizer.param_groups for p in g["params"]}
    assert decays == {True: 0.1, False: 0.0}


# What a run leaves


def test_a_run_leaves_a_ladder_from_step_0_to_the_last(whole):
    ladder = hs.ladder(whole)
    assert ladder.steps == SAVED
    assert not (whole / STATE).exists()  # nothing to resume
    assert ladder.problems == {}
    assert ladder.tokens(12) == 12 * 8 * 32


def test_step_0_is_the_untrained_model(whole, config):
    torch.manual_seed(config.train.seed)
    fresh = hs.HybridLM(config.hybrid()).state_dict()
    assert all(torch.equal(w, fresh[name]) for name, w in weights(whole, 0).items())


def test_run_json_says_what_was_run(whole, config):
    run = read_json(whole / "run.json")
    assert run["config"] == config.to_dict()
    assert run["seed"] == 0
    assert run["data_hash"] == data_hash(corpus(config.data), 0)
    assert run["steps"] == SAVED
    assert run["versions"]["torch"] == torch.__version__
    assert run["commit"] is None or re.fullmatch(r"[0-9a-f]{40}(-dirty)?", run["commit"])
    assert run["machine"]


def test_checkpoints_know_the_language_they_were_trained_on(whole, config):
    final = hs.ladder(whole).final
    language = language_of(final.path)
    assert (language.vocab_size, language.keys, language.values) == (24, 4, 4)
    made = needles_for(final.load(), final.path, 5)
    assert made.tokens.shape == (5, 32)  # the model's context
    assert made.classes["value"] == 4


# Determinism


def test_the_same_seed_gives_the_same_run(whole, config, tmp_path):
    torch.manual_seed(99)  # whatever came before
    torch.rand(7)
    assert_same_run(train(config, tmp_path / "again", progress=False), whole)


def test_another_seed_gives_other_weights(whole, tmp_path):
    other = train(tiny.config(tmp_path, "train.seed=1"), tmp_path / "other", progress=False)
    assert not torch.equal(weights(other, 0)["embed.weight"], weights(whole, 0)["embed.weight"])
    assert losses(other)[0] != losses(whole)[0]


def test_micro_batches_add_up_to_the_batch(whole, tmp_path):
    """The same losses and first weights, but for rounding."""
    split = train(tiny.config(tmp_path, "train.accumulate=4"), tmp_path / "split", progress=False)
    for a, b in zip(losses(split), losses(whole), strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-3)
    assert losses(split)[0]["loss"] == pytest.approx(losses(whole)[0]["loss"], rel=1e-6)


def test_gradients_of_micro_batches_are_those_of_the_batch(config):
    batch = corpus(config.data).batch(0, 0, 8)
    gradients = []
    for parts in (1, 2, 8):
        torch.manual_seed(0)
        model = hs.HybridLM(config.hybrid()).double()
        module._accumulate(model, batch, parts, Team(torch.device("cpu")))
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    for other in gradients[1:]:
        assert (other - gradients[0]).abs().max() < 1e-6 * gradients[0].abs().max()


# Resuming


@pytest.mark.parametrize("step", [0, 1, 4, 6, 11])
def test_a_killed_run_goes_on_bit_for_bit(whole, config, tmp_path, monkeypatch, step):
    folder = tmp_path / "ladder"
    killed_at(monkeypatch, config, folder, "schedule", lambda now, *_: now == step)
    assert not (folder / "step-000012").exists()
    assert_same_run(train(config, folder, progress=False), whole)


@pytest.mark.parametrize("step", [0, 4, 12])
@pytest.mark.parametrize("where", ["before run.json", "before the state"])
def test_a_run_killed_while_saving_goes_on_bit_for_bit(whole, config, tmp_path, monkeypatch, step, where):
    folder = tmp_path / "ladder"
    saved = folder / f"step-{step:06d}"
    name = "run.json" if where == "before run.json" else STATE
    killed_at(monkeypatch, config, folder, "atomic_file", lambda path: Path(path).name == name and saved.exists())
    assert_same_run(train(config, folder, progress=False), whole)


def test_a_run_killed_twice_goes_on_bit_for_bit(whole, config, tmp_path, monkeypatch):
    folder = tmp_path / "ladder"
    for step in (6, 9):
        killed_at(monkeypatch, config, folder, "schedule", lambda now, *_, step=step: now == step)
    with open(folder / "loss.jsonl", "a") as log:
        log.write('{"step": 10, "lo')  # the line that was being written
    assert_same_run(train(config, folder, progress=False), whole)


def test_a_finished_run_is_left_as_it_is(whole, config):
    before = {p: p.stat().st_mtime_ns for p in whole.rglob("*.safetensors")}
    assert train(config, whole, progress=False) == whole
    assert {p: p.stat().st_mtime_ns for p in whole.rglob("*.safetensors")} == before
    assert len(losses(whole)) == 12


def test_an_unfinished_run_without_its_state_is_not_guessed_at(config, tmp_path, monkeypatch):
    folder = tmp_path / "ladder"
    killed_at(monkeypatch, config, folder, "schedule", lambda now, *_: now == 6)
    (folder / STATE).unlink()
    with pytest.raises(ValueError, match=r"resume\.pt: missing; the run stopped after step 4"):
        train(config, folder, progress=False)


@pytest.mark.parametrize(
    ("override", "named"),
    [("train.lr=1e-3", r"train\.lr differs"), ("model.d_ff=32", r"model\.d_ff differs"), ("data.keys=5", "data.keys")],
)
def test_a_folder_with_another_run_is_refused_and_kept(whole, tmp_path, override, named):
    before = (whole / "run.json").read_bytes()
    with pytest.raises(ValueError, match=rf"holds another run \({named}"):
        train(tiny.config(tmp_path, override), whole, progress=False)
    assert (whole / "run.json").read_bytes() == before
    assert hs.ladder(whole).steps == SAVED


def test_a_data_file_that_changed_is_another_run(tmp_path):
    ids = np.arange(200, dtype="<u2") % 24
    ids.tofile(tmp_path / "ids.bin")
    run = tiny.config(tmp_path, f"data.file={tmp_path / 'ids.bin'}", "train.steps=1", "train.saves=1")
    folder = train(run, tmp_path / "ladder", progress=False)
    assert hs.ladder(folder).steps == [0, 1]
    ids[::-1].tofile(tmp_path / "ids.bin")
    with pytest.raises(ValueError, match="its data differ"):
        train(run, folder, progress=False)


def test_a_folder_of_foreign_checkpoints_is_refused(config, tmp_path):
    (tmp_path / "step-000000").mkdir()
    with pytest.raises(ValueError, match=r"checkpoints but no run\.json"):
        train(config, tmp_path, progress=False)


# Mistakes


def test_a_loss_that_is_no_number_names_the_step_and_keeps_what_was_saved(config, tmp_path, monkeypatch):
    accumulate, calls = module._accumulate, []

    def broken(*args):
        calls.append(1)
        return float("nan") if len(calls) == 7 else accumulate(*args)

    monkeypatch.setattr(module, "_accumulate", broken)
    with pytest.raises(ValueError, match=r"loss nan .* at step 7; lower train\.lr"):
        train(config, tmp_path / "ladder", progress=False)
    assert hs.ladder(tmp_path / "ladder").steps == [0, 4]
    assert len(losses(tmp_path / "ladder")) == 6


def test_a_run_that_diverges_stops(tmp_path):
    run = tiny.config(tmp_path, "train.lr=1e30", "train.warmup=0")
    with pytest.raises(ValueError, match="at step"):
        train(run, tmp_path / "ladder", progress=False)


@pytest.mark.parametrize("device", ["abacus", "cuda:x"])
def test_an_unknown_device_is_an_error(tmp_path, device):
    with pytest.raises(ValueError, match=f"train.device='{device}'"):
        train(tiny.config(tmp_path, f"train.device={device}"), tmp_path / "ladder", progress=False)


def test_a_device_that_is_not_there_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="no CUDA device"):
        train(tiny.config(tmp_path, "train.device=cuda"), tmp_path / "ladder", progress=False)
    assert not (tmp_path / "ladder").exists()
