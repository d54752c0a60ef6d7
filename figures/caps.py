"""Receptive-field caps: what breaks when one kind of layer sees only the last W tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from .labels import Label, end_labels, settle
from .style import DOUBLE, GREY, INK, SINGLE, TEXT, dress, key, kind_style, log_ticks, new_figure
from .tables import Rows, check, has_values, numbers, overall, pick, single

NAME = "cap_curves"
PANELS = {"needle_accuracy": "needle accuracy\n(fraction)", "log_ppl": "log-perplexity\n(nats/token)"}
DASHES: list[Any] = ["-", (0, (3, 1.2)), (0, (1, 1)), (0, (4, 1.2, 1, 1.2))]


def measured(table: Rows, figure: str, columns: dict[str, str]) -> list[str]:
    """Those of the columns that hold numbers; ValueError if none does."""
    found = [column for column in columns if has_values(table, column)]
    if not found:
        raise ValueError(f"figures.{figure}: the table has values in none of the columns {', '.join(columns)}")
    return found


def cap_curves(table: pd.DataFrame, *, width: float | int = SINGLE) -> Figure:
    """Needle accuracy and log-perplexity against the window that one whole kind is capped at.

    Reads kind, layer, window, sinks, binds, and needle_accuracy, log_ppl where they hold numbers; uses the
    rows over all needles with layer -1 and the uncapped baseline (kind "none"). One curve per kind and number of
    sinks (line style); a cap that cannot bind stands on the baseline as an open marker. Raises ValueError naming a
    missing column or unknown kind, and for a table without baseline or without whole-kind caps.
    """
    rows = overall(check(table, NAME, "kind", "layer", "window", "sinks", "binds"))
    columns = measured(rows, NAME, PANELS)
    base, caps = pick(rows, kind="none"), rows.loc[(rows["kind"] != "none") & (rows["layer"] == -1)]
    if base.empty:
        raise ValueError(f"figures.{NAME}: column 'kind' has no row 'none' (the uncapped baseline)")
    if caps.empty:
        raise ValueError(f"figures.{NAME}: column 'layer' has no row -1 (a whole kind capped); see cap_heatmap")
    caps = single(caps.fillna({"sinks": 0}), NAME, "kind", "sinks", "window")
    beside = width >= 0.75 * DOUBLE
    down, across = (1, len(columns)) if beside else (len(columns), 1)
    heights = [1.6 if beside else 1.2] * down
    figure = new_figure(width, sum(heights) + 0.8)
    panels = list(figure.subplots(down, across, sharex=True, squeeze=False).ravel())
    for axes, column in zip(panels, columns, strict=True):
        dress(axes, ylabel=PANELS[column])
        _panel(axes, column, caps, float(base[column].mean()))
    log_ticks(panels[0], caps["window"], most=8)
    for axes in panels if beside else panels[-1:]:
        axes.set_xlabel("window of the capped kind (tokens)", fontsize=TEXT, color=INK)
    _keys(figure, caps, width)
    figure.align_ylabels(panels)
    settle(figure, panels[:down], heights)
    for axes, column in zip(panels, columns, strict=True):
        end_labels(axes, [Label(axes.get_xlim()[1], float(base[column].mean()), "uncapped", INK)])
    return figure


def _panel(axes: Axes, column: str, caps: Rows, baseline: float) -> None:
    axes.axhline(baseline, color=INK, linewidth=0.6)
    settings = sorted(caps["sinks"].unique())
    for (kind, sinks), rows in caps.groupby(["kind", "sinks"], sort=False):
        style, rows = kind_style(kind, NAME), rows.sort_values("window")
        binds, x = rows["binds"].to_numpy(dtype=bool), numbers(rows, "window")
        y = np.where(binds, numbers(rows, column), baseline)
        until = np.flatnonzero(binds)[-1] + 2 if binds.any() else 0  # on to the first cap that cannot bind
        dash, name = DASHES[settings.index(sinks) % len(DASHES)], f"{kind}, {int(sinks)} sinks"
        axes.plot(x[:until], y[:until], color=style.color, linestyle=dash, linewidth=1.3, label=name)
        marks: dict[str, Any] = {
            "linestyle": "",
            "marker": style.marker,
            "color": style.color,
            "markersize": 4,
        }
        axes.plot(x[binds], y[binds], mew=0, label=f"_binds {name}", **marks)
        axes.plot(x[~binds], y[~binds], mfc="white", mew=0.9, label=f"_free {name}", **marks)
    if column == "needle_accuracy":
        axes.set_ylim(-0.03, 1.05)


def _keys(figure: Figure, caps: Rows, width: float | int) -> None:
    """What colour and marker, line style and open markers say, in the order of the kinds' first rows."""
    handles: list[Artist] = []
    for kind in caps["kind"].unique():
        style = kind_style(kind, NAME)
        look: dict[str, Any] = {"color": style.color, "marker": style.marker, "markersize": 4, "mew": 0}
        handles.append(Line2D([], [], linewidth=1.3, label=f"{kind} capped", **look))
    settings = sorted(caps["sinks"].unique())
    for sinks, dash in zip(settings if len(settings) > 1 else [], DASHES, strict=False):
        handles.append(Line2D([], [], color=GREY, linestyle=dash, linewidth=1.3, label=f"{int(sinks)} sinks"))
    if not caps["binds"].all():
        look = {"color": GREY, "linestyle": "", "marker": "o", "markersize": 4, "mfc": "white"}
        handles.append(Line2D([], [], label="cannot bind", **look))
    key(figure, handles, "upper center", columns=min(len(handles), 3 if width < 0.75 * DOUBLE else 7))
