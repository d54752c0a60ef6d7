"""Perplexity by position: what more context buys."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from .labels import Label, end_labels, settle
from .series import labelled, series_column, series_styles
from .style import INK, SINGLE, dress, log_ticks, new_figure
from .tables import check, numbers, pick, single

NAME = "perplexity"


def perplexity(table: pd.DataFrame, *, width: float | int = SINGLE) -> Figure:
    """Mean loss per bucket of positions, as steps over the buckets' extents.

    Reads position_low, position_high (the bucket is [low, high)) and loss; one line per `setting`, `model` or
    `step` where such a column varies. The axis is logarithmic: a first bucket that starts at 0 is shown from
    a quarter of its end on. Raises ValueError naming a missing column.
    """
    rows = check(table, NAME, "position_low", "position_high", "loss")
    column = series_column(rows, ("setting", "model", "step"))
    single(rows, NAME, "position_low", *([column] if column else []))
    names: list[Any] = list(dict.fromkeys(rows[column])) if column else [""]
    ordered = column == "step"
    names = sorted(names) if ordered else names
    figure = new_figure(width, 2.0)
    axes = dress(figure.subplots(), xlabel="position (tokens)", ylabel="loss (nats/token)")
    labels = []
    low, high = numbers(rows, "position_low"), numbers(rows, "position_high")
    start = max(low.min(), high.min() / 4, 1.0)
    for name, look, keep in zip(names, series_styles(names, ordered), labelled(names), strict=True):
        line = (pick(rows, **{column: name}) if column else rows).sort_values("position_low")
        ends = [np.maximum(numbers(line, "position_low"), start), numbers(line, "position_high")]
        edges, losses = np.stack(ends, axis=1), np.repeat(numbers(line, "loss"), 2)
        text = f"step {name}" if ordered else str(name)
        look = {"color": look["color"], "linestyle": look["linestyle"]}
        axes.plot(edges.ravel(), losses, linewidth=1.3, label=text or "loss", **look)
        if keep and len(names) > 1:
            ink = INK if ordered else look["color"]
            labels.append(Label(float(edges[-1, 1]), float(losses[-1]), text, look["color"], ink))
    powers = 2.0 ** np.arange(np.ceil(np.log2(start)), np.floor(np.log2(high.max())) + 1)
    log_ticks(axes, powers if len(powers) > 1 else np.array([start, high.max()]))
    axes.set_xlim(start, high.max())
    settle(figure, [axes], [1.5])
    end_labels(axes, labels)
    return figure
