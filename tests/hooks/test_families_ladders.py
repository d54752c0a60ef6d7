"""Ladders of every hybrid family: what drift reads is what the model attends with, and heads are tracked."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from families import CLOSE, SOFTMAX, H, T, V, build, gap, pair, tokens_of
from torch import Tensor, nn

import hybridscope as hs
from hybridscope.hooks.adapters.interface import Attachment, listening
from hybridscope.hooks.checkpoint import Checkpoint
from hybridscope.hooks.head_maps import read_maps
from hybridscope.hooks.projections import qk_projections

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning:transformers"),
    pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning"),
]

NO_FORM = ("zaya", "hunyuan_v1_dense")  # convolved queries and keys; a norm behind RoPE


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def attended(family: str, model: Any, names: list[str], norms: list[str]) -> Any:
    """What goes into some modules, and q and k [heads,K] of the attention modules `names`, for one token at positions
    0, 7 and 14. A single token attends to itself, so that RoPE alone tells its position (and RG-LRU, which starts at
    0)."""
    inputs: dict[str, Tensor] = {}
    heard: dict[str, list[tuple[Tensor, Tensor]]] = {name: [] for name in names}
    of = {id(model.get_submodule(name)): name for name in names}

    def before(path: str) -> Any:
        def hook(_m: Any, args: Any, kwargs: Any) -> None:
            inputs.setdefault(path, (args[0] if args else kwargs["hidden_states"]).double().flatten())

        return hook

    def listen(module: nn.Module, q: Tensor, k: Tensor, *_: Any) -> None:
        heard[of[id(module)]].append((q[0, :, 0].double(), k[0, :, 0].double()))

    handles = [model.get_submodule(p).register_forward_pre_hook(before(p), with_kwargs=True) for p in norms]
    with Attachment.of(model).on(), listening(listen):
        for position in (0, 7, 14):
            model(tokens_of(1, 1), use_cache=False, position_ids=torch.tensor([[position]]))
    for handle in handles:
        handle.remove()
    return inputs, heard


@pytest.mark.parametrize("family", SOFTMAX)
def test_query_and_key_maps_are_what_the_model_attends_with(family: str, tmp_path: Path) -> None:
    """At position 0 q and k are what the folded maps make of the input, up to what q/k norms divide out; at another one
    the pairs that RoPE is said to turn keep their lengths, and all other dimensions their values."""
    model, loaded = pair(family)
    model.save_pretrained(tmp_path / "checkpoint-1")
    checkpoint = Checkpoint(tmp_path / "checkpoint-1", 1)
    sites, softmax = qk_projections(checkpoint.path), [s for s in loaded.sites if s.softmax]
    assert [(s.layer, s.kind, s.heads, s.kv_heads, s.head_dim) for s in sites] == [
        (s.layer, s.kind, s.heads, s.kv_heads, s.key_dim) for s in softmax
    ]
    norms = [
        s.name if site.gain is None else ".".join([s.name.rpartition(".")[0], site.gain.split(".")[-2]])
        for site, s in zip(sites, softmax, strict=True)
    ]
    inputs, heard = attended(family, model, [s.name for s in softmax], norms)
    for site, s, norm in zip(sites, softmax, norms, strict=True):
        if not site.form:
            assert family in NO_FORM
            continue
        x = inputs[norm]
        if site.gain is not None:
            x = x - x.mean() if site.centred else x
            x = x / x.square().mean().sqrt()
        maps = read_maps(checkpoint, site, list(range(site.heads)), list(range(site.kv_heads)))
        a, b = site.pairs()
        rest = [d for d in range(site.head_dim) if d not in {*a, *b}]
        order = [*rest, *a, *b]
        for heads, at_0, at_7, at_14 in zip((maps.q, maps.k), *heard[s.name], strict=True):
            made = torch.stack([m.folded @ torch.cat([x, x.new_ones(1)])[: m.folded.shape[1]] for m in heads])
            made = made[:, order]
            # (MLA's rotary part comes sorted into firsts and seconds of its pairs)
            sort = slice(None) if site.k_latent is not None else order
            at_0, at_7, at_14 = (x[:, sort] for x in (at_0, at_7, at_14))
            plain, half = len(rest), len(a)
            shared = site.head_dim - site.k_shared_rows  # latents are normed, the shared rows not
            if site.over_all:
                assert same_direction(made.flatten(), at_0.flatten())
            else:
                assert same_direction(made[:, :shared], at_0[:, :shared])
                assert shared == site.head_dim or same_direction(made[:, shared:], at_0[:, shared:])
            lengths = [x[:, plain : plain + half].square() + x[:, plain + half :].square() for x in (at_7, at_14)]
            assert gap(lengths[1], lengths[0]) <= CLOSE
            assert gap(at_14[:, :plain], at_7[:, :plain]) <= CLOSE
            assert half == 0 or gap(at_14[:, plain:], at_7[:, plain:]) > 1e-3
            assert (half > 0) == s.rope


def same_direction(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and (a.numel() == 0 or float(torch.cosine_similarity(a, b, dim=-1).min()) > 1 - 1e-6)


@pytest.mark.parametrize("family", SOFTMAX)
def test_ladders_of_every_family(family: str, tmp_path: Path) -> None:
    """Drift is zero at the reference and positive elsewhere."""
    model = build(family)
    for step in (1, 2):
        model.save_pretrained(tmp_path / f"checkpoint-{step}")
        for p in model.parameters():
            p.mul_(1 + 0.1 * torch.randn_like(p))
    warned = family in NO_FORM
    with pytest.warns(UserWarning, match="is NaN") if warned else contextlib.nullcontext():
        table = hs.qk_drift(tmp_path)
    assert set(table.maps) == {"effective" if pair(family)[1].sites[-1].key_dim == 12 else "slice"}
    columns = ["q", "k"] if warned else ["q", "k", "bilinear_rel"]
    assert (table[table.step == 2][columns] == 0).all(axis=None)
    assert (table[table.step == 1][columns] > 0).all(axis=None)
    assert table["head"].max() == H - 1


@pytest.mark.parametrize("family", ["qwen3_next", "kimi_linear", "minimax", "falcon_h1", "recurrent_gemma", "gpt_oss"])
def test_heads_are_tracked_over_a_ladder(family: str, tmp_path: Path) -> None:
    model, loaded = pair(family)
    build(family, seed=1).save_pretrained(tmp_path / "checkpoint-1")
    model.save_pretrained(tmp_path / "checkpoint-2")
    site = next(s for s in reversed(loaded.sites) if s.softmax)
    needles = hs.make_needles(2, T, language=hs.TokenLanguage(V, keys=4, values=4), values=4)
    table = hs.track(tmp_path, needles, heads=[(site.layer, site.index, H - 1)])
    assert table.step.tolist() == [1, 2]
    assert (table.entropy > 0).all()
    assert table.entropy.nunique() == 2
