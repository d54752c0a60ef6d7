"""Small made tables in the shapes that the probes return, for the figure tests."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pandas as pd

KIND = {"full": "full", "swa:8": "window", "gdn": "recurrent", "conv": "conv"}
DEMO = ["swa:8", "full", "swa:8", "full"]
MIXED = ["gdn", "conv", "swa:8", "full", "gdn", "full"]
DEEP = ["swa:8", "swa:8", "full"] * 10


def probe(mixers=DEMO, targets=("value",), seed=0) -> pd.DataFrame:
    rng, rows = np.random.default_rng(seed), []
    for target in targets:
        level = 0.125
        for layer, mixer in enumerate(mixers):
            before, after = level, level + (0.3 * (1 - level) if mixer == "full" else 0.01)
            level = after - 0.005
            values = {"pre": before, "mid": after, "post": level, "delta": after - 0.05}
            for where, value in values.items():
                for control in ("none", "shuffled", "removed"):
                    accuracy = value if control == "none" else 0.125 + rng.normal(0, 0.01)
                    gain = after - before if where == "mid" and control == "none" else np.nan
                    row = {
                        "layer": layer,
                        "kind": KIND[mixer],
                        "mixer": mixer,
                        "where": where,
                        "target": target,
                    }
                    row |= {"control": control, "accuracy": accuracy, "low": accuracy - 0.03}
                    row |= {"high": accuracy + 0.03, "chance": 0.125, "gain": gain, "n": 400}
                    rows.append(row)
    return pd.DataFrame(rows)


def caps(mixers=MIXED, sinks=(0, 4), windows=(4, 8, 16, 32, 64)) -> pd.DataFrame:
    base = {"log_ppl": 2.0, "needle_accuracy": 0.9}
    rows = [{"kind": "none", "layer": -1, "window": np.nan, "sinks": 0, "binds": False, **base}]
    sites = [(KIND[mixer], layer) for layer, mixer in enumerate(mixers)]
    for kind, layer in [(kind, -1) for kind in dict.fromkeys(kind for kind, _ in sites)] + sites:
        for sink in sinks if kind != "conv" else ():
            for window in windows:
                binds = window < (8 if kind == "window" else 64)
                harm = {"full": 0.8, "window": 0.2, "recurrent": 0.4}[kind] * (1 - window / 64) / (1 + sink)
                harm = harm / (1 if layer < 0 else 2 + layer)
                row = {"kind": kind, "layer": layer, "window": window, "sinks": sink, "binds": binds}
                values = {"log_ppl": 2.0 + harm, "needle_accuracy": 0.9 - harm} if binds else {}
                rows.append(row | values)
    table = pd.DataFrame(rows)
    table["delta_log_ppl"] = table["log_ppl"] - 2.0
    table["delta_needle_accuracy"] = table["needle_accuracy"] - 0.9
    return table.assign(reach=np.nan)


def distances(sinks=(0, 4), windows=(4, 16, 64)) -> pd.DataFrame:
    """A sweep of whole kinds with rows by distance: beyond the cap nothing is answered but what the sinks spare."""
    edges, rows = [0, 4, 16, 64, 90], []
    for kind, window, sink in [("none", np.nan, 0)] + [
        (k, w, s) for k in ("full", "window") for w in windows for s in sinks
    ]:
        binds = kind == "full" or (kind == "window" and window < 8)
        row = {"kind": kind, "layer": -1, "site": -1, "mixer": "", "window": window, "sinks": sink, "binds": binds}
        for low, high in [(np.nan, np.nan), *pairwise(edges)]:
            beyond = kind == "full" and high > window
            rows.append(
                row
                | {
                    "distance_low": low,
                    "distance_high": high,
                    "n": 8,
                    "within": 1.0 - beyond,
                    "log_ppl": np.nan,
                    "needle_accuracy": 0.05 * sink if beyond else 0.9,
                }
            )
    return pd.DataFrame(rows)


def importance(mixers=MIXED, windows=(8, 32), sinks=(0, 4)) -> pd.DataFrame:
    full, frames = [layer for layer, mixer in enumerate(mixers) if mixer == "full"], []
    for window in windows:
        for sink in sinks:
            row = {"window": window, "sinks": sink, "site": 0, "kind": "full", "mixer": "full", "binds": True}
            values = [3.0 / (1 + i) / (1 + sink) - 0.5 * window / 32 for i in range(len(full))]
            frame = pd.DataFrame([row | {"layer": la, "importance": v} for la, v in zip(full, values, strict=True)])
            frames.append(frame.assign(rank=frame["importance"].rank(ascending=False).astype(int)))
    return pd.concat(frames, ignore_index=True)


def track(mixers=DEMO, heads=4, steps=tuple(range(0, 1200, 100))) -> pd.DataFrame:
    rows = []
    for layer, mixer in enumerate(mixers):
        for head in range(heads if KIND[mixer] in ("full", "window") else 0):
            final = (0.1 if mixer != "full" else 0.3) + 0.06 * layer + 0.1 * head
            for step in steps:
                done = step / max(steps)
                row = {"step": step, "tokens": 16384 * step, "layer": layer, "site": 0, "head": head}
                row |= {
                    "kind": KIND[mixer],
                    "entropy": 5 - 4 * final * done,
                    "entropy_norm": 1 - final * done,
                }
                rows.append(row | {"mass": final * done, "copy": final * done**2, "accuracy": done})
    return pd.DataFrame(rows)


def drift(mixers=DEMO, heads=4, steps=tuple(range(0, 1200, 100))) -> pd.DataFrame:
    table = track(mixers, heads, steps)[["step", "layer", "site", "head", "kind"]]
    left = 1 - table["step"] / max(steps)
    q, k = left * (1 + 0.1 * table["head"]), left * 0.7
    return table.assign(q=3 * q, k=3 * k, q_rel=q, k_rel=k, qk_rel=q + k, bilinear_rel=q)


def scores(mixers=MIXED, heads=8) -> pd.DataFrame:
    rows = []
    for layer, mixer in enumerate(mixers):
        for head in range(heads if KIND[mixer] in ("full", "window") else 0):
            score = 0.02 * head + (0.05 * layer if mixer == "full" else 0.0)
            row = {"layer": layer, "site": 0, "head": head, "kind": KIND[mixer], "mixer": mixer}
            rows.append(row | {"score": score})
    return pd.DataFrame(rows)


def influence(targets=("loss", "logit_sum"), models=("full", "3:1 gdn")) -> pd.DataFrame:
    rows = []
    for i, target in enumerate(targets):
        for j, model in enumerate(models):
            for distance in [0, 1, 2, 4, 8, 16, 32, 64, 128]:
                value = 0.0 if j == 1 and distance > 32 else (distance + 1.0) ** -(0.8 + 0.2 * j) / (i + 1)
                row = {"target": target, "model": model, "distance": distance, "influence": value, "n": 8}
                rows.append(row)
    return pd.DataFrame(rows)


def loss(settings=("uncapped", "full 2048", "window 64")) -> pd.DataFrame:
    buckets = [(0, 64), (64, 128), (128, 256), (256, 512)]
    rows = []
    for j, setting in enumerate(settings):
        for i, (low, high) in enumerate(buckets):
            row = {"position_low": low, "position_high": high, "loss": 4 - 0.1 * i + 0.02 * j, "n": 100}
            rows.append(row | {"setting": setting})
    return pd.DataFrame(rows)


def lens(mixers=MIXED, samples=5, seed=0) -> pd.DataFrame:
    rng, rows = np.random.default_rng(seed), []
    for layer, mixer in enumerate(mixers):
        left = 1 - (layer + 1) / len(mixers)
        for sample in range(samples):
            row = {"sample": sample, "row": 9, "layer": layer, "kind": KIND[mixer], "mixer": mixer}
            rows.append(row | {"log_prob": -0.5 - 4 * left * rng.random(), "kl": 3 * left * rng.random()})
    return pd.DataFrame(rows)


def patches(mixers=MIXED, heads=4, groups=("value", "answer"), directions=("denoise", "noise")) -> pd.DataFrame:
    rows = []
    for direction in directions:
        for group in groups:
            for layer, mixer in enumerate(mixers):
                for head in range(heads) if heads else [-1]:
                    share = 0.9 if mixer == "full" and head < 1 and group == "answer" else -0.02 * (head + 1)
                    row = {"direction": direction, "rows": group, "layer": layer, "site": 0, "head": head}
                    rows.append(row | {"kind": KIND[mixer], "mixer": mixer, "recovered": share})
    return pd.DataFrame(rows)


def costs(lengths=(1024, 4096, 16384, 65536), measured=True) -> pd.DataFrame:
    rows = []
    for length in lengths:
        for model, share in (("hybrid", 0.25), ("full", 1.0)):
            row = {"model": model, "length": length, "batch": 1, "cache_bytes": 2**20 + share * 2**15 * length}
            speed = {"prefill_tokens_per_s": 1e6 / (1 + share * length / 8192), "decode_ms": 10 + share * length / 4096}
            rows.append(row | (speed if measured else dict.fromkeys(speed, np.nan)))
    return pd.DataFrame(rows)
