"""The short convolution: its torch path, and what fla's kernel is handed (by stand-ins; tests/test_gpu.py has it)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_close
from torch import Tensor

from hybridscope.hooks.kernels import fused
from hybridscope.hooks.kernels.dispatch import use_kernels
from hybridscope.hooks.kernels.short_conv import short_conv

D, C, T = 6, 4, 9


def padded(x: Tensor, state: Tensor | None) -> Tensor:
    """[B,D,c-1+T]; state [B,D,c] holds the inputs before x, the first of them unread."""
    front = x.new_zeros(x.shape[0], D, C - 1) if state is None else state[..., 1:].to(x.dtype)
    return torch.cat([front, x.transpose(1, 2)], -1)


def dense(x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor | None, activation: str | None) -> Tensor:
    y = F.conv1d(padded(x, state), weight[:, None], bias, groups=D).transpose(1, 2)
    return F.silu(y) if activation == "silu" else y


def forward(*, x: Tensor, weight: Tensor, bias: Tensor | None, residual: None, initial_state: Any, activation: Any):
    assert x.is_contiguous()
    assert initial_state is None or initial_state.shape == (x.shape[0], D, C)
    return dense(x, weight, bias, initial_state, activation), None


def backward(
    *, x: Tensor, dy: Tensor, dht: None, weight: Tensor, bias: Tensor | None, residual: None, initial_state: Any,
    activation: Any,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    y = dense(x, weight, bias, initial_state, None)
    slope = y.sigmoid() * (1 + y * (1 - y.sigmoid())) if activation == "silu" else torch.ones_like(y)
    g = (dy * slope).transpose(1, 2)  # [B,D,T]
    given = padded(x, initial_state)
    dw = torch.stack([(given[..., i : i + T] * g).sum((0, 2)) for i in range(C)], -1)
    d = F.conv_transpose1d(g, weight[:, None], groups=D)
    state = None if initial_state is None else F.pad(d[..., : C - 1], (1, 0))
    return d[..., C - 1 :].transpose(1, 2).contiguous(), dw, None if bias is None else g.sum((0, 2)), None, state


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "DEVICE", "cpu")
    monkeypatch.setattr(fused, "fla_op", {"causal_conv1d_fwd": forward, "causal_conv1d_bwd": backward}.__getitem__)


def inputs(history: bool, bias: bool) -> dict[str, Tensor]:
    x = {"x": torch.randn(2, T, D), "weight": torch.randn(D, C)}
    x |= {"bias": torch.randn(D)} if bias else {}
    x |= {"history": torch.randn(2, C - 1, D)} if history else {}
    return {name: y.requires_grad_() for name, y in x.items()}


def results(x: dict[str, Tensor], silu: bool, f: Any = short_conv) -> list[Tensor]:
    out = f(**x, silu=silu)
    return [out, *torch.autograd.grad((out * torch.linspace(-1, 2, out.numel()).view_as(out)).sum(), list(x.values()))]


@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("history", [False, True])
def test_both_paths_are_the_convolution_with_every_gradient(
    on_gpu: None, history: bool, bias: bool, silu: bool
) -> None:
    x = inputs(history, bias)
    with use_kernels("torch"):
        expected = results(x, silu)
    state = F.pad(x["history"].transpose(1, 2), (1, 0)) if history else None
    assert_close(expected[0], dense(x["x"], x["weight"], x.get("bias"), state, "silu" if silu else None))
    torch.compiler.reset()  # each case is a graph of its own, and there is a limit
    for f in (short_conv, torch.compile(short_conv, fullgraph=True, backend="aot_eager")):
        for got, wanted in zip(results(x, silu, f), expected, strict=True):
            assert_close(got, wanted)


@pytest.mark.parametrize("t", range(T))
def test_a_token_reads_c_inputs_and_no_other(t: int) -> None:
    x = {name: y.detach() for name, y in inputs(True, False).items()}
    out = short_conv(**x)
    for i in range(T):
        other = x["x"].clone()
        other[:, i] += 1
        moved = bool((short_conv(**x | {"x": other}) != out)[:, t].any())
        assert moved == (0 <= t - i < C)


def test_decoding_one_token_launches_no_kernel(on_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    x = {name: y.detach() for name, y in inputs(False, True).items()}
    whole = short_conv(**x, silu=True)
    monkeypatch.setattr(fused, "fla_op", lambda name: pytest.fail(f"{name} for one token"))
    step = short_conv(x["x"][:, -1:], x["weight"], x["bias"], x["x"][:, -C:-1], silu=True)
    assert_close(step, whole[:, -1:])
