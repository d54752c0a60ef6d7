"""The layer-wise needle probe: from which layer on can a linear classifier read the needle off the hidden state?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import StratifiedGroupKFold
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import Tensor
from tqdm import tqdm

from ..hooks.sites import Site
from .needles import Needles

Where = Literal["pre", "mid", "post", "delta"]
DRAWS = 1000  # bootstrap draws behind an interval
WIDEST = ("full", "recurrent", "window", "conv")  # kinds, the one that sees most first


class LayerwiseProbe(ClassifierMixin, BaseEstimator):
    """One multinomial logistic regression per layer, on standardised features.

    X [L,n,D] holds the features of n samples at L places, y [n] their classes. `C` is the inverse of the L2 penalty.
    After `fit`: `estimators_` (L pipelines) and `classes_`.

    >>> LayerwiseProbe().fit(X_train, y_train).score_layers(X_test, y_test)
    """

    def __init__(self, C: int | float = 0.1, max_iter: int = 1000) -> None:
        self.C = C
        self.max_iter = max_iter

    def fit(self, X: np.ndarray, y: np.ndarray) -> LayerwiseProbe:
        """Fit every layer. Raises ValueError for NaN features (naming the first layer) or fewer than two classes."""
        X, y = self._check(X, y)
        if len(np.unique(y)) < 2:
            raise ValueError("y: a probe needs at least two classes")
        self.classes_ = np.unique(y)
        self.estimators_ = [
            make_pipeline(StandardScaler(), LogisticRegression(C=self.C, max_iter=self.max_iter)).fit(x, y) for x in X
        ]
        return self

    def predict(self, X: np.ndarray) -> np.ndarray:
        """Predicted classes, [L,n]."""
        return np.stack([e.predict(x) for e, x in zip(self.estimators_, X, strict=True)])

    def score_layers(self, X: np.ndarray, y: np.ndarray) -> np.ndarray:
        """Accuracy per layer, [L]."""
        X, y = self._check(X, y)
        return (self.predict(X) == y).mean(1)

    def score(self, X: np.ndarray, y: np.ndarray, sample_weight: np.ndarray | None = None) -> float:
        """Accuracy of the best layer, as scikit-learn's tools expect one number."""
        hits = self.predict(X) == np.asarray(y)
        return float(np.average(hits, axis=1, weights=sample_weight).max())

    @staticmethod
    def _check(X: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        X, y = np.asarray(X), np.asarray(y)
        if X.ndim != 3 or X.shape[1] != len(y):
            raise ValueError(f"X: shape {X.shape}; expected [layers, {len(y)}, features] for y of length {len(y)}")
        bad = ~np.isfinite(X).all((1, 2))
        if bad.any():
            raise ValueError(f"X: NaN or infinite features, first at index {int(bad.argmax())}")
        return X, y


def probe_layers(
    model: Any,
    needles: Needles,
    target: Literal["value", "depth"] = "value",
    *,
    where: Sequence[Where] = ("pre", "mid", "post"),
    position: Tensor | Literal["query"] = "query",
    controls: Sequence[Literal["shuffled", "removed"]] = ("shuffled", "removed"),
    seeds: int = 5,
    C: int | float = 0.1,
    batch: int = 32,
) -> pd.DataFrame:
    """Probe accuracy for the needle's value or depth bin along the layers.

    [layer, kind, mixer, where, target, control, accuracy, low, high, chance, gain, n]. Features: the residual stream
    before the mixer (`pre`), after it (`mid`), after the MLP (`post`; the last layer's before the final norm), or what
    the mixer adds (`delta`), at `position` [N] (the prompt's last token, before the answer's first). Parallel mixers
    feed one residual stream: `mixer` joins them with "+", `kind` is that of the one that sees most. `seeds` random
    80/20 splits, stratified by class, samples of one group (haystack, key, depth bin) always on one side; `low`,
    `high`: 95% interval of the accuracy from a bootstrap over groups. Controls that must come out at chance: labels
    shuffled among the samples, and prompts whose needle was replaced by haystack. `gain` on `mid` rows: accuracy
    after the mixer minus before it.

    Raises ValueError for fewer than 5 samples in a class, fewer than 5 groups, or NaN activations (naming the first
    layer). Protocol: arXiv 2606.15378; scikit-learn's LogisticRegression, C = 0.1.

    >>> hs.probe_layers(model, needles).query("control == 'none' and where == 'post'")
    """
    if target not in ("value", "depth"):
        raise ValueError(f'target={target!r}: expected "value" or "depth"')
    y = needles.labels[target].numpy()
    group = needles.group.numpy()
    _check_classes(y, group, target)
    places: list[tuple[int, Where]] = [(layer, w) for layer in sorted({s.layer for s in model.sites}) for w in where]
    features = extract(model, needles, places, position=position, batch=batch)
    sets = {"none": (features, y)}
    if "shuffled" in controls:
        sets["shuffled"] = (features, np.random.default_rng(0).permutation(y))
    if "removed" in controls:
        if needles.removed is None:
            raise ValueError("controls: these needles have no prompts without the needle; leave 'removed' out")
        bare = extract(model, needles, places, removed=True, position=position, batch=batch)
        sets["removed"] = (bare, y)
    chance = float(np.bincount(y).max() / len(y))
    rows = []
    for control, (X, labels) in sets.items():
        hits, tested = _cross(X, labels, group, seeds, C, f"probe {target} ({control})")
        for (layer, w), hit in zip(places, hits, strict=True):
            accuracy, low, high = _interval(hit, tested, group)
            rows.append(
                {
                    "layer": layer, **_mixers(model.sites.select(layer)), "where": w, "target": target,
                    "control": control, "accuracy": accuracy, "low": low, "high": high, "chance": chance,
                    "n": len(y),
                }
            )  # fmt: skip
    return _with_gain(pd.DataFrame(rows))


def _mixers(sites: Sequence[Site]) -> dict[str, str]:
    """The kind and mixer columns of a layer with these sites."""
    kind = min((site.kind for site in sites), key=WIDEST.index)
    return {"kind": kind, "mixer": "+".join(site.mixer for site in sites)}


@torch.no_grad()
def extract(
    model: Any,
    needles: Needles,
    places: Sequence[tuple[int, Where]],
    *,
    removed: bool = False,
    position: Tensor | Literal["query"] = "query",
    batch: int = 32,
) -> np.ndarray:
    """Residual-stream features [places, N, D] in fp32 at one column per sample."""
    device = next(model.parameters()).device
    columns = needles.query_row if isinstance(position, str) else position
    out: list[list[Tensor]] = [[] for _ in places]
    start = 0
    for part in tqdm(list(needles.batches(batch)), desc="features", disable=len(needles) < 20 * batch):
        tokens = part.removed if removed else part.tokens
        assert tokens is not None
        mask = None if part.attention_mask is None else part.attention_mask.to(device)
        with model.record(resid=columns[start : start + len(part), None].to(device)) as rec:
            model.hidden(tokens.to(device), mask)
        for i, (layer, w) in enumerate(places):
            value = rec.resid(layer, w)[:, 0].float().cpu()
            if not bool(value.isfinite().all()):
                raise ValueError(f"layer {layer} ({w}): activations are NaN or infinite")
            out[i].append(value)
        start += len(part)
    return torch.stack([torch.cat(parts) for parts in out]).numpy()


def _cross(
    X: np.ndarray, y: np.ndarray, group: np.ndarray, seeds: int, C: int | float, what: str
) -> tuple[np.ndarray, np.ndarray]:
    """How often each sample was predicted right, [places,N], and how often it was tested, [N], over the seeds."""
    # The same residual stream stands after one layer and before the next: fit it once.
    first = {}
    same = [first.setdefault(x.tobytes(), i) for i, x in enumerate(X)]
    hits, tested = np.zeros(X.shape[:2]), np.zeros(len(y))
    for seed in tqdm(range(seeds), desc=what, disable=None, leave=False):
        splitter = StratifiedGroupKFold(n_splits=5, shuffle=True, random_state=seed)
        train, test = next(splitter.split(y, y, group))
        tested[test] += 1
        distinct = sorted(set(same))
        probe = LayerwiseProbe(C=C).fit(X[distinct][:, train], y[train])
        right = probe.predict(X[distinct][:, test]) == y[test]
        for place, source in enumerate(same):
            hits[place, test] += right[distinct.index(source)]
    return hits, tested


def _interval(hits: np.ndarray, tested: np.ndarray, group: np.ndarray) -> tuple[float, float, float]:
    """Accuracy over all tests and its 95% bootstrap interval over groups."""
    number = np.unique(group, return_inverse=True)[1]
    h, n = np.bincount(number, hits), np.bincount(number, tested)
    rng = np.random.default_rng(0)
    draws = rng.multinomial(len(h), np.full(len(h), 1 / len(h)), DRAWS)
    low, high = np.quantile((draws @ h) / np.maximum(draws @ n, 1), [0.025, 0.975])
    return float(h.sum() / n.sum()), float(low), float(high)


def _with_gain(table: pd.DataFrame) -> pd.DataFrame:
    before = table[table["where"] == "pre"].set_index(["layer", "control"])["accuracy"]
    mid = table["where"] == "mid"
    index = pd.MultiIndex.from_arrays([table["layer"], table["control"]])
    table["gain"] = np.where(mid, table["accuracy"] - before.reindex(index).to_numpy(), np.nan)
    return table


def _check_classes(y: np.ndarray, group: np.ndarray, target: str) -> None:
    if (y < 0).any():
        raise ValueError(f"needles: no {target!r} classes; make them with a number of candidate values")
    counts = np.bincount(y)
    if (counts[counts > 0] < 5).any() or (counts > 0).sum() < 2:
        least = int(counts[counts > 0].min())
        raise ValueError(
            f"needles: {len(y)} samples over {(counts > 0).sum()} classes of {target!r}, the smallest with {least}; "
            "a probe needs two classes and at least 5 samples in each"
        )
    groups = len(np.unique(group))
    if groups < 5:
        raise ValueError(f"needles: {groups} groups of haystack, key and depth; a split needs at least 5")
