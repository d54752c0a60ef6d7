"""Fresh parameters against their published values, channel by channel as the papers' code counts them.

RWKV: BlinkDL/RWKV-LM, RWKV_Tmix_x060, RWKV_Tmix_x070 and their channel mixes. RG-LRU: google-deepmind/recurrentgemma,
BlockDiagonalLinear. Mamba-2: state-spaces/mamba, where D is the skip. Decays and the token shifts of the mixers:
test_mixers_reference.py.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from helpers import assert_close

from hybridscope import HybridConfig, HybridLM

L, D, N = 3, 128, 16  # layers, width, head size


def up(layer: int) -> float:
    """RWKV's ratio_0_to_1."""
    return layer / (L - 1)


def down(layer: int) -> float:
    """RWKV's ratio_1_to_almost0."""
    return 1 - layer / L


def linear(n: int) -> float:
    """From -1/2 at the first channel to 1/2 at the last."""
    return n / (D - 1) - 0.5


def zigzag(n: int) -> float:
    """From -1 to 1 in each head, flat in its middle."""
    middle = (N - 1) / 2
    x = (n % N - middle) / middle
    return x * abs(x)


# Mixer, parameter in its block, first layer that has it, value at channel n of a layer.
PUBLISHED: list[tuple[str, str, int, Callable[[int, int], float]]] = [
    ("mamba2", "attn.skip", 0, lambda n, layer: 1),
    ("rwkv7", "attn.kappa", 0, lambda n, layer: 1.02),
    ("rwkv7", "attn.bonus", 0, lambda n, layer: -0.04),
    ("rwkv7", "attn.removal", 0, lambda n, layer: 0.71 - 0.1 * linear(n)),
    ("rwkv7", "attn.blend.leave.bias", 1, lambda n, layer: 0.73 - 0.4 * linear(n)),
    ("rwkv7", "attn.rate.leave.bias", 0, lambda n, layer: -0.19 + 0.3 * zigzag(n) + 0.4 * linear(n)),
    ("rwkv7", "attn.out_norm.weight", 0, lambda n, layer: ((1 + layer) / L) ** 0.7),
    ("rwkv7", "attn.out_norm.bias", 0, lambda n, layer: 0),
    ("rwkv6", "attn.bonus", 0, lambda n, layer: up(layer) * (1 - n / (D - 1)) + ((n + 1) % 3 - 1) * 0.1),
    ("rwkv6", "mlp.shift", 0, lambda n, layer: 1 - (n / D) ** down(layer)),
    ("rwkv6", "mlp.gate_shift", 0, lambda n, layer: 1 - (n / D) ** down(layer)),
    ("rwkv7", "mlp.shift", 0, lambda n, layer: 1 - (n / D) ** (down(layer) ** 4)),
    ("hawk", "attn.input_gate.bias", 0, lambda n, layer: 0),
    ("hawk", "attn.decay_gate.bias", 0, lambda n, layer: 0),
]


def fresh(mixer: str) -> HybridLM:
    return HybridLM(HybridConfig((mixer,), L, D, D // N, 32, init_std=0.5)).requires_grad_(False)


@pytest.mark.parametrize(("mixer", "name", "first", "value"), PUBLISHED, ids=[f"{m} {n}" for m, n, *_ in PUBLISHED])
def test_fresh_values_are_the_published_ones(
    mixer: str, name: str, first: int, value: Callable[[int, int], float]
) -> None:
    """Whatever `init_std` the matrices have; in every layer that has the parameter."""
    having = {
        n: p.flatten() for n, block in enumerate(fresh(mixer).layers) for k, p in block.named_parameters() if k == name
    }
    assert list(having) == list(range(first, L))
    for layer, found in having.items():
        assert_close(found, torch.tensor([value(n, layer) for n in range(found.numel())]))


@pytest.mark.parametrize("gate", ["input_gate", "decay_gate"])
def test_fresh_gates_of_hawk(gate: str) -> None:
    """Normal(0, 1 / sqrt(width of a block)): over 3 layers of 8 blocks of 16 x 16, within four standard errors."""
    weights = torch.cat([block.attn.get_parameter(f"{gate}.weight").flatten() for block in fresh("hawk").layers])
    assert weights.numel() == L * D * N
    error = N**-0.5 / weights.numel() ** 0.5
    assert abs(float(weights.mean())) < 4 * error
    assert abs(float(weights.std()) - N**-0.5) < 4 * error / 2**0.5
