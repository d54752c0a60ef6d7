"""windowed(): exact windows of recurrences. What lies outside the window never enters the arithmetic."""

from __future__ import annotations

import pytest
import torch
from helpers import Largest, assert_close, error
from hypothesis import given, settings
from hypothesis import strategies as st
from restarted import KINDS, Inputs, T, cap_rows, inputs, restarts, window_rows

from hybridscope.hooks.kernels import windowed as kernel
from hybridscope.hooks.kernels.recurrence import Read, plain, recurrence_reference
from hybridscope.hooks.kernels.windowed import capped, carried_keys, windowed, windowed_reference


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [1, 8, T])
def test_equals_the_restarted_loop_for_every_window(kind: str, length: int) -> None:
    """w that divide T, that do not, w = 1, w >= T."""
    x = inputs(kind, length)
    table = restarts(x)
    for w in range(1, length + 3):
        assert error(windowed(**x, window=w), window_rows(table, w)) < 2e-15, w


@pytest.mark.parametrize("kind", KINDS)
def test_reading_before_the_write(kind: str) -> None:
    """The window still ends at the present token, whose own write the read leaves out."""
    x = inputs(kind)
    table = restarts(x, "before")
    for w in (1, 2, 5, 8, T, T + 1):
        assert error(windowed(**x, window=w, read="before"), window_rows(table, w)) < 2e-15, w
        assert torch.equal(windowed_reference(**x, window=w, read="before"), window_rows(table, w))
    for cap, conv in ((2, 2), (7, 2), (9, 4), (T + 1, 2)):
        assert error(capped(**x, cap=cap, conv=conv, read="before"), cap_rows(table, cap, conv)) < 2e-15, cap


def test_the_reference_restarts_too() -> None:
    x = inputs("delta", 9)
    assert torch.equal(windowed_reference(**x, window=4), window_rows(restarts(x), 4))


def test_windows_longer_than_a_chunk() -> None:
    """Blocks of more than one chunk of the recurrence underneath."""
    x = inputs("delta", 110, B=1, H=1)
    for w in (33, 50, 64):
        got = windowed(**x, window=w)
        for t in (w, 70, 96, 109):
            span = {name: y[:, t - w + 1 : t + 1] for name, y in x.items()}
            assert_close(got[:, t], recurrence_reference(**span)[0][:, -1])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("elements", [1, 4 * 4 * 7 * 3])
