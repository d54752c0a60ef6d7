"""Tokens seen in training, as an upper axis above the steps."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from .style import INK, SMALL
from .tables import Rows, numbers


def token_axis(axes: Axes, track: Rows, log: bool) -> None:
    """Write round numbers of tokens (column `tokens`) at the steps where they were reached."""
    pairs = track[["step", "tokens"]].dropna().drop_duplicates().sort_values("step")
    steps, tokens = numbers(pairs, "step"), numbers(pairs, "tokens")
    if log:
        steps, tokens = np.log(steps[steps > 0]), tokens[steps > 0]
        ticks = 10.0 ** np.arange(0, np.floor(np.log10(tokens.max())) + 1)
        ticks = ticks[(ticks >= tokens.min()) & (ticks <= tokens.max())]
        places = np.exp(np.interp(np.log(ticks), np.log(tokens), steps))
    else:
        ticks = np.asarray(MaxNLocator(4).tick_values(0.0, float(tokens.max())))
        ticks = ticks[(ticks >= tokens.min()) & (ticks <= tokens.max())]
        places = np.interp(ticks, tokens, steps)
    upper = axes.twiny()  # a secondary axis would not follow a symlog scale
    if log:
        upper.set_xscale("symlog", linthresh=float(np.exp(steps[0])))
    upper.set_xlim(axes.get_xlim())
    upper.spines[["left", "right", "bottom"]].set_visible(False)
    upper.set_xticks(places, [_short(tick) for tick in ticks])
    upper.tick_params(labelsize=SMALL, width=0.6, length=2.5, pad=1, color=INK, labelcolor=INK)
    upper.spines["top"].set(linewidth=0.6, color=INK)
    upper.set_xlabel("tokens", fontsize=SMALL, labelpad=2, color=INK)


def _short(count: float) -> str:
    units = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))
    return next((f"{count / size:g}{unit}" for size, unit in units if count >= size), f"{count:g}")
