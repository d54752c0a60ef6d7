"""What the processes of test_distributed.py do: `torchrun workers.py FOLDER` leaves ladders there."""

from __future__ import annotations

import functools
import shutil
import sys
import tempfile
from pathlib import Path

import tiny
import torch

from hybridscope.experiments import train as module

CASES = {
    "ddp": ("train.parallel=ddp",),
    "fsdp": ("train.parallel=fsdp",),
    "muon": ("train.parallel=fsdp", "train.optimizer=muon"),
    "narrow": ("train.parallel=fsdp", "train.optimizer=muon", "model.mixers.gdn.heads=1"),  # maps with a single row
}
KILLED = 6  # steps done by a run that is killed; its last checkpoint is step 4
# Every kind of weight, an odd width that two processes cannot halve, clipping that always binds, micro-batches.
COMMON = (
    'model.pattern=["swa:4", "gdn", "full"]', "model.n_layers=3", "model.tie_embeddings=true", "model.d_ff=17",
    "train.clip=0.05", "train.accumulate=2", "train.window_schedule=[[0.0, 2], [0.5, 8]]", "data.filler_weight=0.1",
)  # fmt: skip

SMALL = ('model.pattern=["swa:4", "full"]', "model.n_layers=2", "train.accumulate=1")  # quick to trace


def run(ladder: Path, case: str, *overrides: str) -> Path:
    """Train in float64, where sums in another order leave no trace that Adam could amplify."""
    with tempfile.TemporaryDirectory() as folder:
        config = tiny.config(Path(folder), *COMMON, *CASES[case], *overrides)
    torch.set_default_dtype(torch.float64)
    try:
        return module.train(config, ladder, progress=False)
    finally:
        torch.set_default_dtype(torch.float32)


def kill(ladder: Path, case: str) -> None:
    """A run that ends after KILLED steps."""
    schedule = module.schedule

    def stop(step: int, warmup: int, steps: int) -> float:
        if step == KILLED:
            raise KeyboardInterrupt
        return schedule(step, warmup, steps)

    module.schedule = stop
    try:
        run(ladder, case)
    except KeyboardInterrupt:
        pass
    finally:
        module.schedule = schedule


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    for case in CASES:
        run(folder / f"{case}-team", case)
        kill(folder / f"{case}-resumed", case)
        if torch.distributed.get_rank() == 0:
            shutil.copytree(folder / f"{case}-resumed", folder / f"{case}-left")  # one process will finish it
        run(folder / f"{case}-resumed", case)
        run(folder / f"{case}-joined", case)  # one process began it
    torch.compile = functools.partial(torch.compile, backend="eager")  # traces all the same, and builds nothing
    run(folder / "small-compiled", "fsdp", *SMALL, "train.compile=on")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
