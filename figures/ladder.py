"""Formation of retrieval heads over a ladder of training checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .heads import head_name
from .labels import Label, end_labels, settle
from .style import DOUBLE, GREY, INK, SINGLE, SMALL, TEXT, dress, kind_style, new_figure
from .tables import Rows, check, has_values, numbers, single
from .token_axis import token_axis

NAME = "formation"
KEY = ["layer", "site", "head"]
FORMED = ("threshold", "step", "low", "high", "censored")
PANELS = {
    "entropy": "row entropy\n(nats)",
    "mass": "needle mass\n(probability)",
    "copy": "copy score\n(fraction)",
    "accuracy": "accuracy\n(fraction)",
    "qk_rel": "Q/K drift\n(relative)",
}
DASHES: list[Any] = [
    "-",
    (0, (5, 1.5)),
    (0, (1, 1)),
    (0, (5, 1.5, 1, 1.5)),
    (0, (2.5, 1)),
    (0, (5, 1, 1, 1, 1, 1)),
]


def formation(
    track: pd.DataFrame,
    drift: pd.DataFrame | None = None,
    heads: Sequence[tuple[int, ...]] | None = None,
    top: int = 4,
    *,
    width: float | int = SINGLE,
    log_steps: bool = False,
    mark: float | int | None = None,
    formed: pd.DataFrame | None = None,
) -> Figure:
    """Entropy, needle mass, copy score, accuracy and Q/K drift against step, in panels that share the axis.

    Reads step, layer, site, head, kind, entropy, mass, copy of `track` (tokens, the upper axis, and accuracy
    where present) and step, layer, site, head, qk_rel of `drift`. Thin lines in the kind's colour, one dash
    pattern per head, are the followed heads: `heads`, as (layer, head) or (layer, site, head), or else the
    `top` ones by mass at the last step; the thick line is their mean. Heads chosen at each step, which come and go, are
    drawn as that mean alone. `mark` draws a vertical line at a step. `formed` (threshold, step, low, high, censored)
    puts the formation steps at their thresholds into the mass panel, with their intervals; an open triangle is a
    threshold not reached by the last step, or reached before the first. Raises ValueError naming a missing column, an
    unknown kind or head.
    """
    rows = single(check(track, NAME, "step", *KEY, "kind", "entropy", "mass", "copy"), NAME, "step", *KEY)
    changing = heads is None and _changing(rows)
    followed = rows[["step", *KEY, "kind"]].assign(name="") if changing else _followed(rows, heads, top)
    tables: dict[str, Rows] = {"entropy": rows, "mass": rows, "copy": rows}
    if has_values(rows, "accuracy"):
        tables["accuracy"] = rows
    if drift is not None:
        tables["qk_rel"] = single(check(drift, NAME, "step", *KEY, "qk_rel"), NAME, "step", *KEY)
    across = 1 if width < 0.75 * DOUBLE else min(3, len(tables))
    down = -(-len(tables) // across)
    heights = [0.72 if across == 1 else 1.1] * down
    figure = new_figure(width, sum(heights) + 0.8)
    grid = figure.subplots(down, across, sharex=True, squeeze=False).ravel()
    panels = list(grid[: len(tables)])
    for spare in grid[len(tables) :]:
        spare.axis("off")
    labels = [
        _panel(axes, tables[column], column, followed, alone=not changing)
        for axes, column in zip(panels, tables, strict=True)
    ]
    if formed is not None:
        _formed(panels[list(tables).index("mass")], check(formed, NAME, *FORMED), numbers(rows, "step"))
    steps = np.unique(numbers(rows, "step"))
    if log_steps:
        panels[0].set_xscale("symlog", linthresh=float(steps[steps > 0].min()))
    if len(steps) > 1:
        panels[0].set_xlim(steps[0], steps[-1])
    for i, axes in enumerate(panels):
        axes.tick_params(axis="x", labelbottom=i + across >= len(panels))
        if mark is not None:
            axes.axvline(mark, color=GREY, linewidth=0.6, linestyle=(0, (4, 2)))
        if i < across and has_values(rows, "tokens"):
            token_axis(axes, rows, log_steps)
    figure.supxlabel("optimiser step", fontsize=TEXT, color=INK)
    figure.align_ylabels(panels)
    settle(figure, panels[::across], heights)
    for axes, entries in zip(panels, labels, strict=True):
        end_labels(axes, entries)
    return figure


def _followed(track: Rows, heads: Sequence[tuple[int, ...]] | None, top: int) -> Rows:
    """One row per followed head: layer, site, head, kind, and its name."""
    if heads is None:
        final = track.loc[track["step"] == track["step"].max()]
        chosen = final.dropna(subset=["mass"]).nlargest(top, "mass")
    else:
        wanted = [(h[0], h[1] if len(h) == 3 else 0, h[-1]) for h in heads]
        every = track.drop_duplicates(KEY).set_index(KEY, drop=False)
        for head in wanted:
            if head not in every.index:
                raise ValueError(f"figures.{NAME}: heads: the table has no (layer, site, head) {head}")
        chosen = every.loc[wanted].reset_index(drop=True)
    if chosen.empty:
        raise ValueError(f"figures.{NAME}: column 'mass' has no value at the last step to choose heads by")
    sites = bool((track["site"] > 0).any())
    names = [head_name(layer, site, head, sites) for layer, site, head in chosen[KEY].itertuples(index=False)]
    return chosen[[*KEY, "kind"]].assign(name=names)


def _changing(rows: Rows) -> bool:
    """Whether the steps hold different heads."""
    return len({frozenset(map(tuple, step[KEY].to_numpy())) for _, step in rows.groupby("step")}) > 1


def _formed(axes: Axes, formed: Rows, steps: np.ndarray) -> None:
    """Formation steps, each at its threshold, with the part of its interval that the ladder covers."""
    first, last = steps.min(), steps.max()
    for threshold, step, low, high, censored in formed[list(FORMED)].itertuples(index=False):
        if low == low:  # known
            axes.plot(np.clip([low, high], first, last), [threshold] * 2, color=INK, linewidth=0.8, zorder=3)
        marker = {"": "o", "right": ">", "left": "<"}[censored]
        face = "white" if censored else INK
        look = {"markersize": 4, "markerfacecolor": face, "markeredgecolor": INK, "zorder": 3.1, "clip_on": False}
        axes.plot([step], [threshold], marker, label=f"_formed {threshold:g}", **look)


def _panel(axes: Axes, table: Rows, column: str, followed: Rows, alone: bool = True) -> list[Label]:
    dress(axes, ylabel=PANELS[column]).yaxis.label.set_fontsize(SMALL)
    on = [c for c in ("step", *KEY) if c in followed]
    mine = table.merge(followed[[*on, "name"]], on=on)
    if mine.empty:
        raise ValueError(f"figures.{NAME}: no followed head has a row for {column!r}")
    ends, mean = [], mine.groupby("step")[column].mean()
    x, y = mean.index.to_numpy(dtype=float), mean.to_numpy(dtype=float)
    if alone and column != "accuracy":  # which is the model's, the same for every head
        for i, (name, kind) in enumerate(followed[["name", "kind"]].itertuples(index=False)):
            line, style = mine.loc[mine["name"] == name].sort_values("step"), kind_style(kind, NAME)
            a, b = numbers(line, "step"), numbers(line, column)
            if len(line):
                dash = DASHES[i % len(DASHES)]
                axes.plot(a, b, color=style.color, linewidth=0.8, linestyle=dash, label=name)
                ends.append(Label(float(a[-1]), float(b[-1]), name, style.color, style.ink))
    if len(ends) != 1:
        name = "mean" if ends or column != "accuracy" else "model"
        axes.plot(x, y, color=INK, linewidth=1.7, label=name, zorder=1.9)
        ends.append(Label(float(x[-1]), float(y[-1]), name, INK))
    if column in ("mass", "copy", "accuracy"):
        axes.set(ylim=(-0.04, 1.04), yticks=[0, 0.5, 1])
    else:
        axes.set_ylim(bottom=min(0.0, float(mine[column].min())))
    together = np.ptp([label.y for label in ends]) < 0.02 * np.ptp(axes.get_ylim())
    return [] if together and len(ends) > 1 else ends  # in one point, labels could not say which is which
