"""What tests of the command line share: a folder to work in, a command that runs or is refused, and what it wrote."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pandas as pd
import planted
import pytest
import tiny
import torch
from planted import LANGUAGE, STRONG

from hybridscope.experiments import cli
from hybridscope.experiments.tables import read_table
from hybridscope.hooks.checkpoint import Checkpoint, save

DATA = {"vocab_size": LANGUAGE.vocab_size, "keys": LANGUAGE.keys, "values": LANGUAGE.values}
PNG = b"\x89PNG"


def fill(folder: Path) -> Path:
    """Leaves in `folder` a trained ladder (runs/tiny/ladder) and a planted one (planted), whose model answers."""
    (folder / "tiny.toml").write_text(tiny.TOML)
    with contextlib.chdir(folder):
        cli.main(["train", "tiny.toml", "--set", "train.steps=6", "--set", "train.saves=2"])
        for step, strength in ((0, 0.0), (10, 2.0), (20, STRONG)):
            model = planted.planted({0: strength, 2: 1.0})
            save(model, folder / "planted" / f"step-{step:06d}", {"step": step, "data": DATA})
    return folder


def run(capsys, *args: str) -> str:
    cli.main(list(args))
    return capsys.readouterr().out


def refused(capsys, *args: str) -> str:
    """The one line that a mistake costs; nothing is left half written."""
    before = set(Path().rglob("*"))
    with pytest.raises(SystemExit) as stop:
        cli.main(list(args))
    lines = capsys.readouterr().err.strip().splitlines()
    assert stop.value.code == 2
    assert len(lines) == 1, lines
    assert lines[0].startswith("error: ")
    assert set(Path().rglob("*")) == before
    return lines[0]


def written(out: str, measurement: str, weights: Path | None = None) -> pd.DataFrame:
    """The table and figure that a command named on its last two lines."""
    table, figure = map(Path, out.strip().splitlines()[-2:])
    data, facts = read_table(table)
    assert figure.read_bytes()[:4] == PNG
    assert figure.with_suffix("") == table.with_suffix("")
    assert facts["measurement"] == measurement
    assert facts["versions"]["torch"] == torch.__version__
    assert facts["command"].startswith("hybridscope")
    if weights is not None:
        assert facts["weights"] == Checkpoint(weights, 0).weight_hash()
    return data
