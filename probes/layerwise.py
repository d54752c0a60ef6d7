"""The layer-wise needle probe: from which layer on can a linear classifier read the needle off the hidden state?"""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import pandas as pd
import torch
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import StratifiedGroupKFold
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.validation import check_is_fitted
from torch import Tensor
from tqdm import tqdm

from ..hooks.sites import Site
from . import solver as batched
from .arguments import at_least_one, check_prompts
from .features import Features, Where, extract
from .needles import Needles, answered
from .probe_gains import Draws, contrasts

Solver = Literal["auto", "torch", "sklearn"]
Target = Literal["value", "depth"]
Control = Literal["shuffled", "removed"]
WIDEST = ("full", "recurrent", "window", "conv")  # kinds, the one that sees most first


class LayerwiseProbe(ClassifierMixin, BaseEstimator):
    """One multinomial logistic regression per layer, on standardised features.

    X [L,n,D] holds the features of n samples at L places (or [n,D] those at one, as scikit-learn's own tools hand them
    over), y [n] their classes. `C` is the inverse of the L2 penalty.
    `solver`: "sklearn" fits layer by layer with scikit-learn's LogisticRegression, the reference; "torch" all layers
    at once (solver.py, in fp32, on a GPU where there is one), to the same minimum; "auto" is "torch". After `fit`:
    `estimators_` (L pipelines) and `classes_`.

    >>> LayerwiseProbe().fit(X_train, y_train).score_layers(X_test, y_test)
    """

    def __init__(self, C: int | float = 0.1, max_iter: int = 1000, solver: Solver = "auto") -> None:
        self.C = C
        self.max_iter = max_iter
        self.solver = solver

    def fit(self, X: np.ndarray, y: np.ndarray) -> LayerwiseProbe:
        """Fit every layer. Raises ValueError for NaN features (naming the first layer), fewer than two classes,
        fewer samples than classes, or a penalty that is none."""
        X, y = self._check(X, y)
        _check_penalty(self.C)
        classes, index = np.unique(y, return_inverse=True)
        if len(classes) < 2:
            raise ValueError("y: a probe needs at least two classes")
        if len(classes) == len(y):
            raise ValueError(f"y: {len(y)} samples of {len(classes)} classes; a probe needs more samples than classes")
        self.classes_ = classes
        if _checked(self.solver) == "sklearn":
            self.estimators_ = [_pipeline(self.C, self.max_iter).fit(x, y) for x in X]
            return self
        every = np.ones((1, len(y)), bool)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        fits = batched.fit(X, index[None], every, C=self.C, max_iter=self.max_iter, device=device)
        self.estimators_ = [self._estimator(fits, i, len(y)) for i in range(len(X))]
        return self

    def predict(self, X: np.ndarray) -> np.ndarray:
        """Predicted classes, [L,n], or [n] for X [n,D]. Raises ValueError for features that are not those of the
        layers fitted."""
        check_is_fitted(self, "estimators_")
        X = np.asarray(X)
        places = X[None] if X.ndim == 2 else X
        if places.ndim != 3 or len(places) != len(self.estimators_):
            raise ValueError(f"X: shape {X.shape}; expected [{len(self.estimators_)}, samples, features]")
        predicted = np.stack([e.predict(x) for e, x in zip(self.estimators_, places, strict=True)])
        return predicted[0] if X.ndim == 2 else predicted

    def score_layers(self, X: np.ndarray, y: np.ndarray) -> np.ndarray:
        """Accuracy per layer, [L]."""
        X, y = self._check(X, y)
        return (self.predict(X) == y).mean(1)

    def score(self, X: np.ndarray, y: np.ndarray, sample_weight: np.ndarray | None = None) -> float:
        """Accuracy of the best layer, as scikit-learn's tools expect one number."""
        X, y = self._check(X, y)
        hits = self.predict(X) == y
        return float(np.average(hits, axis=1, weights=sample_weight).max())

    def _estimator(self, fits: batched.Fits, place: int, n: int) -> Pipeline:
        """A fit of the batched solver as the pipeline that scikit-learn would have left."""
        scaler, model = StandardScaler(), LogisticRegression(C=self.C, max_iter=self.max_iter)
        mean, scale = fits.mean[place, 0].numpy(), fits.scale[place, 0].numpy()
        coef, intercept = fits.coef[place, 0].numpy(), fits.intercept[place, 0].numpy()
        if len(coef) == 2:
            coef, intercept = coef[1:] - coef[:1], intercept[1:] - intercept[:1]
        its = {"mean_": mean, "scale_": scale, "var_": scale**2, "n_samples_seen_": n, "n_features_in_": len(mean)}
        vars(scaler).update(its)
        its = {"classes_": self.classes_, "coef_": coef, "intercept_": intercept, "n_features_in_": len(mean)}
        vars(model).update(its, n_iter_=fits.iterations[place].numpy())
        return make_pipeline(scaler, model)

    @staticmethod
    def _check(X: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        X, y = np.asarray(X), np.asarray(y)
        X = X[None] if X.ndim == 2 else X
        if y.ndim != 1 or (y.dtype.kind == "f" and not np.isfinite(y).all()):
            raise ValueError(f"y: shape {y.shape}, {y.dtype}; expected one class for each sample, none of them NaN")
        if X.ndim != 3 or X.shape[1] != len(y) or not X.size:
            raise ValueError(f"X: shape {X.shape}; expected [layers, {len(y)}, features] for y of length {len(y)}")
        bad = ~np.isfinite(X).all((1, 2))
        if bad.any():
            raise ValueError(f"X: NaN or infinite features, first at index {int(bad.argmax())}")
        return X, y


def probe_layers(
    model: Any,
    needles: Needles,
    target: Target = "value",
    *,
    where: Sequence[Where] = ("pre", "mid", "post"),
    position: Tensor | Literal["query"] = "query",
    controls: Sequence[Control] = ("shuffled", "removed"),
    seeds: int = 5,
    C: int | float = 0.1,
    batch: int = 32,
    solver: Solver = "auto",
    features_dir: str | os.PathLike[str] | None = None,
    only_answered: bool = False,
) -> pd.DataFrame:
    """Probe accuracy for the needle's value or depth bin along the layers.

    [layer, kind, mixer, where, target, control, accuracy, low, high, chance, n, gain, gain_low, gain_high]. Features:
    the residual stream before the mixer (`pre`), after it (`mid`), after the MLP (`post`; the last layer's before the
    final norm), or what the mixer adds (`delta`), at `position` [N] (the prompt's last token, before the answer's
    first). Parallel mixers feed one residual stream: `mixer` joins them with "+", `kind` is that of the one that sees
    most. `seeds` random 80/20 splits, stratified by class, samples of one group (haystack, key, depth bin) always on
    one side; `low`, `high`: 95% interval of the accuracy from a bootstrap over groups. Controls that must come out at
    chance: labels shuffled among the samples, and prompts whose needle was replaced by haystack. `gain` on `mid` rows:
    accuracy after the mixer minus before it, its interval paired over groups.

    `solver`: see LayerwiseProbe. `features_dir`: a folder that features are streamed to, so that memory holds one batch
    of them and a run that was killed goes on where it stood; called again (other target, seeds, C) it reads them.
    `only_answered`: leave out prompts that the model answers wrong.

    Raises ValueError for fewer than 5 samples in a class, fewer than 5 groups, no answered prompt, unknown features or
    controls, or NaN activations (naming the first layer). Protocol: arXiv 2606.15378; scikit-learn's
    LogisticRegression, C = 0.1.

    >>> hs.probe_layers(model, needles).query("control == 'none' and where == 'post'")
    """
    return measure(
        model, needles, target, where=where, position=position, controls=controls, seeds=seeds, C=C, batch=batch,
        solver=solver, features_dir=features_dir, only_answered=only_answered,
    ).table()  # fmt: skip


def probe_gains(
    model: Any,
    needles: Needles,
    target: Target = "value",
    *,
    middle: tuple[float, float] = (1 / 3, 2 / 3),
    **options: Any,
) -> pd.DataFrame:
    """Do gains concentrate at the middle full layers, as arXiv 2606.15378 claims?

    [control, quantity, layers, gain, low, high, seeds_above]. Mean gain of a mixer over the layers of a set (`middle
    full`, `middle efficient`, `outer full`, `outer efficient`; those that the model has), and differences between sets:
    the claim holds where `low` of `middle full - all others` is above 0. `middle`: bounds of a layer's depth
    (layer + 0.5) / layers. 95% intervals from a bootstrap over groups, the same draws for all layers (paired);
    `seeds_above`: share of the splits in which the quantity is above 0. Options are those of `probe_layers`.

    Raises ValueError where no full layer lies in the middle or nothing else is there to compare with.
    """
    options.setdefault("where", ("pre", "mid"))
    return measure(model, needles, target, **options).gains(middle)


@dataclasses.dataclass
class Measured:
    """What a probe predicted: right [places,seeds,N] by control, and tested [seeds,N]."""

    sites: Any
    places: list[tuple[int, Where]]
    target: str
    right: dict[str, np.ndarray]
    tested: dict[str, np.ndarray]
    draws: Draws
    chance: float

    def table(self) -> pd.DataFrame:
        """See `probe_layers`."""
        rows = []
        for control, right in self.right.items():
            tested = self.tested[control]
            of_place = {place: right[i].sum(0) for i, place in enumerate(self.places)}
            for (layer, w), hits in of_place.items():
                accuracy, low, high = self.draws.interval(hits, tested.sum(0))
                row: dict[str, Any] = {
                    "layer": layer, **mixers_of(self.sites.select(layer)), "where": w, "target": self.target,
                    "control": control, "accuracy": accuracy, "low": low, "high": high, "chance": self.chance,
                    "n": right.shape[2], "gain": np.nan, "gain_low": np.nan, "gain_high": np.nan,
                }  # fmt: skip
                if w == "mid" and (layer, "pre") in of_place:
                    before = of_place[layer, "pre"]
                    _, row["gain_low"], row["gain_high"] = self.draws.interval(hits - before, tested.sum(0))
                    row["gain"] = accuracy - self.draws.mean(before, tested.sum(0))[0]
                rows.append(row)
        return pd.DataFrame(rows)

    def gains(self, middle: tuple[float, float] = (1 / 3, 2 / 3)) -> pd.DataFrame:
        """See `probe_gains`."""
        at = {place: i for i, place in enumerate(self.places)}
        layers = sorted({layer for layer, _ in self.places})
        if any((layer, w) not in at for layer in layers for w in ("pre", "mid")):
            raise ValueError("where: gains need 'pre' and 'mid'")
        full = [mixers_of(self.sites.select(layer))["kind"] == "full" for layer in layers]
        frames = []
        for control, right in self.right.items():
            after, before = ([at[layer, w] for layer in layers] for w in ("mid", "pre"))
            gained = right[after].astype(np.int8) - right[before]
            frame = contrasts(gained, self.tested[control], full, self.draws, middle)
            frame.insert(0, "control", control)
            frames.append(frame)
        return pd.concat(frames, ignore_index=True)


def measure(
    model: Any,
    needles: Needles,
    target: Target = "value",
    *,
    where: Sequence[Where] = ("pre", "mid", "post"),
    position: Tensor | Literal["query"] = "query",
    controls: Sequence[Control] = ("shuffled", "removed"),
    seeds: int = 5,
    C: int | float = 0.1,
    batch: int = 32,
    solver: Solver = "auto",
    features_dir: str | os.PathLike[str] | None = None,
    only_answered: bool = False,
) -> Measured:
    """The probe behind `probe_layers` and `probe_gains`, for both tables of one run."""
    check_prompts(needles)
    if target not in ("value", "depth"):
        raise ValueError(f'target={target!r}: expected "value" or "depth"')
    for name, given, known in (("where", where, get_args(Where)), ("controls", controls, get_args(Control))):
        if isinstance(given, str) or set(given) - set(known) or (name == "where" and not given):
            raise ValueError(f"{name}={given!r}: expected a list of {', '.join(map(repr, known))}")
    at_least_one(seeds=seeds, batch=batch)
    _check_penalty(C)
    _checked(solver)
    if only_answered:
        kept = answered(model, needles, batch)
        if not bool(kept.any()):
            raise ValueError(f"only_answered: the model answers none of the {len(needles)} prompts")
        position = position if isinstance(position, str) else position[kept]
        needles = needles[kept]
    y = needles.labels[target].numpy()
    group = needles.group.numpy()
    _check_classes(y, group, target)
    if "removed" in controls and needles.removed is None:
        raise ValueError("controls: these needles have no prompts without the needle; leave 'removed' out")
    places: list[tuple[int, Where]] = [(layer, w) for layer in sorted({s.layer for s in model.sites}) for w in where]

    def features(removed: bool) -> np.ndarray | Features:
        folder = None if features_dir is None else Path(features_dir) / ("removed" if removed else "prompts")
        return extract(model, needles, places, removed=removed, position=position, batch=batch, folder=folder)

    device = next(model.parameters()).device
    labels = {"none": y}
    if "shuffled" in controls:
        labels["shuffled"] = np.random.default_rng(0).permutation(y)
    right, tested = _cross(features(False), labels, group, seeds, C, solver, device)
    if "removed" in controls:
        more = _cross(features(True), {"removed": y}, group, seeds, C, solver, device)
        right, tested = {**right, **more[0]}, {**tested, **more[1]}
    chance = float(np.bincount(y).max() / len(y))
    return Measured(model.sites, places, target, right, tested, Draws(group), chance)


def _cross(
    X: np.ndarray | Features, labels: dict[str, np.ndarray], group: np.ndarray, seeds: int, C: int | float,
    solver: Solver, device: torch.device,
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:  # fmt: skip
    """By label set: which samples were tested, [seeds,N], and which of these predicted right, [places,seeds,N]."""
    y, train = [], []
    for of in labels.values():
        classes = np.unique(of, return_inverse=True)[1]
        for seed in range(seeds):
            splitter = StratifiedGroupKFold(n_splits=5, shuffle=True, random_state=seed)
            rows = next(splitter.split(of, of, group))[0]
            if len(np.unique(of[rows])) < 2:
                raise ValueError("needles: each class lies in too few groups; a split leaves one class to train on")
            y.append(classes)
            train.append(np.isin(np.arange(len(of)), rows))
    Y, seen = np.stack(y), np.stack(train)
    # The same residual stream stands after one layer and before the next: fit it once.
    first: dict[bytes, int] = {}
    same = [first.setdefault(_digest(x), i) for i, x in enumerate(X)]
    distinct = sorted(set(same))
    if _checked(solver) == "torch":
        chosen = X.only(distinct) if isinstance(X, Features) else [X[i] for i in distinct]
        on = device if device.type == "cuda" else "cpu"
        predicted = batched.fit(chosen, Y, seen, C=C, device=on).predicted.numpy()
    else:
        predicted = np.stack([_predictions(X[i], Y, seen, C) for i in tqdm(distinct, desc="probe", disable=None)])
    right = ((predicted == Y) & ~seen)[[distinct.index(i) for i in same]]
    parts = {name: slice(i * seeds, (i + 1) * seeds) for i, name in enumerate(labels)}
    return {n: right[:, part] for n, part in parts.items()}, {n: ~seen[part] for n, part in parts.items()}


def _digest(x: np.ndarray) -> bytes:
    return hashlib.blake2b(np.ascontiguousarray(x).data).digest()


def _predictions(x: np.ndarray, Y: np.ndarray, seen: np.ndarray, C: int | float) -> np.ndarray:
    """scikit-learn's, of all samples [S,N] at one place."""
    return np.stack([_pipeline(C).fit(x[rows], y[rows]).predict(x) for y, rows in zip(Y, seen, strict=True)])


def _pipeline(C: int | float, max_iter: int = 1000) -> Pipeline:
    return make_pipeline(StandardScaler(), LogisticRegression(C=C, max_iter=max_iter))


def _checked(solver: str) -> str:
    if solver not in ("auto", "torch", "sklearn"):
        raise ValueError(f'solver={solver!r}: expected "auto", "torch" or "sklearn"')
    return "torch" if solver == "auto" else solver


def _check_penalty(C: int | float) -> None:
    if not C > 0:
        raise ValueError(f"C={C}: expected a number above 0, the inverse of the penalty")


def mixers_of(sites: Sequence[Site]) -> dict[str, str]:
    """The kind (that of the mixer that sees most) and mixer columns of a layer with these sites."""
    kind = min((site.kind for site in sites), key=WIDEST.index, default="none")
    return {"kind": kind, "mixer": "+".join(site.mixer for site in sites) or "none"}


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
