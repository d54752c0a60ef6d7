"""What several commands share: types of their options, the model and the needles they ask for."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

Source = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="SOURCE")]
Config = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="CONFIG")]
Table = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="TABLE")]
Haystack = Literal["tokens", "repeat", "essay"]
Set = Annotated[tuple[str, ...], tyro.conf.arg(name="set", metavar="A.B=VALUE"), tyro.conf.UseAppendAction]
Names = Annotated[tuple[str, ...], tyro.conf.arg(metavar="A,B")]


def load_source(source: str) -> Any:
    import torch

    from ...hooks.checkpoint import load

    model: Any = load(source)
    return model.to("cuda") if torch.cuda.is_available() else model


def at_least_one(**counts: int | None) -> None:
    """ValueError for the first of these options that is below 1; those that were not given are None."""
    from ...probes import arguments

    arguments.at_least_one(**{f"--{name}": count for name, count in counts.items() if count is not None})


def needles_of(
    model: Any,
    source: str | Path,
    n: int,
    length: int | None,
    haystack: Haystack | None,
    values: int | None,
    seed: int,
    far: bool = False,
) -> Any:
    """Needles for a model; `far`: none within reach of its window layers."""
    from ..sources import needles_for

    at_least_one(n=n, length=length, values=values)
    distractors = 0 if model.tokenizer is not None else 3
    beyond = max((s.window for s in model.sites if s.window), default=0) if far else 0
    return needles_for(
        model, source, n, length=length, haystack=haystack, values=values, distractors=distractors, beyond=beyond,
        seed=seed,
    )  # fmt: skip
