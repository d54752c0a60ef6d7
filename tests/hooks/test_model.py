"""HybridLM: whole pass = split = token by token, padding changes nothing, hooks fire, generation and loss."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import RECURRENT, VOCAB, Largest, assert_close, model_of, pad, tokens_of
from torch import Tensor

from hybridscope import HybridConfig, HybridLM
from hybridscope.hooks import instrumented
from hybridscope.hooks.mixers.layers import RMSNorm, ShortConv, rope
from hybridscope.hooks.passes import Cache, KVCache

MIXERS = ["full", "nope", "swa:5", "swa:1", *RECURRENT, "swa:3|gdn", "full+rwkv6"]
HYBRID = ("swa:3", "gdn", "nope", "full")
T = 13
COLUMNS = {  # where the real tokens stand, of 13 columns
    "left": list(range(4, 13)),
    "right": list(range(9)),
    "interior": [0, 1, 3, 4, 7, 8, 9, 11, 12],
    "everywhere": [1, 2, 5, 6, 7, 9, 10],
    "one": [6],
}


def build(mixer: str) -> HybridLM:
    """One layer of each mixer, or all of them in one model; grouped KV heads."""
    pattern = HYBRID if mixer == "hybrid" else (mixer,)
    return model_of(*pattern, n_kv_heads=2, qk_norm=mixer == "full")


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


# Mixers do what they say


def test_rope_sees_distances_only() -> None:
    """q.k after rotation depends on the distance; lengths stay; position 0 is untouched."""
    x, y = (torch.randn(1, 6, 2, 8).double() for _ in range(2))
    at = torch.arange(6)[None]
    near = torch.einsum("bthk,bshk->bhts", rope(x, at, 1e4), rope(y, at, 1e4))
    far = torch.einsum("bthk,bshk->bhts", rope(x, at + 1000, 1e4), rope(y, at + 1000, 1e4))
    assert_close(far, near, "model")
    assert_close(rope(x, at, 1e4).norm(dim=-1), x.norm(dim=-1))
    assert torch.equal(rope(x, at * 0, 1e4), x)
    one = rope(torch.tensor([1.0, 0.0]).double().view(1, 1, 1, 2), torch.tensor([[3]]), 7.0).flatten()
    assert_close(one, torch.tensor([3.0, 3.0 - torch.pi / 2], dtype=torch.float64).cos())


def test_only_nope_ignores_the_order_of_earlier_tokens() -> None:
    for mixer, same in (("nope", True), ("full", False), ("gdn", False)):
        model, tokens = build(mixer), tokens_of(1, 8)
        shuffled = torch.cat([tokens[:, :7].flip(1), tokens[:, 7:]], 1)
        a, b = model(tokens)[:, -1], model(shuffled)[:, -1]
        assert (float((a - b).abs().max()) < 1e-12) is same, mixer


def test_short_convolution_is_causal_convolution() -> None:
    conv = ShortConv(6, 4, silu=False).double()
    conv.init_weights()
    x = torch.randn(2, 9, 6).double()
    expected = F.conv1d(F.pad(x.transpose(1, 2), (3, 0)), conv.weight[:, None], groups=6).transpose(1, 2)
    assert_close(conv(x, None), expected)
    assert_close(conv(x[:, 5:], x[:, 2:5]), expected[:, 5:])


def test_layer_norms_where_asked_for_and_one_on_the_embeddings() -> None:
    model = HybridLM(HybridConfig(("rwkv7",), 2, 16, 4, 32, norm="layer")).eval()
    with torch.no_grad():
        for norm in (model.ln_embed, model.layers[0].ln1, model.ln_final):
            norm.weight.normal_()
            norm.bias.normal_()
    assert isinstance(model.ln_embed, torch.nn.LayerNorm)
    _, cache = model.run_with_cache(torch.arange(5)[None])
    normed = F.layer_norm(cache["hook_embed"], (16,), model.ln_embed.weight, model.ln_embed.bias, 1e-6)
    assert torch.equal(cache["blocks.0.hook_resid_pre"], normed)
    assert isinstance(model.ln_final, torch.nn.LayerNorm)
    assert torch.equal(model.hidden(torch.arange(5)[None]), model.ln_final(cache["blocks.1.hook_resid_post"]))
    with pytest.raises(ValueError, match="norm='batch': expected 'rms' or 'layer'"):
        HybridConfig(("full",), 1, 16, 4, 32, norm="batch")


def test_rms_norm() -> None:
    norm = RMSNorm(6, 1e-6).double()
    x = 100 * torch.randn(3, 6).double()
    assert_close(norm(x).square().mean(-1), torch.ones(3).double(), torch.float32)
    assert norm(x.bfloat16()).dtype == torch.float64  # the weight's dtype wins; the sum of squares is fp32 or wider


@pytest.mark.parametrize("negative", [False, True])
def test_gdn_is_the_gated_delta_rule(negative: bool) -> None:
    """From its own q, k, v, beta and decay: S = alpha (I - beta k k^T) S + beta k v^T, o = S^T q /
    sqrt(K)."""
    model = model_of(
        "gdn",
        mixers={"gdn": {"heads": 2, "value_heads": 4, "value_dim": 6, "negative_eigenvalues": negative}},
    )
    _, seen = model.run_with_cache(tokens_of(2, 9))
    q, k, v, beta, log_decay, z = (seen[f"blocks.0.attn.hook_{n}"] for n in ("q", "k", "v", "beta", "log_decay", "z"))
    assert (k.shape, v.shape, beta.shape) == ((2, 9, 4, 4), (2, 9, 4, 6), (2, 9, 4))
    length = k.norm(dim=-1)
    assert 0.99 < float(length.min()) <= float(length.max()) <= 1
    assert (log_decay <= 0).all()
    assert bool((beta > 1).any()) is negative
    S, eye, outs = torch.zeros(2, 4, 4, 6).double(), torch.eye(4).double(), []
    for t in range(9):
        kk = k[:, t, :, :, None] * k[:, t, :, None, :]
        scale = beta[:, t, :, None, None]
        S = log_decay[:, t, :, None, None].exp() * (eye - scale * kk) @ S
        S = S + scale * k[:, t, :, :, None] * v[:, t, :, None, :]
        outs.append((S * q[:, t, :, :, None]).sum(-2) / 2)  # sqrt(K) = 2
    gdn = model.blocks[0].attn
    gate = F.silu(gdn.gate_proj(model.blocks[0].ln1(seen["blocks.0.hook_resid_pre"])).unflatten(-1, (4, 6)))
    assert_close(z, gdn.out_norm(torch.stack(outs, 1)) * gate, "model")
    assert_close(seen["blocks.0.attn.hook_state"], S, "model")


def test_gdn_value_heads_are_a_multiple_of_heads() -> None:
    with pytest.raises(ValueError, match="value_heads=3 must be a multiple of heads=2"):
        model_of("gdn", mixers={"gdn": {"heads": 2, "value_heads": 3}})


@pytest.mark.parametrize("mixer", [*MIXERS, "hybrid"])
def test_every_parameter_learns(mixer: str) -> None:
    model = build(mixer).requires_grad_()
    model.loss(tokens_of(2, T)).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert torch.isfinite(parameter.grad).all(), name
        if mixer != "swa:1" or not any(part in name for part in ("q_proj", "k_proj")):  # one key: nothing to choose
            assert (parameter.grad != 0).any(), name


def test_a_fresh_model_knows_nothing() -> None:
    """Initial loss is that of the uniform guess; tied embeddings share one tensor."""
    torch.manual_seed(0)
    for tied in (False, True):
        model = HybridLM(HybridConfig(HYBRID, 4, 64, 4, VOCAB, tie_embeddings=tied))
        assert abs(float(model.loss(tokens_of(4, 32)).detach()) - float(torch.tensor(VOCAB).log())) < 0.1
        assert (model.unembed.weight is model.embed.weight) is tied


def test_options_change_the_model() -> None:
    tokens = tokens_of(1, 9)
    plain = model_of("full")(tokens)
    assert not torch.equal(model_of("full", qk_norm=True)(tokens), plain)
    assert not torch.equal(model_of("full", rope_base=100.0)(tokens), plain)
    assert model_of("full", head_dim=6)(tokens).shape == (1, 9, VOCAB)


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


# Hook points


def points() -> Iterator[tuple[str, str]]:
    for layer, mixer in enumerate(HYBRID):
        block = ["hook_resid_pre", "hook_resid_mid", "hook_resid_post", "hook_attn_out", "hook_mlp_out"]
        attn = ["hook_q", "hook_k", "hook_v", "hook_z"]
        if mixer == "gdn":
            attn += ["hook_beta", "hook_log_decay", "hook_state"]
        elif mixer != "nope":
            attn += ["hook_rot_q", "hook_rot_k"]
        for name in [*block, *[f"attn.{n}" for n in attn]]:
            yield mixer, f"blocks.{layer}.{name}"
    yield "-", "hook_embed"


def test_advertised_points_are_all_the_points() -> None:
    assert sorted(build("hybrid").hook_dict) == sorted(name for _, name in points())


@pytest.mark.parametrize("name", [name for _, name in points()])
def test_every_point_fires_and_overwriting_it_changes_the_output(name: str) -> None:
    """Once a pass; the state shows in the continuation, everything else in the logits."""
    model, tokens = build("hybrid"), tokens_of(2, T)
    fired = []

    def overwrite(value: Tensor, hook: Any) -> Tensor:
        fired.append(hook.name)
        return value * 0.5

    def run(hooks: list[Any]) -> Tensor:
        cache = Cache()
        logits = model.run_with_hooks(tokens, cache=cache, fwd_hooks=hooks)
        return model(tokens[:, :3], cache=cache) if name.endswith("hook_state") else logits

    before = run([])
    assert not torch.equal(run([(name, overwrite)]), before)
    assert fired == [name]
    assert torch.equal(run([]), before)  # nothing stays behind


def test_run_with_cache_holds_every_point() -> None:
    model, tokens = build("hybrid"), tokens_of(2, T)
    logits, seen = model.run_with_cache(tokens)
    assert torch.equal(logits, model(tokens))
    assert set(seen) == {name for _, name in points()}
    for layer in range(4):
        assert torch.equal(
            seen[f"blocks.{layer}.hook_resid_mid"],
            seen[f"blocks.{layer}.hook_resid_pre"] + seen[f"blocks.{layer}.hook_attn_out"],
        )
    assert torch.equal(seen["blocks.1.hook_resid_pre"], seen["blocks.0.hook_resid_post"])


def test_hooks_fire_under_caps_padding_and_decoding() -> None:
    model = build("hybrid")
    tokens, mask = pad([tokens_of(1, 9)[0]], [COLUMNS["interior"]], T)
    cache, fired = Cache(), []
    hooks = [(lambda n: "attn.hook_" in n, lambda value, hook: fired.append(hook.name))]
    with model.cap(full=3, window=2, recurrent=5):
        for step in (tokens, tokens[:, :1]):
            fired.clear()
            model.run_with_hooks(step, mask if step is tokens else None, cache, fwd_hooks=hooks)
            expected = {n for _, n in points() if "attn.hook_" in n and "hook_state" not in n}  # a cap keeps no state
            assert set(fired) == expected


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
