"""Retrieval heads over a ladder: entropy, needle mass, copy score and accuracy at every saved step."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import pandas as pd
from tqdm import tqdm

from ..hooks.ladder import Ladder
from ..hooks.ladder import ladder as open_ladder
from .needles import Needles, needle_accuracy
from .retrieval import head_scores, ranked_sites, retrieval_heads

Heads = Sequence[tuple[int, ...]] | Literal["all"] | None


def track(
    ladder: Ladder | str | Path,
    needles: Needles,
    heads: Heads = None,
    *,
    top: int = 4,
    last_rows: int = 4,
    batch: int = 16,
) -> pd.DataFrame:
    """Follow heads through training.

    [step, tokens, layer, site, head, kind, entropy, entropy_norm, mass, copy, accuracy]. `heads`: (layer, head) or
    (layer, site, head) tuples; "all" full-attention heads; None: the `top` heads by needle mass at the final step,
    chosen on the first half of the prompts and measured on the second. `entropy` (nats, and normalised by log visible
    keys) is the mean over the last `last_rows` query rows; `mass` and `copy` are at the answer rows; all prompts
    count, answered or not, with the accuracy beside them (arXiv 2606.15378). A step that fails to load is warned about
    and left out.

    Raises ValueError for a head outside the model, or a ladder of which nothing loads.

    >>> table = hs.track(hs.ladder("runs/demo/ladder"), needles)
    """
    ladder = open_ladder(ladder) if isinstance(ladder, str | Path) else ladder
    heads, needles = choose_heads(ladder, needles, heads, top=top, batch=batch)
    frames = []
    for step, checkpoint in tqdm(ladder, desc="track", disable=len(ladder) < 3):
        try:
            model = checkpoint.load()
        except (ValueError, OSError) as error:
            warnings.warn(f"step {step} left out: {error}", stacklevel=2)
            continue
        frames.append(track_step(model, needles, heads, last_rows=last_rows, batch=batch))
        frames[-1].insert(0, "step", step)
        frames[-1].insert(1, "tokens", ladder.tokens(step))
    if not frames:
        raise ValueError(f"{ladder.path}: no step could be loaded")
    return pd.concat(frames, ignore_index=True)


def choose_heads(
    ladder: Ladder, needles: Needles, heads: Heads, *, top: int = 4, batch: int = 16
) -> tuple[Sequence[tuple[int, ...]] | Literal["all"], Needles]:
    """The heads to follow and the prompts to measure them on; see `track`."""
    if heads is not None:
        return heads, needles
    if len(needles) < 2:
        raise ValueError("track: choosing heads and measuring them takes at least 2 prompts")
    half = len(needles) // 2
    ranking = retrieval_heads(ladder.final.load(), needles[:half], "mass", only_answered=False, batch=batch)
    return [tuple(map(int, h)) for h in ranking[["layer", "site", "head"]].head(top).to_numpy()], needles[half:]


def track_step(
    model: Any,
    needles: Needles,
    heads: Sequence[tuple[int, ...]] | Literal["all"],
    *,
    last_rows: int = 4,
    batch: int = 16,
) -> pd.DataFrame:
    """One step of `track`, without the step columns."""
    if heads == "all":
        sites = ranked_sites(model, full_only=True)
        chosen = [(site, h) for site in sites for h in range(site.heads)]
    else:
        chosen = [model.sites.head(tuple(h)) for h in heads]
        sites = list(dict.fromkeys(site for site, _ in chosen))
        for site in sites:
            if not site.softmax:
                raise ValueError(f"track: {site.name} is {site.kind} ({site.mixer}) and has no attention to follow")
    totals: dict[Any, dict[str, Any]] = {site: {} for site in sites}
    for part in needles.batches(batch):
        for site, scores in head_scores(model, part, sites, last_rows=last_rows).items():
            for name, value in scores.items():
                totals[site][name] = totals[site].get(name, 0) + value.sum(0)
    accuracy = needle_accuracy(model, needles, batch)
    rows = [
        {
            "layer": site.layer, "site": site.index, "head": head, "kind": site.kind,
            **{name: float(total[head]) / len(needles) for name, total in totals[site].items()},
            "accuracy": accuracy,
        }
        for site, head in chosen
    ]  # fmt: skip
    order = ["layer", "site", "head", "kind", "entropy", "entropy_norm", "mass", "copy", "accuracy"]
    return pd.DataFrame(rows, columns=order)
