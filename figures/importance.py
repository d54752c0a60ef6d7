"""Layer importance: what it costs to cap this layer alone, along depth."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from .caps_map import FREE
from .labels import settle
from .layers import layer_strip, stack_of, strip_height
from .style import GREY, INK, SINGLE, SMALL, SPAN, dress, key, kind_style, new_figure
from .tables import Rows, check, numbers, pick, single

NAME = "layer_importance"
SHADES = [1.0, 0.45, 0.25, 0.15]  # opacity of the bars for each number of sinks
TOP = 3


def layer_importance(table: pd.DataFrame, *, width: float | int = SINGLE) -> Figure:
    """Importance of every ranked site in depth order, one panel per window; the first three ranks are written above.

    Reads kind, layer, site, window, sinks, binds, rank, importance; mixer where present. Bars of one site stand side by
    side for each number of sinks, paler for more, with the ranks of the first; hatched sites are those whose cap cannot
    bind. Raises ValueError naming a missing column or unknown kind.
    """
    rows = check(table, NAME, "kind", "layer", "site", "window", "sinks", "binds", "rank", "importance")
    rows = single(rows, NAME, "layer", "site", "window", "sinks")
    stack = stack_of(rows, "layer", "site")
    windows, settings = sorted(rows["window"].unique()), sorted(rows["sinks"].unique())
    heights = [0.75] * len(windows) + [strip_height(stack, width)]
    figure = new_figure(width, sum(heights) + 0.8)
    panels = list(figure.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0])
    layer_strip(panels[-1], stack, NAME, positions=range(len(stack)))
    for axes, window in zip(panels, windows, strict=False):
        _panel(axes, pick(rows, window=window), stack, settings)
        axes.set_title(f"capped at {int(window)} tokens", fontsize=SMALL, color=INK, loc="left", pad=2)
        axes.tick_params(axis="x", labelbottom=False, length=0)
    figure.supylabel("loss increase\n(nats/answer token)", fontsize=SMALL, color=INK)
    handles: list[Artist] = []
    for sinks, shade in zip(settings if len(settings) > 1 else [], SHADES, strict=False):
        handles.append(Patch(facecolor=GREY, alpha=shade, label=f"{int(sinks)} sinks"))
    if not rows["binds"].all():
        handles.append(Patch(**FREE, label="cap cannot bind"))
    if handles:
        key(figure, handles, "upper right")
    settle(figure, panels, heights)
    return figure


def _panel(axes: Axes, rows: Rows, stack: Rows, settings: list[Any]) -> None:
    dress(axes)
    places = {place: i for i, place in enumerate(zip(stack["layer"], stack["site"], strict=True))}
    wide = 0.8 / len(settings)
    for i, sinks in enumerate(settings):
        bars = pick(rows, sinks=sinks)
        x = np.array([places[place] for place in zip(bars["layer"], bars["site"], strict=True)])
        colors = [kind_style(kind, NAME).color for kind in bars["kind"]]
        at, shade = x - 0.4 + wide * (i + 0.5), SHADES[min(i, len(SHADES) - 1)]
        axes.bar(at, numbers(bars, "importance"), wide, color=colors, alpha=shade, label=f"{int(sinks)} sinks")
    high, low = max(SPAN, float(rows["importance"].max())), min(float(rows["importance"].min()), 0.0)
    axes.set_ylim(low * 1.1, low * 1.1 + (high - low * 1.1) * 1.45)  # room for the ranks
    axes.axhline(0, color=INK, linewidth=0.6)
    axes.spines["bottom"].set_visible(False)
    columns = ["layer", "site", "rank", "importance", "binds"]
    for layer, site, rank, value, binds in pick(rows, sinks=settings[0])[columns].itertuples(index=False):
        x = places[layer, site]
        if not binds:
            axes.bar([x], [axes.get_ylim()[1]], 1, **FREE)
        elif rank <= TOP:
            x = x - 0.4 + wide / 2
            look: dict[str, Any] = {"fontsize": SMALL, "color": INK, "ha": "center", "va": "bottom"}
            top = max(value, 0) + 0.03 * (axes.get_ylim()[1] - axes.get_ylim()[0])
            axes.text(x, top, str(int(rank)), **look)
