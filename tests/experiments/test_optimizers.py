"""AdamW by default; with `train.optimizer = "muon"`, Muon for the linear maps inside blocks; and what a step does."""

from __future__ import annotations

import numpy as np
import pytest
import tiny
import torch
from helpers import RECURRENT
from tiny import assert_same_run, killed_at, losses

import hybridscope as hs
from hybridscope.experiments import train as module
from hybridscope.experiments.train import make_optimizers, schedule, train

MIXED = ('model.pattern=["swa:4", "gdn", "full"]', "model.n_layers=3", "model.qk_norm=true")
MUON = (*MIXED, "train.optimizer=muon")


def split(config) -> tuple[list[torch.optim.Optimizer], list[set[str]]]:
    """The optimisers, and the names of the parameters each has."""
    model = hs.HybridLM(config.hybrid())
    names = {id(p): name for name, p in model.named_parameters()}
    optimizers = make_optimizers(model, config)
    return optimizers, [{names[id(p)] for g in o.param_groups for p in g["params"]} for o in optimizers]


def test_adamw_is_the_default(tmp_path):
    config = tiny.config(tmp_path, *MIXED)
    [optimizer], [names] = split(config)
    assert isinstance(optimizer, torch.optim.AdamW)
    assert names == {name for name, _ in hs.HybridLM(config.hybrid()).named_parameters()}


@pytest.mark.parametrize("mixer", RECURRENT)
def test_only_linear_maps_and_embeddings_decay(tmp_path, mixer):
    """Not what starts a gate, a shift, a bonus, a bound, a norm or a convolution, whatever its shape."""
    config = tiny.config(tmp_path, f'model.pattern=["{mixer}", "full"]', "model.n_layers=4")
    model = hs.HybridLM(config.hybrid())
    names = {id(p): name for name, p in model.named_parameters()}
    [optimizer] = make_optimizers(model, config)
    decays = {names[id(p)] for g in optimizer.param_groups if g["weight_decay"] for p in g["params"]}
    assert {"embed.weight", "unembed.weight", "blocks.1.mlp.up_proj.weight", "blocks.0.attn.o_proj.weight"} <= decays
    odd = ("conv.", "norm", "ln", "shift", "bonus", "rate", "kappa", "removal", "bias", "bounds", "skip", "mix_out")
    assert not [
        name for name in decays if any(part in name for part in odd) and "enter" not in name and "leave" not in name
    ]
    assert all(p.ndim >= 2 for name, p in model.named_parameters() if name in decays)


@pytest.mark.parametrize("tied", ["true", "false"])
def test_muon_takes_linear_maps_inside_blocks_and_nothing_else(tmp_path, tied):
    config = tiny.config(tmp_path, *MUON, f"model.tie_embeddings={tied}")
    [adamw, muon], [rest, linear] = split(config)
    assert isinstance(adamw, torch.optim.AdamW)
    assert isinstance(muon, torch.optim.Muon)
    assert all(name.startswith("blocks.") and name.endswith("_proj.weight") for name in linear)
    assert {"blocks.0.attn.q_proj.weight", "blocks.1.attn.v_proj.weight", "blocks.2.mlp.down_proj.weight"} <= linear
    assert {
        "embed.weight",
        "blocks.1.attn.conv.weight",
        "blocks.1.attn.decay.log_rate",
        "blocks.0.attn.q_norm.weight",
    } <= rest
    assert ("unembed.weight" in rest) == (tied == "false")
    assert not rest & linear
    assert rest | linear == {name for name, _ in hs.HybridLM(config.hybrid()).named_parameters()}


@pytest.mark.parametrize(("override", "rate"), [((), 1e-2), (("train.muon_lr=3e-2",), 3e-2)])
def test_both_follow_the_schedule_from_their_own_rate(tmp_path, monkeypatch, override, rate):
    made = []
    monkeypatch.setattr(module, "make_optimizers", lambda *args: made.extend(make_optimizers(*args)) or made)
    run = train(tiny.config(tmp_path, *MUON, *override), tmp_path / "ladder", progress=False)
    last = schedule(11, 2, 12)
    assert [g["lr"] for o in made for g in o.param_groups] == pytest.approx([1e-2 * last, 1e-2 * last, rate * last])
    assert losses(run)[-1]["lr"] == pytest.approx(1e-2 * last)


def test_the_loss_falls_under_muon(tmp_path):
    run = tiny.config(tmp_path, *MUON, "train.steps=60", "train.saves=1", "train.lr=2e-2", "data.copy_share=0")
    log = [row["loss"] for row in losses(train(run, tmp_path / "ladder", progress=False))]
    assert np.mean(log[-10:]) < np.mean(log[:5]) - 0.8


def test_a_killed_run_under_muon_goes_on_bit_for_bit(tmp_path, monkeypatch):
    config = tiny.config(tmp_path, *MUON)
    whole = train(config, tmp_path / "whole", progress=False)
    killed_at(monkeypatch, config, tmp_path / "killed", "schedule", lambda now, *_: now == 6)
    assert_same_run(train(config, tmp_path / "killed", progress=False), whole)


