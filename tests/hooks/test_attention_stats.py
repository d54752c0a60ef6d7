"""attention_stats(): every value against the dense oracle or a closed form; memory, inputs, mistakes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attention_oracle import check, oracle, qk
from helpers import TOLERANCE, Largest, assert_close, error
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridscope import attention_stats
from hybridscope.hooks.kernels import attention_stats as kernel

LIMITS: list[dict[str, Any]] = [
    {},
    {"window": 1},
    {"window": 2},
    {"window": 5},
    {"window": 32},
    {"window": 33},
    {"window": 34},
    {"window": 4, "sinks": 3},
    {"window": 4, "sinks": 3, "limit": 9},
    {"limit": 6},
    {"softcap": 2.0},
    {"scale": 1.7},
    {"causal": False},
]


@pytest.mark.parametrize("limits", LIMITS, ids=str)
@pytest.mark.parametrize("size", [1.0, 30.0])
def test_equals_the_oracle(limits: dict[str, Any], size: float) -> None:
    q, k = qk(size=size)
    labels = torch.rand(2, 33) < 0.2
    check(attention_stats(q, k, labels=labels, **limits), oracle(q, k, labels=labels, **limits))


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1), (6, 3)])
def test_grouped_heads(heads: tuple[int, int]) -> None:
    q, k = qk(H=heads[0], G=heads[1])
    check(attention_stats(q, k, window=9), oracle(q, k, window=9))


@pytest.mark.parametrize("limits", LIMITS, ids=str)
def test_the_dense_reference_agrees(limits: dict[str, Any]) -> None:
    """impl="reference" is fp64 whatever comes in, so it meets the oracle at fp64 precision."""
    q, k = qk()
    s, expected = attention_stats(q, k, impl="reference", **limits), oracle(q, k, **limits)
    assert s.entropy.dtype == torch.float64
    for name in ("lse", "entropy", "distance"):
        assert_close(getattr(s, name), torch.from_numpy(expected[name]))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_shape(data: st.DataObject) -> None:
    """Shapes, windows, sinks and rows that Hypothesis thinks of."""
    draw = data.draw
    T, B, G, n, K = (draw(st.integers(1, high)) for high in (24, 2, 2, 3, 9))
    torch.manual_seed(draw(st.integers(0, 9)))
    q, k = qk(T, B, G * n, G, K, size=draw(st.sampled_from([0.0, 1.0, 30.0, 1e4])))
    options: dict[str, Any] = {
        "window": draw(st.none() | st.integers(1, T + 2)), "sinks": draw(st.integers(0, 3)),
        "limit": draw(st.none() | st.integers(1, T + 2)), "softcap": draw(st.none() | st.just(3.0)),
        "sink_logits": draw(st.none() | st.just(torch.linspace(-2, 9, G * n))),
    }  # fmt: skip
    rows = draw(st.none() | st.lists(st.integers(-T, T - 1), min_size=1, max_size=5))
    labels = torch.rand(B, T, draw(st.integers(1, 3))) < 0.4
    check(attention_stats(q, k, rows=rows, labels=labels, **options), oracle(q, k, rows=rows, labels=labels, **options))


# Rows of every temper


def test_huge_logits() -> None:
    """Scores near 1e4: peaked rows whose entropy is about 0, where a relative bound is impossible."""
    q, k = qk(size=3e3)
    expected = oracle(q, k, window=20)
    assert expected["largest"].max() > 1e4
    s = attention_stats(q, k, window=20)
    check(s, expected)
    assert torch.isfinite(s.entropy).all()
    assert (s.entropy >= 0).all()


def test_uniform_rows() -> None:
    """All scores equal: entropy log n, normalised 1, distance the middle of what is seen."""
    q, k = qk()
    s = attention_stats(torch.zeros_like(q), k, window=10)
    seen = torch.arange(1, 34).clamp(max=10).view(1, 33, 1).expand(2, 33, 4)
    assert torch.equal(s.visible, seen)
    assert_close(s.entropy, seen.log())
    assert_close(s.entropy_norm[:, 1:], torch.ones(2, 32, 4))
    assert_close(s.distance, (seen - 1) / 2)
    assert_close(s.top1_prob, 1 / seen)


def test_one_hot_rows() -> None:
    """One key far above the rest: entropy 0, its key on top, its distance."""
    T = 16
    k = torch.eye(T).view(1, T, 1, T)
    target = (torch.arange(T) * 7 % 5).clamp(max=torch.arange(T))
    q = 2e3 * torch.eye(T)[target].view(1, T, 1, T)
    s = attention_stats(q, k)
    assert torch.equal(s.top1.flatten(), target)
    assert (s.entropy.flatten() == 0).all()
    assert (s.top1_prob == 1).all()
    assert torch.equal(s.distance.flatten(), (torch.arange(T) - target).float())


@pytest.mark.parametrize("size", [1.0, 1e5])
def test_a_single_visible_key_has_entropy_exactly_zero(size: float) -> None:
    q, k = qk(size=size)
    first, narrow = attention_stats(q, k, rows=[0]), attention_stats(q, k, window=1)
    for s in (first, narrow):
        assert (s.visible == 1).all()
        assert (s.entropy == 0).all()
        assert (s.entropy_norm == 0).all()
        assert (s.top1_prob == 1).all()
        assert (s.distance == 0).all()
    assert torch.equal(narrow.top1, torch.arange(33).view(1, 33, 1).expand(2, 33, 4))


def test_ties_go_to_one_of_the_tied_keys() -> None:
    q, k = qk(T=12)
    k[:, 7] = k[:, 2]
    q[:, 11] = 5 * k[:, 2].repeat_interleave(2, 1)
    s = attention_stats(q, k, rows=[11])
    assert torch.isin(s.top1, torch.tensor([2, 7])).all()
    check(s, oracle(q, k, rows=[11]))


@pytest.mark.parametrize("window", [6, 7, 8])
def test_the_window_counts_the_query(window: int) -> None:
    """The key 7 back holds all the weight of a row, and is seen from a window of 8 on."""
    q, k = torch.zeros(1, 20, 1, 4), torch.zeros(1, 20, 1, 4)
    q[0, 15, 0, 0], k[0, 8, 0, 0] = 50.0, 50.0
    s = attention_stats(q, k, rows=[15], window=window, scale=1.0)
    assert (int(s.top1) == 8) is (window == 8)
    assert int(s.visible) == window
    if window == 8:
        assert float(s.distance) == 7


def test_planted_heads_have_their_closed_form() -> None:
    """n of N keys score x, the rest 0: H = log(n e^x + N - n) - n x e^x / (n e^x + N - n), mass on them n e^x
    / (...)."""
    N, strengths = 24, torch.tensor([0.0, 1.0, 3.0, 12.0])
    planted = torch.zeros(1, N, dtype=torch.bool)
    planted[0, [3, 8, 9, 15, 20]] = True
    q = strengths.view(1, 1, 4, 1).expand(1, N, 4, 1)
    s = attention_stats(q, planted.float().view(1, N, 1, 1), rows=[N - 1], labels=planted, scale=1.0)
    x = strengths.double()
    z = 5 * x.exp() + N - 5
    assert error(s.lse.flatten(), z.log()) < TOLERANCE[torch.float32]
    assert error(s.entropy.flatten(), z.log() - 5 * x * x.exp() / z) < TOLERANCE[torch.float32]
    assert error(s.mass.flatten(), 5 * x.exp() / z) < TOLERANCE[torch.float32]


# Sinks, labels


def test_learnable_sinks() -> None:
    """Rows sum to less than 1 over real keys; the sink's share is reported and counts in the entropy."""
    q, k = qk(size=3.0)
    labels = torch.ones(2, 33, dtype=torch.bool)
    sink_logits = torch.tensor([-1e4, -1.0, 2.0, 60.0])
    s = attention_stats(q, k, window=9, sink_logits=sink_logits, labels=labels)
    check(s, oracle(q, k, window=9, sink_logits=sink_logits, labels=labels))
    assert_close(s.mass[..., 0] + s.sink_mass, torch.ones(2, 33, 4))
    assert (s.sink_mass[..., 0] < 1e-37).all()
    assert (s.sink_mass[..., 3] > 0.9).all()


