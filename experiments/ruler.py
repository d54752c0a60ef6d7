"""RULER (arXiv 2404.06654): 13 synthetic long-context tasks, made by the generator of nvidia-long-context-eval."""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm.auto import tqdm

from ..hooks.checkpoint import atomic_file
from ..probes.arguments import at_least_one
from ..probes.features import architecture
from ..probes.haystacks import encode
from .answers import continuations, tokenizer_of
from .records import Records, average_interval, run_name, score_interval, tokenizer_hash

if TYPE_CHECKING:
    import pandas as pd

TASKS = (
    "niah_single_1", "niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multikey_2", "niah_multikey_3",
    "niah_multivalue", "niah_multiquery", "vt", "cwe", "fwe", "qa_1", "qa_2",
)  # fmt: skip
PACKAGE = "nvidia-long-context-eval"
NEEDS = ("long_context_eval", "wonderwords", "nltk", "tenacity", "scipy", "yaml")
SEED = 42  # of the published data
QUIET = 300.0  # seconds without a sign of life after which a generator is taken to loop
GUARD = """
import os, runpy, sys, threading

def end():
    os.read(0, 1)
    os._exit(1)

threading.Thread(target=end, daemon=True).start()
sys.argv = sys.argv[1:]
sys.path[0] = os.path.dirname(sys.argv[0])
runpy.run_path(sys.argv[0], run_name="__main__")
"""  # a script that ends with the process that holds its standard input
CONTROL = re.compile(r"[\x00-\x1f]")
KEY = ("task", "length", "index")


def ruler(
    model: Any,
    lengths: Sequence[int],
    samples: str | Path,
    *,
    weights: str,
    tasks: Sequence[str] = TASKS,
    n: int = 100,
    batch: int = 8,
    seed: int = SEED,
    prompts: str | Path | None = None,
) -> pd.DataFrame:
    """Scores of `model` by task and length, [length, task, score, low, high, n, empty, tokens].

    `score`: share of the references that stand in the answer, case ignored (qa: whether any does), mean over samples;
    `low`, `high` its 95% interval; `empty` the share of empty answers; `tokens` the mean length of the prompts as made.
    Task `average` is over the tasks of its length. A length counts prompt and answer. One line per sample goes to the
    file `samples` after each batch, and a run that was killed goes on from there; `weights` names the model in it.
    `prompts`: folder of the made prompts (by default beside `samples`), which models with the same tokenizer can share.

    Raises ValueError for an unknown task, a model without a tokenizer, a length beyond its context, or one too short
    for a task; ImportError where the generator is not installed.
    """
    check(tasks, n)
    at_least_one(batch=batch)
    tokenizer_of(model)
    for length in lengths:
        at_least_one(length=length)
        if model.context is not None and length > model.context:
            raise ValueError(f"length={length}: longer than the model's context of {model.context}")
    version = importlib.metadata.version(PACKAGE)
    run = run_name(model, weights, measurement="ruler", generator=version, seed=seed, config=architecture(model))
    records = Records(samples, run, KEY)
    folder = Path(prompts) if prompts is not None else records.path.parent / "prompts"
    for length in lengths:
        for task in tasks:
            rows = make_prompts(task, length, n, model.tokenizer, folder, seed=seed)
            answer(model, task, length, rows, records, batch)
    wanted = [r for r in records.done.values() if r["length"] in lengths and r["task"] in tasks and r["index"] < n]
    return score_table(wanted)


def check(tasks: Sequence[str], n: int) -> None:
    """What can be refused without a model: unknown tasks, no samples, no generator."""
    for task in tasks:
        if task not in TASKS:
            raise ValueError(f"task {task!r}: RULER has {', '.join(TASKS)}")
    if n < 1:
        raise ValueError(f"n={n}: expected at least one sample")
    package()


