"""Every hybrid family of transformers that is known: what is found in it, and that what runs here is what it runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import family_table
import pytest
import torch
from families import (
    CAP,
    CLOSE,
    EVERY,
    MIXERS,
    RECURRENT,
    SOFTMAX,
    WINDOW,
    D,
    T,
    caps_of,
    gap,
    kind_of,
    left_padding,
    pair,
    tokens_of,
)
from torch import Tensor, nn

import hybridscope as hs
from hybridscope.hooks.adapters import transformers
from hybridscope.hooks.sites import Site

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning:transformers"),
    pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning"),
]

NO_SDPA = ("gemma2", "gpt_oss", "granite_swa", "mimo_v2_flash")  # soft caps and sinks: theirs has neither
NO_MID = ("zaya",)  # scales what it adds to, and what it adds, channel by channel


def one_of_each_kind(loaded: transformers.TransformersLM) -> list[Site]:
    return list({site.mixer: site for site in reversed(loaded.sites)}.values())


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


# What is there


@pytest.mark.parametrize("family", EVERY)
def test_kind_and_mixer_of_every_layer(family: str) -> None:
    _, loaded = pair(family)
    expected = [
        (layer, index, mixer, kind_of(mixer))
        for layer, mixers in enumerate(MIXERS[family])
        for index, mixer in enumerate(mixers)
        if mixer != "-"
    ]
    assert [(s.layer, s.index, s.mixer, s.kind) for s in loaded.sites] == expected
    assert loaded.depth == len(MIXERS[family])
    assert not any(site.opaque for site in loaded.sites)
    for site in loaded.sites:
        assert (site.window == WINDOW) == (site.kind == "window")
        assert site.rope == (site.softmax and site.mixer != "nope")


@pytest.mark.parametrize(
    ("mixer", "family", "shape"),
    [  # heads, key heads, key and value width, convolution
        ("gdn", "qwen3_next", (4, 2, 6, 8, 4)),
        ("kda", "kimi_linear", (4, 4, 8, 8, 4)),
        ("lightning", "minimax", (4, 4, 8, 8, 1)),
        ("mamba2", "bamba", (8, 2, 6, 8, 4)),
        ("mamba", "jamba", (2 * D, 1, 6, 1, 4)),
        ("hawk", "recurrent_gemma", (D, D, 1, 1, 4)),
        ("conv", "lfm2", (1, 1, D, D, 3)),
        ("nope", "kimi_linear", (4, 4, 12, 8, 1)),  # MLA
        ("full", "zaya", (4, 2, 8, 8, 3)),  # queries and keys of three tokens
    ],
)
def test_heads_and_widths(mixer: str, family: str, shape: tuple[int, ...]) -> None:
    site = next(s for s in pair(family)[1].sites if s.mixer == mixer)
    assert (site.heads, site.kv_heads, site.key_dim, site.value_dim, site.conv) == shape


def test_reach_counts_parallel_sites_once_and_chained_ones_twice() -> None:
    """Falcon-H1's mixers read the same input; Zamba2's attention runs into its Mamba."""
    for family, steps in (("falcon_h1", 4), ("zamba2", 5)):
        _, loaded = pair(family)
        with loaded.cap(full=CAP, recurrent=CAP):
            assert loaded.reach() == steps * (CAP - 1) + 1


def test_the_table_in_the_docs_is_what_is_found() -> None:
    page = (Path(__file__).parents[2] / "docs/families.md").read_text()
    assert family_table.table() in page, "python tests/hooks/family_table.py prints the table"


# The same numbers


@pytest.mark.parametrize(
    ("family", "attention"), [(f, a) for f in EVERY for a in ("eager", "sdpa") if a == "eager" or f not in NO_SDPA]
)
def test_logits_equal_the_models_own(family: str, attention: str) -> None:
    model, loaded = pair(family)
    tokens = tokens_of()
    for config in {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}.values():
        config._attn_implementation_internal = attention
    try:
        for mask in (None, left_padding()):
            own = model(tokens, attention_mask=mask, use_cache=False).logits
            assert gap(loaded(tokens, attention_mask=mask), own, mask) <= CLOSE
            assert float(own.std()) > 0.01
    finally:
        for config in {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}.values():
            config._attn_implementation_internal = "eager"


@pytest.mark.parametrize("family", EVERY)
def test_the_residual_stream_equals_the_models_own(family: str) -> None:
    """Layer by layer, before and after: from hooks on the model as it came."""
    model, loaded = pair(family)
    tokens, own = tokens_of(), []
    handles = []
    for layer in loaded.layers:
        module = model.get_submodule(layer.path)

        def given(_m: Any, args: Any, kwargs: Any) -> None:
            own.append(args[0] if args else kwargs["hidden_states"])

        handles += [
            module.register_forward_pre_hook(given, with_kwargs=True),
            module.register_forward_hook(lambda _m, _a, out: own.append(out if isinstance(out, Tensor) else out[0])),
        ]
    model(tokens, use_cache=False)
    for handle in handles:
        handle.remove()
    with loaded.record(resid=list(range(T))) as rec:
        loaded(tokens)
    for number in range(loaded.depth):
        assert gap(rec.resid(number, "pre"), own[2 * number]) <= CLOSE
        assert gap(rec.resid(number, "post"), own[2 * number + 1]) <= CLOSE
        mixes = any(site.layer == number for site in loaded.sites)
        if family in NO_MID:
            with pytest.raises(ValueError, match="no 'mid' point is known"):
                rec.resid(number, "mid")
            continue
        assert (float(rec.resid(number, "delta").abs().max()) > 1e-3) == mixes


@pytest.mark.parametrize("family", SOFTMAX)
def test_entropy_equals_that_of_eager_attention(family: str) -> None:
    model, loaded = pair(family)
    tokens = tokens_of()
    for mask in (None, left_padding()):
        own = model(tokens, attention_mask=mask, use_cache=False, output_attentions=True).attentions
        own = [a.double() for a in own if a is not None and a.ndim == 4 and a.shape[-1] == T]
        with loaded.record(stats=True) as rec:
            loaded(tokens, attention_mask=mask)
        sites = [site for site in loaded.sites if site.softmax]
        assert len(own) == len(sites)
        for p, site in zip(own, sites, strict=True):
            stats = rec.stats(site.layer, site.index)
            # Softmax over keys and a learnable sink: some models return the keys' part, some scale it to one.
            sink = stats.sink_mass.double().transpose(1, 2)[..., None]
            p = (p / p.sum(-1, keepdim=True)).nan_to_num()  # padding rows see nothing
            p = torch.cat([p * (1 - sink), sink], -1)
            entropy = -(p * p.clamp(min=1e-300).log()).sum(-1).transpose(1, 2)
            assert gap(stats.entropy, entropy.float(), mask) <= CLOSE


# Switches


@contextlib.contextmanager
def pushed(model: Any, path: str, column: int) -> Iterator[list[Tensor]]:
    """Every pass adds noise to the input of one layer at one column; the layer's outputs."""
    seen: list[Tensor] = []
    layer = model.get_submodule(path)
    noise = torch.randn(D, generator=torch.Generator().manual_seed(5))

    def push(_m: Any, args: Any, kwargs: Any) -> Any:
        x = (args[0] if args else kwargs["hidden_states"]).clone()
        if seen:  # all but the first pass
            x[:, column] += noise
        return ((x, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": x})

    handles = [
        layer.register_forward_pre_hook(push, with_kwargs=True),
        layer.register_forward_hook(lambda _m, _a, out: seen.append(out if isinstance(out, Tensor) else out[0])),
    ]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


@pytest.mark.parametrize("family", EVERY)
def test_a_capped_layer_sees_its_window_and_nothing_else(family: str) -> None:
    """Bitwise nothing beyond, and something at the last token inside (short of it where a family rounds it away)."""
    model, loaded = pair(family)
    for site in one_of_each_kind(loaded):
        cap = site.conv if site.kind == "conv" else CAP
        column = 3
        with pushed(model, loaded.layers[site.layer].path, column) as seen, loaded.cap({site.layer: cap}):
            reach = loaded.reach_of(site.layer)
            loaded(tokens_of())
            loaded(tokens_of())
        moved = (seen[0] != seen[1]).any(2).any(0).nonzero()[:, 0].tolist()
        assert moved[0] == column
        assert reach is not None
        assert moved[-1] < column + reach
        # a chunk ends where it ends
        assert moved[-1] == column + reach - 1 or site.mixer.startswith("chunk") or site.layer in loaded.chained


@pytest.mark.parametrize("family", EVERY)
def test_caps_bind_by_kind_and_wide_ones_change_nothing(family: str) -> None:
    _, loaded = pair(family)
    tokens = tokens_of()
    plain = loaded(tokens)
    for kind, cap in caps_of(loaded, 4).items():
        with loaded.cap(**{kind: cap}):
            assert (gap(loaded(tokens), plain) > 1e-5) == (kind != "conv")  # a convolution is short enough
        with loaded.cap(**{kind: T}):
            assert gap(loaded(tokens), plain) <= CLOSE
    assert torch.equal(loaded(tokens), plain)


@pytest.mark.parametrize("family", RECURRENT)
def test_padding_does_not_move_a_cap(family: str) -> None:
    _, loaded = pair(family)
    tokens, mask = tokens_of(), left_padding()
    with loaded.cap(recurrent=CAP):
        together = loaded(tokens, attention_mask=mask)
        if family != "recurrent_gemma":  # its own convolutions run over padding
            assert gap(together[:1, 5:], loaded(tokens[:1, 5:])) <= CLOSE
        assert gap(together[1:], loaded(tokens[1:])) <= CLOSE


@pytest.mark.parametrize("family", EVERY)
def test_ablated_heads_do_not_reach_the_output_projection(family: str) -> None:
    model, loaded = pair(family)
    tokens = tokens_of()
    plain = loaded(tokens)
    for site in one_of_each_kind(loaded):
        mixer = model.get_submodule(site.name)
        linears = [m for m in mixer.modules() if isinstance(m, nn.Linear)]
        ran: list[tuple[nn.Module, Tensor]] = []
        head = (site.layer, site.index, site.heads - 1)
        with loaded.ablate([head]):
            handles = [m.register_forward_pre_hook(lambda m, args, ran=ran: ran.append((m, args[0]))) for m in linears]
            ablated = loaded(tokens)
            for handle in handles:
                handle.remove()
        last = [x for m, x in ran if m is ran[-1][0]][-1].unflatten(-1, (site.heads, -1))
        assert not last[:, :, -1].any()
        assert site.heads == 1 or last[:, :, 0].any()
        assert gap(ablated, plain) > 1e-7
        with loaded.ablate([head], how="mean"):
            assert gap(loaded(tokens), ablated) > 0


def test_implicit_attention_of_their_recurrences() -> None:
    """A Mamba-2 head's weights, read in one pass, give its own outputs back: sum of w_tj over j of equal values."""
    for family in ("qwen3_next", "kimi_linear", "bamba", "minimax"):
        _, loaded = pair(family)
        with loaded.record(stats=hs.Stats(rows=[T - 1], recurrent=True)) as rec:
            loaded(tokens_of())
        stats = rec.stats(0)
        assert stats.entropy.shape == (2, 1, loaded.sites[0].heads)
        assert (stats.visible == T).all()
        with loaded.cap(recurrent=CAP), loaded.record(stats=hs.Stats(rows=[T - 1], recurrent=True)) as rec:
            loaded(tokens_of())
        assert (rec.stats(0).visible == CAP - loaded.sites[0].conv + 1).all()
