"""Many multinomial logistic regressions at once: all layers, all splits, all label sets.

Each minimises what scikit-learn's LogisticRegression(C) does, the mean of -log p(y) over its n training samples plus
||W||^2 / (2 C n), intercept free, on features standardised over the same samples. (Two classes: one weight vector, as
there; in terms of two, twice the penalty.)

L-BFGS whose first guess of the Hessian is the true one at W = 0, X'X / (n K) + 1 / (C n), factored once a layer and
shared by its fits: residual streams are ill-conditioned even when standardised, and this takes most of it away (and
again, with p (1 - p) in the place of 1 / K, as classes come apart). Logits are linear in W, so a line search costs no
product with X; an iteration takes two, and they serve all fits of a layer.

Axes: L places, N samples, D features, S fits a place, K classes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from sklearn.exceptions import ConvergenceWarning
from torch import Tensor

HISTORY = 10  # pairs that L-BFGS remembers
TRIES = 20  # of a step length
CONSTANT = 1e-12  # of the variance over all samples: below, a feature is constant in training


@dataclasses.dataclass
class Fits:
    """S fits at each of L places, on the CPU.

    `coef` [L,S,K,D], `intercept` [L,S,K]: of features standardised by `mean`, `scale` [L,S,D] (fp64). `predicted`
    [L,S,N]: class indices of all samples, trained on or not (int16). `loss` [L,S]: the minimised sum, nats (fp64).
    `iterations` [L,S]; `converged` [L,S].
    """

    coef: Tensor
    intercept: Tensor
    mean: Tensor
    scale: Tensor
    predicted: Tensor
    loss: Tensor
    iterations: Tensor
    converged: Tensor

    @staticmethod
    def cat(parts: Sequence[Fits]) -> Fits:
        names = [f.name for f in dataclasses.fields(Fits)]
        return Fits(**{name: torch.cat([getattr(part, name) for part in parts]) for name in names})


@torch.no_grad()
def fit(
    X: Sequence[Any] | np.ndarray,
    y: np.ndarray,
    train: np.ndarray,
    *,
    C: int | float = 0.1,
    tol: float = 1e-7,
    max_iter: int = 1000,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    memory: int | None = None,
) -> Fits:
    """Fit S classifiers at each of L places.

    `X`: L arrays [N,D], in memory or on disk (read a few places at a time; `memory`: how many bytes those may take).
    `y` [S,N]: class indices 0..K-1; `train` [S,N]: which samples each fit sees; classes that it does not see, it does
    not know, as in scikit-learn. A fit is done when its loss is estimated to lie within `tol` of its minimum, relative,
    and no gradient exceeds 1e-4; a ConvergenceWarning tells of those that are not after `max_iter` iterations.

    Raises ValueError for features that are NaN or infinite (naming the first place), and for fits with one class.
    """
    device = torch.device(device)
    labels, seen = torch.as_tensor(y).to(device), torch.as_tensor(train).to(device)
    N, D = X[0].shape
    K = int(labels.max()) + 1
    if labels.shape != seen.shape or labels.shape[1] != N:
        raise ValueError(f"y: shape {tuple(labels.shape)}, train: {tuple(seen.shape)}; expected [fits, {N}] for both")
    if memory is None:
        memory = torch.cuda.mem_get_info(device)[0] // 2 if device.type == "cuda" else 64 << 20
    size = torch.finfo(dtype).bits // 8
    each = size * (2 * N * D + 4 * D * D + len(labels) * K * (6 * N + (2 * HISTORY + 6) * D))
    step = max(1, memory // each)
    parts = []
    with _ieee():
        for start in range(0, len(X), step):
            features = _loaded(X, range(start, min(start + step, len(X))), device, dtype)
            parts.append(_Problems(features, labels, seen, K, C).solve(tol, max_iter))
            del features
    fits = Fits.cat(parts)
    if not bool(fits.converged.all()):
        late = int((~fits.converged).sum())
        text = f"{late} of {fits.converged.numel()} fits did not converge in {max_iter} iterations"
        warnings.warn(text, ConvergenceWarning, stacklevel=2)
    return fits


@contextlib.contextmanager
def _ieee() -> Iterator[None]:
    """Products in fp32, whatever a training allowed (TF32)."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _loaded(X: Any, places: range, device: torch.device, dtype: torch.dtype) -> Tensor:
    """A copy of some places [L,N,D] on the device."""
    host = torch.empty(len(places), *X[0].shape, dtype=dtype, pin_memory=device.type == "cuda")
    for row, place in zip(host.numpy(), places, strict=True):
        np.copyto(row, X[place], casting="same_kind")
        if not np.isfinite(row).all():
            raise ValueError(f"X: NaN or infinite features, first at index {place}")
    return host.to(device)


