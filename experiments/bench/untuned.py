"""Kernels without autotuning: the first configuration of each, compiled once, for checks that are not about speed."""

from __future__ import annotations

import importlib
import sys
from typing import Any


def untuned() -> None:
    """Make `triton.autotune` keep the first configuration only; before fla is imported, in a process of its own.

    Tuning compiles every configuration of every kernel: minutes of all cores where a check takes seconds. Raises
    RuntimeError where fla was imported already.
    """
    if "fla" in sys.modules:
        raise RuntimeError("untuned(): fla is imported already, its kernels are decorated")
    triton: Any = importlib.import_module("triton")
    tuned = triton.autotune

    def autotune(configs: list[Any], *args: Any, **kwargs: Any) -> Any:
        return tuned(configs[:1], *args, **kwargs)

    triton.autotune = autotune
