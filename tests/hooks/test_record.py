"""record(): residual vectors and attention statistics are those of the unrecorded pass, at the columns asked
for."""

from __future__ import annotations

import gc
from typing import Any

import pandas as pd
import pytest
import torch
from helpers import Largest, assert_close, model_of, pad, tokens_of
from torch import Tensor

from hybridscope import AttentionStats, HybridLM, MeanStats, Stats
from hybridscope.hooks.passes import Cache
from hybridscope.hooks.reduce import Mean

HYBRID = ("swa:4", "gdn", "nope", "full")
SOFTMAX = (0, 2, 3)
T = 15
LEFT, RIGHT, INSIDE = list(range(5, 15)), list(range(10)), [0, 1, 3, 6, 7, 8, 10, 11, 13]


@pytest.fixture(name="model")
def _model() -> HybridLM:
    return model_of(*HYBRID, n_kv_heads=2)


# The residual stream


@pytest.mark.parametrize(
    ("positions", "columns"),
    [
        ([3, 0, 14], [[3, 0, 14], [3, 0, 14]]),
        ([-1, -15, 2, 2], [[14, 0, 2, 2], [14, 0, 2, 2]]),
        (torch.tensor([[1, 5], [9, -2]]), [[1, 5], [9, 13]]),
        ("last", [[14], [14]]),
    ],
)
def test_resid_is_what_the_hooks_see(model: HybridLM, positions: Any, columns: list[list[int]]) -> None:
    tokens = tokens_of(2, T)
    logits, seen = model.run_with_cache(tokens)
    with model.record(resid=positions) as rec:
        assert torch.equal(model(tokens), logits)
    for layer in range(4):
        for where, point in (("pre", "resid_pre"), ("mid", "resid_mid"), ("post", "resid_post")):
            x = seen[f"blocks.{layer}.hook_{point}"]
            expected = torch.stack([x[n, at] for n, at in enumerate(columns)])
            assert torch.equal(rec.resid(layer, where), expected)
        assert torch.equal(rec.resid(layer, "delta"), rec.resid(layer, "mid") - rec.resid(layer, "pre"))
        assert torch.equal(rec.resid(layer), rec.resid(layer, "post"))


def test_the_last_layer_is_taken_before_the_final_norm(model: HybridLM) -> None:
    tokens = tokens_of(2, T)
    with model.record(resid=list(range(T))) as rec:
        logits = model(tokens)
    assert_close(model.unembed(model.ln_final(rec.resid(3))), logits, "model")


def test_last_is_the_last_real_token(model: HybridLM) -> None:
    rows = [tokens_of(1, len(at), seed=n)[0] for n, at in enumerate((LEFT, RIGHT, INSIDE))]
    tokens, mask = pad(rows, [LEFT, RIGHT, INSIDE], T)
    with model.record(resid="last") as rec:
        model(tokens, mask)
    for n, row in enumerate(rows):
        with model.record(resid="last") as alone:
            model(row[None])
        assert_close(rec.resid(3)[n : n + 1], alone.resid(3), "model")


def test_passes_of_one_block_are_concatenated(model: HybridLM) -> None:
    batches = [tokens_of(2, T), tokens_of(3, 9), tokens_of(1, 12)]
    with model.record(resid=[0, -1]) as rec:
        for tokens in batches:
            model(tokens)
    expected = []
    for tokens in batches:
        with model.record(resid=[0, -1]) as one:
            model(tokens)
        expected.append(one.resid(2))
    assert torch.equal(rec.resid(2), torch.cat(expected))


def test_recording_is_detached(model: HybridLM) -> None:
    model.requires_grad_()
    with model.record(resid="last", stats=True) as rec:
        model.loss(tokens_of(2, T)).backward()
    assert not rec.resid(0).requires_grad
    assert not any(value.requires_grad for value in rec.stats(0).fields().values())
    assert model.embed.weight.grad is not None


# Attention statistics


