"""Which full layers need to see far: the loss on answers when a single one of them is capped (arXiv 2606.27791)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, SupportsIndex

import pandas as pd
from tqdm import tqdm

from ..hooks.caps import check_site_cap
from .arguments import at_least_one, check_prompts, whole_numbers
from .capsweep import Setting, refuse_caps
from .needles import Needles, score_answers


def layer_importance(
    model: Any,
    needles: Needles,
    *,
    windows: Iterable[SupportsIndex],
    sinks: Iterable[SupportsIndex] = (0,),
    kind: str = "full",
    others: Literal["uncapped", "capped"] = "uncapped",
    batch: int = 16,
) -> pd.DataFrame:
    """Each full site's importance: by how much the loss on answer tokens rises when that site is capped; most
    important first, for every window and number of sinks.

    [window, sinks, rank, layer, site, kind, mixer, binds, importance, answer_loss, needle_accuracy,
    delta_needle_accuracy, n]. `importance` (nats an answer token, teacher-forced, mean over the `n` needles) is the
    loss with the site capped minus the loss without. `others` says what the rest of that kind does meanwhile:
    "uncapped" (one site capped alone; deltas against the uncapped model) or "capped" (one site left free among capped
    ones, so what keeping this one would buy; deltas against all capped). `answer_loss` and `needle_accuracy` are those
    with the site capped alone, or free alone. `rank` counts from 1 within a setting. A cap as long as the prompts does
    not bind: it is not run and its importance is 0.

    The NLL-guided selection of arXiv 2606.27791, by its abstract: the rise of the answer tokens' negative
    log-likelihood when that layer slides a window instead of attending in full. By descriptions of the method (its
    full text was not at hand), the other layers are windowed there (`others="capped"`) and answer tokens see
    everything; here a cap holds on every row.

    Windows and sinks that are given twice are run once. Raises ValueError, before anything runs, for a kind the model
    does not have, for windows or sinks that are no whole numbers, for empty lists, or under an active `model.cap`.

    >>> hs.layer_importance(model, needles, windows=[512], sinks=(4,)).query("rank <= 4")
    """
    at_least_one(batch=batch)
    check_prompts(needles)
    windows, sinks = whole_numbers("windows", windows, least=1), whole_numbers("sinks", sinks, least=0)
    refuse_caps(model, "layer_importance")
    if others not in ("uncapped", "capped"):
        raise ValueError(f'others={others!r}: expected "uncapped" or "capped"')
    sites = [s for s in model.sites if s.kind == kind]
    if not sites:
        present = ", ".join(dict.fromkeys(s.kind for s in model.sites))
        raise ValueError(f"layer_importance: this model has no {kind!r} sites; it has: {present}")
    sinks = sinks if sites[0].softmax else [0]
    for window in windows:
        for site in sites:
            check_site_cap(site, window)  # before anything runs
    length = needles.tokens.shape[1]

    def scores(setting: Setting) -> tuple[float, float]:
        """(mean answer loss, needle accuracy) with these sites capped."""
        keys = {(s.layer, s.index): setting.window for s in setting.sites}
        with model.cap(keys, sinks=setting.sinks):
            correct, loss = score_answers(model, needles, batch)
        return loss.mean().item(), correct.double().mean().item()

    correct, loss = score_answers(model, needles, batch)
    plain = loss.mean().item(), correct.double().mean().item()
    frames = []
    for window, sink in tqdm([(w, s) for w in windows for s in sinks], desc="layer importance", disable=None):
        whole = Setting(kind, sites, window, sink)
        base = scores(whole) if others == "capped" and whole.binds(length) else plain
        rows = []
        for site in sites:
            alone = Setting(kind, [site], window, sink, alone=True)
            rest = Setting(kind, [s for s in sites if s is not site], window, sink)
            changed = alone if others == "uncapped" else rest
            binds = alone.binds(length)
            if not binds:
                result = base
            else:
                result = scores(changed) if changed.sites and changed.binds(length) else plain
            rise = result[0] - base[0] if others == "uncapped" else base[0] - result[0]
            rows.append({
                **alone.names(), "binds": binds, "importance": rise, "answer_loss": result[0],
                "needle_accuracy": result[1], "delta_needle_accuracy": result[1] - base[1], "n": len(needles),
            })  # fmt: skip
        frame = pd.DataFrame(rows).sort_values("importance", ascending=False, kind="stable", ignore_index=True)
        frames.append(frame.assign(rank=range(1, len(frame) + 1)))
    order = [
        "window", "sinks", "rank", "layer", "site", "kind", "mixer", "binds", "importance", "answer_loss",
        "needle_accuracy", "delta_needle_accuracy", "n",
    ]  # fmt: skip
    return pd.concat(frames, ignore_index=True).reindex(columns=order)
