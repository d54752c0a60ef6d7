"""Mixers against transformers' own torch code: its weights through the key map, then outputs and every gradient.

Both sides compute in fp64: where transformers says fp32, the test widens it, so that a norm's eps in the wrong place or
a decay rounded too early shows.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from helpers import assert_close
from torch import Tensor, nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from hybridscope import HybridConfig, HybridLM
from hybridscope.hooks.adapters.keys import KEYS, to_foreign, to_ours
from hybridscope.hooks.adapters.pretrained import without_fla
from hybridscope.hooks.passes import Pass

D, T = 16, 21
GDN = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 4, "linear_value_head_dim": 6}
MAMBA = {
    "mamba_n_heads": 8, "mamba_d_head": 4, "mamba_n_groups": 2, "mamba_d_state": 5, "mamba_chunk_size": 8,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
OURS_GDN = {"heads": 2, "value_heads": 4, "key_dim": 4, "value_dim": 6}
OURS_MAMBA = {"groups": 2, "key_dim": 5}
# Family: its layer, its config, the source in KEYS, our mixer, our config.
CASES: dict[str, tuple[str, dict[str, Any], str, str, dict[str, Any]]] = {
    "qwen3_next": ("Qwen3NextGatedDeltaNet", GDN, "qwen3_next", "gdn", OURS_GDN),
    "olmo_hybrid": (  # betas up to 2; its norm's eps is not the model's
        "OlmoHybridGatedDeltaNet", {**GDN, "linear_allow_neg_eigval": True}, "olmo_hybrid", "gdn",
        {**OURS_GDN, "negative_eigenvalues": True},
    ),
    "kimi_linear": (
        "KimiLinearDeltaAttention", {"linear_num_heads": 4, "linear_head_dim": 6}, "kimi_linear", "kda", {"key_dim": 6}
    ),
    "minimax": (
        "MiniMaxLightningAttention", {"num_attention_heads": 4, "head_dim": 6, "block_size": 8}, "lightning",
        "lightning", {"key_dim": 6},
    ),
    "mamba2": (
        "Mamba2Mixer", {"num_heads": 8, "head_dim": 4, "n_groups": 2, "state_size": 5, "chunk_size": 8}, "mamba2",
        "mamba2", OURS_MAMBA,
    ),
    "bamba": ("BambaMixer", MAMBA, "mamba2", "mamba2", OURS_MAMBA),
    "recurrent_gemma": (
        "RecurrentGemmaRecurrentBlock", {"num_attention_heads": 4, "lru_width": 24}, "hawk", "hawk", {"width": 24}
    ),
}  # fmt: skip
IGNORES_PADDING = {"recurrent_gemma"}
LAYER, LAYERS = 1, 4  # MiniMax's decays depend on the depth


class Double:
    """The module torch, its fp32 widened."""

    float32 = float = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@pytest.fixture
def modeling(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    """A family's modelling code, computing in fp64."""

    def widened(family: str) -> Any:
        if family not in CONFIG_MAPPING_NAMES:
            pytest.skip(f"this version of transformers has no {family}")
        with without_fla():
            code = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
        monkeypatch.setattr(code, "torch", Double())
        if family == "recurrent_gemma":  # a default argument, bound to fp32 already
            monkeypatch.setattr(code.RecurrentGemmaRglru._rnn_scan, "__defaults__", (torch.float64,))
        return code

    monkeypatch.setattr(Tensor, "float", Tensor.double)
    torch.set_default_dtype(torch.float64)
    yield widened
    torch.set_default_dtype(torch.float32)


def config_of(code: Any, family: str, **options: Any) -> Any:
    """A tiny config of transformers' own class (fla registers others under some of these names)."""
    build = getattr(code, CONFIG_MAPPING_NAMES[family])
    return build(hidden_size=D, num_hidden_layers=LAYERS, vocab_size=32, pad_token_id=0, **options)


def scramble(module: nn.Module) -> None:
    """Weights at which everything matters."""
    for name, parameter in module.named_parameters():
        nn.init.normal_(parameter, std=0.4)
        if name.endswith("recurrent_param"):  # slow decays
            parameter.data -= 3


def ours_of(entry: str, eps: float, **options: Any) -> nn.Module:
    config = HybridConfig(
        (entry,), LAYERS, D, 4, 32, n_kv_heads=2, norm_eps=eps, rope_base=10_000.0, mixers=options.get("mixers", {})
    )
    return HybridLM(config).layers[LAYER].attn


def pair(code: Any, family: str) -> tuple[nn.Module, nn.Module]:
    """Their layer, and our mixer with its weights."""
    layer, options, source, mixer, ours = CASES[family]
    theirs = getattr(code, layer)(config_of(code, family, **options), LAYER)
    scramble(theirs)
    norm = [part for part in theirs.modules() if hasattr(part, "variance_epsilon")]
    module = ours_of(mixer, norm[0].variance_epsilon if norm else 1e-6, mixers={mixer: ours})
    module.load_state_dict(to_ours(source, theirs.state_dict(), module))
    return theirs, module


def call(family: str, layer: nn.Module, x: Tensor, mask: Tensor | None) -> Tensor:
    if family == "recurrent_gemma":
        positions = torch.arange(T).expand(x.shape[:2])
        return layer(x, positions, None, use_cache=False)[0]
    if family == "minimax":
        return layer(x, None, mask)[0]
    return layer(x, attention_mask=mask)


