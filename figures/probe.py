"""Layer-wise needle probe: what a linear classifier reads off the residual stream, along depth."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patheffects import withStroke

from .labels import Label, end_labels, settle
from .layers import cell_points, layer_strip, stack_of, strip_height
from .style import GREY, INK, PALE, SINGLE, SMALL, dress, key, kind_style, new_figure
from .tables import Rows, check, has_values, numbers, pick, single

NAME = "probe_curve"
OFFSET = {"pre": -0.5, "mid": 0.0, "delta": 0.0, "post": 0.5}
"""Where a feature stands on the layer axis; a layer's `post` is the next one's `pre`."""
CONTROLS = {"shuffled": (0, (4, 2)), "removed": (0, (1, 1.5))}
COLUMNS = ("layer", "kind", "where", "target", "control", "accuracy", "low", "high", "chance")


def probe_curve(table: pd.DataFrame, *, width: float | int = SINGLE) -> Figure:
    """Probe accuracy along depth: thick strokes are mixers (in their kind's colour), thin grey ones are MLPs.

    Reads layer, kind, where, target, control, accuracy, low, high, chance; mixer and gain where present. The
    band is the 95% interval; thin dashed lines are the controls; open markers are probes on `delta`, what the
    mixer alone adds; bars below are each mixer's gain. One panel per target. Raises ValueError naming a
    missing column, an unknown kind or feature, or a table without `control` "none".
    """
    rows = check(table, NAME, *COLUMNS)
    if unknown := sorted(set(rows["where"]) - set(OFFSET)):
        raise ValueError(f"figures.{NAME}: column 'where' holds {unknown}; expected {', '.join(OFFSET)}")
    single(rows, NAME, "layer", "where", "target", "control")
    stack, gain = stack_of(rows), has_values(rows, "gain")
    targets = list(dict.fromkeys(rows["target"]))
    heights = [1.3, 0.4] * len(targets) if gain else [1.5] * len(targets)
    heights.append(strip_height(stack, width))
    figure = new_figure(width, sum(heights) + 0.8)
    panels = list(figure.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0])
    layer_strip(panels[-1], stack, NAME)
    size = min(3.6, max(2.0, 0.5 * cell_points(len(stack), width)))
    every = 2 if gain else 1
    labels: list[list[Label]] = []
    for target, axes in zip(targets, panels[:-1:every], strict=True):
        dress(axes, ylabel=f"{target if len(targets) > 1 else 'probe'} accuracy\n(fraction)")
        labels.append(_accuracy(axes, pick(rows, target=target), size))
    for target, axes in zip(targets if gain else [], panels[1:-1:every], strict=False):
        _gain(axes, pick(rows, target=target))
    for axes in panels[:-1]:
        axes.tick_params(axis="x", bottom=False, labelbottom=False)
    strokes = [_line(linewidth=2.4, label="mixer"), _line(linewidth=0.8, label="MLP")]
    if (rows["where"] == "delta").any():
        strokes.append(_line(**_open("o", GREY, 3.6), label="what the mixer adds, alone"))
    key(figure, strokes, "upper center")
    figure.align_ylabels(panels[:-1])
    settle(figure, panels, heights)
    for axes, entries in zip(panels[:-1:every], labels, strict=True):
        end_labels(axes, entries)
    return figure


def _line(**look: Any) -> Line2D:
    return Line2D([], [], **{"color": GREY, **look})


def _open(marker: str, color: str, size: float) -> dict[str, Any]:
    return {"linestyle": "", "marker": marker, "mfc": "white", "mec": color, "markersize": size, "mew": 0.9}


def _path(rows: Rows) -> Rows:
    """Residual-stream rows by depth, one per place: a layer's `post` gives way to the next one's `pre`."""
    stream = rows.loc[rows["where"] != "delta"]
    stream = stream.assign(
        x=stream["layer"] + stream["where"].map(OFFSET).astype(float), late=stream["where"] == "post"
    )
    return stream.sort_values(["x", "late"]).drop_duplicates("x")


def _accuracy(axes: Axes, rows: Rows, size: float) -> list[Label]:
    axes.set_ylim(0, 1.03)
    probe = pick(rows, control="none")
    if probe.empty:
        raise ValueError(f"figures.{NAME}: column 'control' has no row 'none' (the probe itself)")
    real = _path(probe)  # empty where only `delta` was probed
    chance, right = float(np.nanmean(numbers(rows, "chance"))), float(rows["layer"].max()) + 0.5
    axes.axhline(chance, color=INK, linewidth=0.6, zorder=1.5)
    labels = [Label(right, chance, f"chance {chance:.3g}", INK)]
    for control, dash in CONTROLS.items():
        path = _path(pick(rows, control=control))
        if not path.empty:
            x, y = numbers(path, "x"), numbers(path, "accuracy")
            axes.plot(x, y, color=GREY, linewidth=0.9, linestyle=dash, label=control, zorder=1.6)
            labels.append(Label(float(x[-1]), float(y[-1]), control, GREY, GREY))

    x = numbers(real, "x")
    axes.fill_between(x, numbers(real, "low"), numbers(real, "high"), color=PALE, linewidth=0, zorder=1)
    axes.plot(x, numbers(real, "accuracy"), color=GREY, linewidth=0.8, label="probe")
    for layer, kind in pick(real, where="mid")[["layer", "kind"]].itertuples(index=False):
        style, step = kind_style(kind, NAME), real.loc[real["x"].isin([layer - 0.5, layer])]
        x, y = numbers(step, "x"), numbers(step, "accuracy")
        look: dict[str, Any] = {"color": style.color, "linewidth": 0.66 * size, "solid_capstyle": "butt"}
        axes.plot(
            x,
            y,
            label=f"_{kind}",
            path_effects=[withStroke(linewidth=0.66 * size + 0.7, foreground=INK)],
            **look,
        )
        mark: dict[str, Any] = {"color": style.color, "markersize": size, "mec": INK, "mew": 0.35}
        axes.plot(x[-1:], y[-1:], style.marker, label=f"_after {kind}", **mark)
    alone = pick(rows, control="none", where="delta")
    for layer, kind, accuracy in alone[["layer", "kind", "accuracy"]].itertuples(index=False):
        style = kind_style(kind, NAME)
        axes.plot([layer], [accuracy], label=f"_delta {kind}", **_open(style.marker, style.color, size))
    return labels


def _gain(axes: Axes, rows: Rows) -> None:
    dress(axes, ylabel="gain\n(fraction)").yaxis.label.set_fontsize(SMALL)
    for kind, group in pick(rows, control="none", where="mid").groupby("kind", sort=False):
        color = kind_style(kind, NAME).color
        axes.bar(
            group["layer"],
            group["gain"],
            width=0.8,
            color=color,
            edgecolor=INK,
            linewidth=0.3,
            label=str(kind),
        )
    low, high = axes.get_ylim()
    axes.set_ylim(min(low, -0.1) if low < 0 else 0, max(high, 0.1))  # noise does not fill the panel
    axes.axhline(0, color=INK, linewidth=0.6)
    axes.spines["bottom"].set_visible(False)
