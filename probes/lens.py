"""The logit lens: what every layer's residual stream would predict (nostalgebraist 2020; arXiv 2303.08112)."""

from __future__ import annotations

from typing import Any, Literal

import pandas as pd
import torch
from torch import Tensor
from tqdm import tqdm

from ..hooks.instrumented import LOSS_ELEMENTS
from .arguments import at_least_one, check_documents
from .finite import finite_hidden
from .layerwise import mixers_of

CLOSE = 1e-2
"""How far, relative to its size, the last layer's stream through the final norm may be from the model's own hidden
states: 16-bit rounding, far from what a scale left out would do."""


@torch.no_grad()
def logit_lens(
    model: Any,
    tokens: Tensor,
    rows: Any = "last",
    *,
    target: Any = "final",
    where: Literal["pre", "mid", "post"] = "post",
    top: int = 5,
    attention_mask: Tensor | None = None,
    batch: int = 8,
) -> pd.DataFrame:
    """Logits of the residual stream of every layer through the final norm and the unembedding.

    `tokens` [N,T]; `rows`: token columns, "last" (the last real one), a list [P] or [N,P]; negative ones count from the
    end. `where`: before the mixer (`pre`), after it (`mid`), or after the MLP (`post`). `target`: the token whose
    prediction is followed: the model's own first choice ("final"), the token that comes "next", or ids [P] or [N,P].

    Returns [sample, row, layer, kind, mixer, target, log_prob, rank, kl, top_0, top_log_prob_0, ...]: log-probability
    (nats) and rank (1: first choice) of the target, KL divergence (nats) from the model's own distribution at that row
    to the lens's, and the `top` likeliest tokens. With `where="post"` the last layer is the model itself. A layer
    without a mixer has kind "none".

    Raises ValueError for rows that are not there or are padding, and for a model whose hidden states are not the final
    norm of the last layer's stream.

    >>> table = hs.logit_lens(model, tokens, rows=[-1])
    >>> hs.figures.logit_lens(table)
    """
    if where not in ("pre", "mid", "post"):
        raise ValueError(f'where={where!r}: expected "pre", "mid" or "post"')
    if not 1 <= top <= model.vocab_size:
        raise ValueError(f"top={top}: expected 1 to {model.vocab_size}, the size of the vocabulary")
    check_documents(tokens)
    at_least_one(batch=batch)
    columns = _columns(rows, tokens, attention_mask)
    if attention_mask is not None and attention_mask.shape == tokens.shape:
        _check_real(columns, attention_mask.cpu(), target)
    wanted = _targets(target, tokens, columns)
    if wanted is not None and not bool(((wanted >= 0) & (wanted < model.vocab_size)).all()):
        raise ValueError(
            f"target: ids {int(wanted.min())}..{int(wanted.max())} outside the vocabulary 0..{model.vocab_size - 1}"
        )
    device = next(model.parameters()).device
    frames = []
    starts = range(0, len(tokens), batch)
    for start in tqdm(starts, desc="logit lens", disable=None if len(starts) > 1 else True):
        part = slice(start, start + batch)
        mask = None if attention_mask is None else attention_mask[part].to(device)
        at = columns[part]
        with model.record(resid=at) as rec:
            hidden = finite_hidden(model, tokens[part].to(device), mask)
        final = hidden.gather(1, at.to(device)[..., None].expand(-1, -1, hidden.shape[-1])).flatten(0, 1)
        streams = [rec.resid(layer, where).flatten(0, 1).to(device) for layer in range(model.depth)]
        last = streams[-1] if where == "post" else rec.resid(model.depth - 1, "post").flatten(0, 1).to(device)
        _check(model, last, final)
        aims = None if wanted is None else wanted[part].flatten().to(device)
        frames.append(_lens(model, streams, final, aims, top).assign(
            sample=_repeat(torch.arange(start, start + len(at))[:, None].expand_as(at), model.depth),
            row=_repeat(at, model.depth),
        ))  # fmt: skip
    table = pd.concat(frames, ignore_index=True)
    names = pd.DataFrame(
        [{"layer": layer, **mixers_of([s for s in model.sites if s.layer == layer])} for layer in range(model.depth)]
    )
    table = table.merge(names, on="layer").sort_values(["sample", "row", "layer"], ignore_index=True)
    order = ["sample", "row", "layer", "kind", "mixer", "target", "log_prob", "rank", "kl"]
    order += [f"{name}_{n}" for n in range(top) for name in ("top", "top_log_prob")]
    return table.reindex(columns=order)


