"""The batched probe solver beside scikit-learn, layer by layer on the same synthetic features, in one run.

    python -m hybridscope.experiments.bench.probe --out probe.json --problem 24,10000,1024,8,5

Layers differ in how far apart their classes lie, from chance to nearly all told apart; features are correlated, with
variances over three decades, as residual streams are. What is timed is what a probe does: standardise, fit on 80% and
predict, for every seed; ours from arrays in host memory, copies to the GPU included, after a small warm-up there.
scikit-learn gets every core that ours gets: fits side by side in processes of one thread each. It goes from layer to
layer until the budget ends; times are compared over those.
"""

from __future__ import annotations

import argparse
import itertools
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import joblib
import numpy as np
import threadpoolctl
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from ...probes import solver
from ..train import commit
from . import tables, workers
from .train import version_of

PROBLEM = (24, 10_000, 1_024, 8, 5)
"""Layers, samples, width, classes, seeds."""
C = 0.1
SKLEARN = "scikit-learn"


def features(layer: int, layers: int, y: np.ndarray, width: int, classes: int) -> np.ndarray:
    """[n,width] in fp32."""
    rng = np.random.default_rng(layer)
    far = 8 * (layer / max(1, layers - 1)) ** 2 / width**0.5
    X = rng.standard_normal((len(y), width), np.float32)
    X += far * rng.standard_normal((classes, width), np.float32)[y]
    X *= np.float32(10) ** (-3 * np.arange(width, dtype=np.float32) / (2 * width))
    X += rng.standard_normal((len(y), 16), np.float32) @ rng.standard_normal((16, width), np.float32)
    return X


def ours(X: np.ndarray, y: np.ndarray, train: np.ndarray, device: str) -> tuple[float, solver.Fits]:
    """Seconds and results of all layers and seeds."""
    Y = np.tile(y, (len(train), 1))
    if device == "cuda":
        solver.fit(X[:1, :256], Y[:, :256], train[:, :256], C=C, device=device)
        torch.cuda.synchronize()
    begin = time.perf_counter()
    fits = solver.fit(X, Y, train, C=C, device=device)
    return time.perf_counter() - begin, fits


def one_of_theirs(x: np.ndarray, y: np.ndarray, rows: np.ndarray) -> tuple[float, np.ndarray, Any]:
    """Seconds, predictions of the held-out rows, and the fitted pipeline of one layer and seed, on one thread."""
    begin = time.perf_counter()
    with threadpoolctl.threadpool_limits(1):
        model = make_pipeline(StandardScaler(), LogisticRegression(C=C, max_iter=1000)).fit(x[rows], y[rows])
        predicted = model.predict(x[~rows])
    return time.perf_counter() - begin, predicted, model


def theirs(x: np.ndarray, y: np.ndarray, train: np.ndarray, fits: Iterator[Any]) -> workers.Row:
    """A layer's fits: their seconds one after another, accuracies and losses of every seed."""
    row: workers.Row = {"seconds": 0.0, "accuracies": [], "losses": []}
    for rows, (seconds, predicted, model) in zip(train, fits, strict=True):
        row["seconds"] += seconds
        row["accuracies"].append(float((predicted == y[~rows]).mean()))
        nll = -model.predict_log_proba(x[rows])[np.arange(rows.sum()), y[rows]].mean(dtype=np.float64)
        penalty = np.square(model[-1].coef_).sum(dtype=np.float64) / (2 * C * rows.sum())
        row["losses"].append(float(nll + penalty))
    return row