def dense(
    seen: Any, layer: int, *, window: int | None, sinks: int = 0, limit: int | None = None,
    hidden: Tensor | None = None, mask: Tensor | None = None,
) -> dict[str, Tensor]:  # fmt: skip
    """Statistics of every row from the queries and keys at the hook points, by the textbook; [B,T,H]."""
    q, k = (
        seen[f"blocks.{layer}.attn.hook_rot_{n}" if layer != 2 else f"blocks.{layer}.attn.hook_{n}"] for n in ("q", "k")
    )
    k = k.repeat_interleave(q.shape[2] // k.shape[2], 2)
    scores = torch.einsum("bthk,bshk->bths", q, k) / q.shape[-1] ** 0.5
    length = q.shape[1]
    column = torch.arange(length)
    position = column.expand(q.shape[0], -1) if mask is None else mask.cumsum(1) - 1
    distance = position[:, :, None] - position[:, None]
    gone = (column[:, None] < column).expand_as(distance)
    if window is not None:
        gone = gone | ((distance >= window) & (position >= sinks)[:, None])
    if limit is not None:
        gone = gone | (distance >= limit)
    if mask is not None:
        gone = gone | ~mask.bool()[:, None]
    gone = gone[:, :, None].expand_as(scores)
    if hidden is not None:
        gone = gone | hidden
    p = scores.masked_fill(gone, -torch.inf).softmax(-1).nan_to_num(0)
    visible = (~gone).sum(-1)
    entropy = -torch.special.xlogy(p, p).sum(-1)
    return {
        "entropy": entropy,
        "entropy_norm": torch.where(visible > 1, entropy / visible.clamp(min=2).log(), 0),
        "lse": scores.masked_fill(gone, -torch.inf).logsumexp(-1),
        "visible": visible,
        "top1": p.argmax(-1),
        "top1_prob": p.amax(-1),
        "distance": torch.einsum("bths,bts->bth", p, distance.double()),
        "p": p,
    }


def agree(got: AttentionStats, expected: dict[str, Tensor], rows: Any = slice(None)) -> None:
    alive = (expected["visible"] > 0)[:, rows]
    for name in ("entropy", "entropy_norm", "lse", "top1_prob", "distance"):
        assert_close(getattr(got, name)[alive], expected[name][:, rows][alive], "model")
    assert torch.equal(got.visible, expected["visible"][:, rows])
    assert torch.equal(got.top1[alive], expected["top1"][:, rows][alive])


@pytest.mark.parametrize("rows", [True, [14], [3, -1, 0], torch.tensor([7, 7])])
def test_stats_equal_a_dense_computation(model: HybridLM, rows: Any) -> None:
    tokens = tokens_of(2, T)
    _, seen = model.run_with_cache(tokens)
    with model.record(stats=rows) as rec:
        model(tokens)
    chosen = list(range(T)) if rows is True else [int(r) % T for r in rows]
    for layer in SOFTMAX:
        agree(rec.stats(layer), dense(seen, layer, window=model.sites[layer].window), chosen)
        assert rec.rows(layer).tolist() == [chosen]


@pytest.mark.parametrize(
    ("caps", "sinks"),
    [({"full": 5}, 0), ({"full": 3}, 2), ({"window": 2}, 0), ({"window": 2}, 1), ({"full": 99}, 0)],
)
def test_stats_see_the_cap(model: HybridLM, caps: dict[str, int], sinks: int) -> None:
    tokens = tokens_of(2, T)
    with model.cap(sinks=sinks, **caps), model.record(stats=True) as rec:
        _, seen = model.run_with_cache(tokens)
    for layer in SOFTMAX:
        site = model.sites[layer]
        bounds = [w for w in (site.window, caps.get(site.kind)) if w is not None]
        kept = sinks if site.kind in caps else 0
        agree(
            rec.stats(layer),
            dense(seen, layer, window=min(bounds, default=None), sinks=kept, limit=site.window),
        )


@pytest.mark.parametrize("heads", [None, [(3, 1), (0, 2)]])
def test_stats_see_the_knockout(model: HybridLM, heads: Any) -> None:
    """Also rows that lose every key, and under a cap."""
    tokens = tokens_of(2, T)
    rows, keys = torch.tensor([[4, 9, 0], [14, 2, 0]]), [0, 3, 8]
    with (
        model.cap(full=9),
        model.knockout(rows=rows, keys=keys, heads=heads),
        model.record(stats=True) as rec,
    ):
        _, seen = model.run_with_cache(tokens)
    for layer in SOFTMAX:
        hidden = torch.zeros(2, T, 4, T, dtype=torch.bool)
        for n in range(2):
            for head in range(4) if heads is None else [h for site, h in heads if site == layer]:
                hidden[n, rows[n][:, None], head, torch.tensor(keys)] = True
        site = model.sites[layer]
        agree(rec.stats(layer), dense(seen, layer, window=min(site.window or 9, 9), hidden=hidden))


def test_stats_of_chosen_rows_under_a_knockout(model: HybridLM) -> None:
    tokens = tokens_of(2, T)
    with model.knockout(rows=[9, 12], keys=[8, 2]):
        with model.record(stats=True) as whole:
            model(tokens)
        with model.record(stats=torch.tensor([[12, 3], [0, 9]])) as some:
            model(tokens)
    for layer in SOFTMAX:
        for name, value in some.stats(layer).fields().items():
            every = whole.stats(layer).fields()[name]
            expected = torch.stack([every[0, [12, 3]], every[1, [0, 9]]])
            assert_close(value.double(), expected.double(), "model")


def test_top1_and_distance_under_padding(model: HybridLM) -> None:
    """top1 is a column of the caller's matrix; distance counts real tokens."""
    rows = [tokens_of(1, len(at), seed=n)[0] for n, at in enumerate((LEFT, RIGHT, INSIDE))]
    tokens, mask = pad(rows, [LEFT, RIGHT, INSIDE], T)
    with model.record(stats=True) as rec:
        _, seen = model.run_with_cache(tokens, mask)
    for layer in SOFTMAX:
        got, expected = rec.stats(layer), dense(seen, layer, window=model.sites[layer].window, mask=mask)
        for n, at in enumerate((LEFT, RIGHT, INSIDE)):
            assert torch.equal(got.top1[n, at], expected["top1"][n, at])
            assert torch.isin(got.top1[n, at], torch.tensor(at)).all()
            assert torch.equal(got.visible[n, at], expected["visible"][n, at])
            for name in ("entropy", "distance", "top1_prob"):
                assert_close(getattr(got, name)[n, at], expected[name][n, at], "model")


@pytest.mark.parametrize("reduce", [None, "mean"])
@pytest.mark.parametrize("padded", [False, True])
def test_top1_and_distance_only_where_asked_for(model: HybridLM, padded: bool, reduce: str | None) -> None:
    at = INSIDE if padded else list(range(T))
    tokens, mask = pad([tokens_of(1, len(at), seed=n)[0] for n in range(2)], [at, at], T)
    with (
        model.record(stats=Stats(reduce=reduce)) as every,
        model.record(stats=Stats(top1=False, distance=False, reduce=reduce)) as some,
    ):
        model(tokens, mask)
    left_out = ["distance"] if reduce else ["top1", "distance"]
    assert some.table().equals(every.table().drop(columns=left_out))
    with pytest.raises(KeyError):
        some.stats(SOFTMAX[0]).fields()["distance"]


@pytest.mark.parametrize("padded", [False, True])
def test_mass_on_labelled_keys(model: HybridLM, padded: bool) -> None:
    """Labels by column: bool, uint8 bits, or bool sets."""
    at = INSIDE if padded else list(range(T))
    tokens, mask = pad([tokens_of(1, len(at), seed=n)[0] for n in range(2)], [at, at], T)
    bits = torch.randint(0, 4, (2, T), dtype=torch.uint8)
    bits[0, 0] = 3
    sets = torch.stack([bits & 1 == 1, bits & 2 == 2], -1)
    masses = []
    for labels in (bits, sets, sets[..., 0].contiguous()):
        with model.record(stats=Stats(labels=labels)) as rec:
            _, seen = model.run_with_cache(tokens, mask)
        masses.append([rec.stats(layer).mass for layer in SOFTMAX])
    for n, layer in enumerate(SOFTMAX):
        p = dense(seen, layer, window=model.sites[layer].window, mask=mask)["p"]
        expected = torch.einsum("bths,bsn->bthn", p, sets.double())
        assert_close(masses[0][n][:, at], expected[:, at], "model")
        assert torch.equal(masses[1][n], masses[0][n])
        assert_close(masses[2][n][:, at], expected[:, at, :, :1], "model")


def test_labels_of_one_row_serve_the_batch(model: HybridLM) -> None:
    tokens, labels = tokens_of(2, T), torch.arange(T)[None] < 3
    masses = []
    for given in (labels, labels.expand(2, -1)):
        with model.record(stats=Stats(rows=[9], labels=given)) as rec:
            model(tokens)
        masses.append(rec.stats(3).mass)
    assert torch.equal(*masses)


# Cached calls and generation


def test_cached_calls_continue_along_the_rows(model: HybridLM) -> None:
    """Piece by piece, rows and columns count on: the same table as in one pass."""
    tokens = tokens_of(2, T)
    labels = torch.zeros(2, T, dtype=torch.uint8)
    labels[:, 1], labels[:, 9] = 2, 1  # the only key of set 1 leaves the window site's cache
    for rows in (None, [2, 6], torch.tensor([[6], [2]])):
        spec = Stats(rows=rows, labels=labels)
        with model.record(stats=spec) as whole:
            model(tokens)
        cache = Cache()
        with model.record(stats=spec) as pieces:
            for a, b in ((0, 7), (7, 8), (8, 9), (9, T)):
                model(tokens[:, a:b], cache=cache)
        for layer in SOFTMAX:
            assert torch.equal(pieces.rows(layer), whole.rows(layer))
            for name, value in pieces.stats(layer).fields().items():
                assert_close(value.double(), whole.stats(layer).fields()[name].double(), "model")


def test_labels_of_the_prompt_serve_what_is_generated(model: HybridLM) -> None:
    """Keys that came after the labels are in no set."""
    tokens = tokens_of(2, 9)
    labels = torch.ones(2, 9, dtype=torch.bool)
    with model.record(stats=Stats(rows=[-1], labels=labels)) as rec:
        out = model.generate(tokens, max_new_tokens=5)
    wide = torch.nn.functional.pad(labels, (0, 4))
    with model.record(stats=Stats(rows=list(range(8, 13)), labels=wide)) as whole:
        model(out[:, :-1])
    for layer in SOFTMAX:
        assert_close(rec.stats(layer).mass, whole.stats(layer).mass, "model")
    assert (rec.stats(0).mass[:, -1] == 0).all()  # the prompt left the window of 4


def test_cached_calls_continue_along_the_positions(model: HybridLM) -> None:
    tokens, cache = tokens_of(2, T), Cache()
    with model.record(resid=list(range(T))) as whole:
        model(tokens)
    with model.record(resid=[5, 1]) as some, model.record(resid="last") as last:
        for a, b in ((0, 7), (7, 8), (8, T)):
            model(tokens[:, a:b], cache=cache)
    for layer in range(4):
        assert_close(some.resid(layer), whole.resid(layer)[:, [5, 1]], "model")
        assert_close(last.resid(layer), whole.resid(layer)[:, [6, 7, 14]], "model")


def test_generation_inside_a_recording(model: HybridLM) -> None:
    """Each decoding step adds its row; the same values as a whole pass over what was generated."""
    tokens = tokens_of(2, 9)
    free = model.generate(tokens, max_new_tokens=5)
    with model.record(resid="last", stats=[-1]) as rec:
        out = model.generate(tokens, max_new_tokens=5)
    assert torch.equal(out, free)
    with model.record(resid=list(range(8, 13)), stats=list(range(8, 13))) as whole:
        model(out[:, :-1])
    for layer in SOFTMAX:
        assert rec.rows(layer).tolist() == [[8, 9, 10, 11, 12]]
        assert_close(rec.resid(layer), whole.resid(layer), "model")
        assert_close(rec.stats(layer).entropy, whole.stats(layer).entropy, "model")
        assert torch.equal(rec.stats(layer).top1, whole.stats(layer).top1)


def test_generations_one_after_another_are_batches(model: HybridLM) -> None:
    with model.record(resid="last", stats=[-1]) as rec:
        model.generate(tokens_of(2, 9), max_new_tokens=3)
        model.generate(tokens_of(1, 7), max_new_tokens=3)
    assert rec.resid(0).shape == (3, 3, 16)
    assert rec.stats(0).entropy.shape == (3, 3, 4)


# Means over rows


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


# Read-out


def test_passes_of_several_lengths(model: HybridLM) -> None:
    with model.record(stats=[-1]) as rec:
        model(tokens_of(2, T))
        model(tokens_of(1, 6))
    assert rec.stats(3).entropy.shape == (3, 1, 4)
    assert rec.rows(3).tolist() == [[14], [14], [5]]
    with model.record(stats=True) as rec:
        model(tokens_of(2, T))
        model(tokens_of(1, 6))
    with pytest.raises(ValueError, match="different numbers of rows"):
        rec.stats(3)


def test_table_is_tidy(model: HybridLM) -> None:
    tokens, labels = tokens_of(2, T), torch.full((2, T), 2, dtype=torch.uint8)
    with model.record(stats=Stats(rows=[4, 11], labels=labels)) as rec:
        model(tokens)
    table = rec.table()
    assert len(table) == 2 * 2 * 4 * 3  # samples, rows, heads, softmax layers
    keys = ["sample", "layer", "site", "head", "row"]
    assert not table.duplicated(keys).any()
    assert set(table.layer) == set(SOFTMAX)
    assert {
        "entropy",
        "entropy_norm",
        "lse",
        "visible",
        "mass_0",
        "mass_1",
        "top1",
        "top1_prob",
        "distance",
    } < set(table)
    line = table.set_index(keys).loc[(1, 3, 0, 2, 11)]
    assert isinstance(line, pd.Series)
    assert line.entropy == float(rec.stats(3).entropy[1, 1, 2])
    assert line.mass_1 == float(rec.stats(3).mass[1, 1, 2, 1])
    assert line.top1 == int(rec.stats(3).top1[1, 1, 2])


def test_recordings_nest(model: HybridLM) -> None:
    """The inner one sees its own passes only, the outer one all of them; each at its own rows."""
    one, two = tokens_of(2, T), tokens_of(2, T, seed=3)
    with model.record(resid=[0], stats=[14]) as outer:
        model(one)
        with model.record(resid="last", stats=[3, 4]) as inner:
            model(two)
        model(one)
    with model.record(resid="last", stats=[3, 4]) as alone:
        model(two)
    assert torch.equal(inner.resid(2), alone.resid(2))
    assert torch.equal(inner.stats(3).entropy, alone.stats(3).entropy)
    assert outer.resid(2).shape == (6, 1, 16)
    assert outer.stats(3).entropy.shape == (6, 1, 4)
    assert torch.equal(outer.stats(3).lse[:2], outer.stats(3).lse[4:])


def test_nothing_is_recorded_outside(model: HybridLM) -> None:
    with model.record(resid="last", stats=True) as rec:
        model(tokens_of(2, T))
    model(tokens_of(2, T))
    assert rec.resid(0).shape[0] == 2
    assert rec.stats(0).entropy.shape[0] == 2


def test_recording_changes_no_output(model: HybridLM) -> None:
    """Bitwise, and recorded values do not depend on what else is recorded."""
    rows = [tokens_of(1, len(at), seed=n)[0] for n, at in enumerate((LEFT, INSIDE))]
    tokens, mask = pad(rows, [LEFT, INSIDE], T)
    free = model(tokens, mask)
    with model.record(resid=[1], stats=True) as rec:
        assert torch.equal(model(tokens, mask), free)
    with model.record(stats=[8]) as few:
        model(tokens, mask)
    assert_close(few.stats(3).entropy, rec.stats(3).entropy[:, 8:9], "model")


@pytest.mark.parametrize("rows", [[-1, 5], True])
def test_no_tensor_grows_with_the_square_of_length(rows: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hybridscope.hooks.kernels.attention_stats.CHUNK_ELEMENTS", 2**13)
    model, largest = model_of("full", "swa:16", heads=2, d_model=8), []
    for length in (256, 1024):
        tokens = tokens_of(1, length)
        with Largest() as seen, model.record(resid="last", stats=rows):
            model(tokens)
        largest.append(seen.elements)
    assert largest[1] <= 4 * largest[0]
    assert largest[1] < 1024 * 1024


def test_memory_is_flat_over_200_recordings(model: HybridLM) -> None:
    """No live tensor stays behind, with the garbage collector off as in a tight loop."""
    tokens, counts = tokens_of(1, 8), []

    def live() -> int:
        return sum(1 for x in gc.get_objects() if type(x) is Tensor)

    gc.collect()
    gc.disable()
    try:
        for n in range(201):
            with model.record(resid="last", stats=[-1]) as rec:
                model(tokens)
            assert rec.resid(3).shape == (1, 1, 16)
            if n in (5, 200):
                counts.append(live())
    finally:
        gc.enable()
    assert counts[1] <= counts[0]


# Mistakes


def test_mistakes_are_named(model: HybridLM) -> None:
    tokens = tokens_of(2, T)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"resid": [15]}, "do not fit 15 tokens"),
        ({"resid": [-16]}, "do not fit 15 tokens"),
        ({"resid": torch.zeros(3, 1, dtype=torch.int64)}, "each of 2 samples"),
        ({"resid": "first"}, 'expected "last"'),
        ({"stats": [15]}, "do not fit 15 tokens"),
        ({"stats": torch.zeros(3, 1, dtype=torch.int64)}, "each of 2 samples"),
        ({"stats": Stats(labels=torch.zeros(2, 9, dtype=torch.bool))}, "labels: shape"),
        ({"stats": Stats(labels=torch.zeros(3, T, dtype=torch.bool))}, "labels: shape"),
        ({"stats": Stats(labels=torch.zeros(2, T))}, "labels: dtype"),
    ]
    with pytest.raises(ValueError, match=r"reduce='sum': expected \"mean\""):
        Stats(reduce="sum")
    for options, message in cases:
        with pytest.raises(ValueError, match=message), model.record(**options):
            model(tokens)
        assert not any(site.active for site in model.sites)
        assert model.recorders == ()


def test_asking_for_what_was_not_recorded(model: HybridLM) -> None:
    with model.record(stats=[-1]) as rec:
        with pytest.raises(ValueError, match="nothing recorded"):
            rec.stats(0)
        model(tokens_of(1, T))
    for ask, message in (
        (lambda: rec.resid(0), "ask for it with record"),
        (lambda: rec.stats(1), "no softmax statistics"),
        (lambda: rec.stats(9), "layer 9 site 0 does not exist"),
        (lambda: rec.stats(0, 1), "layer 0 site 1 does not exist"),
    ):
        with pytest.raises(ValueError, match=message):
            ask()
    with model.record(resid="last") as rec:
        with pytest.raises(ValueError, match="no forward pass"):
            rec.resid(0)
        model(tokens_of(1, T))
    for ask, message in (
        (lambda: rec.stats(0), "nothing recorded"),
        (lambda: rec.table(), "no attention statistics"),
        (lambda: rec.resid(4), "layer 4 does not exist"),
    ):
        with pytest.raises(ValueError, match=message):
            ask()
