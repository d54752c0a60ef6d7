"""Checkpoints of flash-linear-attention: every family of the zoo is read and written back tensor by tensor, and what a
config says that HybridLM has no form for is refused by name."""

from __future__ import annotations

import importlib.machinery
import json
import sys
import types
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import hybridscope as hs
from hybridscope.hooks.adapters import fla
from hybridscope.hooks.adapters.fla_config import FAMILIES, read_config, write_config

D, L, V = 32, 3, 40
ATTN = {"layers": [1], "num_heads": 4, "num_kv_heads": 2, "window_size": None, "rope_theta": 5000.0, "qkv_bias": False}
WINDOW = {**ATTN, "layers": [2], "window_size": 4}
BASE = {"hidden_size": D, "num_hidden_layers": L, "intermediate_size": 48, "vocab_size": V, "norm_eps": 1e-5}
RANKS = {"decay_low_rank_dim": 3, "gate_low_rank_dim": 5, "a_low_rank_dim": 2, "v_low_rank_dim": 7}

# Family: fla's config class, its arguments, and the layers they stand for.
MODELS: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "transformer": (
        "TransformerConfig", {"num_heads": 4, "num_kv_heads": 2, "qk_norm": True, "window_size": 4}, ["swa:4"] * 3,
    ),
    "gla": ("GLAConfig", {"num_heads": 4, "expand_k": 0.5, "expand_v": 1.0, "attn": ATTN}, ["gla", "full", "gla"]),
    "hgrn": ("HGRNConfig", {"expand_ratio": 1, "attn": ATTN}, ["hgrn", "full", "hgrn"]),
    "hgrn2": ("HGRN2Config", {"num_heads": 4, "expand_ratio": 8, "attn": ATTN}, ["hgrn2", "full", "hgrn2"]),
    "retnet": (
        "RetNetConfig", {"num_heads": 4, "expand_k": 1, "expand_v": 2, "attn": ATTN}, ["retnet", "full", "retnet"],
    ),
    "delta_net": (
        "DeltaNetConfig", {"num_heads": 4, "expand_k": 1, "expand_v": 1.5, "attn": WINDOW},
        ["deltanet", "deltanet", "swa:4"],
    ),
    "gated_deltanet": (
        "GatedDeltaNetConfig",
        {"num_heads": 2, "num_v_heads": 4, "head_dim": 8, "expand_v": 1.5, "conv_size": 3, "attn": [ATTN, WINDOW]},
        ["gdn", "full", "swa:4"],
    ),
    "kda": (
        "KDAConfig", {"num_heads": 2, "num_v_heads": 4, "head_dim": 8, "expand_v": 1, "allow_neg_eigval": True},
        ["kda"] * 3,
    ),
    "rwkv6": (
        "RWKV6Config",
        {"num_heads": 4, "expand_k": 0.5, "expand_v": 1, "proj_low_rank_dim": 3, "gate_low_rank_dim": 5}, ["rwkv6"] * 3,
    ),
    "rwkv7": ("RWKV7Config", {"num_heads": 4, "head_dim": 8, **RANKS}, ["rwkv7"] * 3),
}  # fmt: skip

families = pytest.mark.parametrize("family", MODELS)


def content(family: str, **more: Any) -> dict[str, Any]:
    """config.json of a tiny model."""
    return {"model_type": family, **BASE, **MODELS[family][1], "tie_word_embeddings": False, **more}


