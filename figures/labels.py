"""Direct labels: names written where the lines end or where the cells are, moved apart until none overlap."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.transforms import Bbox, offset_copy

from .style import INK, SMALL


class Label(NamedTuple):
    """A name for the line that ends at (x, y) in data units; `ink` colours the text, `color` the hairline."""

    x: float
    y: float
    text: str
    color: Any
    ink: Any = INK


def spread(wanted: Sequence[float] | np.ndarray, gap: float, low: float, high: float) -> np.ndarray:
    """Positions `gap` or more apart within [low, high], ordered as `wanted` and least-squares close to it.

    With gaps taken out this is isotonic regression, solved by pooling neighbours that are in the wrong order.
    """
    order = np.argsort(wanted, kind="stable")
    offset = gap * np.arange(len(order))
    pools: list[tuple[float, int]] = []  # mean, size
    for value in np.asarray(wanted, dtype=float)[order] - offset:
        mean, size = float(value), 1
        while pools and pools[-1][0] > mean:
            before, count = pools.pop()
            mean, size = (before * count + mean * size) / (count + size), count + size
        pools.append((mean, size))
    flat = np.concatenate([np.full(size, mean) for mean, size in pools])
    placed = np.empty(len(order))
    placed[order] = np.clip(flat, low, max(low, high - offset[-1])) + offset
    return placed


def settle(figure: Figure, panels: Sequence[Axes] = (), heights: Sequence[float] = ()) -> None:
    """Run the layout, so that sizes on the page are known; these axes get the heights (inches) in total."""
    figure.draw_without_rendering()
    if panels:
        missing = sum(heights) - sum(axes.get_window_extent().height for axes in panels) / figure.dpi
        figure.set_figheight(figure.get_figheight() + missing)
        figure.draw_without_rendering()


def end_labels(axes: Axes, labels: Sequence[Label]) -> None:
    """Write each label right of the axes at its line's height; a hairline leads to those that had to move.

    Call after `settle`: heights in points must be final.
    """
    labels = [label for label in labels if np.isfinite(label.y)]
    if not labels:
        return
    root: Any = axes.figure
    box, points = axes.get_window_extent(), 72.0 / root.dpi
    ends = axes.transData.transform([(label.x, label.y) for label in labels]) * points
    low, high = box.y0 * points, box.y1 * points
    level = np.clip(ends[:, 1], low, high)
    centres = spread(level, 1.25 * SMALL, low - SMALL, high + SMALL)
    short = box.x1 * points - ends[:, 0]  # how far before the right edge each line stops
    led = bool((np.abs(centres - level) > 1.5).any() or (short > 8).any())
    at = offset_copy(axes.transAxes, root, x=10 if led else 4, units="points")
    for label, centre in zip(labels, centres, strict=True):
        lead = {
            "arrowstyle": "-",
            "lw": 0.5,
            "color": label.color,
            "shrinkA": 1,
            "shrinkB": 1,
            "relpos": (0, 0.5),
        }
        axes.annotate(
            label.text,
            xy=(label.x, label.y),
            xytext=(1.0, (centre - low) / (high - low)),
            textcoords=at,
            fontsize=SMALL,
            color=label.ink,
            va="center",
            ha="left",
            annotation_clip=False,
            arrowprops=lead if led else None,
        )


def cell_labels(axes: Axes, cells: Sequence[tuple[float, float, str, str]]) -> None:
    """Name cells (x, y, text, colour on the cell) of a unit grid: inside where the name fits, else beside.

    Call after `settle`. A text with no free side is left out; the cell's own outline still marks it.
    """
    frame = axes.get_window_extent()
    boxes = [axes.transData.transform([(x - 0.5, y - 0.5), (x + 0.5, y + 0.5)]) for x, y, *_ in cells]
    taken = [Bbox.from_extents(*box.min(0), *box.max(0)) for box in boxes]
    for (x, y, text, color), cell in zip(cells, list(taken), strict=True):
        drawn = axes.text(x, y, text, fontsize=SMALL, color=color, ha="center", va="center", zorder=4)
        size = drawn.get_window_extent()
        if size.width + 4 < cell.width and size.height < cell.height:
            continue
        drawn.set(color=INK, bbox={"facecolor": "white", "alpha": 0.85, "linewidth": 0, "pad": 0.6})
        wide, high = (cell.width + size.width) / 2 + 4, (cell.height + size.height) / 2 + 3
        for right, up in [(1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (1, -1), (-1, 1), (-1, -1)]:
            centre = (cell.x0 + cell.x1) / 2 + right * wide, (cell.y0 + cell.y1) / 2 + up * high
            drawn.set_position(tuple(axes.transData.inverted().transform(centre)))
            box = drawn.get_window_extent()
            inside = frame.x0 <= box.x0 and box.x1 <= frame.x1 and frame.y0 <= box.y0 and box.y1 <= frame.y1
            if inside and not any(box.overlaps(other) for other in taken):
                taken.append(box)
                break
        else:
            drawn.remove()
