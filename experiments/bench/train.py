"""Training speed of layer patterns: tokens/s, MFU and peak memory, beside the all-full model and beside peers.

    python -m hybridscope.experiments.bench.train --out bench.json

A cell is one (size, length, pattern). It is a full optimiser step in bf16 autocast, compiled as the training loop does
it, AdamW and gradient clipping included, on random tokens; the median over steps timed with CUDA events. `gdn` is the
1:1 hybrid, `gdn@3:1` and `gdn@pure` other ratios, and peers.py lists the peers. Cells run one after another in a worker
process, the most wanted first, and are saved one by one; run again with the same --out to go on where it stopped. With
--gpus 2 two workers share the cells, those of one size and length on the same GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import gc
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from ...hooks.kernels import dispatch
from ..tuning import side_by_side
from . import flops, peers, tables, workers
from .cells import SIZES, Cell, plan
from .step import matmul_peak, measure

MODULE = "hybridscope.experiments.bench.train"


# The worker


def work(cells: list[Cell], device: torch.device, seconds: float) -> None:
    """Measure cells one after another and print them as JSON lines."""
    if device.type == "cpu":
        torch.set_num_threads(1)
    else:
        side_by_side()
    print(json.dumps({"peak": matmul_peak(device)}), flush=True)
    for cell in cells:
        print(json.dumps({"start": cell.id}), flush=True)
        began = time.monotonic()
        row: workers.Row = {"id": cell.id, **dataclasses.asdict(cell), **cell.options, "status": "ok"}
        try:
            row |= measure(cell, device, seconds=seconds)
        except Exception as exception:  # whatever a cell does on this machine belongs in the record
            text = " ".join(str(exception).split())
            row |= {"status": "failed", "exception": f"{type(exception).__name__}: {text}"[:1000]}
            traceback.print_exc()
        row["cell_seconds"] = round(time.monotonic() - began, 1)
        print(json.dumps(row), flush=True)
        if "CUDA error" in row.get("exception", ""):
            raise SystemExit(3)  # nothing works in this process any more; the driver starts another
        _forget(device)


def _forget(device: torch.device) -> None:
    """Leave nothing of a cell to the next: memory, graphs, shapes that dynamo would take for dynamic ones."""
    if dynamo := sys.modules.get("torch._dynamo.utils"):
        torch._dynamo.reset()
        dynamo.counters.clear()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


# The driver


@dataclasses.dataclass
class Options:
    """What a run was asked for."""

    cells: list[Cell]
    device: str = "cuda"
    budget: float = 540.0
    limit: float = 240.0
    """Seconds that one cell may take, compiling included."""
    seconds: float = 6.0
    """Timed seconds of a cell, at most."""
    gpus: int = 1


def bench(out: Path, options: Options) -> workers.Row:
    """Measure what `out` does not hold yet; returns and writes {rows, not_run, ...}."""
    result = _opened(out, options)
    session = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    done = {row["id"] for row in result["rows"] if row["status"] == "ok"}
    todo = [cell for cell in dict.fromkeys(options.cells) if cell.id not in done]
    result["not_run"] = [cell.id for cell in todo]
    workers.save(out, result)
    deadline = time.monotonic() + options.budget
    lock = threading.Lock()

    def add(row: workers.Row) -> None:
        with lock:
            result["rows"] = [r for r in result["rows"] if r["id"] != row["id"]]
            result["rows"].append({**row, "session": session})
            result["not_run"] = [name for name in result["not_run"] if name != row["id"]]
            compare(result)
            workers.save(out, result)
            print(line_of(result["rows"][-1]), flush=True)

    def peak(value: float | None) -> None:
        result["measured_peak"].setdefault(session, value)  # of GPUs of one kind, one of them will do

    def run(gpu: int, cells: list[Cell]) -> None:
        _follow(cells, options, deadline, gpu, out.with_name(f"{out.stem}-{gpu}.stderr"), add, peak)

    with ThreadPoolExecutor(options.gpus) as pool:
        list(pool.map(run, range(options.gpus), shares(todo, options.gpus)))
    return result


def shares(cells: list[Cell], gpus: int) -> list[list[Cell]]:
    """The cells of each GPU, in their order: what is compared, of one size and length, stays together."""
    groups: dict[tuple[str, int], list[Cell]] = {}
    for cell in cells:
        groups.setdefault((cell.size, cell.length), []).append(cell)
    out: list[list[Cell]] = [[] for _ in range(gpus)]
    for group in groups.values():
        min(out, key=len).extend(group)
    return out


def _follow(
    todo: list[Cell], options: Options, deadline: float, gpu: int, errors: Path, add: Callable[[workers.Row], None],
    peak: Callable[[float | None], None],
) -> None:  # fmt: skip
    """Have cells measured on one GPU until the deadline, by a new worker where one died."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(options.gpus)))).split(",")
    environment = {"CUDA_VISIBLE_DEVICES": visible[gpu]} if options.device == "cuda" else {}
    errors.unlink(missing_ok=True)
    running: list[str] = []

    def keep(line: workers.Row) -> None:
        if "peak" in line:
            peak(line["peak"])
        elif "start" in line:
            running[:] = [line["start"]]
        else:
            running.clear()
            todo[:] = [cell for cell in todo if cell.id != line["id"]]
            add(line)

    def patience() -> float:
        return min(options.limit, deadline - time.monotonic())

    while todo and time.monotonic() < deadline:
        before = len(todo)
        cells = json.dumps([cell.id for cell in todo])
        arguments = [MODULE, "--worker", cells, "--tokens", str(todo[0].tokens), "--device", options.device]
        arguments += ["--seconds", str(options.seconds)]
        code = workers.follow(arguments, keep, errors=errors, patience=patience, environment=environment)
        if not todo or time.monotonic() >= deadline:
            return
        if running:  # it died of this cell
            cell = next(cell for cell in todo if cell.id == running[0])
            why = f"no result within {options.limit:.0f} s" if code == "stopped" else f"worker ended with {code}"
            row = {"id": cell.id, **dataclasses.asdict(cell), **cell.options, "status": "failed"}
            keep(row | {"exception": f"{why}; {workers.tail(errors)}"})
        elif len(todo) == before:
            raise RuntimeError(f"the worker ended with {code} before any cell; {workers.tail(errors)}")