def noisy(model: nn.Module) -> Any:
    """Every parameter away from where it starts, so that each matters."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def model_of(family: str) -> hs.HybridLM:
    return noisy(hs.HybridLM(read_config(content(family))))


def put(folder: Path, family: str = "gated_deltanet") -> tuple[Path, hs.HybridLM]:
    """A checkpoint as fla writes it, and the model that is in it."""
    model = model_of(family)
    fla.save(model, folder / family)
    return folder / family, model


def rewrite(folder: Path, **weights: Tensor | None) -> None:
    """Change tensors of a checkpoint: __ stands for a point; None takes one away."""
    file = folder / "model.safetensors"
    changes = {name.replace("__", "."): x for name, x in weights.items()}
    save_file({n: x for n, x in {**load_file(file), **changes}.items() if x is not None}, file)


def reconfigure(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


# Configs


def test_every_family_of_the_zoo_is_here() -> None:
    assert set(MODELS) == set(FAMILIES)


@families
def test_config_there_and_back(family: str) -> None:
    original = content(family)
    config = read_config(original)
    assert list(config.layers) == MODELS[family][2]
    back = write_config(hs.HybridLM(config))
    for name, value in original.items():
        assert back[name] == value, name
    assert read_config(back) == config


def test_the_layer_list_counts_and_not_the_name() -> None:
    """Published "hybrid-3-1" checkpoints: attention in one layer of three."""
    layers = [2, 5, 8, 11, 14, 17, 20, 23]
    config = read_config(content("gla", num_hidden_layers=24, attn={**ATTN, "layers": layers}))
    assert [n for n, layer in enumerate(config.layers) if layer == "full"] == layers


def test_widths_that_fla_derives() -> None:
    assert read_config(content("gla", hidden_size=2048, intermediate_size=None, hidden_ratio=4)).d_ff == 5632
    assert read_config(content("retnet", hidden_size=2048, intermediate_size=None, hidden_ratio=2)).d_ff == 2816
    assert read_config(content("rwkv6", hidden_size=2048, intermediate_size=None, hidden_ratio=3.5)).d_ff == 7168


@pytest.mark.parametrize(
    ("family", "changes", "named"),
    [
        ("gla", {"use_short_conv": True}, "use_short_conv=True"),
        ("gla", {"num_kv_heads": 2}, "num_kv_heads=2"),
        ("gla", {"attnres_block_size": 2}, "attnres_block_size=2"),
        ("gla", {"hidden_act": "powlu"}, "hidden_act='powlu'"),
        ("delta_net", {"qk_norm": "sum"}, "qk_norm='sum'"),
        ("gated_deltanet", {"output_gate_activation": "sigmoid"}, "output_gate_activation='sigmoid'"),
        ("kda", {"safe_gate": True, "lower_bound": -5.0}, "safe_gate=True"),
        ("rwkv7", {"norm_first": False}, "norm_first=False"),
        ("rwkv7", {"attn": ATTN}, "no attention layer with RWKV's channel mix"),
        ("rwkv7", {"value_dim": [32, 64, 32]}, "value_dim"),
        ("transformer", {"norm_eps": 1e-6}, "norm_eps=1e-06"),
        ("transformer", {"qkv_bias": True}, "qkv_bias=True"),
        ("gla", {"attn": {**ATTN, "qkv_bias": True}}, "qkv_bias=True"),
        ("gla", {"attn": {**ATTN, "layers": [7]}}, "layer 7 is not there; num_hidden_layers=3"),
        ("gla", {"attn": [ATTN, {**WINDOW, "layers": [1]}]}, "layer 1 is named twice"),
        ("gla", {"attn": [ATTN, {**WINDOW, "num_heads": 8}]}, "sections differ"),
        ("samba", {}, "'samba' is not a family of fla read here"),
    ],
)
def test_what_hybridlm_has_no_form_for_is_named(family: str, changes: dict[str, Any], named: str) -> None:
    config = content("gla" if family == "samba" else family, **changes) | {"model_type": family}
    with pytest.raises(ValueError, match=rf"^here: .*{named}"):
        read_config(config, "here")
    with pytest.raises(ValueError, match="here: gla config lacks 'num_heads'"):
        read_config({name: value for name, value in content("gla").items() if name != "num_heads"}, "here")


@pytest.mark.parametrize(
    ("pattern", "named"),
    [
        (["gdn", "kda"], "'gdn' and 'kda'"), (["gdn", "nope"], "'gdn' and 'nope'"), (["swa:4|gdn"], "gdn"),
        (["hawk"], "'hawk' is not one of the mixers written here"), (["swa:4", "full"], "one window for all layers"),
        (["rwkv7", "full"], "rwkv7 has layer norms"),
    ],
)  # fmt: skip
def test_what_fla_has_no_form_for_is_named(pattern: list[str], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        write_config(hs.HybridLM(hs.HybridConfig(pattern, len(pattern), D, 4, V)))


# Weights


@families
def test_folder_there_and_back(family: str, tmp_path: Path) -> None:
    """What fla would have saved loads as the same model, and is written again as it was."""
    folder, model = put(tmp_path, family)
    loaded = hs.load(folder)
    tokens = torch.randint(V, (2, 11))
    assert torch.equal(loaded(tokens), model(tokens))
    assert [site.kind for site in loaded.sites] == [site.kind for site in model.sites]
    fla.save(loaded, tmp_path / "again")
    first, again = (load_file(f / "model.safetensors") for f in (folder, tmp_path / "again"))
    assert first.keys() == again.keys()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert json.loads((folder / "config.json").read_text()) == json.loads((tmp_path / "again/config.json").read_text())


def test_loaded_models_take_every_switch_and_are_saved_as_ours(tmp_path: Path) -> None:
    folder, _ = put(tmp_path)
    model = hs.load(folder, dtype="float64")
    tokens = torch.randint(V, (1, 12))
    with model.cap(full=2, recurrent=3), model.record(resid="last", stats=[-1]) as rec:
        capped = model(tokens)
    assert rec.stats(1).visible.max() == 2
    assert not torch.equal(capped, model(tokens))
    model.save(tmp_path / "ours")
    again = hs.load(tmp_path / "ours")
    assert torch.equal(again(tokens), model(tokens))
    assert write_config(again) == write_config(model)  # with what fla's config said beside the model


def test_bf16_stays_bf16_and_tied_tables_are_one(tmp_path: Path) -> None:
    config = read_config(content("hgrn2", tie_word_embeddings=True))
    fla.save(noisy(hs.HybridLM(config)).bfloat16(), tmp_path / "a")
    assert "lm_head.weight" not in load_file(tmp_path / "a/model.safetensors")
    model = hs.load(tmp_path / "a")
    assert isinstance(model, hs.HybridLM)
    assert model.embed.weight is model.unembed.weight
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


def test_dead_tensors_of_published_checkpoints_are_passed_over(tmp_path: Path) -> None:
    """fla's Gated DeltaNet used to keep a D that it never read."""
    folder, model = put(tmp_path)
    rewrite(folder, model__layers__0__attn__D=torch.ones(4), model__layers__1__attn__rotary__inv_freq=torch.ones(4))
    tokens = torch.randint(V, (1, 8))
    assert torch.equal(hs.load(folder)(tokens), model(tokens))


