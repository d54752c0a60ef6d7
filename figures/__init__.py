"""Figures: one function per figure, tidy table in, matplotlib Figure out.

They import nothing else of hybridscope and leave pyplot alone; `save` writes a figure whole or not at all.
"""

from .caps import cap_curves
from .caps_distance import cap_distance
from .caps_map import cap_heatmap
from .cost import cost
from .distance import influence
from .heads import heads_map
from .importance import layer_importance
from .ladder import formation
from .lens import logit_lens
from .patching import patching
from .position import perplexity
from .probe import probe_curve
from .style import DOUBLE, KINDS, SINGLE, save

__all__ = [
    "DOUBLE",
    "KINDS",
    "SINGLE",
    "cap_curves",
    "cap_distance",
    "cap_heatmap",
    "cost",
    "formation",
    "heads_map",
    "influence",
    "layer_importance",
    "logit_lens",
    "patching",
    "perplexity",
    "probe_curve",
    "save",
]
