"""HybridLM: whole pass = split = token by token, padding changes nothing, generation and loss."""

from __future__ import annotations

import subprocess
import sys
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from helpers import VOCAB, Largest, assert_close, model_of, pad, tokens_of
from one_of_each import COLUMNS, MIXERS, T, build
from torch import Tensor

from hybridscope import HybridLM
from hybridscope.hooks import instrumented
from hybridscope.hooks.passes import Cache, KVCache


def capped(model: HybridLM, cap: int | None) -> AbstractContextManager[None]:
    return nullcontext() if cap is None else model.cap(**{s.kind: cap for s in model.sites})


def run_in_parts(model: HybridLM, tokens: Tensor, cuts: list[int], mask: Tensor | None = None) -> Tensor:
    """Logits of one context given in pieces, with a cache."""
    cache, parts = Cache(), []
    for a, b in zip([0, *cuts], [*cuts, tokens.shape[1]], strict=True):
        parts.append(model(tokens[:, a:b], None if mask is None else mask[:, a:b], cache))
    return torch.cat(parts, 1)


# Whole pass = split = token by token


@pytest.mark.parametrize("cap", [None, 4, 6, T])
@pytest.mark.parametrize("mixer", [*MIXERS, "hybrid"])
def test_split_anywhere_is_the_whole(mixer: str, cap: int | None) -> None:
    model, tokens = build(mixer), tokens_of(2, T)
    with capped(model, cap):
        whole = model(tokens)
        for cut in range(1, T):
            assert_close(run_in_parts(model, tokens, [cut]), whole, "model")
        assert_close(run_in_parts(model, tokens, list(range(1, T))), whole, "model")
        assert_close(run_in_parts(model, tokens, [2, 3, 7, 11]), whole, "model")


@pytest.mark.parametrize("cap", [None, 4, 6])
@pytest.mark.parametrize("mixer", [*MIXERS, "hybrid"])
def test_split_anywhere_is_the_whole_under_padding(mixer: str, cap: int | None) -> None:
    """Pieces may hold padding alone; the cache then stays as it was."""
    model = build(mixer)
    rows = [tokens_of(1, len(at), seed=n)[0] for n, at in enumerate(COLUMNS.values())]
    tokens, mask = pad(rows, list(COLUMNS.values()), T)
    with capped(model, cap):
        whole = model(tokens, mask)[mask.bool()]
        for cuts in ([3], [4], [9], [2, 5, 10], list(range(1, T))):
            assert_close(run_in_parts(model, tokens, cuts, mask)[mask.bool()], whole, "model")


@pytest.mark.parametrize("mixer", ["full", "nope", "swa:5"])
def test_split_is_the_whole_under_a_cap_with_sinks(mixer: str) -> None:
    model, tokens = build(mixer), tokens_of(2, T)
    with model.cap({0: 3}, sinks=2):
        whole = model(tokens)
        assert_close(run_in_parts(model, tokens, list(range(1, T))), whole, "model")


# Padding


@pytest.mark.parametrize("cap", [None, 5])
@pytest.mark.parametrize("mixer", [*MIXERS, "hybrid"])
def test_padding_changes_nothing(mixer: str, cap: int | None) -> None:
    """A batch of mixed lengths, padded left, right and inside, equals each row alone; what padding holds is
    ignored."""
    model = build(mixer)
    rows = [tokens_of(1, len(at), seed=n)[0] for n, at in enumerate(COLUMNS.values())]
    tokens, mask = pad(rows, list(COLUMNS.values()), T)
    with capped(model, cap):
        out = model(tokens, mask)
        for n, at in enumerate(COLUMNS.values()):
            assert_close(out[n, at], model(rows[n][None])[0], "model")
        other = torch.where(mask.bool(), tokens, (tokens + 7) % VOCAB)
        assert torch.equal(model(other, mask)[mask.bool()], out[mask.bool()])


@pytest.mark.parametrize("mixer", [*MIXERS, "hybrid"])
def test_a_row_of_padding_alone_harms_nobody(mixer: str) -> None:
    model, tokens = build(mixer), tokens_of(2, 6)
    mask = torch.tensor([[1] * 6, [0] * 6])
    out = model(tokens, mask)
    assert torch.isfinite(out).all()
    assert_close(out[0], model(tokens[:1])[0], "model")


def test_a_mask_of_ones_is_no_mask() -> None:
    model, tokens = build("hybrid"), tokens_of(2, T)
    assert torch.equal(model(tokens, torch.ones(2, T, dtype=torch.int64)), model(tokens))


