"""`hybridscope bench`: the benches under one command, and their tables."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import tyro

from ..report import RUNS, number, split

What = Annotated[
    Literal["train", "parity", "kernels", "stats", "caps", "drift", "probe", "table"],
    tyro.conf.Positional,
    tyro.conf.arg(metavar="WHAT"),
]
Names = Annotated[tuple[str, ...], tyro.conf.arg(metavar="A,B")]


def bench(
    what: What,
    out: Path | None = None,
    sizes: Names = (),
    lengths: Names = (),
    patterns: Names = (),
    budget: float = 540.0,
    gpus: int = 1,
    problem: str = "24,10000,1024,8,5",
    device: Literal["cuda", "cpu"] = "cuda",
) -> None:
    """Measure training speed, kernels or reading of weights, or check fused kernels; print a table of the results.

    Args:
        what: train (tokens/s, MFU and peak memory of layer patterns), parity (short trainings, fused beside torch),
            kernels (each fused recurrence and its gradients beside torch), stats (attention statistics beside
            attention: time, memory, errors), caps (exact caps beside uncapped kernels and inexact segments), drift (Q/K
            rows out of checkpoint files beside whole checkpoints; needs no GPU), probe (the batched probe solver
            beside scikit-learn; on the CPU, and on the GPU where there is one), table (print --out's results as
            Markdown).
        out: Results file, by default runs/bench/WHAT.json; train goes on where an unfinished one stops.
        sizes: train: 15m, 100m, 340m; with lengths and patterns in place of a fixed plan.
        lengths: train: tokens of a sequence.
        patterns: train: full, gdn (1:1 with full), gdn@3:1, gdn@pure, swa:512, ..., or peers such as fla-gdn.
        budget: Seconds; what is not begun then is listed as not run.
        gpus: train: GPUs that share the cells.
        problem: probe: layers,samples,width,classes,seeds.
        device: train, caps: cpu shows that the bench works, its numbers mean nothing; probe: cpu leaves the GPU out.
    """
    file = out or RUNS / "bench" / f"{what}.json"
    if what == "table":
        from . import tables

        print(tables.markdown(tables.load(file)))
        return
    if what == "drift":
        from . import drift

        drift.main(["--out", str(file), "--budget", str(budget)])
        return
    if what == "probe":
        from . import probe

        probe.main(["--out", str(file), "--budget", str(budget), "--problem", problem, "--device", device])
        return
    from . import caps, kernel_parity, parity_train, stats, train

    train.need_device(device)
    if what == "train":
        cells = train.plan(split(sizes), [number("lengths", n) for n in split(lengths)], split(patterns))
        train.report(train.bench(file, train.Options(cells, device, budget, gpus=gpus)), file)
    elif what == "caps":
        caps.main(["--out", str(file), "--budget", str(budget), "--device", device])
    else:
        check = {"parity": parity_train, "kernels": kernel_parity, "stats": stats}[what]
        check.main(["--out", str(file), "--budget", str(budget)])
