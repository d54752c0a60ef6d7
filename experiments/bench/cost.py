"""What hybrids of Wang et al.'s grid cost beside all-full models of their widths: cache, prefill, decode (`hs.cost`).

    python -m hybridscope.experiments.bench.cost --out cost.json --runs 340m-gdn-3to1 --lengths 4096 65536

Random weights. A run is saved when it is measured; those not begun within the budget are listed.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from ...probes.cost import NEW_TOKENS, REPEATS, cost
from ..config import RunConfig
from ..sweeps import compressed, load_sweep
from ..train import commit, machine
from . import workers
from .train import need_device, report, version_of

RUNS = ("340m-gdn-3to1", "340m-gdn-6to1", "340m-gdn-pure")
LENGTHS = (4_096, 16_384, 65_536, 131_072)


def bench(
    out: Path, runs: Sequence[str], lengths: Sequence[int], device: str, budget: float, *, overrides: Sequence[str] = ()
) -> workers.Row:
    """Measure runs of the sweep wang2025, batch 1; returns and writes {rows, not_run, ...}."""
    deadline = time.monotonic() + budget
    context = max(lengths) + NEW_TOKENS
    configs = {name: _config(name, [*overrides, f"data.length={context}"]) for name in dict.fromkeys(runs)}
    names = ("torch", "triton", "flash-linear-attention")
    result: workers.Row = {
        "bench": "cost", "device": torch.cuda.get_device_name() if device == "cuda" else machine(),
        "versions": {name: version_of(name) for name in names}, "commit": commit(), "repeats": REPEATS,
        "new_tokens": NEW_TOKENS, "rows": [], "not_run": list(configs),
    }  # fmt: skip
    for name, config in configs.items():
        workers.save(out, result)
        if time.monotonic() > deadline:
            break
        hybrid = config.hybrid()
        table = cost(hybrid, lengths, device=device)
        layers = compressed(config.model.pattern)
        result["rows"] += [{"run": name, "layers": layers, **row} for row in table.to_dict("records")]
        result["not_run"].remove(name)
        workers.save(out, result)
        print(name, f"{time.monotonic() - deadline + budget:.0f} s", flush=True)
    return result


def _config(name: str, overrides: list[str]) -> RunConfig:
    return load_sweep("wang2025", overrides, name).runs[name]


def main(args: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/bench/cost.json"))
    parser.add_argument("--runs", nargs="+", default=RUNS, help="of the sweep wang2025")
    parser.add_argument("--lengths", nargs="+", type=int, default=LENGTHS, help="tokens of context")
    parser.add_argument("--budget", type=float, default=540.0, help="seconds; runs not begun by then are listed")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--set", nargs="+", default=[], metavar="A.B=VALUE", help="overrides of the runs' configs")
    o = parser.parse_args(args)
    try:
        need_device(o.device)
        result = bench(o.out, o.runs, o.lengths, o.device, o.budget, overrides=o.set)
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None
    report(result, o.out)


if __name__ == "__main__":
    main()
