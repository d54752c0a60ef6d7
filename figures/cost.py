"""Cost by context length: cache, prefill and decode of a hybrid beside the all-full model of the same widths."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import FormatStrFormatter, LogLocator, NullFormatter

from .labels import Label, end_labels, settle
from .series import series_styles
from .style import SINGLE, dress, log_ticks, new_figure
from .tables import check, has_values, numbers, pick, single

NAME = "cost"
PANELS = {
    "cache_bytes": ("cache (MiB)", 2**-20),
    "prefill_tokens_per_s": ("prefill\n(thousand tokens/s)", 1e-3),
    "decode_ms": ("decode\n(ms/token)", 1.0),
}


def cost(table: pd.DataFrame, *, width: float | int = SINGLE) -> Figure:
    """Cache size and, where they were measured, prefill and decode speed over context length, a line per model.

    Reads model, length, batch, cache_bytes; prefill_tokens_per_s and decode_ms where present. All axes are logarithmic.
    Raises ValueError naming a missing column, and for several rows of one model and length.
    """
    rows = single(check(table, NAME, "model", "length", "batch", "cache_bytes"), NAME, "model", "length")
    columns = [column for column in PANELS if has_values(rows, column)]
    names = list(dict.fromkeys(rows["model"]))
    heights = [1.3] * len(columns)
    figure = new_figure(width, sum(heights) + 0.5)
    panels = list(figure.subplots(len(columns), 1, sharex=True, squeeze=False)[:, 0])
    labels: list[list[Label]] = []
    for axes, column in zip(panels, columns, strict=True):
        text, scale = PANELS[column]
        dress(axes, ylabel=text)
        labels.append([])
        for name, look in zip(names, series_styles(names, ordered=False), strict=True):
            line = pick(rows, model=name).sort_values("length")
            x, y = numbers(line, "length"), scale * numbers(line, column)
            axes.plot(x, y, linewidth=1.3, markersize=3, label=str(name), **look)
            labels[-1].append(Label(float(x[-1]), float(y[-1]), str(name), look["color"], look["color"]))
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0), numticks=6))
        axes.yaxis.set_major_formatter(FormatStrFormatter("%g"))
        axes.yaxis.set_minor_formatter(NullFormatter())
    log_ticks(panels[-1], rows["length"])
    panels[-1].set_xlabel("context (tokens)", fontsize=panels[-1].yaxis.label.get_fontsize())
    settle(figure, panels, heights)
    for axes, its in zip(panels, labels, strict=True):
        end_labels(axes, its)
    return figure
