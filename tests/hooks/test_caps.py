"""cap(), ablate() and knockout(): exact, tight, nested, restored; against dense computations."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

import pytest
import torch
from helpers import RECURRENT, VOCAB, Largest, assert_close, model_of, pad, tokens_of
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hybridscope import HybridLM
from hybridscope.hooks import attend
from hybridscope.hooks.kernels import attention
from hybridscope.hooks.passes import Cache

MIXERS = ["full", "nope", "swa:64", *RECURRENT]
HYBRID = ("swa:4", "gdn", "nope", "full")
T = 26


def one(mixer: str) -> HybridLM:
    """One layer; a channel mix reads no earlier token, so that what is seen is the site's own reach."""
    model = model_of(mixer, n_kv_heads=2)
    for name, parameter in model.named_parameters():
        if ".mlp." in name and "shift" in name:
            parameter.zero_()
    return model


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


# Packed documents


@pytest.mark.parametrize("w", [None, 4, 6])
@pytest.mark.parametrize("mixer", [*MIXERS, "swa:4|gdn", "full+mamba2"])
def test_packed_documents_never_see_each_other(mixer: str, w: int | None) -> None:
    """Each is what it is alone, caps, sinks, states, convolutions and token shifts included; padding stands between."""
    model = model_of(mixer, "full", n_kv_heads=2)
    rows = [tokens_of(1, n, seed=n) for n in (9, 1, 7, 12, 5)]
    tokens, mask = tokens_of(2, 21, seed=3), torch.zeros(2, 21, dtype=torch.int64)
    ids = torch.zeros(2, 21, dtype=torch.int64)
    places = [(0, [0, 1, 2, 3, 5, 6, 7, 8, 9]), (0, [10]), (0, list(range(13, 20))), (1, list(range(12)))]
    places.append((1, list(range(14, 19))))
    for number, ((sample, at), row) in enumerate(zip(places, rows, strict=True)):
        tokens[sample, at], mask[sample, at], ids[sample, at] = row[0], 1, number % 2
    caps = {} if w is None else {site.kind: w for site in model.sites}
    with model.cap(**caps) if caps else contextlib.nullcontext():
        out = model(tokens, mask, documents=ids)
        for (sample, at), row in zip(places, rows, strict=True):
            assert_close(out[sample, at], model(row)[0], "model")
        other = tokens.clone()
        other[0, 7] = (other[0, 7] + 1) % VOCAB
        changed = (model(other, mask, documents=ids) != out).any(-1)
    assert changed[0, 7]
    assert not changed[1].any()
    assert not changed[0, 10:].any()


def test_one_document_is_the_plain_pass() -> None:
    model, tokens = model_of(*HYBRID), tokens_of(2, T)
    assert torch.equal(model(tokens, documents=torch.ones_like(tokens)), model(tokens))


def test_documents_are_samples_for_recorders() -> None:
    model, tokens = model_of(*HYBRID), tokens_of(1, 10)
    ids = torch.tensor([[0] * 6 + [1] * 4])
    with model.record(stats=True, resid="last") as rec:
        model(tokens, documents=ids)
    with model.record(stats=True, resid="last") as alone:
        model(tokens[:, 6:])
    assert_close(rec.stats(3).entropy[1:, :4], alone.stats(3).entropy, "model")
    assert_close(rec.resid(3)[1], alone.resid(3)[0], "model")


def test_mistakes_about_documents_are_named() -> None:
    model, tokens = model_of(*HYBRID), tokens_of(1, 8)
    with pytest.raises(ValueError, match="documents are for whole passes"):
        model(tokens, cache=Cache(), documents=torch.zeros_like(tokens))
    with pytest.raises(ValueError, match=r"documents: torch.int64 of shape \(1, 7\)"):
        model(tokens, documents=torch.zeros(1, 7, dtype=torch.int64))
    with pytest.raises(ValueError, match="documents: torch\\.float32"):
        model(tokens, documents=torch.zeros(1, 8))
    with pytest.raises(ValueError, match="attention_mask: shape"):
        model(tokens, torch.ones(1, 7), documents=torch.zeros_like(tokens))
    with pytest.raises(ValueError, match="outside the vocabulary"):
        model(tokens + VOCAB, documents=torch.zeros_like(tokens))


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


# Ablation


def with_z(model: HybridLM, tokens: Tensor, edits: dict[tuple[int, int], Any], mask: Tensor | None = None) -> Tensor:
    """The same replacement through TransformerLens hooks: {(layer, head): function of z_head [B,T,V]}."""
    hooks = []
    for (layer, head), change in edits.items():

        def edit(z: Tensor, hook: Any, head: int = head, change: Any = change) -> Tensor:
            z = z.clone()
            z[:, :, head] = change(z[:, :, head])
            return z

        hooks.append((f"blocks.{layer}.attn.hook_z", edit))
    return model.run_with_hooks(tokens, mask, fwd_hooks=hooks)


