"""Hook points of HybridLM: each that is advertised fires once a pass, and what is written there counts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers import pad, tokens_of
from one_of_each import COLUMNS, HYBRID, T, build
from torch import Tensor

from hybridscope.hooks.passes import Cache


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
