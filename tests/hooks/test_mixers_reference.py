"""Mixers against the reference recurrence (outputs and every gradient), their identities, state sizes and fresh
decays, and, where flash-linear-attention is installed, its naive functions."""

from __future__ import annotations

import importlib
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import RECURRENT, assert_close, model_of, pad, tokens_of
from torch import Tensor

from hybridscope import HybridConfig, HybridLM
from hybridscope.hooks.kernels import dispatch
from hybridscope.hooks.kernels.recurrence import recurrence, recurrence_reference
from hybridscope.hooks.passes import Cache, StateCache

FIRST, T = 6, 43  # tokens of an earlier call, and in all: the second call is longer than one chunk, and odd
ROWS = {  # where the real tokens of a batch of three stand: padding on the left, on the right, and inside
    "left": list(range(9, T)),
    "right": list(range(T - 7)),
    "interior": [t for t in range(T) if t % 5 and not 20 <= t < 24],
}

# The reference


def outputs_and_gradients(model: HybridLM, tokens: Tensor, mask: Tensor | None) -> dict[str, Tensor]:
    """Logits of a context in two calls (the second starts from a state), and gradients of every parameter through
    both; that of the embedding is the input's."""
    cache, parts = Cache(), []
    for a, b in ((0, FIRST), (FIRST, T)):
        parts.append(model(tokens[:, a:b], None if mask is None else mask[:, a:b], cache))
    out = torch.cat(parts, 1)[... if mask is None else mask.bool()]
    cotangent = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(0))
    grads = torch.autograd.grad(out, list(model.parameters()), cotangent)
    return {"": out, **{name: g for (name, _), g in zip(model.named_parameters(), grads, strict=True)}}


@pytest.mark.parametrize("rows", ["one row", "three rows", "padded"])
@pytest.mark.parametrize("mixer", RECURRENT)
def test_outputs_and_gradients_are_those_of_the_reference(
    monkeypatch: pytest.MonkeyPatch, mixer: str, rows: str
) -> None:
    model = model_of(mixer, layers=2).requires_grad_()
    if rows == "padded":
        real = [tokens_of(1, len(at), seed=n)[0] for n, at in enumerate(ROWS.values())]
        tokens, mask = pad(real, list(ROWS.values()), T)
    else:
        tokens, mask = tokens_of(1 if rows == "one row" else 3, T), None
    got = outputs_and_gradients(model, tokens, mask)
    started: list[bool] = []

    def reference(**x: Any) -> tuple[Tensor, Tensor]:
        started.append(x["state"] is not None)
        return recurrence_reference(**x)

    monkeypatch.setattr(dispatch, "recurrence", reference)
    expected = outputs_and_gradients(model, tokens, mask)
    assert started == [False, False, True, True]
    for name, x in expected.items():
        assert_close(got[name], x, "gradient" if name else "model")


# Identities


def z_of(model: HybridLM, tokens: Tensor, **overwrite: Tensor) -> Tensor:
    """Head outputs [B,T,H,V] of a one-layer model, hook points overwritten."""
    hooks = [(f"blocks.0.attn.hook_{name}", lambda _, hook, x=x: x) for name, x in overwrite.items()]
    seen = []
    model.run_with_hooks(tokens, fwd_hooks=[*hooks, ("blocks.0.attn.hook_z", lambda z, hook: seen.append(z))])
    return seen[0]


def with_weights_of(source: HybridLM, mixer: str, **options: Any) -> HybridLM:
    """A one-layer model of another mixer that takes over all weights of the same name and shape."""
    model = model_of(mixer, mixers={mixer: options})
    have = model.state_dict()
    same = {name: x for name, x in source.state_dict().items() if name in have and have[name].shape == x.shape}
    model.load_state_dict(same, strict=False)
    return model


def test_gdn_without_decay_is_deltanet() -> None:
    """The same weights; GDN's output gate beside it."""
    gdn = model_of("gdn", mixers={"gdn": {"value_dim": 6}})
    delta = with_weights_of(gdn, "deltanet", value_dim=6)
    tokens = tokens_of(2, 19)
    z = z_of(gdn, tokens, log_decay=torch.zeros(2, 19, 4).double())
    x = gdn.layers[0].ln1(gdn.embed(tokens))
    gate = F.silu(gdn.layers[0].attn.gate_proj(x)).view_as(z)
    assert_close(z, z_of(delta, tokens) * gate, "model")


