"""The Triton kernel of attention_stats() in Triton's interpreter, against the dense fp64 oracle and the torch path.

Collected by test_attention_stats_triton.py in a process with TRITON_INTERPRET=1, which must be set before Triton is
imported. Small tiles, so that a few tokens make several blocks; every buffer starts as NaN.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attention_oracle import EPS, Oracle, oracle, qk
from helpers import error
from torch import Tensor

from hybridscope import AttentionStats, attention_stats
from hybridscope.hooks.kernels import attention_stats_launch as launch

FLOATS = ("lse", "entropy", "mass", "top1_prob", "distance", "sink_mass")


@pytest.fixture(autouse=True)
def small_poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    tile = launch.Tile(16, 16, 4, 2)
    monkeypatch.setattr(launch, "TILES", {bits: {256: tile} for bits in (16, 32)})
    monkeypatch.setattr(launch, "TOP1", {})
    monkeypatch.setattr(launch, "SMALL", {16: {}, 32: {}})
    assert launch.INTERPRETED
    poison(monkeypatch)


def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every buffer of a launch starts as NaN, or as a large negative number."""

    def poisoned(tensors: Any) -> Any:
        for x in tensors.values() if isinstance(tensors, dict) else tensors:
            x.fill_(float("nan") if x.dtype.is_floating_point else -(2**30))
        return tensors

    for name in ("_outputs", "_sums"):
        original = getattr(launch, name)
        monkeypatch.setattr(launch, name, lambda *args, original=original: poisoned(original(*args)))


def stats(q: Tensor, k: Tensor, **options: Any) -> AttentionStats:
    return attention_stats(q, k, impl="triton", **options)


def check(got: AttentionStats, expected: Oracle) -> None:
    """KERNELS.md's bound: 1e-5 (1 + |ref|) + 4 eps max|s|, times its size for a distance."""
    slack = 4 * EPS * expected["largest"].max()
    for name in FLOATS:
        value, ref = getattr(got, name).double().numpy(), expected[name]
        assert value.shape == ref.shape, name
        bound = 1e-5 * (1 + abs(ref)) + slack * (1 + abs(ref) if name == "distance" else 1)
        assert (abs(value - ref) <= bound).all(), f"{name}: {(abs(value - ref) / bound).max():.2f} of the bound"
    assert (got.visible.numpy() == expected["visible"]).all()
    clear = expected["gap"] > 2 * slack + 1e-6
    assert (got.top1.numpy()[clear] == expected["top1"][clear]).all()


def same(got: AttentionStats, expected: AttentionStats) -> None:
    """What the torch path says, to fp32; ties of the top key aside."""
    for name, value in expected.fields().items():
        if value.dtype.is_floating_point:
            both = torch.isfinite(value)  # lse is -inf where nothing is seen
            assert torch.equal(getattr(got, name)[~both], value[~both]), name
            assert error(getattr(got, name)[both], value[both]) < 2e-5, name
        elif name == "visible":
            assert torch.equal(got.visible, value)
    assert got.fields().keys() == expected.fields().keys()


LIMITS: list[dict[str, Any]] = [
    {},
    {"window": 1},
    {"window": 15},
    {"window": 16},
    {"window": 17},
    {"window": 39},
    {"window": 40},
    {"window": 5, "sinks": 3},
    {"window": 4, "sinks": 3, "limit": 9},
    {"limit": 6},
    {"softcap": 2.0},
    {"scale": -1.7},
    {"scale": 0.0},
    {"causal": False},
    {"sink_logits": torch.tensor([-1e4, 60.0])},
    {"sink_logits": torch.tensor([-1.0, 2.0]), "window": 9, "softcap": 5.0},
]


@pytest.mark.parametrize("limits", LIMITS, ids=str)
def test_equals_the_oracle(limits: dict[str, Any]) -> None:
    q, k = qk(T=40, B=1, H=2, G=1, size=3.0)
    labels = torch.rand(1, 40) < 0.2
    got = stats(q, k, labels=labels, **limits)
    check(got, oracle(q, k, labels=labels, **limits))


