"""Caps on the fused path: the pieces go through the mixer's own op (stand-ins here; its kernels run on a GPU)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import assert_close, error
from restarted import Inputs
from test_fused import FAMILIES, HOPPER, read_of, stand_in
from test_fused import inputs as family_inputs

from hybridscope.experiments.bench import kernel_parity
from hybridscope.hooks.kernels import fused
from hybridscope.hooks.kernels import windowed as kernel
from hybridscope.hooks.kernels.dispatch import use_kernels
from hybridscope.hooks.kernels.earlier_block import earlier_block_reference
from hybridscope.hooks.kernels.windowed import capped, carried_keys

OPS = {
    "scalar": {"chunk_simple_gla"}, "vector": {"chunk_gla", "chunk_simple_gla"},
    "before": {"chunk_rwkv6", "chunk_simple_gla"}, "elementwise": {"fused_recurrent_hgrn"},
    "delta": {"chunk_delta_rule", "chunk_kda", "chunk_simple_gla"},
    "delta scalar": {"chunk_gated_delta_rule", "chunk_simple_gla"}, "delta vector": {"chunk_kda", "chunk_simple_gla"},
    "low rank": {"chunk_dplr_delta_rule", "chunk_simple_gla"},
}  # fmt: skip


@pytest.fixture
def ops(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The CPU in the place of a Hopper; collects the names of the ops that are asked for.

    The specification of our own kernel stands for it: test_earlier_block.py compares the two."""
    used: set[str] = set()

    def find(name: str) -> Any:
        used.add(name)
        return stand_in(name)

    monkeypatch.setattr(fused, "DEVICE", "cpu")
    monkeypatch.setattr(fused, "machine", lambda device: ("3.6.0", HOPPER))
    monkeypatch.setattr(fused, "fla_op", find)
    monkeypatch.setattr(kernel, "earlier_block", earlier_block_reference)
    return used


def capped_inputs(family: str, dtype: torch.dtype = torch.float32) -> Inputs:
    x = family_inputs(family, 50, dtype=dtype)
    del x["state"]
    return x


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("cap", "conv"), [(2, 2), (7, 1), (13, 4), (49, 1), (50, 4)])
def test_fused_pieces_make_the_same_cap(ops: set[str], family: str, cap: int, conv: int) -> None:
    """The mixer's op for what it does, never the general one; many blocks in several launches."""
    x, read = capped_inputs(family), read_of(family)
    with use_kernels("torch"):
        expected = capped(**x, cap=cap, conv=conv, read=read)
    assert not ops
    with use_kernels("fused"), pytest.MonkeyPatch.context() as patch:
        for most in (fused.MAX_HEADS, 12):
            patch.setattr(fused, "MAX_HEADS", most if family != "elementwise" else fused.MAX_HEADS)
            assert_close(capped(**x, cap=cap, conv=conv, read=read), expected)
    assert ops
    assert ops <= OPS[family]


@pytest.mark.parametrize("cap", [2, 7, 49])
def test_a_state_read_before_it_is_written_with_one_decay_a_head(ops: set[str], cap: int) -> None:
    """As RWKV-6 with a key dim of 1 has it."""
    x = capped_inputs("before")
    x["log_decay"] = x["log_decay"][..., :1]
    with use_kernels("torch"):
        expected = capped(**x, cap=cap, read="before")
    with use_kernels("fused"):
        assert_close(capped(**x, cap=cap, read="before"), expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_fused_caps_in_16_bits(ops: set[str], family: str) -> None:
    """Outputs keep v's dtype, under autocast too, and the error is that of the uncapped kernel."""
    x, read = capped_inputs(family, torch.bfloat16), read_of(family)
    wide = {name: y.float() for name, y in x.items()}
    with use_kernels("torch"):
        expected = capped(**wide, cap=9, read=read)
    got = capped(**x, cap=9, read=read)
    assert got.dtype == torch.bfloat16
    assert kernel_parity.error(got, expected) < kernel_parity.TOLERANCE["bf16"][0]
    with torch.autocast("cpu", torch.bfloat16):
        under = capped(**wide, cap=9, read=read)
    assert under.dtype == torch.float32
    assert kernel_parity.error(under, expected) < kernel_parity.TOLERANCE["bf16"][0]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_ring_starts_from_fused_keys(ops: set[str], family: str) -> None:
    x = capped_inputs(family)
    names = [name for name in x if name not in ("q", "v")]
    with use_kernels("fused"):
        keys = carried_keys(**{name: x[name][:, 4:15] for name in names})
    expected = carried_keys(**{name: x[name].double()[:, 4:15] for name in names})
    assert kernel_parity.error(keys, expected) < 1e-5
    assert bool(ops) == ("delta" in family or family == "low rank")  # elsewhere a key is only decayed


@pytest.mark.parametrize("family", FAMILIES)
def test_fused_gradients(ops: set[str], family: str) -> None:
    x, read = {name: y.requires_grad_() for name, y in capped_inputs(family).items()}, read_of(family)
    grads = []
    for path in ("fused", "torch"):
        with use_kernels(path):
            out = capped(**x, cap=9, conv=2, read=read)
        weight = torch.linspace(-1, 2, out.numel()).view(out.shape)
        grads.append(torch.autograd.grad((out * weight).sum(), list(x.values())))
    for name, got, expected in zip(x, *grads, strict=True):
        assert error(got, expected) < 2e-5, name  # fp32, sums in another order
