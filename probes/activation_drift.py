"""Activation drift: how far a head's queries, keys and scores on the same tokens are from those of a reference step.

Weights say what a head could score, activations what it does: both steps run on the same documents, and what their
attention gets is compared. Like the weights (`drift.py`), queries and keys move under any rotation inside a head; the
scores that a softmax sees do not.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from ..hooks.checkpoint import Checkpoint
from ..hooks.kernels.attention import visible
from ..hooks.passes import View
from ..hooks.sites import Site, switched
from .arguments import check_documents, columns_of, head_tuples
from .drift import checkpoints_of, references
from .tracking import same_shape

if TYPE_CHECKING:
    import pandas as pd

ROWS = 64  # query rows of a document, where none are named
ELEMENTS = 2**22  # scores held at once
COLUMNS = ("q_rel", "k_rel", "score_rel", "attention_tv")


@torch.no_grad()
def activation_drift(
    ladder: Any,
    tokens: Tensor,
    heads: Sequence[tuple[int, ...]] | None = None,
    reference: str | int = "final",
    rows: Sequence[int] | None = None,
) -> pd.DataFrame:
    """Distance of every softmax head's queries, keys, scores and attention from a reference step's, on documents
    `tokens` [B,T], over a ladder.

    `ladder`, `heads` and `reference` as in `qk_drift`. `rows`: query columns whose scores are compared, negative ones
    from the end; None: 64 spread evenly.

    Returns [step, layer, site, head, kind, q_rel, k_rel, score_rel, attention_tv, n]. `q_rel`, `k_rel`: Frobenius
    distance of the queries and keys of all tokens, as attention gets them (after norms and RoPE), over the norm of the
    reference's. `score_rel`: the same of the scores (scaled, soft-capped) of rows and the keys they see, each row
    centred, as a softmax ignores a constant. `attention_tv`: total variation between the two steps' attention (0 to 1,
    a learnable sink counted as one more key), mean over the n rows of all documents. NaN at the first step under
    reference="previous".

    Holds two models and the queries and keys of one document, never T x T. Raises ValueError for a head that is not
    there or not softmax, an unknown reference, rows that do not fit, NaN activations (naming step and first layer), or
    a ladder whose shapes change.

    >>> table = activation_drift("runs/demo/ladder", documents, heads=[(3, 0), (3, 1)])
    >>> table.pivot(index="step", columns="head", values="score_rel").plot()
    """
    import pandas as pd

    check_documents(tokens)
    checkpoints = checkpoints_of(ladder)
    columns = _rows(rows, tokens.shape[1])
    frames: list[pd.DataFrame] = []
    shape: tuple[int, list[tuple[Any, ...]]] | None = None
    held: tuple[Checkpoint | None, Any] = (None, None)
    pairs = list(zip(checkpoints, references(checkpoints, reference), strict=True))
    for checkpoint, other in tqdm(pairs, desc="activation_drift", disable=len(pairs) < 3):
        if other is not None and other is not held[0]:
            held = (other, other.load())
            shape = same_shape("activation_drift", shape, other.step, held[1])
        model = held[1] if checkpoint is held[0] else checkpoint.load()
        shape = same_shape("activation_drift", shape, checkpoint.step, model)
        chosen = _chosen(model, heads)
        sums = [(_Sums(site, len(numbers)), numbers) for site, numbers in chosen.items()]
        names = {site.name for site in chosen}
        if other is not None:
            for document in tokens:
                now = _captured(model, document, names, checkpoint.step)
                then = now if other is checkpoint else _captured(held[1], document, names, other.step)
                for of, numbers in sums:
                    of.add(now[of.site.name], then[of.site.name], numbers, columns)
        frames += [of.table(checkpoint.step, numbers) for of, numbers in sums]
        if reference == "previous":
            held = (checkpoint, model)
    return pd.concat(frames, ignore_index=True)


def _rows(rows: Sequence[int] | None, length: int) -> Tensor:
    if rows is None:
        return torch.linspace(0, length - 1, min(ROWS, length)).round().long()
    return torch.tensor(columns_of(rows, length)).unique()


def _chosen(model: Any, heads: Sequence[tuple[int, ...]] | None) -> dict[Site, list[int]]:
    """Softmax sites, in order, with the heads wanted of them."""
    softmax = [site for site in model.sites if site.softmax]
    if heads is None:
        if not softmax:
            raise ValueError("activation_drift: this model has no softmax site")
        return {site: list(range(site.heads)) for site in softmax}
    named = [model.sites.head(head) for head in head_tuples(heads)]
    for site, _ in named:
        if not site.softmax:
            raise ValueError(f"activation_drift: {site.name} is {site.kind} ({site.mixer}); it has no queries and keys")
    return {site: sorted({h for s, h in named if s is site}) for site in softmax if any(s is site for s, _ in named)}


@dataclasses.dataclass
class _Seen:
    """What attention at a site got of one document, in fp64: q [T,H,K], k [S,G,K], scaled so that scores are q k."""

    site: Site
    q: Tensor
    k: Tensor
    view: View | None
    softcap: float | None = None
    sink_logits: Tensor | None = None

    def scores(self, rows: Tensor, head: int) -> tuple[Tensor, Tensor]:
        """Scores [R,S] of rows and keys, and which of them the softmax sees; under the site's window and cap."""
        columns = torch.arange(len(self.q), device=self.q.device)
        view = self.view or View(columns[None], columns[None], columns[None], columns[None])
        q_seg = None if view.q_seg is None else view.q_seg[:1, rows]
        k_seg = None if view.k_seg is None else view.k_seg[:1]
        seen = visible(view.q_pos[:1, rows], view.k_pos[:1], **self.site.span, q_seg=q_seg, k_seg=k_seg)[0]
        group = head * self.k.shape[1] // self.q.shape[1]
        scores = self.q[rows, head] @ self.k[:, group].T
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        return scores, seen

    def attention(self, scores: Tensor, seen: Tensor, head: int) -> Tensor:
        """Probabilities [R,S], or [R,S+1] with a learnable sink."""
        scores = scores.masked_fill(~seen, -torch.inf)
        if self.sink_logits is not None:
            scores = torch.cat([scores, self.sink_logits[head].double().expand(len(scores), 1)], 1)
        return scores.softmax(-1)


