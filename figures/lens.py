"""The logit lens: how the prediction forms along the layers."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from .labels import settle
from .layers import layer_strip, stack_of, strip_height
from .style import GREY, INK, KINDS, PALE, SINGLE, dress, kind_style, new_figure
from .tables import check, numbers, pick, single

NAME = "logit_lens"
PANELS = {"log_prob": "target's log-\nprobability (nats)", "kl": "KL to the\nmodel (nats)"}


def logit_lens(table: pd.DataFrame, *, width: float | int = SINGLE) -> Figure:
    """Median over rows and samples of the target's log-probability and of the KL divergence to the model's own
    distribution, after every layer; the band holds the middle half.

    Reads sample, row, layer, kind, log_prob, kl; mixer where present. Raises ValueError naming a missing column or
    unknown kind ("none" stands for a layer without a mixer), and for a table of several models.
    """
    rows = check(table, NAME, "sample", "row", "layer", "kind", "log_prob", "kl")
    single(rows, NAME, "sample", "row", "layer")
    stack = stack_of(rows)
    strip = stack.loc[stack["kind"] != "none"]
    heights = [1.0, 1.0, strip_height(strip, width)]
    figure = new_figure(width, sum(heights) + 0.7)
    panels = list(figure.subplots(len(heights), 1, sharex=True, height_ratios=heights))
    layer_strip(panels[-1], strip, NAME)
    for axes, (column, text) in zip(panels, PANELS.items(), strict=False):
        dress(axes, ylabel=text)
        axes.tick_params(axis="x", labelbottom=False, length=0)
        quarters = rows.groupby("layer")[column].quantile([0.25, 0.5, 0.75]).unstack()
        x, (low, middle, high) = quarters.index.to_numpy(), quarters.to_numpy().T
        axes.fill_between(x, low, high, color=PALE, linewidth=0, zorder=1)
        axes.plot(x, middle, color=GREY, linewidth=0.8, label=column)
        for kind in [kind for kind in KINDS if kind in set(strip["kind"])]:
            style, layers = kind_style(kind, NAME), numbers(pick(strip, kind=kind), "layer")
            at = np.isin(x, layers)
            look = {"color": style.color, "markersize": 4, "mec": INK, "mew": 0.35}
            axes.plot(x[at], middle[at], style.marker, label=f"_{kind}", **look)
        axes.set_xlim(float(x.min()) - 0.5, float(x.max()) + 0.5)
    settle(figure, panels, heights)
    return figure
