"""Receptive-field caps as an experiment: cap one kind of layer (or one layer) and see what breaks."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, SupportsIndex

import pandas as pd
import torch
from torch import Tensor
from tqdm import tqdm

from ..hooks.caps import check_site_cap
from ..hooks.sites import Site
from .arguments import at_least_one, check_documents, check_prompts, whole_numbers
from .finite import finite_loss
from .needles import Needles, score_answers
from .perplexity import bucket_edges


def cap_sweep(
    model: Any,
    needles: Needles | None = None,
    texts: Tensor | None = None,
    *,
    kinds: Sequence[str] | None = None,
    windows: Iterable[SupportsIndex],
    sinks: Iterable[SupportsIndex] = (0, 4),
    by_layer: bool = False,
    by_distance: bool | int | Sequence[int] = False,
    batch: int = 16,
) -> pd.DataFrame:
    """Needle accuracy and log-perplexity under every cap, each from one pass over what was given.

    [kind, layer, site, mixer, window, sinks, binds, distance_low, distance_high, n, within, positions, log_ppl,
    delta_log_ppl, needle_accuracy, delta_needle_accuracy, answer_loss, delta_answer_loss, reach]. The first row, kind
    "none", is the uncapped model (one that is capped already is refused); deltas are against it. `layer` and `site` are
    -1 where a whole kind is capped; with `by_layer` each site is capped alone (sites of parallel layers one by one).
    `window` and `reach` (how far the capped stack still sees; NaN: unbounded) are in tokens. `log_ppl` (nats a token,
    `texts` [N,T]) is over the same positions for all settings: those at or after the largest window that `texts` can
    feel. `positions` is how many each text has of them (0 where `log_ppl` is NaN): few, where that window is nearly as
    long as the texts. `answer_loss`: mean loss on the answers, nats a token. `binds` is False where a cap cannot change
    anything (it is no tighter than the site's own window, or with its sinks as long as the input): such a setting is
    not run and repeats the uncapped row. Recurrent sites are run without sinks (arXiv 2606.15378, section on
    receptive-field caps).

    `by_distance` adds a row per setting and bucket [distance_low, distance_high) of tokens from the query back to the
    needle's value (NaN in the rows over all needles): True puts the edges at the windows, so that a cap of w reaches
    all of the buckets that end at or before w and none of the others; or how many log-spaced buckets, or their edges.
    `n`: needles in the row; `within`: the share of them whose value a capped site sees directly, distance < window or
    among the sinks (on the row "none": what any site sees).

    Windows, sinks and kinds that are given twice are run once. Raises ValueError, before anything runs, for a kind the
    model does not have, for windows or sinks that are no whole numbers, for empty lists, under an active `model.cap`,
    or when neither needles nor texts are given.

    >>> hs.cap_sweep(model, needles, kinds=["full", "window"], windows=[8, 16, 32], by_distance=True)
    """
    if needles is None and texts is None:
        raise ValueError("cap_sweep: give needles, texts, or both")
    if needles is None and by_distance is not False:
        raise ValueError("cap_sweep: by_distance is about needles, and none were given")
    at_least_one(batch=batch)
    if needles is not None:
        check_prompts(needles)
    if texts is not None:
        check_documents(texts, name="texts")
    windows, sinks = whole_numbers("windows", windows, least=1), whole_numbers("sinks", sinks, least=0)
    refuse_caps(model, "cap_sweep")
    kinds = _present(model, kinds)
    first = 0 if texts is None else _first(texts, windows)
    settings = [
        Setting(kind, sites, w, s, by_layer)
        for kind, sites in _targets(model, kinds, by_layer)
        for w in windows
        for s in (sinks if sites[0].softmax else (0,))
    ]
    for setting in settings:
        for site in setting.sites:
            check_site_cap(site, setting.window)  # before anything runs
    buckets = [] if needles is None else _buckets(needles, windows, by_distance)
    positions = 0 if texts is None else texts.shape[1] - 1 - first
    base = _measure(model, needles, texts, first, batch)
    free = Setting("none", list(model.sites), None, 0)
    rows = list(_rows(free, False, base, base, model.reach(), needles, positions, buckets))
    for setting in tqdm(settings, desc="caps", disable=None):
        # The last token of a text predicts nothing, so its row does not count.
        felt = needles if needles is not None and setting.binds(needles.tokens.shape[1]) else None
        read = texts if texts is not None and setting.binds(texts.shape[1] - 1) else None
        binds = felt is not None or read is not None
        with model.cap({(s.layer, s.index): setting.window for s in setting.sites}, sinks=setting.sinks):
            result = _measure(model, felt, read, first, batch).over(base) if binds else base
            rows.extend(_rows(setting, binds, result, base, model.reach(), needles, positions, buckets))
    return pd.DataFrame(rows)


@dataclasses.dataclass(frozen=True)
class Setting:
    """A cap of `window` tokens (None: no cap) on sites of one kind; `alone`: on one site, to be named."""

    kind: str
    sites: list[Site]
    window: int | None
    sinks: int
    alone: bool = False

    def binds(self, length: int) -> bool:
        """Whether it can change anything on inputs of that many tokens."""
        assert self.window is not None
        return self.window + self.sinks < length and any(s.window is None or self.window < s.window for s in self.sites)

    def names(self) -> dict[str, Any]:
        mixers = "" if self.window is None else ", ".join(dict.fromkeys(s.mixer for s in self.sites))
        layer, site = (self.sites[0].layer, self.sites[0].index) if self.alone else (-1, -1)
        window = math.nan if self.window is None else float(self.window)
        return {
            "kind": self.kind, "layer": layer, "site": site, "mixer": mixers, "window": window, "sinks": self.sinks
        }  # fmt: skip

    def sees(self, needles: Needles) -> Tensor:
        """Which needles have their value in direct view of one of the sites at the query: bool [N]."""
        mask = needles.attention_mask
        padding = torch.zeros(len(needles)).long() if mask is None else (~mask.bool()).sum(1)
        query, (start, end) = needles.query_row - padding, (needles.spans["value"] - padding[:, None]).unbind(1)
        seen = torch.zeros(len(needles), dtype=torch.bool)
        for site in self.sites:
            native = query - start < (math.inf if site.window is None else site.window)
            if site.window is not None and site.mixer.startswith("chunk"):
                native = query // site.window == start // site.window
            seen |= native & (
                (query - start < (math.inf if self.window is None else self.window)) | (end <= self.sinks)
            )
        return seen


@dataclasses.dataclass(frozen=True)
class Measured:
    """Log-perplexity (nats a token), and per needle whether it is answered and its loss (nats a token); None: not
    measured."""

    log_ppl: float | None = None
    correct: Tensor | None = None
    loss: Tensor | None = None

    def over(self, base: Measured) -> Measured:
        """With what was not measured taken from `base`."""
        mine = {name: value for name, value in vars(self).items() if value is not None}
        return dataclasses.replace(base, **mine)


def refuse_caps(model: Any, measurement: str) -> None:
    """ValueError for a model that is capped already: what it is compared with would not be the uncapped model."""
    for site in model.sites:
        if site.cap is not None:
            raise ValueError(
                f"{measurement}: {site.name} is capped at {site.cap} already; expected a model outside `cap`, since "
                "deltas are against the uncapped one"
            )


def _present(model: Any, kinds: Any) -> list[str]:
    """The kinds to cap, each once (None: all of the model's); ValueError for what the model does not have."""
    present = list(dict.fromkeys(s.kind for s in model.sites))
    if kinds is None:
        return present
    if isinstance(kinds, str) or not len(kinds):
        raise ValueError(f"kinds={kinds!r}: expected a list of kinds, some of: {', '.join(present)}; None means all")
    for kind in kinds:
        if kind not in present:
            raise ValueError(f"cap_sweep: this model has no {kind!r} sites; it has: {', '.join(present)}")
    return list(dict.fromkeys(kinds))


def _first(texts: Tensor, windows: Sequence[int]) -> int:
    """The first position to compare: that of the largest window which leaves one. Longer ones cannot bind."""
    fit = [w for w in windows if w < texts.shape[1] - 1]
    if not fit:
        window = max(windows)
        raise ValueError(f"texts: {texts.shape[1]} tokens; the largest window {window} leaves no positions to compare")
    return max(fit)


def _targets(model: Any, kinds: Sequence[str], by_layer: bool) -> Iterator[tuple[str, list[Site]]]:
    for kind in kinds:
        sites = [s for s in model.sites if s.kind == kind]
        if by_layer:
            yield from ((kind, [site]) for site in sites)
        else:
            yield kind, sites


def _buckets(needles: Needles, windows: Sequence[int], wanted: bool | int | Sequence[int]) -> list[tuple[int, int]]:
    """Half-open buckets of distance that hold needles."""
    if wanted is False:
        return []
    distance = needles.distance
    end = int(distance.max()) + 1
    if wanted is True:
        edges = sorted({0, end, *(w for w in windows if w < end)})
    else:
        edges = bucket_edges(wanted, end, "by_distance")
    return [
        (low, high) for low, high in itertools.pairwise(edges) if bool(((distance >= low) & (distance < high)).any())
    ]


@torch.no_grad()
def _measure(model: Any, needles: Needles | None, texts: Tensor | None, first: int, batch: int) -> Measured:
    """Log-perplexity over rows >= first, and answers; None for what was not given."""
    log_ppl = correct = loss = None
    if texts is not None:
        device = next(model.parameters()).device
        losses = [finite_loss(model, part.to(device))[:, first:] for part in texts.split(batch)]
        log_ppl = torch.cat([x.cpu() for x in losses]).double().mean().item()
    if needles is not None:
        correct, loss = score_answers(model, needles, batch)
    return Measured(log_ppl, correct, loss)


def _rows(
    setting: Setting, binds: bool, result: Measured, base: Measured, reach: int | None, needles: Needles | None,
    positions: int, buckets: Sequence[tuple[int, int]],
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """A row over all needles and texts, then one per bucket."""
    seen = None if needles is None else setting.sees(needles)
    for low, high in [(math.nan, math.nan), *buckets]:
        every = math.isnan(low)
        pick = None if needles is None or every else (needles.distance >= low) & (needles.distance < high)
        accuracy, loss = ([_mean(getattr(m, name), pick) for m in (result, base)] for name in ("correct", "loss"))
        ppl = [m.log_ppl if every and m.log_ppl is not None else math.nan for m in (result, base)]
        yield {
            **setting.names(), "binds": binds, "distance_low": float(low), "distance_high": float(high),
            "n": 0 if needles is None else len(needles) if pick is None else int(pick.sum()),
            "within": _mean(seen, pick), "positions": positions if every else 0, "log_ppl": ppl[0],
            "delta_log_ppl": ppl[0] - ppl[1],
            "needle_accuracy": accuracy[0], "delta_needle_accuracy": accuracy[0] - accuracy[1],
            "answer_loss": loss[0], "delta_answer_loss": loss[0] - loss[1],
            "reach": math.nan if reach is None else float(reach),
        }  # fmt: skip


def _mean(values: Tensor | None, pick: Tensor | None) -> float:
    if values is None:
        return math.nan
    return (values if pick is None else values[pick]).double().mean().item()
