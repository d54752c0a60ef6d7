"""Retrieval heads over a ladder: entropy, needle mass, copy score and accuracy at every saved step."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import pandas as pd
import torch
from torch import Tensor
from tqdm import tqdm

from ..hooks.ladder import Ladder
from ..hooks.ladder import ladder as open_ladder
from .arguments import at_least_one, check_prompts, head_tuples
from .drift import checkpoints_of
from .needles import Needles, answered
from .published import Compat, check_compat
from .retrieval import head_scores, published_prompts, ranked_sites, retrieval_heads

Heads = Sequence[tuple[int, ...]] | Literal["all", "each"] | None
HEAD = ["layer", "site", "head", "kind"]
MEASURES = ["entropy", "entropy_norm", "mass", "copy", "accuracy"]
PUBLISHED_SAMPLES = 500  # that the script of arXiv 2606.15378 takes entropies of at most


def track(
    ladder: Ladder | str | Path | Iterable[Any],
    needles: Needles,
    heads: Heads = None,
    *,
    top: int = 4,
    last_rows: int = 4,
    samples: bool = False,
    compat: Compat | None = None,
    batch: int = 16,
) -> pd.DataFrame:
    """Follow heads through training: over a Ladder, its path, or a list of Checkpoints.

    [step, tokens, layer, site, head, kind, entropy, entropy_norm, mass, copy, accuracy]. `heads`: (layer, head) or
    (layer, site, head) tuples; "all" full-attention heads; None: the `top` heads by needle mass at the final step,
    followed back; "each": the `top` heads of each step itself. They are chosen on the first half of the prompts and
    measured on the second. `entropy` (nats, and normalised by log visible keys) is the mean over the last `last_rows`
    query rows; `mass` and `copy` are at the answer rows; all prompts count, answered or not, with the accuracy beside
    them (arXiv 2606.15378). `samples=True`: one record per prompt, numbered in column `sample`, which is what
    `formation_step` takes intervals from. A step that fails to load is warned about and left out.

    `compat="qiao2026"`: the published scripts' numbers: heads chosen and `mass` as in `retrieval_heads(compat=...)`,
    NaN for prompts that hold no answer; entropies over the prompt's own last rows, `entropy_norm` divided by log(i + 1)
    at row i whatever the row sees, over the first 500 prompts. (Their script takes learnable sinks out of a row before
    its entropy; here they count as a key.)

    Raises ValueError for a head outside the model, a ladder whose shapes change, or one of which nothing loads.

    >>> table = hs.track(hs.ladder("runs/demo/ladder"), needles)
    """
    if isinstance(ladder, str | Path):
        ladder = open_ladder(ladder)
    elif not isinstance(ladder, Ladder):
        ladder = Ladder("the checkpoints given", checkpoints_of(ladder), {}, {})
    plan = Plan.of(ladder, needles, heads, top=top, last_rows=last_rows, compat=compat, batch=batch)
    frames = []
    for step, checkpoint in tqdm(ladder, desc="track", disable=len(ladder) < 3):
        try:
            model = checkpoint.load()
        except (ValueError, OSError) as error:
            warnings.warn(f"step {step} left out: {error}", stacklevel=2)
            continue
        frames.append(plan.measure(model, step, ladder.tokens(step)))
    if not frames:
        raise ValueError(f"{ladder.path}: no step could be loaded")
    every = pd.concat(frames, ignore_index=True)
    return every if samples else over_samples(every)


def over_samples(table: pd.DataFrame) -> pd.DataFrame:
    """The mean over prompts of a table with a column `sample`."""
    means: Any = table.groupby(["step", *HEAD], sort=False)[MEASURES].mean()
    means = means.reset_index()
    tokens = dict(zip(table["step"], table["tokens"], strict=True))
    means.insert(1, "tokens", [tokens[step] for step in means["step"]])
    return means


@dataclasses.dataclass
class Plan:
    """What is measured at every step of a ladder: which heads, on which prompts, and how."""

    heads: Sequence[tuple[int, ...]] | Literal["all", "each"]
    needles: Needles
    choose: Needles
    """The prompts on which heads are chosen; those of `needles` where none are."""
    top: int = 4
    last_rows: int = 4
    compat: Compat | None = None
    batch: int = 16
    shape: tuple[int, list[tuple[Any, ...]]] | None = None
    """A step and what its model looks like, which every other step must look like too."""

    @classmethod
    def of(cls, ladder: Ladder, needles: Needles, heads: Heads = None, **how: Any) -> Plan:
        """See `track`."""
        check_compat(how.get("compat"))
        check_prompts(needles)
        plan = cls("each", needles, needles, **how)
        at_least_one(top=plan.top, last_rows=plan.last_rows, batch=plan.batch)
        mask = needles.attention_mask
        shortest = needles.tokens.shape[1] if mask is None else int(mask.sum(1).min())
        if plan.last_rows > shortest:
            raise ValueError(f"last_rows={plan.last_rows}: the shortest prompt has {shortest} tokens")
        if isinstance(heads, str) and heads not in ("all", "each"):
            raise ValueError(f'heads={heads!r}: expected (layer, head) tuples, "all", "each" or None')
        if heads is not None and heads != "each":
            plan.heads = "all" if isinstance(heads, str) else head_tuples(heads)
            return plan
        if len(needles) < 2:
            raise ValueError("track: choosing heads and measuring them takes at least 2 prompts")
        half = len(needles) // 2
        plan = cls("each", needles[half:], needles[:half], **how)
        if heads is None:
            final = ladder.final.load()
            plan.heads, plan.shape = plan.best(final), (ladder.final.step, shape_of(final))
        return plan

    def best(self, model: Any) -> list[tuple[int, ...]]:
        """The `top` heads by mass, on the prompts to choose on."""
        ranking = retrieval_heads(
            model, self.choose, "mass", only_answered=False, compat=self.compat, bootstrap=1, batch=self.batch
        )
        return [tuple(map(int, h)) for h in ranking[["layer", "site", "head"]].head(self.top).to_numpy()]

    def measure(self, model: Any, step: int, tokens: int | None) -> pd.DataFrame:
        """One step, one record per prompt and head."""
        self.shape = same_shape("track", self.shape, step, model)
        heads = self.best(model) if self.heads == "each" else self.heads
        rows = track_step(model, self.needles, heads, last_rows=self.last_rows, compat=self.compat, batch=self.batch)
        rows.insert(0, "step", step)
        rows.insert(1, "tokens", tokens)
        return rows


def shape_of(model: Any) -> list[tuple[Any, ...]]:
    """What must not change from step to step: the vocabulary, and of each site its place, mixer and widths."""
    sites = [(s.name, s.mixer, s.window, s.heads, s.kv_heads, s.key_dim, s.value_dim) for s in model.sites]
    return [("vocabulary", model.vocab_size), *sites]


def same_shape(
    name: str, known: tuple[int, list[tuple[Any, ...]]] | None, step: int, model: Any
) -> tuple[int, list[tuple[Any, ...]]]:
    """The step and shape that all steps must have: `known`, or the first model's. ValueError where one differs."""
    found = shape_of(model)
    first, expected = known or (step, found)
    if found != expected:
        a, b = next((a, b) for a, b in zip([*expected, None], [*found, None], strict=False) if a != b)
        raise ValueError(f"{name}: a ladder is one model, and steps {first} and {step} differ: {a} became {b}")
    return first, expected