def test_lower_bounds_of_the_whole_model_move_as_they_are(tmp_path: Path) -> None:
    folder, model = put(tmp_path, "hgrn")
    bounds = load_file(folder / "model.safetensors")["model.lower_bounds"]
    assert model.lower_bounds is not None
    assert torch.equal(bounds, model.lower_bounds)
    rewrite(folder, model__lower_bounds=None)
    with pytest.raises(ValueError, match=r"lacks tensor 'model\.lower_bounds'"):
        hs.load(folder)


def test_shifts_of_the_first_rwkv7(tmp_path: Path) -> None:
    folder, model = put(tmp_path, "rwkv7")
    weights = load_file(folder / "model.safetensors")
    names = [f"model.layers.0.attn.x_{mix}" for mix in "rwkvag"]
    joined = torch.cat([weights[name] for name in names])[:, 0]
    rewrite(folder, **{name.replace(".", "__"): None for name in names}, model__layers__0__attn__x_x=joined)
    tokens = torch.randint(V, (1, 8))
    assert torch.equal(hs.load(folder)(tokens), model(tokens))


# Bad input


def test_layer_list_and_weights_that_disagree_are_named_with_the_layer(tmp_path: Path) -> None:
    folder, _ = put(tmp_path)
    reconfigure(folder, attn={**ATTN, "layers": [2]})
    with pytest.raises(ValueError, match=r"model\.layers\.1\.attn.*disagree on layer 1, by the config 'gdn'"):
        hs.load(folder)
    reconfigure(folder, attn={**ATTN, "layers": [0, 1, 2]})
    with pytest.raises(ValueError, match=r"unknown tensor 'model\.layers\.0.*on layer 0, by the config 'full'"):
        hs.load(folder)
    reconfigure(folder, attn=[ATTN, WINDOW], num_hidden_layers=4)
    with pytest.raises(ValueError, match=r"lacks .*model\.layers\.3\.attn_norm"):
        hs.load(folder)
    reconfigure(folder, attn=ATTN, num_hidden_layers=2)
    with pytest.raises(ValueError, match="has layer 2, but its config has 2 layers"):
        hs.load(folder)


