"""Gradient influence: how much a target moves with the embedding of a token so far back.

The influence of token i on a target is || d target / d embedding_i ||_2, taken at the output of the
embedding module, and collected by the distance from i to the target's row (PROTOCOLS section 6; arXiv
2606.15378).
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from tqdm.auto import tqdm

from .arguments import check_documents, columns_of
from .finite import finite_hidden
from .intervals import interval, resample
from .perplexity import bucket_edges

if TYPE_CHECKING:
    import pandas as pd

TARGETS = ("loss", "logit_sum", "argmax_logit")
PUBLISHED_ROWS = 20  # rows that the published script averages its target over
DEFAULT_ROWS = 4  # rows of the loss, where none are named
BOOTSTRAP = 1000
DRAWN_AT_ONCE = 4096  # distances whose draws are held at once
TRIED = 256  # tokens on which the memory of a backward pass is measured


def gradient_influence(
    model: Any,
    tokens: Tensor,
    target: str = "loss",
    rows: Sequence[int] | None = None,
    bins: int | Sequence[int] | None = None,
    recompute: bool | None = None,
    budget: float | int = 8.0,
    seed: int = 0,
) -> pd.DataFrame:
    """Norm of a target's gradient w.r.t. each token's embedding, by distance, over documents `tokens` [B,T].

    `target`: "loss", the next-token loss at `rows`, each row differentiated by itself, so that the
    distance (0: the row's own token) is exact; or, as published, "logit_sum" (sum of a row's logits) or
    "argmax_logit" (its largest logit), averaged over `rows` and differentiated once, with distance counted
    from the last of them. There, distances below the span of the rows mix several (`mixed`). `rows`:
    columns, negative ones from the end; None: four spread over the last quarter for the loss, the last 20
    for the others. `bins`: edges, or how many log-spaced bins, of distance; None: every distance by itself.

    Returns [target, distance, influence, low, high, n, mixed]: distance in tokens, mean norm in nats (loss) or logits
    per unit of embedding, its 95% bootstrap interval over documents (NaN for one), how many norms it is the mean of,
    one per document, row and token. With bins, `distance` is the mean distance of what lies in [distance_low,
    distance_high), two more columns, and empty bins are left out.

    Caps and the other switches apply. No parameter gets a gradient; the model runs in evaluation mode, one document at
    a time through fused attention and its backward, and is left as it was. `recompute=True` keeps only each layer's
    input for the backward pass and computes the rest again (not inside record()): memory of one layer instead of all.
    None does so where one document would keep more than `budget` GiB, as measured on its first tokens. Raises
    ValueError for an unknown target, rows that do not fit, the last row for the loss (it has no target), or a model
    without layers that can be recomputed.

    >>> table = gradient_influence(model, documents, bins=24)
    >>> table.plot("distance", "influence", loglog=True)
    """
    import pandas as pd

    if target not in TARGETS:
        raise ValueError(f"target={target!r}: expected one of {', '.join(TARGETS)}")
    check_documents(tokens)
    columns = _rows(rows, target, tokens.shape[1])
    furthest = max(columns) + 1
    edges = None if bins is None else bucket_edges(bins, furthest, "bins")
    device = next(model.embedding().parameters()).device
    tokens = tokens.to(device)
    if recompute is None:
        recompute = _recomputable(model) and _kept(model, tokens[:1], columns) > budget * 2**30
    total = np.zeros((tokens.shape[0], furthest))  # of each document, over rows
    count = np.zeros(furthest, dtype=np.int64)
    for n, document in enumerate(tqdm(tokens, desc="gradient_influence", unit="document", delay=2)):
        for last, norms in _norms(model, document[None], target, columns, recompute):
            total[n, : last + 1] += norms[: last + 1].flip(0).numpy()
            count[: last + 1] += n == 0  # the rows are those of every document
    span = furthest - min(columns)
    mixed = np.arange(furthest) < (span if target != "loss" and span > 1 else 0)
    low = np.arange(furthest)
    high = low + 1
    if edges is not None:
        bounds = [(a, b) for a, b in itertools.pairwise(edges) if a < furthest]
        low, high = (np.array(side) for side in zip(*bounds, strict=True))
    sums, n_rows, distances, mixes = (
        np.add.reduceat(x[..., : high[-1]], low, axis=-1) for x in (total, count, count * np.arange(furthest), mixed)
    )
    means = sums / n_rows
    ends = _intervals(means, seed)
    table = pd.DataFrame(
        {
            "target": target,
            "distance": low if edges is None else distances / n_rows,
            "influence": means.mean(0),
            "low": ends[0],
            "high": ends[1],
            "n": n_rows * tokens.shape[0],
            "mixed": mixes > 0,
        }
    )
    return table if edges is None else table.assign(distance_low=low, distance_high=high)


def _intervals(means: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """95% bootstrap intervals of the mean over documents of `means` [documents, distances]."""
    documents, distances = means.shape
    if documents < 2:
        return np.full(distances, np.nan), np.full(distances, np.nan)
    weights = resample(documents, BOOTSTRAP, np.random.default_rng(seed)) / documents
    parts = [interval(weights @ means[:, i : i + DRAWN_AT_ONCE]) for i in range(0, distances, DRAWN_AT_ONCE)]
    low, high = zip(*parts, strict=True)
    return np.concatenate(low), np.concatenate(high)


def _rows(rows: Sequence[int] | None, target: str, length: int) -> list[int]:
    """Columns of the target's rows, in order."""
    usable = length - 1 if target == "loss" else length  # the last row predicts a token that is not there
    if rows is None:
        if target == "loss":
            if usable < 1:
                raise ValueError(f"tokens: {length} long; a loss needs T >= 2")
            first = min(3 * length // 4, usable - 1)
            return sorted({round(t) for t in torch.linspace(first, usable - 1, DEFAULT_ROWS).tolist()})
        if length < PUBLISHED_ROWS:
            raise ValueError(f"tokens: {length} long; {target} averages over the last {PUBLISHED_ROWS} rows: name rows")
        return list(range(length - PUBLISHED_ROWS, length))
    columns = columns_of(rows, length)
    for given, column in zip(rows, columns, strict=True):
        if column >= usable:
            raise ValueError(f"rows: {given} is the last token and has no next token to predict")
    return sorted(set(columns))


def _norms(model: Any, tokens: Tensor, target: str, rows: list[int], recompute: bool) -> Iterator[tuple[int, Tensor]]:
    """Per backward pass over one document [1,T]: the row that distance counts from, and the norms [T]."""
    with _differentiable(model, recompute) as leaf:
        hidden = finite_hidden(model, tokens)
        logits = model.unembed_hidden(hidden[:, torch.tensor(rows, device=hidden.device)])[0]
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if target == "loss":
            after = tokens[0, torch.tensor(rows, device=tokens.device) + 1].to(logits.device)
            targets = list(zip(rows, F.cross_entropy(logits, after, reduction="none"), strict=True))
        else:
            values = logits.sum(-1) if target == "logit_sum" else logits.amax(-1)
            targets = [(rows[-1], values.mean())]
        for n, (row, value) in enumerate(targets):
            (gradient,) = torch.autograd.grad(value, leaf(), retain_graph=n + 1 < len(targets))
            yield row, gradient[0].double().norm(dim=-1).cpu()


@contextlib.contextmanager
def _differentiable(model: Any, recompute: bool) -> Iterator[Any]:
    """Make the embedding module's output the one leaf that needs a gradient; yields a getter of it."""
    leaves: list[Tensor] = []

    def cut(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        leaves.append(output.detach().requires_grad_())
        return leaves[-1]

    def leaf() -> Tensor:
        assert len(leaves) == 1, "the embedding module ran more than once, or not at all"
        return leaves[0]

    parameters = [(p, p.requires_grad) for p in model.parameters()]
    training = [(m, m.training) for m in model.modules()]
    with contextlib.ExitStack() as stack:
        # Switches nothing; but while a switch is on, a transformers model keeps our attention, which layers
        # that run again in the backward pass need. Other threads and compiled models are refused, as by
        # every switch.
        stack.enter_context(model.ablate([]))
        if recompute:
            stack.enter_context(_recomputed(model))
        handle = model.embedding().register_forward_hook(cut)
        try:
            for parameter, _ in parameters:
                parameter.requires_grad_(False)
            model.eval()
            with torch.enable_grad():
                yield leaf
        finally:
            handle.remove()
            for parameter, needed in parameters:
                parameter.requires_grad_(needed)
            for module, flag in training:
                module.training = flag


def _kept(model: Any, tokens: Tensor, rows: list[int]) -> float:
    """Bytes that one document [1,T] keeps for its backward pass: those of its first tokens, times their share (no layer
    keeps more than so much a token)."""
    few = tokens[:, :TRIED]
    held: dict[int, int] = {}
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in own:
            held[storage.data_ptr()] = storage.nbytes()
        return x

    with _differentiable(model, False), torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        hidden = model.hidden(few)  # held, so that no storage is used twice
    logits = 4 * 2 * len(rows) * model.vocab_size
    return sum(held.values()) * tokens.shape[1] / few.shape[1] + logits * bool(hidden.numel())


def _recording(model: Any) -> bool:
    return bool(getattr(model, "recorders", ())) or any(site.tap for site in model.sites)


def _layers(model: Any) -> list[nn.Module]:
    """The layers known to be safe to run twice."""
    from ..hooks.model import Block

    return [
        module
        for module in model.modules()
        if isinstance(module, Block) or any(c.__name__ == "GradientCheckpointingLayer" for c in type(module).__mro__)
    ]


def _recomputable(model: Any) -> bool:
    return not _recording(model) and bool(_layers(model))


@contextlib.contextmanager
def _recomputed(model: Any) -> Iterator[None]:
    """Keep only the layers' inputs for the backward pass (activation checkpointing, arXiv 1604.06174)."""
    if _recording(model):
        raise ValueError("recompute: layers run twice, and record() would see both; leave the record() block")
    layers = _layers(model)
    if not layers:
        raise ValueError("recompute: this model has no layers known to be safe to run twice")

    def twice(forward: Any) -> Any:
        return lambda *args, **kwargs: checkpoint(forward, *args, use_reentrant=False, **kwargs)

    own = [(layer, vars(layer).get("forward")) for layer in layers]  # accelerate sets one on the object
    try:
        for layer in layers:
            layer.forward = twice(layer.forward)
        yield
    finally:
        for layer, forward in own:
            vars(layer).pop("forward", None)
            if forward is not None:
                layer.forward = forward
