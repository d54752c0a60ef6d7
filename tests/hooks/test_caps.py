"""cap(): exact, tight, nested, restored; at any split, under any padding."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

import pytest
import torch
from helpers import VOCAB, assert_close, model_of, pad, tokens_of
from hybrid import HYBRID, MIXERS, one
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hybridscope import HybridLM
from hybridscope.hooks.passes import Cache

T = 26


def kind(model: HybridLM) -> str:
    return model.sites[0].kind


def embedded(model: HybridLM, x: Tensor) -> Tensor:
    """Output of the whole stack, the final norm included, from vectors [B,T,D] in the place of embeddings."""
    return model.run_with_hooks(
        torch.zeros(x.shape[:2], dtype=torch.int64), fwd_hooks=[("hook_embed", lambda value, hook: x)]
    )


# Exactness: the five points of KERNELS.md section 2, on one layer of each mixer


@pytest.mark.parametrize("w", [4, 5, 8])
@pytest.mark.parametrize("mixer", MIXERS)
def test_reach_is_exactly_the_cap(mixer: str, w: int) -> None:
    """For every t mod w: token t-w changes nothing at t, bitwise; token t-w+1 does."""
    model, tokens = one(mixer), tokens_of(1, T)
    with model.cap(**{kind(model): w}):
        before = model(tokens)
        changed = torch.zeros(T, T, dtype=torch.bool)  # [row, token]
        for i in range(T):
            other = tokens.clone()
            other[0, i] = (other[0, i] + 1) % VOCAB
            changed[:, i] = (model(other) != before).any(-1)[0]
    distance = torch.arange(T)[:, None] - torch.arange(T)
    assert torch.equal(changed, (distance >= 0) & (distance < w))


@pytest.mark.parametrize("w", [4, 7])
@pytest.mark.parametrize("mixer", MIXERS)
def test_nothing_outside_the_cap_enters_the_arithmetic(mixer: str, w: int) -> None:
    """Everything outside the window times 1e4: row t is bitwise the same."""
    model, x = one(mixer), torch.randn(1, T, 16).double()
    with model.cap(**{kind(model): w}):
        before = embedded(model, x)
        for t in range(T):
            loud = 1e4 * x
            inside = slice(max(0, t - w + 1), t + 1)
            loud[:, inside] = x[:, inside]
            assert torch.equal(embedded(model, loud)[:, t], before[:, t])


@pytest.mark.parametrize("w", [4, 7])
@pytest.mark.parametrize("mixer", MIXERS)
def test_jacobian_zero_pattern(mixer: str, w: int) -> None:
    """d row t / d input i is exactly zero outside the cap and nonzero inside, at t mod w in {0, 1, w-1}."""
    model, x = one(mixer), torch.randn(1, T, 16).double().requires_grad_()
    with model.cap(**{kind(model): w}):
        out = embedded(model, x)
    for t in (2 * w, 2 * w + 1, 3 * w - 1):
        (grad,) = torch.autograd.grad(out[0, t].sum(), x, retain_graph=True)
        hit = (grad[0] != 0).any(-1)
        distance = t - torch.arange(T)
        assert torch.equal(hit, (distance >= 0) & (distance < w))


@pytest.mark.parametrize("mixer", MIXERS)
def test_a_cap_of_the_whole_context_is_no_cap(mixer: str) -> None:
    model, tokens = one(mixer), tokens_of(2, T)
    free = model(tokens)
    for w in (T, T + 1, 10**6):
        with model.cap(**{kind(model): w}):
            assert torch.equal(model(tokens), free)
    with model.cap(**{kind(model): T - 1}):
        assert not torch.equal(model(tokens), free)


@pytest.mark.parametrize("mixer", MIXERS)
def test_rows_within_the_cap_are_the_short_context(mixer: str) -> None:
    """Row t of a capped pass is what the last w tokens alone would give at their end, on one layer (no
    positions lost: RoPE sees distances, and a convolution's history lies inside the cap)."""
    model, tokens, w = one(mixer), tokens_of(1, T), 9
    with model.cap(**{kind(model): w}):
        capped = model(tokens)[0]
    for t in range(T):
        short = model(tokens[:, max(0, t - w + 1) : t + 1])[0, -1]
        if model.sites[0].conv == 1 or t < w:
            assert_close(capped[t], short, "model")


@pytest.mark.parametrize("mixer", MIXERS)
def test_caps_hold_while_decoding_and_under_padding(mixer: str) -> None:
    """Token by token and padded inside, rows see w real tokens: bitwise blind to the one before."""
    model, w = one(mixer), 5
    row, at = tokens_of(1, 14), [0, 2, 3, 5, 6, 7, 9, 10, 12, 13, 14, 16, 17, 19]
    other = row.clone()
    other[0, 3] = (other[0, 3] + 1) % VOCAB
    with model.cap(**{kind(model): w}):
        whole = model(row)[0]
        outs = []
        for source in (row, other):
            tokens, mask = pad([source[0]], [at], 20)
            cache = Cache()
            parts = [model(tokens[:, c : c + 4], mask[:, c : c + 4], cache) for c in range(0, 20, 4)]
            outs.append(torch.cat(parts, 1)[0, at])
            steps, cache = [], Cache()
            for t in range(14):
                steps.append(model(source[:, t : t + 1], cache=cache))
            outs.append(torch.cat(steps, 1)[0])
    for a, b in ((outs[0], outs[2]), (outs[1], outs[3])):
        assert_close(a, whole, "model")
        same = (a == b).all(-1)
        assert same.tolist() == [not 3 <= t < 3 + w for t in range(14)]


@settings(max_examples=40, deadline=None, derandomize=True)
@given(mixer=st.sampled_from(MIXERS), real=st.lists(st.booleans(), min_size=2, max_size=22), w=st.integers(4, 24),
       cuts=st.sets(st.integers(1, 21), max_size=4), sinks=st.integers(0, 2))  # fmt: skip
def test_any_padding_and_any_split_under_any_cap(
    mixer: str, real: list[bool], w: int, cuts: set[int], sinks: int
) -> None:
    """Tokens anywhere among padding, given in pieces of any size, are what they are by themselves in one pass."""
    model, at = one(mixer), [c for c, there in enumerate(real) if there]
    sinks = sinks if model.sites[0].softmax else 0
    row = tokens_of(1, len(at))
    tokens, mask = pad([row[0]], [at], len(real))
    cache, edges = Cache(), sorted({0, len(real), *(c for c in cuts if c < len(real))})
    with model.cap(**{kind(model): w}, sinks=sinks):
        parts = [model(tokens[:, a:b], mask[:, a:b], cache) for a, b in itertools.pairwise(edges)]
        if at:
            assert_close(torch.cat(parts, 1)[0, at], model(row)[0], "model")


@pytest.mark.parametrize("caps", [{}, {"full": 5}])
def test_a_prompt_is_attended_to_as_without_a_cache(caps: dict[str, int]) -> None:
    """The call that fills an empty cache gives kernels no positions: the same fused call, bitwise the same output."""
    model, tokens = model_of("full"), tokens_of(2, T)
    with model.cap(**caps) if caps else contextlib.nullcontext():
        cache = Cache()
        assert torch.equal(model(tokens[:, :20], cache=cache), model(tokens[:, :20]))
        assert_close(model(tokens[:, 20:], cache=cache), model(tokens)[:, 20:], "model")


def test_a_cap_above_a_native_window_changes_nothing() -> None:
    model, tokens = model_of("swa:4"), tokens_of(1, T)
    free = model(tokens)
    with model.cap(window=5):
        assert torch.equal(model(tokens), free)
    with model.cap(window=3):
        assert not torch.equal(model(tokens), free)


# Which sites


def test_a_cap_names_a_kind_a_layer_or_a_site() -> None:
    model = model_of(*HYBRID)
    cases: list[tuple[tuple[Any, ...], dict[str, int], list[int | None]]] = [
        ((), {"full": 9}, [None, None, 9, 9]),
        ((), {"full": 9, "window": 2, "recurrent": 5}, [2, 5, 9, 9]),
        (({3: 7},), {}, [None, None, None, 7]),
        (({(1, 0): 6, 0: 2},), {}, [2, 6, None, None]),
        (({3: 7},), {"full": 9}, [None, None, 9, 7]),  # a layer wins over its kind
    ]
    for layers, kinds, caps in cases:
        with model.cap(*layers, **kinds):
            assert [s.cap for s in model.sites] == caps
        assert [s.cap for s in model.sites] == [None] * 4


@pytest.mark.parametrize("mixer", ["rwkv6", "rwkv7"])
def test_a_channel_mix_looks_one_token_further(mixer: str) -> None:
    """Two layers capped at 4 see 2 (4 - 1) + 1 tokens through their sites and 2 more through their MLPs."""
    model, tokens = model_of(mixer, layers=2), tokens_of(1, T)
    with model.cap(recurrent=4):
        assert model.reach() == 9
        before = model(tokens)
        for back, same in ((9, True), (8, False)):
            other = tokens.clone()
            other[0, T - 1 - back] = (other[0, T - 1 - back] + 1) % VOCAB
            assert torch.equal(model(other)[0, -1], before[0, -1]) is same


def test_caps_nest_and_none_lifts() -> None:
    """The inner cap wins for the sites it names, wider or narrower; on exit the outer one is back."""
    model, tokens = model_of(*HYBRID), tokens_of(1, T)
    with model.cap(full=3, sinks=1):
        outer = model(tokens)
        with model.cap({3: 12}):
            assert [(s.cap, s.sinks) for s in model.sites] == [(None, 0), (None, 0), (3, 1), (12, 0)]
        with model.cap({3: None}):
            lifted = model(tokens)
            assert [s.cap for s in model.sites] == [None, None, 3, None]
        assert torch.equal(model(tokens), outer)
    with model.cap({2: 3}, sinks=1):
        assert torch.equal(model(tokens), lifted)
    assert not torch.equal(lifted, outer)


@pytest.mark.parametrize(
    ("layers", "options", "message"),
    [
        (None, {"fully": 3}, "no 'fully' sites; it has: full, recurrent, window"),
        (None, {"conv": 3}, "no 'conv' sites"),
        (None, {}, "name a kind"),
        ({}, {}, "name a kind"),
        ({4: 3}, {}, "layer 4 does not exist"),
        ({(1, 1): 8}, {}, "layer 1 site 1 does not exist"),
        (None, {"full": 0}, "expected a whole number >= 1"),
        (None, {"full": -1}, "expected a whole number >= 1"),
        (None, {"full": True}, "expected a whole number >= 1"),
        (None, {"recurrent": 3}, "blocks.1.attn: cap=3: smaller than the site's convolution width 4"),
        (None, {"recurrent": 8, "sinks": 2}, "has no keys to keep"),
        (None, {"full": 8, "sinks": -1}, "sinks=-1"),
    ],
)
def test_mistakes_are_named_and_leave_nothing_behind(layers: Any, options: dict[str, int], message: str) -> None:
    model = model_of(*HYBRID)
    with pytest.raises(ValueError, match=message), model.cap(layers, **options):
        pass
    assert not any(site.active for site in model.sites)


# Sinks


def test_sinks_stay_visible_to_full_sites() -> None:
    """The first 2 keys, and the last 3: nothing between, bitwise."""
    model, tokens = one("full"), tokens_of(1, T)
    with model.cap(full=3, sinks=2):
        before = model(tokens)
        for i in range(T - 1):
            other = tokens.clone()
            other[0, i] = (other[0, i] + 1) % VOCAB
            same = torch.equal(model(other)[0, -1], before[0, -1])
            assert same is not (i < 2 or i >= T - 3)


def test_sinks_count_real_tokens() -> None:
    model, row = one("full"), tokens_of(1, 12)
    at = list(range(5, 17))
    tokens, mask = pad([row[0]], [at], 17)
    with model.cap(full=3, sinks=2):
        assert_close(model(tokens, mask)[0, at], model(row)[0], "model")


def test_a_window_site_never_sees_more_than_natively() -> None:
    """Under a cap of 2 with sinks, swa:5 sees a sink only while its own window reaches it."""
    model, tokens = model_of("swa:5"), tokens_of(1, 12)
    free = model(tokens)
    with model.cap(window=2, sinks=1):
        before = model(tokens)
        assert not torch.equal(before[:, 4], free[:, 4])
        other = tokens.clone()
        other[0, 0] = (other[0, 0] + 1) % VOCAB
        changed = (model(other) != before).any(-1)[0]
    assert changed.tolist() == [t < 5 for t in range(12)]


# Changing a cap in the middle of a context


def test_softmax_caps_may_change_mid_context() -> None:
    """They mask, they do not drop: the rest of the context is what a fresh pass under the new cap gives, on
    one layer."""
    for mixer in ("full", "nope", "swa:9"):
        model, tokens, cache = one(mixer), tokens_of(1, T), Cache()
        for cap, part in ((2, slice(0, 10)), (None, slice(10, 15)), (6, slice(15, T))):
            with model.cap(**{kind(model): cap}):
                got = model(tokens[:, part], cache=cache)
                assert_close(got, model(tokens)[:, part], "model")


def test_a_recurrent_cap_may_not_change_mid_context() -> None:
    model, tokens = model_of("full", "gdn"), tokens_of(1, T)
    for before, after in itertools.permutations([None, 5, 6], 2):
        cache = Cache()
        with model.cap(recurrent=before):
            model(tokens[:, :9], cache=cache)
        with (
            model.cap(recurrent=after),
            pytest.raises(ValueError, match="cannot change in the middle of a context"),
        ):
            model(tokens[:, 9:], cache=cache)
        with model.cap(recurrent=before):  # the refusal spoiled nothing
            assert_close(model(tokens[:, 9:], cache=cache), model(tokens)[:, 9:], "model")


# Reach


def test_reach_adds_up() -> None:
    assert model_of("swa:4").reach() == 4
    assert model_of("swa:4", layers=3).reach() == 3 * 3 + 1
    assert model_of("swa:4", "full").reach() is None
    assert model_of("gdn").reach() is None
    model = model_of(*HYBRID)
    with model.cap(full=10, recurrent=6):
        assert model.reach() == 3 + 5 + 9 + 9 + 1
        with model.cap(window=2):
            assert model.reach() == 1 + 5 + 9 + 9 + 1
        with model.cap(window=100):
            assert model.reach() == 3 + 5 + 9 + 9 + 1
        with model.cap({3: None}):
            assert model.reach() is None
        with model.cap({3: 10}, sinks=1):
            assert model.reach() is None
        with model.cap(window=2, sinks=1):
            assert model.reach() == 3 + 5 + 9 + 9 + 1


def test_reach_is_what_the_stack_sees() -> None:
    model, tokens = model_of("swa:3", "gdn", "full"), tokens_of(1, T)
    with model.cap(full=4, recurrent=5):
        reach = model.reach()
        assert reach == 2 + 4 + 3 + 1
        before = model(tokens)
        for i in range(T):
            other = tokens.clone()
            other[0, i] = (other[0, i] + 1) % VOCAB
            changed = not torch.equal(model(other)[0, -1], before[0, -1])
            assert changed is (T - 1 - i < reach)
