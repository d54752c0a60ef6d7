"""Intervals of a probe's accuracies and gains: a bootstrap over groups of samples, the same draws for everything."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from .intervals import interval, resample

DRAWS = 1000


class Draws:
    """Bootstrap draws over groups: `group` [N] says which samples are drawn together."""

    def __init__(self, group: np.ndarray) -> None:
        self.number = np.unique(group, return_inverse=True)[1]
        groups = int(self.number.max()) + 1
        self.counts = resample(groups, DRAWS, np.random.default_rng(0)).astype(np.float32)

    def mean(self, right: np.ndarray, tested: np.ndarray) -> tuple[float, np.ndarray]:
        """Sum of `right` [N] by sum of `tested` [N], and the same in every draw."""
        r, n = (np.bincount(self.number, of, self.counts.shape[1]) for of in (right, tested))
        of_draws = (self.counts @ r.astype(np.float32)) / np.maximum(self.counts @ n.astype(np.float32), 1)
        return float(r.sum() / n.sum()), of_draws

    def interval(self, right: np.ndarray, tested: np.ndarray) -> tuple[float, float, float]:
        """The mean and its 95% interval."""
        mean, draws = self.mean(right, tested)
        low, high = interval(draws)
        return mean, float(low), float(high)


def contrasts(
    gained: np.ndarray, tested: np.ndarray, full: Sequence[bool], draws: Draws, middle: tuple[float, float]
) -> pd.DataFrame:
    """Mean gains of sets of layers and their differences; see `layerwise.probe_gains`.

    `gained` [L,seeds,N]: right after the mixer minus right before it, `tested` [seeds,N], `full` [L].
    """
    place = (np.arange(len(full)) + 0.5) / len(full)
    inner, of_full = (place >= middle[0]) & (place <= middle[1]), np.asarray(full)
    sets = {
        "middle full": inner & of_full, "middle efficient": inner & ~of_full,
        "outer full": ~inner & of_full, "outer efficient": ~inner & ~of_full, "all others": ~(inner & of_full),
    }  # fmt: skip
    if not sets["middle full"].any() or not sets["all others"].any():
        what = "no full layer" if not sets["middle full"].any() else "nothing but full layers"
        raise ValueError(f"middle={middle}: {what} of this model's {len(full)} layers lies there; nothing to compare")
    values = {name: _gain(gained[layers], tested, draws) for name, layers in sets.items() if layers.any()}
    rows: list[dict[str, Any]] = [_row(name, int(sets[name].sum()), *of) for name, of in values.items()]
    whole, drawn, seeds = values.pop("middle full")
    for name, (mean, others, of_seeds) in values.items():
        n = int(sets["middle full"].sum() + sets[name].sum())
        rows.append(_row(f"middle full - {name}", n, whole - mean, drawn - others, seeds - of_seeds))
    return pd.DataFrame(rows)


def _gain(gained: np.ndarray, tested: np.ndarray, draws: Draws) -> tuple[float, np.ndarray, np.ndarray]:
    """Mean gain a layer; in every draw; of every seed."""
    a_layer = gained.mean(0)  # [seeds,N]
    return *draws.mean(a_layer.sum(0), tested.sum(0)), a_layer.sum(1) / tested.sum(1)


def _row(name: str, layers: int, gain: float, drawn: np.ndarray, seeds: np.ndarray) -> dict[str, Any]:
    low, high = interval(drawn)
    return {
        "quantity": name, "layers": layers, "gain": gain, "low": float(low), "high": float(high),
        "seeds_above": float((seeds > 0).mean()),
    }  # fmt: skip
