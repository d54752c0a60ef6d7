"""Command line: `hybridscope demo | train | probe | cap | heads | track | influence | perplexity | fit | cost |
plot | doctor | bench`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from .bench.command import bench
from .report import RUNS, keep, number, place, show, split

Source = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="SOURCE")]
Config = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="CONFIG")]
Table = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="TABLE")]
Haystack = Literal["tokens", "repeat", "essay"]
Set = Annotated[tuple[str, ...], tyro.conf.arg(name="set", metavar="A.B=VALUE"), tyro.conf.UseAppendAction]
Names = Annotated[tuple[str, ...], tyro.conf.arg(metavar="A,B")]


def demo(out: Path = RUNS / "demo", set_: Set = (), json_: Annotated[bool, tyro.conf.arg(name="json")] = False) -> None:
    """Train a small hybrid and take every measurement on it: about three minutes on two CPU cores.

    Args:
        out: Folder for the ladder, tables and figures; a finished ladder there is reused.
        set_: Overrides of the demo's config, e.g. train.seed=1.
        json_: End with one line of JSON holding the headline numbers.
    """
    from .demo import demo as run

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
    from .config import load_config
    from .sweeps import Sweep, describe, is_sweep, load_sweep, on_meta, printable

    name = Path(config).stem
    if is_sweep(config):
        sweep = load_sweep(config, list(set_), only)
        if only is not None:
            name = f"{name}/{only}"
        elif not dry_run:
            raise ValueError(f"{config}: a sweep of {len(sweep.runs)} runs; name one: --only RUN (--dry-run lists all)")
    elif only is not None:
        raise ValueError(f"--only {only}: {config} is one run, not a sweep")
    else:
        sweep = Sweep({name: load_config(config, list(set_))}, {})
    run = next(iter(sweep.runs.values()))
    if dry_run:
        if len(sweep.runs) == 1:
            print(json.dumps(run.to_dict(), indent=1))
            print(on_meta(run.hybrid()).sites)
        table, notes = printable(describe(sweep))
        show(table)
        for i, note in enumerate(notes):
            print(f"[{i + 1}] {note}")
        return
    from .train import train as start

    print(start(run, out or RUNS / name / "ladder"))


def probe(
    source: Source,
    n: int = 400,
    length: int | None = None,
    target: Literal["value", "depth"] = "value",
    haystack: Haystack | None = None,
    values: int | None = None,
    seeds: int = 5,
    seed: int = 0,
    solver: Literal["auto", "torch", "sklearn"] = "auto",
    features_dir: Path | None = None,
    out: Path | None = None,
) -> None:
    """Layer-wise needle probe: from which layer on can a linear classifier read the needle?

    Args:
        source: Checkpoint folder, hub id, or smollm2.
        n: Prompts.
        length: Tokens per prompt; by default the model's context, at most 1,024.
        target: Read which value the needle holds, or which depth bin it lies in.
        haystack: essay and repeat need a tokenizer; by default what suits the model.
        values: Candidate values (8 for English; the token language brings its own).
        seeds: Random splits.
        seed: Seed of the prompts.
        solver: torch fits all layers at once; sklearn one by one, the reference.
        features_dir: Folder to stream features to; a run that was killed goes on from it.
        out: Table to write; the figure goes beside it.
    """
    from .. import figures
    from ..probes.layerwise import measure

    file = place("probe", source, out)
    model = _load(source)
    values = values if values or model.tokenizer is None else 8
    needles = _needles(model, source, n, length, haystack, values, seed)
    measured = measure(model, needles, target, seeds=seeds, solver=solver, features_dir=features_dir)
    table = measured.table()
    columns = ["layer", "kind", "mixer", "accuracy", "low", "high", "gain", "gain_low", "gain_high", "chance"]
    show(table.query("control == 'none' and where == 'mid'")[columns])
    try:
        show(measured.gains())
    except ValueError as error:
        print(f"gains by part of the model: {error}")
    keep(table, "probe", source, file, figures.probe_curve(table), n=n, target=target, seed=seed, seeds=seeds)


def cap(
    source: Source,
    kind: Names = (),
    window: Names = (),
    sinks: Names = ("0", "4"),
    by_layer: bool = False,
    rank: bool = False,
    n: int = 64,
    length: int | None = None,
    haystack: Haystack | None = None,
    seed: int = 0,
    out: Path | None = None,
) -> None:
    """Cap the receptive field of one layer type (or one layer) and measure needle accuracy and log-perplexity.

    Args:
        source: Checkpoint folder, hub id, or smollm2.
        kind: full, window, recurrent; by default all that the model has.
        window: Caps in tokens, the query counted; by default a half, a quarter, ... of the prompts' length.
        sinks: First keys left visible.
        by_layer: Cap one layer at a time.
        rank: With --by-layer, rank full layers by how much the loss on answers rises when each is capped alone.
        n: Prompts.
        length: Tokens per prompt; by default the model's context, at most 1,024.
        haystack: essay and repeat need a tokenizer; by default what suits the model.
        seed: Seed of the prompts.
        out: Table to write; the figure goes beside it.
    """
    from .. import figures
    from ..probes.capsweep import cap_sweep
    from ..probes.importance import layer_importance
    from .report import show_caps
    from .sources import documents_for

    kinds, file = split(kind), place("importance" if rank else "cap-layers" if by_layer else "cap", source, out)
    if rank and not by_layer:
        raise ValueError("--rank: ranks layers that are capped one at a time; give --by-layer as well")
    if rank and len(kinds) > 1:
        raise ValueError(f"--kind {','.join(kinds)}: --rank ranks the layers of one kind")
    model = _load(source)
    needles = _needles(model, source, n, length, haystack, None, seed)
    tokens = needles.tokens.shape[1]
    windows = [number("window", w) for w in split(window)] or [max(1, tokens // 2**i) for i in (1, 2, 3, 4)]
    keep_first = [number("sinks", s) for s in split(sinks)]
    if rank:
        table = layer_importance(model, needles, windows=windows, sinks=keep_first, kind=[*kinds, "full"][0])
        show(table)
        return keep(table, "importance", source, file, figures.layer_importance(table), n=n, seed=seed)
    texts = documents_for(model, source, n, length=length, seed=seed) if tokens > min(windows) + 1 else None
    table = cap_sweep(
        model, needles, texts, kinds=kinds or None, windows=windows, sinks=keep_first, by_layer=by_layer,
        by_distance=not by_layer,
    )  # fmt: skip
    show_caps(table, file)
    figure = figures.cap_heatmap(table) if by_layer else figures.cap_curves(table)
    keep(table, "cap", source, file, figure, n=n, seed=seed)


def heads(
    source: Source,
    n: int = 64,
    length: int | None = None,
    score: Literal["copy", "mass", "qr"] = "copy",
    compat: Literal["qiao2026"] | None = None,
    k: int = 10,
    draws: int = 5,
    haystack: Haystack | None = None,
    seed: int = 0,
    out: Path | None = None,
) -> None:
    """Find retrieval heads, then check them: needle accuracy without the top k against k random heads.

    Heads are found on one set of prompts and ablated on another.

    Args:
        source: Checkpoint folder, hub id, or smollm2.
        n: Prompts to find heads on, and as many to check them on.
        length: Tokens per prompt; by default the model's context, at most 1,024.
        score: copy (most attended key is the token being emitted), mass (attention on the value), or qr (attention
            on the needle from the question, less that from a question that asks nothing).
        compat: With --score mass: as the published script scores.
        k: Heads to ablate.
        draws: Draws of random heads.
        haystack: essay and repeat need a tokenizer; by default what suits the model.
        seed: Seed of the prompts.
        out: Table to write; the figure goes beside it.
    """
    from .. import figures
    from ..probes.causal import causal_check
    from ..probes.needles import answered
    from ..probes.retrieval import retrieval_heads
    from .tables import provenance, save_table

    file = place("heads", source, out)
    model = _load(source)
    find = _needles(model, source, n, length, haystack, None, seed, far=True)
    check = _needles(model, source, n, length, haystack, None, seed + 1, far=True)
    right = answered(model, find)
    print(f"answers {int(right.sum())} of {len(find)} needle prompts of {find.tokens.shape[1]} tokens")
    table = retrieval_heads(model, find, score, compat=compat)
    show(table.head(k))
    settings = {"n": n, "score": score, "compat": compat, "seed": seed}
    if k > len(table) // 2:
        k = len(table) // 2
        print(f"the model has {len(table)} such heads: comparing {k} with {k} others")
    if k:
        effect = causal_check(model, check, table, k=k, draws=draws, seed=seed)
        show(effect.groupby(["ablated", "k"], sort=False, as_index=False)["accuracy"].agg(["mean", "min", "max"]))
        gap = effect[effect["ablated"] == "top"].iloc[0]
        print("effect, top over random: {effect:.3g} [{effect_low:.3g}, {effect_high:.3g}]".format(**gap))
        save_table(effect, file.with_name(f"{file.stem}-causal.parquet"), provenance("causal", source, **settings))
    keep(table, "heads", source, file, figures.heads_map(table, label=f"{score} score"), **settings)


def track(
    source: Source,
    n: int = 128,
    length: int | None = None,
    top: int = 4,
    heads: Literal["final", "each", "all"] = "final",
    compat: Literal["qiao2026"] | None = None,
    haystack: Haystack | None = None,
    seed: int = 0,
    out: Path | None = None,
) -> None:
    """Follow the final step's top heads through a ladder: entropy, needle mass, copy score, Q/K drift, and the step at
    which they form.

    The table is saved after every step; run again to resume.

    Args:
        source: Ladder folder (step-NNNNNN/ or checkpoint-N/ inside).
        n: Prompts; heads are chosen on the first half and measured on the second.
        length: Tokens per prompt; by default the model's context, at most 1,024.
        top: Heads to follow.
        heads: The top heads of the final step, followed back; those of each step; or all full-attention heads.
        compat: As the published script measures.
        haystack: essay and repeat need a tokenizer; by default what suits the model.
        seed: Seed of the prompts.
        out: Table to write; the figure and the tables of drift, formation and single prompts go beside it.
    """
    from .. import figures
    from ..hooks.ladder import ladder
    from ..probes.drift import qk_drift
    from ..probes.formation import formation_step
    from .tables import provenance, read_table, save_table
    from .track import samples_of, track_to

    steps = ladder(source)
    final = steps.final
    needles = _needles(final.load(), final.path, n, length, haystack, None, seed, far=True)
    file = place("track", source, out)
    table = track_to(file, steps, needles, None if heads == "final" else heads, top=top, compat=compat)
    followed = table[["layer", "site", "head"]].drop_duplicates().to_numpy()
    drift = qk_drift(steps, heads=[tuple(map(int, h)) for h in followed])
    save_table(drift, file.with_name(file.stem + "-drift.parquet"), provenance("drift", source))
    show(table.groupby("step", as_index=False)[["mass", "entropy", "copy", "accuracy"]].mean())
    formed = None
    if heads != "all" and "full" in set(table["kind"]):  # the best of all heads would be chosen on what it is shown on
        formed = formation_step(read_table(samples_of(file))[0], seed=seed)
        save_table(formed, file.with_name(file.stem + "-formation.parquet"), provenance("formation", source, seed=seed))
        show(formed)
    print(file)
    figure = figures.formation(table, drift, formed=formed, width=figures.DOUBLE)
    print(figures.save(figure, file.with_suffix(".png")))


def influence(
    source: Source,
    n: int = 16,
    length: int | None = None,
    target: Literal["loss", "logit_sum", "argmax_logit"] = "loss",
    seed: int = 0,
    out: Path | None = None,
) -> None:
    """Gradient influence: how strongly the output depends on each input token, by distance.

    Args:
        source: Checkpoint folder, hub id, or smollm2.
        n: Documents.
        length: Tokens per document; by default the model's context, at most 1,024.
        target: The next token's loss, or the published logit targets.
        seed: Seed of the documents.
        out: Table to write; the figure goes beside it.
    """
    from .. import figures
    from ..probes.influence import gradient_influence
    from .sources import documents_for

    file = place("influence", source, out)
    model = _load(source)
    table = gradient_influence(model, documents_for(model, source, n, length=length, seed=seed), target=target)
    keep(table, "influence", source, file, figures.influence(table), n=n, target=target, seed=seed)


def perplexity(
    source: Source,
    n: int = 16,
    length: int | None = None,
    evaluator: str | None = None,
    context: int | None = None,
    seed: int = 0,
    out: Path | None = None,
) -> None:
    """Mean next-token loss by position in the document, and what long context is worth.

    Args:
        source: Checkpoint folder, hub id, or smollm2.
        n: Documents.
        length: Tokens per document; by default the model's context, at most 1,024.
        evaluator: Checkpoint whose key tokens LongPPL is over; one for all models that are compared.
        context: Short context in tokens, for the gain and for LongPPL; by default 256, or half of shorter documents.
        seed: Seed of the documents.
        out: Table to write; the figure and the LongPPL table go beside it.
    """
    from .. import figures
    from ..probes.longppl import long_perplexity
    from ..probes.perplexity import long_context_gain
    from ..probes.perplexity import perplexity as measure
    from .sources import documents_for
    from .tables import provenance, save_table

    file = place("perplexity", source, out)
    model = _load(source)
    documents = documents_for(model, source, n, length=length, seed=seed)
    context = context or min(256, max(1, documents.shape[1] // 2))
    judged = None
    if evaluator is not None:
        judged = long_perplexity(model, documents, _load(evaluator), name=evaluator, context=context)
    table = measure(model, documents)
    show(table)
    if documents.shape[1] >= context + 2:
        gain = long_context_gain(model, documents, context=context)
        print(f"all context over the last {context} tokens is worth {gain:.4g} nats a token")
    if judged is not None:
        show(judged)
        facts = provenance("longppl", source, n=n, seed=seed, evaluator=evaluator, context=context)
        save_table(judged, file.with_name(file.stem + "-longppl.parquet"), facts)
    keep(table, "perplexity", source, file, figures.perplexity(table), n=n, seed=seed)


def fit(
    table: Table,
    constant: bool = False,
    all_sizes: bool = False,
    bootstrap: int = 200,
    seed: int = 0,
    out: Path | None = None,
) -> None:
    """Fit a scaling law to losses of models of several sizes, and predict the largest one from the others.

    Args:
        table: Parquet, CSV or TSV with columns parameters, tokens, loss; one row per run.
        constant: With an irreducible loss.
        all_sizes: Fit the largest model too, rather than hold it out.
        bootstrap: Draws for the intervals.
        seed: Seed of the draws.
        out: Table of the fitted parameters to write; the validation table goes beside it.
    """
    from .fit import fit_table

    fit_table(table, place("fit", table, out), constant, all_sizes, bootstrap, seed)


def cost(
    source: Source,
    length: Names = (),
    batch: int = 1,
    measure: bool = True,
    set_: Set = (),
    out: Path | None = None,
) -> None:
    """Cache bytes by formula and as measured, prefill and decode speed, beside an all-full model of the same widths.

    Args:
        source: A TOML file, the name of a config that comes with hybridscope, or a checkpoint folder of ours.
        length: Tokens of context; by default 1024,4096,16384, as far as the model goes.
        batch: Sequences side by side.
        measure: Run both models as well; without it the formulas alone.
        set_: Overrides of a config, e.g. model.n_layers=24.
        out: Table to write; the figure goes beside it.
    """
    from .. import figures
    from ..hooks.model import HybridLM
    from ..probes.cost import NEW_TOKENS
    from ..probes.cost import cost as take
    from .config import load_config

    file = place("cost", str(Path(source).with_suffix("")), out)
    if Path(source).is_dir():
        if set_:
            raise ValueError(f"--set {set_[0]}: {source} is a checkpoint, not a config")
        model = _load(source)
        if not isinstance(model, HybridLM):
            raise ValueError(
                f"cost: {source} is a transformers checkpoint; costs are known for hybridscope's own models"
            )
        what: Any = model
        config = model.config
    else:
        what = config = load_config(source, list(set_)).hybrid()
    most = (config.context or 2**40) - (NEW_TOKENS if measure else 0)
    lengths = [number("length", n) for n in split(length)] or [n for n in (1024, 4096, 16384) if n <= most] or [most]
    table = take(what, lengths, batch=batch, measure=measure)
    show(table.dropna(axis=1, how="all"))
    keep(table, "cost", source, file, figures.cost(table), batch=batch)


def doctor(json_: Annotated[bool, tyro.conf.arg(name="json")] = False) -> None:
    """Say what this machine has, and which path every recurrent mixer takes on it and why.

    Args:
        json_: Print JSON instead of a table.
    """
    from .doctor import doctor as look
    from .doctor import report as text

    found = look()
    print(json.dumps(found) if json_ else text(found))


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
    from .. import figures
    from .tables import read_table

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


def _load(source: str) -> Any:
    import torch

    from ..hooks.checkpoint import load

    model: Any = load(source)
    return model.to("cuda") if torch.cuda.is_available() else model


def _needles(
    model: Any,
    source: str | Path,
    n: int,
    length: int | None,
    haystack: Haystack | None,
    values: int | None,
    seed: int,
    far: bool = False,
) -> Any:
    """Needles for a model; `far`: none within reach of its window layers."""
    from .sources import needles_for

    distractors = 0 if model.tokenizer is not None else 3
    beyond = max((s.window for s in model.sites if s.window), default=0) if far else 0
    return needles_for(
        model, source, n, length=length, haystack=haystack, values=values, distractors=distractors, beyond=beyond,
        seed=seed,
    )  # fmt: skip


COMMANDS = {
    "demo": demo, "train": train, "probe": probe, "cap": cap, "heads": heads, "track": track, "influence": influence,
    "perplexity": perplexity, "fit": fit, "cost": cost, "plot": plot, "doctor": doctor, "bench": bench,
}  # fmt: skip


def main(args: list[str] | None = None) -> None:
    """Run one command; a user's mistake is one line on stderr and exit status 2."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    # Threads that wait asleep, set before torch loads: spinning ones make a small model many times slower whenever
    # something else runs on the machine.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    from . import report

    report.COMMAND = " ".join(["hybridscope", *(sys.argv[1:] if args is None else args)])
    try:
        tyro.extras.subcommand_cli_from_dict(COMMANDS, prog="hybridscope", description=__doc__, args=args)
    except (ValueError, OSError, ImportError) as error:
        print("error: " + " ".join(str(error).split()), file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
