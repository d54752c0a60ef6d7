"""The same short training through fused kernels and through the torch path, on the GPU: do losses fall alike?

    python -m hybridscope.experiments.bench.parity_train --out parity_train.json

Each mixer at 1:1 with full attention, 4 layers of width 256, 50 steps from the same weights on the same data, four
times: fused and torch, in bf16 autocast (as the training loop) and in fp32 (kernels in TF32). The torch path computes
its recurrence in fp32 in either. Data: a token follows from the one before it or the one before that,
so that the loss cannot fall far without the mixers. `full` has no recurrence: its row is the noise of the run itself.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ...hooks.config import HybridConfig
from ...hooks.kernels import dispatch
from ...hooks.kernels import fused as kernels
from ...hooks.model import HybridLM
from ..tuning import untuned
from . import workers

MODULE = "hybridscope.experiments.bench.parity_train"
STEPS, BATCH, LENGTH, VOCABULARY = 50, 16, 256, 64
LR, WARMUP = 1e-3, 10
"""Gentle: at 2e-3 without warm-up the first steps overshoot, and one rounding decides how far (rwkv6: 0.8)."""
DTYPES = ("bf16", "fp32")
TOLERANCE = {"bf16": 0.02, "fp32": 0.01}
"""Largest difference between the two curves, as a share of how far the torch path's loss falls."""
MIXERS = ("full", *kernels.MIXERS)


class Chain:
    """Batches [B,T] of a random chain: half of the tokens follow from the one before, half from the one before that,
    each by a table of four successors."""

    def __init__(self, vocabulary: int = VOCABULARY, seed: int = 0) -> None:
        self.vocabulary, self.seed = vocabulary, seed
        self.tables = np.random.default_rng(seed).integers(0, vocabulary, (2, vocabulary, 4))

    def batch(self, step: int, size: int = BATCH, length: int = LENGTH) -> Tensor:
        rng = np.random.default_rng((self.seed, step))
        tokens = rng.integers(0, self.vocabulary, (size, length))
        back = rng.integers(0, 2, (size, length))
        which = rng.choice(4, (size, length), p=[0.7, 0.1, 0.1, 0.1])
        rows = np.arange(size)
        for t in range(2, length):
            before = tokens[rows, t - 1 - back[:, t]]
            tokens[:, t] = self.tables[back[:, t], before, which[:, t]]
        return torch.from_numpy(tokens)


def losses(
    mixer: str, path: str, dtype: str, device: torch.device, steps: int = STEPS, seed: int = 0,
    shape: tuple[int, int] = (BATCH, LENGTH),
) -> list[float]:  # fmt: skip
    """The loss of every step of one training."""
    torch.manual_seed(seed)
    pattern = ("full",) if mixer == "full" else (mixer, "full")
    model = HybridLM(HybridConfig(pattern, 4, 256, 4, VOCABULARY)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.0)
    chain, curve = Chain(seed=seed), []
    with dispatch.use_kernels(path):
        for step in range(steps):
            optimizer.param_groups[0]["lr"] = LR * min(1.0, (step + 1) / WARMUP)
            x = chain.batch(step, *shape).to(device)
            with torch.autocast(device.type, torch.bfloat16, enabled=dtype == "bf16"):
                logits = model(x)[:, :-1]
            loss = F.cross_entropy(logits.float().flatten(0, 1), x[:, 1:].flatten())
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            curve.append(loss.detach())
    return [float(x) for x in curve]


def judge(torch_path: list[float], fused: list[float], dtype: str) -> workers.Row:
    """What a pair of curves says; `ok`: both fall, and they stay together within TOLERANCE."""
    drop = torch_path[0] - torch_path[-1]
    apart = max(abs(a - b) for a, b in zip(torch_path, fused, strict=True))
    finite = all(x == x and abs(x) != float("inf") for x in [*torch_path, *fused])
    share = apart / drop if drop > 0 else float("inf")
    return {
        "torch_first": torch_path[0], "torch_last": torch_path[-1], "fused_first": fused[0], "fused_last": fused[-1],
        "drop": drop, "largest_difference": apart, "of_drop": share, "tolerance": TOLERANCE[dtype],
        "ok": finite and drop > 0.3 and fused[0] > fused[-1] and share <= TOLERANCE[dtype],
        "torch_losses": torch_path, "fused_losses": fused,
    }  # fmt: skip