def package() -> Path:
    """The folder of the generator package; ImportError says what to install."""
    missing = [name for name in NEEDS if importlib.util.find_spec(name) is None]
    if missing:
        raise ImportError(
            f"RULER: {', '.join(missing)} not installed; pip install 'hybridscope[eval]', or only what is needed: "
            f"pip install --no-deps {PACKAGE} wonderwords nltk tenacity scipy"
        )
    spec = importlib.util.find_spec("long_context_eval")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return Path(next(iter(spec.submodule_search_locations)))


def describe(task: str) -> tuple[str, dict[str, Any], str, int]:
    """A task as the package defines it: generator, its arguments, prompt template, tokens of the answer."""
    import yaml

    facts = yaml.safe_load((package() / "synthetic.yaml").read_text())[task]
    base = importlib.import_module("long_context_eval.data.synthetic.constants").TASKS[facts["task"]]
    return facts["task"], facts["args"], base["template"] + base["answer_prefix"], base["tokens_to_generate"]


def make_prompts(
    task: str, length: int, n: int, tokenizer: Any, folder: Path, *, seed: int = SEED
) -> list[dict[str, Any]]:
    """The first `n` samples of a task with `input`, `outputs`, `index`, from the package's generator.

    They are kept in `folder` under a name that holds the tokenizer's hash, and made once. Raises ValueError where the
    generator fails or loops, as it does at lengths too short for a task.
    """
    facts = f"{importlib.metadata.version(PACKAGE)} {seed} {tokenizer_hash(tokenizer)}"
    file = folder / f"{task}-{length}-{hashlib.sha256(facts.encode()).hexdigest()[:8]}.jsonl"
    if file.is_file():
        rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        if len(rows) >= n:
            return rows[:n]
    generator, arguments, template, answer_tokens = describe(task)
    # The one generator that forgets to leave room for the answer.
    most = length - answer_tokens if generator == "freq_words_extraction" else length
    with tempfile.TemporaryDirectory() as temporary:
        save_tokenizer(tokenizer, Path(temporary) / "tokenizer")
        options = {
            "save_dir": temporary, "save_name": task, "subset": "validation", "tokenizer_type": "hf",
            "tokenizer_path": f"{temporary}/tokenizer", "max_seq_length": most, "tokens_to_generate": answer_tokens,
            "num_samples": n, "random_seed": seed, "template": template, **arguments,
        }  # fmt: skip
        # Guarded, since a generator that loops would outlive a run that was killed.
        command = [sys.executable, "-u", "-c", GUARD, str(package() / "data/synthetic" / f"{generator}.py")]
        command += [text for name, value in options.items() for text in (f"--{name}", str(value))]
        what = f"RULER {task} at {length} tokens"
        watch(command, what, Path(temporary) / "log")
        text = (Path(temporary) / task / "validation.jsonl").read_text(encoding="utf-8")
    rows = [json.loads(line) for line in text.splitlines()]
    with atomic_file(file) as target:
        target.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return rows


def watch(command: list[str], what: str, log: Path, quiet: float = QUIET) -> None:
    """Run a generator to its end; one that fails, or says nothing for `quiet` seconds, is a ValueError."""
    # nltk finds its sentence splitter where llama-index-core brings it.
    nltk_data = [os.environ.get("NLTK_DATA", ""), punkt_folder()]
    modules = [str(package() / "data"), str(package().parent), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
        "NLTK_DATA": os.pathsep.join(filter(None, nltk_data)), "PYTHONPATH": os.pathsep.join(filter(None, modules)),
    }  # fmt: skip
    with open(log, "wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT, env=environment
        )
    size, since = 0, time.monotonic()
    try:
        while process.poll() is None:
            time.sleep(0.05)
            if log.stat().st_size != size:
                size, since = log.stat().st_size, time.monotonic()
            elif time.monotonic() - since > quiet:
                raise ValueError(f"{what}: no sample in {quiet:g} s; the generator loops where a length is too short")
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()
    if process.returncode:
        said = log.read_text(errors="replace")
        if "punkt" in said:
            raise ValueError(
                f"{what}: the essays are cut into sentences by nltk's punkt_tab, which is not here: python -m "
                f"nltk.downloader punkt_tab, or without a hub pip install --no-deps llama-index-core"
            )
        raise ValueError(f"{what}: the generator failed: {said.strip().splitlines()[-1] if said.strip() else '?'}")