class _Problems:
    """The fits of a few places, over which everything is batched. theta [L,D+1,S,K]: weights, then intercepts."""

    def __init__(self, X: Tensor, y: Tensor, train: Tensor, K: int, C: int | float) -> None:
        self.X, self.K = X, K
        L, N, _ = X.shape
        counts = train.sum(1)
        self.weight = (train.double() / counts[:, None]).T.to(X.dtype)[..., None]  # [N,S,1]
        self.target = torch.nn.functional.one_hot(y.T, K).to(X.dtype)  # [N,S,K]
        present = (self.target * self.weight).sum(0) > 0  # [S,K]
        if bool((present.sum(1) < 2).any()):
            raise ValueError("y: a fit sees fewer than two classes")
        self.unknown = torch.where(present, 0, -1e4).to(X.dtype)  # as logits: probability 0, exactly
        self.penalty = torch.where(present.sum(1) == 2, 2, 1) / (C * counts.double())  # [S]
        self._standardise(train.double() / counts[:, None])
        self.gram = X.transpose(1, 2) @ X / N  # over all samples, for all fits
        self.curvature = torch.full((L,), 1 / K, dtype=torch.float64, device=X.device)
        self._factor()

    def _factor(self) -> None:
        """Cholesky factors of the Hessian that `precondition` assumes."""
        hessian = self.gram.double() * self.curvature[:, None, None]
        floor = 1e-6 * self.X.shape[2] * self.curvature  # the product was rounded
        hessian.diagonal(dim1=1, dim2=2).add_(torch.maximum(self.penalty.mean(), floor)[:, None])
        self.factor = torch.linalg.cholesky(hessian).to(self.X.dtype)

    def follow(self, residual: Tensor) -> None:
        """Factor again where classes have come apart: the mean of 1 - p(y), (K - 1) / K at W = 0, bounds p (1 - p)."""
        now = residual.abs().sum((1, 3), dtype=torch.float64).mean(1) / 2 / (self.K - 1)
        fallen = now < self.curvature / 4
        if bool(fallen.any()):
            self.curvature = torch.where(fallen, now, self.curvature)
            self._factor()

    def _standardise(self, share: Tensor) -> None:
        """Centre and scale over all samples, in place; what each fit's own training samples still differ by, in
        `shift` and `inverse` [L,D,S,1]. Sums in fp64."""
        X = self.X
        mean = X.mean(1, dtype=torch.float64)
        X.sub_(mean[:, None].to(X.dtype))
        mean = mean.to(X.dtype).double()  # what was taken off
        scale = torch.stack([x.double().std(0, correction=0) for x in X])
        X.mul_(torch.where(scale > 0, 1 / scale, 0)[:, None].to(X.dtype))
        first, second = [], []
        for x in X:  # one place at a time: fp64 copies
            x = x.double()
            first.append(share @ x)
            second.append(share @ x.square())
        shift, square = torch.stack(first), torch.stack(second)  # [L,S,D]
        variance = square - shift.square()
        own = torch.where(variance > CONSTANT, variance, 0).sqrt()
        self.mean = mean[:, None] + shift * scale[:, None]
        self.scale = torch.where(own > 0, own * scale[:, None], 1)
        turned = (torch.where(own > 0, 1 / own, 0).transpose(1, 2), shift.transpose(1, 2))
        self.inverse, self.shift = (v.to(X.dtype)[..., None].contiguous() for v in turned)

    def logits(self, theta: Tensor) -> Tensor:
        """[L,N,S,K]"""
        V = theta[:, :-1] * self.inverse
        offset = theta[:, -1] - (V * self.shift).sum(1)
        return (self.X @ V.flatten(2)).view(*self.X.shape[:2], *theta.shape[2:]).add_(offset[:, None])

    def residual(self, logits: Tensor) -> Tensor:
        """Each sample's share of the loss's gradient by its logits."""
        return logits.softmax(-1).sub_(self.target).mul_(self.weight)

    def gradient(self, theta: Tensor, residual: Tensor) -> Tensor:
        total = residual.sum(1)
        by_feature = (self.X.transpose(1, 2) @ residual.flatten(2)).view(*theta[:, :-1].shape)
        by_feature = by_feature.sub_(self.shift * total[:, None]).mul_(self.inverse)
        by_feature += self.penalty.to(theta.dtype)[:, None] * theta[:, :-1]
        return torch.cat([by_feature, total[:, None]], 1)

    def loss(self, theta: Tensor, logits: Tensor) -> Tensor:
        """[L,S], fp64."""
        nll = logits.logsumexp(-1) - (logits * self.target).sum(-1)
        return (nll * self.weight[..., 0]).sum(1, dtype=torch.float64) + self.penalty / 2 * _dot(theta, theta, -1)

    def precondition(self, g: Tensor) -> Tensor:
        solved = torch.cholesky_solve(g[:, :-1].flatten(2), self.factor).view(*g[:, :-1].shape)
        return torch.cat([solved * (self.inverse > 0), g[:, -1:] * self.K], 1)

    def search(self, theta: Tensor, logits: Tensor, move: Tensor, slope: Tensor, active: Tensor) -> Any:
        """Step lengths t [L,S] along `move`, by the slope alone (the loss is convex, and rounding hides its last
        decreases); 0 where none is found. Also the logits and the residual there."""
        change = self.logits(move)
        inner, square = (self.penalty * _dot(a, move, -1) for a in (theta, move))
        low, at_low = torch.zeros_like(slope), slope
        high, at_high = torch.full_like(slope, math.inf), -slope
        t = active.double()
        for _ in range(TRIES):
            there = torch.addcmul(logits, t[:, None, :, None].to(logits.dtype), change)
            residual = self.residual(there)
            now = (residual * change).sum((1, 3), dtype=torch.float64) + inner + t * square
            good = ~active | ((now >= 0.9 * slope) & (now <= -0.5 * slope))
            if bool(good.all()):
                return t, there, residual
            far, near = ~good & (now > 0), ~good & (now <= 0)
            high, at_high = torch.where(far, t, high), torch.where(far, now, at_high)
            low, at_low = torch.where(near, t, low), torch.where(near, now, at_low)
            between = low + (high - low) * (at_low / (at_low - at_high)).clamp(0.1, 0.9)
            t = torch.where(good, t, torch.where(high.isinf(), 3 * t, between))
        t = torch.where(good, t, 0)
        there = torch.addcmul(logits, t[:, None, :, None].to(logits.dtype), change)
        return t, there, self.residual(there)

    def solve(self, tol: float, max_iter: int) -> Fits:
        (L, _, D), S = self.X.shape, self.target.shape[1]
        theta = self.X.new_zeros(L, D + 1, S, self.K)
        logits = self.logits(theta) + self.unknown
        g = self.gradient(theta, self.residual(logits))
        memory = _Memory(self.precondition)
        active = torch.ones(L, S, dtype=torch.bool, device=theta.device)
        converged, iterations = ~active, torch.zeros_like(active, dtype=torch.int64)
        for i in range(max_iter + 1):
            move = memory.direction(g)
            slope = _dot(g, move)
            # -slope / 2 is how far down Newton's step would lead.
            near = (-slope / 2 <= tol * self.loss(theta, logits)) & (g.abs().amax((1, 3)) <= 1e-4)
            converged |= active & near
            active &= ~near
            if i == max_iter or not bool(active.any()):
                break
            t, logits, residual = self.search(theta, logits, move, slope, active)
            active &= t > 0
            iterations += active
            taken = t[:, None, :, None].to(theta.dtype) * move
            theta += taken
            new = self.gradient(theta, residual)
            self.follow(residual)
            memory.add(taken, new - g)
            g = new
        logits = self.logits(theta) + self.unknown
        return Fits(
            coef=theta[:, :-1].permute(0, 2, 3, 1).cpu(), intercept=theta[:, -1].cpu(), mean=self.mean.cpu(),
            scale=self.scale.cpu(), predicted=logits.argmax(-1).to(torch.int16).transpose(1, 2).cpu(),
            loss=self.loss(theta, logits).cpu(), iterations=iterations.cpu(), converged=converged.cpu(),
        )  # fmt: skip


