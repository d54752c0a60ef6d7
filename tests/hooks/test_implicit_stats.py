"""implicit_stats(): the weights are those by which a recurrence sums its values, and the statistics are theirs."""

from __future__ import annotations

import math

import pytest
import torch
from helpers import Largest, assert_close, model_of
from implicit_oracle import KINDS, Inputs, T, check, inputs, products, sets_of, windowed

from hybridscope import Stats, attention_stats, implicit_stats
from hybridscope.hooks.kernels import implicit_stats as kernel
from hybridscope.hooks.kernels.implicit_stats import implicit_weights
from hybridscope.hooks.kernels.recurrence import Read, recurrence_reference

# Against the products written out


@pytest.mark.parametrize("read", ["after", "before"])
@pytest.mark.parametrize("kind", KINDS)
def test_equals_explicit_products(kind: str, read: Read, monkeypatch: pytest.MonkeyPatch) -> None:
    """One chunk, several, chunks of one token; any amount at once; uncapped and capped."""
    x, sets = inputs(kind), sets_of()
    free = products(x, read)
    v = torch.randn(2, T, 2, 3).double()
    assert_close(torch.einsum("brht,bthv->brhv", free, v), recurrence_reference(**x, v=v, read=read)[0])
    ways: list[tuple[int, int, list[int | None]]]
    ways = [(64, 2**23, [None, 9]), (8, 2**23, [None, 1, 7, 9, T, T + 5]), (5, 1, [None, 9]), (1, 2**9, [7])]
    for chunk, elements, caps in ways:
        monkeypatch.setattr(kernel, "CHUNK", chunk)
        monkeypatch.setattr(kernel, "ELEMENTS", elements)
        for cap in caps:
            conv = 4 if cap == 9 else 1
            w = free if cap is None else windowed(free, cap, conv)
            assert_close(implicit_weights(**x, read=read, cap=cap, conv=conv), w)
            got = implicit_stats(**x, labels=sets, read=read, cap=cap, conv=conv, histogram=True)
            check(got, w, sets)
            t = torch.arange(T)
            low = 0 if cap is None else torch.where(t < cap, 0, t - cap + conv)
            visible = t - low + (read == "after")
            assert torch.equal(got.visible, visible[None, :, None].expand(2, -1, 2))


def test_outside_the_cap_is_zero_bitwise() -> None:
    """Whatever stands there: earlier tokens a thousand times as large change no weight inside."""
    x = inputs("scalar")
    loud = {name: y * torch.where(torch.arange(T) < 10, 1e3, 1.0)[:, None, None] for name, y in x.items()}
    for y in (x, {**loud, "log_decay": x["log_decay"]}):
        w = implicit_weights(**y, cap=6, conv=3, rows=[20, 15])
        assert (w[:, 0, :, :17] == 0).all()
        assert (w[:, 1, :, :12] == 0).all()
        assert_close(w, implicit_weights(**x, cap=6, conv=3, rows=[20, 15]))


