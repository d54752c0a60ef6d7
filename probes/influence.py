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

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from tqdm.auto import tqdm

from .perplexity import bucket_edges

if TYPE_CHECKING:
    import pandas as pd

TARGETS = ("loss", "logit_sum", "argmax_logit")
PUBLISHED_ROWS = 20  # rows that the published script averages its target over
DEFAULT_ROWS = 4  # rows of the loss, where none are named


def gradient_influence(
    model: Any,
    tokens: Tensor,
    target: str = "loss",
    rows: Sequence[int] | None = None,
    bins: int | Sequence[int] | None = None,
    recompute: bool = False,
) -> pd.DataFrame:
    """Norm of a target's gradient w.r.t. each token's embedding, by distance, over documents `tokens` [B,T].

    `target`: "loss", the next-token loss at `rows`, each row differentiated by itself, so that the
    distance (0: the row's own token) is exact; or, as published, "logit_sum" (sum of a row's logits) or
    "argmax_logit" (its largest logit), averaged over `rows` and differentiated once, with distance counted
    from the last of them. There, distances below the span of the rows mix several (`mixed`). `rows`:
    columns, negative ones from the end; None: four spread over the last quarter for the loss, the last 20
    for the others. `bins`: edges, or how many log-spaced bins, of distance; None: every distance by itself.

    Returns [target, distance, influence, n, mixed]: distance in tokens, mean norm in nats (loss) or logits
    per unit of embedding, how many norms it is the mean of, one per document, row and token. With bins,
    `distance` is the mean distance of what lies in [distance_low, distance_high), two more columns, and
    empty bins are left out.

    Caps and the other switches apply. No parameter gets a gradient; the model runs in evaluation mode and is
    left as it was. `recompute=True` keeps only each layer's input for the backward pass and computes the
    rest again (not inside record()): memory of one layer instead of all. Raises ValueError for an unknown
    target, rows that do not fit, the last row for the loss (it has no target), or a model without layers
    that can be recomputed.

    >>> table = gradient_influence(model, documents, bins=24)
    >>> table.plot("distance", "influence", loglog=True)
    """
    import pandas as pd

    if target not in TARGETS:
        raise ValueError(f"target={target!r}: expected one of {', '.join(TARGETS)}")
    if tokens.ndim != 2 or tokens.shape[0] < 1:
        raise ValueError(f"tokens: shape {tuple(tokens.shape)}; expected documents [B,T]")
    columns = _rows(rows, target, tokens.shape[1])
    edges = None if bins is None else bucket_edges(bins, max(columns) + 1, "bins")
    total = torch.zeros(max(columns) + 1, dtype=torch.float64)
    count = torch.zeros_like(total, dtype=torch.int64)
    device = next(model.embedding().parameters()).device
    for document in tqdm(tokens.to(device), desc="gradient_influence", unit="document", delay=2):
        for last, norms in _norms(model, document[None], target, columns, recompute):
            by_distance = norms[: last + 1].flip(0)
            total[: last + 1] += by_distance
            count[: last + 1] += 1
    span = max(columns) - min(columns) + 1
    mixed = torch.arange(len(total)) < (span if target != "loss" and span > 1 else 0)
    table = pd.DataFrame(
        {
            "target": target,
            "distance": range(len(total)),
            "influence": (total / count).numpy(),
            "n": count.numpy(),
            "mixed": mixed.numpy(),
        }
    )
    return table if edges is None else _binned(table, edges)


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
    columns = [int(t) + length if t < 0 else int(t) for t in rows]
    if not columns:
        raise ValueError("rows: none given")
    for given, column in zip(rows, columns, strict=True):
        if not 0 <= column < length:
            raise ValueError(f"rows: {given} does not fit {length} tokens")
        if column >= usable:
            raise ValueError(f"rows: {given} is the last token and has no next token to predict")
    return sorted(set(columns))


def _norms(model: Any, tokens: Tensor, target: str, rows: list[int], recompute: bool) -> Iterator[tuple[int, Tensor]]:
    """Per backward pass over one document [1,T]: the row that distance counts from, and the norms [T]."""
    with _differentiable(model, recompute) as leaf:
        hidden = model.hidden(tokens)
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


@contextlib.contextmanager
def _recomputed(model: Any) -> Iterator[None]:
    """Keep only the layers' inputs for the backward pass (activation checkpointing, arXiv 1604.06174)."""
    from ..hooks.model import Block

    if getattr(model, "recorders", ()) or any(site.tap for site in model.sites):
        raise ValueError("recompute: layers run twice, and record() would see both; leave the record() block")
    layers = [
        module
        for module in model.modules()
        if isinstance(module, Block) or any(c.__name__ == "GradientCheckpointingLayer" for c in type(module).__mro__)
    ]
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


def _binned(table: pd.DataFrame, edges: list[int]) -> pd.DataFrame:
    """Means over bins of distance, every norm counted once."""
    import pandas as pd

    records = []
    for low, high in itertools.pairwise(edges):
        inside = table[(table.distance >= low) & (table.distance < high)]
        n = int(inside.n.sum())
        if not n:
            continue
        records.append(
            {
                "target": table.target.iloc[0],
                "distance": float((inside.distance * inside.n).sum() / n),
                "influence": float((inside.influence * inside.n).sum() / n),
                "n": n,
                "mixed": bool(inside.mixed.any()),
                "distance_low": low,
                "distance_high": high,
            }
        )
    return pd.DataFrame(records)
