"""LongPPL: perplexity over the tokens that need long context (arXiv 2410.23771; PROTOCOLS, section 7)."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from tqdm.auto import tqdm

from .arguments import at_least_one, check_documents
from .finite import finite_loss
from .intervals import mean_interval
from .perplexity import context_losses

if TYPE_CHECKING:
    import pandas as pd

GAIN = 2.0  # nats that long context must be worth
SURPRISE = 2.0  # nats: most that a key token may cost under it


@dataclasses.dataclass
class KeyTokens:
    """Which tokens of some documents need long context, as one evaluator sees them.

    `keys` [B,T-1]: by predicting row, row t standing for token t+1. `evaluator` names the model, `context` its short
    context in tokens, `scored` the rows looked at, those with more than that before their target.
    """

    keys: Tensor
    evaluator: str
    context: int
    scored: int
    vocab_size: int


def key_tokens(
    evaluator: Any, tokens: Tensor, *, name: str | None = None, context: int = 256, batch_size: int = 32
) -> KeyTokens:
    """The key tokens of documents `tokens` [B,T]: those whose log-probability under `evaluator` gains more than 2 nats
    from all context over the last `context` tokens alone, and exceeds -2 with it.

    `evaluator`: a model with its `name`, or a source to load, whose name it is. Every row past the first `context` is
    run by itself: that costs `context` times the tokens of the documents. Raises ValueError for a model without a
    name, or documents that are too short.

    >>> keys = key_tokens("smollm2", documents, context=512)
    """
    if isinstance(evaluator, str | Path):
        from ..hooks.checkpoint import load

        name, evaluator = name or str(evaluator), load(evaluator)
    if not name:
        raise ValueError("key_tokens: the evaluator's name goes into the table; give name=...")
    rows, whole, short = context_losses(evaluator, tokens, context, batch_size=batch_size)
    keys = torch.zeros(tokens.shape[0], tokens.shape[1] - 1, dtype=torch.bool)
    keys[:, rows] = (short - whole > GAIN) & (whole < SURPRISE)
    return KeyTokens(keys, name, context, rows.numel() * tokens.shape[0], evaluator.vocab_size)


@torch.no_grad()
def long_perplexity(
    model: Any,
    tokens: Tensor,
    evaluator: KeyTokens | Any,
    *,
    name: str | None = None,
    context: int = 256,
    batch_size: int = 8,
    seed: int = 0,
) -> pd.DataFrame:
    """LongPPL of `model` on documents `tokens` [B,T]: its perplexity over the evaluator's key tokens.

    One row: [evaluator, context, long_ppl, log_long_ppl, low, high, ppl, n, share]: `low`, `high` a 95% bootstrap
    interval of log_long_ppl over documents (NaN for one); `ppl` over all rows that were scored; `n` key tokens, `share`
    of those rows. Compare models, and steps of a ladder, under one evaluator: `evaluator` is what `key_tokens` returns,
    or what it takes. Caps on the model are respected.

    Raises ValueError where no token is a key token, for other documents than the key tokens', another vocabulary, and
    as `key_tokens` does.

    >>> keys = key_tokens("smollm2", documents)
    >>> pd.concat([long_perplexity(c.load(), documents, keys).assign(step=step) for step, c in ladder])
    """
    import pandas as pd

    check_documents(tokens, least=2)
    at_least_one(batch_size=batch_size)
    if not isinstance(evaluator, KeyTokens):
        evaluator = key_tokens(evaluator, tokens, name=name, context=context)
    keys = evaluator.keys
    if keys.shape != (tokens.shape[0], tokens.shape[1] - 1):
        raise ValueError(f"tokens: shape {tuple(tokens.shape)}; the key tokens are of {tuple(keys.shape)} rows")
    if evaluator.vocab_size != model.vocab_size:
        raise ValueError(
            f"evaluator {evaluator.evaluator}: a vocabulary of {evaluator.vocab_size}, the model's is of "
            f"{model.vocab_size}; key tokens are tokens of one tokenizer"
        )
    n = int(keys.sum())
    if not n:
        raise ValueError(
            f"evaluator {evaluator.evaluator}: none of {evaluator.scored} tokens gains {GAIN:g} nats from context "
            f"beyond {evaluator.context} tokens and costs under {SURPRISE:g} with it; LongPPL has nothing to average"
        )
    device = next(model.embedding().parameters()).device
    losses = torch.cat(
        [
            finite_loss(model, part.to(device)).double().cpu()
            for part in tqdm(tokens.split(batch_size), desc="LongPPL", unit="batch", delay=2)
        ]
    )
    sums, counts = (losses * keys).sum(1).numpy(), keys.sum(1).numpy()
    low, high = mean_interval(sums, counts, seed)
    log = float(sums.sum() / n)
    row = {
        "evaluator": evaluator.evaluator, "context": evaluator.context, "long_ppl": float(np.exp(log)),
        "log_long_ppl": log, "low": low, "high": high, "ppl": float(losses[:, evaluator.context :].mean().exp()),
        "n": n, "share": n / evaluator.scored,
    }  # fmt: skip
    return pd.DataFrame([row])
