"""A tiny model of each mixer and one of all of them, and where the real tokens stand among padding."""

from __future__ import annotations

from helpers import RECURRENT, model_of

from hybridscope import HybridLM

MIXERS = ["full", "nope", "swa:5", "swa:1", *RECURRENT, "swa:3|gdn", "full+rwkv6"]
HYBRID = ("swa:3", "gdn", "nope", "full")
T = 13
COLUMNS = {  # where the real tokens stand, of 13 columns
    "left": list(range(4, 13)),
    "right": list(range(9)),
    "interior": [0, 1, 3, 4, 7, 8, 9, 11, 12],
    "everywhere": [1, 2, 5, 6, 7, 9, 10],
    "one": [6],
}


def build(mixer: str) -> HybridLM:
    """One layer of each mixer, or all of them in one model; grouped KV heads."""
    pattern = HYBRID if mixer == "hybrid" else (mixer,)
    return model_of(*pattern, n_kv_heads=2, qk_norm=mixer == "full")