@pytest.mark.parametrize("mixer", [*MIXERS, "hybrid"])
def test_samples_do_not_mix(mixer: str) -> None:
    model, tokens = build(mixer), tokens_of(3, T)
    assert_close(model(tokens)[1:2], model(tokens[1:2]), "model")


@pytest.mark.parametrize("mixer", [*MIXERS, "hybrid"])
def test_the_future_cannot_leak(mixer: str) -> None:
    model, tokens = build(mixer), tokens_of(1, T)
    before = model(tokens)
    other = tokens.clone()
    other[0, 7:] = (other[0, 7:] + 3) % VOCAB
    assert torch.equal(model(other)[:, :7], before[:, :7])
    assert not torch.equal(model(other)[:, 7], before[:, 7])


# Caches


def test_caches_keep_what_they_need() -> None:
    """A window site keeps W - 1 keys, a capped recurrence its cap; entries are per site."""
    model, cache = build("hybrid"), Cache()
    with model.cap(recurrent=6):
        run_length = 20
        tokens = tokens_of(2, run_length)
        for t in range(run_length):
            model(tokens[:, t : t + 1], cache=cache)
    kept = {name: entry.k.shape[1] for name, entry in cache.sites.items() if isinstance(entry, KVCache)}
    assert kept == {"blocks.0.attn": 2, "blocks.2.attn": 20, "blocks.3.attn": 20}
    ring = cache.sites["blocks.1.attn"].ring
    assert ring is not None
    assert ring.keys.shape[2] == 6


def test_a_window_cache_does_not_grow() -> None:
    model, cache = model_of("swa:4"), Cache()
    model(tokens_of(1, 50), cache=cache)
    with Largest() as seen:
        for t in range(30):
            model(tokens_of(1, 1, seed=t), cache=cache)
    entry = cache.sites["blocks.0.attn"]
    assert isinstance(entry, KVCache)
    assert entry.k.shape[1] == 3
    assert seen.elements <= 16 * 96  # no cached tensor outgrew the largest weight


# Generation


def greedy(model: HybridLM, row: Tensor, n: int) -> Tensor:
    """Argmax of whole passes over one unpadded row, without a cache."""
    row = row[None]
    for _ in range(n):
        row = torch.cat([row, model(row)[:, -1].argmax(-1, keepdim=True)], 1)
    return row[0, -n:]


@pytest.mark.parametrize("cap", [None, 5])
@pytest.mark.parametrize("mixer", [*MIXERS, "hybrid"])
def test_generation_is_argmax_of_whole_passes(mixer: str, cap: int | None) -> None:
    """Padded anywhere, in one batch of mixed lengths."""
    model = build(mixer)
    rows = [tokens_of(1, len(at), seed=n)[0] for n, at in enumerate(COLUMNS.values())]
    tokens, mask = pad(rows, list(COLUMNS.values()), T)
    with capped(model, cap):
        out = model.generate(tokens, max_new_tokens=7, attention_mask=mask)
        assert torch.equal(out[:, :T], tokens)
        for n, row in enumerate(rows):
            assert torch.equal(out[n, T:], greedy(model, row, 7))


def test_generation_stops_and_samples() -> None:
    model, tokens = build("hybrid"), tokens_of(2, 5)
    assert torch.equal(model.generate(tokens, max_new_tokens=0), tokens)
    free = model.generate(tokens, max_new_tokens=8)
    stop = int(free[0, 6])
    stopped = model.generate(tokens, max_new_tokens=8, eos_token_id=stop)
    at = [(row[5:] == stop).nonzero() for row in free]
    for n in range(2):
        first = int(at[n][0]) + 6 if len(at[n]) else stopped.shape[1]
        assert torch.equal(stopped[n, :first], free[n, :first])
        assert (stopped[n, first:] == stop).all()
    draws = [model.generate(tokens, 8, temperature=2.0, generator=torch.Generator().manual_seed(s)) for s in (3, 3, 4)]
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])
    with pytest.raises(ValueError, match="max_new_tokens=-1"):
        model.generate(tokens, max_new_tokens=-1)


# Loss


def test_loss_is_next_token_cross_entropy() -> None:
    model, tokens = build("hybrid"), tokens_of(3, T)
    logp = model(tokens).log_softmax(-1)[:, :-1].gather(2, tokens[:, 1:, None])[..., 0]
    assert_close(model.loss(tokens, per_token=True), -logp, "model")
    assert_close(model.loss(tokens), -logp.mean(), "model")