def bench(out: Path, problem: tuple[int, ...], device: str, budget: float) -> workers.Row:
    """Fit everything with each solver; returns and writes {seconds, rows, not_run, ...}. `seconds` are of the clock,
    by solver; a row's are those of its scikit-learn fits, one after another."""
    deadline = time.monotonic() + budget
    layers, n, width, classes, seeds = problem
    devices = ["cpu", *(["cuda"] if device == "cuda" and torch.cuda.is_available() else [])]
    rng = np.random.default_rng(0)
    y = rng.permutation(np.arange(n) % classes)
    train = np.stack([rng.permutation(n) < 0.8 * n for _ in range(seeds)])
    X = np.stack([features(layer, layers, y, width, classes) for layer in range(layers)])
    result: workers.Row = {
        "bench": "probe", "device": torch.cuda.get_device_name() if "cuda" in devices else "cpu",
        "versions": {name: version_of(name) for name in ("torch", "scikit-learn", "numpy")}, "commit": commit(),
        "problem": dict(zip(("layers", "samples", "width", "classes", "seeds"), problem, strict=True)),
        "cores": len(os.sched_getaffinity(0)), "threads": torch.get_num_threads(), "seconds": {SKLEARN: 0.0},
        "rows": [], "not_run": list(range(layers)),
    }  # fmt: skip
    fits: dict[str, solver.Fits] = {}
    for name in reversed(devices):  # the fast one first
        result["seconds"][name], fits[name] = ours(X, y, train, name)
        print(f"{name}: {result['seconds'][name]:.2f} s for {layers} layers x {seeds} seeds", flush=True)
    jobs = min(result["threads"], result["cores"])
    with joblib.Parallel(n_jobs=jobs, return_as="generator") as run:
        small = joblib.delayed(one_of_theirs)(X[0, :99, :2], y[:99], train[0, :99])
        list(run(small for _ in range(2 * jobs)))  # starts the processes
        begin = time.perf_counter()
        queue: Any = run(joblib.delayed(one_of_theirs)(x, y, rows) for x in X for rows in train)
        for layer in range(layers):
            if time.monotonic() >= deadline:
                break
            done = list(itertools.islice(queue, seeds))
            result["seconds"][SKLEARN] = time.perf_counter() - begin  # what has begun of later layers is in it
            result["rows"].append(beside(fits, layer, theirs(X[layer], y, train, iter(done)), y, train))
            result["not_run"].remove(layer)
            workers.save(out, compare(result))
            print(f"layer {layer}: {result['rows'][-1]}", flush=True)
        queue.close()
    workers.save(out, compare(result))
    return result


def beside(fits: dict[str, solver.Fits], layer: int, row: workers.Row, y: np.ndarray, train: np.ndarray) -> workers.Row:
    """A layer's row: scikit-learn's seconds and mean accuracy, and ours of each device beside them."""
    out: workers.Row = {"layer": layer, "seconds": row["seconds"], "accuracy": float(np.mean(row["accuracies"]))}
    out["ours"] = {}
    for name, of in fits.items():
        right = of.predicted[layer].numpy() == y
        mine = float(np.mean([r[~rows].mean() for r, rows in zip(right, train, strict=True)]))
        off = of.loss[layer].numpy() / row["losses"] - 1
        out["ours"][name] = {
            "accuracy": mine, "loss_off": float(off[np.abs(off).argmax()]),
            "iterations": int(of.iterations[layer].max()),
        }  # fmt: skip
    return out


def compare(result: workers.Row) -> workers.Row:
    """Fill in how many times faster than scikit-learn, and the largest differences, by device (`loss_off`: relative,
    below 0 where ours is lower)."""
    rows, summary = result["rows"], {}
    for name in set(result["seconds"]) - {SKLEARN}:
        mine = [(row, row["ours"][name]) for row in rows]
        done = len(rows) / result["problem"]["layers"]
        summary[name] = {
            "ratio": result["seconds"][SKLEARN] / (result["seconds"][name] * done) if rows else None,
            "accuracy_off": max((abs(it["accuracy"] - row["accuracy"]) for row, it in mine), default=None),
            "loss_off": max((it["loss_off"] for _, it in mine), key=abs, default=None),
        }
    result["summary"] = summary
    return result


def parse(text: str) -> tuple[int, ...]:
    """layers,samples,width,classes,seeds"""
    parts = text.split(",")
    if len(parts) != 5 or not all(p.isdigit() and int(p) > 0 for p in parts):
        raise ValueError(f"problem {text!r}: expected layers,samples,width,classes,seeds, as 24,10000,1024,8,5")
    problem = tuple(map(int, parts))
    if problem[3] < 2 or problem[1] < 5 * problem[3]:
        raise ValueError(f"problem {text!r}: expected two classes or more, with five samples each")
    return problem


def main(args: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/bench/probe.json"))
    parser.add_argument("--problem", default=",".join(map(str, PROBLEM)), help="layers,samples,width,classes,seeds")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"], help="cpu: leave the GPU out")
    parser.add_argument("--budget", type=float, default=540, help="seconds; layers not begun then are left out")
    o = parser.parse_args(args)
    result: Any = bench(o.out, parse(o.problem), o.device, o.budget)
    print(tables.markdown(result))
    print(o.out)


if __name__ == "__main__":
    main()
