"""HybridConfig: the widths of a hybrid language model and its layer pattern, as data."""

from __future__ import annotations

import dataclasses
import math
import numbers
import operator
import re
from collections.abc import Mapping, Sequence
from typing import Any

# What each mixer is to the user (DESIGN: "kind").
KINDS = {
    "full": "full", "nope": "full", "swa": "window",
    **dict.fromkeys(
        ("gdn", "deltanet", "kda", "gla", "hgrn", "hgrn2", "hawk", "retnet", "lightning", "mamba2", "rwkv6", "rwkv7"),
        "recurrent",
    ),
}  # fmt: skip

# Options a mixer takes through HybridConfig.mixers, with their defaults (None: derived from the config; each mixer's
# docstring says how).
MIXER_OPTIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "nope": {},
    "swa": {},
    "gdn": {
        "heads": None, "value_heads": None, "key_dim": None, "value_dim": None, "conv": 4,
        "negative_eigenvalues": False,
    },
    "deltanet": {"heads": None, "key_dim": None, "value_dim": None, "conv": 4, "negative_eigenvalues": False},
    "kda": {
        "heads": None, "value_heads": None, "key_dim": None, "value_dim": None, "conv": 4,
        "negative_eigenvalues": False,
    },
    "gla": {"heads": None, "key_dim": None, "value_dim": None, "gate_rank": 16},
    "hgrn": {"width": None, "lower_bounds": True},
    "hgrn2": {"heads": None, "key_dim": None, "value_dim": None, "lower_bounds": True},
    "hawk": {"heads": None, "width": None, "conv": 4},
    "retnet": {"heads": None, "key_dim": None, "value_dim": None},
    "lightning": {"heads": None, "key_dim": None},
    "mamba2": {"heads": None, "groups": 1, "key_dim": 128, "value_dim": None, "conv": 4},
    "rwkv6": {"heads": None, "key_dim": None, "value_dim": None, "mix_rank": 32, "decay_rank": 64},
    "rwkv7": {
        "heads": None, "key_dim": None, "value_dim": None, "decay_rank": None, "gate_rank": None, "rate_rank": None,
        "value_rank": None,
    },
}  # fmt: skip

RATIOS = ("pure", "24:1", "12:1", "6:1", "3:1", "1:1")
"""The ratios of arXiv 2507.06457 and 2606.15378: N efficient layers for each full layer."""


def parse_mixer(text: str) -> tuple[str, int | None]:
    """Split one mixer's entry into name and window: "swa:64" -> ("swa", 64), "gdn" -> ("gdn", None).

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


def parse_layer(entry: str) -> tuple[tuple[str, ...], bool]:
    """The mixers of one layer, and whether they share its heads.

    "gdn" -> (("gdn",), False). "swa:128|gdn" -> (("swa:128", "gdn"), True): parallel mixers, each with an equal part
    of the heads. "full+mamba2" -> (("full", "mamba2"), False): each with all heads, outputs summed (Falcon-H1).

    Raises ValueError for an unknown mixer, or both signs in one entry.
    """
    text = str(entry)
    if "|" in text and "+" in text:
        raise ValueError(f"pattern: {text!r} mixes '|' (split the heads) with '+' (sum); expected one of them")
    parts = tuple(part.strip() for part in re.split(r"[|+]", text))
    for part in parts:
        parse_mixer(part)
    return parts, "|" in text


def has_full(entry: str) -> bool:
    """Whether a layer's entry has a full-attention mixer in it."""
    return any(KINDS[parse_mixer(part)[0]] == "full" for part in parse_layer(entry)[0])


def ratio(mixer: str, n: int | str | None, full: str = "full", at: int | None = None) -> tuple[str, ...]:
    """The pattern of an N:1 hybrid: a group of n efficient layers and one full layer, to be tiled over depth.

    `n`: a number, "N:1", or "pure" (or None) for no full layer at all. `at`: the full layer's place in its group,
    0..n; None: the last. A model with fewer layers than one group has would be left without a full layer:
    HybridConfig refuses it.

    >>> ratio("gdn", "3:1")
    ('gdn', 'gdn', 'gdn', 'full')
    """
    parse_layer(mixer)
    if not has_full(full):
        raise ValueError(f"ratio: full={full!r} is not a full-attention mixer (full, nope)")
    if n is None or n == "pure":
        return (mixer,)
    if isinstance(n, str):
        if not re.fullmatch(r"\d+:1", n):
            raise ValueError(f"ratio: n={n!r}; expected N:1 or pure, as in {', '.join(RATIOS)}")
        n = int(n[:-2])
    many = whole_number(n)
    if many is None or many < 1:
        raise ValueError(f"ratio: n={n!r} efficient layers per full layer; expected a whole n >= 1, or None for pure")
    place = many if at is None else whole_number(at)
    if place is None or not 0 <= place <= many:
        raise ValueError(f"ratio: at={at!r}; expected the full layer's place in its group of {many + 1}, 0..{many}")
    layers = [mixer] * many
    layers.insert(place, full)
    return tuple(layers)


@dataclasses.dataclass(frozen=True)
class Slot:
    """Where one mixer stands in the model, and the heads it gets: what a mixer module is built from."""

    mixer: str
    layer: int
    index: int
    name: str
    heads: int
    kv_heads: int
    head_dim: int


