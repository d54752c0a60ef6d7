"""attention_stats() of some rows and some keys: chosen rows, positions, segments, hidden edges, distances, fields."""

from __future__ import annotations

import pytest
import torch
from attention_oracle import check, oracle, qk
from helpers import assert_close

from hybridscope import AttentionStats, attention_stats
from hybridscope.hooks.kernels import attention_stats as kernel

# Which rows


@pytest.mark.parametrize("rows", [[0], [32], [-1, -33], [5, 5, 2], [31, 0, 16], list(range(33))])
@pytest.mark.parametrize("limits", [{}, {"window": 5}, {"window": 5, "sinks": 2}], ids=str)
def test_shared_rows(rows: list[int], limits: dict[str, int]) -> None:
    """Any rows in any order are those rows of the whole table."""
    q, k = qk()
    got, whole = attention_stats(q, k, rows=rows, **limits), attention_stats(q, k, **limits)
    for name, value in got.fields().items():
        expected = whole.fields()[name][:, rows]
        assert_close(value.float(), expected.float())
    check(got, oracle(q, k, rows=rows, **limits))


@pytest.mark.parametrize("limits", [{}, {"window": 5}], ids=str)
def test_rows_per_sample(limits: dict[str, int]) -> None:
    q, k = qk()
    rows = torch.tensor([[0, 31, 7], [-1, 2, 2]])
    check(attention_stats(q, k, rows=rows, **limits), oracle(q, k, rows=rows.numpy(), **limits))
    assert attention_stats(q, k, rows=rows[:1]).lse.shape == (2, 3, 4)  # one row list serves both


def test_no_rows() -> None:
    q, k = qk()
    s = attention_stats(q, k, rows=torch.zeros(0, dtype=torch.int64), labels=torch.ones(2, 33, dtype=torch.bool))
    assert s.entropy.shape == (2, 0, 4)
    assert s.mass.shape == (2, 0, 4, 1)