def test_kda_with_equal_channels_is_gdn() -> None:
    """One decay for all channels of a head, and gates held open."""
    gdn = model_of("gdn", mixers={"gdn": {"heads": 2, "value_heads": 4, "value_dim": 6}})
    kda = with_weights_of(gdn, "kda", heads=2, value_heads=4, value_dim=6)
    kda.layers[0].attn.gate_out.weight.zero_()
    kda.layers[0].attn.gate_out.bias.fill_(100)  # sigmoid: 1
    tokens = tokens_of(2, 19)
    _, seen = gdn.run_with_cache(tokens)
    decay = seen["blocks.0.attn.hook_log_decay"][..., None].expand(-1, -1, -1, 4)
    gate = F.silu(gdn.layers[0].attn.gate_proj(gdn.layers[0].ln1(gdn.embed(tokens))))
    z = z_of(kda, tokens, log_decay=decay)
    assert_close(z * gate.view_as(z), seen["blocks.0.attn.hook_z"], "model")


def test_retnet_is_gla_with_constant_gates() -> None:
    """On rotated queries and keys: the same weights give the same output."""
    retnet = model_of("retnet")
    gla = with_weights_of(retnet, "gla", key_dim=4, value_dim=8)
    tokens = tokens_of(2, 19)
    _, seen = retnet.run_with_cache(tokens)
    q, k, decay = (seen[f"blocks.0.attn.hook_{name}"] for name in ("rot_q", "rot_k", "log_decay"))
    z = z_of(gla, tokens, q=q, k=k, log_decay=decay[..., None].expand(-1, -1, -1, 4))
    assert_close(z, seen["blocks.0.attn.hook_z"], "model")


# States

# Numbers in a sequence's state, and in what the convolution or token shift keeps: D = 16, 4 heads of 4.
SIZES = {
    "gdn": (4 * 4 * 8, 3 * (16 + 16 + 32)),
    "deltanet": (4 * 4 * 4, 3 * 48),
    "kda": (4 * 4 * 4, 3 * 48),
    "gla": (4 * 2 * 4, 0),
    "hgrn": (16, 0),
    "hgrn2": (4 * 4 * 4, 0),
    "hawk": (16, 3 * 16),
    "retnet": (4 * 4 * 8, 0),
    "lightning": (4 * 4 * 4, 0),
    "mamba2": (8 * 5 * 4, 3 * (8 * 4 + 2 * 2 * 5)),
    "rwkv6": (4 * 4 * 4, 16),
    "rwkv7": (4 * 4 * 4, 16),
}


@pytest.mark.parametrize("mixer", RECURRENT)
def test_states_are_as_large_as_the_docstring_says(mixer: str) -> None:
    """H K V numbers, fp32 even in a bf16 model, whatever the length."""
    model, cache = model_of(mixer).bfloat16(), Cache()
    model(tokens_of(3, 20), cache=cache)
    entry = cache.sites["blocks.0.attn"]
    assert isinstance(entry, StateCache)
    assert entry.state is not None
    conv = 0 if entry.conv is None else entry.conv[0].numel()
    assert (entry.state[0].numel(), conv) == SIZES[mixer]
    assert entry.state.dtype == torch.float32


# Published initialisation


def fresh(mixer: str) -> list[Any]:
    """Three layers of a wide fresh model."""
    model = HybridLM(HybridConfig((mixer,), 3, 128, 16, 32)).requires_grad_(False)
    return [block.attn for block in model.layers]


@pytest.mark.parametrize(("mixer", "slowest"), [("gdn", 0.01), ("kda", 1.0), ("mamba2", 1.0)])
def test_fresh_decays_of_the_mamba_family(mixer: str, slowest: float) -> None:
    """Rates uniform up to 16, time steps log-uniform in [0.001, 0.1]."""
    decays = [m.decay for m in fresh(mixer)]
    rates = torch.cat([d.log_rate.exp() for d in decays])
    steps = torch.cat([F.softplus(d.bias) for d in decays])
    assert slowest - 1e-5 <= float(rates.min()) < slowest + 0.9
    assert 13 < float(rates.max()) <= 16 + 1e-4
    assert 1e-3 - 1e-6 <= float(steps.min()) < 3e-3
    assert 3e-2 < float(steps.max()) <= 0.1 + 1e-6
    assert abs(float(steps.log().mean()) - math.log(1e-2)) < 0.5