@pytest.mark.parametrize("elements", [1, 200, 2**26])
def test_loss_in_pieces(elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without gradients logits are made a stretch at a time: same losses, small tensors."""
    model, tokens = build("hybrid"), tokens_of(3, T)
    whole = model.loss(tokens, per_token=True)
    monkeypatch.setattr(instrumented, "LOSS_ELEMENTS", elements)
    sizes: list[int] = []
    handle = model.unembed.register_forward_hook(lambda module, args, out: sizes.append(out.numel()))
    with torch.no_grad():
        assert_close(model.loss(tokens, per_token=True), whole, "model")
    handle.remove()
    assert sum(sizes) == 3 * (T - 1) * VOCAB
    assert max(sizes) <= max(elements, 3 * VOCAB)


def test_loss_ignores_padding() -> None:
    """Each real token but a row's first is predicted from the real token before it, wherever padding
    stands."""
    model = build("hybrid")
    names = ["left", "right", "interior", "everywhere"]
    rows = [tokens_of(1, len(COLUMNS[n]), seed=i)[0] for i, n in enumerate(names)]
    tokens, mask = pad(rows, [COLUMNS[n] for n in names], T)
    per_token = model.loss(tokens, per_token=True, attention_mask=mask)
    alone = [model.loss(row[None], per_token=True)[0] for row in rows]
    for n, name in enumerate(names):
        targets = [c - 1 for c in COLUMNS[name][1:]]
        assert_close(per_token[n, targets], alone[n], "model")
        rest = [c for c in range(T - 1) if c not in targets]
        assert (per_token[n, rest] == 0).all()
    assert_close(model.loss(tokens, attention_mask=mask), torch.cat(alone).mean(), "model")


# Mistakes


def test_bad_tokens_are_named() -> None:
    model = build("full")
    for tokens, message in (
        (torch.tensor([[0, VOCAB]]), f"outside the vocabulary 0..{VOCAB - 1}"),
        (torch.tensor([[-1, 0]]), "ids -1..0"),
        (torch.zeros(1, 3), r"expected integer ids \[B,T\]"),
        (torch.zeros(3, dtype=torch.int64), r"expected integer ids \[B,T\]"),
    ):
        with pytest.raises(ValueError, match=message):
            model(tokens)
    with pytest.raises(ValueError, match="attention_mask: shape"):
        model(tokens_of(2, 4), torch.ones(2, 5))
    with pytest.raises(ValueError, match="T >= 2"):
        model.loss(tokens_of(1, 1))


def test_context_is_a_limit() -> None:
    model = model_of("full", context=6)
    model(tokens_of(1, 6))
    cache = Cache()
    model(tokens_of(1, 4), cache=cache)
    for call in (lambda: model(tokens_of(1, 7)), lambda: model(tokens_of(1, 3), cache=cache)):
        with pytest.raises(ValueError, match="7 are longer than the model's context of 6"):
            call()
    assert model.generate(tokens_of(1, 4), max_new_tokens=3).shape == (1, 7)  # the last one is not read back
    with pytest.raises(ValueError, match="context"):
        model.generate(tokens_of(1, 4), max_new_tokens=4)


def test_inputs_are_left_alone() -> None:
    model = build("hybrid")
    tokens, mask = pad([tokens_of(1, 9)[0]], [COLUMNS["left"]], T)
    kept = tokens.clone(), mask.clone()
    model(tokens, mask)
    model.generate(tokens, 3, attention_mask=mask)
    model.loss(tokens, attention_mask=mask)
    assert torch.equal(tokens, kept[0])
    assert torch.equal(mask, kept[1])


def test_repeated_runs_are_equal() -> None:
    model, tokens = build("hybrid"), tokens_of(2, T)
    assert torch.equal(model(tokens), model(tokens))
    assert torch.equal(build("hybrid")(tokens), model(tokens))


COMPILED = """
import torch, hybridscope as hs
for mixer in ("full", "swa:5"):
    torch.compiler.reset()
    model = hs.HybridLM(hs.HybridConfig((mixer,), 2, 16, 2, 19)).double()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for length in (12, 7, 20, 1):
        tokens = torch.randint(19, (2, length))
        torch.testing.assert_close(compiled(tokens), model(tokens))
"""


def test_a_compiled_model_is_one_graph_at_any_length() -> None:
    """In a process of its own: the checks of annotations that tests run under cannot be compiled."""
    ran = subprocess.run([sys.executable, "-c", COMPILED], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
