"""record(): residual vectors are those of the unrecorded pass, at the columns asked for; reading a recording out."""

from __future__ import annotations

import gc
from typing import Any

import pandas as pd
import pytest
import torch
from helpers import Largest, assert_close, model_of, pad, tokens_of
from hybrid import HYBRID, INSIDE, LEFT, RIGHT, SOFTMAX
from torch import Tensor

from hybridscope import HybridLM, Stats

T = 15


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
