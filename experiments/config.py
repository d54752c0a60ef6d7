"""Run configs: TOML files read into dataclasses, with strict keys and `a.b=c` overrides."""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
import tomllib
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..hooks.config import HybridConfig

CONFIGS = Path(__file__).parent / "configs"


@dataclasses.dataclass
class ModelConfig:
    """The hybrid to train; see HybridConfig for what the fields mean."""

    pattern: list[str]
    """The first layers, repeated over n_layers in this order (a TOML list is tiled, unlike HybridConfig's): ["gdn",
    "full"] with n_layers = 5 is gdn, full, gdn, full, gdn. No longer than n_layers."""
    n_layers: int
    d_model: int
    n_heads: int
    n_kv_heads: int | None = None
    head_dim: int | None = None
    d_ff: int | None = None
    rope_base: float = 500_000.0
    qk_norm: bool = False
    tie_embeddings: bool = False
    init_std: float = 0.02
    mixers: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class DataConfig:
    """What to train on: the synthetic token language, or a file of token ids."""

    length: int
    """Tokens T of a sequence, at least 2; also the model's context."""
    vocab_size: int
    file: str | None = None
    """Little-endian token ids: uint32 where the name ends in .u32, else uint16. None: the token language, which the
    fields below describe."""
    dataset: str | None = None
    """The text behind `file`, by name: recorded, never downloaded. Without a `file` such a run cannot start."""
    tokenizer: str | None = None
    """Whose ids `file` holds, by name; recorded."""
    keys: int = 16
    values: int = 8
    needles: int = 4
    """Planted needles in a sequence, each asked again once."""
    copy_share: float = 0.5
    """Share of sequences that repeat a stretch of random tokens."""
    filler_weight: float = 0.0
    """Loss weight of filler tokens beside that of answers, 1."""


@dataclasses.dataclass
class TrainConfig:
    """Optimisation: AdamW or Muon, linear warm-up, cosine to a tenth, gradient clipping."""

    steps: int
    batch: int
    """Sequences per optimiser step."""
    accumulate: int = 1
    """Micro-batches a step is split into."""
    lr: float = 1e-3
    optimizer: str = "adamw"
    """adamw; muon: Muon for the linear maps of the blocks, AdamW for everything else."""
    muon_lr: float | None = None
    """Learning rate of what Muon trains; None: lr, for its steps are scaled to AdamW's size (arXiv 2502.16982)."""
    warmup: int = 100
    weight_decay: float = 0.1
    clip: float = 1.0
    """Largest norm of the gradient; inf: no clipping."""
    window_schedule: list[list[int | float]] | None = None
    """Windows that the swa layers train with, e.g. [[0.0, 16], [0.5, 512]]: 16 keys, and 512 from half of the steps on.
    A checkpoint's config.json says the window of its last step. None: the pattern's own windows throughout."""
    saves: int = 12
    """Checkpoints after step 0, evenly spaced, the last at the final step."""
    seed: int = 0
    device: str = "auto"
    """auto: CUDA where there is one, else the CPU; cpu; cuda, or one GPU such as cuda:1."""
    threads: int | None = None
    """CPU threads; None: leave torch's choice."""
    compile: str = "auto"
    """auto: torch.compile on CUDA; on; off."""
    parallel: str = "ddp"
    """How several processes (torchrun) train together: ddp (each holds the model) or fsdp (each holds a share of it).
    Their number must divide batch / accumulate; they see the batches that one process would see."""

    def window(self, step: int) -> int | None:
        """The window that the swa layers have in step `step`, counted from 0; None: their own."""
        begun = [window for start, window in self.window_schedule or [] if round(start * self.steps) <= step]
        return int(begun[-1]) if begun else None