@dataclasses.dataclass
class HybridConfig:
    """Widths, and which mixer each layer has.

    `pattern` is a tuple tiled over `n_layers`, or a list with one entry per layer. After construction
    `layers` holds the explicit list; that is what is stored and what everything else reads.

    >>> HybridConfig(("swa:64", "full"), n_layers=4, d_model=64, n_heads=4, vocab_size=128).layers
    ('swa:64', 'full', 'swa:64', 'full')
    """

    pattern: Sequence[str]
    """Mixers: `full` (softmax attention with RoPE), `nope` (without), `swa:W` (W keys, with self), a recurrence (see
    KINDS), or parallel ones: "swa:128|gdn" splits the heads, "full+mamba2" sums."""
    n_layers: int
    d_model: int
    """Residual width D."""
    n_heads: int
    """Query heads H of the attention mixers; heads of the recurrent ones unless `mixers` says otherwise (then in
    every layer: beside "|" too)."""
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
    norm: str = "rms"
    """Norm of the residual stream: "rms", or "layer" (LayerNorm with bias, the embeddings' own included: RWKV)."""
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
        for field, least in (("rope_base", "> 0"), ("norm_eps", ">= 0"), ("init_std", ">= 0")):
            value = getattr(self, field)
            number = float(value) if isinstance(value, numbers.Real) and not isinstance(value, bool) else math.nan
            if not 0 <= number < math.inf or (number == 0 and least == "> 0"):
                raise ValueError(f"{field}={value!r}: expected a finite number {least}")
            setattr(self, field, number)
        for field in ("qk_norm", "tie_embeddings"):
            if not isinstance(getattr(self, field), bool):
                raise ValueError(f"{field}={getattr(self, field)!r}: expected True or False")
        if self.norm not in ("rms", "layer"):
            raise ValueError(f"norm={self.norm!r}: expected 'rms' or 'layer'")
        self.layers = _resolve_layers(self.pattern, self.n_layers)
        self.n_kv_heads = self.n_heads if self.n_kv_heads is None else self.n_kv_heads
        if self.n_heads % self.n_kv_heads:
            raise ValueError(f"n_kv_heads={self.n_kv_heads} must divide n_heads={self.n_heads}")
        if self.head_dim is None:
            if self.d_model % self.n_heads:
                raise ValueError(f"d_model={self.d_model} is not a multiple of n_heads={self.n_heads}; give head_dim")
            self.head_dim = self.d_model // self.n_heads
        if self.head_dim % 2 and self.names & {"full", "swa"}:
            raise ValueError(f"head_dim={self.head_dim} must be even: RoPE rotates pairs of dimensions")
        for entry in dict.fromkeys(self.layers):
            parts, split = parse_layer(entry)
            for field in ("n_heads", "n_kv_heads"):
                if split and getattr(self, field) % len(parts):
                    raise ValueError(
                        f"pattern: {entry!r} splits the heads in {len(parts)}; {field}={getattr(self, field)} is not "
                        "a multiple"
                    )
        self.d_ff = -(-8 * self.d_model // 96) * 32 if self.d_ff is None else self.d_ff
        self._check_mixer_options()

    def _check_mixer_options(self) -> None:
        if not isinstance(self.mixers, Mapping):
            raise ValueError(f"mixers={self.mixers!r}: expected options by mixer, e.g. {{'gdn': {{'conv': 4}}}}")
        for mixer, options in self.mixers.items():
            if mixer not in MIXER_OPTIONS:
                raise ValueError(f"mixers: unknown mixer {mixer!r}; known: {', '.join(sorted(MIXER_OPTIONS))}")
            if not isinstance(options, Mapping):
                raise ValueError(f"mixers: {mixer}={options!r}: expected options by name, e.g. {{'heads': 4}}")
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

    @property
    def names(self) -> set[str]:
        """Names of all mixers in the model, windows left off."""
        return {parse_mixer(part)[0] for entry in self.layers for part in parse_layer(entry)[0]}

    def slots(self, layer: int) -> tuple[Slot, ...]:
        """The mixers of one layer, with their share of its heads."""
        parts, split = parse_layer(self.layers[layer])
        assert self.n_kv_heads is not None
        assert self.head_dim is not None
        share = len(parts) if split else 1
        name = f"blocks.{layer}.attn"
        return tuple(
            Slot(part, layer, i, name if len(parts) == 1 else f"{name}.parts.{i}",
                 self.n_heads // share, self.n_kv_heads // share, self.head_dim)
            for i, part in enumerate(parts)
        )  # fmt: skip

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


def whole_number(value: Any) -> int | None:
    """`value` as an int where it is one, numpy's and torch's among them; None for all else, booleans too."""
    if isinstance(value, bool) or str(getattr(value, "dtype", "")) in ("bool", "torch.bool"):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def _at_least_one(field: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{field}={value!r}: expected a whole number >= 1")


def _resolve_layers(pattern: Sequence[str], n_layers: int) -> tuple[str, ...]:
    if not isinstance(pattern, tuple | list) or not pattern:
        raise ValueError(f"pattern={pattern!r}: expected a non-empty tuple or list of mixers")
    for entry in pattern:
        parse_layer(entry)
    entries = tuple(entry.strip() for entry in pattern)
    if isinstance(pattern, list):
        if len(pattern) != n_layers:
            raise ValueError(
                f"pattern lists {len(pattern)} layers but n_layers={n_layers}; "
                "a list gives every layer, a tuple is tiled"
            )
        return entries
    layers = tuple(entries[i % len(entries)] for i in range(n_layers))
    lost = [m for m in entries if m not in layers]
    if lost:
        raise ValueError(
            f"pattern: {n_layers} layers never reach {lost[0]!r} of a {len(pattern)}-layer pattern; "
            'shorten it, add layers, or ask for a pure model, e.g. ("gdn",)'
        )
    return layers
