"""The query and key maps of chosen heads, read from a checkpoint: only the rows that are needed, in fp64.

`projections.py` says where they lie. A map is a slice of a stored matrix, or the product of two (MLA) with the norm
weight between them inside; folded, it holds what else shapes the score: the input norm's weight and bias, q/k norm
weights, biases (the weight of one more input, which is always 1).
"""

from __future__ import annotations

import dataclasses
import itertools

import torch
from torch import Tensor

from .checkpoint import Checkpoint
from .projections import Latent, QKProjection


@dataclasses.dataclass
class HeadMap:
    """One head's map [K,D] as it is stored (or multiplied out), and folded [K,D or D+1]."""

    stored: Tensor
    folded: Tensor


@dataclasses.dataclass
class HeadMaps:
    """Maps of the wanted query heads and key/value heads; `sizes`: norms of all of W_Q and W_K, folded, where q/k norms
    are over all heads and divide them out."""

    q: list[HeadMap]
    k: list[HeadMap]
    sizes: tuple[float, float] | None = None


def read_maps(checkpoint: Checkpoint, site: QKProjection, heads: list[int], kv_heads: list[int]) -> HeadMaps:
    """Maps of these heads of one site. ValueError for a tensor that is not there, has another shape or holds NaN."""
    reader = _Reader(checkpoint, site)
    q, k = reader.side("q", heads), reader.side("k", kv_heads)
    sizes = None
    if site.over_all:
        sides = (reader.side("q", list(range(site.heads))), reader.side("k", list(range(site.kv_heads))))
        a, b = (float(torch.stack([m.folded for m in side]).norm()) for side in sides)
        sizes = (a, b)
    return HeadMaps(q, k, sizes)


class _Reader:
    def __init__(self, checkpoint: Checkpoint, site: QKProjection) -> None:
        self.checkpoint, self.site = checkpoint, site
        self.gain = None if site.gain is None else self.norm(site.gain, (site.width,))
        self.shift = None if site.gain_bias is None else self.tensor(site.gain_bias, (site.width,)).double()

    def side(self, which: str, heads: list[int]) -> list[HeadMap]:
        """Maps of the heads of "q" or "k"."""
        site = self.site
        queries = which == "q"
        name, bias, norm = (site.q, site.q_bias, site.q_norm) if queries else (site.k, site.k_bias, site.k_norm)
        latent = site.q_latent if queries else site.k_latent
        count, shared = (site.heads, 0) if queries else (site.kv_heads, site.k_shared_rows)
        down = None if latent is None else self.latent(latent)
        weights = self.rows(which, heads, name, (site.width if latent is None else latent.rank,), shared)
        biases = None if bias is None else self.rows(which, heads, bias, (), shared)
        tail = None
        if shared:
            assert latent is not None
            start = site.k_shared_start
            tail = self.tensor(latent.name, (shared, site.width), slice(start, start + shared)).double()
        gains = None if norm is None else self.norm(norm, (count * site.head_dim if site.over_all else site.head_dim,))
        found = []
        for n, (head, weight) in enumerate(zip(heads, weights, strict=True)):
            # Head by head: a whole site in fp64 falls out of the processor's cache.
            stored = weight.double()
            stored = stored if down is None else stored @ down
            stored = stored if tail is None else torch.cat([stored, tail])
            folded = self.fold(stored, None if biases is None else biases[n].double())
            if gains is not None:
                here = gains.view(count, site.head_dim)[head] if site.over_all else gains
                folded = folded * here[:, None]
            found.append(HeadMap(stored, folded))
        return found

    def fold(self, stored: Tensor, bias: Tensor | None) -> Tensor:
        """The input norm and the bias into a map."""
        folded = stored if self.gain is None else stored * self.gain
        if self.site.centred:
            folded = folded - folded.mean(1, keepdim=True)
        if self.shift is not None:
            constant = stored @ self.shift
            bias = constant if bias is None else bias + constant
        return folded if bias is None else torch.cat([folded, bias[:, None]], 1)

    def latent(self, latent: Latent) -> Tensor:
        """The first factor of a low-rank map, its norm's weight inside."""
        down = self.tensor(latent.name, (latent.rank, self.site.width), slice(0, latent.rank)).double()
        return down * self.norm(latent.norm, (latent.rank,))[:, None]

    def norm(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return self.tensor(name, shape).double() + (1.0 if self.site.unit else 0.0)

    def rows(self, which: str, heads: list[int], name: str, rest: tuple[int, ...], shared: int) -> list[Tensor]:
        """[K - shared,*rest] of each head, neighbours in one read."""
        site, size = self.site, self.site.head_dim - shared
        start, stride = (site.q_start, site.q_stride) if which == "q" else (site.k_start, site.k_stride)
        stride = stride or size
        found: list[Tensor] = []
        for _, run in itertools.groupby(enumerate(heads), lambda pair: pair[1] - pair[0]):
            members = [head for _, head in run]
            for group in [members] if stride == size else [[head] for head in members]:
                first = start + group[0] * stride
                rows = slice(first, first + len(group) * size)
                found += self.tensor(name, (len(group) * size, *rest), rows).split(size)
        return found

    def tensor(self, name: str, shape: tuple[int, ...], rows: slice = slice(None)) -> Tensor:
        found = self.checkpoint.tensor(name, rows)
        if tuple(found.shape) != shape:
            raise ValueError(
                f"step {self.checkpoint.step}: {name} (rows {rows.start}:{rows.stop}) has shape {tuple(found.shape)}; "
                f"its config asks for {shape}"
            )
        if not bool(found.isfinite().all()):
            raise ValueError(f"step {self.checkpoint.step}: {name} holds NaN or infinite values")
        return found
