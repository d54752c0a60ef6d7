"""A state to resume from that is broken names its file and what is wrong with it; nothing on disk is touched."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from tiny import assert_same_run, killed_at

from hybridscope.experiments.train import STATE, train

MUON = ("train.optimizer=muon",)


@pytest.fixture(scope="module", params=[(), MUON], ids=["adamw", "muon"])
def halted(request, tmp_path_factory) -> tuple[Any, Path]:
    """A config, and a run of it that was killed after step 6; its last checkpoint is step 4."""
    folder = tmp_path_factory.mktemp("halted")
    config = tiny.config(folder, *request.param)
    with pytest.MonkeyPatch.context() as patch:
        killed_at(patch, config, folder / "ladder", "schedule", lambda now, *_: now == 6)
    return config, folder / "ladder"


def content(folder: Path) -> dict[Path, bytes]:
    return {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def refused(config, folder: Path, named: str) -> None:
    before = content(folder)
    with pytest.raises(ValueError, match=rf"ladder/resume\.pt: {named}") as error:
        train(config, folder, progress=False)
    assert "\n" not in str(error.value)
    assert content(folder) == before


@pytest.mark.parametrize("spoil", [lambda b: b[:-200], lambda b: b[:100], lambda b: b"", lambda b: b"not a state" * 99])
def test_a_file_that_cannot_be_read(halted, tmp_path, spoil):
    config, run = halted
    folder = shutil.copytree(run, tmp_path / "ladder")
    whole = (folder / STATE).read_bytes()
    (folder / STATE).write_bytes(spoil(whole))
    refused(config, folder, "truncated or not a state to resume from")
    (folder / STATE).write_bytes(whole)  # the rest of the run is still good
    assert_same_run(train(config, folder, progress=False), train(config, tmp_path / "whole", progress=False))


def moment(state: dict) -> tuple[dict, str]:
    """One parameter's state in the last optimiser, and the name of a tensor in it."""
    entry = state["optimizers"][-1]["state"][0]
    return entry, "exp_avg" if "exp_avg" in entry else "momentum_buffer"


def lose(state: dict) -> None:
    del state["model"]["ln_final.weight"]


def reshape(state: dict) -> None:
    state["model"]["embed.weight"] = state["model"]["embed.weight"][:-1]


def poison(state: dict) -> None:
    state["model"]["embed.weight"][0, 0] = torch.nan


def lose_moments(state: dict) -> None:
    del state["optimizers"][-1]["state"][1]


def lose_moment(state: dict) -> None:
    entry, name = moment(state)
    del entry[name]


def reshape_moment(state: dict) -> None:
    entry, name = moment(state)
    entry[name] = entry[name][:-1]


def drop(name: str) -> Callable[[dict], None]:
    return lambda state: state["optimizers"][-1].pop(name)


def lose_group(state: dict) -> None:
    del state["optimizers"][-1]["param_groups"][-1]


def replace_moments(state: dict) -> None:
    state["optimizers"][-1]["state"][0] = 3


def poison_moment(state: dict) -> None:
    entry, name = moment(state)
    entry[name].view(-1)[0] = torch.inf


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (lose, r"lacks tensor 'ln_final\.weight'"),
        (reshape, r"embed\.weight has shape \(23, 16\); .* \(24, 16\)"),
        (poison, r"embed\.weight holds NaN"),
        (lose_moments, r"optimizers\[.\]: state\[1\] is missing or unknown; expected 0\.\.\d+"),
        (lose_moment, r"optimizers\[.\]: state\[0\] holds \[.*\]; expected tensors \['(exp_avg|momentum_buffer)'"),
        (reshape_moment, r"optimizers\[.\]: state\[0\]\.\w+ has shape \(\d+, 16\); expected \(\d+, 16\)"),
        (drop("state"), r"optimizers\[.\]: expected an optimiser's state and param_groups"),
        (drop("param_groups"), r"optimizers\[.\]: expected an optimiser's state and param_groups"),
        (lose_group, r"optimizers\[.\]: has \d groups of parameters; expected \d"),
        (replace_moments, r"optimizers\[.\]: state\[0\] holds 3; expected tensors"),
        (poison_moment, r"optimizers\[.\]: state\[0\]: \w+ holds NaN or infinite"),
        (lambda state: state.pop("step"), r"holds \['model', 'optimizers'\]; expected \['model', 'optimizers', 'step'"),
    ],
)
def test_a_state_of_another_model(halted, tmp_path, spoil, named):
    config, run = halted
    folder = shutil.copytree(run, tmp_path / "ladder")
    state = torch.load(folder / STATE, weights_only=True)
    spoil(state)
    torch.save(state, folder / STATE)
    refused(config, folder, named)


def test_a_state_that_is_something_else(halted, tmp_path):
    config, run = halted
    folder = shutil.copytree(run, tmp_path / "ladder")
    torch.save(torch.zeros(3), folder / STATE)
    refused(config, folder, r"holds Tensor; expected \['model', 'optimizers', 'step'\]")
