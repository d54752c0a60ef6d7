"""What a model with a tokenizer says to texts: greedy continuations, and log-likelihoods of given ones, in batches."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from ..probes.haystacks import encode

SEPARATOR = "<|endoftext|>"  # between documents, where a tokenizer names no end of its own


@dataclasses.dataclass(frozen=True)
class Scored:
    """Log-likelihood of a continuation in nats, whether greedy decoding gives it, and context tokens cut off."""

    logprob: float
    greedy: bool
    cut: int = 0


def tokenizer_of(model: Any) -> Any:
    """ValueError for a model without a tokenizer."""
    if model.tokenizer is None:
        raise ValueError("this checkpoint has no tokenizer, and the texts are in English")
    return model.tokenizer


def end_of(tokenizer: Any) -> int | None:
    """The token that ends a text: the tokenizer's own, or the separator of documents that it knows; None: neither."""
    if tokenizer.eos_token_id is not None:
        return tokenizer.eos_token_id
    return tokenizer.get_vocab().get(SEPARATOR)


@torch.no_grad()
def continuations(model: Any, prompts: Sequence[list[int]], new_tokens: int) -> list[str]:
    """Greedy continuations of one batch of prompts, padded on the left, up to the end of the text."""
    tokenizer = tokenizer_of(model)
    end, longest = end_of(tokenizer), max(map(len, prompts))
    tokens = torch.zeros(len(prompts), longest, dtype=torch.long)
    real = torch.zeros(len(prompts), longest, dtype=torch.bool)
    for row, ids in enumerate(prompts):
        tokens[row, longest - len(ids) :] = torch.tensor(ids)
        real[row, longest - len(ids) :] = True
    device = next(model.parameters()).device
    mask = None if bool(real.all()) else real.to(device)
    out = model.generate(tokens.to(device), new_tokens, attention_mask=mask, eos_token_id=end)
    texts = []
    for ids in out[:, longest:].tolist():
        until = ids.index(end) if end in ids else len(ids)
        texts.append(tokenizer.decode(ids[:until], skip_special_tokens=True))
    return texts


def pair(tokenizer: Any, context: str, continuation: str) -> tuple[list[int], int]:
    """Token ids of both together, and where the continuation starts; spaces between belong to the continuation."""
    bare = context.rstrip()
    ids, offsets = encode(tokenizer, context + continuation)
    start = len(encode(tokenizer, bare)[0]) if bare else sum(1 for place in offsets if place == (0, 0))
    if start == 0:  # nothing to predict the first token from
        end = end_of(tokenizer)
        ids, start = [ids[0] if end is None else end, *ids], 1
    return ids, min(start, len(ids) - 1)


@torch.no_grad()
def loglikelihoods(model: Any, pairs: Sequence[tuple[list[int], int]], batch: int = 8) -> list[Scored]:
    """Log-likelihood of each continuation: of `ids[start:]` after `ids[:start]`, for each (ids, start).

    What is longer than the model's context loses its first tokens. Raises ValueError where the continuation alone does
    not fit.
    """
    device = next(model.parameters()).device
    most = 2**62 if model.context is None else model.context + 1  # the last token is not read
    found: dict[int, Scored] = {}
    order = sorted(range(len(pairs)), key=lambda i: -len(pairs[i][0]))
    for first in range(0, len(order), batch):
        part = order[first : first + batch]
        rows = []
        for i in part:
            ids, start = pairs[i]
            cut = max(0, len(ids) - most)
            if start - cut < 1:
                raise ValueError(f"a continuation of {len(ids) - start} tokens exceeds the context of {model.context}")
            rows.append((ids[cut:], start - cut, cut))
        tokens = torch.zeros(len(rows), max(len(ids) for ids, _, _ in rows) - 1, dtype=torch.long)
        for row, (ids, _, _) in enumerate(rows):
            tokens[row, : len(ids) - 1] = torch.tensor(ids[:-1])
        hidden = model.hidden(tokens.to(device))  # padding lies behind what is read
        wanted = torch.cat([hidden[row, start - 1 : len(ids) - 1] for row, (ids, start, _) in enumerate(rows)])
        target = torch.cat([torch.tensor(ids[start:]) for ids, start, _ in rows]).to(device)
        logits = model.unembed_hidden(wanted[None])[0].float()
        logprobs = logits.log_softmax(-1).gather(-1, target[:, None])[:, 0].cpu()
        right = (logits.argmax(-1) == target).cpu()
        sizes = [len(ids) - start for ids, start, _ in rows]
        for i, (_, _, cut), values, hits in zip(part, rows, logprobs.split(sizes), right.split(sizes), strict=True):
            found[i] = Scored(float(values.double().sum()), bool(hits.all()), cut)
    return [found[i] for i in range(len(pairs))]