class _Memory:
    """The last steps and changes of gradient of L-BFGS, each problem with its own inner products."""

    def __init__(self, precondition: Any) -> None:
        self.precondition = precondition
        self.pairs: list[tuple[Tensor, Tensor, Tensor]] = []
        self.gamma: Tensor | float = 1.0

    def add(self, s: Tensor, y: Tensor) -> None:
        curve = _dot(s, y)
        moved = curve > 0  # not where a fit stands still
        ratio = curve / _dot(y, self.precondition(y))
        self.gamma = torch.where(moved, ratio, self.gamma)
        self.pairs = [*self.pairs[1 - HISTORY :], (s, y, torch.where(moved, 1 / curve, 0))]

    def direction(self, g: Tensor) -> Tensor:
        q, shares = g, []
        for s, y, rho in reversed(self.pairs):
            shares.append(rho * _dot(s, q))
            q = q - _spread(shares[-1], y)
        q = self.precondition(q)
        if isinstance(self.gamma, Tensor):
            q = _spread(self.gamma, q)
        for (s, y, rho), share in zip(self.pairs, reversed(shares), strict=True):
            q = q + _spread(share - rho * _dot(y, q), s)
        return -q


def _dot(a: Tensor, b: Tensor, stop: int | None = None) -> Tensor:
    """Inner products [L,S] in fp64, of all rows or of those before `stop`."""
    return (a[:, :stop] * b[:, :stop]).sum((1, 3), dtype=torch.float64)


def _spread(factor: Tensor, of: Tensor) -> Tensor:
    return factor[:, None, :, None].to(of.dtype) * of
