"""Ladders: the saved steps of one training run, in order, loaded lazily."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .checkpoint import Checkpoint, read_json

STEP = re.compile(r"^(?:step|checkpoint|global_step)[-_]?(\d+)$")
RUN = "run.json"


class Ladder:
    """The readable steps of a run; iterating gives (step, Checkpoint).

    `problems` says which steps are missing or cannot be read, and why; `run` is run.json's content ({} without it).
    """

    def __init__(
        self, path: Path, checkpoints: list[Checkpoint], problems: dict[int, str], run: dict[str, Any]
    ) -> None:
        self.path = path
        self.checkpoints = checkpoints
        self.problems = problems
        self.run = run

    def __iter__(self) -> Iterator[tuple[int, Checkpoint]]:
        return ((c.step, c) for c in self.checkpoints)

    def __len__(self) -> int:
        return len(self.checkpoints)

    def __getitem__(self, index: int) -> Checkpoint:
        return self.checkpoints[index]

    def __repr__(self) -> str:
        return f"Ladder({str(self.path)!r}, steps={self.steps})"

    @property
    def steps(self) -> list[int]:
        return [c.step for c in self.checkpoints]

    @property
    def final(self) -> Checkpoint:
        return self.checkpoints[-1]

    def step(self, step: int) -> Checkpoint:
        """The checkpoint of one step; ValueError names the steps there are."""
        for checkpoint in self.checkpoints:
            if checkpoint.step == step:
                return checkpoint
        raise ValueError(f"{self.path}: no step {step}; it has {self.steps}")

    def tokens(self, step: int) -> int | None:
        """Tokens trained on at `step`, where run.json says how many one step takes."""
        per_step = self.run.get("tokens_per_step")
        return None if per_step is None else step * per_step


def ladder(path: str | Path) -> Ladder:
    """Open a folder of `step-NNNNNN/`, `checkpoint-N/` and the like, each a checkpoint of ours or of transformers.

    Steps that are missing (run.json lists what was saved) or unreadable are warned about and left out. Raises
    FileNotFoundError where there is no such folder; ValueError for a ladder without a readable step, or one in which
    two steps hold identical weights (both are named).

    >>> for step, checkpoint in ladder("runs/demo/ladder"): model = checkpoint.load()
    """
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: no such ladder")
    run = read_json(folder / RUN) if (folder / RUN).is_file() else {}
    found: dict[int, Checkpoint] = {}
    for child in folder.iterdir():
        match = STEP.match(child.name)
        if match and child.is_dir():
            step = int(match[1])
            if step in found:
                raise ValueError(f"{folder}: {found[step].path.name} and {child.name} are both step {step}")
            found[step] = Checkpoint(child, step)
    problems = {step: "missing" for step in run.get("steps", []) if step not in found}
    readable = []
    for step, checkpoint in sorted(found.items()):
        try:
            checkpoint.names()
            if not (checkpoint.path / "config.json").is_file():
                raise FileNotFoundError(f"{checkpoint.path}: no config.json")
            readable.append(checkpoint)
        except (ValueError, OSError) as error:
            problems[step] = str(error)
    for step, problem in sorted(problems.items()):
        warnings.warn(f"{folder}: step {step} left out: {problem}", stacklevel=2)
    if not readable:
        raise ValueError(f"{folder}: an empty ladder; expected folders named step-NNNNNN with a checkpoint in each")
    _refuse_duplicates(folder, readable)
    return Ladder(folder, readable, problems, run)


def _refuse_duplicates(folder: Path, checkpoints: list[Checkpoint]) -> None:
    """Compare cheap sampled hashes first, whole files only where those agree."""
    by_sample: dict[str, list[Checkpoint]] = {}
    for checkpoint in checkpoints:
        by_sample.setdefault(checkpoint.weight_hash(sample=True), []).append(checkpoint)
    for alike in by_sample.values():
        seen: dict[str, Checkpoint] = {}
        for checkpoint in alike if len(alike) > 1 else []:
            twin = seen.setdefault(checkpoint.weight_hash(), checkpoint)
            if twin is not checkpoint:
                raise ValueError(
                    f"{folder}: steps {twin.step} and {checkpoint.step} hold identical weights; "
                    "one of them is not what its name says"
                )
