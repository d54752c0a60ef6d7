"""Trainings and what surrounds them: demo, train, cost, plot, doctor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from ..report import RUNS, keep, number, place, show, split
from .options import Config, Names, Set, Source, Table, load_source

if TYPE_CHECKING:
    from ..config import RunConfig
    from ..sweeps import Sweep


def demo(out: Path = RUNS / "demo", set_: Set = (), json_: Annotated[bool, tyro.conf.arg(name="json")] = False) -> None:
    """Train a small hybrid and take every measurement on it: about three minutes on two CPU cores.

    Args:
        out: Folder for the ladder, tables and figures; a finished ladder there is reused.
        set_: Overrides of the demo's config, e.g. train.seed=1.
        json_: End with one line of JSON holding the headline numbers.
    """
    from ..demo import demo as run

    result = run(out, list(set_))
    if not json_:
        for name, value in result.numbers.items():
            print(f"{name:28s}{value:10.3f}")
        for path in [*result.tables.values(), *result.figures.values()]:
            print(path)
    print(json.dumps(result.numbers) if json_ else f"Look at {result.folder / 'figures'}.")


def train(
    config: Config, out: Path | None = None, set_: Set = (), dry_run: bool = False, only: str | None = None
) -> None:
    """Train a hybrid and keep its checkpoints as a ladder; run again to resume.

    Args:
        config: A TOML file, or the name of a config that comes with hybridscope (demo; the sweeps qiao2026, wang2025).
        out: Folder for the ladder; by default runs/CONFIG/ladder, for a run of a sweep runs/CONFIG/RUN/ladder.
        set_: Overrides, e.g. train.steps=100.
        dry_run: Print the parameter counts, beside published ones where a sweep states them, and train nothing.
        only: The run of a sweep to train; a dry run without it lists them all.
    """
    if dry_run:
        from ..sweeps import describe, on_meta, printable

        runs = _runs(config, set_, only)
        table, notes = printable(describe(runs))  # builds the models: what is wrong with one comes before any output
        if len(runs.runs) == 1:
            run = next(iter(runs.runs.values()))
            print(json.dumps(run.to_dict(), indent=1))
            print(on_meta(run.hybrid()).sites)
        show(table)
        for i, note in enumerate(notes):
            print(f"[{i + 1}] {note}")
        return
    from ..train import train as start

    print(start(_run(config, set_, only), out or RUNS / Path(config).stem / (only or "") / "ladder"))


def _runs(config: str, set_: Set, only: str | None) -> Sweep:
    """The runs that a config stands for: a sweep's, all or the one named `only`, or the config's own."""
    from ..config import load_config
    from ..sweeps import Sweep, is_sweep, load_sweep

    if is_sweep(config):
        return load_sweep(config, list(set_), only)
    if only is not None:
        raise ValueError(f"--only {only}: {config} is one run, not a sweep")
    return Sweep({Path(config).stem: load_config(config, list(set_))}, {})


def _run(config: str, set_: Set, only: str | None) -> RunConfig:
    """The one run that is meant; ValueError where a sweep leaves it open."""
    from ..sweeps import is_sweep

    runs = _runs(config, set_, only).runs
    if only is None and is_sweep(config):
        listed = f"hybridscope train {config} --dry-run lists all"
        raise ValueError(f"{config}: a sweep of {len(runs)} runs; name one: --only RUN ({listed})")
    return next(iter(runs.values()))


def cost(
    source: Source,
    length: Names = (),
    batch: int = 1,
    measure: bool = True,
    set_: Set = (),
    only: str | None = None,
    out: Path | None = None,
) -> None:
    """Cache bytes by formula and as measured, prefill and decode speed, beside an all-full model of the same widths.

    Args:
        source: A TOML file, the name of a config that comes with hybridscope, or a checkpoint: folder, hub id, smollm2.
        length: Tokens of context; by default 1024,4096,16384, as far as the model goes.
        batch: Sequences side by side.
        measure: Run both models as well; without it the formulas alone.
        set_: Overrides of a config, e.g. model.n_layers=24.
        only: The run of a sweep that is meant.
        out: Table to write; the figure goes beside it.
    """
    from ... import figures
    from ...probes.cost import NEW_TOKENS
    from ...probes.cost import cost as take

    file = place("cost", str(Path(source).with_suffix("") / (only or "")), out)
    if Path(source).is_dir() or source == "smollm2" or ("/" in source and not source.endswith(".toml")):
        if set_ or only:
            option = f"--set {set_[0]}" if set_ else f"--only {only}"
            raise ValueError(f"{option}: {source} is a checkpoint, not a config")
        what: Any = load_source(source)
    else:
        what = _run(source, set_, only).hybrid()
    most = (what.context or 2**40) - (NEW_TOKENS if measure else 0)
    lengths = [number("length", n) for n in split(length)] or [n for n in (1024, 4096, 16384) if n <= most] or [most]
    table = take(what, lengths, batch=batch, measure=measure)
    show(table.dropna(axis=1, how="all"))
    keep(table, "cost", source, file, lambda: figures.cost(table), batch=batch)


def plot(
    table: Table,
    drift: Path | None = None,
    formed: Path | None = None,
    by_distance: bool = False,
    out: Path | None = None,
) -> None:
    """Draw the figure that belongs to a saved table.

    Args:
        table: A Parquet table that a hybridscope command wrote.
        drift: For a tracking table: the drift table to draw beside it.
        formed: For a tracking table: the table of formation steps to mark in it.
        by_distance: For a table of caps: needle accuracy by distance instead.
        out: Image to write; by default beside the table.
    """
    from ... import figures
    from ..tables import read_table

    def beside(file: Path | None) -> Any:
        return None if file is None else read_table(file)[0]

    data, facts = read_table(table)
    name = facts.get("measurement")
    by_layer = "layer" in data and max(data["layer"]) >= 0
    caps = figures.cap_distance if by_distance else figures.cap_heatmap if by_layer else figures.cap_curves
    drawers: dict[str | None, Any] = {
        "probe": figures.probe_curve, "cap": caps, "caps": caps, "influence": figures.influence,
        "perplexity": figures.perplexity, "cost": figures.cost, "heads": figures.heads_map,
        "importance": figures.layer_importance,
        "track": lambda t: figures.formation(t, beside(drift), formed=beside(formed), width=figures.DOUBLE),
    }  # fmt: skip
    if name not in drawers:
        raise ValueError(f"{table}: measurement {name!r} has no figure; known: {', '.join(map(str, drawers))}")
    print(figures.save(drawers[name](data), out or Path(table).with_suffix(".png")))


def doctor(json_: Annotated[bool, tyro.conf.arg(name="json")] = False) -> None:
    """Say what this machine has, and which path every recurrent mixer takes on it and why.

    Args:
        json_: Print JSON instead of a table.
    """
    from ..doctor import doctor as look
    from ..doctor import report as text

    found = look()
    print(json.dumps(found) if json_ else text(found))
