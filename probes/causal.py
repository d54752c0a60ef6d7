"""The causal check of retrieval heads: needle accuracy without them, against as many random heads."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from .arguments import check_prompts
from .intervals import interval, resample, share_interval
from .needles import Needles, answered

BOOTSTRAP = 2000


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

    [ablated ("none" | "top" | "random"), draw, k, accuracy, low, high, effect, effect_low, effect_high, n]. `low`,
    `high`: Wilson's 95% interval. `effect`, on the row "top": mean accuracy without random heads minus accuracy
    without the top ones, with a 95% bootstrap over prompts (the same for both; NaN for one) and draws. Random heads are
    never top heads; they come from the layers of the top k, as many from each, and where a layer has too few others,
    from other sites of the same kinds. Warns where the model answers none of the prompts, so that nothing can be lost.

    Raises ValueError for a table of something else or with a head twice in its top k, k outside it, or where fewer than
    k other heads are left to draw.
    """
    check_prompts(needles)
    columns = ["layer", "site", "head"]
    if not isinstance(heads, pd.DataFrame) or not set(columns) <= set(heads.columns):
        raise ValueError("heads: expected a table of `retrieval_heads`, with columns layer, site, head")
    if draws < 0:
        raise ValueError(f"draws={draws}: expected >= 0 draws of random heads")
    if not 1 <= k <= len(heads):
        raise ValueError(f"k={k}: expected 1..{len(heads)}, the heads in the table")
    top = [tuple(map(int, h)) for h in heads[columns].head(k).to_numpy()]
    twice = next((head for head in top if top.count(head) > 1), None)
    if twice is not None:
        raise ValueError(f"heads: (layer, site, head) {twice} stands several times in the top {k}; expected one table")
    rng = np.random.default_rng(seed)

    def right(without: Sequence[tuple[int, ...]]) -> np.ndarray:
        with model.ablate(without):
            return answered(model, needles, batch).numpy()

    whole, cut = answered(model, needles, batch).numpy(), right(top)
    others = [right(random_heads(model, top, rng)) for _ in range(draws)]
    if not whole.any():
        warnings.warn(
            f"causal_check: the model answers none of the {len(needles)} prompts: ablation has nothing to take away",
            stacklevel=2,
        )
    rows = [("none", 0, 0, whole), ("top", 0, k, cut), *(("random", d, k, hits) for d, hits in enumerate(others))]
    table = pd.DataFrame(
        [(name, d, n, hits.mean(), *share_interval(int(hits.sum()), len(hits))) for name, d, n, hits in rows],
        columns=["ablated", "draw", "k", "accuracy", "low", "high"],
    )
    table[["effect", "effect_low", "effect_high"]] = np.nan
    if others:
        gap = np.stack(others).astype(float) - cut  # [draws, prompts]
        drawn = (resample(draws, BOOTSTRAP, rng) @ gap) * resample(gap.shape[1], BOOTSTRAP, rng)
        low, high = interval(drawn.sum(1) / gap.size) if gap.shape[1] > 1 else (np.nan, np.nan)
        table.loc[table["ablated"] == "top", ["effect", "effect_low", "effect_high"]] = gap.mean(), low, high
    return table.assign(n=len(needles))


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
