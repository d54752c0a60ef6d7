"""Scaling fit: loss as a function of parameters N and training tokens D (PROTOCOLS, section 8).

    log L = logsumexp(B - alpha log N, C - beta log D [, E])

that is L = e^B / N^alpha + e^C / D^beta [+ e^E], fitted as in arXiv 2203.15556: Huber loss on log residuals, L-BFGS
from a grid of starts, the best one kept.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from .intervals import interval

NAMES = ("alpha", "beta", "B", "C", "E")
SLOPES = (0.05, 0.3, 1.0)  # starts for alpha and beta
SHARES = (0.05, 0.5, 0.95)  # starts for how much of the loss one term is, at the middle of the data
SAME = 1e-6  # starts that end within this much of the best objective, relatively, have converged to it


@dataclasses.dataclass
class ScalingFit:
    """A fitted scaling law.

    `parameters` [parameter, value, low, high]: alpha, beta, B, C and, with a constant, E, with 95% bootstrap intervals.
    `validation` [parameters, tokens, loss, predicted, low, high, error]: the sizes held out, with the interval of the
    prediction (not of a single run) and predicted / loss - 1; empty where none were. `objective` is the mean Huber
    loss, `converged` how many of `starts` ended at the best one.
    """

    parameters: pd.DataFrame
    validation: pd.DataFrame
    objective: float
    converged: int
    starts: int
    constant: bool
    n: int

    def predict(self, parameters: Any, tokens: Any) -> Any:
        """Loss at N `parameters` and D `tokens`, both broadcast."""
        theta = self.parameters["value"].to_numpy(dtype=float)
        return np.exp(_log_loss(theta, *np.broadcast_arrays(np.log(parameters), np.log(tokens))))


def scaling_fit(
    table: pd.DataFrame,
    *,
    constant: bool = False,
    delta: float | int = 1e-3,
    holdout: bool = True,
    bootstrap: int = 200,
    seed: int = 0,
) -> ScalingFit:
    """Fit a scaling law to `table` [parameters, tokens, loss], one row per run; `loss` is any positive loss, LongPPL
    as published.

    `constant`: with an irreducible term e^E. `delta`: where the Huber loss of the log residuals turns linear.
    `holdout`: fit without the largest model and predict it. Bootstrap draws resample the runs of each model size and
    are fitted from the best parameters and, since a draw may have another best basin, from the next best end points.

    Raises ValueError for missing columns, numbers that are not positive, or too few runs or sizes to fit.

    >>> hs.scaling_fit(table).validation
    """
    for column in ("parameters", "tokens", "loss"):
        if column not in table:
            raise ValueError(f"scaling_fit: the table has no column {column!r}; it has: {', '.join(map(str, table))}")
        values = np.asarray(pd.to_numeric(table[column], errors="coerce"), dtype=float)
        if not (np.isfinite(values) & (values > 0)).all():
            raise ValueError(f"scaling_fit: column {column!r} holds numbers that are not positive")
    if not delta > 0 or bootstrap < 1:
        raise ValueError(f"delta={delta}, bootstrap={bootstrap}: expected > 0 and >= 1")
    data: Any = table[["parameters", "tokens", "loss"]].astype(float).reset_index(drop=True)
    largest = data["parameters"] == data["parameters"].max()
    fitted: Any = data[~largest] if holdout else data
    held: Any = data[largest] if holdout else data[:0]
    free, sizes = 5 if constant else 4, fitted["parameters"].nunique()
    if len(fitted) <= free or sizes < 2:
        raise ValueError(f"scaling_fit: {len(fitted)} runs of {sizes} sizes to fit; {free} parameters take more")
    x, y, z = (np.log(fitted[c].to_numpy()) for c in ("parameters", "tokens", "loss"))
    centre = x.mean(), y.mean()
    x, y = x - centre[0], y - centre[1]
    ends = [_descend(start, x, y, z, delta) for start in _grid(z, constant)]
    ends.sort(key=lambda end: end[0])
    best = ends[0][0]
    converged = sum(value <= best * (1 + SAME) + 1e-12 for value, _ in ends)
    basins = _distinct([theta for _, theta in ends], 3)
    rng = np.random.default_rng(seed)
    groups = [np.flatnonzero(fitted["parameters"] == size) for size in fitted["parameters"].unique()]
    drawn = []
    for _ in range(bootstrap):
        rows = np.concatenate([rng.choice(g, len(g)) for g in groups])
        again = [_descend(start, x[rows], y[rows], z[rows], delta) for start in basins]
        drawn.append(_uncentred(min(again, key=lambda end: end[0])[1], centre))
    draws, theta = np.stack(drawn), _uncentred(ends[0][1], centre)
    low, high = interval(draws)
    shown = pd.DataFrame({"parameter": NAMES[:free], "value": theta, "low": low, "high": high})
    N, D = np.log(held["parameters"].to_numpy()), np.log(held["tokens"].to_numpy())
    predicted = np.exp(_log_loss(theta, N, D))
    low, high = np.exp(interval(np.stack([_log_loss(t, N, D) for t in draws])))
    held = held.assign(predicted=predicted, low=low, high=high, error=predicted / held["loss"] - 1)
    return ScalingFit(
        shown, held.reset_index(drop=True), best * delta, converged, len(ends), constant, len(fitted)
    )  # fmt: skip


def _log_loss(theta: np.ndarray, log_n: np.ndarray, log_d: np.ndarray) -> Any:
    return np.logaddexp.reduce(_terms(theta, log_n, log_d), axis=0)


def _terms(theta: np.ndarray, log_n: np.ndarray, log_d: np.ndarray) -> np.ndarray:
    alpha, beta, B, C, *E = theta
    return np.stack([B - alpha * log_n, C - beta * log_d, *(np.full(log_n.shape, e) for e in E)])


def _descend(start: np.ndarray, x: np.ndarray, y: np.ndarray, z: np.ndarray, delta: float) -> tuple[float, np.ndarray]:
    """L-BFGS on the mean Huber loss over delta (so that its size is that of the residuals): value and parameters."""
    from scipy.optimize import minimize

    def objective(theta: np.ndarray) -> tuple[float, np.ndarray]:
        terms = _terms(theta, x, y)
        total = np.logaddexp.reduce(terms, axis=0)
        residual = total - z
        small = np.abs(residual) <= delta
        huber = np.where(small, residual**2 / (2 * delta), np.abs(residual) - delta / 2)
        slope = np.where(small, residual / delta, np.sign(residual)) / len(z)
        share = np.exp(terms - total)  # d total / d term
        pulls = (share * slope).sum(1)
        steep = [-(share[0] * slope * x).sum(), -(share[1] * slope * y).sum()]
        return float(huber.mean()), np.array([*steep, *pulls])

    options = {"maxiter": 2000, "maxfun": 5000, "ftol": 1e-14, "gtol": 1e-10}
    end = minimize(objective, start, jac=True, method="L-BFGS-B", options=options)
    return float(end.fun), np.asarray(end.x)


def _grid(z: np.ndarray, constant: bool) -> list[np.ndarray]:
    """Starts in centred coordinates: the terms share the middle loss in several ways, with several slopes."""
    middle = np.median(z)
    shares = [(s, 1 - s) for s in SHARES]
    if constant:
        shares = [(s * (1 - e), (1 - s) * (1 - e), e) for s in SHARES for e in (0.05, 0.5)]
    return [
        np.array([alpha, beta, *(middle + np.log(share))])
        for alpha, beta, share in itertools.product(SLOPES, SLOPES, shares)
    ]


def _distinct(thetas: Sequence[np.ndarray], most: int) -> list[np.ndarray]:
    """The first few that differ."""
    kept: list[np.ndarray] = []
    for theta in thetas:
        if len(kept) < most and not any(np.allclose(theta, other, rtol=0.05, atol=0.05) for other in kept):
            kept.append(theta)
    return kept


def _uncentred(theta: np.ndarray, centre: tuple[float, float]) -> np.ndarray:
    alpha, beta, B, C, *E = theta
    return np.array([alpha, beta, B + alpha * centre[0], C + beta * centre[1], *E])
