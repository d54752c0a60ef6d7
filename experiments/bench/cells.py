"""What bench train measures: sizes, layer patterns, and the order in which they matter."""

from __future__ import annotations

import dataclasses
from typing import Any

from ...hooks.config import HybridConfig, has_full, ratio
from .peers import AS_SHIPPED, PEERS

VOCABULARY = 32_000


def _widths(n_layers: int, d_model: int, d_ff: int, n_kv_heads: int | None, heads: int, dim: int, **more: Any) -> Any:
    """A size: attention in heads of 64, delta rules in `heads` of `dim` for keys and values alike."""
    delta = {"heads": heads, "key_dim": dim, "value_dim": dim}
    mixers = {"gdn": delta, "deltanet": delta, "kda": delta, **more}
    return {
        "n_layers": n_layers, "d_model": d_model, "n_heads": d_model // 64, "d_ff": d_ff, "n_kv_heads": n_kv_heads,
        "vocab_size": VOCABULARY, "mixers": mixers,
    }  # fmt: skip


SIZES: dict[str, dict[str, Any]] = {
    # S1 and S4 of configs/qiao2026.toml (non-embedding parameters in the name), the 340M of configs/wang2025.toml (all
    # parameters; delta rules in heads of 128, as Qwen3-Next and Kimi Linear have them, where the paper has 4 of 256).
    "15m": _widths(10, 384, 960, 2, 3, 64, mamba2={"heads": 4, "value_dim": 64}, lightning={"heads": 3}),
    "100m": _widths(18, 768, 1920, 2, 6, 64, mamba2={"heads": 8, "value_dim": 64}, lightning={"heads": 6}),
    "340m": _widths(24, 1024, 2816, None, 8, 128, mamba2={"heads": 32, "value_dim": 64}, lightning={"heads": 16}),
    # For a look at the bench itself.
    "tiny": {"n_layers": 2, "d_model": 64, "n_heads": 2, "d_ff": 96, "vocab_size": 128, "mixers": {}},
}
PATTERNS = ("full", "gdn@pure", "fla-gdn", "gdn", "swa:512", "mamba2", "lightning")
EXTRA = ("kda@pure", "fla-kda", "llama", "full/cudnn", "full/plain-loss")
FIRST = ("100m/4096", "340m/16384", "15m/4096", "340m/2048")
LATER = ("100m/16384", "100m/2048", "15m/2048", "15m/16384")
PLAN = [  # what is asked for without options, in this order; blocks: compiling the whole model is minutes a cell
    "340m/4096/full",
    *[f"{size}/{p}" + "/blocks" * (p not in AS_SHIPPED) for size, patterns in (
        ("340m/4096", PATTERNS + EXTRA), *((size, PATTERNS) for size in FIRST + LATER),
    ) for p in patterns],
    "340m/4096/gdn@pure", "340m/4096/fla-gdn-compiled",
]  # fmt: skip
TAGS = {
    "blocks": ("compile", "blocks"), "uncompiled": ("compile", "none"), "plain-loss": ("loss", "plain"),
    "cudnn": ("attention", "cudnn"), "flash": ("attention", "flash"),
}  # fmt: skip
"""How a cell may differ from the usual one, at the end of its name."""


@dataclasses.dataclass(frozen=True)
class Cell:
    """One measurement, named 340m/4096/gdn: size, tokens of a sequence, pattern, and tags."""

    size: str
    length: int
    pattern: str
    tags: tuple[str, ...] = ()
    tokens: int = 32_768
    """Tokens of an optimiser step, in one batch."""

    @classmethod
    def of(cls, name: str, tokens: int = 32_768) -> Cell:
        """Read a name; ValueError says what is wrong with it."""
        size, length, pattern, *tags = [*name.split("/"), "", ""][: max(3, name.count("/") + 1)]
        if size not in SIZES:
            raise ValueError(f"cell {name!r}: size {size!r}; known: {', '.join(SIZES)}")
        if not length.isdecimal() or int(length) < 2:
            raise ValueError(f"cell {name!r}: length {length!r}; expected a whole number of tokens >= 2")
        unknown = [tag for tag in tags if tag not in TAGS]
        if unknown:
            raise ValueError(f"cell {name!r}: tag {unknown[0]!r}; known: {', '.join(TAGS)}")
        cell = cls(size, int(length), pattern, tuple(tags), tokens)
        config_of(cell)
        return cell

    @property
    def id(self) -> str:
        return "/".join([self.size, str(self.length), self.pattern, *self.tags])

    @property
    def batch(self) -> int:
        return max(1, self.tokens // self.length)

    @property
    def options(self) -> dict[str, str]:
        """compile: model (as the training loop does it), blocks (each by itself) or none; loss: compiled (with
        its model) or plain; attention: auto (torch's choice), cudnn or flash."""
        return {"compile": "model", "loss": "compiled", "attention": "auto", **dict(TAGS[tag] for tag in self.tags)}


def config_of(cell: Cell) -> HybridConfig:
    """The hybrid of a cell; for a peer, ours of the same architecture. ValueError names an unknown mixer."""
    name, _, n = PEERS.get(cell.pattern, cell.pattern).partition("@")
    pattern = (name,) if has_full(name) and not n else ratio(name, n or "1:1")
    return HybridConfig(pattern, **SIZES[cell.size])


def plan(
    sizes: list[str] | None = None, lengths: list[int] | None = None, patterns: list[str] | None = None,
    tokens: int = 32_768,
) -> list[Cell]:  # fmt: skip
    """The cells asked for: PLAN, or all combinations of the options, where one is missing 340m, 4096, or PATTERNS.

    Raises ValueError for an unknown size, mixer or tag.
    """
    if not (sizes or lengths or patterns):
        return [Cell.of(name, tokens) for name in PLAN]
    return [
        Cell.of(f"{size}/{length}/{pattern}", tokens)
        for size in sizes or ["340m"] for length in lengths or [4096] for pattern in patterns or PATTERNS
    ]  # fmt: skip