def test_weights_that_do_not_fit_are_named(tmp_path: Path) -> None:
    folder, _ = put(tmp_path)
    before = load_file(folder / "model.safetensors")
    norm = "model__layers__0__attn_norm__weight"
    for change, named in (
        ({norm: torch.zeros(7)}, r"weight has shape \(7,\); the config asks for \(32,\)"),
        ({norm: torch.full((D,), torch.nan)}, r"blocks\.0\.ln1\.weight holds NaN"),
        ({norm: None}, r"lacks tensor 'model\.layers\.0\.attn_norm\.weight'"),
        ({"extra": torch.zeros(1)}, "unknown tensor 'extra'"),
        ({"model__embeddings__weight": None}, r"lacks tensor 'model\.embeddings\.weight'"),
    ):
        rewrite(folder, **change)
        with pytest.raises(ValueError, match=named):
            hs.load(folder)
        save_file(before, folder / "model.safetensors")


def test_missing_shards_and_unknown_options(tmp_path: Path) -> None:
    folder, _ = put(tmp_path)
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    with pytest.raises(
        FileNotFoundError, match=r"model-00002-of-00002\.safetensors: missing; model\.safetensors\.index"
    ):
        hs.load(folder)
    with pytest.raises(
        ValueError, match=r"unknown option 'device_map' for a checkpoint of fla; it takes: dtype, device"
    ):
        hs.load(folder, device_map="auto")
    with pytest.raises(ValueError, match=r"revision='main': .* is a local folder"):
        hs.load(folder, revision="main")
    with pytest.raises(ValueError, match="is not empty"):
        fla.save(model_of("gla"), folder)


# fla's own classes, where it is installed (or its sources are on PYTHONPATH)


@pytest.fixture(scope="module")
def fla_models() -> Any:
    """fla.models; its softmax attention asks for flash-attn, whose functions are stubs here."""
    stub: Any = types.ModuleType("flash_attn")
    stub.__spec__ = importlib.machinery.ModuleSpec("flash_attn", None)
    stub.flash_attn_func = stub.flash_attn_varlen_func = nn.functional.scaled_dot_product_attention
    before = sys.modules.setdefault("flash_attn", stub)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield pytest.importorskip(
                "fla.models", reason="flash-linear-attention is not installed", exc_type=ImportError
            )
    finally:
        if before is stub:
            del sys.modules["flash_attn"]


@families
def test_flas_own_models_there_and_back(family: str, fla_models: Any, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    kind, options, layers = MODELS[family]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = noisy(AutoModelForCausalLM.from_config(getattr(fla_models, kind)(**BASE, **options)))
        theirs.save_pretrained(tmp_path / "a")
    ours = hs.load(tmp_path / "a")
    assert isinstance(ours, hs.HybridLM)
    assert list(ours.config.layers) == layers
    tokens = torch.randint(V, (1, 8))
    assert torch.equal(hs.load(theirs)(tokens), ours(tokens))  # the model object too
    fla.save(ours, tmp_path / "b")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "b")
    assert type(again) is type(theirs)
    state, back = theirs.state_dict(), again.state_dict()
    assert state.keys() == back.keys()
    for name, tensor in state.items():
        assert torch.equal(tensor, back[name]), name
    assert {n: x for n, x in again.config.to_dict().items() if n not in ("_name_or_path", "dtype")} == {
        n: x for n, x in theirs.config.to_dict().items() if n not in ("_name_or_path", "dtype")
    }