@dataclasses.dataclass
class RunConfig:
    """One training run."""

    model: ModelConfig
    data: DataConfig
    train: TrainConfig

    def __post_init__(self) -> None:
        t, d = self.train, self.data
        for name in ("steps", "batch", "accumulate", "saves", "threads"):
            if getattr(t, name) is not None and getattr(t, name) < 1:
                raise ValueError(f"train.{name}={getattr(t, name)}: expected >= 1")
        for name in ("lr", "muon_lr", "warmup", "weight_decay"):
            if getattr(t, name) is not None and not 0 <= getattr(t, name) < math.inf:
                raise ValueError(f"train.{name}={getattr(t, name)}: expected a finite number >= 0")
        if not t.clip > 0:
            raise ValueError(f"train.clip={t.clip}: expected > 0 (inf: no clipping)")
        if not 0 <= t.seed < 2**64:
            raise ValueError(f"train.seed={t.seed}: expected 0..2**64 - 1")
        if not re.fullmatch(r"auto|(cpu|cuda)(:\d+)?", t.device):
            raise ValueError(f"train.device={t.device!r}: expected auto, cpu or cuda")
        if len(self.model.pattern) > self.model.n_layers:
            raise ValueError(
                f"model.pattern={self.model.pattern}: {len(self.model.pattern)} layers; expected at most "
                f"model.n_layers={self.model.n_layers}, over which it is repeated"
            )
        if d.length < 2:
            raise ValueError(f"data.length={d.length}: expected >= 2, a token and the one it predicts")
        if not 0 <= d.copy_share <= 1:
            raise ValueError(f"data.copy_share={d.copy_share}: expected 0..1")
        for name in ("needles", "filler_weight"):
            if not 0 <= getattr(d, name) < math.inf:
                raise ValueError(f"data.{name}={getattr(d, name)}: expected a finite number >= 0")
        if d.file is None and not (d.needles or d.copy_share or d.filler_weight):
            raise ValueError("data: no needles, no copies and no weight on filler leave nothing to learn")
        if t.batch % t.accumulate:
            raise ValueError(f"train.accumulate={t.accumulate} must divide train.batch={t.batch}")
        if t.saves > t.steps:
            raise ValueError(f"train.saves={t.saves}: more than train.steps={t.steps}")
        for name, known in (
            ("compile", ("auto", "on", "off")), ("optimizer", ("adamw", "muon")), ("parallel", ("ddp", "fsdp"))
        ):  # fmt: skip
            if getattr(t, name) not in known:
                raise ValueError(f"train.{name}={getattr(t, name)!r}: expected {' or '.join(known)}")
        if t.muon_lr is not None and t.optimizer != "muon":
            raise ValueError(f'train.muon_lr={t.muon_lr}: only train.optimizer="muon" takes it, not {t.optimizer!r}')
        if t.window_schedule is not None:
            self._check_window_schedule(t.window_schedule)
        if d.file is None and d.dataset is None:
            from .corpus import TokenMixture  # needs torch

            TokenMixture(d)  # says what does not fit into data.length

    def _check_window_schedule(self, schedule: list[list[int | float]]) -> None:
        starts = [entry[0] for entry in schedule if len(entry) == 2]
        windows = [entry[1] for entry in schedule if len(entry) == 2]
        rising = starts == sorted(set(starts)) and starts[:1] == [0] and starts[-1] < 1
        if len(starts) < len(schedule) or not rising or any(w < 1 or w % 1 for w in windows):
            raise ValueError(
                f"train.window_schedule={schedule}: expected [[0.0, W], [fraction, W], ...], "
                "fractions rising from 0 and below 1, W a whole number >= 1"
            )
        begun = [round(start * self.train.steps) for start in starts]
        if len({*begun, self.train.steps}) <= len(begun):
            raise ValueError(
                f"train.window_schedule={schedule}: its windows begin at steps {begun} of train.steps="
                f"{self.train.steps}; expected each to train for a step"
            )
        if not any("swa:" in mixer for mixer in self.model.pattern):
            raise ValueError(f"train.window_schedule: model.pattern={self.model.pattern} has no swa layer")

    def hybrid(self) -> HybridConfig:
        """The model's config, vocabulary and context taken from the data."""
        fields = dataclasses.asdict(self.model)
        pattern = tuple(fields.pop("pattern"))
        return HybridConfig(pattern, vocab_size=self.data.vocab_size, context=self.data.length, **fields)

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def load_config(source: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a TOML file, or a config that comes with the package by name ("demo"), then apply `a.b=c` overrides.

    Raises FileNotFoundError for a missing file; ValueError for bad TOML, an unknown key (with the nearest valid one),
    a missing key, a value of the wrong type, or a sweep (see sweeps.py).
    """
    data = read_toml(source)
    if "sweep" in data:
        raise ValueError(f"{source}: a sweep of many runs; name one: hybridscope train {source} --only RUN")
    for override in overrides:
        apply_override(data, override)
    return read(RunConfig, data)


def read_toml(source: str | Path) -> dict[str, Any]:
    """A TOML file as plain data, or that of a config that comes with the package, by name."""
    path = Path(source)
    if not path.suffix and not path.is_file():
        path = CONFIGS / f"{source}.toml"
    if not path.is_file():
        names = ", ".join(sorted(p.stem for p in CONFIGS.glob("*.toml")))
        raise FileNotFoundError(f"{source}: no such config; those that come with hybridscope: {names}")
    try:
        return tomllib.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path}: not valid TOML ({error})") from None


def apply_override(data: dict[str, Any], override: str) -> None:
    """Set one `a.b=value` in plain data; a bare word is a string."""
    key, equals, text = override.partition("=")
    if not equals:
        raise ValueError(f"--set {override}: expected a.b=value")
    try:
        value = tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        value = text
    *path, last = key.strip().split(".")
    for part in path:
        data = data.setdefault(part, {})
        if not isinstance(data, dict):
            raise ValueError(f"--set {override}: {part!r} is a value, not a section")
    data[last] = value


def read(cls: type, data: Mapping[str, Any], where: str = "") -> Any:
    """Plain data as a dataclass, strictly; ValueError names the key, what came and what was expected."""
    hints = typing.get_type_hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls)}
    for key in data:
        if key not in fields:
            near = difflib.get_close_matches(key, fields, 1, 0)
            raise ValueError(f"config: unknown key {where + key!r}; the nearest valid key is {where + near[0]!r}")
    values = {}
    for name, f in fields.items():
        if name in data:
            values[name] = _value(hints[name], data[name], where + name)
        elif f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING:
            raise ValueError(f"config: missing key {where + name!r}")
    return cls(**values)


def _value(kind: Any, value: Any, name: str) -> Any:
    if dataclasses.is_dataclass(kind):
        if not isinstance(value, Mapping):
            raise ValueError(f"config: {name}={value!r}; expected a section [{name}]")
        return read(typing.cast(type, kind), value, name + ".")
    if not _fits(kind, value):
        expected = kind.__name__ if isinstance(kind, type) and not typing.get_args(kind) else str(kind)
        raise ValueError(f"config: {name}={value!r}; expected {expected.replace('typing.', '')}")
    return float(value) if kind is float else value


def _fits(kind: Any, value: Any) -> bool:
    origin, inner = typing.get_origin(kind) or kind, typing.get_args(kind)
    if origin is types.UnionType:
        return any(_fits(option, value) for option in inner)
    if origin is list:
        return isinstance(value, list) and all(_fits(inner[0], v) for v in value)
    if origin is dict:
        return isinstance(value, dict) and all(_fits(inner[1], v) for v in value.values())
    if origin is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    return origin is Any or (isinstance(value, origin) and isinstance(value, bool) == (origin is bool))
