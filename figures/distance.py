"""Gradient influence: how much a token that far back still moves the output."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .labels import Label, end_labels, settle
from .series import labelled, series_column, series_styles
from .style import INK, SINGLE, TEXT, dress, new_figure
from .tables import Rows, check, numbers, pick, single

NAME = "influence"
BANDS = 3  # lines that bands can be told apart of


def influence(table: pd.DataFrame, *, width: float | int = SINGLE) -> Figure:
    """Gradient norm at the embeddings against distance to the last token, both axes logarithmic.

    Reads target, distance, influence. One line per `model` or `step` where such a column varies (then one
    panel per target), else per target; with `low` and `high` their interval as a band where there are at most three
    lines. Distance 0 stands at 1/2, as a logarithm has no place for it; a line
    that falls to the bottom became exactly 0 there. Raises ValueError naming a missing column or if all is 0.
    """
    rows = check(table, NAME, "target", "distance", "influence")
    values = numbers(rows, "influence")
    if not (values > 0).any():
        raise ValueError(f"figures.{NAME}: column 'influence' holds no positive number")
    column = series_column(rows, ("model", "step", "target"))
    single(rows, NAME, "target", column, "distance")
    targets = [None] if column == "target" else list(dict.fromkeys(rows["target"]))
    names = list(dict.fromkeys(rows[column]))
    names = sorted(names) if column == "step" else names
    heights = [1.5] * len(targets)
    figure = new_figure(width, sum(heights) + 0.5)
    panels = list(figure.subplots(len(targets), 1, sharex=True, squeeze=False)[:, 0])
    labels = []
    for axes, target in zip(panels, targets, strict=True):
        what = "influence" if target is None else f"influence on {target}"
        dress(axes, ylabel=f"{what}\n(gradient norm)")
        axes.set_yscale("log")
        labels.append(_lines(axes, rows if target is None else pick(rows, target=target), column, names))
    panels[-1].set_xlabel("distance to the last token (tokens)", fontsize=TEXT, color=INK)
    _distance_axis(panels[-1], numbers(rows, "distance"))
    settle(figure, panels, heights)
    for axes, entries in zip(panels, labels, strict=True):
        end_labels(axes, entries)
    return figure


def _lines(axes: Axes, rows: Rows, column: str, names: list[Any]) -> list[Label]:
    values, ordered, entries = numbers(rows, "influence"), column == "step", []
    floor = float(values[values > 0].min()) / 2
    for name, look, keep in zip(names, series_styles(names, ordered), labelled(names), strict=True):
        line = pick(rows, **{column: name}).sort_values("distance")
        x, y = np.maximum(numbers(line, "distance"), 0.5), numbers(line, "influence")
        seen = np.flatnonzero(y > 0)
        if not len(seen):
            continue
        text = f"step {name}" if ordered else str(name)
        size = 2.5 if len(line) <= 40 else 0
        if {"low", "high"} <= set(line.columns) and len(names) <= BANDS:
            low, high = (np.maximum(numbers(line, side), floor) for side in ("low", "high"))
            axes.fill_between(x, low, high, color=look["color"], alpha=0.15, linewidth=0, zorder=1)
        axes.plot(x[y > 0], y[y > 0], linewidth=1.1, markersize=size, mew=0, label=text, **look)
        end = seen[-1]
        if end + 1 < len(y) and y[end + 1] == 0:
            drop = {"color": look["color"], "linewidth": 0.8, "linestyle": look["linestyle"]}
            axes.plot(x[end : end + 2], [float(y[end]), floor], label=f"_{text} becomes 0", **drop)
        if keep:
            ink = INK if ordered else look["color"]
            entries.append(Label(float(x[end]), float(y[end]), text, look["color"], ink))
    axes.set_ylim(bottom=floor)
    return entries


def _distance_axis(axes: Axes, distances: np.ndarray) -> None:
    powers = 2.0 ** np.arange(0, np.floor(np.log2(max(distances.max(), 1))) + 1)
    ticks = powers[:: -(-len(powers) // 6)]
    zero = bool((distances == 0).any())
    axes.set_xscale("log", base=2)
    axes.set_xticks([0.5, *ticks] if zero else ticks, (["0"] if zero else []) + [f"{int(t)}" for t in ticks])
    axes.set_xticks([], minor=True)
    axes.set_xlim(0.45 if zero else None, distances.max() * 1.03)
