"""Retrieval heads: the score of every head of the model on one grid."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from .labels import cell_labels, settle
from .layers import layer_strip, stack_of, strip_height
from .style import MAGNITUDE, SINGLE, bar, dress, frame, kind_style, new_figure, text_on
from .tables import check, numbers, single

NAME = "heads_map"


def head_name(layer: int, site: int, head: int, sites: bool) -> str:
    """The name of a head, L3H2; L3S1H2 in a model with several sites in a layer."""
    return f"L{layer}S{site}H{head}" if sites else f"L{layer}H{head}"


def heads_map(table: pd.DataFrame, *, top: int = 5, label: str = "score", width: float | int = SINGLE) -> Figure:
    """Layers x heads grid of scores (darker is higher); the `top` heads are outlined and named.

    Reads layer, site, head, kind, score; mixer where present. `label` names the score, with its unit, on the
    colour bar. Where layers have several sites each site is a column, "layer.site". Raises ValueError naming
    a missing column or unknown kind, and for a table without any score.
    """
    rows = check(table, NAME, "layer", "site", "head", "kind", "score")
    single(rows, NAME, "layer", "site", "head")
    if rows["score"].isna().all():
        raise ValueError(f"figures.{NAME}: column 'score' holds no number")
    stack = stack_of(rows, "layer", "site")
    sites = bool((rows["site"] > 0).any())
    column = {key: i for i, key in enumerate(zip(stack["layer"], stack["site"], strict=True))}
    grid = np.full((int(rows["head"].max()) + 1, len(stack)), np.nan)
    cells = [column[key] for key in zip(rows["layer"], rows["site"], strict=True)]
    grid[rows["head"].to_numpy(dtype=int), cells] = numbers(rows, "score")

    heights = [min(3.5, max(1.1, 0.13 * len(grid))), strip_height(stack, width)]
    figure = new_figure(width, sum(heights) + 0.6)
    axes, strip = figure.subplots(2, 1, sharex=True, height_ratios=heights)
    layer_strip(strip, stack, NAME, positions=range(len(stack)))
    frame(dress(axes, ylabel="head"))
    low, high = float(np.nanmin(grid)), float(np.nanmax(grid))
    scale = Normalize(min(0.0, low), max(high, low + 1e-9))
    image = axes.imshow(grid, cmap=MAGNITUDE, norm=scale, aspect="auto", interpolation="nearest")
    axes.set_yticks(range(0, len(grid), -(-len(grid) // 8)))
    axes.tick_params(axis="x", labelbottom=False)
    bar(figure, image, axes, label)

    names = []
    best = rows.nlargest(top, "score")
    for layer, site, head, kind, score in best[["layer", "site", "head", "kind", "score"]].itertuples(index=False):
        x, outline = column[(layer, site)], {"edgecolor": kind_style(kind, NAME).color, "linewidth": 1.4}
        axes.add_patch(Rectangle((x - 0.5, head - 0.5), 1, 1, fill=False, zorder=3, **outline))
        ink = text_on(MAGNITUDE(scale(score)))
        names.append((float(x), float(head), head_name(layer, site, head, sites), ink))
    settle(figure, [axes, strip], heights)
    cell_labels(axes, names)
    return figure
