"""Retrieval heads: which heads read the needle while the model answers, and how sure that ranking is."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from tqdm import tqdm

from ..hooks.config import whole_number
from ..hooks.record import Stats
from ..hooks.sites import Site
from .arguments import at_least_one, check_prompts
from .finite import finite_hidden
from .intervals import interval, rank_interval, resample
from .needles import Needles, answered
from .published import Compat, check_compat, occurrences

RETRIEVAL = 0.1  # a head whose copy score reaches this is a retrieval head (arXiv 2404.15574)
PUBLISHED_SAMPLES = 200  # that the script of arXiv 2606.15378 averages at most
Score = Literal["copy", "mass", "qr"]


def retrieval_heads(
    model: Any,
    needles: Needles,
    score: Score | None = None,
    *,
    rows: Literal["answer", "published"] = "answer",
    only_answered: bool = True,
    generate: bool = False,
    full_only: bool | None = None,
    compat: Compat | None = None,
    null_query: Sequence[int] | None = None,
    bootstrap: int = 1000,
    seed: int = 0,
    batch: int = 16,
) -> pd.DataFrame:
    """Score every softmax head for reading the needle; best first.

    [layer, site, head, kind, score, low, high, rank_low, rank_high, retrieval, n]: the mean over n prompts, and 95%
    intervals of score and rank over `bootstrap` draws of prompts (heads that tie share ranks; one prompt says nothing
    of either: NaN, and all ranks).

    `score`: None is "copy", or "mass" with `compat`. `copy` (arXiv 2404.15574): share of answer positions at which the
    head's most attended key lies in the needle's value and holds the very token being emitted; `retrieval` is score >=
    0.1. Teacher-forced, in one forward pass;
    `generate=True` scores the tokens that greedy decoding emits instead. `mass` (arXiv 2606.15378): attention on the
    value from the answer rows, or (`rows="published"`) from the row before the prompt's last. `qr` (QRHead, arXiv
    2506.09944): attention on the needle, averaged over the question's rows, minus the same under a question that asks
    nothing: `null_query` token ids, or the haystack text that would stand in the needle's place, repeated to length.
    Averages are over the samples that the model answers, unless `only_answered=False`. Heads of window sites are left
    out unless `full_only=False`.

    `compat="qiao2026"` gives the mass score of the script published with arXiv 2606.15378: attention from the row
    before the prompt's last on every occurrence of the answer in the prompt, full stop and colon beside it included
    where they are tokens (`published.spellings`), over those of the first 200 prompts that have one, answered or not;
    heads of window sites too. On rows read by `needles_from_texts(..., compat="qiao2026")` these are the script's
    numbers: find_retrieval_heads.py of thunlp/rethinking-hybrid-attention at commit feaad08 was run beside this in fp32
    and differed by less than 1e-6 (on a GPU it runs in bf16, and rounds accordingly).

    Raises ValueError when the model answers none of the prompts, has no site to rank, or options do not go together.

    >>> hs.retrieval_heads(model, needles).head(10)
    """
    check_prompts(needles)
    at_least_one(bootstrap=bootstrap, batch=batch)
    score = score or ("mass" if compat else "copy")
    _check(needles, score, rows, generate, compat, null_query)
    sites = ranked_sites(model, compat is None if full_only is None else full_only)
    where = None
    if compat:
        needles, where = published_prompts(needles)
        found = where.any(1)
        needles, where = needles[found], where[found]
    elif only_answered:
        ok = answered(model, needles, batch)
        if not bool(ok.any()):
            raise ValueError(
                f"the model answers none of the {len(needles)} prompts: there is no retrieval to attribute; "
                "pass only_answered=False to score all prompts"
            )
        needles = needles[ok]
    if generate:
        needles = emitted(model, needles, batch)
    parts: dict[Site, list[Tensor]] = {site: [] for site in sites}
    every = torch.arange(len(needles)).split(batch)
    for index in tqdm(every, desc=f"{score} score", disable=len(every) <= 4):
        part = needles[index]
        if score == "qr":
            scores = query_scores(model, part, sites, null_query)
        else:
            early, value = bool(compat) or rows == "published", None if where is None else where[index]
            scores = {s: x[score] for s, x in head_scores(model, part, sites, published_row=early, value=value).items()}
        for site in sites:
            parts[site].append(scores[site])
    table = _table(sites, torch.cat([torch.cat(parts[site]) for site in sites], 1).numpy(), bootstrap, seed)
    if score == "copy":
        table.insert(len(table.columns) - 1, "retrieval", table["score"] >= RETRIEVAL)
    return table.sort_values("score", ascending=False, kind="stable", ignore_index=True)


def head_scores(
    model: Any,
    needles: Needles,
    sites: Sequence[Site],
    *,
    published_row: bool = False,
    last_rows: int = 0,
    value: Tensor | None = None,
    published_entropy: bool = False,
) -> dict[Site, dict[str, Tensor]]:
    """Per sample and head, [N,H] in fp64: `copy` and `mass` at the answer rows and, over the last `last_rows` rows,
    mean `entropy` (nats) and `entropy_norm`.

    `value` [N,T]: columns that `mass` counts, in place of the needle's value. `published_entropy`: of the prompt's last
    rows, before any answer, that of row i divided by log(i + 1), whatever the row sees (NaN at row 0).
    """
    device = next(model.parameters()).device
    moved, spans = needles.to(device), needles.spans["value"].to(device)
    A = needles.answer_rows.shape[1]
    T = needles.tokens.shape[1]
    real = (moved.answer_rows >= 0)[..., None]
    answer = moved.answer_rows.clamp(min=0)
    if published_row:
        answer = (answer[:, :1] - 1).expand(-1, A).maximum(_first_real(moved)[:, None])
    end = moved.query_row + 1 if published_entropy else torch.full((len(needles),), T, device=device)
    tail = (end[:, None] + torch.arange(-last_rows, 0, device=device)).maximum(_first_real(moved)[:, None])
    labels = needles.key_labels() if value is None else value.to(torch.uint8)
    with torch.no_grad(), model.record(stats=Stats(rows=torch.cat([answer, tail], 1), labels=labels.to(device))) as rec:
        finite_hidden(model, moved.tokens, moved.attention_mask)
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
        entropy, norm = s.entropy[:, A:].double(), s.entropy_norm[:, A:].double()
        if published_entropy:
            norm = entropy / _real_position(moved, tail).add(1).double().log()[..., None]
        out[site] = {
            "copy": copied.cpu(), "mass": mass.cpu(), "entropy": entropy.mean(1).cpu(),
            "entropy_norm": norm.mean(1).cpu(),
        }  # fmt: skip
    return out


def query_scores(
    model: Any, needles: Needles, sites: Sequence[Site], null_query: Sequence[int] | None = None
) -> dict[Site, Tensor]:
    """The QR score of each sample and head, [N,H] in fp64; see `retrieval_heads`."""
    device = next(model.parameters()).device
    question = needles.spans["question"]
    length = question[:, 1] - question[:, 0]
    steps = torch.arange(int(length.max()))
    columns = (question[:, :1] + steps).clamp(max=needles.tokens.shape[1] - 1)
    asked = (steps < length[:, None]).to(device)[..., None]
    empty = needles.tokens.clone()
    for i, (first, last) in enumerate(question.tolist()):
        text = null_query
        if text is None:
            assert needles.removed is not None  # `_check`
            text = needles.removed[i, slice(*needles.spans["needle"][i].tolist())].tolist()
        empty[i, first:last] = torch.tensor(text).repeat(-(-(last - first) // len(text)))[: last - first]
    mask = None if needles.attention_mask is None else needles.attention_mask.to(device)
    out: dict[Site, Tensor] = {}
    for sign, tokens in ((1, needles.tokens), (-1, empty)):
        wanted = Stats(rows=columns.to(device), labels=needles.key_labels().to(device), top1=False, distance=False)
        with torch.no_grad(), model.record(stats=wanted) as rec:
            finite_hidden(model, tokens.to(device), mask)
        for site in sites:
            mass = rec.stats(site.layer, site.index).mass[..., 1].double()
            mean = ((mass * asked).sum(1) / asked.sum(1)).cpu()
            out[site] = out.get(site, 0) + sign * mean
    return out


def published_prompts(needles: Needles, most: int = PUBLISHED_SAMPLES) -> tuple[Needles, Tensor]:
    """The first `most` prompts and the columns [N,T] where the scripts of arXiv 2606.15378 see the value: every
    occurrence of one of the answer's spellings in the prompt, or where there is no text, of its tokens; it may have
    none. ValueError where no prompt has one."""
    needles = needles[: min(most, len(needles))]
    where = torch.zeros_like(needles.tokens, dtype=torch.bool)
    starts = _first_real(needles)
    for i, answer in enumerate(needles.answers):
        prompt = slice(int(starts[i]), int(needles.query_row[i]) + 1)
        ways = [answer[answer >= 0].tolist()] if needles.spellings is None else needles.spellings[i]
        where[i, prompt] = occurrences(needles.tokens[i, prompt], ways)
    if not bool(where.any()):
        raise ValueError(f'compat="qiao2026": the answer\'s tokens stand in none of the {len(needles)} prompts')
    return needles, where


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


def ranked_sites(model: Any, full_only: bool) -> list[Site]:
    """The softmax sites whose heads compete; ValueError where there are none."""
    sites = [s for s in model.sites if s.kind == "full" or (s.softmax and not full_only)]
    if not sites:
        kinds = ", ".join(sorted({s.kind for s in model.sites}))
        raise ValueError(f"this model has no {'full' if full_only else 'softmax'} sites to rank; it has: {kinds}")
    return sites


def _check(needles: Needles, score: str, rows: str, generate: bool, compat: str | None, null_query: Any) -> None:
    if score not in ("copy", "mass", "qr"):
        raise ValueError(f'score={score!r}: expected "copy", "mass" or "qr"')
    if rows not in ("answer", "published"):
        raise ValueError(f'rows={rows!r}: expected "answer" or "published"')
    if rows == "published" and score != "mass":
        raise ValueError(f'rows="published" lies before the answer; it goes with score="mass", not {score!r}')
    check_compat(compat)
    if compat and (score != "mass" or generate):
        raise ValueError('compat="qiao2026" is a mass score: it goes with score="mass", without generate')
    ids = [] if null_query is None else [whole_number(token) for token in null_query]
    if null_query is not None and (score != "qr" or not ids or None in ids):
        raise ValueError('null_query: token ids that ask nothing, at least one, for score="qr"')
    if score == "qr" and ("question" not in needles.spans or (needles.removed is None and null_query is None)):
        raise ValueError('score="qr" needs to know the question (and without null_query the haystack): made needles')


def _first_real(needles: Needles) -> Tensor:
    """The column of each sample's first real token: [N]."""
    if needles.attention_mask is None:
        return torch.zeros(len(needles), dtype=torch.int64, device=needles.tokens.device)
    return needles.attention_mask.int().argmax(1)


def _real_position(needles: Needles, columns: Tensor) -> Tensor:
    """Columns [N,R] counted from each sample's first real token."""
    if needles.attention_mask is None:
        return columns
    return (needles.attention_mask.long().cumsum(1) - 1).gather(1, columns)


def _table(sites: Sequence[Site], scores: np.ndarray, bootstrap: int, seed: int) -> pd.DataFrame:
    """One row per head, from the scores [N, heads of all sites]."""
    drawn = resample(len(scores), bootstrap, np.random.default_rng(seed)) @ scores / len(scores)
    (low, high), (best, worst) = interval(drawn), rank_interval(drawn.round(12))  # rounded: ties stay ties
    places = [(s.layer, s.index, h, s.kind) for s in sites for h in range(s.heads)]
    if len(scores) < 2:
        low, high, best, worst = np.nan, np.nan, 1, len(places)
    table = pd.DataFrame(places, columns=["layer", "site", "head", "kind"])
    return table.assign(score=scores.mean(0), low=low, high=high, rank_low=best, rank_high=worst, n=len(scores))
