"""The batched probe solver beside scikit-learn, layer by layer on the same synthetic features, in one run.

    python -m hybridscope.experiments.bench.probe --out probe.json --problem 24,10000,1024,8,5

Layers differ in how far apart their classes lie, from chance to nearly all told apart; features are correlated, with
variances over three decades, as residual streams are. What is timed is what a probe does: standardise, fit on 80% and
predict, for every seed; ours from arrays in host memory, copies to the GPU included, after a small warm-up there.
scikit-learn takes one layer after another until the budget ends; times are compared over the layers that it did.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
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


def theirs(x: np.ndarray, y: np.ndarray, train: np.ndarray) -> tuple[float, list[float], list[float]]:
    """Seconds, held-out accuracies and losses of one layer, of every seed."""
    seconds, accuracies, losses = 0.0, [], []
    for rows in train:
        begin = time.perf_counter()
        classifier = LogisticRegression(C=C, max_iter=1000)
        model = make_pipeline(StandardScaler(), classifier).fit(x[rows], y[rows])
        predicted = model.predict(x[~rows])
        seconds += time.perf_counter() - begin
        accuracies.append(float((predicted == y[~rows]).mean()))
        nll = -model.predict_log_proba(x[rows])[np.arange(rows.sum()), y[rows]].mean(dtype=np.float64)
        losses.append(float(nll + np.square(classifier.coef_).sum(dtype=np.float64) / (2 * C * rows.sum())))
    return seconds, accuracies, losses


def bench(out: Path, problem: tuple[int, ...], device: str, budget: float) -> workers.Row:
    """Fit everything with each solver; returns and writes {seconds, rows, not_run, ...}."""
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
        "cores": len(os.sched_getaffinity(0)), "threads": torch.get_num_threads(), "seconds": {}, "rows": [],
        "not_run": list(range(layers)),
    }  # fmt: skip
    fits: dict[str, solver.Fits] = {}
    for name in reversed(devices):  # the fast one first
        result["seconds"][name], fits[name] = ours(X, y, train, name)
        print(f"{name}: {result['seconds'][name]:.2f} s for {layers} layers x {seeds} seeds", flush=True)
    for layer in range(layers):
        if time.monotonic() >= deadline:
            break
        seconds, accuracies, losses = theirs(X[layer], y, train)
        row: workers.Row = {"layer": layer, "seconds": seconds, "accuracy": float(np.mean(accuracies)), "ours": {}}
        for name, of in fits.items():
            right = of.predicted[layer].numpy() == y
            mine = float(np.mean([r[~rows].mean() for r, rows in zip(right, train, strict=True)]))
            off = of.loss[layer].numpy() / losses - 1
            row["ours"][name] = {
                "accuracy": mine, "loss_off": float(off[np.abs(off).argmax()]),
                "iterations": int(of.iterations[layer].max()),
            }  # fmt: skip
        result["rows"].append(row)
        result["not_run"].remove(layer)
        workers.save(out, compare(result))
        print(f"layer {layer}: scikit-learn {seconds:.2f} s, accuracy {row['accuracy']:.4f}, ours {row['ours']}")
    workers.save(out, compare(result))
    return result


def compare(result: workers.Row) -> workers.Row:
    """Fill in how many times faster than scikit-learn, and the largest differences, by device (`loss_off`: relative,
    below 0 where ours is lower)."""
    rows, summary = result["rows"], {}
    for name, seconds in result["seconds"].items():
        mine = [(row, row["ours"][name]) for row in rows]
        done = len(rows) / result["problem"]["layers"]
        summary[name] = {
            "ratio": sum(row["seconds"] for row in rows) / (seconds * done) if rows else None,
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