def test_entropy_counts_the_sink_as_a_key() -> None:
    q, k = torch.zeros(1, 4, 1, 2), torch.zeros(1, 4, 1, 2)
    s = attention_stats(q, k, sink_logits=torch.zeros(1))
    assert_close(s.entropy_norm, torch.ones(1, 4, 1))
    assert_close(s.sink_mass.flatten(), 1 / torch.arange(2, 6))


def test_several_label_sets() -> None:
    """Bit n of a uint8 is set n; sets may overlap; the same as bools one at a time."""
    q, k = qk()
    labels = torch.randint(0, 8, (2, 33), dtype=torch.uint8)
    labels[0, 0] = 7
    s = attention_stats(q, k, window=12, labels=labels)
    check(s, oracle(q, k, window=12, labels=labels))
    bools = torch.stack([(labels >> n) & 1 == 1 for n in range(3)], -1)
    assert torch.equal(s.mass, attention_stats(q, k, window=12, labels=bools).mass)
    for n in range(3):
        one = attention_stats(q, k, window=12, labels=bools[..., n].contiguous())
        assert_close(one.mass[..., 0], s.mass[..., n])
    assert attention_stats(q, k).mass.shape == (2, 33, 4, 0)


def test_all_eight_bits() -> None:
    q, k = qk(T=9)
    labels = torch.full((2, 9), 128, dtype=torch.uint8)
    mass = attention_stats(q, k, labels=labels).mass
    assert mass.shape[-1] == 8
    assert_close(mass[..., 7], torch.ones(2, 9, 4))
    assert (mass[..., :7] == 0).all()


