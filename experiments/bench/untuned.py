"""Kernels without autotuning: the first configuration of each, compiled once, for checks that are not about speed."""

from __future__ import annotations

import importlib
import sys
from typing import Any


def untuned() -> None:
    """Make Triton's autotuners keep their first configuration only; before fla is imported, in a process of its own.

    Tuning compiles every configuration of every kernel: minutes of all cores where a check takes seconds. Raises
    RuntimeError where fla was imported already.
    """
    if "fla" in sys.modules:
        raise RuntimeError("untuned(): fla is imported already, its kernels have their configurations")
    tuner: Any = importlib.import_module("triton.runtime.autotuner").Autotuner  # fla's own subclasses it
    start = tuner.__init__

    def first(self: Any, fn: Any, arg_names: Any, configs: list[Any], *args: Any, **kwargs: Any) -> None:
        start(self, fn, arg_names, configs[:1], *args, **kwargs)

    tuner.__init__ = first
