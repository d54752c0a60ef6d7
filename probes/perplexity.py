"""Loss by position, and what context beyond the last few hundred tokens is worth (PROTOCOLS, section 7)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm.auto import tqdm

from ..hooks.instrumented import Instrumented
from .arguments import at_least_one, check_documents
from .finite import finite_hidden, finite_loss
from .intervals import mean_interval

if TYPE_CHECKING:
    import pandas as pd

CHUNK = 256  # rows whose logits are held at once


@torch.no_grad()
def perplexity(
    model: Instrumented,
    tokens: Tensor,
    buckets: int | Sequence[int] | None = None,
    attention_mask: Tensor | None = None,
    batch_size: int = 8,
    seed: int = 0,
) -> pd.DataFrame:
    """Mean next-token loss by position of the predicting row, over documents `tokens` [B,T].

    `buckets`: edges e0 < e1 < ... of half-open buckets [e0,e1), [e1,e2), ..., where rows outside are left
    out; or how many log-spaced buckets cover every row; None: powers of two. `attention_mask` [B,T] marks
    padding: positions count real tokens, and only rows whose own token and next token are real count.
    `batch_size` documents run at once. Caps are respected.

    Returns [position_low, position_high, loss, low, high, n]: bucket [low,high) in tokens, mean loss in nats a
    token (the perplexity is its exponential), its 95% bootstrap interval over documents (NaN for one; rows of a
    document are not independent), and how many rows. Buckets without rows are left out. Row T-1 predicts nothing and
    is in no bucket.

    Raises ValueError for T < 2, bad buckets, a mask of another shape, one that leaves no row, or a loss that is NaN or
    infinite (naming the first layer).

    >>> perplexity(model, documents, buckets=[0, 128, 512, 2048]).plot("position_low", "loss")
    """
    import pandas as pd

    check_documents(tokens, least=2)
    at_least_one(batch_size=batch_size)
    edges = torch.tensor(bucket_edges(buckets, tokens.shape[1] - 1, "buckets"))
    if attention_mask is not None and attention_mask.shape != tokens.shape:
        raise ValueError(f"attention_mask: shape {tuple(attention_mask.shape)}; expected {tuple(tokens.shape)}")
    losses, positions, documents = [], [], []
    for start in tqdm(range(0, tokens.shape[0], batch_size), desc="perplexity", unit="batch", delay=2):
        part = tokens[start : start + batch_size].to(next(model.embedding().parameters()).device)
        mask = None if attention_mask is None else attention_mask[start : start + batch_size]
        loss = finite_loss(model, part, mask)
        if mask is None:
            position = torch.arange(loss.shape[1], device=loss.device).expand_as(loss)
            keep = torch.ones_like(position, dtype=torch.bool)
        else:
            real = mask.bool()
            position = (real.cumsum(1) - 1)[:, :-1].to(loss.device)
            keep = (real[:, :-1] & real[:, 1:]).to(loss.device)
        losses.append(loss[keep].double().cpu())
        positions.append(position[keep].cpu())
        documents.append((start + torch.arange(len(loss), device=keep.device))[:, None].expand_as(keep)[keep].cpu())
    document, B = torch.cat(documents), tokens.shape[0]
    values, bucket = torch.cat(losses), torch.bucketize(torch.cat(positions), edges, right=True) - 1
    if not values.numel():
        raise ValueError("attention_mask: no row is left that predicts a real token")
    records = []
    for n, (low, high) in enumerate(zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)):
        inside, of = values[bucket == n], document[bucket == n]
        count = inside.numel()
        if not count:
            continue
        ends = mean_interval(of.bincount(inside, B).numpy(), of.bincount(minlength=B).numpy(), seed)
        records.append({
            "position_low": low, "position_high": high, "loss": float(inside.mean()), "low": ends[0], "high": ends[1],
            "n": count,
        })  # fmt: skip
    return pd.DataFrame(records)


@torch.no_grad()
def long_context_gain(
    model: Instrumented, tokens: Tensor, context: int = 256, stride: int = 32, batch_size: int = 32, seed: int = 0
) -> pd.DataFrame:
    """Loss with only the last `context` tokens minus loss with all, on the same targets, in nats a token.

    Documents `tokens` [B,T]. Scored are the rows t = context, context + stride, ... up to T-2: each predicts
    token t+1 once from tokens 0..t and once from tokens t-context+1..t alone, a window run by itself, so
    that both contexts are exact (positions start at 0 in the window, and no token is put before it).
    `stride` only thins out the rows: windows cost context/stride times the tokens of the documents.
    `batch_size` windows run at once.

    One row: [context, gain, low, high, loss, short_loss, n]: `low`, `high` a 95% bootstrap interval of the gain over
    documents (NaN for one), the mean losses with all and with the short context, and how many rows.

    Raises ValueError where no row has more than `context` tokens before its target.

    >>> long_context_gain(model, documents, context=256)
    """
    import pandas as pd

    rows, whole, short = context_losses(model, tokens, context, stride, batch_size)
    gains = (short - whole).numpy()
    low, high = mean_interval(gains.sum(1), np.full(len(gains), len(rows)), seed)
    row = {
        "context": context, "gain": gains.mean(), "low": low, "high": high, "loss": float(whole.mean()),
        "short_loss": float(short.mean()), "n": gains.size,
    }  # fmt: skip
    return pd.DataFrame([row])


@torch.no_grad()
def context_losses(
    model: Instrumented, tokens: Tensor, context: int, stride: int = 1, batch_size: int = 32
) -> tuple[Tensor, Tensor, Tensor]:
    """Rows [R] and their losses [B,R] with all context and with the last `context` tokens alone; see
    `long_context_gain`."""
    at_least_one(context=context, stride=stride, batch_size=batch_size)
    check_documents(tokens, least=2)
    length, needed = tokens.shape[1], context + 2
    if length < needed:
        raise ValueError(f"tokens: {length} long; to compare with a context of {context} they must be >= {needed}")
    tokens = tokens.to(next(model.embedding().parameters()).device)
    rows = torch.arange(context, length - 1, stride, device=tokens.device)
    whole, short = [], []
    with tqdm(total=tokens.shape[0] * len(rows), desc="short contexts", unit="row", delay=2) as bar:
        for document in tokens:
            target = document[rows + 1]
            whole.append(_row_losses(model, finite_hidden(model, document[None])[0], rows, target))
            windows = document.unfold(0, context, 1)[rows - context + 1]
            part = []
            for start in range(0, len(rows), batch_size):
                last = finite_hidden(model, windows[start : start + batch_size])[:, -1]
                part.append(_row_losses(model, last, None, target[start : start + batch_size]))
                bar.update(last.shape[0])
            short.append(torch.cat(part))
    return rows.cpu(), torch.stack(whole), torch.stack(short)


def _row_losses(model: Instrumented, hidden: Tensor, rows: Tensor | None, target: Tensor) -> Tensor:
    """Cross entropy [R] of `target` [R] under hidden [T,D] at `rows` (None: each), fp64 on the CPU."""
    picked = hidden if rows is None else hidden[rows.to(hidden.device)]
    parts = []
    for start in range(0, picked.shape[0], CHUNK):
        logits = model.unembed_hidden(picked[None, start : start + CHUNK])[0]
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        wanted = target[start : start + CHUNK].to(logits.device)
        parts.append(F.cross_entropy(logits, wanted, reduction="none").double().cpu())
    return torch.cat(parts)


def bucket_edges(buckets: int | Sequence[int] | None, length: int, name: str) -> list[int]:
    """Edges of half-open buckets over 0..length-1: those given, or log-spaced, or powers of two.

    Log-spaced buckets that would hold no whole number are merged with their neighbour. Raises ValueError,
    naming the argument `name`, where edges do not rise, are negative, or all lie past `length`.
    """
    if buckets is None:
        powers = [2**n for n in range(length.bit_length()) if 2**n < length]
        return [0, *powers, length]
    if isinstance(buckets, int):
        if buckets < 1:
            raise ValueError(f"{name}={buckets}: expected >= 1 buckets")
        steps = (round(length ** (n / buckets)) for n in range(1, buckets))
        return sorted({0, *(s for s in steps if s < length), length})
    edges = [int(e) for e in buckets]
    if len(edges) < 2 or any(e != b for e, b in zip(edges, buckets, strict=True)):
        raise ValueError(f"{name}={list(buckets)}: expected at least two edges, whole numbers")
    if edges[0] < 0 or any(b <= a for a, b in itertools.pairwise(edges)):
        raise ValueError(f"{name}={edges}: edges must be >= 0 and rise")
    if edges[0] >= length:
        raise ValueError(f"{name}={edges}: they start past the last position, {length - 1}")
    return edges
