"""Receptive-field caps by distance: which needles are lost, those beyond the cap or all of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from .caps import DASHES
from .labels import Label, end_labels, settle
from .style import GREY, INK, SINGLE, TEXT, dress, key, kind_style, log_ticks, new_figure
from .tables import Rows, check, numbers, pick, single

NAME = "cap_distance"


def cap_distance(table: pd.DataFrame, *, width: float | int = SINGLE) -> Figure:
    """Needle accuracy against the distance back to the needle, one panel per capped kind and one line per window.

    Reads kind, layer, window, sinks, binds, distance_low, distance_high (the bucket is [low, high)) and
    needle_accuracy; uses the rows by distance with layer -1 and the uncapped baseline (kind "none"). Lines darken
    with tighter caps; their style says the sinks; a dotted vertical of the same shade stands where a cap ends:
    only needles left of it are in its view. Caps that cannot bind are the uncapped line. Raises ValueError naming
    a missing column or unknown kind, and for a table without rows by distance or baseline.
    """
    rows = check(
        table, NAME, "kind", "layer", "window", "sinks", "binds", "distance_low", "distance_high", "needle_accuracy"
    )
    rows = rows.loc[rows["distance_low"].notna()]
    if rows.empty:
        raise ValueError(f"figures.{NAME}: column 'distance_low' has no number; sweep with by_distance=True")
    base, caps = pick(rows, kind="none"), rows.loc[(rows["kind"] != "none") & (rows["layer"] == -1)]
    if base.empty:
        raise ValueError(f"figures.{NAME}: column 'kind' has no row 'none' (the uncapped baseline)")
    if caps.empty:
        raise ValueError(f"figures.{NAME}: column 'layer' has no row -1 (a whole kind capped)")
    base = single(base, NAME, "distance_low")
    caps = single(caps.fillna({"sinks": 0}), NAME, "kind", "sinks", "window", "distance_low")
    kinds, settings = list(dict.fromkeys(caps["kind"])), sorted(caps["sinks"].unique())
    heights = [1.3] * len(kinds)
    figure = new_figure(width, sum(heights) + 0.8)
    panels = list(figure.subplots(len(kinds), 1, sharex=True, squeeze=False)[:, 0])
    low, high = numbers(base, "distance_low"), numbers(base, "distance_high")
    start, end = max(low.min(), high.min() / 2, 1.0), high.max()
    labels = [
        _panel(axes, kind, base, pick(caps, kind=kind), settings, start)
        for axes, kind in zip(panels, kinds, strict=True)
    ]
    powers = 2.0 ** np.arange(np.ceil(np.log2(start)), np.floor(np.log2(end)) + 1)
    log_ticks(panels[-1], powers if len(powers) > 1 else np.array([start, end]))
    panels[-1].set_xlim(start, end)
    panels[-1].set_xlabel("distance from the query back to the needle (tokens)", fontsize=TEXT, color=INK)
    handles: list[Artist] = []
    for sinks, dash in zip(settings if len(settings) > 1 else [], DASHES, strict=False):
        handles.append(Line2D([], [], color=GREY, linestyle=dash, linewidth=1.3, label=f"{int(sinks)} sinks"))
    handles.append(Line2D([], [], color=GREY, linestyle=":", linewidth=0.8, label="cap ends"))
    key(figure, handles, "upper center")
    settle(figure, panels, heights)
    for axes, entries in zip(panels, labels, strict=True):
        end_labels(axes, entries)
    return figure


def _panel(axes: Axes, kind: str, base: Rows, caps: Rows, settings: list[Any], start: float) -> list[Label]:
    dress(axes, ylabel=f"accuracy, {kind}\ncapped (fraction)")
    axes.set_ylim(-0.03, 1.05)
    color = np.array(to_rgb(kind_style(kind, NAME).color))
    axes.plot(*_steps(base, start), color=INK, linewidth=0.8, label="uncapped")
    labels = [Label(*_last(base), "uncapped", INK)]
    binding = caps.loc[caps["binds"].astype(bool)]
    windows = sorted(binding["window"].unique())
    for window, strength in zip(windows, np.linspace(1, 0.45, len(windows)), strict=True):
        shade = tuple(float(c) for c in 1 - strength * (1 - color))
        if window > start:
            axes.axvline(window, color=shade, linestyle=":", linewidth=0.8, label=f"_ends {int(window)}")
        lines = pick(binding, window=window)
        for sinks in sorted(lines["sinks"].unique()):
            line, dash = pick(lines, sinks=sinks), DASHES[settings.index(sinks) % len(DASHES)]
            name = f"{int(window)}, {int(sinks)} sinks"
            axes.plot(*_steps(line, start), color=shade, linestyle=dash, linewidth=1.3, label=name)
        first = pick(lines, sinks=lines["sinks"].min())
        labels.append(Label(*_last(first), f"cap {int(window)}", shade))
    return labels


def _steps(line: Rows, start: float) -> tuple[np.ndarray, np.ndarray]:
    """A line that is level over each bucket."""
    line = line.sort_values("distance_low")
    edges = [np.maximum(numbers(line, "distance_low"), start), numbers(line, "distance_high")]
    return np.stack(edges, axis=1).ravel(), np.repeat(numbers(line, "needle_accuracy"), 2)


def _last(line: Rows) -> tuple[float, float]:
    line = line.sort_values("distance_low")
    return float(numbers(line, "distance_high")[-1]), float(numbers(line, "needle_accuracy")[-1])