def _opened(out: Path, options: Options) -> workers.Row:
    """The results so far, or an empty record of this machine; ValueError where `out` holds something else, or was
    measured elsewhere: a table is of one machine and one state of the code."""
    from ..train import commit

    gpu = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
    names = ("torch", "triton", "flash-linear-attention", "transformers", "transformer-lens")
    fresh: workers.Row = {
        "bench": "train", "device": gpu, "nominal_peak": flops.nominal_peak(gpu), "measured_peak": {},
        "versions": {name: version_of(name) for name in names}, "commit": commit(),
        "formula": " ".join((flops.__doc__ or "").split()), "kernels": dispatch.policy(), "rows": [], "not_run": [],
    }  # fmt: skip
    if not out.is_file():
        return fresh
    result = json.loads(out.read_text())
    if result.get("bench") != "train":
        raise ValueError(f"{out}: holds something else; choose another --out")
    for name in ("device", "versions", "commit"):
        if result[name] != fresh[name]:
            raise ValueError(f"{out}: measured with {name} {result[name]}, here {fresh[name]}; choose another --out")
    return result


def compare(result: workers.Row) -> None:
    """Fill in MFU and the ratios of speed: to the all-full model, and to the fastest peer of the same architecture, of
    the same size and length; of the same session where there is one (`vs_*_session` otherwise names the other)."""
    good = [row for row in result["rows"] if row["status"] == "ok"]
    for row in good:
        peak, nominal = result["measured_peak"].get(row["session"]), result["nominal_peak"]
        row["mfu"] = row["flops_per_second"] / nominal if nominal else None
        row["mfu_whole"] = row["flops_per_second_whole"] / nominal if nominal else None
        row["of_measured_peak"] = row["flops_per_second"] / peak if peak else None
        names = {peer for peer, ours in peers.PEERS.items() if ours == row["pattern"]}
        for key, wanted in (("full", {"full"}), ("peer", names)):
            others = [
                r for r in good
                if (r["size"], r["length"], r["tokens"]) == (row["size"], row["length"], row["tokens"])
                and r["pattern"] in wanted and (key == "peer" or (r["loss"] != "plain" and r["attention"] == "auto"))
            ]  # fmt: skip
            if key == "full" and row["pattern"] not in peers.AS_SHIPPED:  # compiled in the same way where there is one
                others = [r for r in others if r["compile"] == row["compile"]] or others
            here = [r for r in others if r["session"] == row["session"]] or others
            best = max(here, key=lambda r: r["tokens_per_second"], default=None)
            row[f"vs_{key}"] = row["tokens_per_second"] / best["tokens_per_second"] if best else None
            row[f"vs_{key}_session"] = best["session"] if best and best["session"] != row["session"] else None