def test_fresh_decays_of_hawk() -> None:
    """a^2 at an open gate: uniform in [0.9^2, 0.999^2]."""
    rates = torch.cat([m.decay_rate for m in fresh("hawk")])
    squared = torch.exp(-2 * F.softplus(rates))
    assert 0.9**2 - 1e-5 <= float(squared.min()) < 0.83
    assert 0.98 < float(squared.max()) <= 0.999**2 + 1e-5


@pytest.mark.parametrize("mixer", ["rwkv6", "rwkv7"])
def test_fresh_decays_of_rwkv(mixer: str) -> None:
    """From almost one at the first channel to fast ones at the last; RWKV-7's never below exp(-e^-0.5) = 0.545."""
    for module in fresh(mixer):
        if mixer == "rwkv6":
            decay = torch.exp(-torch.exp(module.decay_out.bias))
            assert (decay.diff() <= 0).all()
            assert abs(float(decay[0]) - math.exp(-math.exp(-6))) < 1e-6
            assert abs(float(decay[-1]) - math.exp(-math.exp(-1))) < 1e-6
        else:
            decay = torch.exp(-math.exp(-0.5) * module.decay.leave.bias.sigmoid())
            assert 0.545 < float(decay.min()) < 0.7
            assert 0.99 < float(decay.max()) < 1
            assert not module.decay.enter.weight.any()  # no token decides at first


def test_fresh_token_shifts_of_rwkv() -> None:
    """Rows 1 - (d/D)^p, with p shrinking over depth: r, w, k, v, g in RWKV-6 (v less by up to 0.3), r, w, k, v, a, g in
    RWKV-7."""
    channel = torch.arange(128) / 128
    for n, (six, seven) in enumerate(zip(fresh("rwkv6"), fresh("rwkv7"), strict=True)):
        deep = 1 - n / 3
        for row, p, less in zip(six.shifts, (0.5, 1, 1, 1, 0.5), (0, 0, 0, 0.15 * n, 0), strict=True):
            assert_close(row, 1 - channel ** (p * deep) - less)
        for row, p in zip(seven.shifts, (0.2, 0.9, 0.7, 0.7, 0.9, 0.2), strict=True):
            assert_close(row, 1 - channel ** (p * deep))


def test_fixed_decays() -> None:
    """RetNet: 1 - 2^(-5-h). Lightning: slopes 2^(-8 (h+1) / H), almost none in the last layer."""
    model = model_of("retnet", "lightning", "lightning")
    _, seen = model.run_with_cache(tokens_of(1, 2))
    first, middle, last = (seen[f"blocks.{n}.attn.hook_log_decay"][0, 0] for n in range(3))
    assert_close(first.exp(), torch.tensor([31 / 32, 63 / 64, 127 / 128, 255 / 256]).double())
    slopes = torch.tensor([2**-2, 2**-4, 2**-6, 2**-8]).double()
    assert float((-middle / slopes - 0.5).abs().max()) < 1e-4
    assert float((-last / slopes).abs().max()) < 1e-4


def test_hgrn_bounds_rise_with_depth() -> None:
    """Forget gates of later layers cannot fall below their bounds: 0, 1/L, 2/L, ... in a fresh model."""
    model = model_of("hgrn", layers=4)
    for block in model.layers:
        block.attn.decay_proj.weight.fill_(0)
        block.attn.decay_proj.weight[:, :4] = -100.0  # forget all, or nothing
    assert model.lower_bounds is not None
    model.lower_bounds.zero_()
    _, seen = model.run_with_cache(tokens_of(2, 9))
    lowest = [float(seen[f"blocks.{n}.attn.hook_log_decay"].exp().min()) for n in range(4)]
    assert lowest[0] < 1e-6
    for n in (1, 2, 3):
        assert abs(lowest[n] - n / 4) < 1e-6


# flash-linear-attention's naive functions, fp32


def heads_first(f: Callable[..., Any]) -> Callable[..., Any]:
    """A function of [B,H,T,*] as one of [B,T,H,*]; states stay as they are."""

    def called(*args: Tensor, **options: Any) -> tuple[Tensor, Tensor | None]:
        out = f(*(x.transpose(1, 2) for x in args), **options)
        out, state = out if isinstance(out, tuple) else (out, None)
        return out.transpose(1, 2), state

    return called


