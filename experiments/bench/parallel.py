"""The same training on one GPU, and on several under DDP and FSDP2: losses and weights side by side.

    python -m hybridscope.experiments.bench.parallel --out parallel.json

Each is a training under torchrun, as `hybridscope train` runs it, of a 100M model on the demo's data (filler scored,
which is learned in tens of steps); only fla's kernels are not tuned. Losses differ by what the sums of bf16 gradients
round to; files must load alike.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from ...hooks.checkpoint import Checkpoint
from ..config import load_config
from ..train import commit, train
from ..tuning import untuned
from . import workers
from .train import need_device, version_of

MODULE = "hybridscope.experiments.bench.parallel"
SETTINGS = [
    'model.pattern=["gdn", "full"]', "model.n_layers=12", "model.d_model=768", "model.n_heads=12", "model.d_ff=2048",
    "model.init_std=0.02", "model.mixers={gdn={key_dim=64, value_dim=64}}", "data.length=1024", "data.vocab_size=96",
    "data.copy_share=0.2", "data.filler_weight=1.0", "train.batch=64", "train.lr=1e-3", "train.warmup=10",
    "train.saves=1", "train.seed=0",
]  # fmt: skip
TOLERANCE = 0.01
"""Largest difference of two loss curves, as a share of how far the single GPU's falls."""


def run(folder: Path, processes: int, parallel: str, steps: int, device: str) -> workers.Row:
    """One training: its losses, the final weights' norm, and its wall time, start and compiling included."""
    name = f"{parallel}-{processes}"
    settings = [*SETTINGS, f"train.steps={steps}", f"train.parallel={parallel}", f"train.device={device}"]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    command += ["-m", MODULE, "--worker", str(folder / name), *settings]
    start = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    row: workers.Row = {"parallel": parallel, "processes": processes, "seconds": time.monotonic() - start}
    if done.returncode:
        return row | {"status": "failed", "exception": done.stderr[-1500:]}
    lines = [json.loads(line) for line in (folder / name / "loss.jsonl").read_text().splitlines()]
    last = Checkpoint(folder / name / f"step-{steps:06d}", steps)
    norm = sum(float(last.tensor(t).double().square().sum()) for t in sorted(last.names())) ** 0.5
    return row | {"status": "ok", "losses": [line["loss"] for line in lines], "weight_norm": norm}


def bench(out: Path, processes: int, steps: int, device: str = "cuda") -> workers.Row:
    """All runs; writes and returns {rows, ...}."""
    result: workers.Row = {
        "bench": "parallel", "device": torch.cuda.get_device_name() if device == "cuda" else "cpu", "commit": commit(),
        "versions": {n: version_of(n) for n in ("torch", "triton", "flash-linear-attention")}, "steps": steps,
        "settings": SETTINGS, "tolerance": TOLERANCE, "rows": [],
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        for count, parallel in ((1, "ddp"), (processes, "ddp"), (processes, "fsdp")):
            result["rows"].append(run(Path(folder), count, parallel, steps, device))
            compare(result["rows"])
            workers.save(out, result)
            print({k: v for k, v in result["rows"][-1].items() if k != "losses"}, flush=True)
    return result


def compare(rows: list[dict[str, Any]]) -> None:
    """Each curve beside the single process's: the largest difference, as a share of the drop, and `ok`."""
    alone = rows[0].get("losses")
    for row in rows:
        if alone is None or "losses" not in row:
            continue
        apart = max(abs(a - b) for a, b in zip(alone, row["losses"], strict=True))
        drop = alone[0] - alone[-1]
        row |= {"largest_difference": apart, "of_drop": apart / drop, "ok": 0 <= apart <= TOLERANCE * drop}


def work(folder: Path, settings: list[str]) -> None:
    """One of the processes, with the first configuration of each kernel."""
    if torch.cuda.is_available():
        untuned()
    train(load_config("demo", settings), folder, progress=False)


def main(args: list[str] | None = None) -> None:
    if sys.argv[1:2] == ["--worker"]:
        work(Path(sys.argv[2]), sys.argv[3:])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/bench/parallel.json"))
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    o = parser.parse_args(args)
    try:
        need_device(o.device)
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None
    bench(o.out, o.processes, o.steps, o.device)
    print(o.out)


if __name__ == "__main__":
    main()
