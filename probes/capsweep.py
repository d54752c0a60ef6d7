"""Receptive-field caps as an experiment: cap one kind of layer (or one layer) and see what breaks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import pandas as pd
import torch
from torch import Tensor
from tqdm import tqdm

from ..hooks.caps import check_site_cap
from ..hooks.sites import Site
from .needles import Needles, needle_accuracy


def cap_sweep(
    model: Any,
    needles: Needles | None = None,
    texts: Tensor | None = None,
    *,
    kinds: Sequence[str] | None = None,
    windows: Sequence[int],
    sinks: Sequence[int] = (0, 4),
    by_layer: bool = False,
    batch: int = 16,
) -> pd.DataFrame:
    """Needle accuracy and log-perplexity under every cap.

    [kind, layer, window, sinks, binds, log_ppl, delta_log_ppl, needle_accuracy, delta_needle_accuracy, reach]. The
    first row, kind "none", is the uncapped model; `layer` is -1 where a whole kind is capped and a layer's number with
    `by_layer`. `log_ppl` (nats a token, `texts` [N,T]) is over the same positions for all settings: those at or after
    the largest window of the sweep. `binds` is False where a cap cannot change anything (it is no tighter than the
    site's own window, or with its sinks as long as the input): such a setting is not run and repeats the uncapped
    row. `reach`: how far the capped stack still sees (NaN: unbounded). Recurrent sites are run without sinks (arXiv
    2606.15378, section on receptive-field caps).

    Raises ValueError for a kind the model does not have, or when neither needles nor texts are given.

    >>> hs.cap_sweep(model, needles, kinds=["full", "window"], windows=[8, 16, 32])
    """
    if needles is None and texts is None:
        raise ValueError("cap_sweep: give needles, texts, or both")
    if not windows or any(not isinstance(w, int) or w < 1 for w in windows):
        raise ValueError(f"windows={windows!r}: expected whole numbers >= 1")
    present = list(dict.fromkeys(s.kind for s in model.sites))
    for kind in kinds or ():
        if kind not in present:
            raise ValueError(f"cap_sweep: this model has no {kind!r} sites; it has: {', '.join(present)}")
    length = max(t.shape[1] for t in (texts, needles.tokens if needles else None) if t is not None)
    first = max(windows)
    if texts is not None and texts.shape[1] < first + 2:
        raise ValueError(f"texts: {texts.shape[1]} tokens; the largest window {first} leaves no positions to compare")
    base = _measure(model, needles, texts, first, batch)
    rows = [_row("none", -1, math.nan, 0, False, base, base, model.reach())]
    settings = [
        (kind, sites, w, s)
        for kind, sites in _targets(model, kinds or present, by_layer)
        for w in windows
        for s in (sinks if sites[0].softmax else (0,))
    ]
    for _, sites, window, _ in settings:
        for site in sites:
            check_site_cap(site, window)  # before anything runs
    for kind, sites, window, sink in tqdm(settings, desc="caps", disable=None):
        layer = sites[0].layer if by_layer else -1
        binds = window + sink < length and any(s.window is None or window < s.window for s in sites)
        with model.cap({(s.layer, s.index): window for s in sites}, sinks=sink):
            result = _measure(model, needles, texts, first, batch) if binds else base
            rows.append(_row(kind, layer, window, sink, binds, result, base, model.reach()))
    return pd.DataFrame(rows)


def _targets(model: Any, kinds: Sequence[str], by_layer: bool) -> Iterator[tuple[str, list[Site]]]:
    for kind in kinds:
        sites = [s for s in model.sites if s.kind == kind]
        if by_layer:
            yield from ((kind, [s for s in sites if s.layer == layer]) for layer in sorted({s.layer for s in sites}))
        else:
            yield kind, sites


@torch.no_grad()
def _measure(model: Any, needles: Needles | None, texts: Tensor | None, first: int, batch: int) -> tuple[float, float]:
    """(log-perplexity over rows >= first, needle accuracy); NaN for what was not given."""
    log_ppl = accuracy = math.nan
    if texts is not None:
        device = next(model.parameters()).device
        losses = [model.loss(part.to(device), per_token=True)[:, first:] for part in texts.split(batch)]
        log_ppl = torch.cat([x.cpu() for x in losses]).double().mean().item()
    if needles is not None:
        accuracy = needle_accuracy(model, needles, batch)
    return log_ppl, accuracy


def _row(
    kind: str, layer: int, window: int | float, sinks: int, binds: bool, result: tuple[float, float],
    base: tuple[float, float], reach: int | None,
) -> dict[str, Any]:  # fmt: skip
    return {
        "kind": kind, "layer": layer, "window": float(window), "sinks": sinks, "binds": binds,
        "log_ppl": result[0], "delta_log_ppl": result[0] - base[0],
        "needle_accuracy": result[1], "delta_needle_accuracy": result[1] - base[1],
        "reach": math.nan if reach is None else float(reach),
    }  # fmt: skip