def _captured(model: Any, document: Tensor, names: set[str], step: int) -> dict[str, _Seen]:
    """What attention gets of one document [T] at the sites of these names; ValueError where it is NaN or infinite."""
    found: dict[str, _Seen] = {}

    def tap(site: Site, q: Tensor, k: Tensor, view: View | None, scale: float | None = None, **score: Any) -> None:
        if not bool(q.isfinite().all() and k.isfinite().all()):
            raise ValueError(f"step {step}, layer {site.layer}: queries or keys are NaN or infinite")
        of = float(q.shape[-1] ** -0.5) if scale is None else scale
        found[site.name] = _Seen(site, q[0].double() * of, k[0].double(), view, **score)

    sites = [site for site in model.sites if site.name in names]
    with switched(model, [(site, "tap", tap) for site in sites]):
        model.hidden(document[None].to(next(model.embedding().parameters()).device))
    return found


class _Sums:
    """Squared distances and sizes of one site's heads, added up over documents."""

    def __init__(self, site: Site, heads: int) -> None:
        self.site = site
        self.moved = torch.zeros(3, heads, dtype=torch.float64)  # queries, keys, scores
        self.size = torch.zeros_like(self.moved)
        self.apart = torch.zeros(heads, dtype=torch.float64)
        self.rows = 0

    def add(self, now: _Seen, then: _Seen, heads: list[int], rows: Tensor) -> None:
        rows = rows.to(now.q.device)
        at_once = max(1, ELEMENTS // len(now.k))
        for n, head in enumerate(heads):
            group = head * now.k.shape[1] // now.q.shape[1]
            for part, a, b in ((0, now.q[:, head], then.q[:, head]), (1, now.k[:, group], then.k[:, group])):
                self._moved(part, n, a, b)
            for some in rows.split(at_once):
                (a, seen), (b, _) = now.scores(some, head), then.scores(some, head)
                p, r = now.attention(a, seen, head), then.attention(b, seen, head)
                self.apart[n] += float((p - r).abs().sum()) / 2
                self._moved(2, n, _centred(a, seen), _centred(b, seen))
        self.rows += len(rows)

    def _moved(self, part: int, n: int, a: Tensor, b: Tensor) -> None:
        self.moved[part, n] += float((a - b).square().sum())
        self.size[part, n] += float(b.square().sum())

    def table(self, step: int, heads: list[int]) -> pd.DataFrame:
        import pandas as pd

        relative = (self.moved / self.size).sqrt()
        relative[(self.moved == 0) & (self.size == 0)] = 0.0 if self.rows else torch.nan  # nothing over nothing is 0
        values = [*relative, self.apart / self.rows]
        place = {"step": step, "layer": self.site.layer, "site": self.site.index, "head": heads, "kind": self.site.kind}
        return pd.DataFrame({**place, **dict(zip(COLUMNS, (v.numpy() for v in values), strict=True)), "n": self.rows})


def _centred(scores: Tensor, seen: Tensor) -> Tensor:
    """Scores less the mean of those that their row sees; the others 0."""
    scores = scores.masked_fill(~seen, 0)
    mean = scores.sum(1, keepdim=True) / seen.sum(1, keepdim=True).clamp(min=1)
    return (scores - mean).masked_fill(~seen, 0)