def punkt_folder() -> str:
    """Where llama-index-core keeps nltk's data, or nothing."""
    try:
        found = importlib.metadata.distribution("llama-index-core")
    except importlib.metadata.PackageNotFoundError:
        return ""
    return str(found.locate_file("llama_index/core/_static/nltk_cache"))


def save_tokenizer(tokenizer: Any, folder: Path) -> None:
    """The bare fast tokenizer: the generator loads it with trust_remote_code, so nothing else may be in there."""
    from transformers import PreTrainedTokenizerFast

    PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer).save_pretrained(folder)


def answer(
    model: Any, task: str, length: int, rows: Sequence[dict[str, Any]], records: Records, batch: int = 8
) -> None:
    """Answer samples in batches, each on the disk before the next; a batch of which some are missing is run whole, so
    that a run that goes on gives the same answers."""
    wanted = describe(task)[3]
    parts = [rows[start : start + batch] for start in range(0, len(rows), batch)]
    for part in tqdm(parts, desc=f"{task} {length}", leave=False):
        if all((task, length, row["index"]) in records for row in part):
            continue
        ids = [encode(model.tokenizer, row["input"])[0] for row in part]
        # `vt` counts its example apart from the prompt, which makes some prompts a few tokens too long.
        room = wanted if model.context is None else model.context + 1 - max(map(len, ids))
        if room < 1:
            raise ValueError(f"{task} at {length}: a prompt of {max(map(len, ids))} tokens exceeds {model.context}")
        answers = continuations(model, ids, min(wanted, room))
        records.add(
            {
                "task": task, "length": length, "index": row["index"], "tokens": len(given), "pred": pred,
                "outputs": row["outputs"], "score": score(task, pred, row["outputs"]),
            }
            for row, given, pred in zip(part, ids, answers, strict=True)
        )  # fmt: skip


def clean(answer: str) -> str:
    """An answer as the published scorer sees it: control characters are line ends, nothing around it."""
    return CONTROL.sub("\n", answer.strip()).strip()


def score(task: str, answer: str, references: Sequence[str]) -> float:
    """Share of the references that stand in the answer, case ignored; for qa whether any does. In [0, 1]."""
    if not references:
        raise ValueError(f"{task}: a sample without references")
    said = clean(answer).lower()
    hits = [reference.lower() in said for reference in references]
    return float(any(hits)) if task.startswith("qa") else sum(hits) / len(hits)


def score_table(records: Sequence[dict[str, Any]]) -> pd.DataFrame:
    """[length, task, score, low, high, n, empty, tokens] of records, with the average over the tasks of each length."""
    import pandas as pd

    if not records:
        raise ValueError("RULER: no samples")
    rows = []
    for length in sorted({r["length"] for r in records}):
        parts, all_of_it = [], []
        for task in TASKS:
            own = [r for r in records if (r["length"], r["task"]) == (length, task)]
            if not own:
                continue
            parts.append(score_interval([r["score"] for r in own]))
            all_of_it += own
            rows.append((length, task, *parts[-1], *_counts(own)))
        rows.append((length, "average", *average_interval(parts), *_counts(all_of_it)))
    return pd.DataFrame(rows, columns=["length", "task", "score", "low", "high", "n", "empty", "tokens"])


def _counts(records: Sequence[dict[str, Any]]) -> tuple[int, float, float]:
    n = len(records)
    return n, sum(not clean(r["pred"]) for r in records) / n, sum(r["tokens"] for r in records) / n
