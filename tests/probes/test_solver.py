"""The batched solver against scikit-learn's LogisticRegression, its specification: same loss, same predictions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler

from hybridscope.probes import solver

CASES = {  # samples, features, classes, distance between classes, decades of the spectrum
    "well-conditioned": (400, 20, 4, 1.0, 0),
    "ill-conditioned": (600, 48, 5, 1.0, 4),
    "fewer samples than features": (60, 90, 3, 1.0, 1),
    "separable": (300, 30, 4, 8.0, 0),
    "two classes": (300, 30, 2, 1.0, 2),
    "nothing to find": (300, 40, 8, 0.0, 1),
}
SPLITS = 3


def problem(case: str, places: int = 2):
    N, D, K, distance, decades = CASES[case]
    rng = np.random.default_rng(0)
    y = rng.integers(K, size=N)
    X = []
    for _ in range(places):
        turn = np.linalg.qr(rng.normal(size=(D, D)))[0]
        plain = rng.normal(size=(N, D)) + distance * rng.normal(size=(K, D))[y] * 3 / D**0.5
        # Offsets far larger than what varies, as massive activations have.
        X.append((plain * 10.0 ** (-decades * np.arange(D) / D)) @ turn + 30 * rng.normal(size=D))
    train = rng.random((SPLITS, N)) < 0.8
    return np.float32(X), np.tile(y, (SPLITS, 1)), train


def reference(x: np.ndarray, y: np.ndarray, rows: np.ndarray, C: float):
    """scikit-learn's predictions, and its loss at convergence."""
    scaler = StandardScaler().fit(x[rows].astype(np.float64))
    inputs = scaler.transform(x.astype(np.float64))
    how = "lbfgs" if C == 0.1 else "newton-cholesky"  # which gets there in time
    model = LogisticRegression(C=C, max_iter=20_000, tol=1e-6, solver=how).fit(inputs[rows], y[rows])
    place = np.searchsorted(model.classes_, y[rows])
    nll = -model.predict_log_proba(inputs[rows])[np.arange(rows.sum()), place].mean()
    return model.predict(inputs), nll + (model.coef_**2).sum() / (2 * C * rows.sum())


@pytest.mark.parametrize("C", [0.1, 10.0])
@pytest.mark.parametrize("case", CASES)
def test_loss_and_predictions_are_scikit_learns(case, C):
    X, y, train = problem(case)
    fits = solver.fit(X, y, train, C=C)
    assert fits.converged.all()
    for place in range(len(X)):
        accuracies = []
        for s in range(SPLITS):
            predicted, loss = reference(X[place], y[s], train[s], C)
            assert float(fits.loss[place, s]) == pytest.approx(loss, rel=1e-4)
            held_out = ~train[s]
            ours = fits.predicted[place, s].numpy()
            accuracies.append([(p == y[s])[held_out].mean() for p in (ours, predicted)])
            assert (ours == predicted).mean() > 0.99
        assert abs(np.diff(np.mean(accuracies, 0))[0]) <= 0.005


def test_what_it_returns_predicts_what_it_says():
    X, y, train = problem("ill-conditioned")
    fits = solver.fit(X, y, train)
    for place, s in ((0, 0), (1, 2)):
        inputs = (X[place] - fits.mean[place, s].numpy()) / fits.scale[place, s].numpy()
        logits = inputs @ fits.coef[place, s].numpy().T + fits.intercept[place, s].numpy()
        assert (logits.argmax(1) == fits.predicted[place, s].numpy()).mean() > 0.995
        scaler = StandardScaler().fit(X[place][train[s]].astype(np.float64))
        assert np.allclose(fits.mean[place, s], scaler.mean_, rtol=1e-5)
        assert np.allclose(fits.scale[place, s], scaler.scale_, rtol=1e-4)


def test_places_and_fits_do_not_feel_each_other():
    X, y, train = problem("ill-conditioned")
    together = solver.fit(X, y, train)
    alone = solver.fit(X[1:], y[2:], train[2:])
    assert float(alone.loss[0, 0]) == pytest.approx(float(together.loss[1, 2]), rel=1e-5)
    assert torch.equal(alone.predicted[0, 0], together.predicted[1, 2])


