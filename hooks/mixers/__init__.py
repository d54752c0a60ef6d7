"""One file per mixer; `build` picks the one a layer's pattern entry names."""

from __future__ import annotations

from ..config import HybridConfig, parse_mixer
from .attention import Attention
from .gdn import GatedDeltaNet

Mixer = Attention | GatedDeltaNet


def build(config: HybridConfig, layer: int) -> Mixer:
    """The mixer module of layer `layer`."""
    name, _ = parse_mixer(config.layers[layer])
    return GatedDeltaNet(config, layer) if name == "gdn" else Attention(config, layer)
