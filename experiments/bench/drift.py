"""Q/K drift's reading: rows out of safetensors files beside whole checkpoints, in bytes/s of the Q/K rows needed.

    python -m hybridscope.experiments.bench.drift --out drift.json

On a synthetic ladder of random weights, made anew and removed afterwards. Four ways, each over the whole ladder:
`sequential` reads the files front to back (its rate is of all bytes, and the floor that the others are measured by),
`slices` reads the needed rows as `qk_drift` does, `checkpoints` loads every tensor and picks the rows, and `qk_drift`
is the measurement itself, fp64 arithmetic included. With the files in the page cache ("warm") and dropped from it
("cold", where the system lets us).
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from ...hooks.checkpoint import Checkpoint, write_json
from ...hooks.config import HybridConfig, ratio
from ...hooks.model import HybridLM
from ...hooks.projections import QKProjection, qk_projections
from ...probes.drift import qk_drift
from ..train import commit, machine
from . import tables, workers
from .train import version_of

BLOCK = 2**24
WAYS = ("sequential", "slices", "checkpoints", "qk_drift")
REPEATS = 7
Wanted = list[tuple[QKProjection, list[int]]]


@dataclasses.dataclass
class Options:
    """The synthetic ladder: `steps` checkpoints of a 3:1 GDN hybrid in bf16."""

    steps: int = 4
    layers: int = 24
    width: int = 1024
    vocab: int = 32_000


def make_ladder(folder: Path, options: Options) -> list[Checkpoint]:
    """Write the ladder."""
    heads = max(1, options.width // 64)
    config = HybridConfig(ratio("gdn", "3:1"), options.layers, options.width, heads, options.vocab)
    with torch.device("meta"):
        shapes = {name: x.shape for name, x in HybridLM(config).state_dict().items()}
    found = []
    for step in range(options.steps):
        path = folder / f"step-{step:06d}"
        path.mkdir(parents=True)
        write_json(path / "config.json", {"format": "hybridscope", "model": config.to_dict()})
        generator = torch.Generator().manual_seed(step)
        state = {
            n: torch.empty(s, dtype=torch.bfloat16).uniform_(-0.1, 0.1, generator=generator) for n, s in shapes.items()
        }
        save_file(state, path / "model.safetensors")
        found.append(Checkpoint(path, step))
    return found


def bench(out: Path, options: Options, budget: float) -> workers.Row:
    """Measure all ways; returns and writes {ladder, rows, not_run, ...}."""
    out.parent.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + budget
    folder = Path(tempfile.mkdtemp(prefix="drift-ladder-", dir=out.parent))  # on the disk that is to be measured
    try:
        ladder = make_ladder(folder, options)
        files = [file for checkpoint in ladder for file in checkpoint.files()]
        size = sum(f.stat().st_size for f in files)
        result: workers.Row = {
            "bench": "drift", "device": machine(), "versions": {n: version_of(n) for n in ("torch", "safetensors")},
            "commit": commit(), "ladder": {**dataclasses.asdict(options), "bytes": size},
            "rows": [], "not_run": [],
        }  # fmt: skip
        sites = qk_projections(ladder[0])
        every: Wanted = [(site, list(range(site.heads))) for site in sites]
        one = [(sites[-1], [0])]
        jobs = [
            (n, w, way, cold)
            for cold in (False, True)
            for n, w in (("one head", one), ("all heads", every))
            for way in WAYS
        ]
        for name, wanted, way, cold in jobs:
            label = f"{name}, {way}, {'cold' if cold else 'warm'}"
            if time.monotonic() > deadline or (cold and not hasattr(os, "posix_fadvise")):
                result["not_run"].append(label)
                continue
            needed = options.steps * sum(_row_bytes(site, heads) for site, heads in wanted)
            size = result["ladder"]["bytes"] if way == "sequential" else needed
            seconds = _timed(_job(way, ladder, wanted), files, cold)
            row = {"heads": name, "way": way, "cache": "cold" if cold else "warm", "seconds": seconds, "bytes": size}
            result["rows"].append({**row, "bytes_per_s": size / seconds})
            compare(result)
            workers.save(out, result)
            print(label, f"{size / seconds / 1e6:.1f} MB/s", flush=True)
        workers.save(out, result)
        return result
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def compare(result: workers.Row) -> None:
    """Each row's rate over the sequential one, and over that of loading whole checkpoints."""
    for row in result["rows"]:
        same = [r for r in result["rows"] if (r["heads"], r["cache"]) == (row["heads"], row["cache"])]
        rates = {r["way"]: r["bytes_per_s"] for r in same}
        for name, other in (("of_sequential", "sequential"), ("vs_checkpoints", "checkpoints")):
            row[name] = row["bytes_per_s"] / rates[other] if other in rates else None


def _job(way: str, ladder: list[Checkpoint], wanted: Wanted) -> Callable[[], None]:
    def sequential() -> None:
        buffer = bytearray(BLOCK)
        for checkpoint in ladder:
            for file in checkpoint.files():
                with open(file, "rb", buffering=0) as f:
                    while f.readinto(buffer):
                        pass

    def slices() -> None:
        for checkpoint in ladder:
            for site, heads in wanted:
                for name, rows in _rows(site, heads):
                    checkpoint.tensor(name, rows)  # a copy of its own, unlike mapped memory

    def checkpoints() -> None:
        for checkpoint in ladder:
            state = {n: x.clone() for file in checkpoint.files() for n, x in load_file(file).items()}
            for site, heads in wanted:
                for name, rows in _rows(site, heads):
                    state[name][rows].clone()

    def drift() -> None:
        qk_drift(ladder, heads=[(site.layer, site.site, head) for site, heads in wanted for head in heads])

    return {"sequential": sequential, "slices": slices, "checkpoints": checkpoints, "qk_drift": drift}[way]


def _rows(site: QKProjection, heads: list[int]) -> list[tuple[str, slice]]:
    """Stretches of rows of W_Q and W_K that neighbouring heads need."""
    kv = sorted({site.kv_head(head) for head in heads})
    size = site.head_dim
    return [(name, slice(its[0] * size, (its[-1] + 1) * size)) for name, its in ((site.q, heads), (site.k, kv))]


def _row_bytes(site: QKProjection, heads: list[int]) -> int:
    """Of one checkpoint, in bf16."""
    return 2 * site.width * sum(rows.stop - rows.start for _, rows in _rows(site, heads))


def _timed(job: Callable[[], None], files: list[Path], cold: bool) -> float:
    """Median seconds; warm: after a run that is not counted."""
    if not cold:
        job()
    found = []
    for _ in range(REPEATS):
        if cold:
            _drop(files)
        begin = time.perf_counter()
        job()
        found.append(time.perf_counter() - begin)
    return statistics.median(found)


def _drop(files: list[Path]) -> None:
    """Drop files from the page cache."""
    for file in files:
        with open(file, "rb") as f:
            os.fsync(f.fileno())
            os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def main(args: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/bench/drift.json"))
    parser.add_argument(
        "--budget", type=float, default=300, help="seconds; what is not begun then is listed as not run"
    )
    for field in dataclasses.fields(Options):
        parser.add_argument(f"--{field.name}", type=int, default=field.default)
    o = parser.parse_args(args)
    result = bench(o.out, Options(o.steps, o.layers, o.width, o.vocab), o.budget)
    print(tables.markdown(result))
    print(o.out)


if __name__ == "__main__":
    main()
