"""Records of single samples, one JSON line each: a run that was killed goes on from them. And their intervals."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..probes.intervals import interval, resample, share_interval

DRAWS = 1000


class Records:
    """The records of one measurement in a file, by their `key` fields.

    `run` names the measurement (see `run_name`) and stands in every line. Raises ValueError for a file of another one.
    A last line that was cut short by a kill is dropped.
    """

    def __init__(self, path: str | Path, run: str, key: Sequence[str]) -> None:
        self.path, self.run, self.key = Path(path), run, tuple(key)
        self.done: dict[tuple[Any, ...], dict[str, Any]] = {}
        if self.path.is_file():
            self._read()

    def _read(self) -> None:
        data = self.path.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        for number, line in enumerate(whole.splitlines(), 1):
            try:
                record = json.loads(line)
                name, place = record["run"], tuple(record[k] for k in self.key)
            except (ValueError, KeyError, TypeError):
                raise ValueError(f"{self.path}: line {number} is not a record of this measurement") from None
            if name != self.run:
                raise ValueError(
                    f"{self.path}: holds another measurement (other weights, config, caps, tokenizer, data or seed); "
                    f"choose another --out"
                )
            self.done[place] = record
        if len(whole) < len(data):
            os.truncate(self.path, len(whole))

    def __contains__(self, place: tuple[Any, ...]) -> bool:
        return place in self.done

    def add(self, records: Iterable[dict[str, Any]]) -> None:
        """Append those that are not there yet; they are on the disk when this returns."""
        lines = []
        for record in records:
            place = tuple(record[k] for k in self.key)
            if place not in self.done:
                self.done[place] = record = {**record, "run": self.run}
                lines.append(json.dumps(record) + "\n")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path, "a", encoding="utf-8") as file:
            file.write("".join(lines))
            file.flush()
            os.fsync(file.fileno())


def run_name(model: Any, weights: str, **settings: Any) -> str:
    """A name for all that the records of a measurement depend on: weights, caps in force, tokenizer, settings.

    Raises ValueError inside ablate, edit or knockout blocks, which have no name.
    """
    if any(site.knockout or site.edit for site in model.sites):
        raise ValueError("records: of the switches only caps are kept with the records; leave the other blocks")
    caps = [(site.layer, site.index, site.cap, site.sinks) for site in model.sites if site.cap is not None]
    facts = [weights, caps, tokenizer_hash(model.tokenizer), settings]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:12]


def tokenizer_hash(tokenizer: Any) -> str:
    """Of everything that decides which ids a text becomes. Raises ValueError for one that is not a fast tokenizer."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ValueError(f"{type(tokenizer).__name__}: expected a fast tokenizer (one with a tokenizer.json)")
    return hashlib.sha256(backend.to_str().encode()).hexdigest()


def score_interval(values: Sequence[float], seed: int = 0) -> tuple[float, float, float]:
    """Mean of scores in [0, 1] and its 95% interval: Wilson's where all are 0 or 1, else bootstrap over samples."""
    scores = np.asarray(values, dtype=float)
    if set(np.unique(scores)) <= {0.0, 1.0}:
        low, high = share_interval(int(scores.sum()), len(scores))
    else:
        draws = resample(len(scores), DRAWS, np.random.default_rng(seed)) @ scores / len(scores)
        low, high = map(float, interval(draws))
    return float(scores.mean()), low, high


def average_interval(parts: Sequence[tuple[float, float, float]]) -> tuple[float, float, float]:
    """Average of independent (value, low, high) and its interval from theirs: distances to their ends add up in
    squares (Zou and Donner 2008), so it has a width where all values are 0 or 1."""
    value = sum(v for v, _, _ in parts) / len(parts)
    below = math.sqrt(sum((v - low) ** 2 for v, low, _ in parts)) / len(parts)
    above = math.sqrt(sum((high - v) ** 2 for v, _, high in parts)) / len(parts)
    return value, value - below, value + above
