"""Training data. Batches are a function of (seed, step), so that a resumed run sees exactly what it would have seen.

A batch is tokens [B,T] and the weight [B,T-1] of each token's loss.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ..probes.haystacks import TokenLanguage

if TYPE_CHECKING:
    from .config import DataConfig


SHORTEST_COPY = 20  # tokens of a sequence in which a stretch of 8 and its copy leave a choice


class TokenMixture:
    """The synthetic language: some sequences repeat a stretch of random tokens, the others ask for planted needles.

    Copying a repeated stretch is a dense signal; needles alone teach a small model nothing in the same budget.
    """

    def __init__(self, data: DataConfig) -> None:
        self.data = data
        self.language = TokenLanguage(data.vocab_size, data.keys, data.values)
        needed = 1 + 6 * data.needles
        if data.length < needed:
            raise ValueError(f"data.length={data.length}: {data.needles} needles, each asked again, take {needed}")
        if data.needles > data.keys:
            raise ValueError(f"data.needles={data.needles}: more than the {data.keys} keys")
        if data.copy_share > 0 and data.length < SHORTEST_COPY:
            raise ValueError(f"data.length={data.length}: repeated stretches (data.copy_share) take {SHORTEST_COPY}")

    def batch(self, seed: int, step: int, size: int) -> tuple[Tensor, Tensor]:
        rng = np.random.default_rng((seed, step))
        copies = round(size * self.data.copy_share)
        tokens, weight = self.needles(rng, size - copies)
        copied, copied_weight = self.copies(rng, copies)
        return (
            torch.from_numpy(np.concatenate([tokens, copied])),
            torch.from_numpy(np.concatenate([weight, copied_weight])),
        )

    def needles(self, rng: np.random.Generator, n: int) -> tuple[np.ndarray, np.ndarray]:
        """Filler with planted (marker, key, value), each asked again once: (marker, key, value)."""
        d, lang, T = self.data, self.language, self.data.length
        tokens = lang.filler(rng, n, T)
        weight = np.full((n, T - 1), d.filler_weight, dtype=np.float32)
        k = d.needles
        keys = 2 + rng.permuted(np.tile(np.arange(lang.keys), (n, 1)), axis=1)[:, :k]
        values = rng.integers(lang.first_value, lang.first_filler, (n, k))
        which = rng.permuted(np.tile(np.repeat(np.arange(k), 2), (n, 1)), axis=1)  # first is told, second asked
        gaps = np.sort(rng.integers(0, T - 6 * k, (n, 2 * k)), axis=1)
        columns = 1 + gaps + 3 * np.arange(2 * k)
        row = np.arange(n)[:, None]
        tokens[row, columns] = lang.MARKER
        tokens[row, columns + 1] = np.take_along_axis(keys, which, 1)
        tokens[row, columns + 2] = np.take_along_axis(values, which, 1)
        asked = np.array([[list(r[:i]).count(x) for i, x in enumerate(r)] for r in which]).reshape(n, 2 * k) == 1
        weight[row, columns] = 0  # which key comes next, and a told value, nobody can know
        weight[row, columns + 1] = asked
        return tokens, weight

    def copies(self, rng: np.random.Generator, n: int) -> tuple[np.ndarray, np.ndarray]:
        """Random tokens in which one stretch comes again; only the second copy is scored."""
        T = self.data.length
        tokens = rng.integers(2, self.data.vocab_size, (n, T))
        tokens[:, 0] = self.language.START
        weight = np.zeros((n, T - 1), dtype=np.float32)
        for i in range(n):
            size = int(rng.integers(8, T // 2 - 1))
            source = int(rng.integers(1, T - 2 * size + 1))
            target = int(rng.integers(source + size, T - size + 1))
            tokens[i, target : target + size] = tokens[i, source : source + size]
            weight[i, target : target + size - 1] = 1
        return tokens, weight


class TokenFile:
    """A file of little-endian token ids, uint16 or (named *.u32) uint32, read in sequences at random places."""

    def __init__(self, data: DataConfig) -> None:
        assert data.file is not None
        self.path = Path(data.file)
        if not self.path.is_file():
            raise FileNotFoundError(f"data.file={data.file}: no such file")
        self.length = data.length
        size, width = self.path.stat().st_size, _width(self.path)
        if data.vocab_size > 256**width:
            raise ValueError(
                f"data.file={data.file}: uint16 ids cannot hold data.vocab_size={data.vocab_size}; write uint32 ids to "
                "a file named *.u32"
            )
        if size % width:
            raise ValueError(f"data.file={data.file}: {size} bytes; uint{8 * width} token ids take {width} each")
        if size // width < self.length:
            raise ValueError(f"data.file={data.file}: {size // width} tokens; one sequence takes {data.length}")
        self.tokens = np.memmap(self.path, dtype=f"<u{width}", mode="r")
        self.vocab_size = data.vocab_size

    def batch(self, seed: int, step: int, size: int) -> tuple[Tensor, Tensor]:
        rng = np.random.default_rng((seed, step))
        starts = rng.integers(0, len(self.tokens) - self.length + 1, size)
        tokens = np.stack([self.tokens[s : s + self.length] for s in starts]).astype(np.int64)
        if tokens.max() >= self.vocab_size:
            raise ValueError(f"{self.path}: token id {tokens.max()} outside data.vocab_size={self.vocab_size}")
        return torch.from_numpy(tokens), torch.ones(size, self.length - 1)


Corpus = TokenMixture | TokenFile


def _width(file: Path) -> int:
    """Bytes of one token id."""
    return 4 if file.suffix == ".u32" else 2


def corpus(data: DataConfig) -> Corpus:
    """The data source that a config describes; ValueError where it names a dataset without a file of its tokens."""
    if data.file is not None:
        return TokenFile(data)
    if data.dataset is None:
        return TokenMixture(data)
    width = 2 if data.vocab_size <= 256**2 else 4
    name = "train.u16" if width == 2 else "train.u32"
    raise ValueError(
        f"data.dataset={data.dataset!r}: nothing is downloaded here; write its token ids once, documents one after "
        f"another ({data.tokenizer or 'any'} tokenizer, ids below {data.vocab_size}), e.g. with "
        f"numpy.asarray(ids, dtype='<u{width}').tofile('{name}'), and give them: --set data.file={name}"
    )


def data_hash(source: Corpus, seed: int) -> str:
    """SHA-256 of the first batch: tells two runs' data apart."""
    tokens, weight = source.batch(seed, 0, 8)
    return hashlib.sha256(tokens.numpy().tobytes() + weight.numpy().tobytes()).hexdigest()
