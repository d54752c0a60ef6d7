"""HybridConfig: the widths of a hybrid language model and its layer pattern, as data."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

# What each mixer is to the user (DESIGN: "kind").
KINDS = {"full": "full", "nope": "full", "swa": "window", "gdn": "recurrent"}

# Options a mixer takes through HybridConfig.mixers, with their defaults (None: derived from the config).
MIXER_OPTIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "nope": {},
    "swa": {},
    "gdn": {
        "heads": None,
        "value_heads": None,
        "key_dim": None,
        "value_dim": None,
        "conv": 4,
        "negative_eigenvalues": False,
    },
}


def parse_mixer(text: str) -> tuple[str, int | None]:
    """Split one pattern entry into mixer name and window: "swa:64" -> ("swa", 64), "gdn" -> ("gdn", None).

    Raises ValueError for an unknown mixer, a window where none belongs, or W < 1.
    """
    name, colon, argument = str(text).partition(":")
    if name not in KINDS:
        raise ValueError(f"pattern: unknown mixer {text!r}; known: {', '.join(sorted(KINDS))}")
    if name != "swa":
        if colon:
            raise ValueError(f"pattern: mixer {name!r} takes no argument, got {text!r}")
        return name, None
    if not re.fullmatch(r"-?\d+", argument):
        raise ValueError(f"pattern: {text!r} needs a window, written swa:W with a whole number W >= 1")
    window = int(argument)
    if window < 1:
        raise ValueError(f"pattern: window in {text!r} must be >= 1 (the query itself counts)")
    return name, window


def ratio(mixer: str, n: int | None, full: str = "full") -> tuple[str, ...]:
    """The pattern of an N:1 hybrid: `n` efficient layers, then one full layer; `n=None` is pure (none).

    >>> ratio("gdn", 3)
    ('gdn', 'gdn', 'gdn', 'full')
    """
    parse_mixer(mixer)
    if KINDS[parse_mixer(full)[0]] != "full":
        raise ValueError(f"ratio: full={full!r} is not a full-attention mixer (full, nope)")
    if n is None:
        return (mixer,)
    if n < 1:
        raise ValueError(f"ratio: n={n} efficient layers per full layer; expected n >= 1, or None for pure")
    return (mixer,) * n + (full,)


@dataclasses.dataclass
class HybridConfig:
    """Widths, and which mixer each layer has.

    `pattern` is a tuple tiled over `n_layers`, or a list with one entry per layer. After construction
    `layers` holds the explicit list; that is what is stored and what everything else reads.

    >>> HybridConfig(("swa:64", "full"), n_layers=4, d_model=64, n_heads=4, vocab_size=128).layers
    ('swa:64', 'full', 'swa:64', 'full')
    """

    pattern: Sequence[str]
    """Mixers: `full` (softmax attention with RoPE), `nope` (without), `swa:W` (W keys, with self), `gdn`."""
    n_layers: int
    d_model: int
    """Residual width D."""
    n_heads: int
    """Query heads H of the attention mixers; heads of the recurrent ones unless `mixers` says otherwise."""
    vocab_size: int
    _: dataclasses.KW_ONLY
    n_kv_heads: int | None = None
    """Key/value heads G; each serves H/G query heads. None: G = H."""
    head_dim: int | None = None
    """Key dim K per head. None: D / H."""
    d_ff: int | None = None
    """Inner width of the SwiGLU MLP. None: 8/3 D rounded up to a multiple of 32."""
    rope_base: float = 500_000.0
    qk_norm: bool = False
    """RMS norm on every query and key head before RoPE."""
    tie_embeddings: bool = False
    norm_eps: float = 1e-6
    init_std: float = 0.02
    """Spread of fresh matrices; embeddings get 0.02 whatever it is."""
    context: int | None = None
    """Longest input the model takes, in tokens. None: no limit."""
    mixers: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    """Options per mixer, e.g. {"gdn": {"value_dim": 64}}; see MIXER_OPTIONS."""

    def __post_init__(self) -> None:
        for field in ("n_layers", "d_model", "n_heads", "vocab_size"):
            _at_least_one(field, getattr(self, field))
        for field in ("n_kv_heads", "head_dim", "d_ff", "context"):
            if getattr(self, field) is not None:
                _at_least_one(field, getattr(self, field))
        self.layers = _resolve_layers(self.pattern, self.n_layers)
        self.n_kv_heads = self.n_heads if self.n_kv_heads is None else self.n_kv_heads
        if self.n_heads % self.n_kv_heads:
            raise ValueError(f"n_kv_heads={self.n_kv_heads} must divide n_heads={self.n_heads}")
        if self.head_dim is None:
            if self.d_model % self.n_heads:
                raise ValueError(f"d_model={self.d_model} is not a multiple of n_heads={self.n_heads}; give head_dim")
            self.head_dim = self.d_model // self.n_heads
        if self.head_dim % 2 and any(parse_mixer(m)[0] in ("full", "swa") for m in self.layers):
            raise ValueError(f"head_dim={self.head_dim} must be even: RoPE rotates pairs of dimensions")
        self.d_ff = -(-8 * self.d_model // 96) * 32 if self.d_ff is None else self.d_ff
        self._check_mixer_options()

    def _check_mixer_options(self) -> None:
        for mixer, options in self.mixers.items():
            if mixer not in MIXER_OPTIONS:
                raise ValueError(f"mixers: unknown mixer {mixer!r}; known: {', '.join(sorted(MIXER_OPTIONS))}")
            unknown = sorted(set(options) - set(MIXER_OPTIONS[mixer]))
            if unknown:
                known = ", ".join(MIXER_OPTIONS[mixer]) or "none"
                raise ValueError(f"mixers: {mixer!r} has no option {unknown[0]!r}; it takes: {known}")
            for name, value in options.items():
                default = MIXER_OPTIONS[mixer][name]
                if isinstance(default, bool):
                    if not isinstance(value, bool):
                        raise ValueError(f"mixers: {mixer} {name}={value!r}: expected True or False")
                elif default is not None or value is not None:
                    _at_least_one(f"mixers: {mixer} {name}", value)

    def options(self, mixer: str) -> dict[str, Any]:
        """The options of one mixer, defaults filled in."""
        return {**MIXER_OPTIONS[mixer], **self.mixers.get(mixer, {})}

    def to_dict(self) -> dict[str, Any]:
        """Plain data that `from_dict` reads back; the pattern is written out layer by layer."""
        out = dataclasses.asdict(self)
        out["pattern"] = list(self.layers)
        out["mixers"] = {name: dict(options) for name, options in self.mixers.items()}
        return out

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> HybridConfig:
        """Read `to_dict`'s data; ValueError names an unknown or missing key."""
        fields = {f.name: f for f in dataclasses.fields(cls) if f.name != "_"}
        unknown = sorted(set(data) - set(fields))
        if unknown:
            raise ValueError(f"config: unknown key {unknown[0]!r}; known: {', '.join(fields)}")
        missing = [n for n in ("pattern", "n_layers", "d_model", "n_heads", "vocab_size") if n not in data]
        if missing:
            raise ValueError(f"config: missing key {missing[0]!r}")
        return cls(**data)


def _at_least_one(field: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{field}={value!r}: expected a whole number >= 1")


def _resolve_layers(pattern: Sequence[str], n_layers: int) -> tuple[str, ...]:
    if isinstance(pattern, str) or not pattern:
        raise ValueError(f"pattern={pattern!r}: expected a non-empty tuple or list of mixers")
    for mixer in pattern:
        parse_mixer(mixer)
    if isinstance(pattern, list):
        if len(pattern) != n_layers:
            raise ValueError(
                f"pattern lists {len(pattern)} layers but n_layers={n_layers}; "
                "a list gives every layer, a tuple is tiled"
            )
        return tuple(pattern)
    layers = tuple(pattern[i % len(pattern)] for i in range(n_layers))
    lost = [m for m in pattern if m not in layers]
    if lost:
        raise ValueError(
            f"pattern: {n_layers} layers never reach {lost[0]!r} of a {len(pattern)}-layer pattern; "
            'shorten it, add layers, or ask for a pure model, e.g. ("gdn",)'
        )
    return layers
