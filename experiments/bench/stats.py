"""Attention statistics beside attention itself: speed, memory, and errors against a dense fp64 oracle, on one GPU.

    python -m hybridscope.experiments.bench.stats --out attention_stats.json --budget 400

Cells (stats_cells.py) run in a worker process, the most wanted first, and are saved one by one; the same records stand
in a CSV beside the JSON file. Run again with the same --out to go on. `--tiles` tries candidate tiles of the kernel
instead and prints the fastest: the table in hooks/kernels/attention_stats_launch.py is kept by hand.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from ...hooks.kernels.dispatch import use_kernels
from ..train import commit
from . import stats_cells, tables, workers
from .flops import nominal_peak
from .stats_cells import Cell
from .step import matmul_peak
from .train import need_device, version_of

MODULE = "hybridscope.experiments.bench.stats"
LIMIT = 120.0
"""Seconds that a worker may be silent."""


def work(names: list[str], device: torch.device) -> None:
    """Measure cells one after another and print their records as JSON lines."""
    print(json.dumps({"facts": {"measured_peak": matmul_peak(device)}}), flush=True)
    workers.work(names, lambda name: stats_cells.measure(Cell(name), device))


def bench(out: Path, names: list[str], device: str, budget: float) -> workers.Row:
    """Measure the cells that `out` does not hold yet; returns and writes {rows, not_run, ...}."""
    result = _opened(out, device)

    def save() -> None:
        compare(result)
        workers.save(out, result)
        save_table(out.with_suffix(".csv"), result)

    return workers.drive(
        out, result, names, [MODULE, "--device", device], budget=budget, limit=LIMIT, line_of=line_of, save_as=save
    )


def _opened(out: Path, device: str) -> workers.Row:
    if out.is_file():
        result = json.loads(out.read_text())
        if result.get("bench") != "attention_stats":
            raise ValueError(f"{out}: holds something else; choose another --out")
        return result
    gpu = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    from ...hooks.kernels import attention_stats_launch as launch

    return {
        "bench": "attention_stats", "device": gpu, "nominal_peak": nominal_peak(gpu), "measured_peak": None,
        "versions": {name: version_of(name) for name in ("torch", "triton")}, "commit": commit(),
        "tiles": {
            f"{bits}-bit, head dim <= {d}{what}": list(t)
            for what, table in (("", launch.TILES), (", top-1", launch.TOP1)) for bits, by in table.items()
            for d, t in by.items()
        },
        "rows": [], "not_run": [], "cell_seconds": {},
    }  # fmt: skip


def compare(result: workers.Row) -> None:
    """Fill in rates, the share of the QK^T floor (its FLOPs at the measured peak), and ratios: of an operator's time to
    cuDNN's on the same shape, of a model's to the plain forward pass."""
    good = [row for row in result["rows"] if row["status"] == "ok"]
    for row in good:
        if row["kind"] == "op":
            row["tflops"] = row["flops"] / row["ms"] / 1e9
            floor = row["flops"] / result["measured_peak"] * 1e3 if result["measured_peak"] else None
            row["of_floor"] = floor / row["ms"] if floor and row["path"].startswith("stats") else None
            same = ("kind", "T", "D", "G", "window")
            base = "cudnn" if row["window"] is None else "flex"
        elif row["kind"] == "model":
            same, base = ("kind", "T"), "plain"
        else:
            continue
        other = [r for r in good if r.get("path") == base and all(r.get(n) == row[n] for n in same)]
        row["ratio"] = row["ms"] / other[-1]["ms"] if other else None


def save_table(file: Path, result: workers.Row) -> None:
    """The records as CSV, one a line."""
    import pandas as pd

    flat = [{n: v for n, v in row.items() if not isinstance(v, dict)} for row in result["rows"]]
    frame = pd.DataFrame(flat)
    frame.insert(0, "device", result["device"])
    frame.to_csv(file, index=False)


def line_of(row: workers.Row) -> str:
    """One record for the terminal."""
    head = f"{row['cell']:24s} {row.get('path', ''):26s}"
    if row["status"] != "ok":
        return f"{head} {row['status'].upper()} {row['exception'][:120]}"
    if row["kind"] == "check":
        worst = max(row["errors"], key=lambda name: row["errors"][name])
        return f"{head} {row['worst']:.2f} of the bound ({worst}), repeats {row['repeats']}, ok {row['ok']}"
    memory = f", {row['peak_gib']:.2f} GiB" if "peak_gib" in row else ""
    ratio = f", {row['ratio']:.3f}x" if row.get("ratio") else ""
    rate = f", {row['tflops']:.0f} TFLOP/s" if "tflops" in row else ""
    return f"{head} {row['ms']:9.3f} ms{ratio}{rate}{memory}"


# Tiles

WANTED = [(0, False), (1, False), (2, False), (1, True), (2, True)]
"""How the top key is found (0: not at all), and whether distances are summed; all with mass on one set."""


def candidates(head_dim: int) -> list[tuple[Any, ...]]:
    """Tiles worth a try for 16-bit inputs: (m, n, warps, stages, registers)."""
    shapes = [
        (128, 64, 8), (128, 128, 8), (64, 128, 4), (64, 64, 4), (256, 64, 8), (128, 64, 4), (128, 32, 8), (256, 32, 8),
    ]  # fmt: skip
    caps = {8: (None, 128), 4: (None, 168, 128)}
    tried = [(*s, stages, r) for s in shapes for stages in (2, 3) for r in caps[s[2]]]
    per = 2 * max(16, head_dim)
    return [t for t in tried if per * (t[0] + t[1] * t[3]) <= 220_000]


def try_tiles(jobs: list[tuple[int, list[Any]]], lengths: list[int]) -> None:
    """Print JSON lines of tiles' times, for (head dim, tile); lengths of 0 only compile."""
    for head_dim, tile in jobs:
        try_tile(head_dim, tile, lengths)