def track_step(
    model: Any,
    needles: Needles,
    heads: Sequence[tuple[int, ...]] | Literal["all"],
    *,
    last_rows: int = 4,
    compat: Compat | None = None,
    batch: int = 16,
) -> pd.DataFrame:
    """One step of `track`, one record per prompt and head, without the step columns."""
    if heads == "all":
        sites = ranked_sites(model, full_only=True)
        chosen = [(site, h) for site in sites for h in range(site.heads)]
    else:
        chosen = [model.sites.head(tuple(h)) for h in heads]
        sites = list(dict.fromkeys(site for site, _ in chosen))
        for site in sites:
            if not site.softmax:
                raise ValueError(f"track: {site.name} is {site.kind} ({site.mixer}) and has no attention to follow")
    where: Tensor | None = None
    if compat:
        needles, where = published_prompts(needles, PUBLISHED_SAMPLES)
    parts: dict[Any, list[dict[str, Tensor]]] = {site: [] for site in sites}
    for index in torch.arange(len(needles)).split(batch):
        scores = head_scores(
            model, needles[index], sites, last_rows=last_rows, published_row=bool(compat),
            published_entropy=bool(compat), value=None if where is None else where[index],
        )  # fmt: skip
        for site in sites:
            parts[site].append(scores[site])
    right = answered(model, needles, batch).double().numpy()
    frames = []
    for site, head in chosen:
        values = {name: torch.cat([p[name][:, head] for p in parts[site]]).numpy() for name in MEASURES[:-1]}
        if where is not None:  # the script of the masses leaves these prompts out, that of the entropies does not
            values["mass"][~where.any(1).numpy()] = float("nan")
        place = {"layer": site.layer, "site": site.index, "head": head, "kind": site.kind}
        frames.append(pd.DataFrame({"sample": range(len(needles)), **place, **values, "accuracy": right}))
    return pd.concat(frames, ignore_index=True)
