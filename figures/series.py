"""Lines that are not kinds: settings, models, targets, or the steps of a ladder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib import colormaps

from .style import INK
from .tables import Rows

SERIES = [
    ("#000000", "-", "o"),
    ("#D07F00", "--", "s"),
    ("#0072B2", "-.", "^"),
    ("#009E73", (0, (1, 1)), "D"),
    ("#AA4499", (0, (5, 1, 1, 1, 1, 1)), "v"),
    ("#666666", (0, (6, 3)), "P"),
]
"""Colour, line style and marker of series that are not kinds."""
FEW = 6
"""Of more series than this, only evenly spaced ones are labelled."""


def series_column(table: Rows, names: Sequence[str]) -> str:
    """The first of these columns that tells rows apart; else the last one that is there, or ""."""
    present = [name for name in names if name in table.columns]
    return next((name for name in present if table[name].nunique() > 1), present[-1] if present else "")


def labelled(names: Sequence[Any]) -> list[bool]:
    """Which series get a label: all if few, else evenly spaced ones, first and last included."""
    keep = set(np.linspace(0, len(names) - 1, min(len(names), FEW)).round().astype(int).tolist())
    return [i in keep for i in range(len(names))]


def series_styles(names: Sequence[Any], ordered: bool) -> list[dict[str, Any]]:
    """Line properties per series: a light-to-dark ramp for ordered names (steps), else distinct styles."""
    if ordered:
        shades = colormaps["cividis_r"](np.linspace(0.2, 1, len(names))) if len(names) > 1 else [INK]
        return [{"color": shade, "linestyle": "-", "marker": ""} for shade in shades]
    cycle = [SERIES[i % len(SERIES)] for i in range(len(names))]
    return [{"color": color, "linestyle": line, "marker": marker} for color, line, marker in cycle]
