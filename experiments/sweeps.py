"""Sweeps: many runs written as one TOML, and what each of their models costs in parameters.

A sweep's TOML is a run's ([model], [data], [train]: what all runs share) with a [sweep] section:

    [sweep.axes.size.s1]            # an axis `size` with a value `s1`: a set of overrides
    model.d_model = 384

    [sweep.axes.mixer.full]
    model.pattern = ["full"]
    without = ["ratio"]             # not crossed with these axes

    [sweep.axes.mixer.gdn]
    model.pattern.mixer = "gdn"     # a pattern as a table: mixer, full, and either full_at or ratio

    [sweep.axes.ratio.3to1]
    model.pattern.ratio = "3:1"     # or full_at = [3, 7]: the layers, from 0, that are full

    [[sweep.override]]              # overrides for some of the runs
    runs = { size = "s1", mixer = ["gdn"] }
    model.d_ff = 960

    [[sweep.published]]             # what the source says of some of the runs, for the dry run's table
    runs = { size = "s1" }
    non_embedding = 14_999_424

The runs are the product of the axes, less those that `exclude = [{ size = ..., mixer = [...] }]` names. A run is called
by its values, in the order of the axes: s1-full, s1-gdn-3to1. Where two axes set the same key, the later one wins.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..hooks.config import HybridConfig, ratio
from .config import RunConfig, apply_override, read, read_toml

if TYPE_CHECKING:
    import pandas as pd

    from ..hooks.model import HybridLM

SECTIONS = ("model", "data", "train")
Choice = Mapping[str, str]  # axis -> value, of one run


@dataclasses.dataclass
class Section:
    """[sweep]."""

    axes: dict[str, dict[str, dict[str, Any]]]
    exclude: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    override: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    published: list[dict[str, Any]] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Claim:
    """One entry of [[sweep.published]]: what the sweep's source says of the parameters of some runs.

    Zeros that a count ends in stand for digits that were not given (477_000_000 for 477M).
    """

    runs: dict[str, Any]
    non_embedding: int | None = None
    """All parameters but those of embedding and unembedding."""
    total: int | None = None
    note: str | None = None
    """The assumption under which the counts agree, or why they do not."""


@dataclasses.dataclass(frozen=True)
class Published:
    """What is published about one run: all claims that name it, later counts in place of earlier ones."""

    non_embedding: int | None = None
    total: int | None = None
    notes: tuple[str, ...] = ()

    def and_also(self, claim: Claim) -> Published:
        return Published(
            self.non_embedding if claim.non_embedding is None else claim.non_embedding,
            self.total if claim.total is None else claim.total,
            self.notes if claim.note is None else (*self.notes, claim.note),
        )


@dataclasses.dataclass
class Layers:
    """model.pattern as a table: one mixer, and where full attention interrupts it."""

    mixer: str
    full_at: list[int] | None = None
    """The full layers, counted from 0; [] for a pure model."""
    ratio: str | None = None
    """N:1 or pure, the full layer last in each group; see hooks.config.ratio."""
    full: str = "full"


@dataclasses.dataclass
class Sweep:
    """A sweep's runs by name, and what is published about them."""

    runs: dict[str, RunConfig]
    published: dict[str, Published]


def is_sweep(source: str | Path) -> bool:
    """Whether a config is a sweep."""
    return "sweep" in read_toml(source)


def expand(source: str | Path, overrides: Sequence[str] = ()) -> dict[str, RunConfig]:
    """The runs of a sweep, by name.

    >>> expand("qiao2026")["s1-full"].model.d_model
    384
    """
    return load_sweep(source, overrides).runs


def load_sweep(source: str | Path, overrides: Sequence[str] = (), only: str | None = None) -> Sweep:
    """Read a sweep, or `only` one run of it: a TOML file, or one that comes with the package, by name.

    `overrides` (`a.b=c`) apply to every run that is read.

    Raises FileNotFoundError for a missing file; ValueError for one that is no sweep, all that load_config refuses,
    unknown axes and values (with the nearest valid one), selections that match no run, and two runs of one name.
    """
    base = read_toml(source)
    if "sweep" not in base:
        raise ValueError(f"{source}: has no [sweep] section; it is one run")
    section: Section = read(Section, base.pop("sweep"), "sweep.")
    choices = _choices(section)
    for selection in section.exclude:
        for name in _selected("sweep.exclude", selection, section, choices):
            del choices[name]
    if not choices:
        raise ValueError("sweep.exclude: leaves no run")
    data = {name: _merged(base, section.axes, choice) for name, choice in choices.items()}
    for i, entry in enumerate(section.override):
        where = f"sweep.override[{i}]"
        for name in _selected(where, entry.get("runs"), section, choices):
            _merge(data[name], _sections(where, entry, "runs"))
    published = {name: Published() for name in choices}
    for i, entry in enumerate(section.published):
        where = f"sweep.published[{i}]"
        claim: Claim = read(Claim, entry, where + ".")
        for name in _selected(where, claim.runs, section, choices):
            published[name] = published[name].and_also(claim)
    if only is not None:
        _known("--only", only, data)
    names = data if only is None else [only]
    return Sweep({name: _run(name, data[name], overrides) for name in names}, {name: published[name] for name in names})


