"""recurrence(): the chunked path equals the loop over time; outputs, final state and every gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import Largest, assert_close

from hybridscope.hooks.kernels.recurrence import recurrence, recurrence_reference

Inputs = dict[str, Any]
KINDS = ["scalar", "vector", "scalar+erase", "vector+erase"]


def inputs(
    kind: str = "scalar+erase", T: int = 45, *, B: int = 2, H: int = 2, K: int = 5, V: int = 7,
    decay: float = 0.3, state: bool = True, dtype: torch.dtype = torch.float64,
) -> Inputs:  # fmt: skip
    """Signed inputs; |b a^T| < 1 so that nothing grows."""
    width = K if kind.startswith("vector") else 1
    x: Inputs = {
        "q": torch.randn(B, T, H, K, dtype=dtype),
        "k": torch.randn(B, T, H, K, dtype=dtype),
        "v": torch.randn(B, T, H, V, dtype=dtype),
        "log_decay": -2 * decay * torch.rand(B, T, H, width, dtype=dtype),
    }
    if kind.endswith("erase"):
        a = torch.nn.functional.normalize(torch.randn(B, T, H, K, dtype=dtype), dim=-1)
        x.update(a=a, b=-torch.rand(B, T, H, 1, dtype=dtype) * a + 0.1 * torch.randn(B, T, H, K, dtype=dtype))
    if state:
        x["state"] = torch.randn(B, H, K, V, dtype=dtype)
    return x


def agree(x: Inputs, **options: Any) -> None:
    reference = {name: value for name, value in options.items() if name != "chunk"}
    for got, expected in zip(recurrence(**x, **options), recurrence_reference(**x, **reference), strict=True):
        assert got.dtype == expected.dtype
        assert_close(got, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_no_sequences_are_no_error(kind: str) -> None:
    out, state = recurrence(**inputs(kind, B=0))
    assert (out.shape, state.shape) == ((0, 45, 2, 7), (0, 2, 5, 7))


def test_the_reference_is_the_recurrence() -> None:
    """By hand, K = V = 1: S_1 = e^-1 S_0 + b a S_0 + k v."""
    values = {"q": 2.0, "k": 3.0, "v": 5.0, "log_decay": -1.0, "a": 0.5, "b": -0.25}
    x = {name: torch.full((1, 1, 1, 1), value, dtype=torch.float64) for name, value in values.items()}
    state = torch.full((1, 1, 1, 1), 7.0, dtype=torch.float64)
    expected = torch.exp(torch.tensor(-1.0, dtype=torch.float64)) * 7 - 0.125 * 7 + 15
    out, S = recurrence_reference(**x, state=state)
    assert_close(S.flatten()[0], expected)
    assert_close(out.flatten()[0], 2 * expected)
    assert float(recurrence_reference(**x, state=state, read="before")[0]) == 14.0


def test_a_gated_delta_rule_overwrites_what_a_key_held() -> None:
    """Unit key, beta 1, no decay: reading the key returns its latest value exactly, whatever it held
    before."""
    k = torch.nn.functional.normalize(torch.randn(1, 1, 1, 4, dtype=torch.float64), dim=-1).expand(1, 9, 1, 4)
    v = torch.randn(1, 9, 1, 3, dtype=torch.float64)
    out, _ = recurrence(q=k, k=k, v=v, log_decay=torch.zeros(1, 9, 1, 1).double(), a=k, b=-k)
    assert_close(out, v)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("read", ["after", "before"])
@pytest.mark.parametrize("T", [0, 1, 2, 16, 33, 45])
def test_equals_the_loop(kind: str, read: str, T: int) -> None:
    agree(inputs(kind, T), read=read)
    agree(inputs(kind, T, state=False), read=read)


@pytest.mark.parametrize("kind", ["scalar", "vector"])
@pytest.mark.parametrize("f", [recurrence, recurrence_reference])
def test_beta_is_the_delta_rule(kind: str, f: Any) -> None:
    """S_t = (I - beta k k^T) diag(alpha) S + beta k v^T, written out with matrices."""
    x = inputs(kind, 9)
    beta = 2 * torch.rand(2, 9, 2).double()
    out, state = f(**x, beta=beta)
    S, eye, rows = x["state"], torch.eye(5).double(), []
    for t in range(9):
        k, b = x["k"][:, t], beta[:, t, :, None, None]
        kept = x["log_decay"][:, t].exp()[..., None] * S
        S = (eye - b * k[..., :, None] * k[..., None, :]) @ kept + b * k[..., :, None] * x["v"][:, t, :, None]
        rows.append((S * x["q"][:, t, ..., None]).sum(-2))
    assert_close(out, torch.stack(rows, 1), "model")  # k is not normed here: the state grows
    assert_close(state, S, "model")


@pytest.mark.parametrize("f", [recurrence, recurrence_reference])
def test_no_decay_is_a_decay_of_one(f: Any) -> None:
    x = inputs("scalar+erase")
    x["log_decay"] = torch.zeros_like(x["log_decay"])
    whole = f(**x)
    del x["log_decay"]
    for got, expected in zip(f(**x), whole, strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunk", [1, 2, 7, 45, 64])
def test_any_chunk_length(kind: str, chunk: int) -> None:
    agree(inputs(kind), chunk=chunk)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("B", [1, 3])
def test_fp32(kind: str, B: int) -> None:
    agree(inputs(kind, B=B, dtype=torch.float32))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("read", ["after", "before"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("pattern", ["always", "mixed", "reset"])
def test_strong_decay(kind: str, read: str, dtype: torch.dtype, pattern: str) -> None:
    """Decays of e^-50 a step underflow to the true answer, and weak ones beside them keep their precision."""
    x = inputs(kind, dtype=dtype)
    strong = torch.rand_like(x["log_decay"]) < (1.0 if pattern == "always" else 0.3)
    x["log_decay"] = torch.where(strong, -torch.inf if pattern == "reset" else -50.0, x["log_decay"])
    agree(x, read=read)


def test_no_decay_and_no_writing_keeps_the_state() -> None:
    x = inputs("scalar", decay=0.0)
    x["k"] = torch.zeros_like(x["k"])
    _, state = recurrence(**x)
    assert torch.equal(state, x["state"])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("read", ["after", "before"])
@pytest.mark.parametrize("T", [1, 17, 37])
def test_gradients(kind: str, read: str, T: int) -> None:
    """Through outputs and final state, with respect to every input, the initial state included."""
    x = {name: value.requires_grad_() for name, value in inputs(kind, T).items()}
    weights = torch.randn(2, T, 2, 7).double(), torch.randn(2, 2, 5, 7).double()
    grads = []
    for f in (recurrence, recurrence_reference):
        out, state = f(**x, read=read)
        loss = (out * weights[0]).sum() + (state * weights[1]).sum()
        grads.append(torch.autograd.grad(loss, list(x.values()), allow_unused=True))
    for name, got, expected in zip(x, *grads, strict=True):
        if expected is None:
            assert got is None or (got == 0).all(), name
        else:
            assert_close(got, expected, "gradient")


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_under_strong_decay_are_finite(kind: str) -> None:
    x = inputs(kind, decay=25.0)
    x = {name: value.requires_grad_() for name, value in x.items()}
    grads = [
        torch.autograd.grad(sum(y.sum() for y in f(**x)), list(x.values())) for f in (recurrence, recurrence_reference)
    ]
    for got, expected in zip(*grads, strict=True):
        assert_close(got, expected, "gradient")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cut", [1, 16, 31])
def test_split_with_state_is_the_whole(kind: str, cut: int) -> None:
    x = inputs(kind)
    out, state = recurrence(**x)
    first = {name: value if name == "state" else value[:, :cut] for name, value in x.items()}
    head, middle = recurrence(**first)
    tail, end = recurrence(**{name: middle if name == "state" else value[:, cut:] for name, value in x.items()})
    assert_close(torch.cat([head, tail], 1), out)
    assert_close(end, state)


@pytest.mark.parametrize("kind", KINDS)
def test_samples_and_heads_do_not_mix(kind: str) -> None:
    """One sample, one head of a batch is what it would be alone."""
    x = inputs(kind, B=3, H=3)
    out, state = recurrence(**x)
    alone = {n: y[1:2, 2:3] if n == "state" else y[1:2, :, 2:3] for n, y in x.items()}
    one, last = recurrence(**alone)
    assert_close(one, out[1:2, :, 2:3])
    assert_close(last, state[1:2, 2:3])


@pytest.mark.parametrize("kind", KINDS)
def test_the_future_cannot_leak(kind: str) -> None:
    x = inputs(kind)
    before, _ = recurrence(**x)
    y = {name: value if name == "state" else value.clone() for name, value in x.items()}
    for name in ("q", "k", "v"):
        y[name][:, 20:] *= 1e4
    after, _ = recurrence(**y)
    assert torch.equal(after[:, :20], before[:, :20])
    assert not torch.equal(after[:, 20], before[:, 20])


def test_low_precision_inputs_compute_in_fp32() -> None:
    x = {name: value.bfloat16() for name, value in inputs().items()}
    out, state = recurrence(**x)
    assert (out.dtype, state.dtype) == (torch.bfloat16, torch.float32)
    exact, _ = recurrence_reference(**{name: value.double() for name, value in x.items()})
    bound = torch.finfo(torch.bfloat16).eps * exact.abs() + 1e-4
    assert ((out.double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("kind", KINDS)
def test_no_tensor_grows_with_the_square_of_length(kind: str) -> None:
    largest = []
    for T in (512, 2048):
        with Largest() as seen:
            recurrence(**inputs(kind, T, B=1, dtype=torch.float32))
        largest.append(seen.elements)
    assert largest[1] <= 4 * largest[0]


def test_single_channels_take_short_chunks() -> None:
    """HGRN and Hawk have hundreds of heads with K = V = 1: nothing larger than 8 numbers a channel and token."""
    T, H = 64, 24
    with Largest() as seen:
        recurrence(**inputs("scalar", T, B=1, H=H, K=1, V=1))
    assert seen.elements <= 8 * T * H


@pytest.mark.parametrize("kind", KINDS)
def test_inputs_are_left_alone(kind: str) -> None:
    x = inputs(kind)
    kept = {name: value.clone() for name, value in x.items()}
    recurrence(**x)
    recurrence_reference(**x)
    assert all(torch.equal(x[name], kept[name]) for name in x)