def try_tile(head_dim: int, tile: list[Any], lengths: list[int]) -> None:
    from ...hooks.kernels import attention_stats_launch as launch

    for find, distance in WANTED:
        for T in lengths:
            shape = (1, T or 512, 16, head_dim)  # queries that are their own keys would find the top one at once
            q, k = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2))
            labels = torch.zeros(1, T or 512, dtype=torch.uint8, device="cuda")
            labels[:, 100:108] = 1

            chosen = launch.Tile(*tile)._replace(find=max(1, find))

            def f(
                q: Any = q, k: Any = k, labels: Any = labels, find: int = find, distance: bool = distance,
                chosen: Any = chosen,
            ) -> Any:  # fmt: skip
                return launch.stats(
                    q=q, k=k, rows=None, scale=head_dim**-0.5, causal=True, window=None, sinks=0, limit=None,
                    sink_logits=None, softcap=None, labels=labels, sets=1, q_pos=None, k_pos=None, q_seg=None,
                    k_seg=None, top1=find > 0, distance=distance, bins=0, tile=chosen, splits=1,
                )  # fmt: skip

            row = {"D": head_dim, "tile": tile, "find": find, "distance": distance, "T": T}
            got = stats_cells.attempt(row, lambda f=f: stats_cells.timed(f, torch.device("cuda"), 0.05))
            print(json.dumps(got), flush=True)


def tiles(out: Path, dims: list[int], budget: float, processes: int) -> None:
    """Compile all candidates side by side, time them one by one at 16K and 64K, print and save what is fastest."""
    errors = out.with_name(out.stem + "-tiles.stderr")
    out.parent.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + budget
    todo = [(d, list(t)) for d in dims for t in candidates(d)]
    rows: list[workers.Row] = []

    def run(jobs: list[Any], lengths: list[int], keep: Callable[[workers.Row], None]) -> None:
        arguments = [MODULE, "--try", json.dumps([jobs, lengths])]
        workers.follow(arguments, keep, errors=errors, patience=lambda: min(90.0, deadline - time.monotonic()))

    def timed(row: workers.Row) -> None:
        rows.append(row)
        shown = f"{row['ms']:.2f} ms" if row["status"] == "ok" else row["status"]
        print(*(row[name] for name in ("D", "tile", "find", "distance", "T")), shown, flush=True)
        out.with_name(out.stem + "-tiles.json").write_text(json.dumps(rows))

    with ThreadPoolExecutor(processes) as pool:
        list(pool.map(lambda n: run(todo[n::processes], [0], lambda row: None), range(processes)))
    print(f"compiled {len(todo)} tiles; {deadline - time.monotonic():.0f} s left", flush=True)
    run(todo, [16_384, 65_536], timed)
    good = [r for r in rows if r["status"] == "ok"]
    for d, T, (find, distance) in itertools.product(dims, (16_384, 65_536), WANTED):
        mine = [r for r in good if (r["D"], r["T"], r["find"], r["distance"]) == (d, T, find, distance)]
        best = sorted(mine, key=lambda r: r["ms"])[:4]
        print(f"D {d}, T {T}, top-1 {find}, distance {distance}:", [(r["tile"], round(r["ms"], 3)) for r in best])


def main(args: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/bench/attention_stats.json"))
    parser.add_argument(
        "--budget", type=float, default=400, help="seconds; what is not begun then is listed as not run"
    )
    parser.add_argument("--cells", nargs="+", help=f"of {', '.join(stats_cells.PLAN[:6])}, ...; all without it")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"], help="cpu: under TRITON_INTERPRET=1 only")
    parser.add_argument("--tiles", nargs="*", type=int, help="try tiles for these head dims (64 128) instead")
    parser.add_argument("--processes", type=int, default=14, help="tiles: that compile side by side")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--try", dest="jobs", help=argparse.SUPPRESS)
    o = parser.parse_args(args)
    if o.worker:
        with use_kernels("fused" if o.device == "cuda" else "torch"):
            work(json.loads(o.worker), torch.device(o.device))
        return
    if o.jobs:
        try_tiles(*json.loads(o.jobs))
        return
    try:
        need_device(o.device)
        if o.tiles is not None:
            tiles(o.out, o.tiles or [64, 128], o.budget, o.processes)
            return
        result = bench(o.out, o.cells or stats_cells.PLAN, o.device, o.budget)
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None
    print(tables.markdown(result))
    print(o.out)


if __name__ == "__main__":
    main()