@pytest.mark.parametrize("field", ["optimizer", "parallel"])
def test_an_unknown_choice_is_an_error(tmp_path, field):
    with pytest.raises(ValueError, match=rf"train\.{field}='sgd': expected \w+ or \w+"):
        tiny.config(tmp_path, f"train.{field}=sgd")


# One step

HAWK = ('model.pattern=["hawk", "full"]', "train.optimizer=muon")


def stepped(config, *gradients) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Each parameter before and after a step with each of the gradients (functions of the parameter), in float64."""
    torch.manual_seed(0)
    model = hs.HybridLM(config.hybrid()).double()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizers = make_optimizers(model, config)
    for gradient in gradients:
        for p in model.parameters():
            p.grad = gradient(p)
        for optimizer in optimizers:
            optimizer.step()
    return {name: (before[name], p.detach()) for name, p in model.named_parameters()}


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("decay", [0.0, 0.1, 0.5])
def test_without_a_gradient_matrices_shrink_by_lr_times_decay_and_nothing_else_moves(tmp_path, optimizer, decay):
    overrides = (f"train.optimizer={optimizer}", f"train.weight_decay={decay}", "train.lr=0.1")
    after = stepped(tiny.config(tmp_path, *HAWK, *overrides), torch.zeros_like)
    maps = ("_proj.weight", "embed.weight", "_gate.weight")  # the last: hawk's block-diagonal ones
    assert {name for name in after if name.endswith("_gate.weight")} == {
        "blocks.0.attn.input_gate.weight", "blocks.0.attn.decay_gate.weight"
    }  # fmt: skip
    for name, (before, now) in after.items():
        factor = 1 - 0.1 * decay if name.endswith(maps) else 1.0
        assert torch.allclose(now, before * factor, rtol=1e-12, atol=0), name


def test_adamw_averages_over_10_gradients_and_20_squares(tmp_path):
    """Closed form, betas (0.9, 0.95): a gradient of 1, then none, on what does not decay."""
    after = stepped(tiny.config(tmp_path, *MIXED), torch.ones_like, torch.zeros_like)
    moved = 1e-2 * (1 + (0.9 / 1.9) / (0.95 / 1.95) ** 0.5)
    for name in ("ln_final.weight", "blocks.1.attn.conv.weight", "blocks.0.attn.q_norm.weight"):
        before, now = after[name]
        assert torch.allclose(before - now, torch.full_like(now, moved), rtol=1e-6), name


@pytest.mark.parametrize(("override", "rate"), [((), 1e-2), (("train.muon_lr=3e-2",), 3e-2)])
def test_muon_moves_matrices_of_every_shape_by_a_fifth_of_the_rate(tmp_path, override, rate):
    """The size (root mean square) of AdamW's steps (arXiv 2502.16982), whatever the gradient's."""
    wide = ("model.d_model=64", "model.n_heads=4", "model.d_ff=192", "train.weight_decay=0")
    config = tiny.config(tmp_path, *MUON, *wide, *override)
    after = stepped(config, lambda p: 1e-3 * torch.randn_like(p))
    linear = [name for name in after if name.startswith("blocks.") and name.endswith("_proj.weight")]
    assert {after[name][0].shape for name in linear} >= {(64, 64), (192, 64), (64, 192)}
    for name in linear:
        before, now = after[name]
        assert (now - before).square().mean().sqrt() == pytest.approx(0.2 * rate, rel=0.2), name
    before, now = after["embed.weight"]
    assert (now - before).square().mean().sqrt() == pytest.approx(1e-2, rel=1e-3)  # AdamW's, at train.lr


# Clipping


def first_gradient(monkeypatch, tmp_path, clip: str) -> torch.Tensor:
    """The gradient that the first step of a run takes, all parameters in a row."""
    seen = []

    def make(*args):
        [optimizer] = make_optimizers(*args)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        optimizer.register_step_pre_hook(lambda *_: seen.append(torch.cat([p.grad.flatten() for p in parameters])))
        return [optimizer]

    with monkeypatch.context() as patch:
        patch.setattr(module, "make_optimizers", make)
        run = tiny.config(tmp_path, "train.steps=1", "train.saves=1", f"train.clip={clip}")
        train(run, tmp_path / f"clip-{clip}", progress=False)
    return seen[0]


def test_a_gradient_longer_than_clip_is_shortened_to_it_and_a_shorter_one_kept(tmp_path, monkeypatch):
    whole = first_gradient(monkeypatch, tmp_path, "inf")
    norm = float(whole.norm())
    assert norm > 0.1
    assert torch.equal(first_gradient(monkeypatch, tmp_path, str(2 * norm)), whole)
    for clip in (norm / 2, 0.01):
        clipped = first_gradient(monkeypatch, tmp_path, str(clip))
        assert torch.allclose(clipped, whole * (clip / norm), rtol=1e-4, atol=0)
