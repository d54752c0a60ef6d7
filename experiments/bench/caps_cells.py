"""What bench caps measures, a cell at a time: a kernel without a cap, with it, and what others would do instead."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...hooks.kernels import fused as kernels
from ...hooks.kernels.attention import attention, attention_reference
from ...hooks.kernels.dispatch import recur, use_kernels
from ...hooks.kernels.windowed import capped
from .attention_paths import flex_window
from .kernel_parity import TOLERANCE, error, inputs
from .stats_cells import attempt, timed

Row = dict[str, Any]
Inputs = dict[str, Any]  # of tensors, by argument
HEADS: dict[str, tuple[int, int, int]] = {  # H, K, V
    "hgrn": (2048, 1, 1), "hawk": (2048, 1, 1), "rwkv6": (32, 64, 64), "rwkv7": (32, 64, 64),
}  # fmt: skip
USUAL = (16, 128, 128)
SMALL, SMALL_WINDOW = 700, 130
"""Tokens and window of the comparison with the torch path."""
FIRST = ("gdn", "full", "kda", "lightning", "gla")
PLAN = [
    *[f"{mixer}/65536/{w}" for w in (2048, 512) for mixer in FIRST],
    *[f"{mixer}/16384/{w}" for w in (2048, 512) for mixer in FIRST],
    *[f"{mixer}/65536/2048" for mixer in ("deltanet", "rwkv7", "rwkv6", "mamba2", "hgrn")],
]
"""What is asked for, in this order."""


@dataclasses.dataclass(frozen=True)
class Cell:
    """MIXER/T/WINDOW; the mixer "full" is softmax attention."""

    id: str

    @property
    def mixer(self) -> str:
        return self.id.split("/")[0]

    @property
    def length(self) -> int:
        return int(self.id.split("/")[1])

    @property
    def window(self) -> int:
        return int(self.id.split("/")[2])

    @property
    def heads(self) -> tuple[int, int, int]:
        return HEADS.get(self.mixer, USUAL)

    @property
    def read(self) -> Any:
        return "before" if self.mixer == "rwkv6" else "after"


@torch.no_grad()
def measure(cell: Cell, device: torch.device, seconds: float = 0.4) -> Iterator[Row]:
    """A check, and a record of each path's time, as they come; what fails is a record too."""
    H, K, V = cell.heads
    row: Row = {"mixer": cell.mixer, "T": cell.length, "window": cell.window, "H": H, "K": K, "V": V}
    yield attempt({"kind": "check", **row}, lambda: check(cell, device))
    x = drawn(cell.mixer, cell.length, device)
    for name, f in paths(cell, x).items():
        yield attempt({"kind": "time", **row, "path": name}, lambda f=f: timed(f, device, seconds))


def paths(cell: Cell, x: Inputs) -> dict[str, Callable[[], Any]]:
    """Name and call of everything that is timed."""
    w, free, cap = cell.window, *(functools.partial(f, cell, x) for f in (uncapped, exact))
    if cell.mixer != "full":
        return {"uncapped": free, "exact cap": cap, "overlapped segments": lambda: segments(cell, x)}
    out = {"uncapped": free, "exact cap": cap, "exact cap, 4 sinks": lambda: attention(**x, window=w, sinks=4)}
    if x["q"].is_cuda:
        out["FlexAttention window"] = functools.partial(_flex, w, x)
    return out


def _flex(window: int, x: Inputs) -> Tensor:
    return _flex_of(window, x["q"].shape[1])(**x)


@functools.lru_cache(maxsize=1)
def _flex_of(window: int, length: int) -> Callable[..., Tensor]:
    return flex_window(window, length)


def uncapped(cell: Cell, x: Inputs) -> Tensor:
    return attention(**x) if cell.mixer == "full" else recur(**x, read=cell.read)[0]


def exact(cell: Cell, x: Inputs) -> Tensor:
    w = cell.window
    return attention(**x, window=w) if cell.mixer == "full" else capped(**x, cap=w, read=cell.read)


def segments(cell: Cell, x: Inputs) -> Tensor:
    """Segments of `window` tokens, each a quarter of it after the one before, of which the last quarter is kept: a row
    sees between 3/4 of the window and all of it. Not exact."""
    w, step = cell.window, max(1, cell.window // 4)
    T = x["q"].shape[1]

    def cut(y: Tensor) -> Tensor:
        y = F.pad(y, (0, 0) * (y.ndim - 2) + (w - step, -T % step))
        return y.unfold(1, w, step).movedim(-1, 2).flatten(0, 1)

    out, _ = recur(**{name: cut(y) for name, y in x.items()}, read=cell.read)
    return out[:, w - step :].flatten(0, 1)[None, :T]


@functools.lru_cache(maxsize=1)
def drawn(mixer: str, T: int, device: torch.device) -> Inputs:
    """bf16 inputs [1,T,H,...] of a mixer, without an initial state."""
    H, K, V = HEADS.get(mixer, USUAL)
    if mixer == "full":
        draw = torch.Generator().manual_seed(0)
        return {name: torch.randn(1, T, H, K, generator=draw).to(device, torch.bfloat16) for name in "qkv"}
    x = inputs(kernels.MIXERS[mixer], T, B=1, H=H, K=K, V=V, dtype=torch.bfloat16, device=device.type)
    del x["state"]
    return x


def check(cell: Cell, device: torch.device) -> Row:
    """Largest error on a short sequence, beside the uncapped kernel's own, and rows that change although every token
    that did is outside their window."""
    small = dataclasses.replace(cell, id=f"{cell.mixer}/{SMALL}/{min(SMALL_WINDOW, cell.window)}")
    x = drawn(small.mixer, small.length, device)
    errors = {
        name: error(f(small, x), _slow(small, x, cap))
        for name, f, cap in (("error", exact, small.window), ("uncapped_error", uncapped, None))
    }
    x, last = drawn(cell.mixer, cell.length, device), cell.length // 3
    other = {name: torch.cat([y[:, : last + 1].roll(1, 1), y[:, last + 1 :]], 1) for name, y in x.items()}
    changed = (exact(cell, x) != exact(cell, other)).flatten(2).any(-1)[0]
    free = last + cell.window
    leaks, reached = int(changed[free:].sum()), bool(changed[last + 1 : free].any())
    good = errors["error"] <= TOLERANCE["bf16"][0] and not leaks and reached
    return {**errors, "leaks": leaks, "reached": reached, "ok": good}


def _slow(cell: Cell, x: Inputs, cap: int | None) -> Tensor:
    """What a path should give, computed by torch in fp32, softmax attention in fp64."""
    if cell.mixer == "full":
        return attention_reference(**{name: y.double() for name, y in x.items()}, window=cap)
    x = {name: y.float() for name, y in x.items()}
    with use_kernels("torch"):
        return recur(**x, read=cell.read)[0] if cap is None else capped(**x, cap=cap, read=cell.read)