# Symmetries, memory, inputs


def test_permuting_heads_permutes_rows() -> None:
    q, k = qk(H=4, G=4)
    order = torch.tensor([2, 0, 3, 1])
    one, other = attention_stats(q, k, window=7), attention_stats(q[:, :, order], k[:, :, order], window=7)
    for name, value in one.fields().items():
        assert_close(other.fields()[name].float(), value[:, :, order].float())


@pytest.mark.parametrize("rows", ["all", "every eighth", "random"])
@pytest.mark.parametrize("limits", [{}, {"window": 64}, {"window": 64, "sinks": 4}], ids=str)
def test_no_tensor_grows_with_the_square_of_length(
    rows: str, limits: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is larger than a chunk or than the inputs."""
    monkeypatch.setattr(kernel, "CHUNK_ELEMENTS", 2**16)
    T = 2048
    q, k = qk(T, B=1, H=2, G=1)
    chosen = {"all": None, "every eighth": torch.arange(0, T, 8), "random": torch.randperm(T)[: T // 8]}[rows]
    with Largest() as seen:
        attention_stats(q, k, rows=chosen, labels=torch.ones(1, T, dtype=torch.bool), **limits)
    assert seen.elements <= 2**16


def test_values_are_detached_and_inputs_left_alone() -> None:
    q, k = qk()
    labels = torch.ones(2, 33, dtype=torch.uint8)
    kept = [x.clone() for x in (q, k, labels)]
    s = attention_stats(q.requires_grad_(), k.requires_grad_(), rows=[-1], window=3, labels=labels)
    assert not any(value.requires_grad for value in s.fields().values())
    assert all(torch.equal(x, y) for x, y in zip((q, k, labels), kept, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_arithmetic_is_at_least_fp32(dtype: torch.dtype) -> None:
    """Low-precision inputs are taken at their exact values."""
    q, k = (x.to(dtype) for x in qk(size=4.0))
    s = attention_stats(q, k, window=11)
    assert s.entropy.dtype == torch.promote_types(dtype, torch.float32)
    check(s, oracle(q, k, window=11))


def test_autocast_does_not_round() -> None:
    q, k = qk(size=4.0)
    with torch.autocast("cpu", torch.bfloat16):
        check(attention_stats(q, k, window=11), oracle(q, k, window=11))


# Mistakes


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"histogram": True, "causal": False}, "causal=True"),
        ({"cu_seqlens": [0, 33]}, "got 2 samples"),
        ({"cu_seqlens": [0, 33], "q_seg": torch.zeros(2, 33, dtype=torch.int64)}, "give it alone"),
        ({"rows": [33]}, "do not fit 33"),
        ({"rows": [-34]}, "do not fit 33"),
        ({"window": 0}, "window=0"),
        ({"window": -3}, "window=-3"),
        ({"window": 3, "causal": False}, "causal=True"),
        ({"labels": torch.ones(2, 32, dtype=torch.bool)}, "labels: shape"),
        ({"labels": torch.ones(33, dtype=torch.bool)}, "labels: shape"),
        ({"labels": torch.ones(2, 33, dtype=torch.int64)}, "labels: dtype"),
        ({"q_pos": torch.arange(33)[None]}, "q_pos and k_pos"),
    ],
)
def test_mistakes_are_named(options: dict[str, Any], message: str) -> None:
    q, k = qk()
    with pytest.raises(ValueError, match=message):
        attention_stats(q, k, **options)


@pytest.mark.parametrize("ends", [[0, 8], [1, 9], [0, 5, 3, 9], [0], [0, 9, 9, 8]])
def test_document_ends_must_fit(ends: Any) -> None:
    q, k = qk(T=9, B=1)
    with pytest.raises(ValueError, match="expected 0, the documents' ends in order, 9"):
        attention_stats(q, k, cu_seqlens=torch.tensor(ends))


def test_heads_must_divide() -> None:
    q, k = qk(H=4, G=3)
    with pytest.raises(ValueError, match="do not divide"):
        attention_stats(q, k)
    q, k = qk()
    with pytest.raises(ValueError, match="q_pos and k_pos"):
        attention_stats(q[:, 5:], k)
    with pytest.raises(ValueError, match="rows: shape"):
        attention_stats(q[:1], k[:1], rows=torch.zeros(2, 3, dtype=torch.int64))
