"""The decode cache: one of another model, or of other samples, is refused before any site runs."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from helpers import RECURRENT, assert_close, model_of, tokens_of
from torch import Tensor

from hybridscope import HybridLM
from hybridscope.hooks.config import KINDS
from hybridscope.hooks.passes import Cache, KVCache, StateCache

ENTRIES = ["swa:4" if name == "swa" else name for name in KINDS] + ["swa:3|gdn", "full+rwkv6"]


def begun(model: HybridLM, tokens: Tensor | None = None) -> Cache:
    """The cache after a first call, of two samples if none are given."""
    cache = Cache()
    model(tokens_of(2, 6) if tokens is None else tokens, cache=cache)
    return cache


def refused(model: HybridLM, cache: Cache, batch: int, message: str) -> None:
    """With `message`, and the cache is as it was, so that its own model goes on from it."""
    before = copy.deepcopy(cache)
    with pytest.raises(ValueError, match=message):
        model(tokens_of(batch, 3), cache=cache)
    assert cache.columns == before.columns
    assert cache.sites.keys() == before.sites.keys()
    for name, entry in cache.sites.items():
        old = vars(before.sites[name])
        assert all(torch.equal(x, old[part]) for part, x in vars(entry).items() if isinstance(x, Tensor)), name


@pytest.mark.parametrize("capped", [False, True])
@pytest.mark.parametrize("batches", [(1, 3), (3, 1)])
@pytest.mark.parametrize("mixer", ENTRIES)
def test_other_samples_are_refused(mixer: str, batches: tuple[int, int], capped: bool) -> None:
    """Nothing is broadcast."""
    model = model_of(mixer)
    first, then = batches
    with model.cap({0: 5} if capped else {0: None}):
        cache = begun(model, tokens_of(first, 6))
        what = "keys" if capped or KINDS[mixer.split(":")[0].split("+")[0]] != "recurrent" else "state"
        site = model.sites[0].name
        refused(model, cache, then, rf"{site}: the cache holds {what} \[{first}, .* expects {what} \[{then}, ")


@pytest.mark.parametrize("mixer", ENTRIES)
def test_a_model_of_another_depth_is_refused(mixer: str) -> None:
    """Its further layers would begin at position 0, or be missed."""
    shallow, deep = model_of(mixer), model_of(mixer, layers=2)
    refused(
        deep, begun(shallow), 2, r"blocks\.1\.attn.*: the cache holds nothing; this model expects (keys|state) \[2, "
    )
    refused(shallow, begun(deep), 2, r"blocks\.1\.attn.*: the cache holds .*; this model expects nothing")


@pytest.mark.parametrize(
    ("mine", "theirs", "message"),
    [
        (("gdn",), ("full",), r"holds state \[2, 4, 4, 8\] and last inputs .* expects keys \[2, 4, 4\] and values"),
        (("full",), ("gdn",), r"holds keys .* expects state"),
        (("full", "retnet"), ("full", "gla"), r"blocks\.1\.attn: .* state \[2, 4, 4, 8\]; .* state \[2, 4, 2, 4\]"),
        (("retnet",), ("full+retnet",), r"blocks\.0\.attn\.parts\.0: the cache holds nothing"),
        (("full+rwkv7",), ("full+rwkv6", "full"), r"blocks\.1\.attn: the cache holds nothing"),
    ],
)
def test_other_mixers_are_refused(mine: tuple[str, ...], theirs: tuple[str, ...], message: str) -> None:
    refused(model_of(*theirs), begun(model_of(*mine)), 2, message)


@pytest.mark.parametrize(
    ("mixer", "options"),
    [
        ("full", {"n_kv_heads": 2}), ("full", {"head_dim": 6}), ("gla", {"mixers": {"gla": {"heads": 2}}}),
        ("gdn", {"mixers": {"gdn": {"conv": 3}}}), ("mamba2", {"mixers": {"mamba2": {"key_dim": 5, "groups": 4}}}),
        ("hgrn", {"mixers": {"hgrn": {"width": 8}}}), ("rwkv7", {"d_model": 32, "head_dim": 4}),
    ],
)  # fmt: skip
def test_other_widths_are_refused(mixer: str, options: dict[str, Any]) -> None:
    """Of keys, of states, of convolutions and of token shifts."""
    refused(model_of(mixer, **options), begun(model_of(mixer)), 2, r"blocks\.0\.attn: the cache holds")


def test_the_channel_mix_counts_too() -> None:
    """A layer of RWKV alone keeps the last input of its MLP."""
    model, cache = model_of("rwkv7"), begun(model_of("rwkv7"))
    del cache.sites["blocks.0.mlp"]
    refused(model, cache, 2, r"blocks\.0\.mlp: the cache holds nothing; this model expects last inputs \[2, 1, 16\]")


def test_a_pass_that_broke_off_leaves_no_cache_to_go_on_from() -> None:
    """Its first layers have seen tokens that its last have not."""
    model, cache = model_of("gla", "full"), Cache()

    def stop(value: Tensor, hook: Any) -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        model.run_with_hooks(tokens_of(2, 6), cache=cache, fwd_hooks=[("blocks.1.hook_resid_pre", stop)])
    refused(model, cache, 2, r"blocks\.1\.attn: the cache holds nothing")


@pytest.mark.parametrize("mixer", ENTRIES)
def test_rows_may_change_places(mixer: str) -> None:
    """As beams do: a cache with its samples picked anew, repeats and all, goes on as they do."""
    model, tokens, pick = model_of(mixer, layers=2), tokens_of(2, 6), torch.tensor([1, 0, 1])
    cache, direct = begun(model), begun(model, tokens[pick])
    for entry in cache.sites.values():
        assert isinstance(entry, KVCache | StateCache)
        for name, x in vars(entry).items():
            if isinstance(x, Tensor):
                setattr(entry, name, x if x.shape[0] == 1 else x[pick])
    more = tokens_of(3, 2, seed=3)
    assert_close(model(more, cache=cache), model(more, cache=direct), "model")


def test_every_recurrent_mixer_is_here() -> None:
    assert set(RECURRENT) <= set(ENTRIES)
