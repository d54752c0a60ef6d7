"""Benchmark workers: processes that print a JSON object a line, followed and stopped in time.

A process of its own, so that a crash on the GPU costs one measurement and not the run. `work` is the worker's side of a
bench of cells, `drive` the other one.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from threading import Timer
from typing import Any

Row = dict[str, Any]
BROKEN = 3  # exit status of a worker whose GPU refuses to go on


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


def work(names: list[str], measure: Callable[[str], Iterable[Row]]) -> None:
    """Measure cells one after another and print their records as JSON lines; one that fails is a record too."""
    for name in names:
        print(json.dumps({"start": name}), flush=True)
        begin = time.monotonic()
        try:
            for row in measure(name):
                print(json.dumps({"row": {"cell": name, **row}}), flush=True)
        except Exception as exception:
            traceback.print_exc()
            text = f"{type(exception).__name__}: {' '.join(str(exception).split())}"[:500]
            print(json.dumps({"row": {"cell": name, "status": "failed", "exception": text}}), flush=True)
            if "CUDA error" in text:
                raise SystemExit(BROKEN) from None  # nothing works in this process any more; drive() starts another
        print(json.dumps({"done": name, "seconds": round(time.monotonic() - begin, 1)}), flush=True)


def drive(
    out: Path, result: Row, names: list[str], arguments: list[str], *, budget: float, limit: float,
    line_of: Callable[[Row], str], save_as: Callable[[], None],
) -> Row:  # fmt: skip
    """Have the cells that `result` does not hold measured by `python -m ARGUMENTS --worker CELLS`, which calls `work`.

    Fills in result's rows, cell_seconds and not_run, and what the worker prints as {"facts": ...} where that is None,
    and saves by `save_as` after every record. Takes `budget` seconds; a worker that is silent for `limit` is stopped,
    its cell recorded as failed, and another goes on. The next call tries such cells again, after all others. Raises
    RuntimeError where a worker ends before any cell.
    """
    tried = result["cell_seconds"]
    todo = [name for name in names if name not in tried] + [n for n in names if n in tried and tried[n] is None]
    deadline = time.monotonic() + budget
    running: list[str] = []
    old: list[Row] = []
    errors = out.with_name(out.stem + ".stderr")
    out.parent.mkdir(parents=True, exist_ok=True)
    errors.unlink(missing_ok=True)

    def kept() -> None:
        result["not_run"] = todo
        save_as()

    def add(row: Row) -> None:
        """In place of what an earlier call has of the cell."""
        result["rows"] = [*(r for r in result["rows"] if r not in old), row]
        old.clear()

    def keep(line: Row) -> None:
        if "facts" in line:
            result.update({name: value for name, value in line["facts"].items() if result[name] is None})
        elif "start" in line:
            running[:] = [line["start"]]
            old[:] = [row for row in result["rows"] if row["cell"] == line["start"]]
        elif "row" in line:
            add(line["row"])
            kept()
            print(line_of(line["row"]), flush=True)
        else:
            finish(line["done"], line["seconds"])

    def finish(name: str, seconds: float | None) -> None:
        running.clear()
        todo.remove(name)
        result["cell_seconds"][name] = seconds
        kept()

    kept()
    while todo and time.monotonic() < deadline:
        before = len(todo)
        job = [*arguments, "--worker", json.dumps(todo)]
        code = follow(job, keep, errors=errors, patience=lambda: min(limit, deadline - time.monotonic()))
        if not todo or time.monotonic() >= deadline:
            break
        if running:
            why = f"no result within {limit:.0f} s" if code == "stopped" else f"worker ended with {code}"
            row = {"cell": running[0], "status": "failed", "exception": f"{why}; {tail(errors)}"}
            if code != BROKEN:  # it has said so itself
                add(row)
            finish(running[0], None)
        elif len(todo) == before:
            raise RuntimeError(f"the worker ended with {code} before any cell; {tail(errors)}")
    kept()
    return result