def unscaled(x: dict[str, Tensor]) -> Tensor:
    """q before its 1 / sqrt(K), which the naive functions multiply by."""
    return x["q"] * x["q"].shape[-1] ** 0.5


def naive_gla(f: Any, x: dict[str, Tensor], state: Tensor) -> Any:
    return f(unscaled(x), x["k"], x["v"], x["log_decay"], state, True)


def naive_hgrn(f: Any, x: dict[str, Tensor], state: Tensor) -> Any:
    out, last = f((x["k"] * x["v"])[..., 0], x["log_decay"][..., 0], state[..., 0, 0], True)
    return out[..., None], last[..., None, None]


def naive_retention(f: Any, x: dict[str, Tensor], state: Tensor) -> Any:
    return heads_first(f)(unscaled(x), x["k"], x["v"])


def naive_delta(f: Any, x: dict[str, Tensor], state: Tensor) -> Any:
    return heads_first(f)(unscaled(x), x["k"], x["v"], x["beta"], initial_state=state)


def naive_gdn(f: Any, x: dict[str, Tensor], state: Tensor) -> Any:
    decay = {"g": x["log_decay"] if x["log_decay"].shape[-1] > 1 else x["log_decay"][..., 0]}
    return f(unscaled(x), x["k"], x["v"], beta=x["beta"], **decay, initial_state=state, output_final_state=True)


def naive_rwkv6(f: Any, x: dict[str, Tensor], state: Tensor) -> Any:
    u = torch.zeros_like(x["q"][0, 0])  # our bonus is outside the recurrence
    call = heads_first(lambda q, k, v, w: f(q, k, v, w, u, 1.0, state, True))
    return call(x["q"], x["k"], x["v"], x["log_decay"])


def naive_rwkv7(f: Any, x: dict[str, Tensor], state: Tensor) -> Any:
    return heads_first(f)(unscaled(x), x["k"], x["v"], x["a"], x["b"], x["log_decay"], initial_state=state)


NAIVE: dict[str, tuple[str, str, Any]] = {
    "gla": ("gla.naive", "naive_recurrent_gla", naive_gla),
    "hgrn2": ("gla.naive", "naive_recurrent_gla", naive_gla),
    "hgrn": ("hgrn.naive", "naive_recurrent_hgrn", naive_hgrn),
    "retnet": ("retention.naive", "naive_retention", naive_retention),
    "deltanet": ("delta_rule.naive", "delta_rule_recurrence", naive_delta),
    "gdn": ("gated_delta_rule.naive", "naive_recurrent_gated_delta_rule", naive_gdn),
    "kda": ("kda.naive", "naive_recurrent_kda", naive_gdn),
    "rwkv6": ("rwkv6.recurrent_naive", "naive_recurrent_rwkv6", naive_rwkv6),
    "rwkv7": ("generalized_delta_rule.dplr.naive", "dplr_recurrence", naive_rwkv7),
}


@pytest.mark.parametrize("mixer", NAIVE)
def test_recurrences_are_flas(monkeypatch: pytest.MonkeyPatch, mixer: str) -> None:
    """On what the mixer gives its recurrence, from the state of an earlier call (fla's retention takes none)."""
    pytest.importorskip("fla", reason="flash-linear-attention is not installed", exc_type=ImportError)
    module, name, call = NAIVE[mixer]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        naive = getattr(importlib.import_module(f"fla.ops.{module}"), name)
    calls: list[dict[str, Any]] = []

    def recorded(**x: Any) -> tuple[Tensor, Tensor]:
        calls.append(x)
        return recurrence(**x)

    monkeypatch.setattr(dispatch, "recurrence", recorded)
    model, cache = model_of(mixer).float(), Cache()
    for length in (13,) if mixer == "retnet" else (5, 13):
        model(tokens_of(2, length), cache=cache)
    read, state = calls[-1].pop("read"), calls[-1].pop("state")
    terms = {name: x for name, x in calls[-1].items() if x is not None}
    expected, last = call(naive, terms, state)
    got, got_last = recurrence(**terms, state=state, read=read)
    assert_close(got, expected)
    if last is not None:
        assert_close(got_last, last)
