"""earlier_block() on a CPU: its cases run in a process of their own, where Triton interprets."""

from pathlib import Path

import pytest
import torch
from helpers import run_interpreted

from hybridscope.hooks.kernels.earlier_block import earlier_block, earlier_block_reference

CASES = Path(__file__).with_name("cases_earlier_block.py")


def test_in_the_interpreter() -> None:
    run_interpreted(CASES)


def test_the_specification_is_the_sum_it_says() -> None:
    """Token by token: the tokens of the block before with a larger offset."""
    draw = torch.Generator().manual_seed(0)
    base, q, k, v = (torch.randn(2, n, 5, 3, d, generator=draw).double() for n, d in ((3, 4), (3, 6), (2, 6), (2, 4)))
    scales = [torch.rand(2, n, 5, 3, generator=draw).double() for n in (3, 2)]
    out = earlier_block_reference(base=base, q=q, k=k, v=v, q_scale=scales[0], k_scale=scales[1])
    assert torch.equal(out[:, 0], base[:, 0])
    for n in (1, 2):
        for t in range(5):
            expected = base[:, n, t].clone()
            for i in range(t + 1, 5):
                weight = (q[:, n, t] * k[:, n - 1, i]).sum(-1) * scales[0][:, n, t] * scales[1][:, n - 1, i]
                expected += weight[..., None] * v[:, n - 1, i]
            torch.testing.assert_close(out[:, n, t], expected)
    turned = earlier_block_reference(
        base=base, q=q, k=k.flip(2), v=v, q_scale=scales[0], k_scale=scales[1], reversed_keys=True
    )
    assert torch.equal(turned, out)


def test_a_dtype_it_does_not_take() -> None:
    v = torch.zeros(1, 2, 4, 1, 8).double()
    with pytest.raises(ValueError, match="float64; expected fp32, bf16 or fp16"):
        earlier_block(base=v, q=v, k=v[:, 1:], v=v[:, 1:])


@pytest.mark.parametrize(("K", "V"), [(257, 8), (8, 300)])
def test_widths_it_does_not_take(K: int, V: int) -> None:
    q, v = torch.zeros(1, 2, 4, 1, K), torch.zeros(1, 2, 4, 1, V)
    with pytest.raises(ValueError, match=f"widths {K} and {V}"):
        earlier_block(base=v, q=q, k=q[:, 1:], v=v[:, 1:])
