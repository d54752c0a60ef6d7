"""Activation patching (arXiv 2202.05262, 2309.16042): which head carries what tells a clean prompt from a corrupt one?

Head outputs of one prompt, before the output projection, are put into the run on the other: through the sites' edits,
so that attention stays fused and recurrences are reached like any head.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from ..hooks.caps import Edit, refuse_opaque
from ..hooks.sites import Site
from .arguments import at_least_one, check_prompts, head_tuples
from .finite import finite_hidden
from .intervals import interval, resample
from .needles import Needles

DRAWS = 1000
Direction = Literal["denoise", "noise"]
HELD = 2**27
"""Elements of head outputs kept at once; more sites than fit are captured in further passes."""


@torch.no_grad()
def patch_heads(
    model: Any,
    clean: Needles,
    corrupt: Needles | Tensor | Literal["value", "removed"] = "value",
    *,
    heads: Sequence[tuple[int, ...]] | None = None,
    by: Literal["head", "site"] = "head",
    rows: Sequence[str] | Mapping[str, Tensor] = ("all",),
    metric: Literal["logit_diff", "loss"] | None = None,
    directions: Sequence[Direction] = ("denoise", "noise"),
    batch: int = 16,
) -> pd.DataFrame:
    """Patch head outputs between clean needle prompts and corrupt ones, one head (or site) and group of rows at a time.

    `corrupt`: "value" (each prompt with the value of another; see `swap_values`), "removed" (haystack in the needle's
    place), prompts [N,T], or Needles whose answers differ. `heads`: None for all that are reached, or (layer, head) or
    (layer, site, head). `by="site"` patches all heads of a site at once; `head` is -1 then. `rows`: groups of token
    columns, by name ("all", "needle", "key", "value", "question", "answer" (the answer rows), "haystack" (the rest)) or
    a mapping from a name to columns [N,R] or a bool mask [N,T]. `metric`: "logit_diff", the logit of the clean answer's
    token over the corrupt one's where the two answers first differ, or "loss", the mean loss on the clean answer
    (nats/token); by default the first where the corrupt prompts have an answer. Teacher-forced throughout.

    Returns [direction, rows, layer, site, head, kind, mixer, metric, base, source, patched, recovered, low, high, n].
    "denoise" runs the corrupt prompts (`base`) and patches in outputs of the clean ones (`source`), "noise" the other
    way round; `recovered` is how far the metric moves from base to source, (patched - base) / (source - base), of means
    over the `n` prompts: 1 is all the way, 0 not at all, and it may lie outside. `low`, `high`: its 95% interval,
    bootstrap over prompts (NaN for one).

    Raises ValueError for heads that do not exist or are not reached, for rows that mark no column, for prompts of
    another shape, padding or place of the answer, and where the model does not tell clean from corrupt prompts, so that
    there is nothing to recover.

    >>> table = hs.patch_heads(model, needles, rows=("value", "answer"))
    >>> hs.figures.patching(table)
    """
    if by not in ("head", "site"):
        raise ValueError(f'by={by!r}: expected "head" or "site"')
    if isinstance(directions, str) or not directions or set(directions) - {"denoise", "noise"}:
        raise ValueError(f'directions={directions!r}: expected a list of "denoise", "noise" or both')
    if not isinstance(clean, Needles):
        raise ValueError(f"clean: {type(clean).__name__}; expected Needles, whose answers say what is to be recovered")
    check_prompts(clean)
    at_least_one(batch=batch)
    pair = _pair(clean, corrupt, metric)
    places = _places(model, heads, by)
    groups = _groups(clean, rows)
    for name, mask in groups.items():
        if not bool(mask.any()):
            raise ValueError(f"rows: {name!r} marks no column of any prompt; there is nothing to patch")
    passes = len(directions) * -(-len(clean) // batch) * len(places) * len(groups)
    scores: dict[tuple[Any, ...], list[Tensor]] = {}
    with tqdm(total=passes, desc="patching", unit="pass", delay=2, disable=None) as progress:
        for direction in directions:
            for start in range(0, len(clean), batch):
                part = pair[start : start + batch]
                into, out_of = (part.corrupt, part.clean) if direction == "denoise" else (part.clean, part.corrupt)
                for name, tokens in (("base", into), ("source", out_of)):
                    scores.setdefault((direction, name), []).append(part.measure(model, tokens))
                for sites, outputs in _captured(model, places, out_of, part.mask):
                    for site, number in [place for place in places if place[0] in sites]:
                        for group, mask in groups.items():
                            edit = _patch(outputs[site], mask[start : start + batch], number)
                            with model.edit({site: edit}):
                                value = part.measure(model, into)
                            scores.setdefault((direction, group, site, number), []).append(value)
                            progress.update()
    every = {key: torch.cat(values) for key, values in scores.items()}
    mean = {key: values.mean().item() for key, values in every.items()}
    records = []
    for direction in directions:
        base, source = mean[direction, "base"], mean[direction, "source"]
        if not abs(source - base) > 1e-6 * max(1.0, abs(source), abs(base)):
            raise ValueError(
                f"patch_heads: the {pair.metric} is {base:.4g} on one side and {source:.4g} on the other; the model "
                "does not tell clean from corrupt prompts, and there is nothing to recover"
            )
        for group in groups:
            for site, number in places:
                key = (direction, group, site, number)
                patched = mean[key]
                low, high = _interval(every[key], every[direction, "base"], every[direction, "source"])
                records.append({
                    "direction": direction, "rows": group, "layer": site.layer, "site": site.index,
                    "head": -1 if number is None else number, "kind": site.kind, "mixer": site.mixer,
                    "metric": pair.metric, "base": base, "source": source, "patched": patched,
                    "recovered": (patched - base) / (source - base), "low": low, "high": high,
                    "n": len(clean),
                })  # fmt: skip
    return pd.DataFrame(records)


def _interval(patched: Tensor, base: Tensor, source: Tensor) -> tuple[float, float]:
    """95% bootstrap interval of the recovered share over prompts [n]; NaN for one."""
    if len(base) < 2:
        return math.nan, math.nan
    drawn = resample(len(base), DRAWS, np.random.default_rng(0))
    moved, whole = (drawn @ (x - base).numpy() for x in (patched, source))
    low, high = interval(moved / whole)
    return float(low), float(high)


def swap_values(needles: Needles) -> Needles:
    """The same prompts, each with the value of the next prompt whose own differs and is as long in tokens; the answers
    with it. The answer tokens that a prompt ends in (teacher-forced) stay. ValueError for a prompt without a partner.
    """
    tokens, answers, n = needles.tokens.clone(), needles.answers.clone(), len(needles)
    sizes = needles.spans["value"][:, 1] - needles.spans["value"][:, 0]
    lengths = (needles.answers >= 0).sum(1)
    for i in range(n):
        alike = (sizes == sizes[i]) & (lengths == lengths[i]) & (needles.answers != needles.answers[i]).any(1)
        others = [j % n for j in range(i + 1, i + n) if alike[j % n]]
        if not others:
            raise ValueError(f"swap_values: prompt {i} has no partner with another value of {int(sizes[i])} tokens")
        (a, b), (c, d) = needles.spans["value"][i].tolist(), needles.spans["value"][others[0]].tolist()
        tokens[i, a:b] = needles.tokens[others[0], c:d]
        answers[i] = needles.answers[others[0]]
    return dataclasses.replace(needles, tokens=tokens, answers=answers, removed=None)


@dataclasses.dataclass
class _Pair:
    """Prompts clean and corrupt [N,T], and what is measured on either: logits at `at` [N,A] of tokens `answer`, over
    those of `other` at one of them, or the loss."""

    clean: Tensor
    corrupt: Tensor
    at: Tensor
    answer: Tensor
    other: Tensor | None
    mask: Tensor | None

    @property
    def metric(self) -> str:
        return "loss" if self.other is None else "logit_diff"

    def __getitem__(self, part: slice) -> _Pair:
        values = (getattr(self, field.name) for field in dataclasses.fields(self))
        return _Pair(*(None if value is None else value[part] for value in values))  # type: ignore[arg-type]

    def measure(self, model: Any, tokens: Tensor) -> Tensor:
        """The metric of each prompt, fp64 [n] on the CPU."""
        device = next(model.parameters()).device
        hidden = finite_hidden(model, tokens.to(device), None if self.mask is None else self.mask.to(device))
        at, real = self.at.clamp(min=0).to(device), (self.answer >= 0).to(device)
        logits = model.unembed_hidden(hidden.gather(1, at[..., None].expand(-1, -1, hidden.shape[-1]))).double()
        answer = self.answer.clamp(min=0).to(device)
        if self.other is None:
            losses = F.cross_entropy(logits.flatten(0, 1), answer.flatten(), reduction="none").view(real.shape)
            return ((losses * real).sum(1) / real.sum(1)).cpu()
        wanted, other = (
            x.gather(-1, i[..., None])[:, 0, 0] for x, i in ((logits, answer), (logits, self.other.to(device)))
        )
        return (wanted - other).cpu()


def _pair(clean: Needles, corrupt: Any, metric: str | None) -> _Pair:
    """What to run and measure; ValueError where the two do not fit."""
    answers = None
    if isinstance(corrupt, str):
        if corrupt not in ("value", "removed"):
            raise ValueError(f'corrupt={corrupt!r}: expected "value", "removed", prompts [N,T] or Needles')
        corrupt = swap_values(clean) if corrupt == "value" else clean.removed
        if corrupt is None:
            raise ValueError('corrupt="removed": these needles have no prompts without the needle; use "value"')
    those = corrupt if isinstance(corrupt, Needles) else None
    corrupt = corrupt if those is None else those.tokens
    if corrupt.shape != clean.tokens.shape:
        raise ValueError(
            f"corrupt: prompts {tuple(corrupt.shape)}; expected those of clean, {tuple(clean.tokens.shape)}"
        )
    if those is not None:
        if not torch.equal(_real(those), _real(clean)):
            raise ValueError("corrupt: prompts padded in other places than those of clean; expected the same columns")
        answers = those.answers if those.answers.shape == clean.answers.shape else None
    metric = metric or ("loss" if answers is None else "logit_diff")
    if metric not in ("logit_diff", "loss"):
        raise ValueError(f'metric={metric!r}: expected "logit_diff" or "loss"')
    if metric == "loss":
        return _Pair(clean.tokens, corrupt, clean.answer_rows, clean.answers, None, clean.attention_mask)
    if those is None or answers is None:
        raise ValueError('metric="logit_diff": the corrupt prompts have no answer of their own; use metric="loss"')
    if not torch.equal(those.answer_rows, clean.answer_rows):
        raise ValueError('corrupt: answers in other rows than those of clean; expected the same rows, or metric="loss"')
    differs = (answers != clean.answers) & (answers >= 0) & (clean.answers >= 0)
    if not bool(differs.any(1).all()):
        raise ValueError(
            f"corrupt: prompt {int((~differs.any(1)).nonzero()[0, 0])} has the same answer as the clean one"
        )
    first = differs.int().argmax(1, keepdim=True)
    at, answer, other = (x.gather(1, first) for x in (clean.answer_rows, clean.answers, answers))
    return _Pair(clean.tokens, corrupt, at, answer, other, clean.attention_mask)


def _real(needles: Needles) -> Tensor:
    """Which columns [N,T] are real tokens."""
    mask = needles.attention_mask
    return torch.ones_like(needles.tokens, dtype=torch.bool) if mask is None else mask.bool()


def _places(model: Any, heads: Sequence[tuple[int, ...]] | None, by: str) -> list[tuple[Site, int | None]]:
    """Heads (or, None, whole sites) to patch."""
    if heads is None:
        found = [(site, n) for site in model.sites if not site.opaque for n in range(site.heads)]
    else:
        found = [model.sites.head(head) for head in head_tuples(heads)]
    if not found:
        raise ValueError("patch_heads: this model has no heads that are reached")
    for site, _ in found:
        refuse_opaque(site, "patch_heads")
    return list(dict.fromkeys((site, None if by == "site" else n) for site, n in found))


def _groups(needles: Needles, rows: Any) -> dict[str, Tensor]:
    """Row groups as bool masks [N,T]."""
    N, T = needles.tokens.shape
    columns = torch.arange(T)

    def named(name: str) -> Tensor:
        if name == "all":
            return torch.ones(N, T, dtype=torch.bool)
        if name == "answer":
            return _marked(needles.answer_rows, T)
        if name == "haystack":
            taken = [named(n) for n in (*needles.spans, "answer")]
            return ~torch.stack(taken).any(0)
        if name not in needles.spans:
            raise ValueError(f"rows: unknown group {name!r}; known: all, {', '.join(needles.spans)}, answer, haystack")
        span = needles.spans[name]
        return (columns >= span[:, :1]) & (columns < span[:, 1:])

    if not isinstance(rows, Mapping):
        if isinstance(rows, str) or not rows:
            raise ValueError(f"rows={rows!r}: expected a list of group names, or a mapping from names to columns")
        return {name: named(name) for name in rows}
    groups = {}
    for name, given in rows.items():
        given = torch.as_tensor(given).cpu()
        if given.dtype != torch.bool and bool((given >= T).any()):
            raise ValueError(f"rows: {name!r} has column {int(given.max())}; the prompts have {T} tokens")
        mask = given if given.dtype == torch.bool else _marked(given, T)
        if mask.shape != (N, T):
            raise ValueError(f"rows: {name!r} has shape {tuple(given.shape)}; expected columns [N,R] or a mask [N,T]")
        groups[name] = mask
    return groups


def _marked(columns: Tensor, T: int) -> Tensor:
    """Columns [N,R] (negative: none) as a mask [N,T]."""
    return (columns[..., None] == torch.arange(T)).any(-2)


def _captured(
    model: Any, places: list[tuple[Site, int | None]], tokens: Tensor, mask: Tensor | None
) -> Iterator[tuple[list[Site], dict[Site, Tensor]]]:
    """Head outputs [B,T,H,V] of the places' sites on these prompts, as many sites at a time as may be held."""
    sites = list(dict.fromkeys(site for site, _ in places))
    device = next(model.parameters()).device
    while sites:
        held, outputs = [sites.pop(0)], {}
        size = tokens.numel() * held[0].heads * held[0].value_dim
        while sites and (size := size + tokens.numel() * sites[0].heads * sites[0].value_dim) <= HELD:
            held.append(sites.pop(0))

        def keeper(site: Site, outputs: dict[Site, Tensor] = outputs) -> Edit:
            def keep(z: Tensor, real: Tensor | None) -> Tensor:
                outputs[site] = z
                return z

            return keep

        with model.edit({site: keeper(site) for site in held}):
            model.hidden(tokens.to(device), None if mask is None else mask.to(device))
        yield held, outputs


def _patch(source: Tensor, rows: Tensor, head: int | None) -> Edit:
    """An edit that takes head outputs at the rows [B,T] from `source` [B,T,H,V], of one head or (None) of all."""

    def edit(z: Tensor, real: Tensor | None) -> Tensor:
        where = rows.to(z.device)[..., None, None].expand(-1, -1, z.shape[2], 1)
        if head is not None:
            where = where & (torch.arange(z.shape[2], device=z.device) == head)[:, None]
        return torch.where(where, source.to(z.dtype), z)

    return edit
