"""Receptive-field caps, layer by layer: which single layer breaks at which window."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import Colormap, Normalize
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.patches import Patch

from .caps import measured
from .labels import settle
from .layers import cell_points, layer_strip, stack_of, strip_height
from .style import MAGNITUDE, SINGLE, SMALL, SPAN, bar, dress, frame, key, new_figure, text_on
from .tables import Rows, check, overall, pick, single

NAME = "cap_heatmap"
VALUES = {
    "delta_needle_accuracy": "change of needle\naccuracy (fraction)",
    "delta_log_ppl": "change of log-\nperplexity (nats/token)",
}
FREE = {"facecolor": "white", "edgecolor": "#BDBDBD", "hatch": "/////", "linewidth": 0}
"""Cells of caps that cannot bind."""
MISSING = {**FREE, "hatch": "...."}
"""Cells that the table has no number for: white would say "no change"."""


def cap_heatmap(table: pd.DataFrame, *, value: str | None = None, width: float | int = SINGLE) -> Figure:
    """Change against uncapped for every single layer (x) capped at every window (y): white is none, or for the better;
    darker is more harm.

    Reads kind, layer, window, sinks, binds and `value`, one of delta_needle_accuracy, delta_log_ppl (by
    default the first that holds numbers); site and mixer where present; uses the rows over all needles with
    layer >= 0. Parallel sites of a layer have a column each. One panel per number of sinks; hatched cells are
    caps that cannot bind, dotted ones were not measured. Raises ValueError naming a missing column, an unknown
    kind or `value`, and for a table without single-layer caps.
    """
    rows = overall(check(table, NAME, "kind", "layer", "window", "sinks", "binds"))
    if value is not None and value not in VALUES:
        raise ValueError(f"figures.{NAME}: value={value!r}; expected one of {', '.join(VALUES)}")
    rows = rows.loc[rows["layer"] >= 0].fillna({"sinks": 0})
    rows = single(rows if "site" in rows.columns else rows.assign(site=0), NAME, "layer", "site", "sinks", "window")
    if rows.empty:
        raise ValueError(f"figures.{NAME}: column 'layer' has no row >= 0 (single layers capped); see cap_curves")
    column = value or measured(rows, NAME, VALUES)[0]
    check(table, NAME, column)
    stack, settings = stack_of(rows, "layer", "site"), sorted(rows["sinks"].unique())
    windows = np.sort(rows["window"].unique())
    heights = [max(0.8, 0.14 * len(windows))] * len(settings) + [strip_height(stack, width)]
    figure = new_figure(width, sum(heights) + 0.8)
    panels = list(figure.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0])
    layer_strip(panels[-1], stack, NAME, positions=range(len(stack)))
    if column == "delta_needle_accuracy":  # harm is a fall
        scale, shades = Normalize(min(-SPAN, float(rows[column].min())), 0), MAGNITUDE.reversed()
    else:
        scale, shades = Normalize(0, max(SPAN, float(rows[column].max()))), MAGNITUDE
    wide = cell_points(len(stack), width + 0.35) > 5.5 * 0.64 * SMALL
    for axes, sinks in zip(panels, settings, strict=False):
        image = _panel(axes, pick(rows, sinks=sinks), stack, windows, column, scale, shades, wide)
        if len(settings) > 1:
            axes.set_title(f"{int(sinks)} sinks", fontsize=SMALL, loc="left", pad=2)
        axes.tick_params(axis="x", labelbottom=False)
        bar(figure, image, axes, VALUES[column])
    binding = rows.loc[rows["binds"].astype(bool), column]
    handles = [Patch(**FREE, label="cap cannot bind")] if len(binding) < len(rows) else []
    if len(rows) < len(stack) * len(windows) * len(settings) or binding.isna().any():
        handles.append(Patch(**MISSING, label="not measured"))
    if handles:
        key(figure, handles, "upper right")
    settle(figure, panels, heights)
    return figure


def _panel(
    axes: Axes,
    rows: Rows,
    stack: Rows,
    windows: np.ndarray,
    column: str,
    scale: Normalize,
    shades: Colormap,
    wide: bool,
) -> AxesImage:
    frame(dress(axes, ylabel="window (tokens)"))
    grid = np.full((len(windows), len(stack)), np.nan)
    places = {place: i for i, place in enumerate(zip(stack["layer"], stack["site"], strict=True))}
    free = np.zeros_like(grid, dtype=bool)
    columns = ["layer", "site", "window", column, "binds"]
    for layer, site, window, change, binds in rows[columns].itertuples(index=False):
        x, y = places[layer, site], int(np.searchsorted(windows, window))
        if not binds:
            free[y, x] = True
            continue
        grid[y, x] = change
        if wide and np.isfinite(change):
            text, ink = f"{change:.2f}".replace("-0.00", "0.00"), text_on(shades(scale(change)))
            axes.text(x, y, text.replace("-", "\u2212"), fontsize=SMALL, color=ink, ha="center", va="center")
    for look, where in ((FREE, free), (MISSING, np.isnan(grid) & ~free)):
        y, x = np.nonzero(where)
        axes.bar(x, np.ones(len(x)), 1, bottom=y - 0.5, **look)
    image = axes.imshow(grid, cmap=shades, norm=scale, aspect="auto", origin="lower", interpolation="nearest")
    axes.set_yticks(range(len(windows)), [f"{int(w)}" for w in windows])
    return image
