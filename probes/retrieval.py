"""Retrieval heads: which heads read the needle while the model answers, and what happens without them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from tqdm import tqdm

from ..hooks.record import Stats
from ..hooks.sites import Site
from .needles import Needles, answered, needle_accuracy

RETRIEVAL = 0.1  # a head whose copy score reaches this is a retrieval head (arXiv 2404.15574)


def retrieval_heads(
    model: Any,
    needles: Needles,
    score: Literal["copy", "mass"] = "copy",
    *,
    rows: Literal["answer", "published"] = "answer",
    only_answered: bool = True,
    generate: bool = False,
    full_only: bool = True,
    batch: int = 16,
) -> pd.DataFrame:
    """Score every softmax head for reading the needle; best first. [layer, site, head, kind, score, retrieval, n]

    `copy` (arXiv 2404.15574): share of answer positions at which the head's most attended key lies in the needle's
    value and holds the very token being emitted; `retrieval` is score >= 0.1. Teacher-forced, in one forward pass;
    `generate=True` scores the tokens that greedy decoding emits instead. `mass` (arXiv 2606.15378): attention on the
    value from the answer rows, or (`rows="published"`) from the row before the prompt's last. Averages are over the
    samples that the model answers, unless `only_answered=False`. Heads of window sites are left out unless
    `full_only=False`.

    Raises ValueError when the model answers none of the prompts, or has no site to rank.

    >>> hs.retrieval_heads(model, needles).head(10)
    """
    if score not in ("copy", "mass"):
        raise ValueError(f'score={score!r}: expected "copy" or "mass"')
    if rows not in ("answer", "published"):
        raise ValueError(f'rows={rows!r}: expected "answer" or "published"')
    if rows == "published" and score == "copy":
        raise ValueError('rows="published" lies before the answer, where nothing is copied; it goes with score="mass"')
    sites = ranked_sites(model, full_only)
    if only_answered:
        ok = answered(model, needles, batch)
        if not bool(ok.any()):
            raise ValueError(
                f"the model answers none of the {len(needles)} prompts: there is no retrieval to attribute; "
                "pass only_answered=False to score all prompts"
            )
        needles = needles[ok]
    if generate:
        needles = emitted(model, needles, batch)
    totals = {site: torch.zeros(site.heads, dtype=torch.float64) for site in sites}
    for part in tqdm(list(needles.batches(batch)), desc=f"{score} score", disable=len(needles) <= 4 * batch):
        scores = head_scores(model, part, sites, published_row=rows == "published")
        for site in sites:
            totals[site] += scores[site][score].sum(0)
    frames = []
    for site in sites:
        value = (totals[site] / len(needles)).numpy()
        flag = {"retrieval": value >= RETRIEVAL} if score == "copy" else {}
        frames.append(_heads(site, score=value, **flag, n=len(needles)))
    table = pd.concat(frames, ignore_index=True)
    return table.sort_values("score", ascending=False, kind="stable", ignore_index=True)


def head_scores(
    model: Any, needles: Needles, sites: Sequence[Site], *, published_row: bool = False, last_rows: int = 0
) -> dict[Site, dict[str, Tensor]]:
    """Per sample and head, [N,H] in fp64: `copy` and `mass` at the answer rows and, over the last `last_rows` rows,
    mean `entropy` (nats) and `entropy_norm`."""
    device = next(model.parameters()).device
    moved, spans = needles.to(device), needles.spans["value"].to(device)
    A = needles.answer_rows.shape[1]
    T = needles.tokens.shape[1]
    real = (moved.answer_rows >= 0)[..., None]
    answer = moved.answer_rows.clamp(min=0)
    if published_row:
        answer = (answer[:, :1] - 1).expand(-1, A)
    tail = torch.arange(T - last_rows, T, device=device).expand(len(needles), -1)
    wanted = Stats(rows=torch.cat([answer, tail], 1), labels=needles.key_labels().to(device))
    with torch.no_grad(), model.record(stats=wanted) as rec:
        model.hidden(moved.tokens, moved.attention_mask)
    out = {}
    for site in sites:
        s = rec.stats(site.layer, site.index)
        count = real.sum(1).double()
        mass = (s.mass[:, :A, :, 0].double() * real).sum(1) / count
        top = s.top1[:, :A]
        columns = torch.arange(T, device=device)
        inside = ((columns >= spans[:, :1]) & (columns < spans[:, 1:])).gather(1, top.flatten(1)).view_as(top)
        same = moved.tokens.gather(1, top.flatten(1)).view_as(top) == moved.answers[..., None]
        copied = ((inside & same & real).sum(1)).double() / count
        out[site] = {
            "copy": copied.cpu(),
            "mass": mass.cpu(),
            "entropy": s.entropy[:, A:].double().mean(1).cpu(),
            "entropy_norm": s.entropy_norm[:, A:].double().mean(1).cpu(),
        }
    return out


@torch.no_grad()
def emitted(model: Any, needles: Needles, batch: int = 16) -> Needles:
    """The same prompts with the answer that greedy decoding gives in place of the right one.

    Scoring that sequence in one pass equals scoring during decoding, since whole pass = token by token.
    """
    if bool((needles.answer_rows < 0).any()):
        raise ValueError("generate=True needs answers of one length")
    tokens, answers = needles.tokens.clone(), needles.answers.clone()
    A = answers.shape[1]
    start = int(needles.query_row[0]) + 1
    device = next(model.parameters()).device
    for i, part in enumerate(needles.batches(batch)):
        mask = None if part.attention_mask is None else part.attention_mask[:, :start].to(device)
        made = model.generate(part.tokens[:, :start].to(device), A, attention_mask=mask).cpu()
        rows = slice(i * batch, i * batch + len(part))
        answers[rows] = made[:, start:]
        tokens[rows, start:] = made[:, start:-1]
    return dataclasses.replace(needles, tokens=tokens, answers=answers)


def causal_check(
    model: Any,
    needles: Needles,
    heads: pd.DataFrame,
    *,
    k: int = 10,
    draws: int = 5,
    seed: int = 0,
    batch: int = 16,
) -> pd.DataFrame:
    """Needle accuracy without the top-k heads of a `retrieval_heads` table, against k random heads of the same layers.

    [ablated ("none" | "top" | "random"), draw, k, accuracy]. Random heads are never top heads; they come from the
    layers of the top k, as many from each, and where a layer has too few others, from other sites of the same kinds.
    Raises ValueError for k outside the table, or where fewer than k other heads are left to draw.
    """
    if not 1 <= k <= len(heads):
        raise ValueError(f"k={k}: expected 1..{len(heads)}, the heads in the table")
    top = [tuple(map(int, h)) for h in heads[["layer", "site", "head"]].head(k).to_numpy()]
    rows = [("none", 0, 0, needle_accuracy(model, needles, batch))]
    with model.ablate(top):
        rows.append(("top", 0, k, needle_accuracy(model, needles, batch)))
    rng = np.random.default_rng(seed)
    for draw in range(draws):
        with model.ablate(random_heads(model, top, rng)):
            rows.append(("random", draw, k, needle_accuracy(model, needles, batch)))
    return pd.DataFrame(rows, columns=["ablated", "draw", "k", "accuracy"])


def random_heads(model: Any, top: Sequence[tuple[int, ...]], rng: np.random.Generator) -> list[tuple[int, int, int]]:
    """As many heads as `top` has, none of them in it: from the same sites where those have enough others."""
    chosen = {(model.sites.head(h)[0], h[-1]) for h in top}
    kinds = {site.kind for site, _ in chosen}
    sites = list(dict.fromkeys(model.sites.head(h)[0] for h in top))
    free = {s: [h for h in range(s.heads) if (s, h) not in chosen] for s in model.sites if s.kind in kinds}
    if sum(map(len, free.values())) < len(top):
        raise ValueError(f"k={len(top)}: only {sum(map(len, free.values()))} other heads to compare with")
    out = []
    for site in sites:
        wanted = sum(s is site for s, _ in chosen)
        out += [(site, int(h)) for h in rng.permutation(free[site])[:wanted]]
    rest = [(s, h) for s, heads in free.items() for h in heads if (s, h) not in out]
    out += [rest[i] for i in rng.permutation(len(rest))[: len(top) - len(out)]]
    return [(site.layer, site.index, head) for site, head in out]


def ranked_sites(model: Any, full_only: bool) -> list[Site]:
    """The softmax sites whose heads compete; ValueError where there are none."""
    sites = [s for s in model.sites if s.kind == "full" or (s.softmax and not full_only)]
    if not sites:
        kinds = ", ".join(sorted({s.kind for s in model.sites}))
        raise ValueError(f"this model has no {'full' if full_only else 'softmax'} sites to rank; it has: {kinds}")
    return sites


def _heads(site: Site, **columns: Any) -> pd.DataFrame:
    place = {"layer": site.layer, "site": site.index, "head": np.arange(site.heads), "kind": site.kind}
    return pd.DataFrame({**place, **columns})
