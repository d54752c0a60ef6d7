"""attention_stats() refuses what no kernel should read memory by, in words; sinks that are none, and tiny ones."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hybridscope.hooks.kernels import attention_stats as module
from hybridscope.hooks.kernels import implicit_stats as implicit

B, T, H, K = 2, 7, 4, 8
attention_stats = inspect.unwrap(module.attention_stats)  # as users call it: the types are checked in tests only
implicit_stats = inspect.unwrap(implicit.implicit_stats)


def qk() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(B, T, H, K), torch.randn(B, T, 2, K)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"impl": "foo"}, "impl='foo': expected one of auto, torch, triton, reference"),
        ({"window": 2.5}, "window=2.5: expected a whole number >= 1"),
        ({"window": True}, "window=True"),
        ({"sinks": -1}, "sinks=-1: expected a whole number >= 0"),
        ({"limit": 0}, "limit=0: expected a whole number >= 1"),
        ({"scale": float("nan")}, "scale=nan: expected a finite number"),
        ({"softcap": 0.0}, "softcap=0.0: expected a number > 0"),
        ({"softcap": -1.0}, "softcap=-1.0"),
        ({"rows": torch.tensor([1.5])}, "rows: torch.float32; expected indices"),
        ({"rows": torch.ones(T, dtype=torch.bool)}, "rows: torch.bool; expected indices"),
        ({"sink_logits": torch.zeros(1)}, r"sink_logits: shape \(1,\); expected one for each head, \[4\]"),
        ({"blocked": torch.zeros(B, T, T, dtype=torch.bool), "rows": [1, 2]}, r"expected bool \(2, 2, 7\)"),
        ({"q_seg": torch.zeros(1, T)}, "give both q_seg and k_seg"),
        ({"q_pos": torch.arange(T), "k_pos": torch.arange(T)}, r"q_pos: shape \(7,\); expected \[1 or 2,7\]"),
        ({"q_pos": torch.arange(T)[None], "k_pos": torch.arange(9)[None]}, r"k_pos: shape \(1, 9\); expected"),
    ],
)
def test_mistakes_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        attention_stats(*qk(), **options)


@pytest.mark.parametrize(
    ("k", "message"),
    [
        (torch.zeros(1, T, 2, K), r"k: shape \(1, 7, 2, 8\); expected \[2,S,G,8\]"),
        (torch.zeros(B, T, 2, 4), r"expected \[2,S,G,8\]"),
        (torch.zeros(B, T, 3, K), "3 heads, which do not divide q's 4"),
        (torch.zeros(B, T, K), r"expected \[B,T,H,K\] and \[B,S,G,K\]"),
    ],
)
def test_keys_that_are_not_the_queries(k: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        attention_stats(qk()[0], k)


@pytest.mark.parametrize("ends", [[0, 3.5, T], [0, 3], [0, 4, 2, T], [0]])
def test_documents_end_in_order(ends: list[float]) -> None:
    q, k = qk()
    with pytest.raises(ValueError, match="expected 0, the documents' ends in order, 7"):
        attention_stats(q[:1], k[:1], cu_seqlens=torch.tensor(ends))


def test_no_tokens_no_rows() -> None:
    s = attention_stats(torch.zeros(B, 0, H, K), torch.zeros(B, 0, 2, K))
    assert s.entropy.shape == (B, 0, H)
    positions = {"q_pos": torch.arange(T)[None], "k_pos": torch.zeros(1, 0, dtype=torch.int64)}
    s = attention_stats(qk()[0], torch.zeros(B, 0, 2, K), **positions)
    assert (s.visible == 0).all()
    assert (s.lse == -torch.inf).all()


def test_a_sink_of_minus_infinity_is_none() -> None:
    q, k = qk()
    without = attention_stats(q, k)
    s = attention_stats(q, k, sink_logits=torch.full((H,), -torch.inf))
    assert (s.sink_mass == 0).all()
    torch.testing.assert_close(s.entropy, without.entropy)
    torch.testing.assert_close(s.entropy_norm, without.entropy_norm)


def test_a_sink_too_small_to_see_is_still_counted() -> None:
    """Normalised entropy is over log(keys + sink), whatever the sink gets."""
    s = attention_stats(*qk(), sink_logits=torch.tensor([0.0, -200.0, -torch.inf, 3.0]))
    keys = torch.arange(1, T + 1)[None, :, None] + torch.tensor([1, 1, 0, 1])
    expected = s.entropy / keys.clamp(min=2).log()
    torch.testing.assert_close(s.entropy_norm, expected.masked_fill(keys == 1, 0))


def test_a_recurrence_wants_both_factors_of_its_erasure() -> None:
    x = torch.randn(1, 3, 2, 4)
    with pytest.raises(ValueError, match="a, b: one of them is None"):
        implicit_stats(q=x, k=x, a=x)


def test_edges_hidden_from_all_samples_alike() -> None:
    blocked = torch.rand(1, T, T) < 0.3
    one, each = (attention_stats(*qk(), blocked=b) for b in (blocked, blocked.expand(B, -1, -1)))
    assert torch.equal(one.entropy, each.entropy)


def test_no_samples() -> None:
    for window in (None, 3):
        s = attention_stats(torch.zeros(0, T, H, K), torch.zeros(0, T, 2, K), window=window)
        assert s.entropy.shape == (0, T, H)


def test_numpy_and_torch_count_too() -> None:
    windows = (3, np.int64(3), torch.tensor(3))
    a, *others = (attention_stats(*qk(), window=w).entropy for w in windows)
    assert all(torch.equal(a, b) for b in others)
