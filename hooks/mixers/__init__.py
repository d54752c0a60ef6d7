"""One file per mixer; `build` makes what a layer's pattern entry names."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from torch import Tensor, nn

from ..config import HybridConfig, Slot, parse_mixer
from ..passes import Pass
from .attention import Attention
from .deltanet import DeltaNet
from .gdn import GatedDeltaNet
from .gla import GatedLinearAttention
from .hawk import Hawk
from .hgrn import HGRN
from .hgrn2 import HGRN2
from .kda import KimiDeltaAttention
from .lightning import LightningAttention
from .mamba2 import Mamba2
from .recurrent import Recurrent
from .retnet import RetNet
from .rwkv6 import RWKV6
from .rwkv7 import RWKV7

Mixer = Attention | Recurrent

MIXERS: dict[str, Callable[[HybridConfig, Slot], Mixer]] = {
    "full": Attention, "nope": Attention, "swa": Attention, "gdn": GatedDeltaNet, "deltanet": DeltaNet,
    "kda": KimiDeltaAttention, "gla": GatedLinearAttention, "hgrn": HGRN, "hgrn2": HGRN2, "hawk": Hawk,
    "retnet": RetNet, "lightning": LightningAttention, "mamba2": Mamba2, "rwkv6": RWKV6, "rwkv7": RWKV7,
}  # fmt: skip


class Parallel(nn.Module):
    """Several mixers side by side on the same input, outputs summed: x [B,T,D] -> [B,T,D].

    With the heads split among them ("swa:128|gdn") the sum is the concatenation of their heads under one output
    projection; with all heads each ("full+mamba2") it is Falcon-H1's layer.
    """

    def __init__(self, config: HybridConfig, slots: tuple[Slot, ...]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(_one(config, slot) for slot in slots)

    @property
    def mixers(self) -> list[Mixer]:
        return cast(list[Mixer], list(self.parts))

    def forward(self, x: Tensor, run: Pass) -> Tensor:
        out = self.mixers[0](x, run)
        for mixer in self.mixers[1:]:
            out = out + mixer(x, run)
        return out


def build(config: HybridConfig, layer: int) -> Mixer | Parallel:
    """The mixer module of layer `layer`, or its parallel ones."""
    slots = config.slots(layer)
    return _one(config, slots[0]) if len(slots) == 1 else Parallel(config, slots)


def _one(config: HybridConfig, slot: Slot) -> Mixer:
    return MIXERS[parse_mixer(slot.mixer)[0]](config, slot)
