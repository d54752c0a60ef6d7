"""record(stats=...): attention statistics equal a dense computation, under every switch; contexts in pieces."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import assert_close, model_of, pad, tokens_of
from hybrid import HYBRID, INSIDE, LEFT, RIGHT, SOFTMAX
from torch import Tensor

from hybridscope import AttentionStats, HybridLM, Stats
from hybridscope.hooks.passes import Cache

T = 15


@pytest.fixture(name="model")
def _model() -> HybridLM:
    return model_of(*HYBRID, n_kv_heads=2)


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