def test_a_few_places_at_a_time_come_to_the_same(tmp_path):
    """From disk, one place in memory."""
    X, y, train = problem("well-conditioned", places=3)
    np.save(tmp_path / "x.npy", X)
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    whole, parts = solver.fit(X, y, train), solver.fit(mapped, y, train, memory=1)
    assert torch.allclose(whole.loss, parts.loss, rtol=1e-6)
    assert torch.equal(whole.predicted, parts.predicted)
    assert np.array_equal(mapped, X)  # what was given stays as it was


def test_every_fit_has_labels_of_its_own():
    X, y, train = problem("well-conditioned")
    shuffled = np.random.default_rng(1).permutation(y[0])
    both = solver.fit(X, np.stack([y[0], shuffled]), train[[0, 0]])
    assert float(both.loss[0, 1]) == pytest.approx(reference(X[0], shuffled, train[0], 0.1)[1], rel=1e-4)
    assert float(both.loss[0, 0]) < 0.9 * float(both.loss[0, 1])


@pytest.mark.parametrize("left", [2, 3])
def test_a_class_that_a_fit_never_sees_is_not_in_it(left):
    """As in scikit-learn, which with two classes left fits one weight vector."""
    X, y, train = problem("well-conditioned")
    train[1] &= y[1] < left
    fits = solver.fit(X, y, train)
    predicted, loss = reference(X[0], y[1], train[1], 0.1)
    assert float(fits.loss[0, 1]) == pytest.approx(loss, rel=1e-4)
    assert set(fits.predicted[0, 1].tolist()) == set(range(left))
    assert (fits.predicted[0, 1].numpy() == predicted).mean() > 0.99


def test_constant_features_say_nothing():
    X, y, train = problem("well-conditioned")
    dull = np.concatenate([X, np.full((*X.shape[:2], 2), 0.1, np.float32)], 2)
    dull[:, ~train[0], -1] = 7e3  # constant in training
    fits = solver.fit(dull, y[:1], train[:1])
    plain = solver.fit(X, y[:1], train[:1])
    assert float(fits.loss[0, 0]) == pytest.approx(float(plain.loss[0, 0]), rel=1e-5)
    assert (fits.coef[..., -2:] == 0).all()
    assert torch.equal(fits.predicted, plain.predicted)


def test_in_fp64_the_gradient_of_the_loss_vanishes():
    """Written down a second time, for autograd."""
    X, y, train = problem("two classes", places=1)
    fits = solver.fit(X, y, train, dtype=torch.float64, tol=1e-13)
    rows = torch.tensor(train[0])
    inputs = (torch.tensor(X[0]).double() - fits.mean[0, 0]) / fits.scale[0, 0]
    w, b = (of[0, 0].clone().requires_grad_() for of in (fits.coef, fits.intercept))
    nll = torch.nn.functional.cross_entropy(inputs[rows] @ w.T + b, torch.tensor(y[0])[rows])
    one = w[1] - w[0]
    loss = nll + one.square().sum() / (2 * 0.1 * int(rows.sum()))
    assert loss.item() == pytest.approx(float(fits.loss[0, 0]), rel=1e-9)
    assert all(g.abs().max() < 1e-6 for g in torch.autograd.grad(loss, (w, b)))


def test_tf32_stays_off_inside_and_as_it_was_outside(monkeypatch):
    before = torch.get_float32_matmul_precision()
    seen = []
    solve = solver._Problems.solve
    monkeypatch.setattr(
        solver._Problems, "solve", lambda self, *a: seen.append(torch.get_float32_matmul_precision()) or solve(self, *a)
    )
    try:
        torch.set_float32_matmul_precision("high")
        solver.fit(*problem("well-conditioned"))
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)
    assert seen == ["highest"]


def test_what_did_not_converge_is_told():
    X, y, train = problem("well-conditioned")
    with pytest.warns(ConvergenceWarning, match="6 of 6 fits did not converge in 1 iterations"):
        fits = solver.fit(X, y, train, max_iter=1)
    assert not fits.converged.any()


def test_bad_input_is_named():
    X, y, train = problem("well-conditioned")
    with pytest.raises(ValueError, match=r"expected \[fits, 400\] for both"):
        solver.fit(X, y[:, :-1], train[:, :-1])
    with pytest.raises(ValueError, match="fewer than two classes"):
        solver.fit(X, y, train & (y == 1))
    X[1, 3, 0] = np.nan
    with pytest.raises(ValueError, match="first at index 1"):
        solver.fit(X, y, train)