ZERO = torch.zeros_like


def test_ablating_zeroes_heads_before_the_output_projection() -> None:
    model, tokens = model_of(*HYBRID), tokens_of(2, T)
    heads = [(0, 1), (1, 3), (3, 0), (3, 2)]
    with model.ablate(heads=heads):
        got = model(tokens)
    assert_close(got, with_z(model, tokens, dict.fromkeys(heads, ZERO)), "model")
    assert not torch.equal(got, model(tokens))


def test_ablating_every_head_removes_the_layer() -> None:
    model, tokens = model_of(*HYBRID), tokens_of(2, T)
    with model.ablate(heads=[(1, 0, h) for h in range(4)]):  # (layer, site, head)
        _, seen = model.run_with_cache(tokens)
    assert (seen["blocks.1.hook_attn_out"] == 0).all()


def test_mean_ablation_over_the_running_tokens() -> None:
    """Padding does not count."""
    model, tokens = model_of(*HYBRID), tokens_of(2, T)
    with model.ablate(heads=[(0, 1), (1, 2)], how="mean"):
        got = model(tokens)
    mean = {head: lambda z: z.mean((0, 1)).expand_as(z) for head in ((0, 1), (1, 2))}
    assert_close(got, with_z(model, tokens, mean), "model")
    for head in ((0, 1), (1, 2)):
        at = [0, 3, 4, 7, 9]
        padded, mask = pad([tokens[0, :5]], [at], 11)
        with model.ablate(heads=[head], how="mean"):
            assert_close(model(padded, mask)[0, at], model(tokens[:1, :5])[0], "model")


def test_mean_ablation_over_reference_tokens() -> None:
    model, tokens, reference = model_of(*HYBRID), tokens_of(2, T), tokens_of(3, 15, seed=5)
    _, seen = model.run_with_cache(reference)
    mean: dict[tuple[int, int], Any] = {}
    for layer, head in ((0, 1), (1, 2)):
        value = seen[f"blocks.{layer}.attn.hook_z"][:, :, head].mean((0, 1))
        mean[layer, head] = value.expand_as
    with model.ablate(heads=list(mean), how="mean", reference=reference):
        assert_close(model(tokens), with_z(model, tokens, mean), "model")
        assert_close(model(tokens[:1, :3]), with_z(model, tokens[:1, :3], mean), "model")


def test_the_reference_pass_is_not_recorded() -> None:
    model, tokens = model_of(*HYBRID), tokens_of(2, T)
    with (
        model.record(resid="last", stats=[-1]) as rec,
        model.ablate([(0, 1)], how="mean", reference=tokens_of(3, 5)),
    ):
        model(tokens)
    assert rec.resid(0).shape[0] == 2
    assert rec.stats(0).entropy.shape[0] == 2


def test_ablations_nest() -> None:
    model, tokens = model_of(*HYBRID), tokens_of(2, T)
    with model.ablate([(0, 1), (3, 2)]):
        outer = model(tokens)
        with model.ablate([(0, 2), (3, 1)]):
            got = model(tokens)
        assert torch.equal(model(tokens), outer)
    assert_close(got, with_z(model, tokens, dict.fromkeys([(0, 1), (0, 2), (3, 1), (3, 2)], ZERO)), "model")


def test_ablation_leaves_gradients_of_other_heads() -> None:
    model, tokens = model_of("full"), tokens_of(1, T)
    model.requires_grad_()
    with model.ablate([(0, 1)]):
        model.loss(tokens).backward()
    grad = model.blocks[0].attn.q_proj.weight.grad
    assert grad is not None
    by_head = grad.view(4, 4, 16).abs().amax((1, 2))
    assert (by_head > 0).tolist() == [True, False, True, True]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"heads": [(0, 4)]}, r"head \(0, 4\): blocks.0.attn has heads 0..3"),
        ({"heads": [(9, 0)]}, "layer 9 does not exist"),
        ({"heads": [(0, 1, 0)]}, "layer 0 site 1 does not exist"),
        ({"heads": [(0,)]}, "expected"),
        ({"heads": [(0, 1)], "reference": torch.zeros(1, 3, dtype=torch.int64)}, 'how="mean"'),
    ],
)
def test_ablation_mistakes_are_named(options: dict[str, Any], message: str) -> None:
    model = model_of(*HYBRID)
    with pytest.raises(ValueError, match=message), model.ablate(**options):
        pass
    assert not any(site.active for site in model.sites)


# Knockout


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
    with model.knockout(rows=[13], keys=[]), model.knockout(rows=[], keys=[3]):
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
