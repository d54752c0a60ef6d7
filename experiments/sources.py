"""Needles that suit a model: English for one with a tokenizer, the token language for one trained on it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..hooks.checkpoint import CONFIG, Checkpoint, read_json
from ..probes.haystacks import TokenLanguage, addresses
from ..probes.needles import Needles, make_needles
from .config import DataConfig
from .corpus import corpus

FRESH = 10**6  # seeds from here on are nobody's training data


def needles_for(
    model: Any, source: str | Path, n: int, *, length: int | None = None, haystack: str | None = None,
    values: int | None = None, depth: tuple[int | float, int | float] = (0, 1), distractors: int = 0, beyond: int = 0,
    seed: int = 0,
) -> Needles:  # fmt: skip
    """N needle prompts in the language of `model`, loaded from `source`.

    Without a `length`: the model's context, at most 1,024 tokens. `beyond`: leave out needles no farther back than this
    many tokens. Raises ValueError where the model has neither a tokenizer nor a note of the token language it was
    trained on, `length` exceeds its context, or no needle lies far enough.
    """
    if beyond:
        made = needles_for(
            model, source, 3 * n, length=length, haystack=haystack, values=values, depth=depth,
            distractors=distractors, seed=seed,
        )  # fmt: skip
        far = made[made.distance > beyond][:n]
        if not len(far):
            raise ValueError(f"length={made.tokens.shape[1]}: too short for needles more than {beyond} tokens back")
        return far
    tokens = _length(model, length)
    common: dict[str, Any] = {"depth": depth, "distractors": distractors, "seed": seed}
    if model.tokenizer is not None:
        name: Any = haystack or "essay"
        return make_needles(n, tokens, haystack=name, tokenizer=model.tokenizer, values=values, **common)
    if haystack not in (None, "tokens"):
        raise ValueError(f"haystack={haystack!r} needs a tokenizer, and this checkpoint has none")
    language = language_of(source)
    return make_needles(n, tokens, values=values or language.values, language=language, **common)


def language_of(source: str | Path | Checkpoint) -> TokenLanguage:
    """The token language that a checkpoint was trained on, from its config.json; ValueError where it names none."""
    source = source.path if isinstance(source, Checkpoint) else source
    file = Path(source) / CONFIG
    data = read_json(file).get("data") if file.is_file() else None
    if not data or data.get("file") is not None:
        raise ValueError(f"{source}: has no tokenizer, and its config.json names no token language to make needles in")
    return TokenLanguage(data["vocab_size"], data["keys"], data["values"])


def documents_for(model: Any, source: str | Path, n: int, *, length: int | None = None, seed: int = 0) -> Tensor:
    """N documents [n, length] to measure loss on: real text for a model with a tokenizer, else fresh data of the kind
    that the checkpoint was trained on. Raises as `needles_for` does."""
    tokens = _length(model, length)
    if model.tokenizer is None:
        data = read_json(Path(source) / CONFIG).get("data") if (Path(source) / CONFIG).is_file() else None
        if not data:
            raise ValueError(f"{source}: has no tokenizer, and its config.json does not say what it was trained on")
        fresh = corpus(DataConfig(**{"length": tokens, **data}))
        return fresh.batch(FRESH + seed, 0, n)[0][:, :tokens]
    ids = model.tokenizer("\n".join(addresses()), add_special_tokens=False)["input_ids"]
    if len(ids) < n * tokens:
        raise ValueError(f"n={n}, length={tokens}: the packaged text has only {len(ids)} tokens")
    starts = np.linspace(0, len(ids) - tokens, n).astype(int)
    return torch.tensor(np.stack([ids[s : s + tokens] for s in starts]))


def _length(model: Any, length: int | None) -> int:
    tokens = length or min(model.context or 1024, 1024)
    if model.context is not None and tokens > model.context:
        raise ValueError(f"length={tokens}: longer than the model's context of {model.context}")
    return tokens
