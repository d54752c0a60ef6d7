"""The mixers as parts of a model: their hook points, parallel ones in a layer, what layers pass on to each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import RECURRENT, VOCAB, assert_close, model_of, tokens_of
from torch import Tensor

import hybridscope as hs
from hybridscope.hooks.passes import Cache

T = 11
POINTS = {
    "gdn": "beta log_decay", "kda": "beta log_decay", "mamba2": "beta log_decay", "deltanet": "beta",
    "retnet": "rot_q rot_k log_decay", "rwkv7": "rate log_decay",
}  # fmt: skip


def points(mixer: str) -> list[str]:
    return [f"hook_{p}" for p in ["q", "k", "v", "z", "state", *POINTS.get(mixer, "log_decay").split()]]


# Hook points


@pytest.mark.parametrize("mixer", RECURRENT)
def test_a_mixer_has_the_points_it_advertises(mixer: str) -> None:
    inner = [name for name in model_of(mixer).hook_dict if ".attn." in name]
    assert sorted(inner) == sorted(f"blocks.0.attn.{p}" for p in points(mixer))


@pytest.mark.parametrize(("mixer", "point"), [(m, p) for m in RECURRENT for p in points(m)])
def test_overwriting_a_point_changes_the_output(mixer: str, point: str) -> None:
    """Once a pass; the state shows in the continuation, everything else in the logits."""
    model, tokens = model_of(mixer), tokens_of(2, T)
    name, fired = f"blocks.0.attn.{point}", []

    def run(change: float) -> Tensor:
        def overwrite(value: Tensor, hook: Any) -> Tensor:
            fired.append(hook.name)
            return change * value

        cache = Cache()
        logits = model.run_with_hooks(tokens, cache=cache, fwd_hooks=[(name, overwrite)])
        return model(tokens[:, :3], cache=cache) if point == "hook_state" else logits

    before = run(1.0)
    assert not torch.equal(run(0.5), before)
    assert fired == [name, name]
    assert torch.equal(run(1.0), before)


# Parallel mixers


def test_parallel_sites_share_the_heads_or_have_them_all() -> None:
    model = model_of("swa:3|gdn", "full+mamba2", n_kv_heads=2)
    assert [(s.layer, s.index, s.mixer, s.heads) for s in model.sites] == [
        (0, 0, "swa:3", 2), (0, 1, "gdn", 2), (1, 0, "full", 4), (1, 1, "mamba2", 8),
    ]  # fmt: skip
    assert model.sites[1].name == "blocks.0.attn.parts.1"
    assert f"{model.sites[1].name}.hook_beta" in model.hook_dict


def test_a_layer_is_the_sum_of_its_sites() -> None:
    """With the heads of one site off, the other alone is left."""
    model, tokens = model_of("swa:3|gdn"), tokens_of(2, T)

    def mixed(off: int | None) -> Tensor:
        with model.ablate(heads=[] if off is None else [(0, off, h) for h in range(2)]):
            return model.run_with_cache(tokens)[1]["blocks.0.hook_attn_out"]

    assert_close(mixed(0) + mixed(1), mixed(None), "model")
    assert float(mixed(0).abs().max()) > 1e-3
    assert float(mixed(1).abs().max()) > 1e-3


def test_caps_take_a_kind_or_a_site_of_a_layer() -> None:
    model, tokens = model_of("full|gdn"), tokens_of(1, T)
    free = model(tokens)
    outs = []
    for cap in ({"full": 4}, {"recurrent": 4}, {(0, 0): 4}, {(0, 1): 4}):
        with model.cap(cap) if (0, 0) in cap or (0, 1) in cap else model.cap(**cap):
            assert model.reach() is None
            outs.append(model(tokens))
    assert torch.equal(outs[0], outs[2])
    assert torch.equal(outs[1], outs[3])
    assert not torch.equal(outs[0], outs[1])
    assert not torch.equal(outs[1], free)
    with model.cap({0: 4}):
        assert model.reach() == 4
        model(tokens)


def test_knockout_of_a_layer_cuts_its_softmax_sites() -> None:
    model, tokens = model_of("gdn|swa:3", "gdn"), tokens_of(1, T)
    edge = {"rows": [5], "keys": [4]}
    with model.knockout(**edge, layers=[0]):
        by_layer = model(tokens)
    with model.knockout(**edge, heads=[(0, 1, 0), (0, 1, 1)]):
        assert torch.equal(by_layer, model(tokens))
    assert not torch.equal(by_layer, model(tokens))
    with pytest.raises(ValueError, match="no softmax to cut"), model.knockout(**edge, layers=[1]):
        pass


def test_statistics_and_tables_name_the_site() -> None:
    model, tokens = model_of("gdn|swa:3", "full"), tokens_of(2, T)
    with model.record(stats=[-1]) as rec:
        model(tokens)
    assert rec.stats(0, 1).entropy.shape == (2, 1, 2)
    table = rec.table()
    assert sorted(table[["layer", "site"]].drop_duplicates().itertuples(index=False, name=None)) == [(0, 1), (1, 0)]
    with pytest.raises(ValueError, match="recurrent"):
        rec.stats(0, 0)


def test_checkpoints_and_drift_keep_the_sites(tmp_path: Path) -> None:
    layers = ["swa:3|gdn", "full", "full", "nope+rwkv7", "hgrn", "hgrn2"]  # no period
    torch.manual_seed(0)
    model = hs.HybridLM(hs.HybridConfig(layers, 6, 16, 4, VOCAB)).double()
    for step in (1, 2):
        with torch.no_grad():
            model.layers[0].mixers[0].q_proj.weight.mul_(1.5)
        model.save(tmp_path / f"step-{step:06d}")
    again = hs.load(tmp_path / "step-000002")
    assert again.config.layers == tuple(layers)
    assert torch.equal(again(tokens_of(1, 5)), model.eval()(tokens_of(1, 5)))
    drift = hs.qk_drift(hs.ladder(tmp_path))
    changed = drift[(drift.step == 1) & (drift.q > 0)]
    assert sorted(changed[["layer", "site", "head"]].itertuples(index=False, name=None)) == [(0, 0, 0), (0, 0, 1)]
    assert sorted(drift[["layer", "site"]].drop_duplicates().itertuples(index=False, name=None)) == [
        (0, 0), (1, 0), (2, 0), (3, 0),
    ]  # fmt: skip


def test_drift_asks_which_of_two_softmax_sites_is_meant(tmp_path: Path) -> None:
    model_of("full|swa:3").save(tmp_path / "step-000001")
    assert len(hs.qk_drift(tmp_path, heads=[(0, 1, 1)])) == 1
    with pytest.raises(ValueError, match=r"several softmax sites; expected \(layer, site, head\)"):
        hs.qk_drift(tmp_path, heads=[(0, 1)])


# What layers pass on


@pytest.mark.parametrize("mixer", ["hgrn", "hgrn2"])
def test_forget_gates_are_bounded_from_below_by_depth(mixer: str) -> None:
    """Fresh bounds rise evenly: layer l of L forgets at most 1 - l/L a step; the first is free."""
    L = 4
    model = model_of(mixer, layers=L)
    assert model.lower_bounds is not None
    with torch.no_grad():
        model.lower_bounds.zero_()
        for block in model.layers:
            block.attn.decay_proj.weight.mul_(50)
    _, seen = model.run_with_cache(tokens_of(4, 64))
    for layer in range(L):
        least = float(seen[f"blocks.{layer}.attn.hook_log_decay"].exp().min())
        assert layer / L <= least < layer / L + 0.02


def test_without_bounds_or_beyond_the_first_layer_there_is_no_parameter() -> None:
    assert model_of("hgrn", "full").lower_bounds is None
    assert model_of("full", "hgrn").lower_bounds is not None
    assert model_of("hgrn2", layers=3, mixers={"hgrn2": {"lower_bounds": False}}).lower_bounds is None
    with pytest.raises(ValueError, match=r"32 forget gates.*lower_bounds to false"):
        model_of("hgrn", layers=2, mixers={"hgrn": {"width": 32}})


def test_rwkv7_layers_blend_in_the_values_of_the_first() -> None:
    """The first RWKV-7 layer, wherever it stands, gives its values; later ones lean on them by their own gates."""
    model, tokens = model_of("full", "rwkv7", "rwkv7"), tokens_of(1, T)
    first, second = model.layers[1].attn, model.layers[2].attn
    assert not hasattr(first, "blend")
    with torch.no_grad():
        for weight in (second.blend.enter.weight, second.blend.leave.weight):
            weight.zero_()
        second.blend.leave.bias.fill_(50.0)  # sigmoid 1: the first layer's values and nothing else
    _, seen = model.run_with_cache(tokens)
    assert_close(seen["blocks.2.attn.hook_v"], seen["blocks.1.attn.hook_v"], "model")


# Numbers


@pytest.mark.parametrize("mixer", [*RECURRENT, "full", "swa:3|gdn"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_fresh_model_runs_in_any_dtype(mixer: str, dtype: torch.dtype) -> None:
    """As initialised, logits in the model's dtype, close to fp64's; decoding runs too."""
    torch.manual_seed(0)
    model = hs.HybridLM(hs.HybridConfig((mixer,), 2, 32, 4, VOCAB, init_std=0.1)).eval().requires_grad_(False)
    tokens = tokens_of(2, 40)
    exact = model.double()(tokens)
    out = model.to(dtype)(tokens)
    assert out.dtype == dtype
    assert float((out.double() - exact).norm() / exact.norm()) < (
        1e-5 if dtype == torch.float32 else 0.1
    )  # bf16: 2^-8 an operation
    cache = Cache()
    assert torch.cat([model(tokens[:, a : a + 10], cache=cache) for a in range(0, 40, 10)], 1).isfinite().all()


@pytest.mark.parametrize("mixer", RECURRENT)
@pytest.mark.parametrize("cap", [None, 6])
def test_autocast_leaves_the_recurrence_in_fp32(mixer: str, cap: int | None) -> None:
    """Whatever autocast makes of the projections, the state and its products stay fp32: as exact as without it."""
    model, tokens = model_of(mixer).float(), tokens_of(2, T)
    cache, seen = Cache(), {}
    points = [(f"blocks.0.attn.hook_{p}", lambda x, hook: seen.__setitem__(hook.name, x.dtype)) for p in ("q", "state")]
    with torch.autocast("cpu", torch.bfloat16), model.cap(recurrent=cap):
        model.run_with_hooks(tokens, cache=cache, fwd_hooks=points)
        model(tokens[:, :2], cache=cache)
    entry = cache.sites["blocks.0.attn"]
    kept = entry.state if cap is None else entry.ring.keys
    assert kept.dtype == torch.float32
    assert not torch.equal(kept, kept.bfloat16().float())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gdn": {"heads": 2, "value_heads": 3}}, "gdn value_heads=3 must be a multiple of heads=2"),
        ({"kda": {"heads": 2, "value_heads": 3}}, "kda value_heads=3 must be a multiple of heads=2"),
        ({"hawk": {"width": 10}}, "hawk width=10 must be a multiple of heads=4"),
        ({"mamba2": {"groups": 3}}, "mamba2 groups=3 must divide heads=8"),
        ({"retnet": {"key_dim": 3}}, "retnet key_dim=3 must be even"),
    ],
)
def test_widths_that_do_not_fit_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        model_of(*options, mixers=options)
