"""Activation patching: which head, at which rows, carries what tells clean prompts from corrupt ones."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.image import AxesImage

from .labels import settle
from .layers import layer_strip, stack_of, strip_height
from .style import INK, MAGNITUDE, SINGLE, SMALL, bar, dress, frame, new_figure
from .tables import Rows, check, numbers, pick, single

NAME = "patching"
DIRECTIONS = {"denoise": "clean into corrupt", "noise": "corrupt into clean"}


def patching(table: pd.DataFrame, *, width: float | int = SINGLE) -> Figure:
    """Heat map of the recovered share, layers x heads, one panel per group of rows and direction; darker recovers more.

    Reads direction, rows, layer, site, head, kind, recovered; mixer where present. Whole sites (head -1) give one row
    of cells. The scale is common, from 0 (or the lowest share) to 1 (or the highest). Parallel sites of a layer have a
    column each. Raises ValueError naming a missing column or unknown kind.
    """
    rows = check(table, NAME, "direction", "rows", "layer", "site", "head", "kind", "recovered")
    single(rows, NAME, "direction", "rows", "layer", "site", "head")
    stack = stack_of(rows, "layer", "site")
    settings = list(rows[["rows", "direction"]].drop_duplicates().itertuples(index=False, name=None))
    heads = int(rows["head"].max()) + 1
    heights = [min(2.0, max(0.5, 0.13 * heads))] * len(settings) + [strip_height(stack, width)]
    figure = new_figure(width, sum(heights) + 0.6 + 0.18 * len(settings))
    panels = list(figure.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0])
    layer_strip(panels[-1], stack, NAME, positions=range(len(stack)))
    scale = Normalize(min(0.0, float(rows["recovered"].min())), max(1.0, float(rows["recovered"].max())))
    for axes, (group, direction) in zip(panels, settings, strict=False):
        image = _panel(axes, pick(rows, rows=group, direction=direction), stack, max(heads, 1), scale)
        title = f"{group} rows, {DIRECTIONS.get(direction, direction)}"
        axes.set_title(title, fontsize=SMALL, color=INK, loc="left", pad=2)
        axes.tick_params(axis="x", labelbottom=False)
        if heads:
            axes.set_yticks(range(0, heads, -(-heads // 4)))
            axes.set_ylabel("head", fontsize=axes.yaxis.label.get_fontsize())
        else:
            axes.set_yticks([])
        bar(figure, image, axes, "recovered\n(share)")
    settle(figure, panels, heights)
    return figure


def _panel(axes: Axes, rows: Rows, stack: Rows, heads: int, scale: Normalize) -> AxesImage:
    frame(dress(axes))
    column = {place: i for i, place in enumerate(zip(stack["layer"], stack["site"], strict=True))}
    grid = np.full((heads, len(stack)), np.nan)
    cells = [column[place] for place in zip(rows["layer"], rows["site"], strict=True)]
    grid[np.maximum(rows["head"].to_numpy(dtype=int), 0), cells] = numbers(rows, "recovered")
    return axes.imshow(grid, cmap=MAGNITUDE, norm=scale, aspect="auto", interpolation="nearest")
