"""Forward passes whose numbers are numbers: NaN or infinite activations are an error that names the first layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..hooks.sites import switched

COLUMNS = 256  # of a broken sample that are looked at, the last ones up to where its output breaks


def finite_hidden(model: Any, tokens: Tensor, attention_mask: Tensor | None = None) -> Tensor:
    """`model.hidden(tokens)`, [B,T,D]; ValueError where it is NaN or infinite at a real token."""
    hidden = model.hidden(tokens, attention_mask)
    bad = ~hidden.detach().isfinite().all(-1)
    if attention_mask is not None:
        bad &= attention_mask.bool().to(bad.device)
    if bool(bad.any()):
        _refuse(model, tokens, attention_mask, bad)
    return hidden


def finite_loss(model: Any, tokens: Tensor, attention_mask: Tensor | None = None) -> Tensor:
    """`model.loss(tokens, per_token=True)`, [B,T-1]; ValueError where it is NaN or infinite."""
    loss = model.loss(tokens, per_token=True, attention_mask=attention_mask)
    if not bool(loss.isfinite().all()):
        finite_hidden(model, tokens, attention_mask)
        raise ValueError("logits are NaN or infinite, though the activations of all layers are finite")
    return loss


@torch.no_grad()
def _refuse(model: Any, tokens: Tensor, mask: Tensor | None, bad: Tensor) -> None:
    sample, column = bad.nonzero()[0].tolist()
    some, first = slice(sample, sample + 1), max(0, column + 1 - COLUMNS)
    real = True if mask is None else mask[some, first : column + 1].bool()[..., None].cpu()
    outer = [(model, "recorders", ()), *((site, "tap", None) for site in model.sites)]  # they expect the whole batch
    with switched(model, outer), model.record(resid=list(range(first, column + 1))) as rec:
        model.hidden(tokens[some], None if mask is None else mask[some])
    for layer in range(model.depth):
        for where, name in (("pre", "input"), ("post", "output")):
            if bool((~rec.resid(layer, where).isfinite().cpu() & real).any()):
                raise ValueError(f"layer {layer}: activations are NaN or infinite, first in its {name}")
    raise ValueError("activations are NaN or infinite after the last layer, in the final norm")