def row(
    mixer: str, dtype: str, device: torch.device, steps: int = STEPS, paths: Any = ("torch", "fused"), **options: Any
) -> workers.Row:
    """One record; an exception is recorded, too."""
    out: workers.Row = {"mixer": mixer, "dtype": dtype, "op": _op(mixer, dtype, device), "steps": steps}
    start = time.monotonic()
    try:
        slow, fast = (losses(mixer, path, dtype, device, steps, **options) for path in paths)
        out |= {"status": "ok", **judge(slow, fast, dtype)}
    except Exception as exception:
        out |= {"status": "failed", "ok": False, "exception": f"{type(exception).__name__}: {exception}"[:2000]}
    return out | {"seconds": round(time.monotonic() - start, 1)}


def _op(mixer: str, dtype: str, device: torch.device) -> str:
    if mixer == "full":
        return "none"
    if device.type != "cuda":
        return "torch"
    triton, capability = kernels.machine(device)
    of = torch.bfloat16 if dtype == "bf16" else torch.float32
    return kernels.path_of(kernels.MIXERS[mixer], triton=triton, capability=capability, training=True, dtype=of)[0]


def run(out: Path, mixers: list[str], dtypes: list[str], jobs: int, budget: float) -> workers.Row:
    """A process per mixer, `jobs` at a time, stopped after `budget` seconds; saved row by row."""
    from ..train import commit
    from .train import version_of

    names = ("torch", "triton", "flash-linear-attention")
    result: workers.Row = {
        "bench": "parity_train", "device": torch.cuda.get_device_name(), "commit": commit(), "steps": STEPS,
        "versions": {name: version_of(name) for name in names}, "tolerance": TOLERANCE, "rows": [],
        "not_run": [f"{mixer} {dtype}" for mixer in mixers for dtype in dtypes],
    }  # fmt: skip
    lock, deadline = Lock(), time.monotonic() + budget
    workers.save(out, result)

    def keep(line: workers.Row) -> None:
        with lock:
            result["rows"].append(line)
            result["not_run"].remove(f"{line['mixer']} {line['dtype']}")
            workers.save(out, result)
            print(line_of(line), flush=True)

    def task(mixer: str) -> None:
        if time.monotonic() >= deadline:
            return
        errors = out.with_name(f"{out.stem}-{mixer}.stderr")
        errors.unlink(missing_ok=True)
        arguments = [MODULE, "--worker", "--mixers", mixer, "--dtypes", *dtypes]
        tuned_in_a_crowd = {"FLA_CACHE_RESULTS": "0"}  # not for later runs on this machine
        patience = lambda: deadline - time.monotonic()  # noqa: E731
        code = workers.follow(arguments, keep, errors=errors, patience=patience, environment=tuned_in_a_crowd)
        if code == 0:
            errors.unlink()
        else:
            print(f"{mixer}: worker ended with {code}; {workers.tail(errors, 2)}", flush=True)

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(task, mixers))
    result["rows"].sort(key=lambda r: (DTYPES.index(r["dtype"]), mixers.index(r["mixer"])))
    workers.save(out, result)
    return result


def line_of(line: workers.Row) -> str:
    """One row for the terminal."""
    head = f"{line['mixer']:10s}{line['dtype']:6s}{line['op']:24s}{line['seconds']:5.0f} s  "
    if line["status"] != "ok":
        return head + "FAILED " + line["exception"].splitlines()[0][:120]
    return head + (
        f"{line['torch_first']:.3f} -> torch {line['torch_last']:.3f}, fused {line['fused_last']:.3f}; apart by at "
        f"most {line['largest_difference']:.1e}, {line['of_drop']:.2%} of the drop  {'ok' if line['ok'] else 'OVER'}"
    )


def main(args: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/bench/parity_train.json"))
    parser.add_argument("--mixers", nargs="+", choices=MIXERS, default=list(MIXERS), metavar="MIXER")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--jobs", type=int, default=min(8, os.cpu_count() or 1), help="processes at a time")
    parser.add_argument("--budget", type=float, default=400, help="seconds; what is not done then is left out")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    o = parser.parse_args(args)
    torch.set_num_threads(1)
    if o.worker:
        untuned()
        for mixer in o.mixers:
            for dtype in o.dtypes:
                print(json.dumps(row(mixer, dtype, torch.device("cuda"))), flush=True)
        return
    from .tables import markdown
    from .train import need_device

    try:
        need_device("cuda")
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None
    print(markdown(run(o.out, o.mixers, o.dtypes, o.jobs, o.budget)))
    print(o.out)


if __name__ == "__main__":
    main()
