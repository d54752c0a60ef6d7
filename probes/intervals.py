"""Intervals over prompts: bootstrap draws, and how far a ranking holds."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

LEVEL = 0.95
DRAWS = 1000


def resample(n: int, draws: int, rng: np.random.Generator) -> np.ndarray:
    """How often each of n is drawn, [draws, n]: whole numbers, so that sums of counts stay exact."""
    return rng.multinomial(n, np.full(n, 1 / n), size=draws)


def interval(values: np.ndarray) -> tuple[Any, Any]:
    """Ends of the central 95% of `values` along axis 0; they are among the values, which may be infinite."""
    tail = (1 - LEVEL) / 2
    low = np.quantile(values, tail, axis=0, method="lower")
    return low, np.quantile(values, 1 - tail, axis=0, method="higher")


def mean_interval(sums: np.ndarray, counts: np.ndarray, seed: int = 0) -> tuple[float, float]:
    """95% bootstrap interval, over documents, of the mean of all their items: `sums` [n] over `counts` [n] items each.
    NaN for fewer than two documents that have any."""
    if (counts > 0).sum() < 2:
        return math.nan, math.nan
    drawn = resample(len(sums), DRAWS, np.random.default_rng(seed))
    drawn = drawn[drawn @ counts > 0]
    low, high = interval((drawn @ sums) / (drawn @ counts))
    return float(low), float(high)


def rank_interval(scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """95% interval of each column's rank (1 is best) over bootstrap `scores` [draws, columns]; ties take every rank
    they share, so that columns that cannot be told apart have wide intervals."""
    best, worst = np.empty(scores.shape), np.empty(scores.shape)
    columns = scores.shape[1]
    for n, row in enumerate(scores):
        order = np.sort(row)
        best[n] = 1 + columns - np.searchsorted(order, row, side="right")
        worst[n] = columns - np.searchsorted(order, row, side="left")
    return interval(best)[0].astype(int), interval(worst)[1].astype(int)


def share_interval(right: int, n: int) -> tuple[float, float]:
    """Wilson's 95% interval of a share right/n, which has a width at 0 and at 1 too."""
    z = 1.959963984540054
    middle, share = 1 + z**2 / n, right / n
    half = z * math.sqrt(share * (1 - share) / n + z**2 / (4 * n**2)) / middle
    centre = (share + z**2 / (2 * n)) / middle
    # Exact where nothing is left to round: centre and half are then the same.
    return 0.0 if right == 0 else max(0.0, centre - half), 1.0 if right == n else min(1.0, centre + half)
