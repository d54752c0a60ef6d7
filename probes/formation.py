"""Formation step: when in training the best followed head first reads the needle (PROTOCOLS, section 11)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from .intervals import interval, resample

THRESHOLDS = (0.25, 0.5, 0.75)
KEY = ["layer", "site", "head"]


def formation_step(
    table: pd.DataFrame,
    thresholds: Sequence[float] | float = THRESHOLDS,
    *,
    measure: str = "mass",
    bootstrap: int = 1000,
    seed: int = 0,
) -> pd.DataFrame:
    """The step at which the best full-attention head of a tracking table first passes absolute thresholds.

    [threshold, step, low, high, tokens, censored, n], of one run. At each step the best of the table's full-attention
    heads by its mean `measure` over prompts counts; between the saved steps around the first crossing `step` (and
    `tokens`, NaN where unknown) is interpolated. `censored`: "" (observed), "right" (never reached: `step` is the last
    one, a lower bound), or "left" (reached at the first saved step: an upper bound). `low`, `high`: 95% bootstrap
    interval over n prompts, infinite where draws never get there; NaN for one prompt and for a table without records
    per prompt (`hs.track(..., samples=True)`). Choose the heads at the final step on other prompts, as `hs.track`
    does: then the best of them is no luckier on these.

    Raises ValueError for a table without full-attention heads, with missing columns, or with several records for one
    prompt and head.

    >>> hs.formation_step(hs.track(ladder, needles, samples=True))
    """
    steps, tokens, curves = _curves(table, measure)
    thresholds = [float(t) for t in np.atleast_1d(np.asarray(thresholds))]
    if not thresholds or any(not np.isfinite(t) for t in thresholds):
        raise ValueError(f"thresholds={thresholds}: expected numbers")
    n = curves.shape[2]
    drawn: list[np.ndarray] = []
    if "sample" in table:
        if bootstrap < 1:
            raise ValueError(f"bootstrap={bootstrap}: expected >= 1 draws")
        weights = resample(n, bootstrap, np.random.default_rng(seed))
        drawn = list((curves @ weights.T / n).max(1).T)  # [draws][steps]
    best = curves.mean(2).max(1)
    rows = []
    for threshold in thresholds:
        at = crossing(best, threshold)
        low, high = np.nan, np.nan
        if drawn and n > 1:
            low, high = interval(np.array([_place(steps, crossing(b, threshold)) for b in drawn]))
        censored = "left" if at == 0 else "right" if at == np.inf else ""
        shown = min(at, len(steps) - 1.0)
        place = {"step": _place(steps, shown), "low": low, "high": high, "tokens": _place(tokens, shown)}
        rows.append({"threshold": threshold, **place, "censored": censored, "n": n if drawn else np.nan})
    return pd.DataFrame(rows)


def crossing(curve: np.ndarray, threshold: float) -> float:
    """Where a curve over 0, 1, 2, ... first reaches a threshold, interpolated; inf where it never does."""
    above = np.flatnonzero(curve >= threshold)
    if not len(above):
        return np.inf
    i = int(above[0])
    return 0.0 if i == 0 else i - 1 + (threshold - curve[i - 1]) / (curve[i] - curve[i - 1])


def _place(values: np.ndarray, at: float) -> float:
    return np.inf if at == np.inf else float(np.interp(at, np.arange(len(values)), values))


def _curves(table: pd.DataFrame, measure: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Steps, tokens (NaN where unknown), and the measure [steps, heads, prompts] (one prompt: means)."""
    for column in ("step", *KEY, "kind", measure):
        if column not in table:
            raise ValueError(f"formation_step: the table has no column {column!r}; expected one of hs.track")
    full: Any = table[table["kind"] == "full"]
    if not len(full):
        raise ValueError(f"formation_step: no full-attention head in the table; it has: {sorted(set(table['kind']))}")
    prompt = full["sample"] if "sample" in full else pd.Series(0, index=full.index)
    full = full.assign(sample=prompt)
    if full.duplicated(["step", *KEY, "sample"]).any():
        raise ValueError("formation_step: several records for one step, head and prompt; select one run first")
    steps = np.unique(full["step"])
    wide = full.pivot(index=["step", *KEY], columns="sample", values=measure)
    if wide.isna().to_numpy().any():
        raise ValueError(f"formation_step: {measure!r} is missing for some prompts at some steps")
    heads, prompts = int(wide.groupby(level="step").size().max()), wide.shape[1]
    # Where a step has fewer heads (those chosen at each step need not be the same), some stand twice, for the same max.
    curves = np.stack([np.resize(wide.loc[[step]].to_numpy(), (heads, prompts)) for step in steps])
    tokens = full.drop_duplicates("step").set_index("step")["tokens"] if "tokens" in full else pd.Series(dtype=float)
    return steps.astype(float), tokens.reindex(steps).to_numpy(dtype=float), curves
