"""Q/K drift: how far a head's query and key projections are from those of a reference step.

Raw distances are those of the weight slices, as published (arXiv 2606.15378). A change of basis inside a head
moves them without changing one attention score, so beside them stands the distance of the score form itself.

Without RoPE the score of query input x and key input y is x^T F y with F = W_Q^T W_K. Under RoPE, write the
two rows of frequency pair d as one complex row, w = W[d] + i W[d + K/2]: at offset m the score is the real
part of sum_d e^(i theta_d m) x^T M_d y with M_d = conj(w_Q) w_K^T, whose real and imaginary parts are W_Q^T
W_K and W_Q^T J W_K restricted to the pair. Averaged over the angles, the squared distance of two such forms
is 1/2 sum_d |M_d - M'_d|^2; dimensions that RoPE leaves alone add the squared distance of their plain form.

Never D x D: rows are split into coordinates in an orthonormal basis of the reference's rows and a remainder
orthogonal to it, so that r x r matrices (r = K, or 1 for a frequency pair) say everything. Taking the
remainder before squaring matters: |F|^2 + |F'|^2 - 2 <F, F'> from Gram matrices cannot see below 1e-8 even
in fp64.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import warnings
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from ..hooks.checkpoint import Checkpoint
from ..hooks.head_maps import read_maps
from ..hooks.ladder import ladder as open_ladder
from ..hooks.projections import QKProjection, qk_projections
from .arguments import head_tuples

if TYPE_CHECKING:
    import pandas as pd

COLUMNS = ("q", "k", "q_rel", "k_rel", "qk_rel", "bilinear_rel")


def qk_drift(
    ladder: Any, heads: Sequence[tuple[int, ...]] | None = None, reference: str | int = "final"
) -> pd.DataFrame:
    """Distance of every softmax head's query and key weights from a reference step, over a ladder.

    `ladder`: a Ladder, its path, or a list of Checkpoints. `heads`: (layer, head) or (layer, site, head);
    None: all heads of full and window sites. `reference`: "final", "first", "previous" (the step before; the
    first step's values are NaN), or a step.

    Returns [step, layer, site, head, kind, maps, q, k, q_rel, k_rel, qk_rel, bilinear_rel]. `maps`: "slice" where q and
    k are rows of stored tensors (gates in q_proj left out), "effective" where they are products of low-rank ones (MLA).
    `q`, `k`: Frobenius distance of the head's maps W_Q and W_K (of its key/value head where heads are grouped);
    `q_rel`, `k_rel`: over the norm of the reference; `qk_rel`: their sum, the published curve. `bilinear_rel`: relative
    distance of the score form with norm weights and biases folded in, which no rotation inside the head moves; under
    q/k norm each form is first scaled to unit norm (where one norm spans all heads, by the size of all their maps).
    PROTOCOLS section 5; fp64 throughout.

    Where the family's score is no such form, or nobody said what folds into it (`hooks/projections.py`), bilinear_rel
    is NaN and a warning says so.

    Reads only the wanted rows from disk and holds one site of two steps at a time. Raises ValueError for a
    head that is not there, an unknown reference, a model family whose layout is not known, or a ladder whose
    shapes change.

    >>> table = qk_drift("runs/demo/ladder", heads=[(3, 0), (3, 1)])
    >>> table.pivot(index="step", columns="head", values="bilinear_rel").plot()
    """
    import pandas as pd

    checkpoints = checkpoints_of(ladder)
    against = references(checkpoints, reference)
    chosen = _choose(_sites(checkpoints), heads)
    if not all(site.form for site, _ in chosen):
        warnings.warn(
            "qk_drift: bilinear_rel is NaN: what folds into this family's attention score is not known "
            "(hooks/projections.py), or it is no form in the weights (convolutions, norms behind RoPE)", stacklevel=2,
        )  # fmt: skip
    records: list[dict[str, Any]] = []
    maps = {False: "slice", True: "effective"}
    with tqdm(total=len(chosen) * len(checkpoints), desc="qk_drift", unit="site", delay=2) as bar:
        for site, wanted in chosen:
            held: Checkpoint | None = None
            origin: _Origin | None = None
            for checkpoint, other in zip(checkpoints, against, strict=True):
                if other is not None and other is not held:
                    held, origin = other, _Origin(_read(other, site, wanted))
                weights = _read(checkpoint, site, wanted)
                nothing = {column: [float("nan")] * len(wanted) for column in COLUMNS}
                distances = nothing if origin is None else origin.distances(weights)
                for n, head in enumerate(wanted):
                    place = {"step": checkpoint.step, "layer": site.layer, "site": site.site, "head": head}
                    what = {"kind": site.kind, "maps": maps[site.effective]}
                    records.append({**place, **what, **{c: v[n] for c, v in distances.items()}})
                bar.update()
    table = pd.DataFrame(records)
    return table.sort_values(["step", "layer", "site", "head"], kind="stable", ignore_index=True)


def checkpoints_of(ladder: Any) -> list[Checkpoint]:
    if isinstance(ladder, str | os.PathLike):
        ladder = open_ladder(os.fspath(ladder))
    found = [item if isinstance(item, Checkpoint) else item[1] for item in ladder]
    if not found:
        raise ValueError("ladder: it has no checkpoint")
    return found


def references(checkpoints: list[Checkpoint], reference: str | int) -> list[Checkpoint | None]:
    """What each checkpoint is compared with."""
    if reference == "previous":
        return [None, *checkpoints[:-1]]
    if reference in ("final", "first"):
        fixed = checkpoints[-1 if reference == "final" else 0]
    elif isinstance(reference, str):
        raise ValueError(f'reference={reference!r}: expected "final", "first", "previous" or a step')
    else:
        named = [c for c in checkpoints if c.step == reference]
        if not named:
            raise ValueError(f"reference={reference}: no such step; there are {[c.step for c in checkpoints]}")
        fixed = named[0]
    return [fixed] * len(checkpoints)


def _sites(checkpoints: list[Checkpoint]) -> list[QKProjection]:
    """The softmax sites that all checkpoints share."""
    first = checkpoints[0]
    sites = qk_projections(first)
    if not sites:
        raise ValueError(f"{first.path}: this model has no softmax site")
    for checkpoint in checkpoints[1:]:
        here = qk_projections(checkpoint)
        for a, b in itertools.zip_longest(sites, here):
            if a == b:
                continue
            name = (a or b).q
            shapes = [None if s is None else [s.heads * s.head_dim, s.width] for s in (a, b)]
            raise ValueError(
                f"step {checkpoint.step}: {name} and its layout are not those of step {first.step} "
                f"(shapes {shapes[1]} and {shapes[0]}); a ladder is one model"
            )
    return sites


def _choose(sites: list[QKProjection], heads: Iterable[tuple[int, ...]] | None) -> list[tuple[QKProjection, list[int]]]:
    """Sites with the heads wanted of them, both in order."""
    if heads is None:
        return [(site, list(range(site.heads))) for site in sites]
    wanted: dict[QKProjection, set[int]] = {}
    by_place = {(s.layer, s.site): s for s in sites}
    for head in head_tuples(heads):
        if len(head) == 2 and sum(s.layer == head[0] for s in sites) > 1:
            raise ValueError(f"head {head}: layer {head[0]} has several softmax sites; expected (layer, site, head)")
        place = (head[0], head[1] if len(head) == 3 else 0)
        site = by_place.get(place)
        if site is None:
            layers = sorted({s.layer for s in sites})
            raise ValueError(
                f"head {head}: layer {place[0]} has no softmax site {place[1]}; layers with softmax heads: {layers}"
            )
        if not 0 <= head[-1] < site.heads:
            raise ValueError(f"head {head}: layer {place[0]} has heads 0..{site.heads - 1}")
        wanted.setdefault(site, set()).add(head[-1])
    return [(site, sorted(wanted[site])) for site in sites if site in wanted]


@dataclasses.dataclass
class _Slice:
    """One head's map of one projection, fp64: `stored` [K,D], and folded (norm weights, bias) into `blocks`.

    A block [n,r,D] holds n groups of rows that only meet each other in a score: frequency pairs as complex
    rows (r = 1), and in one group the dimensions that RoPE leaves alone.
    """

    stored: Tensor
    blocks: list[Tensor]


@dataclasses.dataclass
class _Weights:
    """Wanted query heads of one site and step, the key/value heads they read, and which one each reads. `sizes`: what
    q/k norms divide out of each, where they norm all heads together (None: where they norm each head)."""

    q: list[_Slice]
    k: list[_Slice]
    kv: list[int]
    site: QKProjection
    sizes: tuple[float, float] | None = None


def _read(checkpoint: Checkpoint, site: QKProjection, heads: list[int]) -> _Weights:
    kv_heads = sorted({site.kv_head(h) for h in heads})
    maps = read_maps(checkpoint, site, heads, kv_heads)
    q, k = ([_Slice(m.stored, _blocks(m.folded, site)) for m in side] for side in (maps.q, maps.k))
    return _Weights(q, k, [kv_heads.index(site.kv_head(h)) for h in heads], site, maps.sizes)


def _blocks(folded: Tensor, site: QKProjection) -> list[Tensor]:
    """Rows [K,D] of a head by whom they meet."""
    a, b = site.pairs()
    rest = [d for d in range(site.head_dim) if d not in {*a, *b}]
    blocks = [torch.complex(folded[a], folded[b])[:, None]] if a else []
    return [*blocks, folded[None, rest]] if rest else blocks


class _Origin:
    """The reference's weights, with an orthonormal basis of the rows of each of their blocks."""

    def __init__(self, weights: _Weights) -> None:
        self.kv = weights.kv
        self.site = weights.site
        self.sizes = weights.sizes
        self.q = [_Frame(head) for head in weights.q]
        self.k = [_Frame(head) for head in weights.k]

    def distances(self, new: _Weights) -> dict[str, list[float]]:
        """The columns of the table, one value per query head."""
        q = [old.compare(x) for old, x in zip(self.q, new.q, strict=True)]
        k = [old.compare(x) for old, x in zip(self.k, new.k, strict=True)]
        table: dict[str, list[float]] = {column: [] for column in COLUMNS}
        for head, kv in enumerate(self.kv):
            a, b = q[head], k[kv]
            relative = [_over(x.distance, old.size) for x, old in ((a, self.q[head]), (b, self.k[kv]))]
            form = self._form(a, b, self.q[head], self.k[kv], new.sizes) if self.site.form else float("nan")
            for column, x in zip(COLUMNS, (a.distance, b.distance, *relative, sum(relative), form), strict=True):
                table[column].append(x)
        return table

    def _form(self, q: _Split, k: _Split, old_q: _Frame, old_k: _Frame, sizes: tuple[float, float] | None) -> float:
        """Relative distance of the score forms of one query head.

        F = (q_in E_q + q_rest)^H (k_in E_k + k_rest): the part inside both bases is a small matrix, and of
        the other three, orthogonal to it and to each other, only the squared norms count.
        """
        if q.same and k.same:
            return 0.0
        parts = []
        for n, q_in in enumerate(q.inside):
            k_in = k.inside[n]
            now, before = q_in.mH @ k_in, old_q.coordinates[n].mH @ old_k.coordinates[n]
            outside = (
                _inner(q_in @ q_in.mH, k.outside[n])
                + _inner(q.outside[n], k_in @ k_in.mH)
                + _inner(q.outside[n], k.outside[n])
            )
            parts.append((0.5 if q_in.is_complex() else 1.0, now, before, outside))
        size = sum(w * (_square(now) + outside) for w, now, _, outside in parts) ** 0.5
        old_size = sum(w * _square(before) for w, _, before, _ in parts) ** 0.5
        scale = _over(old_size, size) if self.site.normed else 1.0
        if sizes is not None and self.sizes is not None:
            scale = _over(self.sizes[0] * self.sizes[1], sizes[0] * sizes[1])
        total = sum(w * (_square(scale * now - old) + scale**2 * out) for w, now, old, out in parts)
        return _over(total**0.5, old_size)


class _Frame:
    """One head's rows at the reference, per block: coordinates [n,r,s] times an orthonormal basis [n,s,D]."""

    def __init__(self, head: _Slice) -> None:
        self.head = head
        self.size = float(head.stored.norm())
        self.basis: list[Tensor] = []
        self.coordinates: list[Tensor] = []
        for block in head.blocks:
            basis, upper = torch.linalg.qr(block.mH)
            self.basis.append(basis.mH.resolve_conj().contiguous())
            self.coordinates.append(upper.mH)

    def compare(self, new: _Slice) -> _Split:
        """How another step's rows lie to these."""
        inside = [x @ basis.mH for x, basis in zip(new.blocks, self.basis, strict=True)]
        rests = (x - a @ basis for x, a, basis in zip(new.blocks, inside, self.basis, strict=True))
        return _Split(
            distance=float((new.stored - self.head.stored).norm()),
            same=all(torch.equal(x, y) for x, y in zip(new.blocks, self.head.blocks, strict=True)),
            inside=inside,
            outside=[rest @ rest.mH for rest in rests],
        )


@dataclasses.dataclass
class _Split:
    """One head's rows against the reference's: coordinates in its basis, Gram matrices of the remainder."""

    distance: float
    same: bool
    inside: list[Tensor]
    outside: list[Tensor]


def _inner(a: Tensor, b: Tensor) -> float:
    """<a, b> of positive Hermitian matrices, added up over blocks."""
    return max(0.0, float((a * b.conj()).real.sum()))


def _square(x: Tensor) -> float:
    return float(x.abs().square().sum())


def _over(x: float, size: float) -> float:
    """x / size; nothing over nothing is 0."""
    return x / size if size else 0.0 if x == 0 else float("inf")
