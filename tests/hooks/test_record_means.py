"""Stats(reduce="mean"): means over rows are those of the rows, padding left out, in memory that does not grow."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import Largest, assert_close, model_of, pad, tokens_of
from hybrid import HYBRID, INSIDE, LEFT, RIGHT, SOFTMAX
from torch import Tensor

from hybridscope import AttentionStats, HybridLM, MeanStats, Stats
from hybridscope.hooks.passes import Cache
from hybridscope.hooks.reduce import Mean

T = 15


@pytest.fixture(name="model")
def _model() -> HybridLM:
    return model_of(*HYBRID, n_kv_heads=2)


def mean_of(s: AttentionStats, keep: Tensor | None = None) -> dict[str, Tensor]:
    """Each field averaged over the rows `keep` [N,R] of each sample, [N,1,H]."""
    fields = {name: x for name, x in s.fields().items() if name != "top1" and x is not None}
    fields["entropy_norm"] = s.entropy_norm
    keep = torch.ones(s.entropy.shape[:2], dtype=torch.bool) if keep is None else keep
    return {
        name: torch.stack([x[n, keep[n]].double().mean(0, keepdim=True) for n in range(len(x))])
        for name, x in fields.items()
    }


def agree_on_means(got: AttentionStats, expected: dict[str, Tensor], rows: Any) -> None:
    assert isinstance(got, MeanStats)
    for name, value in expected.items():
        assert_close(getattr(got, name).double(), value, "model")
    assert torch.equal(got.rows, torch.as_tensor(rows).view(-1, 1, 1).expand(got.entropy.shape))
    assert got.top1.isnan().all()


@pytest.mark.parametrize("at_once", [4096, 4, 1])
@pytest.mark.parametrize("rows", [None, [3, -1, 0], torch.tensor([[7, 7], [2, 14]])])
def test_means_are_those_of_the_rows(model: HybridLM, rows: Any, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hybridscope.hooks.record.MEAN_ROWS", at_once)
    tokens, labels = tokens_of(2, T), torch.randint(0, 4, (2, T), dtype=torch.uint8)
    with model.cap(full=9, recurrent=6), model.knockout(rows=[3, 7], keys=[1, 2]):
        with model.record(stats=Stats(rows=rows, labels=labels, recurrent=True)) as each:
            model(tokens)
        with model.record(stats=Stats(rows=rows, labels=labels, recurrent=True, reduce="mean")) as rec:
            model(tokens)
    for layer in range(4):
        expected = mean_of(each.stats(layer))
        assert ("signed" in expected) == (layer == 1)
        agree_on_means(rec.stats(layer), expected, each.stats(layer).entropy.shape[1])


def test_means_leave_padding_out(model: HybridLM) -> None:
    """Over the rows of the real tokens, whatever was asked for; where there is none, NaN."""
    rows = [tokens_of(1, len(at), seed=n)[0] for n, at in enumerate((LEFT, RIGHT, INSIDE))]
    tokens, mask = pad(rows, [LEFT, RIGHT, INSIDE], T)
    labels = torch.rand(3, T) < 0.5
    for chosen in (None, [0, 4, 6, 13]):
        with model.record(stats=Stats(rows=chosen, labels=labels, recurrent=True)) as each:
            model(tokens, mask)
        with model.record(stats=Stats(rows=chosen, labels=labels, recurrent=True, reduce="mean")) as rec:
            model(tokens, mask)
        keep = mask.bool() if chosen is None else mask.bool()[:, chosen]
        for layer in range(4):
            agree_on_means(rec.stats(layer), mean_of(each.stats(layer), keep), keep.sum(1))
    with model.record(stats=Stats(rows=[0], reduce="mean")) as rec:
        model(tokens, mask)
    assert rec.stats(3).rows[:, 0, 0].tolist() == [0, 1, 1]  # type: ignore[attr-defined]
    assert rec.stats(3).entropy[:, 0].isnan().all(1).tolist() == [True, False, False]


def test_means_join_cached_calls_by_their_rows(model: HybridLM) -> None:
    """Pieces of 7, 1, 1 and 6 rows: the same mean as in one pass; nothing is kept per call."""
    tokens, labels = tokens_of(2, T), torch.rand(2, T) < 0.5
    for rows in (None, [2, 6], torch.tensor([[6], [2]])):
        with model.record(stats=Stats(rows=rows, labels=labels)) as each:
            model(tokens)
        cache = Cache()
        with model.record(stats=Stats(rows=rows, labels=labels, reduce="mean")) as rec:
            for a, b in ((0, 7), (7, 8), (8, 9), (9, T)):
                model(tokens[:, a:b], cache=cache)
        for layer in SOFTMAX:
            agree_on_means(rec.stats(layer), mean_of(each.stats(layer)), each.stats(layer).entropy.shape[1])
            assert len(rec._means[layer, 0]) == 1


def test_means_of_batches_of_any_length(model: HybridLM) -> None:
    """Batches are concatenated, each with its own number of rows, where rows themselves could not be."""
    batches = [tokens_of(2, T), tokens_of(1, 6), tokens_of(3, 9)]
    with model.record(stats=Stats(reduce="mean", recurrent=True)) as rec:
        for tokens in batches:
            model(tokens)
    for layer in range(4):
        parts = []
        for tokens in batches:
            with model.record(stats=Stats(recurrent=True)) as each:
                model(tokens)
            parts.append(mean_of(each.stats(layer)))
        expected = {name: torch.cat([p[name] for p in parts]) for name in parts[0]}
        agree_on_means(rec.stats(layer), expected, [T, T, 6, 9, 9, 9])


def test_histograms_of_several_lengths_align(model: HybridLM) -> None:
    """Share by log-spaced distance: as many bins as the longest pass has, summing to one."""
    lengths = (T, 6, 9)
    for reduce in (None, "mean"):
        spec = Stats(rows=[-1, 3], histogram=True, reduce=reduce, recurrent=True)
        with model.record(stats=spec) as rec:
            for length in lengths:
                model(tokens_of(2, length))
        for layer in range(4):
            histogram = rec.stats(layer).histogram
            assert histogram is not None
            assert histogram.shape == (6, 2 if reduce is None else 1, 4, 5)
            assert_close(histogram.sum(-1), torch.ones_like(histogram[..., 0]), "model")
            with model.record(stats=spec) as one:
                model(tokens_of(2, 6))
            alone = one.stats(layer).histogram
            assert alone is not None
            assert_close(histogram[2:4, ..., : alone.shape[-1]], alone, "model")
        assert {f"histogram_{n}" for n in range(5)} < set(rec.table())


def test_table_of_means_has_one_record_a_head(model: HybridLM) -> None:
    tokens, labels = tokens_of(2, T), torch.full((2, T), 2, dtype=torch.uint8)
    with model.record(stats=Stats(labels=labels, reduce="mean", recurrent=True)) as rec:
        model(tokens)
    table = rec.table()
    keys = ["sample", "layer", "site", "head"]
    assert len(table) == 2 * 4 * 4
    assert not table.duplicated(keys).any()
    assert not {"row", "top1"} & set(table)
    assert (table.rows == T).all()
    assert table.set_index("layer").kind.groupby(level=0).first().tolist() == ["window", "recurrent", "full", "full"]
    line = table.set_index(keys).loc[(1, 3, 0, 2)]
    assert line.entropy_norm == float(rec.stats(3).entropy_norm[1, 0, 2])
    with pytest.raises(ValueError, match="none are kept"):
        rec.rows(3)


def test_means_of_a_long_context_hold_a_chunk_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long the context: values of a chunk of rows exist at once, and what is kept does not grow."""
    monkeypatch.setattr("hybridscope.hooks.record.MEAN_ROWS", 32)
    for name in ("attention_stats.CHUNK_ELEMENTS", "implicit_stats.ELEMENTS"):
        monkeypatch.setattr(f"hybridscope.hooks.kernels.{name}", 2**13)
    model, kept, rows, largest = model_of("full", "gla", "swa:16", heads=2, d_model=8), [], [], []
    add = Mean.add
    monkeypatch.setattr(Mean, "add", lambda self, s, real: (rows.append(s.entropy.shape[1]), add(self, s, real))[1])
    for length in (256, 1024):
        with Largest() as seen, model.record(stats=Stats(recurrent=True, reduce="mean")) as rec:
            model(tokens_of(1, length))
        largest.append(seen.elements)
        kept.append(sum(x.numel() for means in rec._means.values() for m in means for x in m.sums.values()))
        assert not rec._stats
        assert sum(rows) == 3 * length
        assert max(rows) == 32
        rows.clear()
    assert kept[0] == kept[1]
    assert largest[1] <= 4 * largest[0]
