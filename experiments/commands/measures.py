"""Measurements with needles: probe, cap, heads, track."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from ..report import keep, number, place, show, split
from .options import Haystack, Names, Source, load_source, needles_of


def probe(
    source: Source,
    n: int = 400,
    length: int | None = None,
    target: Literal["value", "depth"] = "value",
    haystack: Haystack | None = None,
    values: int | None = None,
    where: Names = ("pre", "mid", "post"),
    seeds: int = 5,
    seed: int = 0,
    batch: int = 32,
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
        where: Features: the residual stream before the mixer (pre), after it (mid), after the MLP (post), or what the
            mixer adds (delta).
        seeds: Random splits.
        seed: Seed of the prompts.
        batch: Prompts side by side.
        solver: torch fits all layers at once; sklearn one by one, the reference.
        features_dir: Folder to stream features to; a run that was killed goes on from it.
        out: Table to write; the figure goes beside it.
    """
    from ... import figures
    from ...probes.layerwise import measure

    file = place("probe", source, out)
    model = load_source(source)
    values = values if values or model.tokenizer is None else 8
    needles = needles_of(model, source, n, length, haystack, values, seed)
    places: Any = split(where)
    measured = measure(
        model, needles, target, where=places, seeds=seeds, batch=batch, solver=solver, features_dir=features_dir
    )
    table = measured.table()
    columns = ["layer", "kind", "mixer", "accuracy", "low", "high", "gain", "gain_low", "gain_high", "chance"]
    shown = "mid" if "mid" in places else places[-1]
    real: Any = table[(table["control"] == "none") & (table["where"] == shown)]
    show(real[columns].dropna(axis=1, how="all"))
    try:
        show(measured.gains())
    except ValueError as error:
        print(f"gains by part of the model: {error}")
    keep(table, "probe", source, file, lambda: figures.probe_curve(table), n=n, target=target, seed=seed, seeds=seeds)


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
    from ... import figures
    from ...probes.capsweep import cap_sweep
    from ...probes.importance import layer_importance
    from ..report import show_caps
    from ..sources import documents_for
    from ..tables import provenance, save_table

    kinds = list(dict.fromkeys(_listed("kind", kind)))
    file = place("importance" if rank else "cap-layers" if by_layer else "cap", source, out)
    if rank and not by_layer:
        raise ValueError("--rank: ranks layers that are capped one at a time; give --by-layer as well")
    if rank and len(kinds) > 1:
        raise ValueError(f"--kind {','.join(kinds)}: --rank ranks the layers of one kind")
    model = load_source(source)
    needles = needles_of(model, source, n, length, haystack, None, seed)
    tokens = needles.tokens.shape[1]
    least = max((site.conv for site in model.sites), default=1)  # no cap is narrower than a convolution
    windows = [number("window", w) for w in _listed("window", window)]
    windows = windows or [max(least, tokens // 2**i) for i in (1, 2, 3, 4)]
    keep_first = [number("sinks", s) for s in _listed("sinks", sinks)]
    if rank:
        table = layer_importance(model, needles, windows=windows, sinks=keep_first, kind=[*kinds, "full"][0])
        show(table)
        return keep(table, "importance", source, file, lambda: figures.layer_importance(table), n=n, seed=seed)
    texts = documents_for(model, source, n, length=length, seed=seed) if tokens > min(windows) + 1 else None
    table = cap_sweep(
        model, needles, texts, kinds=kinds or None, windows=windows, sinks=keep_first, by_layer=by_layer,
        by_distance=not by_layer,
    )  # fmt: skip
    saved = save_table(table, file, provenance("cap", source, n=n, seed=seed))  # before anything is drawn
    show_caps(table, file)
    print(saved)
    draw = figures.cap_heatmap if by_layer else figures.cap_curves
    print(figures.save(draw(table), file.with_suffix(".png")))


def _listed(name: str, values: tuple[str, ...]) -> list[str]:
    """A list of the command line; ValueError where one was given that holds nothing."""
    found = split(values)
    if values and not found:
        raise ValueError(f"--{name} {' '.join(values)}: expected at least one")
    return found


def heads(
    source: Source,
    n: int = 64,
    length: int | None = None,
    score: Literal["copy", "mass", "qr"] | None = None,
    compat: Literal["qiao2026"] | None = None,
    rows: Literal["answer", "published"] = "answer",
    generate: bool = False,
    all_prompts: bool = False,
    k: int = 10,
    draws: int = 5,
    haystack: Haystack | None = None,
    seed: int = 0,
    batch: int = 16,
    out: Path | None = None,
) -> None:
    """Find retrieval heads, then check them: needle accuracy without the top k against k random heads.

    Heads are found on one set of prompts and ablated on another.

    Args:
        source: Checkpoint folder, hub id, or smollm2.
        n: Prompts to find heads on, and as many to check them on.
        length: Tokens per prompt; by default the model's context, at most 1,024.
        score: copy (the default: most attended key is the token being emitted), mass (attention on the value), or qr
            (attention on the needle from the question, less that from a question that asks nothing).
        compat: As the published script scores; --score mass is implied.
        rows: With --score mass: from the rows of the answer, or as published from the row before the prompt's last.
        generate: Score the answer that greedy decoding gives, instead of the right one.
        all_prompts: Average over prompts that the model does not answer too.
        k: Heads to ablate.
        draws: Draws of random heads.
        haystack: essay and repeat need a tokenizer; by default what suits the model.
        seed: Seed of the prompts.
        batch: Prompts side by side.
        out: Table to write; the figure goes beside it.
    """
    from ... import figures
    from ...probes.causal import causal_check
    from ...probes.needles import answered
    from ...probes.retrieval import retrieval_heads
    from ..tables import provenance, save_table

    file = place("heads", source, out)
    score = score or ("mass" if compat else "copy")
    model = load_source(source)
    find = needles_of(model, source, n, length, haystack, None, seed, far=True)
    check = needles_of(model, source, n, length, haystack, None, seed + 1, far=True)
    right = answered(model, find, batch)
    print(f"answers {int(right.sum())} of {len(find)} needle prompts of {find.tokens.shape[1]} tokens")
    if not (all_prompts or compat or bool(right.any())):
        raise ValueError(f"the model answers none of the {len(find)} prompts; --all-prompts scores them all the same")
    table = retrieval_heads(
        model, find, score, rows=rows, generate=generate, only_answered=not all_prompts, compat=compat, batch=batch
    )
    show(table.head(k))
    settings = {
        "n": n, "score": score, "compat": compat, "seed": seed, "rows": rows, "generate": generate,
        "all_prompts": all_prompts,
    }  # fmt: skip
    if k > len(table) // 2:
        k = len(table) // 2
        print(f"the model has {len(table)} such heads: comparing {k} with {k} others")
    if k:
        effect = causal_check(model, check, table, k=k, draws=draws, seed=seed, batch=batch)
        show(effect.groupby(["ablated", "k"], sort=False, as_index=False)["accuracy"].agg(["mean", "min", "max"]))
        gap = effect[effect["ablated"] == "top"].iloc[0]
        print("effect, top over random: {effect:.3g} [{effect_low:.3g}, {effect_high:.3g}]".format(**gap))
        save_table(effect, file.with_name(f"{file.stem}-causal.parquet"), provenance("causal", source, **settings))
    keep(table, "heads", source, file, lambda: figures.heads_map(table, label=f"{score} score"), **settings)


def track(
    source: Source,
    n: int = 128,
    length: int | None = None,
    top: int = 4,
    heads: Literal["final", "each", "all"] = "final",
    compat: Literal["qiao2026"] | None = None,
    reference: Literal["final", "first", "previous"] = "final",
    activations: bool = False,
    haystack: Haystack | None = None,
    seed: int = 0,
    batch: int = 16,
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
        reference: Step that Q/K drift is measured from.
        activations: Also compare queries, keys and scores on 16 of the prompts with the reference step's.
        haystack: essay and repeat need a tokenizer; by default what suits the model.
        seed: Seed of the prompts.
        batch: Prompts side by side.
        out: Table to write; the figure and the tables of drift, formation and single prompts go beside it.
    """
    from ... import figures
    from ...hooks.ladder import ladder
    from ...probes.activation_drift import activation_drift
    from ...probes.drift import qk_drift
    from ...probes.formation import formation_step
    from ..tables import provenance, read_table, save_table
    from ..track import samples_of, track_to

    steps = ladder(source)
    final = steps.final
    needles = needles_of(final.load(), final.path, n, length, haystack, None, seed, far=True)
    file = place("track", source, out)
    table = track_to(file, steps, needles, None if heads == "final" else heads, top=top, compat=compat, batch=batch)
    followed = [tuple(map(int, h)) for h in table[["layer", "site", "head"]].drop_duplicates().to_numpy()]
    there = set(table["step"])  # a step that was left out above has nothing to compare here either
    measured = [checkpoint for step, checkpoint in steps if step in there]
    drift = qk_drift(measured, heads=followed, reference=reference)
    facts = provenance("drift", source, reference=reference)
    save_table(drift, file.with_name(file.stem + "-drift.parquet"), facts)
    show(table.groupby("step", as_index=False)[["mass", "entropy", "copy", "accuracy"]].mean())
    if activations:
        moved = activation_drift(measured, needles.tokens[:16], followed, reference)
        facts = provenance("activation-drift", source, reference=reference, n=16, seed=seed)
        save_table(moved, file.with_name(file.stem + "-activations.parquet"), facts)
        show(moved.groupby("step", as_index=False)[["q_rel", "k_rel", "score_rel", "attention_tv"]].mean())
    formed = None
    if heads != "all" and "full" in set(table["kind"]):  # the best of all heads would be chosen on what it is shown on
        formed = formation_step(read_table(samples_of(file))[0], seed=seed)
        save_table(formed, file.with_name(file.stem + "-formation.parquet"), provenance("formation", source, seed=seed))
        show(formed)
    print(file)
    figure = figures.formation(table, drift, formed=formed, width=figures.DOUBLE)
    print(figures.save(figure, file.with_suffix(".png")))