def inputs(padded: bool) -> tuple[Tensor, Tensor]:
    """x [3,T,D] and mask; rows padded on the left, on the right, and not at all."""
    mask = torch.ones(3, T, dtype=torch.int64)
    if padded:
        mask[0, :5] = 0
        mask[1, -6:] = 0
    return torch.randn(3, T, D, requires_grad=True), mask


def run_of(mask: Tensor) -> Pass:
    return Pass(None if bool(mask.all()) else mask.bool(), None, 3, T, torch.device("cpu"))


@pytest.mark.parametrize(
    ("family", "padded"),
    [(family, False) for family in CASES] + [(family, True) for family in CASES if family not in IGNORES_PADDING],
)
def test_outputs_and_gradients_are_those_of_transformers(
    modeling: Callable[[str], Any], family: str, padded: bool
) -> None:
    """Gradients of all weights, carried over by the key map like the weights themselves, and of the input."""
    theirs, ours = pair(modeling(family), family)
    x, mask = inputs(padded)
    expected = call(family, theirs, x, mask if padded else None)
    got = ours(x, run_of(mask))
    real = mask.bool()
    assert_close(got[real], expected[real], "model")
    weights = torch.randn_like(got) * real[..., None]
    (expected_x,) = torch.autograd.grad((expected * weights).sum(), x, retain_graph=True)
    (got_x,) = torch.autograd.grad((got * weights).sum(), x, retain_graph=True)
    assert_close(got_x[real], expected_x[real], "gradient")
    (expected * weights).sum().backward()
    (got * weights).sum().backward()
    theirs_grad = {name: p.grad for name, p in theirs.named_parameters() if p.grad is not None}
    carried = to_ours(CASES[family][2], theirs_grad, ours)
    for name, parameter in ours.named_parameters():
        if (family, name) != ("kimi_linear", "gate_out.bias"):  # transformers' gate has none
            assert parameter.grad is not None, name
            assert_close(parameter.grad, carried[name], "gradient")


@pytest.mark.parametrize("family", CASES)
def test_weights_go_there_and_back(modeling: Callable[[str], Any], family: str) -> None:
    theirs, ours = pair(modeling(family), family)
    state = theirs.state_dict()
    back = to_foreign(CASES[family][2], ours, {name: torch.zeros_like(x) for name, x in state.items()})
    derived = {entry[0] for entry in KEYS[CASES[family][2]] if not entry[1]}  # stay as they are in the target
    assert back.keys() == state.keys()
    for name, tensor in back.items():
        assert tensor.shape == state[name].shape, name
        assert torch.equal(tensor, torch.zeros_like(tensor) if name in derived else state[name]), name


def test_jamba_attention_is_nope(modeling: Callable[[str], Any]) -> None:
    """Jamba's softmax layers have grouped keys and no positions; the names are ours already."""
    code = modeling("jamba")
    config = config_of(code, "jamba", num_attention_heads=4, num_key_value_heads=2, attn_implementation="sdpa")
    theirs = code.JambaAttention(config, LAYER)
    scramble(theirs)
    ours = ours_of("nope", 1e-6)
    ours.load_state_dict(theirs.state_dict())
    x, mask = inputs(True)
    seen = mask.bool()[:, None, None, :] & torch.ones(T, T, dtype=torch.bool).tril()
    compare(ours(x, run_of(mask)), theirs(x, seen | torch.eye(T, dtype=torch.bool))[0], x, mask.bool())


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
def test_falcon_h1s_layer_is_a_sum(modeling: Callable[[str], Any], padded: bool) -> None:
    """full+mamba2: attention and Mamba-2 read the same input, outputs summed."""
    code = modeling("falcon_h1")
    config = config_of(
        code, "falcon_h1", **MAMBA, mamba_d_ssm=32, mamba_rms_norm=True, mamba_norm_before_gate=False,
        intermediate_size=32, attn_implementation="sdpa",
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
    )  # fmt: skip
    whole = code.FalconH1Model(config)  # it gives its mixers their multipliers, all 1 here
    theirs = whole.layers[LAYER]
    scramble(theirs)
    ours = ours_of("full+mamba2", config.rms_norm_eps, mixers={"mamba2": OURS_MAMBA})
    attention, mamba = ours.mixers
    attention.load_state_dict(theirs.self_attn.state_dict())
    state = {name: x for name, x in theirs.mamba.state_dict().items() if name != "mup_vector"}
    mamba.load_state_dict(to_ours("mamba2", state, mamba))
    x, mask = inputs(padded)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    seen = mask.bool()[:, None, None, :] & torch.ones(T, T, dtype=torch.bool).tril() | torch.eye(T, dtype=torch.bool)
    expected = theirs.mamba(x, attention_mask=mask) + theirs.self_attn(x, whole.rotary_emb(x, positions), seen)[0]
    compare(ours(x, run_of(mask)), expected, x, mask.bool())


def compare(got: Tensor, expected: Tensor, x: Tensor, real: Tensor) -> None:
    """Outputs, and gradients of the input."""
    assert_close(got[real], expected[real], "model")
    weights = torch.randn_like(got) * real[..., None]
    grads = [torch.autograd.grad((out * weights).sum(), x)[0] for out in (got, expected)]
    assert_close(grads[0][real], grads[1][real], "gradient")
