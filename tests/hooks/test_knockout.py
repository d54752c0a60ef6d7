"""knockout(): hidden edges are a dense masked softmax's; under caps, padding and decoding; nested, restored."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from helpers import Largest, assert_close, model_of, pad, tokens_of
from hybrid import HYBRID, one
from torch import Tensor

from hybridscope.hooks import attend
from hybridscope.hooks.kernels import attention
from hybridscope.hooks.passes import Cache

T = 26


def dense_z(seen: Any, layer: int, hidden: Tensor, *, window: int | None = None, sinks: int = 0) -> Tensor:
    """Masked softmax from hook_rot_q, hook_rot_k, hook_v of one unpadded pass; `hidden` [B,H,T,T]."""
    names = ("rot_q", "rot_k", "v") if f"blocks.{layer}.attn.hook_rot_q" in seen else ("q", "k", "v")
    q, k, v = (seen[f"blocks.{layer}.attn.hook_{name}"] for name in names)
    k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], 2) for x in (k, v))
    scores = torch.einsum("bthk,bshk->bhts", q, k) / q.shape[-1] ** 0.5
    distance = torch.arange(q.shape[1])[:, None] - torch.arange(q.shape[1])
    mask = (distance < 0) | hidden
    if window is not None:
        mask = mask | ((distance >= window) & (torch.arange(q.shape[1]) >= sinks))
    weights = scores.masked_fill(mask, -torch.inf).softmax(-1).nan_to_num(0)
    return torch.einsum("bhts,bshv->bthv", weights, v)


def cut(batch: int, rows: Any, keys: Any, heads: Any = range(4)) -> Tensor:
    """Hidden edges [B,4,T,T]."""
    hidden = torch.zeros(batch, 4, T, T, dtype=torch.bool)
    for h, r, key in itertools.product(heads, rows, keys):
        hidden[:, h, r, key] = True
    return hidden


@pytest.mark.parametrize("mixer", ["full", "nope", "swa:6"])
@pytest.mark.parametrize("heads", [None, [(0, 1)], [(0, 0), (0, 0, 3)]])
def test_knockout_is_a_dense_masked_softmax(mixer: str, heads: list[tuple[int, ...]] | None) -> None:
    """Grouped heads, a subset of heads, rows in any order; the other rows are bitwise the same."""
    model, tokens = one(mixer), tokens_of(2, T)
    rows, keys = [20, 7, 25], [5, 4, 19, 3]
    before = model(tokens)
    with model.knockout(rows=rows, keys=keys, heads=heads):
        _, seen = model.run_with_cache(tokens)
        after = model(tokens)
    numbers = range(4) if heads is None else [h[-1] for h in heads]
    window = model.sites[0].window
    expected = dense_z(seen, 0, cut(2, rows, keys, numbers), window=window)
    assert_close(seen["blocks.0.attn.hook_z"], expected, "model")
    others = [t for t in range(T) if t not in rows]
    assert torch.equal(after[:, others], before[:, others])
    for row in rows:
        assert not torch.equal(after[:, row], before[:, row])


def test_knockout_of_one_layer_or_all() -> None:
    model, tokens = model_of(*HYBRID, n_kv_heads=2), tokens_of(2, T)
    for layers, cut_layers in ((None, [0, 2, 3]), ([2], [2]), ([0, 3], [0, 3])):
        with model.knockout(rows=[22], keys=[21, 20], layers=layers):
            _, seen = model.run_with_cache(tokens)
        for layer in (0, 2, 3):
            hidden = cut(2, [22] if layer in cut_layers else [], [21, 20])
            z = dense_z(seen, layer, hidden, window=model.sites[layer].window)
            assert_close(seen[f"blocks.{layer}.attn.hook_z"], z, "model")


def test_knockout_per_sample() -> None:
    """Rows [B,R] and a bool mask [B,T] of keys: each sample its own."""
    model, tokens = one("full"), tokens_of(2, T)
    rows, keys = torch.tensor([[9, 12], [25, 25]]), torch.rand(2, T) < 0.5
    with model.knockout(rows=rows, keys=keys):
        _, seen = model.run_with_cache(tokens)
    hidden = torch.cat([cut(1, rows[n].tolist(), keys[n].nonzero()[:, 0].tolist()) for n in range(2)])
    assert_close(seen["blocks.0.attn.hook_z"], dense_z(seen, 0, hidden), "model")


def test_keys_as_a_list_or_a_mask() -> None:
    model, tokens = one("full"), tokens_of(2, T)
    mask = torch.zeros(T, dtype=torch.bool)
    mask[[2, 5]] = True
    outs = []
    for keys in ([2, 5], torch.tensor([5, 2]), mask, mask[None], mask[:6], mask.expand(2, -1)):
        with model.knockout(rows=[13], keys=keys):
            outs.append(model(tokens))
    assert all(torch.equal(out, outs[0]) for out in outs)
    for nothing in ({"keys": []}, {"rows": []}, {"heads": []}, {"layers": []}):
        with model.knockout(**{"rows": [13], "keys": [3], **nothing}):
            assert_close(model(tokens), model_of("full", n_kv_heads=2)(tokens), "model")


def test_knockouts_nest() -> None:
    model, tokens = one("full"), tokens_of(2, T)
    with model.knockout(rows=[20], keys=[3]), model.knockout(rows=[20, 22], keys=[5], heads=[(0, 1)]):
        _, seen = model.run_with_cache(tokens)
    hidden = cut(2, [20], [3]) | cut(2, [20, 22], [5], [1])
    assert_close(seen["blocks.0.attn.hook_z"], dense_z(seen, 0, hidden), "model")


def test_a_row_that_loses_every_key_reads_zeros() -> None:
    model, tokens = one("full"), tokens_of(2, T)
    with model.knockout(rows=[0, 4], keys=list(range(T))):
        _, seen = model.run_with_cache(tokens)
        z = seen["blocks.0.attn.hook_z"]
        assert (z[:, [0, 4]] == 0).all()
        assert (z[:, 5] != 0).any()
        model.requires_grad_()
        model.loss(tokens).backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize("sinks", [0, 2])
def test_knockout_under_a_cap(sinks: int) -> None:
    model, tokens = one("full"), tokens_of(2, T)
    rows, keys = [15, 20], [1, 13, 14, 19]
    with model.cap(full=7, sinks=sinks), model.knockout(rows=rows, keys=keys):
        _, seen = model.run_with_cache(tokens)
    expected = dense_z(seen, 0, cut(2, rows, keys), window=7, sinks=sinks)
    assert_close(seen["blocks.0.attn.hook_z"], expected, "model")


@pytest.mark.parametrize("mixer", ["full", "swa:6"])
def test_knockout_names_columns_under_padding_and_decoding(mixer: str) -> None:
    model, row = one(mixer), tokens_of(1, T)
    with model.knockout(rows=[14, 20], keys=[9, 13, 17]):
        expected = model(row)
        cache = Cache()
        parts = [model(row[:, a:b], cache=cache) for a, b in ((0, 12), (12, 13), (13, 15), (15, T))]
        assert_close(torch.cat(parts, 1), expected, "model")
    at = [c for c in range(T + 6) if c not in (0, 1, 4, 11, 20, 30)]
    tokens, mask = pad([row[0]], [at], T + 6)
    column = dict(enumerate(at))
    with model.knockout(rows=[column[14], column[20]], keys=[column[9], column[13], column[17]]):
        assert_close(model(tokens, mask)[:, at], expected, "model")


def test_knockout_of_every_row_makes_no_square(monkeypatch: pytest.MonkeyPatch) -> None:
    """All rows lose one key, recorded too: tensors stay linear in length."""
    monkeypatch.setattr(attend, "ROWS", 16)
    monkeypatch.setattr(attention, "ROWS", 16)
    monkeypatch.setattr("hybridscope.hooks.record.ROWS", 16)
    monkeypatch.setattr("hybridscope.hooks.kernels.attention_stats.CHUNK_ELEMENTS", 2**12)
    model, largest = model_of("full", heads=2, d_model=8), []
    for length in (128, 512):
        tokens = tokens_of(1, length)
        with Largest() as seen, model.knockout(rows=list(range(length)), keys=[3]), model.record(stats=True):
            model(tokens)
        largest.append(seen.elements)
    assert largest[1] <= 4 * largest[0]
    assert largest[1] < 512 * 512


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rows": [-1], "keys": [0]}, "rows: expected"),
        ({"rows": [1], "keys": [-1]}, "keys: expected"),
        ({"rows": [1], "keys": [0.5]}, "keys: expected"),
        ({"rows": [1], "keys": torch.zeros(2, 3, dtype=torch.int64)}, "keys: expected"),
        ({"rows": [1], "keys": [0], "layers": [1]}, "no softmax to cut"),
        ({"rows": [1], "keys": [0], "heads": [(1, 0)]}, "no softmax to cut"),
        ({"rows": [1], "keys": [0], "layers": [0], "heads": [(0, 0)]}, "not both"),
        ({"rows": [1], "keys": [0], "layers": [7]}, "layer 7 does not exist"),
    ],
)
def test_knockout_mistakes_are_named(options: dict[str, Any], message: str) -> None:
    model = model_of(*HYBRID)
    with pytest.raises(ValueError, match=message), model.knockout(**options):
        pass
    assert not any(site.active for site in model.sites)


@pytest.mark.parametrize("score", [{}, {"softcap": 1.5}, {"sink_logits": [0.5, -1.0, 3.0, 0.0]}], ids=str)
@pytest.mark.parametrize("sinks", [0, 2])
def test_knockout_under_foreign_scores(score: dict[str, Any], sinks: int) -> None:
    """Soft caps and learnable sinks, as transformers models bring them, against the reference without those keys."""
    if "sink_logits" in score:
        score = {"sink_logits": torch.tensor(score["sink_logits"], dtype=torch.float64)}
    model = one("full")
    q, k, v = (torch.randn(2, 12, n, 4).double() for n in (4, 2, 2))
    column = torch.arange(12)
    cut_keys = torch.where(torch.isin(column, torch.tensor([1, 7, 9])), -1, column)[None]
    with model.cap(full=6, sinks=sinks), model.knockout(rows=[10, 4], keys=[1, 7, 9]):
        z = attend.attend(model.sites[0], q, k, v, scale=0.8, **score)
    for row in range(12):
        k_pos = cut_keys if row in (4, 10) else column[None]
        expected = attention.attention_reference(
            q=q[:, row : row + 1], k=k, v=v, scale=0.8, window=6, sinks=sinks, q_pos=column[None, row : row + 1],
            k_pos=k_pos, **score,
        )  # fmt: skip
        assert_close(z[:, row : row + 1], expected)


def test_knockout_of_another_batch_is_refused() -> None:
    model = one("full")
    with (
        pytest.raises(ValueError, match="rows for 3 samples and keys for 1; this call has 2"),
        model.knockout(rows=torch.zeros(3, 1, dtype=torch.int64), keys=[0]),
    ):
        model(tokens_of(2, T))
