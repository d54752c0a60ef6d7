"""Needles that suit a model: English for one with a tokenizer, the token language for one trained on it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..hooks.checkpoint import CONFIG, read_json
from ..probes.haystacks import TokenLanguage
from ..probes.needles import Needles, make_needles


def needles_for(
    model: Any, source: str | Path, n: int, *, length: int | None = None, haystack: str | None = None,
    values: int | None = None, depth: tuple[int | float, int | float] = (0, 1), distractors: int = 0, seed: int = 0,
) -> Needles:  # fmt: skip
    """N needle prompts in the language of `model`, loaded from `source`.

    Without a `length`: the model's context, at most 1,024 tokens. Raises ValueError where the model has neither a
    tokenizer nor a note of the token language it was trained on, or `length` exceeds its context.
    """
    longest = model.context
    tokens = length or min(longest or 1024, 1024)
    if longest is not None and tokens > longest:
        raise ValueError(f"length={tokens}: longer than the model's context of {longest}")
    common: dict[str, Any] = {"depth": depth, "distractors": distractors, "seed": seed}
    if model.tokenizer is not None:
        name: Any = haystack or "essay"
        return make_needles(n, tokens, haystack=name, tokenizer=model.tokenizer, values=values, **common)
    if haystack not in (None, "tokens"):
        raise ValueError(f"haystack={haystack!r} needs a tokenizer, and this checkpoint has none")
    language = language_of(source)
    return make_needles(n, tokens, values=values or language.values, language=language, **common)


def language_of(source: str | Path) -> TokenLanguage:
    """The token language that a checkpoint was trained on, from its config.json."""
    file = Path(source) / CONFIG
    data = read_json(file).get("data") if file.is_file() else None
    if not data or data.get("file") is not None:
        raise ValueError(f"{source}: has no tokenizer, and its config.json names no token language to make needles in")
    return TokenLanguage(data["vocab_size"], data["keys"], data["values"])
