"""What tests of switches and recordings share: models of every kind of site, and where the real tokens stand."""

from __future__ import annotations

from helpers import RECURRENT, model_of

from hybridscope import HybridLM

MIXERS = ["full", "nope", "swa:64", *RECURRENT]
HYBRID = ("swa:4", "gdn", "nope", "full")
SOFTMAX = (0, 2, 3)  # layers of HYBRID
LEFT, RIGHT, INSIDE = list(range(5, 15)), list(range(10)), [0, 1, 3, 6, 7, 8, 10, 11, 13]


def one(mixer: str) -> HybridLM:
    """One layer; a channel mix reads no earlier token, so that what is seen is the site's own reach."""
    model = model_of(mixer, n_kv_heads=2)
    for name, parameter in model.named_parameters():
        if ".mlp." in name and "shift" in name:
            parameter.zero_()
    return model