def line_of(row: workers.Row) -> str:
    """One cell for the terminal."""
    head = f"{row['id']:32s}{row.get('cell_seconds', 0):6.0f} s "
    if row["status"] != "ok":
        return f"{head} FAILED {row['exception'][:140]}"
    parts = [f"{row['tokens_per_second']:12,.0f} tokens/s"]
    if row["mfu"] is not None:
        parts.append(f"MFU {row['mfu']:.1%} ({row['mfu_whole']:.1%} by the whole square)")
    if row["peak_memory_gib"] is not None:
        parts.append(f"{row['peak_memory_gib']:.1f} GiB")
    parts += [f"{row[f'vs_{key}']:.2f}x {key}" for key in ("full", "peer") if row[f"vs_{key}"] is not None]
    return head + ", ".join(parts)


def version_of(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def report(result: workers.Row, out: Path) -> None:
    """Print the table, and where the results are."""
    print(tables.markdown(result))
    print(out)


def main(args: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/bench/train.json"), help="resumed where it exists")
    parser.add_argument("--sizes", nargs="+", help=f"of {', '.join(SIZES)}; without these three options a fixed plan")
    parser.add_argument("--lengths", nargs="+", type=int, help="tokens T of a sequence")
    parser.add_argument("--patterns", nargs="+", help="mixers, mixer@3:1, mixer@pure, or peers, and /tags")
    parser.add_argument("--budget", type=float, default=540, help="seconds; cells not begun by then are listed")
    parser.add_argument("--limit", type=float, default=240, help="seconds one cell may take, compiling included")
    parser.add_argument("--seconds", type=float, default=6, help="timed seconds of a cell, at most")
    parser.add_argument("--tokens", type=int, default=32_768, help="tokens of an optimiser step")
    parser.add_argument("--gpus", type=int, default=1, help="that share the cells")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    o = parser.parse_args(args)
    if o.worker:
        work([Cell.of(name, o.tokens) for name in json.loads(o.worker)], torch.device(o.device), o.seconds)
        return
    try:
        need_device(o.device)
        cells = plan(o.sizes, o.lengths, o.patterns, o.tokens)
        result = bench(o.out, Options(cells, o.device, o.budget, o.limit, o.seconds, o.gpus))
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None
    report(result, o.out)


def need_device(device: str) -> None:
    """ValueError where a CUDA device is asked for and there is none."""
    if device == "cuda" and not torch.cuda.is_available():
        built = torch.version.cuda
        what = f"torch {torch.__version__} sees no GPU" if built else f"torch {torch.__version__} is built without CUDA"
        raise ValueError(f"this bench needs a CUDA device, and {what}")


if __name__ == "__main__":
    main()
