"""What tests of retrieval heads share: prompts of a few tokens, prompts that cannot be answered, one head's score."""

from __future__ import annotations

import dataclasses

import torch
from planted import LANGUAGE

import hybridscope as hs

CLOSE = 1e-9


def score_of(table, layer, head) -> float:
    return float(table.query("layer == @layer and head == @head")["score"].iloc[0])


def unanswerable(prompts: hs.Needles, which: slice) -> hs.Needles:
    """The same prompts, some without their needle."""
    tokens = prompts.tokens.clone()
    tokens[which] = prompts.removed[which]
    return dataclasses.replace(prompts, tokens=tokens)


def told(value: list[int], key: int = 3) -> hs.Needles:
    """One prompt with a value of several tokens."""
    filler = LANGUAGE.first_filler
    start = [0, filler, filler + 1, LANGUAGE.MARKER, key]
    tokens = torch.tensor([[*start, *value, filler + 2, filler + 3, LANGUAGE.MARKER, key, *value[:-1]]])
    A, end = len(value), tokens.shape[1]
    span = torch.tensor([[len(start), len(start) + A]])
    none = torch.tensor([-1])
    return hs.Needles(
        tokens=tokens, answer_rows=torch.arange(end - A, end)[None], answers=torch.tensor([value]),
        spans={"needle": span + torch.tensor([-2, 0]), "value": span}, labels={"value": none, "depth": none},
        group=torch.tensor([0]), depth=torch.tensor([0.5]),
    )  # fmt: skip
