"""What every figure here shares: sizes, colours per kind, dressing of axes, saving.

Hue says the kind of a mixer and grey says magnitude, so the two never compete. The colours follow Okabe-Ito
and Tol (safe for colour-blind readers) and are spaced in lightness, so that a grey print keeps them apart.
No pyplot anywhere: a figure belongs to its caller and is freed with it.
"""

from __future__ import annotations

import dataclasses
import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, to_rgb
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator

SINGLE, DOUBLE = 3.4, 7.0
"""Widths of one and of two columns, inches."""
SMALL, TEXT = 7.0, 8.0
"""Font sizes in points: ticks and labels in the plot; axis labels."""
INK, GREY, PALE = "#222222", "#6E6E6E", "#E4E4E4"
MAGNITUDE = LinearSegmentedColormap.from_list("magnitude", ["white", "#9A9A9A", "#222222"])
"""Colour map of heat maps: dark is strong."""
SPAN = 0.01
"""Least change that a scale spans: without one, a table of no changes is drawn over the rounding."""
Color: TypeAlias = str | tuple[float, float, float] | tuple[float, float, float, float]


@dataclasses.dataclass(frozen=True)
class KindStyle:
    """How one kind of mixer looks: `color` of marks, `ink` of text in that hue, `marker` of points."""

    color: str
    ink: str
    marker: str


KINDS = {
    "full": KindStyle("#B34500", "#B34500", "o"),
    "window": KindStyle("#5CB3E8", "#1F6FA8", "s"),
    "recurrent": KindStyle("#332288", "#332288", "^"),
    "conv": KindStyle("#E6D98F", "#7D6C14", "D"),
}


def kind_style(kind: object, figure: str) -> KindStyle:
    """The style of a kind; ValueError naming the figure for a kind that the glossary does not have."""
    if kind not in KINDS:
        raise ValueError(f"figures.{figure}: column 'kind' holds {kind!r}; expected one of {', '.join(KINDS)}")
    return KINDS[str(kind)]


def lightness(color: Color) -> float:
    """CIE L* of a colour, 0 (black) to 100 (white): what is left of it in grey."""
    rgb = np.asarray(to_rgb(color))
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    y = float(linear @ np.array([0.2126, 0.7152, 0.0722]))
    return 116 * y ** (1 / 3) - 16 if y > 0.008856 else 903.3 * y


def text_on(color: Color) -> str:
    """White or ink, whichever reads better on that colour."""
    return "white" if lightness(color) < 60 else INK


class _Figure(Figure):
    """A Figure that a notebook shows by itself; plain Figures need pyplot's hooks for that."""

    def _repr_png_(self) -> tuple[bytes, dict[str, int]]:
        buffer = io.BytesIO()
        self.savefig(buffer, format="png", dpi=200)
        return buffer.getvalue(), {"width": round(150 * self.get_figwidth())}


def new_figure(width: float | int, height: float) -> Figure:
    """An empty figure of that size in inches with constrained layout, outside pyplot."""
    layout = ConstrainedLayoutEngine(h_pad=0.03, w_pad=0.03, hspace=0.02, wspace=0.02)
    return _Figure(figsize=(width, height), layout=layout, facecolor="white")


def dress(axes: Axes, xlabel: str = "", ylabel: str = "") -> Axes:
    """Give axes the common look: two spines, small outward ticks, labels with units."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set(linewidth=0.6, color=INK)
    axes.tick_params(labelsize=SMALL, width=0.6, length=2.5, pad=2, color=INK, labelcolor=INK)
    axes.tick_params(which="minor", width=0.4, length=1.5)
    axes.set_facecolor("white")
    axes.set_xlabel(xlabel, fontsize=TEXT, color=INK)
    axes.set_ylabel(ylabel, fontsize=TEXT, color=INK)
    return axes


def frame(axes: Axes) -> Axes:
    """The look of a heat map: a pale frame, no tick marks."""
    axes.spines[:].set(visible=True, linewidth=0.6, color="#B0B0B0")
    axes.tick_params(axis="both", length=0)
    return axes


def bar(figure: Figure, image: AxesImage, axes: Axes, label: str) -> None:
    """The colour bar of a heat map."""
    scale = figure.colorbar(image, ax=axes, pad=0.02, fraction=0.05, aspect=12)
    scale.ax.tick_params(labelsize=SMALL, width=0.6, length=2, pad=2, color=INK, labelcolor=INK)
    scale.ax.yaxis.set_major_locator(MaxNLocator(4))
    scale.set_label(label, fontsize=SMALL, color=INK)
    scale.ax.spines[:].set(linewidth=0.6, color="#B0B0B0")


def key(figure: Figure, handles: Sequence[Artist], where: str, columns: int | None = None) -> None:
    """A one-line key outside the panels, for what direct labels cannot say."""
    look: dict[str, Any] = {"fontsize": SMALL, "labelcolor": INK, "frameon": False, "borderpad": 0.1}
    look |= {"handlelength": 1.4, "handletextpad": 0.5, "columnspacing": 1.2, "labelspacing": 0.3}
    look |= {"ncols": columns or len(handles), "loc": f"outside {where}"}
    figure.legend(handles=handles, **look)


def log_ticks(axes: Axes, values: Any, most: int = 7) -> None:
    """A base-2 x axis whose ticks are the (positive) values themselves, thinned evenly to `most`."""
    values = np.unique(np.asarray(values))
    ticks = values[:: -(-len(values) // most)]
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [f"{int(v)}" for v in ticks])
    axes.set_xticks([], minor=True)


def save(figure: Figure, path: str | os.PathLike[str]) -> Path:
    """Write a figure (.png at 200 dpi, or .pdf, .svg) whole or not at all; ValueError for other endings."""
    path = Path(path)
    if path.suffix not in (".png", ".pdf", ".svg"):
        raise ValueError(f"figures.save: path ends in {path.suffix!r}; expected .png, .pdf or .svg")
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        figure.savefig(partial, format=path.suffix[1:], dpi=200)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return path
