"""Triton's autotuning in a process of its own: none, or every configuration compiled side by side.

Tuning compiles each configuration of each kernel, one after the other: minutes for a delta rule of fla.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

TUNER = "triton.runtime.autotuner"  # fla's own subclasses it


def untuned() -> None:
    """Make Triton's autotuners keep their first configuration only; before fla is imported.

    For checks that are not about speed. Raises RuntimeError where fla was imported already.
    """
    if "fla" in sys.modules:
        raise RuntimeError("untuned(): fla is imported already, its kernels have their configurations")
    tuner: Any = importlib.import_module(TUNER).Autotuner
    start = tuner.__init__

    def first(self: Any, fn: Any, arg_names: Any, configs: list[Any], *args: Any, **kwargs: Any) -> None:
        start(self, fn, arg_names, configs[:1], *args, **kwargs)

    tuner.__init__ = first


@functools.cache
def side_by_side() -> None:
    """Make Triton's autotuners compile all configurations at once, a core each, before they time them one by one.

    What fails to compile fails again, as usual, when its turn comes. Does nothing without Triton, or with one that
    cannot compile in threads.
    """
    if importlib.util.find_spec("triton") is None:
        return
    triton: Any = importlib.import_module("triton")
    mode = getattr(triton, "AsyncCompileMode", None)
    if mode is None:
        return
    tuner: Any = importlib.import_module(TUNER).Autotuner
    prune, bench = tuner.prune_configs, tuner._bench
    pool = ThreadPoolExecutor(os.cpu_count())

    def kept(self: Any, kwargs: dict[str, Any]) -> list[Any]:
        self.waiting = prune(self, kwargs)
        return self.waiting

    def timed(self: Any, *args: Any, config: Any, **meta: Any) -> Any:
        waiting, self.waiting = self.waiting, []
        with mode(pool, ignore_errors=True):
            for other in waiting:
                with contextlib.suppress(Exception):
                    self.fn.run(*args, **{**meta, "warmup": True}, **other.all_kwargs())
        return bench(self, *args, config=config, **meta)

    tuner.prune_configs, tuner._bench = kept, timed