@pytest.mark.parametrize("kind", ["peaked", "uniform", "huge", "tied", "rising"])
def test_hard_scores(kind: str) -> None:
    """One-hot, equal, scores of 1e4, two largest keys, and a maximum that rises with every key."""
    q, k = qk(T=40, B=1, H=2, G=1)
    if kind == "peaked":
        q, k[:, 3] = q.abs() * 60, 2 * k.abs().amax() + k[:, 3].abs()
    elif kind == "uniform":
        q = torch.zeros_like(q)
    elif kind == "huge":
        q = q * 1e4
    elif kind == "tied":
        k[:, 30] = k[:, 2]
        q = 5 * k[:, 2].expand_as(q).contiguous()
    else:
        q, k = torch.ones_like(q), torch.arange(40.0).view(1, 40, 1, 1).expand_as(k) * 100.3
    s = stats(q, k)
    check(s, oracle(q, k))
    assert (s.entropy[:, 0] == 0).all()
    assert (s.visible[:, 0] == 1).all()
    assert (stats(q, k, window=1).entropy == 0).all()
    if kind == "tied":
        assert torch.isin(s.top1[:, 30:], torch.tensor([2, 30])).all()


@pytest.mark.parametrize("shape", [(33, 1, 4, 4, 16), (20, 2, 4, 1, 24), (17, 1, 6, 2, 80), (9, 1, 7, 1, 5)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_heads_head_dims_and_dtypes(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Groups that are no power of two share a tile; head dims are padded or split in two."""
    q, k = (x.to(dtype) for x in qk(*shape))
    labels = torch.randint(0, 2, shape[1::-1], dtype=torch.uint8)
    labels[:, 0] = 1
    check(stats(q, k, labels=labels), oracle(q, k, labels=labels))


def test_dtypes_may_differ_and_layouts_are_free() -> None:
    q, k = qk(T=20, B=2)
    bent = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k)]
    assert torch.equal(stats(*bent).lse, stats(q, k).lse)
    check(stats(q.half(), k), oracle(q.half(), k))
    assert torch.equal(stats(q.mT.contiguous().mT, k).lse, stats(q, k).lse)


@pytest.mark.parametrize("rows", [[0], [39], [-1, -40, 5, 5], [14], [31, 30], list(range(0, 40, 3))], ids=str)
@pytest.mark.parametrize("limits", [{}, {"window": 5, "sinks": 2}], ids=str)
def test_row_subsets(rows: list[int], limits: dict[str, Any]) -> None:
    q, k = qk(T=40, B=1, H=2, G=1)
    check(stats(q, k, rows=rows, **limits), oracle(q, k, rows=rows, **limits))


def test_rows_per_sample_and_no_rows() -> None:
    q, k = qk(T=20)
    rows = torch.tensor([[0, 19, 7], [-1, 2, 2]])
    check(stats(q, k, rows=rows, window=6), oracle(q, k, rows=rows.numpy(), window=6))
    none = stats(q, k, rows=torch.zeros(0, dtype=torch.int64), labels=torch.ones(2, 20, dtype=torch.bool))
    assert none.mass.shape == (2, 0, 4, 1)


def test_every_bit_is_a_set() -> None:
    """Three sets, eight, and eleven, in one block and in none."""
    q, k = qk(T=40, B=1, H=2, G=1)
    for sets in (3, 8, 11):
        labels = torch.rand(1, 40, sets) < 0.1
        labels[:, 16:32] = False  # a whole block
        labels[:, 0, -1] = True
        check(stats(q, k, labels=labels), oracle(q, k, labels=labels))
        if sets <= 8:
            packed = (labels * 2 ** torch.arange(sets)).sum(-1).to(torch.uint8)
            assert torch.equal(stats(q, k, labels=packed).mass, stats(q, k, labels=labels).mass)
    assert (stats(q, k, labels=torch.zeros(1, 40, dtype=torch.bool)).mass == 0).all()


PLACES = {
    "left": [-1] * 18 + list(range(22)),
    "interior": [*range(10), -1, -1, *range(10, 15), *[-1] * 18, *range(15, 20)],
    "right": [*range(30), *[-1] * 10],
    "ring": [*range(40, 60), *range(20, 40)],
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("limits", [{}, {"window": 7, "sinks": 2}, {"window": 17, "limit": 19, "sinks": 1}], ids=str)
def test_padding_and_offsets(place: str, limits: dict[str, Any]) -> None:
    """Keys at negative positions are not there; queries are the last few tokens, or all of them."""
    q, k = qk(T=40, B=1, H=2, G=1)
    k_pos = torch.tensor([PLACES[place]])
    k[0, k_pos[0] < 0] = 1e3
    for q_pos, queries in ((k_pos.amax() - torch.arange(3).flip(0)[None], q[:, -3:]), (k_pos.clamp(min=0), q)):
        options = {"q_pos": q_pos, "k_pos": k_pos, "labels": torch.rand(1, 40) < 0.3, "histogram": True, **limits}
        same(stats(queries, k, **options), attention_stats(queries, k, impl="reference", **options))
    both = {"q_pos": k_pos.clamp(min=0), "k_pos": k_pos, "causal": False}
    same(stats(q, k, **both), attention_stats(q, k, impl="reference", **both))


@pytest.mark.parametrize("left", [1, 3, 20])
def test_queries_of_padding_may_lie_below_zero(left: int) -> None:
    """As transformers counts them under left padding: what they see is nothing, and their neighbours' bins stay."""
    q, k = qk(T=40, B=1, H=2, G=1)
    q_pos = torch.arange(40)[None] - left
    options = {"q_pos": q_pos, "k_pos": q_pos.clamp(min=-1), "histogram": True}
    s = stats(q, k, **options)
    same(s, attention_stats(q, k, impl="reference", **options))
    assert error(s.histogram[:, left:].sum(-1), torch.ones(1, 40 - left, 2)) < 1e-6


def test_a_sink_of_minus_infinity_is_none() -> None:
    q, k = qk(T=20, B=1)
    sunk = stats(q, k, sink_logits=torch.tensor([0.0, -torch.inf, 2.0, -torch.inf]))
    without = stats(q, k)
    for name in ("entropy", "entropy_norm", "lse", "top1_prob"):
        assert torch.equal(getattr(sunk, name)[..., 1::2], getattr(without, name)[..., 1::2]), name


def test_a_row_that_sees_nothing() -> None:
    q, k = qk(T=20, B=1)
    positions = {"q_pos": torch.arange(20)[None], "k_pos": torch.arange(20)[None] + 4}
    s = stats(q, k, labels=torch.ones(1, 20, dtype=torch.bool), histogram=True, **positions)
    assert (s.lse[:, :4] == -torch.inf).all()
    assert (s.visible[:, :4] == 0).all()
    for name in ("entropy", "entropy_norm", "mass", "top1_prob", "distance", "sink_mass", "histogram"):
        assert (getattr(s, name)[:, :4] == 0).all(), name
    sunk = stats(q, k, sink_logits=torch.tensor([3.0, -200.0, 0.0, 90.0]), **positions)
    assert (sunk.sink_mass[:, :4] == 1).all()
    assert error(sunk.lse[:, 0, 0], torch.tensor([3.0])) < 1e-6


def test_packed_documents() -> None:
    """Segments, and cu_seqlens, whose documents keep their own sinks: each is as if alone."""
    q, k = qk(T=40, B=1, H=2, G=1)
    ends = [0, 5, 5, 22, 40]
    whole = stats(q, k, window=6, sinks=2, cu_seqlens=ends)
    same(whole, attention_stats(q, k, impl="reference", window=6, sinks=2, cu_seqlens=ends))
    for a, b in ((0, 5), (5, 22), (22, 40)):
        alone = stats(q[:, a:b], k[:, a:b], window=6, sinks=2)
        for name in ("lse", "entropy", "distance", "top1_prob"):
            assert error(getattr(whole, name)[:, a:b], getattr(alone, name)) < 1e-5, name
        assert torch.equal(whole.top1[:, a:b], alone.top1 + a)
    seg = torch.tensor([[0] * 5 + [3] * 20 + [1] * 15])
    for causal in (True, False):
        options = {"q_seg": seg, "k_seg": seg, "causal": causal}
        same(stats(q, k, **options), attention_stats(q, k, impl="reference", **options))


@pytest.mark.parametrize("limits", [{}, {"window": 20, "sinks": 1}], ids=str)
def test_histogram(limits: dict[str, Any]) -> None:
    q, k = qk(T=40, B=1, H=2, G=1)
    got, expected = (attention_stats(q, k, histogram=True, impl=i, **limits) for i in ("triton", "reference"))
    assert got.histogram.shape == (1, 40, 2, 7)
    assert error(got.histogram, expected.histogram) < 1e-6
    assert error(got.histogram.sum(-1), torch.ones(1, 40, 2)) < 1e-6


@pytest.mark.parametrize("splits", [2, 4, 8])
def test_splitting_the_keys_and_finding_the_top_key_either_way(splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts may see no key at all."""
    q, k = qk(T=70, B=1, H=2, G=1)
    labels, sinks = torch.rand(1, 70) < 0.1, torch.tensor([0.0, 2.0])
    options: dict[str, Any] = {"rows": [69, 3, 40], "labels": labels, "histogram": True, "sink_logits": sinks}
    one = stats(q, k, **options)
    original, tile_for = launch.stats, launch.tile_for
    monkeypatch.setattr(launch, "stats", lambda **kw: original(**kw, splits=splits))
    monkeypatch.setattr(launch, "tile_for", lambda *a, **k: tile_for(*a, **k)._replace(find=2))
    same(stats(q, k, **options), one)
    check(stats(q, k, rows=[69, 0], window=21, sinks=3), oracle(q, k, rows=[69, 0], window=21, sinks=3))
    assert torch.equal(stats(q, k, **options).top1, one.top1)


def test_only_what_was_asked_for() -> None:
    q, k = qk(T=20, B=1)
    s, every = stats(q, k, top1=False, distance=False), stats(q, k)
    assert (s.top1.shape, s.distance.shape, s.mass.shape) == ((1, 20, 0), (1, 20, 0), (1, 20, 4, 0))
    assert set(s.fields()) == {"lse", "entropy", "visible", "top1_prob", "sink_mass"}
    for name, value in s.fields().items():
        assert torch.equal(value, getattr(every, name))


def test_repeated_calls_are_equal_and_inputs_left_alone() -> None:
    q, k = qk(T=33, B=1)
    kept = q.clone(), k.clone()
    first, second = (stats(q.requires_grad_(), k.requires_grad_(), window=20) for _ in range(2))
    assert all(torch.equal(first.fields()[n], v) and not v.requires_grad for n, v in second.fields().items())
    assert torch.equal(q, kept[0])
    assert torch.equal(k, kept[1])


def test_what_the_kernel_does_not_take() -> None:
    q, k = qk(T=6, B=1)
    with pytest.raises(ValueError, match="blocked"):
        stats(q, k, blocked=torch.zeros(1, 6, 6, dtype=torch.bool))
    with pytest.raises(ValueError, match="float64"):
        stats(q.double(), k.double())
    with pytest.raises(ValueError, match="head dim 300"):
        stats(torch.zeros(1, 4, 1, 300), torch.zeros(1, 4, 1, 300))
