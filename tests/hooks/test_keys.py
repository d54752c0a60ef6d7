"""The key map: every tensor of a foreign layer has its place in ours and comes back as it was; misfits are named."""

from __future__ import annotations

import importlib
import warnings

import pytest
import torch
from fla_layers import LAYERS, D, H, weights
from helpers import RECURRENT
from torch import nn

from hybridscope import HybridConfig, HybridLM
from hybridscope.hooks.adapters.keys import KEYS, to_foreign, to_ours


def ours_of(source: str, layer: int = 1) -> nn.Module:
    """Our mixer or channel mix for a source, in a model of two layers."""
    mixer = source.split(".")[0]
    block = HybridLM(HybridConfig((mixer,), 2, D, H, 32, d_ff=24, mixers={mixer: LAYERS[source][3]})).layers[layer]
    return block.mlp if source.endswith(".mlp") else block.attn


@pytest.mark.parametrize("source", LAYERS)
def test_fla_weights_go_there_and_back(source: str) -> None:
    state, module = weights(source), ours_of(source)
    module.double().load_state_dict(to_ours(source, state, module))  # strict: all of ours, in our shapes
    back = to_foreign(source, module, {name: torch.empty_like(x) for name, x in state.items()})
    assert back.keys() == state.keys()
    for name, tensor in back.items():
        assert torch.equal(tensor, state[name]), name


@pytest.mark.parametrize("source", LAYERS)
def test_names_and_shapes_are_flas_own(source: str) -> None:
    pytest.importorskip("fla", reason="flash-linear-attention is not installed", exc_type=ImportError)
    module, name, options, _, shapes = LAYERS[source]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        build = getattr(importlib.import_module(module), name)
        depth = {"layer_idx": 1, "num_hidden_layers": 2} if source.startswith("rwkv7") else {"layer_idx": 1}
        layer = build(hidden_size=D, **options, **depth)
    assert {name: tuple(x.shape) for name, x in layer.state_dict().items()} == shapes


def test_every_recurrent_mixer_has_a_source() -> None:
    assert set(RECURRENT) <= set(KEYS)


def test_several_tensors_become_one() -> None:
    """The convolutions of queries, keys and values, in this order; token shifts as rows."""
    state = weights("gdn")
    parts = [state[f"{name}_conv1d.weight"] for name in "qkv"]
    assert torch.equal(to_ours("gdn", state, ours_of("gdn"))["conv.weight"], torch.cat(parts)[:, 0])
    state = weights("rwkv7")
    rows = torch.cat([state[f"x_{mix}"] for mix in "rwkvag"])[:, 0]
    assert torch.equal(to_ours("rwkv7", state, ours_of("rwkv7"))["shifts"], rows)


def test_one_tensor_becomes_several_head_by_head() -> None:
    """MiniMax's qkv_proj holds query, key and value of head 0, then of head 1, ..."""
    module = HybridLM(HybridConfig(("lightning",), 1, D, H, 32)).layers[0].attn
    like = {
        "qkv_proj.weight": torch.arange(48.0)[:, None].expand(48, D), "output_gate.weight": torch.zeros(16, D),
        "norm.weight": torch.zeros(16), "out_proj.weight": torch.zeros(D, 16), "slope_rate": torch.ones(4, 1, 1),
    }  # fmt: skip
    ours = to_ours("lightning", like, module)
    first = {name: ours[f"{name}_proj.weight"][:, 0].view(4, 4)[:, 0].tolist() for name in "qkv"}
    assert first == {"q": [0, 12, 24, 36], "k": [4, 16, 28, 40], "v": [8, 20, 32, 44]}
    assert torch.equal(to_foreign("lightning", module, like)["slope_rate"], like["slope_rate"])  # fixed by the config


def test_only_later_rwkv7_layers_blend_values() -> None:
    state = {name: x for name, x in weights("rwkv7").items() if not name.startswith("v_lora")}
    module = ours_of("rwkv7", layer=0)
    module.load_state_dict(to_ours("rwkv7", state, module))
    with pytest.raises(ValueError, match=r"rwkv7: lacks 'v_lora\.lora\.0\.weight'; it has a_lora"):
        to_ours("rwkv7", state, ours_of("rwkv7"))


def test_unfused_norms_have_another_name() -> None:
    state = weights("gla")
    state["g_norm.weight"] = state.pop("g_norm_swish_gate.weight")  # fuse_norm=False
    module = ours_of("gla").double()
    module.load_state_dict(to_ours("gla", state, module))
    assert torch.equal(to_foreign("gla", module, state)["g_norm.weight"], state["g_norm.weight"])


def test_errors_name_what_does_not_fit() -> None:
    module = ours_of("gla")
    state = weights("gla")
    with pytest.raises(ValueError, match="unknown source 'abc' of weights; known: deltanet, gdn, gla"):
        to_ours("abc", state, module)
    with pytest.raises(ValueError, match=r"gla: lacks 'g_proj\.weight'; it has g_norm_swish"):  # use_output_gate=False
        to_ours("gla", {name: x for name, x in state.items() if name != "g_proj.weight"}, module)
    with pytest.raises(ValueError, match=r"our GatedLinearAttention has no place for 'q_conv1d\.weight'; it has decay"):
        to_ours("gla", {**state, "q_conv1d.weight": torch.zeros(8, 1, 4)}, module)  # use_short_conv=True
    with pytest.raises(ValueError, match=r"gla: q_proj\.weight \[16, 16\] does not fit q_proj\.weight \[8, 16\]"):
        to_ours("gla", {**state, "q_proj.weight": torch.zeros(16, 16)}, module)
    with pytest.raises(ValueError, match=r"gla: gk_proj\.0\.weight \[16, 3\] does not fit decay_in\.weight \[3, 16\]"):
        to_ours("gla", {**state, "gk_proj.0.weight": torch.zeros(16, 3)}, module)
    with pytest.raises(ValueError, match=r"our GatedLinearAttention has nothing for 'q_conv1d\.weight'"):
        to_foreign("gla", module, {**state, "q_conv1d.weight": torch.zeros(8, 1, 4)})


def test_what_a_foreign_layer_lacks_must_be_zero() -> None:
    """transformers' Kimi gate has no bias."""
    module = HybridLM(HybridConfig(("kda",), 1, D, H, 32)).layers[0].attn
    like = {theirs: module.state_dict()[ours] for theirs, ours in KEYS["kimi_linear"] if theirs}
    assert to_foreign("kimi_linear", module, like).keys() == like.keys()
    nn.init.ones_(module.gate_out.bias)
    with pytest.raises(ValueError, match=r"kimi_linear: has no 'gate_out\.bias', so that ours must be zero"):
        to_foreign("kimi_linear", module, like)
