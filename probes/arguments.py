"""What every measurement checks of its arguments before it runs a model on them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from ..hooks.config import whole_number


def at_least_one(**counts: Any) -> None:
    """ValueError naming the first of these counts that is no whole number or below 1."""
    for name, count in counts.items():
        if (whole_number(count) or 0) < 1:
            raise ValueError(f"{name}={count}: expected >= 1, a whole number")


def whole_numbers(name: str, values: Any, least: int) -> list[int]:
    """These numbers in their order, each once; ValueError for what is no list, an empty one, and for what is no whole
    number or below `least`."""
    try:
        found = [whole_number(value) for value in values]
    except TypeError:
        found = []
    kept = [number for number in dict.fromkeys(found) if number is not None and number >= least]
    if not kept or len(kept) < len(set(found)):
        raise ValueError(f"{name}={values!r}: expected a list of whole numbers >= {least}")
    return kept


def columns_of(rows: Any, length: int) -> list[int]:
    """Columns of documents of so many tokens, in the order given, negative ones counted from the end; ValueError for
    what is no list, an empty one, and for what is no whole number or no column."""
    try:
        found = [whole_number(row) for row in rows]
    except TypeError:
        found = []
    if not found or None in found:
        raise ValueError(f"rows={rows!r}: expected a list of columns, whole numbers, at least one")
    given = [row for row in found if row is not None]
    for row in given:
        if not -length <= row < length:
            raise ValueError(f"rows: {row} does not fit {length} tokens")
    return [row % length for row in given]


def check_prompts(needles: Sequence[Any] | Any) -> None:
    """ValueError for needles without a prompt: a mean over none is no number."""
    if not len(needles):
        raise ValueError("needles: no prompts given; expected at least one")


def check_documents(tokens: Any, least: int = 1, name: str = "tokens") -> None:
    """ValueError, naming the argument `name`, for what is not documents [B,T] of at least `least` tokens."""
    shape = tuple(tokens.shape) if isinstance(tokens, Tensor) else None
    if shape is None or len(shape) != 2 or shape[0] < 1 or shape[1] < least:
        found = type(tokens).__name__ if shape is None else f"shape {shape}"
        more = f" with T >= {least}" if least > 1 else ""
        raise ValueError(f"{name}: {found}; expected a tensor of documents [B,T]{more}")


def head_tuples(heads: Iterable[Any]) -> list[tuple[int, ...]]:
    """Heads as tuples of whole numbers; ValueError for an empty list and for what is no (layer, head) or (layer, site,
    head). Whether a model has them is for the model to say."""
    found = []
    for head in heads:
        try:
            numbers = tuple(int(part) for part in head)
            whole = all(n == part for n, part in zip(numbers, head, strict=True))
        except (TypeError, ValueError):
            numbers, whole = (), False
        if not whole or len(numbers) not in (2, 3):
            raise ValueError(f"head {head!r}: expected (layer, head) or (layer, site, head)")
        found.append(numbers)
    if not found:
        raise ValueError("heads: an empty list; None means all heads, or those that are chosen")
    return found