def _lens(model: Any, streams: list[Tensor], final: Tensor, aims: Tensor | None, top: int) -> pd.DataFrame:
    """Records of the rows of `final` [n,D], a few at a time, layer by layer: n records a layer."""
    parts: list[pd.DataFrame] = []
    step = max(1, LOSS_ELEMENTS // model.vocab_size)
    for rows in torch.arange(len(final), device=final.device).split(step):
        own = _log_probs(model, final[rows])
        aim = own.argmax(-1) if aims is None else aims[rows]
        for layer, stream in enumerate(streams):
            log_p = _log_probs(model, model.final_norm(stream[rows][None])[0])
            chosen = log_p.gather(-1, aim[:, None])
            best = log_p.topk(top, -1)
            kl = (own.exp() * (own - log_p)).nan_to_num(0.0).sum(-1)  # 0 log 0 = 0
            data: dict[str, Any] = {
                "place": rows, "layer": torch.full_like(rows, layer), "target": aim, "log_prob": chosen[:, 0],
                "rank": 1 + (log_p > chosen).sum(-1), "kl": kl.clamp(min=0),
            }  # fmt: skip
            for n in range(top):
                data |= {f"top_{n}": best.indices[:, n], f"top_log_prob_{n}": best.values[:, n]}
            parts.append(pd.DataFrame({name: x.cpu().numpy() for name, x in data.items()}))
    table = pd.concat(parts).sort_values(["layer", "place"], kind="stable", ignore_index=True)
    return table.drop(columns="place")


def _log_probs(model: Any, hidden: Tensor) -> Tensor:
    logits = model.unembed_hidden(hidden[None])[0]
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)


def _check(model: Any, last: Tensor, final: Tensor) -> None:
    """ValueError where the lens would not be the model at the last layer."""
    lens = model.final_norm(last[None])[0]
    off = (lens.double() - final.double()).abs().max() / final.double().abs().max().clamp(min=1e-30)
    if not float(off) < CLOSE:
        raise ValueError(
            f"logit_lens: the final norm of the last layer's stream is {float(off):.1e} from the model's hidden "
            "states; this model does more there"
        )


def _columns(rows: Any, tokens: Tensor, mask: Tensor | None) -> Tensor:
    """Rows as columns >= 0, [N,P]."""
    N, T = tokens.shape
    if isinstance(rows, str):
        if rows != "last":
            raise ValueError(f'rows={rows!r}: expected "last", a list of columns, or [N,P]')
        last = torch.full((N,), T - 1) if mask is None else (torch.arange(T) * mask.bool().cpu()).amax(1)
        return last[:, None]
    columns = torch.as_tensor(rows).cpu()
    if columns.is_floating_point() and columns.numel():
        raise ValueError(f"rows of {columns.dtype}; expected whole numbers")
    columns = columns.long()
    columns = columns[None] if columns.ndim == 1 else columns
    if columns.ndim != 2 or columns.shape[0] not in (1, N) or not columns.numel():
        raise ValueError(f"rows of shape {tuple(columns.shape)}; expected one list, or one for each of {N} samples")
    if int(columns.min()) < -T or int(columns.max()) >= T:
        raise ValueError(f"rows {int(columns.min())}..{int(columns.max())} do not fit {T} tokens")
    return (columns % T).expand(N, -1)


def _check_real(columns: Tensor, mask: Tensor, target: Any) -> None:
    """ValueError for rows [N,P] that are padding, or (`target="next"`) come before it."""
    real = mask.bool().gather(1, columns)
    if not bool(real.all()):
        sample, n = (~real).nonzero()[0].tolist()
        raise ValueError(f"rows: column {int(columns[sample, n])} of sample {sample} is padding; expected real tokens")
    after = mask.bool().gather(1, (columns + 1).clamp(max=mask.shape[1] - 1))
    if isinstance(target, str) and target == "next" and not bool(after.all()):
        sample, n = (~after).nonzero()[0].tolist()
        raise ValueError(f'target="next": padding comes after column {int(columns[sample, n])} of sample {sample}')


def _targets(target: Any, tokens: Tensor, columns: Tensor) -> Tensor | None:
    """Target ids [N,P]; None: each row's first choice."""
    if isinstance(target, str):
        if target == "final":
            return None
        if target != "next":
            raise ValueError(f'target={target!r}: expected "final", "next", or token ids [P] or [N,P]')
        if int(columns.max()) == tokens.shape[1] - 1:
            raise ValueError('target="next": nothing comes after the last column; leave it out, or give the ids')
        return tokens.cpu().gather(1, columns + 1)
    ids = torch.as_tensor(target).cpu()
    if ids.dtype == torch.bool or ids.is_floating_point() or ids.is_complex():
        raise ValueError(f"target: {ids.dtype}; expected token ids, whole numbers")
    ids = ids.long()
    if ids.shape not in (columns.shape, columns.shape[1:]):
        raise ValueError(f"target: shape {tuple(ids.shape)}; expected an id for each row, {tuple(columns.shape)}")
    return ids.expand_as(columns)


def _repeat(values: Tensor, times: int) -> Any:
    return values.flatten().repeat(times).numpy()
