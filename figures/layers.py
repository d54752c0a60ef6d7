"""The layer axis: a strip of cells, coloured by kind and named by mixer, with the layer numbers below."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import Patch, Rectangle

from .style import SMALL, dress, key, kind_style, text_on
from .tables import Rows

MARGIN = 0.95
"""Inches of a figure's width that are not layer axis, about."""


def stack_of(table: Rows, *keys: str) -> Rows:
    """One row per layer (or per `keys`) with its kind and mixer; the kind stands in for mixers not given."""
    columns = list(keys or ("layer",))
    stack = table.drop_duplicates(columns).sort_values(columns).reset_index(drop=True)
    return stack if "mixer" in stack.columns else stack.assign(mixer=stack["kind"])


def cell_points(cells: float | int, width: float | int) -> float:
    """Width of one of that many cells in points, in a figure `width` inches wide."""
    return 72 * (width - MARGIN) / cells


def _naming(names: Sequence[str], cells: float | int, width: float | int) -> tuple[str, float]:
    """How cells are named ("flat", "upright" or by a "key") and the height in inches that this needs."""
    cell, longest = cell_points(cells, width), 0.64 * SMALL * max(map(len, names))
    if cell > longest + 2:
        return "flat", 0.16
    return ("upright", (longest + 5) / 72) if cell > 1.3 * SMALL else ("key", 0.12)


def strip_height(stack: Rows, width: float | int) -> float:
    """Inches of height that the strip needs: more where its names stand upright."""
    return _naming([str(mixer) for mixer in stack["mixer"]], len(stack), width)[1]


def layer_strip(axes: Axes, stack: Rows, figure: str, positions: Sequence[int] | None = None) -> None:
    """Turn axes into the layer axis of those above: unit cells at the layer's number or at `positions`.

    Names stand in the cells where they fit, upright if need be; else a key below the figure gives them.
    """
    dress(axes, xlabel="layer")
    root: Any = axes.figure
    layers = [int(layer) for layer in stack["layer"]]
    kinds, mixers = [str(kind) for kind in stack["kind"]], [str(mixer) for mixer in stack["mixer"]]
    places = layers if positions is None else list(positions)
    low, high = min(places) - 0.5, max(places) + 0.5
    naming, _ = _naming(mixers, high - low, root.get_figwidth())
    for place, kind, mixer in zip(places, kinds, mixers, strict=True):
        color = kind_style(kind, figure).color
        axes.add_patch(Rectangle((place - 0.5, 0), 1, 1, facecolor=color, edgecolor="white", linewidth=0.6))
        if naming != "key":
            turn, ink = 90 if naming == "upright" else 0, text_on(color)
            axes.text(place, 0.48, mixer, rotation=turn, fontsize=SMALL, color=ink, ha="center", va="center")
    axes.set(xlim=(low, high), ylim=(0, 1), yticks=[])
    axes.spines[["left", "bottom"]].set_visible(False)

    several = bool(stack["layer"].duplicated().any())
    sites = stack["site"] if several else layers
    names = [f"{a}.{b}" if several else str(a) for a, b in zip(layers, sites, strict=True)]
    cell, longest = cell_points(high - low, root.get_figwidth()), 0.64 * SMALL * max(map(len, names)) + 3
    upright = several and cell < longest
    every = 1 if upright else next(n for n in (1, 2, 5, 10, 20, 50, 100, 1000) if cell * n > longest)
    shown = [i for i in range(len(places)) if upright or layers[i] % every == 0]
    axes.set_xticks([places[i] for i in shown], [names[i] for i in shown], rotation=90 if upright else 0)
    axes.tick_params(axis="x", length=0)
    for i, tick in zip(shown, axes.get_xticklabels(), strict=True):
        tick.set_color(kind_style(kinds[i], figure).ink)
    if naming == "key":
        mixers_of = stack.groupby("kind", sort=False)["mixer"].unique().items()
        patches = [Patch(color=kind_style(kind, figure).color, label=", ".join(ms)) for kind, ms in mixers_of]
        key(root, patches, "lower center")
