"""Measurements on plain text: influence, perplexity; and fit."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from ..report import keep, place, show
from .options import Source, Table, at_least_one, load_source


def influence(
    source: Source,
    n: int = 16,
    length: int | None = None,
    target: Literal["loss", "logit_sum", "argmax_logit"] = "loss",
    bins: int = 24,
    seed: int = 0,
    out: Path | None = None,
) -> None:
    """Gradient influence: how strongly the output depends on each input token, by distance.

    Args:
        source: Checkpoint folder, hub id, or smollm2.
        n: Documents.
        length: Tokens per document; by default the model's context, at most 1,024.
        target: The next token's loss, or the published logit targets.
        bins: Log-spaced bins of distance; 0: every distance by itself.
        seed: Seed of the documents.
        out: Table to write; the figure goes beside it.
    """
    from ... import figures
    from ...probes.influence import gradient_influence
    from ..sources import documents_for

    file = place("influence", source, out)
    at_least_one(n=n, length=length)
    model = load_source(source)
    documents = documents_for(model, source, n, length=length, seed=seed)
    table = gradient_influence(model, documents, target=target, bins=bins or None, seed=seed)
    if bins:
        show(table.drop(columns="target"))
    keep(table, "influence", source, file, lambda: figures.influence(table), n=n, target=target, bins=bins, seed=seed)


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
        out: Table to write; the figure and the tables of the gain and of LongPPL go beside it.
    """
    from ... import figures
    from ...probes.longppl import long_perplexity
    from ...probes.perplexity import long_context_gain
    from ...probes.perplexity import perplexity as measure
    from ..sources import documents_for
    from ..tables import provenance, save_table

    file = place("perplexity", source, out)
    at_least_one(n=n, length=length, context=context)
    model = load_source(source)
    documents = documents_for(model, source, n, length=length, seed=seed)
    if context is not None and documents.shape[1] < context + 2:
        raise ValueError(f"--context {context}: documents of {documents.shape[1]} tokens are too short to compare with")
    context = context or min(256, max(1, documents.shape[1] // 2))
    judged = None
    if evaluator is not None:
        judged = long_perplexity(model, documents, load_source(evaluator), name=evaluator, context=context)
    table = measure(model, documents)
    show(table)
    if documents.shape[1] >= context + 2:
        gain = long_context_gain(model, documents, context=context)
        print("\nwhat all context is worth over the last tokens alone (nats a token)")
        show(gain)
        facts = provenance("gain", source, n=n, seed=seed, context=context)
        save_table(gain, file.with_name(file.stem + "-gain.parquet"), facts)
    if judged is not None:
        show(judged)
        facts = provenance("longppl", source, n=n, seed=seed, evaluator=evaluator, context=context)
        save_table(judged, file.with_name(file.stem + "-longppl.parquet"), facts)
    keep(table, "perplexity", source, file, lambda: figures.perplexity(table), n=n, seed=seed)


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
    from ..fit import fit_table

    fit_table(table, place("fit", table, out), constant, all_sizes, bootstrap, seed)