def test_slabs_change_nothing(kind: str, elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One block at a time, or three, instead of all."""
    x = inputs(kind)
    for w in (1, 2, 5, 7):
        expected = windowed(**x, window=w)
        with monkeypatch.context() as patch:
            patch.setattr(kernel, "BLOCK_ELEMENTS", elements)
            assert_close(windowed(**x, window=w), expected)


def test_slabs_bound_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """At w = 1 every token is a block with a state of its own; a slab holds a bounded number of them."""
    monkeypatch.setattr(kernel, "BLOCK_ELEMENTS", 2**12)
    x = inputs("delta", 700, B=1, H=1)
    with Largest() as seen:
        windowed(**x, window=1)
    assert seen.elements <= 2 * 2**12


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("w", [1, 3, 5, 8])
def test_nothing_outside_the_window_leaks(kind: str, w: int) -> None:
    """Everything before t-w+1 and after t, of every input, times 1e4 or replaced: row t is bitwise the
    same."""
    x = inputs(kind)
    before = windowed(**x, window=w)
    for t in range(T):
        inside = torch.zeros(T, dtype=torch.bool)
        inside[max(0, t - w + 1) : t + 1] = True
        outside = ~inside.view(1, T, 1, 1)
        loud = {n: torch.where(outside, y * (1 if n == "log_decay" else 1e4), y) for n, y in x.items()}
        other = {n: torch.where(outside, y, z) for (n, z), y in zip(x.items(), inputs(kind).values(), strict=True)}
        assert torch.equal(windowed(**loud, window=w)[:, t], before[:, t])
        assert torch.equal(windowed(**other, window=w)[:, t], before[:, t])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("w", [1, 3, 5, 8])
def test_the_window_is_tight(kind: str, w: int) -> None:
    """For every t mod w: token t-w+1 changes row t, token t-w does not."""
    x = inputs(kind)
    before = windowed(**x, window=w)
    for i in range(T - w):
        y = {**x, "v": x["v"].clone()}
        y["v"][:, i] += 1
        after = windowed(**y, window=w)
        assert torch.equal(after[:, i + w], before[:, i + w])
        assert not torch.equal(after[:, i + w - 1], before[:, i + w - 1])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("w", [1, 4, 7])
def test_jacobian_zero_pattern(kind: str, w: int) -> None:
    """d row t / d token i is exactly zero outside t-w < i <= t and nonzero inside, at t mod w in {0, 1,
    w-1}."""
    x = {name: y.requires_grad_() for name, y in inputs(kind, B=1, H=1).items()}
    out = windowed(**x, window=w)
    for t in {2 * w, 2 * w + 1, 3 * w - 1}:
        grads = torch.autograd.grad(out[:, t].sum(), list(x.values()), retain_graph=True)
        for name, g in zip(x, grads, strict=True):
            hit = (g != 0).any(-1).flatten()
            assert not hit[: t - w + 1].any(), name
            assert not hit[t + 1 :].any(), name
        values = dict(zip(x, grads, strict=True))["v"]
        assert (values != 0).any(-1).flatten()[t - w + 1 : t + 1].all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("w", [1, 4, 11])
def test_gradients(kind: str, w: int) -> None:
    x = {name: y.requires_grad_() for name, y in inputs(kind, 11).items()}
    weight = torch.randn(2, 11, 2, 3).double()
    grads = [
        torch.autograd.grad((f(**x, window=w) * weight).sum(), list(x.values())) for f in (windowed, windowed_reference)
    ]
    for got, expected in zip(*grads, strict=True):
        assert_close(got, expected, "gradient")


def test_strong_decay_underflows_to_the_truth() -> None:
    for kind in KINDS:
        x = inputs(kind)
        x["log_decay"] = torch.where(torch.rand_like(x["log_decay"]) < 0.5, -50.0, x["log_decay"])
        table = restarts(x)
        for w in (1, 6, 9):
            assert_close(windowed(**x, window=w), window_rows(table, w))


def delta_rule(decay: int | None, length: int = T) -> Inputs:
    """The delta rule by its strengths, beta up to 2, with a decay of that many channels."""
    x = inputs("scalar", length)
    x["beta"] = 2 * torch.rand(2, length, 2).double()
    x["log_decay"] = None if decay is None else -0.8 * torch.rand(2, length, 2, decay).double()
    return x


def written_out(x: Inputs) -> Inputs:
    """The same with a and b, beta v in the place of v."""
    v, log_decay, a, b = plain(**{name: y for name, y in x.items() if name != "q"})
    return {"q": x["q"], "k": x["k"], "v": v, "log_decay": log_decay, "a": a, "b": b}


@pytest.mark.parametrize("decay", [None, 1, 4])
def test_the_delta_rule_by_its_strength(decay: int | None) -> None:
    """Erasure before decay in reversed time, by pairing each with its neighbour's: what a and b written out give."""
    x = delta_rule(decay)
    table = restarts(written_out(x))
    for w in (1, 2, 3, 4, 7, T - 1, T):
        assert error(windowed(**x, window=w), window_rows(table, w)) < 2e-15, w
        assert error(windowed_reference(**x, window=w), window_rows(table, w)) < 2e-15, w
    for cap, conv in ((4, 4), (9, 2), (T - 1, 4), (T, 4)):
        assert error(capped(**x, cap=cap, conv=conv), cap_rows(table, cap, conv)) < 2e-15, cap
    where = {name: y for name, y in written_out(x).items() if name not in ("q", "v")}
    given_ = {name: y for name, y in x.items() if name not in ("q", "v")}
    assert_close(carried_keys(**given_), carried_keys(**where))


@pytest.mark.parametrize("kind", ["scalar", "vector"])
def test_a_reset_is_the_end_of_every_window(kind: str) -> None:
    """A decay of -inf: nothing before it is seen, and nothing turns into NaN."""
    x = inputs(kind)
    x["log_decay"][:, 10] = -torch.inf
    table = restarts(x)
    for w in (1, 4, 7, 12):
        assert error(windowed(**x, window=w), window_rows(table, w)) < 2e-15, w


@settings(max_examples=30, deadline=None, derandomize=True)
@given(kind=st.sampled_from(KINDS), length=st.integers(1, 40), w=st.integers(1, 44), slab=st.integers(1, 2**12),
       read=st.sampled_from(["after", "before"]))  # fmt: skip
def test_any_window_is_the_restarted_loop(kind: str, length: int, w: int, slab: int, read: Read) -> None:
    x = inputs(kind, length, B=1, H=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel, "BLOCK_ELEMENTS", slab)
        assert_close(windowed(**x, window=w, read=read), windowed_reference(**x, window=w, read=read))