def _choices(section: Section) -> dict[str, dict[str, str]]:
    """The product of the axes by run name, an axis left out where the value of another says `without`."""
    choices: dict[str, dict[str, str]] = {}
    for values in itertools.product(*section.axes.values()):
        choice = dict(zip(section.axes, values, strict=True))
        for axis, value in list(choice.items()):
            where = f"sweep.axes.{axis}.{value}.without"
            for other in _listed(where, section.axes[axis][value].get("without", [])):
                _known(where, other, section.axes)
                choice.pop(other, None)
        name = _name(choice)
        if choices.setdefault(name, choice) != choice:
            raise ValueError(f"sweep: two runs are called {name!r}; rename a value")
    if not choices or "" in choices:
        raise ValueError(f"sweep.axes: {list(section.axes)}; expected axes with values")
    return choices


def _name(choice: Choice) -> str:
    for axis, value in choice.items():
        if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", value):
            raise ValueError(f"sweep.axes.{axis}: value {value!r}; expected letters, digits, '.', '-' or '_'")
    return "-".join(choice.values())


def _selected(where: str, selection: Any, section: Section, choices: Mapping[str, Choice]) -> list[str]:
    """The runs that a table {axis: value or values} selects."""
    if not isinstance(selection, Mapping):
        raise ValueError(f"{where}: runs={selection!r}; expected a table such as {{ size = 's1' }}")
    wanted = {axis: _listed(f"{where}: {axis}", values) for axis, values in selection.items()}
    for axis, values in wanted.items():
        _known(f"{where}: axis", axis, section.axes)
        for value in values:
            _known(f"{where}: {axis}", value, section.axes[axis])
    names = [name for name, c in choices.items() if all(c.get(axis) in values for axis, values in wanted.items())]
    if not names:
        raise ValueError(f"{where}: {dict(selection)} matches no run")
    return names


def _listed(where: str, value: Any) -> list[str]:
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, list) or not all(isinstance(v, str) for v in values):
        raise ValueError(f"{where}={value!r}; expected a name or a list of names")
    return values


def _known(where: str, name: str, known: Iterable[str]) -> None:
    if name not in known:
        near = difflib.get_close_matches(name, known, 1, 0)
        raise ValueError(f"{where}: unknown {name!r}; the nearest is {near[0]!r}")


def _sections(where: str, table: Mapping[str, Any], key: str) -> dict[str, Any]:
    """The overrides in an axis value or an override: its sections, without `key`."""
    for name, fields in table.items():
        _known(where, name, (*SECTIONS, key))
        if name != key and not isinstance(fields, Mapping):
            raise ValueError(f"{where}.{name}={fields!r}; expected a section")
    return {name: fields for name, fields in table.items() if name != key}


def _merged(base: Mapping[str, Any], axes: Mapping[str, Any], choice: Choice) -> dict[str, Any]:
    data: dict[str, Any] = copy.deepcopy(dict(base))
    for axis, value in choice.items():
        _merge(data, _sections(f"sweep.axes.{axis}.{value}", axes[axis][value], "without"))
    return data


def _merge(data: dict[str, Any], overrides: Mapping[str, Any]) -> None:
    """Set every leaf of `overrides` in `data`."""
    for key, value in overrides.items():
        if isinstance(value, Mapping) and isinstance(data.get(key), dict):
            _merge(data[key], value)
        else:
            data[key] = copy.deepcopy(value)


def _run(name: str, data: dict[str, Any], overrides: Sequence[str]) -> RunConfig:
    try:
        for override in overrides:
            apply_override(data, override)
        model = data.get("model", {})
        if isinstance(model.get("pattern"), Mapping):
            model["pattern"] = _pattern(read(Layers, model["pattern"], "model.pattern."), model.get("n_layers"))
        run: RunConfig = read(RunConfig, data)
        run.hybrid()
    except ValueError as error:
        raise ValueError(f"run {name}: {error}") from None
    return run


