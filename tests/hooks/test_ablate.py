"""ablate(): heads zeroed or at their mean, as the same replacement by hooks gives it; nested, restored."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import assert_close, model_of, pad, tokens_of
from hybrid import HYBRID
from torch import Tensor

from hybridscope import HybridLM

T = 26


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
