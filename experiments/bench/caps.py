"""Exact caps beside the uncapped kernels and beside what is not exact: time, memory, errors and leaks, on one GPU.

    python -m hybridscope.experiments.bench.caps --out caps.json --budget 400

Cells (caps_cells.py) run in a worker process, the most wanted first, and are saved one by one; run again with the same
--out to go on. fla's kernels are tuned when they first run; `--untuned` takes each one's first configuration instead.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from ...hooks.kernels.dispatch import use_kernels
from ..train import commit
from ..tuning import side_by_side, untuned
from . import caps_cells, tables, workers
from .caps_cells import Cell
from .train import need_device, version_of

MODULE = "hybridscope.experiments.bench.caps"
LIMIT = 240.0
"""Seconds that a worker may be silent: tuning one op."""


def bench(out: Path, names: list[str], device: str, budget: float, *, first_configuration: bool = False) -> workers.Row:
    """Measure the cells that `out` does not hold yet; returns and writes {rows, not_run, ...}."""
    result = _opened(out, device, first_configuration)

    def save() -> None:
        compare(result)
        workers.save(out, result)

    arguments = [MODULE, "--device", device, *(["--untuned"] if result["untuned"] else [])]
    return workers.drive(
        out, result, names, arguments, budget=budget, limit=LIMIT, line_of=line_of, save_as=save
    )  # fmt: skip


def _opened(out: Path, device: str, first_configuration: bool) -> workers.Row:
    if out.is_file():
        result = json.loads(out.read_text())
        if result.get("bench") != "caps":
            raise ValueError(f"{out}: holds something else; choose another --out")
        return result
    gpu = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    versions = {name: version_of(name) for name in ("torch", "triton", "flash-linear-attention")}
    return {
        "bench": "caps", "device": gpu, "versions": versions, "commit": commit(), "untuned": first_configuration,
        "rows": [], "not_run": [], "cell_seconds": {},
    }  # fmt: skip


def compare(result: workers.Row) -> None:
    """Fill in each time's ratio to the uncapped kernel's in its cell, and to FlexAttention's window if it has one."""
    good = [row for row in result["rows"] if row["status"] == "ok" and row["kind"] == "time"]
    times = {(row["cell"], row["path"]): row["ms"] for row in good}
    for row in good:
        for name, path in (("ratio", "uncapped"), ("vs_flex", "FlexAttention window")):
            base = times.get((row["cell"], path))
            row[name] = row["ms"] / base if base else None


def line_of(row: workers.Row) -> str:
    """One record for the terminal."""
    head = f"{row['cell']:24s} {row.get('path', row.get('kind', '')):22s}"
    if row["status"] != "ok":
        return f"{head} {row['status'].upper()} {row['exception'][:120]}"
    if row["kind"] == "check":
        return f"{head} error {row['error']:.1e} (uncapped {row['uncapped_error']:.1e}), {row['leaks']} rows leak"
    ratio = f", {row['ratio']:.2f}x" if row.get("ratio") else ""
    return f"{head} {row['ms']:9.3f} ms{ratio}"


def main(args: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/bench/caps.json"))
    parser.add_argument("--budget", type=float, default=400, help="seconds; what is not begun then is not run")
    parser.add_argument("--cells", nargs="+", help=f"of {', '.join(caps_cells.PLAN[:4])}, ...; all without it")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"], help="cpu: shows that the bench works")
    parser.add_argument("--untuned", action="store_true", help="each kernel's first configuration: quick, not the best")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    o = parser.parse_args(args)
    if o.worker:
        if o.device == "cuda":
            (untuned if o.untuned else side_by_side)()
        with use_kernels("fused" if o.device == "cuda" else "torch"):
            device = torch.device(o.device)
            workers.work(json.loads(o.worker), lambda name: caps_cells.measure(Cell(name), device))
        return
    try:
        need_device(o.device)
        result = bench(o.out, o.cells or caps_cells.PLAN, o.device, o.budget, first_configuration=o.untuned)
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None
    print(tables.markdown(result))
    print(o.out)


if __name__ == "__main__":
    main()