def _pattern(layers: Layers, n_layers: Any) -> list[str]:
    if (layers.full_at is None) == (layers.ratio is None):
        raise ValueError("model.pattern: expected either full_at or ratio")
    if layers.full_at is None:
        return list(ratio(layers.mixer, layers.ratio, layers.full))
    if not isinstance(n_layers, int) or any(not 0 <= i < n_layers for i in layers.full_at):
        raise ValueError(
            f"model.pattern.full_at={layers.full_at}: expected layers of 0..n_layers-1, n_layers={n_layers}"
        )
    return [layers.full if i in layers.full_at else layers.mixer for i in range(n_layers)]


def on_meta(config: HybridConfig) -> HybridLM:
    """The model without memory for its weights (torch's meta device)."""
    import torch

    from ..hooks.model import HybridLM

    with torch.device("meta"):
        return HybridLM(config)


def parameters(config: HybridConfig) -> tuple[int, int]:
    """Parameters of a model, and those without embedding and unembedding."""
    total = sum(p.numel() for p in on_meta(config).parameters())
    tables = 1 if config.tie_embeddings else 2
    return total, total - tables * config.vocab_size * config.d_model


def compressed(layers: Sequence[str]) -> str:
    """A layer list in short: (gdn*2 full)*8 for eight times gdn, gdn, full."""
    n = len(layers)
    period = next(p for p in range(1, n + 1) if all(layers[i] == layers[i % p] for i in range(n)))
    runs = [(mixer, len(list(group))) for mixer, group in itertools.groupby(layers[:period])]
    text = " ".join(mixer if count == 1 else f"{mixer}*{count}" for mixer, count in runs)
    times, rest = divmod(n, period)
    if times > 1:
        text = f"{text}*{times}" if period == 1 else f"({text})*{times}"
    return f"{text} {compressed(layers[:rest])}" if rest else text


def describe(sweep: Sweep) -> pd.DataFrame:
    """One row a run [run, layers, width, parameters, non_embedding, tokens, published, difference, published_total,
    difference_total, note]: parameters as built here, and how far they are from what is published (missing
    where nothing is)."""
    import pandas as pd

    rows = []
    for name, run in sweep.runs.items():
        hybrid, claim = run.hybrid(), sweep.published.get(name, Published())
        total, inner = parameters(hybrid)
        rows.append({
            "run": name, "layers": compressed(hybrid.layers), "width": hybrid.d_model, "parameters": total,
            "non_embedding": inner, "tokens": run.train.steps * run.train.batch * run.data.length,
            "published": claim.non_embedding,
            "difference": None if claim.non_embedding is None else inner - claim.non_embedding,
            "published_total": claim.total,
            "difference_total": None if claim.total is None else total - claim.total,
            "note": "\n".join(claim.notes) or None,
        })  # fmt: skip
    counts = ("published", "difference", "published_total", "difference_total")
    return pd.DataFrame(rows).astype(dict.fromkeys(counts, "Int64"))


def printable(table: pd.DataFrame) -> tuple[pd.DataFrame, list[str]]:
    """`describe`'s table for the eye, columns that say nothing left out, and the notes that it numbers."""
    import pandas as pd

    def number(value: Any) -> str:
        return "" if pd.isna(value) else f"{value:,}"

    explained = ["" if pd.isna(text) else text.splitlines() for text in table["note"]]
    notes = list(dict.fromkeys(note for lines in explained for note in lines))
    out = {column: list(table[column]) for column in ("run", "layers", "width")}
    for column in ("parameters", "non_embedding", "tokens"):
        out[column] = [number(v) for v in table[column]]
    for column, difference in (("published", "difference"), ("published_total", "difference_total")):
        out[column] = [number(v) for v in table[column]]
        pairs = zip(table[column], table[difference], strict=True)
        out[difference] = ["" if pd.isna(v) else _difference(int(v), int(d)) for v, d in pairs]
    out["note"] = [" ".join(f"[{i + 1}]" for i, note in enumerate(notes) if note in lines) for lines in explained]
    return pd.DataFrame({name: values for name, values in out.items() if any(v != "" for v in values)}), notes


def _difference(published: int, difference: int) -> str:
    """+1,234, or 0, or "0 as rounded" where the published count ends in zeros and rounding explains the difference."""
    digits = str(published)
    unit = 10 ** (len(digits) - len(digits.rstrip("0")))
    if difference and 2 * abs(difference) <= unit:
        return "0 as rounded"
    return f"{difference:+,}" if difference else "0"
