"""earlier_block() in Triton's interpreter, beside its specification, gradients too.

Collected by test_earlier_block.py in a process with TRITON_INTERPRET=1, which must be set before Triton is imported.
"""

from typing import Any

import pytest
import torch
from helpers import error

from hybridscope.hooks.kernels.earlier_block import earlier_block, earlier_block_reference

SHAPES = [  # B, N, w, H, K, V: chunks not full, widths that are no power of two, one token, one block
    (2, 3, 70, 2, 16, 32), (1, 4, 5, 3, 20, 8), (1, 2, 130, 1, 64, 64), (1, 3, 64, 2, 128, 100), (1, 3, 9, 1, 256, 16),
    (2, 3, 1, 2, 16, 16), (1, 1, 6, 2, 16, 16), (1, 2, 129, 1, 8, 200),
]  # fmt: skip


def inputs(B: int, N: int, w: int, H: int, K: int, V: int, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Views of larger tensors, as windowed() hands them over."""
    draw = torch.Generator().manual_seed(0)
    both = torch.randn(B, N, w, H, V + K, generator=draw).to(dtype)
    k = torch.randn(B, N, w, H, K, generator=draw).to(dtype)[:, 1:]
    v = torch.randn(B, N, w, H, V, generator=draw).to(dtype)[:, : N - 1]
    scales = {"q_scale": torch.rand(B, N, w, H, generator=draw), "k_scale": torch.rand(B, N, w, H, generator=draw)}
    scales["k_scale"] = scales["k_scale"][:, 1:]
    return {"base": both[..., :V], "q": both[..., V:], "k": k, "v": v, **scales}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-6), (torch.float16, 2e-3)])
def test_outputs_and_gradients(shape: Any, scaled: bool, dtype: torch.dtype, most: float) -> None:
    x = {n: y for n, y in inputs(*shape, dtype=dtype).items() if scaled or "scale" not in n}
    for reversed_keys in (False, True):
        leaves = {name: y.detach().requires_grad_() for name, y in x.items()}
        got, expected = (f(**leaves, reversed_keys=reversed_keys) for f in (earlier_block, earlier_block_reference))
        assert got.dtype == dtype
        assert error(got, expected) < most
        assert error(earlier_block(**x, reversed_keys=reversed_keys), expected) < most  # scales in the kernel
        weight = torch.randn(got.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
        grads = [torch.autograd.grad((out * weight).sum(), list(leaves.values())) for out in (got, expected)]
        for name, ours, theirs in zip(leaves, *grads, strict=True):
            assert ours.dtype == leaves[name].dtype
            assert ours.shape == leaves[name].shape
            if theirs.numel():
                assert error(ours, theirs) < most, name


def test_gradients_of_what_wants_them() -> None:
    x = inputs(1, 3, 20, 2, 16, 16)
    leaves = {name: y.detach().requires_grad_() for name, y in x.items()}
    expected = torch.autograd.grad(earlier_block(**leaves).sum(), list(leaves.values()))
    for (name, y), together in zip(x.items(), expected, strict=True):
        leaf = y.detach().requires_grad_()
        alone = torch.autograd.grad(earlier_block(**{**x, name: leaf}).sum(), leaf)[0]
        assert torch.equal(alone, together), name


def test_a_small_scale_comes_before_16_bits() -> None:
    """Products of more than fp16 holds, times scales that make them small."""
    x = {n: y.half() if "scale" not in n else y for n, y in inputs(1, 2, 70, 1, 128, 16).items()}
    x["q"], x["k"], x["q_scale"] = torch.full_like(x["q"], 30), torch.full_like(x["k"], 30), x["q_scale"] * 1e-6
    got, expected = earlier_block(**x), earlier_block_reference(**{n: y.double() for n, y in x.items()})
    assert error(got, expected) < 2e-3


def test_tokens_that_are_not_seen_never_enter() -> None:
    """Huge keys and values of the block before at offsets up to t leave rows from t on as they are, bitwise."""
    x = inputs(1, 3, 150, 2, 16, 16)
    before = earlier_block(**x)
    for t in (0, 63, 64, 100, 149):
        y = {name: z.clone() for name, z in x.items()}
        y["v"][:, :, : t + 1] = 1e10
        y["k"][:, :, : t + 1] *= -1e8
        y["k_scale"][:, :, : t + 1] += 1e3
        after = earlier_block(**y)
        assert torch.equal(after[:, :, t:], before[:, :, t:])
        assert torch.equal(after[:, 0], before[:, 0])
        assert t == 0 or not torch.equal(after[:, :, t - 1], before[:, :, t - 1])
