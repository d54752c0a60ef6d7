"""The parts of HybridLM do what they say: positions, convolutions, norms, the gated delta rule; all of them learn."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from helpers import VOCAB, assert_close, model_of, tokens_of
from one_of_each import HYBRID, MIXERS, T, build

from hybridscope import HybridConfig, HybridLM
from hybridscope.hooks.mixers import layers
from hybridscope.hooks.mixers.layers import RMSNorm, ShortConv, rope
from hybridscope.hooks.passes import Cache


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


@pytest.mark.parametrize("padded", [False, True])
def test_layers_share_what_they_turn_by(padded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cosines and sines are made once a pass, also while decoding."""
    model, tokens, cache, made = model_of("full", "gdn", "swa:4", "full"), tokens_of(2, 8), Cache(), []
    make = layers._rotations
    monkeypatch.setattr(layers, "_rotations", lambda *args: (made.append(1), make(*args))[1])
    mask = torch.tensor([[1] * 8, [0] * 2 + [1] * 6]) if padded else torch.ones(2, 8)
    with torch.no_grad():
        whole = model(tokens, attention_mask=mask)
        parts = [model(tokens[:, a:b], mask[:, a:b], cache) for a, b in ((0, 5), (5, 6), (6, 7), (7, 8))]
    assert len(made) == 5
    assert_close(torch.cat(parts, 1)[mask == 1], whole[mask == 1], "model")


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