@pytest.mark.parametrize("rows", [None, [3, 30, 4], [32, 0, 1, 17, 16]])
@pytest.mark.parametrize("limits", [{}, {"window": 5}, {"window": 5, "sinks": 2}], ids=str)
@pytest.mark.parametrize("elements", [1, 100, 700])
def test_chunks_change_nothing(
    rows: list[int] | None, limits: dict[str, int], elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k = qk()
    monkeypatch.setattr(kernel, "CHUNK_ELEMENTS", elements)
    check(attention_stats(q, k, rows=rows, **limits), oracle(q, k, rows=rows, **limits))


# Positions, padding, hidden edges


def test_padding_and_offsets_by_position() -> None:
    """Keys at negative positions are not there; queries may be the last few tokens of a longer context."""
    q, k = qk(T=10, B=1)
    whole = attention_stats(q, k, window=6, sinks=1)
    at = torch.tensor([1, 2, 5, 6, 7, 8, 10, 11, 12, 14])
    k_pos, wide = torch.full((1, 15), -1), torch.full((1, 15, 2, 8), 1e3)
    k_pos[0, at], wide[0, at] = torch.arange(10), k[0]
    s = attention_stats(q[:, 7:], wide, q_pos=torch.tensor([[7, 8, 9]]), k_pos=k_pos, window=6, sinks=1)
    for name in ("lse", "entropy", "top1_prob", "distance"):
        assert_close(getattr(s, name), getattr(whole, name)[:, 7:])
    assert torch.equal(s.visible, whole.visible[:, 7:])
    assert torch.equal(s.top1, at[whole.top1[:, 7:]])


def test_segments_are_separate_contexts() -> None:
    """Rows of a packed document have the statistics of the document alone; top1 still names the packed
    key."""
    q, k = qk(T=12)
    seg = torch.tensor([[0] * 5 + [3] * 7, [1] * 12])
    s = attention_stats(q, k, window=6, q_seg=seg, k_seg=seg)
    for n, part in ((0, slice(0, 5)), (0, slice(5, 12)), (1, slice(0, 12))):
        alone = attention_stats(q[n : n + 1, part], k[n : n + 1, part], window=6)
        for name in ("lse", "entropy", "distance", "top1_prob"):
            assert_close(getattr(s, name)[n, part], getattr(alone, name)[0])
        assert torch.equal(s.visible[n, part], alone.visible[0])
        assert torch.equal(s.top1[n, part], alone.top1[0] + part.start)


def test_hidden_edges_are_not_there() -> None:
    """Hiding every key but the last five is a window of five; per head, only that head changes."""
    q, k = qk()
    distance = torch.arange(33)[:, None] - torch.arange(33)
    far = (distance >= 5).expand(2, 33, 33).contiguous()
    check(attention_stats(q, k, blocked=far), oracle(q, k, window=5))
    rows = torch.tensor([8, 30, 20])
    check(attention_stats(q, k, rows=rows, blocked=far[:, rows]), oracle(q, k, rows=rows, window=5))
    heads = torch.tensor([False, True, False, False]).view(1, 1, 4, 1)
    some = attention_stats(q, k, blocked=far[:, :, None] & heads)
    cut, free = attention_stats(q, k, window=5), attention_stats(q, k)
    assert torch.equal(some.visible[:, :, 1], cut.visible[:, :, 1])
    assert_close(some.entropy[:, :, 1], cut.entropy[:, :, 1])
    assert_close(some.entropy[:, :, [0, 2, 3]], free.entropy[:, :, [0, 2, 3]])


def test_a_row_that_sees_nothing() -> None:
    q, k = qk(T=6)
    blocked = torch.zeros(2, 6, 6, dtype=torch.bool)
    blocked[:, 3] = True
    s = attention_stats(q, k, blocked=blocked, labels=torch.ones(2, 6, dtype=torch.bool))
    assert (s.visible[:, 3] == 0).all()
    assert (s.lse[:, 3] == -torch.inf).all()
    for name in ("entropy", "entropy_norm", "mass", "top1_prob", "distance", "sink_mass"):
        assert (getattr(s, name)[:, 3] == 0).all(), name


# Histograms, packed documents, fewer fields


@pytest.mark.parametrize("limits", [{}, {"window": 6}, {"window": 6, "sinks": 2}], ids=str)
@pytest.mark.parametrize("elements", [150, 2**22])
def test_histogram_is_the_share_by_distance(
    limits: dict[str, int], elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bin 0 is the query itself, bin n keys 2^(n-1) to 2^n - 1 back: the masses of those keys, row by row."""
    monkeypatch.setattr(kernel, "CHUNK_ELEMENTS", elements)
    q, k = qk(B=1)
    rows = [32, 0, 17, 1]
    s = attention_stats(q, k, rows=rows, histogram=True, sink_logits=torch.zeros(4), **limits)
    assert s.histogram.shape == (1, 4, 4, 7)  # 32 is the longest distance: 32..63 is bin 6
    assert_close(s.histogram.sum(-1) + s.sink_mass, torch.ones(1, 4, 4))
    for r, row in enumerate(rows):
        back = row - torch.arange(33)
        bins = torch.where(back > 0, back.clamp(min=1).log2().floor().long() + 1, 0)
        sets = torch.nn.functional.one_hot(bins, 7).bool()[None] & (back >= 0)[:, None]
        mass = attention_stats(q, k, rows=[row], labels=sets, sink_logits=torch.zeros(4), **limits).mass
        assert_close(s.histogram[:, r], mass[:, 0])
    assert attention_stats(q, k).histogram.shape == (1, 33, 4, 0)


def test_histograms_of_a_growing_context_join() -> None:
    q, k = qk(T=9, B=1)
    whole = attention_stats(q, k, histogram=True)
    parts = []
    for a, b in ((0, 4), (4, 5), (5, 9)):
        where = {"q_pos": torch.arange(a, b)[None], "k_pos": torch.arange(b)[None]}
        parts.append(attention_stats(q[:, a:b], k[:, :b], histogram=True, **where))
    assert_close(AttentionStats.cat(parts, 1).histogram, whole.histogram)


def test_packed_documents_are_as_if_alone() -> None:
    """cu_seqlens: q_seg and k_seg, and positions that start anew, so that each document has sinks of its own."""
    q, k = qk(T=20, B=1)
    ends = torch.tensor([0, 7, 7, 12, 20], dtype=torch.int32)
    s = attention_stats(q, k, window=3, sinks=1, cu_seqlens=ends, histogram=True)
    for a, b in ((0, 7), (7, 12), (12, 20)):
        alone = attention_stats(q[:, a:b], k[:, a:b], window=3, sinks=1, histogram=True)
        for name in ("lse", "entropy", "distance", "top1_prob"):
            assert_close(getattr(s, name)[:, a:b], getattr(alone, name))
        assert torch.equal(s.visible[:, a:b], alone.visible)
        assert torch.equal(s.top1[:, a:b], alone.top1 + a)
        bins = alone.histogram.shape[-1]
        assert_close(s.histogram[:, a:b, :, :bins], alone.histogram)
    seg = torch.bucketize(torch.arange(20), ends[1:], right=True)[None]
    by_seg = attention_stats(q, k, window=3, q_seg=seg, k_seg=seg)
    assert_close(attention_stats(q, k, window=3, cu_seqlens=ends.tolist()).entropy, by_seg.entropy)


def test_fields_that_were_not_asked_for() -> None:
    q, k = qk()
    s = attention_stats(q, k, top1=False, distance=False)
    assert (s.top1.shape, s.distance.shape) == ((2, 33, 0), (2, 33, 0))
    assert set(s.fields()) == {"lse", "entropy", "visible", "top1_prob", "sink_mass"}
    assert torch.equal(AttentionStats.cat([s, s], 1).entropy[:, 33:], s.entropy)
