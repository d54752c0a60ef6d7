"""Needle prompts as the tracing scripts of arXiv 2606.15378 read them, for `compat="qiao2026"`.

Compared with thunlp/rethinking-hybrid-attention at commit feaad08: src/tracing/find_retrieval_heads.py (mass) and
compute_attention_metrics.py (entropy), run on small models; tests/probes/test_published.py holds their numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

Compat = Literal["qiao2026"]
LONGEST = 8192  # tokens of a prompt; what is longer loses its end, question and all
PROMPT = ("input", "prompt", "text", "context", "question")
ANSWERS = ("outputs", "answer", "needle", "target")


def check_compat(compat: str | None) -> None:
    """ValueError for scripts that we do not know."""
    if compat not in (None, "qiao2026"):
        raise ValueError(f'compat={compat!r}: expected "qiao2026" or None')


def read_row(row: Mapping[str, Any]) -> tuple[str, list[str]]:
    """A row's prompt, from the first of five fields that holds text, and every answer that its four fields name."""
    prompt = next((row[k] for k in PROMPT if isinstance(row.get(k), str) and row[k].strip()), "")
    answers = []
    for name in ANSWERS:
        given = row.get(name)
        if isinstance(given, str) and given.strip():
            answers.append(given.strip())
        elif isinstance(given, list):
            answers += [str(x) for x in given if str(x).strip()]
    return prompt, list(dict.fromkeys(answers))


def spellings(tokenizer: Any, answers: Iterable[str]) -> list[list[int]]:
    """The token sequences that count as an answer: bare, after a space or a colon and a space, and each of these with
    a full stop. So the colon before a needle's value and the stop behind it count where they are tokens of their own.
    """
    texts = [before + x + after for x in answers for before in ("", " ", ": ") for after in ("", ".")]
    found = tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []
    return [list(ids) for ids in dict.fromkeys(map(tuple, found)) if ids]


def occurrences(tokens: Tensor, patterns: Iterable[Sequence[int]]) -> Tensor:
    """Where any of the sequences stands in `tokens` [T], overlapping or not: bool [T]."""
    where = torch.zeros(len(tokens), dtype=torch.bool)
    for pattern in patterns:
        size = len(pattern)
        if size > len(tokens):
            continue
        found = (tokens.unfold(0, size, 1) == torch.tensor(list(pattern))).all(1).nonzero()[:, 0]
        where[(found[:, None] + torch.arange(size)).flatten()] = True
    return where
