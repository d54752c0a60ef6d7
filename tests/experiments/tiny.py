"""A run small enough to train in a second: as TOML and as a RunConfig; and what tests ask of runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hybridscope.experiments import train as module
from hybridscope.experiments.config import RunConfig, load_config

TOML = """
[model]
pattern = ["swa:4", "full"]
n_layers = 2
d_model = 16
n_heads = 2
d_ff = 16
init_std = 0.1

[data]
length = 32
vocab_size = 24
keys = 4
values = 4
needles = 2

[train]
steps = 12
batch = 8
lr = 1e-2
warmup = 2
saves = 3
"""


def config(tmp_path, *overrides: str) -> RunConfig:
    file = tmp_path / "tiny.toml"
    file.write_text(TOML)
    return load_config(file, overrides)


def losses(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "loss.jsonl").read_text().splitlines()]


def weights(folder: Path, step: int) -> dict[str, torch.Tensor]:
    return load_file(folder / f"step-{step:06d}" / "model.safetensors")


def assert_same_run(a: Path, b: Path) -> None:
    """Bit for bit: every checkpoint, the log, run.json."""
    assert sorted(p.name for p in a.iterdir()) == sorted(p.name for p in b.iterdir())
    for file in (p.relative_to(a) for p in a.rglob("*") if p.is_file()):
        assert (a / file).read_bytes() == (b / file).read_bytes(), file


def killed_at(monkeypatch, config, folder: Path, name: str, when) -> None:
    """Run until a call of train's `name` for which `when` holds."""
    real = getattr(module, name)

    def stop(*args, **kwargs):
        if when(*args):
            raise KeyboardInterrupt
        return real(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(module, name, stop)
        with pytest.raises(KeyboardInterrupt):
            module.train(config, folder, progress=False)