@pytest.mark.parametrize("kind", KINDS)
def test_rows_subset(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In any order, repeated, from the end, or other rows for each sample."""
    monkeypatch.setattr(kernel, "CHUNK", 6)
    x, sets = inputs(kind), sets_of()
    whole = implicit_stats(**x, labels=sets, histogram=True)
    for rows in ([5, 22, 5, 0], [-1, -T], torch.tensor([[3, 22, 11], [18, 0, -2]]), []):
        got = implicit_stats(**x, rows=rows, labels=sets, histogram=True)
        index = torch.as_tensor(rows, dtype=torch.int64).expand(2, -1) % T
        for name, value in whole.fields().items():
            expected = torch.stack([value[n, index[n]] for n in range(2)])
            assert_close(getattr(got, name).double(), expected.double())


def test_write_strength_and_bonus() -> None:
    """`write` is a factor on what a token writes, `bonus` a weight beside it, for a token's own value only."""
    x = inputs("vector")
    write, bonus = (torch.randn(2, T, 2).double() for _ in range(2))
    w = products(x, "before") * write.transpose(1, 2)[:, None]
    w.diagonal(dim1=1, dim2=3).copy_(bonus.transpose(1, 2))
    sets = sets_of()
    got = implicit_stats(**x, write=write, bonus=bonus, labels=sets, read="before", histogram=True)
    check(got, w, sets)
    assert torch.equal(got.visible[0, :, 0], torch.arange(T) + 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_is_computed_in_fp32(dtype: torch.dtype) -> None:
    x = {name: y.to(dtype) for name, y in inputs("delta", 150).items()}
    got, expected = (implicit_stats(**y, rows=[149, 70]) for y in (x, {name: y.double() for name, y in x.items()}))
    for name in ("lse", "entropy", "top1_prob", "distance", "signed_total"):
        assert getattr(got, name).dtype == torch.float32
        assert_close(getattr(got, name) / 150, getattr(expected, name) / 150, torch.float32)


def test_labels_are_those_of_softmax_heads() -> None:
    x, bits = inputs("scalar"), torch.randint(0, 4, (2, T), dtype=torch.uint8)
    sets = torch.stack([bits & 1 == 1, bits & 2 == 2], -1)
    assert torch.equal(implicit_stats(**x, labels=bits).signed, implicit_stats(**x, labels=sets).signed)
    one = implicit_stats(**x, labels=sets[..., 1].contiguous())
    assert torch.equal(one.mass[..., 0], implicit_stats(**x, labels=bits).mass[..., 1])
    assert implicit_stats(**x).mass.shape == implicit_stats(**x).signed.shape == (2, T, 2, 0)


# Planted


@pytest.mark.parametrize("mixer", ["gla", "delta rule"])
def test_one_written_key_has_the_whole_share(mixer: str) -> None:
    x = inputs("vector" if mixer == "gla" else "delta")
    x["k"][:, :5], x["k"][:, 6:] = 0, 0
    sets = torch.arange(T)[None, :, None].expand(2, -1, 1) == 5
    s = implicit_stats(**x, labels=sets, rows=list(range(5, T)))
    assert torch.equal(s.mass, torch.ones_like(s.mass))
    assert torch.equal(s.top1_prob, torch.ones_like(s.top1_prob))
    assert (s.top1 == 5).all()
    assert (s.entropy == 0).all()
    assert_close(s.distance[0, :, 0], torch.arange(T - 5).double())
    assert torch.equal(s.signed[..., 0], s.signed_total)
    before = implicit_stats(**x, labels=sets, rows=list(range(5)))  # nothing has been written yet
    for value in (before.mass, before.entropy, before.distance, before.top1_prob, before.signed_total):
        assert (value == 0).all()
    assert (before.lse == -math.inf).all()


def test_the_delta_rule_overwrites() -> None:
    """A key written again with strength 1 replaces its first value; without erasure both stay."""
    k = torch.zeros(1, 10, 1, 4).double()
    k[0, [2, 7], 0, 1] = 1
    x: Inputs = {"q": torch.ones(1, 10, 1, 4).double(), "k": k}
    erased = implicit_weights(**x, beta=torch.ones(1, 10, 1).double(), rows=[6, 9])[0, :, 0]
    assert erased.nonzero().tolist() == [[0, 2], [1, 7]]
    assert implicit_weights(**x, rows=[6, 9])[0, :, 0].nonzero().tolist() == [[0, 2], [1, 2], [1, 7]]


def test_one_scale_with_softmax_heads() -> None:
    """Undecayed equal keys are uniform attention: every field that both have is the same."""
    q, labels = torch.ones(1, T, 1, 4).double(), torch.rand(1, T) < 0.3
    recurrent, softmax = implicit_stats(q=q, k=q, labels=labels), attention_stats(q, 0 * q, labels=labels)
    for name in ("entropy", "visible", "mass", "top1", "top1_prob", "distance", "sink_mass", "entropy_norm"):
        assert_close(getattr(recurrent, name).double(), getattr(softmax, name).double())


def test_a_decay_sets_the_distance() -> None:
    """Shares of a scalar decay are geometric: mean distance r / (1 - r), far from the start."""
    ones = torch.ones(1, 2000, 1, 1).double()
    s = implicit_stats(q=ones, k=ones, log_decay=math.log(0.95) * ones, rows=[-1])
    assert float(s.distance) == pytest.approx(0.95 / 0.05, rel=1e-12)
    assert float(s.lse) == pytest.approx(-math.log(0.05), rel=1e-12)


def test_signs_cancel_in_signed_sums_only() -> None:
    q = torch.ones(1, 8, 1, 1).double()
    k = q * torch.tensor([1.0, -1.0]).repeat(4)[:, None, None]
    s = implicit_stats(q=q, k=k, rows=[7], labels=torch.arange(8)[None] % 2 == 1)
    assert float(s.signed_total) == 0
    assert (float(s.signed), float(s.mass)) == (-4, 0.5)


# Memory, mistakes


@pytest.mark.parametrize("kind", ["vector", "delta"])
def test_memory_is_bounded(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing grows faster than the inputs, for a few rows or all."""
    monkeypatch.setattr(kernel, "ELEMENTS", 2**14)
    for rows in ([-1, 5], None):
        largest = []
        for length in (256, 1024):
            x = inputs(kind, length, B=1, H=1)
            with Largest() as watch:
                implicit_stats(**x, rows=rows)
            largest.append(watch.elements)
        assert largest[1] <= max(2**15, 1024 * 4)


def test_mistakes_are_named() -> None:
    x = inputs("scalar")
    cases: list[tuple[Inputs, str]] = [
        ({"rows": [T]}, f"do not fit {T}"),
        ({"rows": torch.zeros(3, 1, dtype=torch.int64)}, "rows: shape"),
        ({"cap": 2, "conv": 4}, "convolution width 4"),
        ({"labels": torch.zeros(2, 9, dtype=torch.bool)}, "labels: shape"),
    ]
    for options, message in cases:
        with pytest.raises(ValueError, match=message):
            implicit_stats(**x, **options)
    model = model_of("gdn", "full")
    model.sites[0].opaque = True
    with pytest.raises(ValueError, match=r"recurrent=True.*blocks.0.attn is recurrent"):
        model.record(stats=Stats(recurrent=True)).__enter__()
