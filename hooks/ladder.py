"""Ladders: the saved steps of one training run, in order, loaded lazily: folders, DCP folders, revisions on a hub."""

from __future__ import annotations

import fnmatch
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from .checkpoint import Checkpoint, may_be_hub_id, read_json

STEP = re.compile(r"^(?:stage\d+-)?(?:step|checkpoint|global_step)[-_]?(\d+)(?:-tokens(\d+(?:\.\d+)?)([KMBT]))?$")
"""Names of steps: step-000100, checkpoint-100, step1000 (Pythia), stage1-step1000-tokens5B (OLMo)."""
TOKENS = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
RUN = "run.json"


class Ladder:
    """The readable steps of a run; iterating gives (step, Checkpoint).

    `problems` says which steps are missing or cannot be read, and why; `run` is run.json's content ({} without it).
    """

    def __init__(
        self, path: Path | str, checkpoints: list[Checkpoint], problems: dict[int, str], run: dict[str, Any]
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
        """Tokens trained on at `step`, where the step's name says it, or run.json how many one step takes."""
        named = [c.tokens for c in self.checkpoints if c.step == step and c.tokens is not None]
        if named:
            return named[0]
        per_step = self.run.get("tokens_per_step")
        return None if per_step is None else step * per_step


def ladder(
    path: str | Path,
    *,
    steps: Iterable[int] | None = None,
    revisions: str = "*",
    config: str | Path | Mapping[str, Any] | None = None,
) -> Ladder:
    """Open a run: a folder of `step-NNNNNN/`, `checkpoint-N/` and the like, or a hub id whose revisions are steps.

    In a folder each step is a checkpoint of ours, transformers or fla, or a DCP folder of flame (`config`: its model's
    config.json or that file's content, where none lies beside the steps). On a hub, revisions named `step1000` or
    `stage1-step1000-tokens5B` count; `revisions` picks among them, as in "stage1-*", and nothing is fetched before a
    step is loaded. `steps`: only these.

    Steps that are missing (asked for, or listed in run.json) or unreadable are warned about and left out. Raises
    FileNotFoundError where there is no such folder, OSError where the hub does not answer; ValueError for a ladder
    without a readable step, two of one number, or two with identical weights (both are named).

    >>> for step, checkpoint in ladder("runs/demo/ladder"): model = checkpoint.load()
    >>> ladder("EleutherAI/pythia-70m", steps=[0, 1000, 143000])
    """
    folder = Path(path).expanduser()
    wanted = None if steps is None else sorted(set(steps))
    if folder.is_dir():
        if revisions != "*":
            raise ValueError(f"revisions={revisions!r}: {folder} is a local folder, which has no revisions")
        run = read_json(folder / RUN) if (folder / RUN).is_file() else {}
        readable, problems = _local(folder, run, wanted, config)
        where: Path | str = folder
    else:
        where, run = str(path), {}
        if not may_be_hub_id(path):
            raise FileNotFoundError(f"{folder}: no such ladder")
        if config is not None:
            raise ValueError(f"config: only for DCP folders; {where} is not a folder here, so it is read as a hub id")
        readable, problems = _hub(where, revisions, wanted)
    for step, problem in sorted(problems.items()):
        warnings.warn(f"{where}: step {step} left out: {problem}", stacklevel=2)
    if not readable:
        what = "folders named step-NNNNNN" if folder.is_dir() else "revisions named step1000"
        raise ValueError(f"{where}: an empty ladder; expected {what} with a checkpoint in each")
    _refuse_duplicates(where, readable)
    return Ladder(where, readable, problems, run)


def _local(
    folder: Path, run: dict[str, Any], wanted: list[int] | None, config: Any
) -> tuple[list[Checkpoint], dict[int, str]]:
    """The readable steps of a folder, and what is wrong with the others."""
    found = _by_step(folder, (child.name for child in folder.iterdir() if child.is_dir()), wanted)
    asked = run.get("steps", []) if wanted is None else wanted
    problems = {step: "missing" for step in asked if step not in found}
    readable = []
    for step, (name, tokens) in sorted(found.items()):
        child = folder / name
        try:
            if (child / ".metadata").is_file():
                from .adapters.flame import DcpCheckpoint

                checkpoint: Checkpoint = DcpCheckpoint(child, step, config)
            else:
                checkpoint = Checkpoint(child, step, tokens)
            checkpoint.names()
            checkpoint.config()
            readable.append(checkpoint)
        except (ValueError, OSError) as error:
            problems[step] = str(error)
    return readable, problems


def _hub(repo: str, pattern: str, wanted: list[int] | None) -> tuple[list[Checkpoint], dict[int, str]]:
    """The same for the revisions of a repository."""
    from .adapters import hub

    names = [name for name in hub.revisions(repo) if fnmatch.fnmatch(name, pattern)]
    found = _by_step(repo, names, wanted, '; choose with revisions, e.g. "stage1-*"')
    problems = {step: "missing" for step in wanted or [] if step not in found}
    at = {name: (step, tokens) for step, (name, tokens) in sorted(found.items())}
    readable, broken = hub.checkpoints(repo, at)
    return readable, {**problems, **broken}


def _by_step(
    where: Path | str, names: Iterable[str], wanted: list[int] | None, hint: str = ""
) -> dict[int, tuple[str, int | None]]:
    """Step -> its name and the tokens that it says; ValueError for two of one step."""
    found: dict[int, tuple[str, int | None]] = {}
    for name in names:
        match = STEP.match(name)
        if match is None or (wanted is not None and int(match[1]) not in wanted):
            continue
        step = int(match[1])
        if step in found:
            raise ValueError(f"{where}: {found[step][0]} and {name} are both step {step}{hint}")
        found[step] = name, None if match[2] is None else round(float(match[2]) * TOKENS[match[3]])
    return found


def _refuse_duplicates(where: Path | str, checkpoints: list[Checkpoint]) -> None:
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
                    f"{where}: steps {twin.step} and {checkpoint.step} hold identical weights; "
                    "one of them is not what its name says"
                )
