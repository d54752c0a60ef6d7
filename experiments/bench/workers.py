"""Benchmark workers: processes that print a JSON object a line, followed and stopped in time.

A process of its own, so that a crash on the GPU costs one measurement and not the run.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from threading import Timer
from typing import Any

Row = dict[str, Any]


def follow(
    arguments: list[str], keep: Callable[[Row], None], *, errors: Path, patience: Callable[[], float],
    environment: Mapping[str, str] | None = None,
) -> int | str:  # fmt: skip
    """Run `python -m ...` and hand on its JSON lines; its exit status, or "stopped".

    `patience()` says, at the start and after every line, how many seconds it may be silent. What it writes to stderr
    goes to the file `errors`.
    """
    stopped: list[bool] = []
    with errors.open("a") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", *arguments], stdout=subprocess.PIPE, stderr=stderr, text=True,
            env={**os.environ, **(environment or {})}, start_new_session=True,
        )  # fmt: skip

        def stop() -> None:
            stopped.append(True)
            end(process)

        def wound() -> Timer:
            timer = Timer(max(0.0, patience()), stop)
            timer.daemon = True
            timer.start()
            return timer

        timer = wound()
        assert process.stdout is not None
        try:
            for line in process.stdout:
                timer.cancel()
                if line.startswith("{"):
                    keep(json.loads(line))
                timer = wound()
            code = process.wait()
        finally:
            timer.cancel()
            end(process)
            process.stdout.close()
            process.wait()
    return "stopped" if stopped else code


def end(process: subprocess.Popen[str]) -> None:
    """Kill a worker with all that it started (compilers, too)."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def tail(errors: Path, lines: int = 6) -> str:
    """The last lines of a worker's stderr."""
    return "\n".join(errors.read_text(errors="replace").splitlines()[-lines:])[-2000:] if errors.is_file() else ""


def save(file: Path, result: Row) -> None:
    """Write JSON so that a reader never sees half of it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(file.name + ".partial")
    partial.write_text(json.dumps(result, indent=1))
    os.replace(partial, file)
