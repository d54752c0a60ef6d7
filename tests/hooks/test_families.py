"""Every hybrid family of transformers that is known: what is found in it, and that what runs here is what it runs."""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import family_table
import pytest
import torch
from families import FAMILIES, WINDOW, D, H, V, build, kind_of, pair
from torch import Tensor, nn

import hybridscope as hs
from hybridscope.hooks.adapters import transformers
from hybridscope.hooks.adapters.interface import Attachment, listening
from hybridscope.hooks.checkpoint import Checkpoint
from hybridscope.hooks.head_maps import read_maps
from hybridscope.hooks.projections import qk_projections
from hybridscope.hooks.sites import Site

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning:transformers"),
    pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning"),
]

T, CAP = 24, 6
CLOSE = 2e-5
EVERY = list(FAMILIES)
MIXERS = {family: [layer.split("+") for layer in mixers.split()] for family, (_, mixers) in FAMILIES.items()}
RECURRENT = [f for f in EVERY if any(kind_of(m) == "recurrent" for layer in MIXERS[f] for m in layer if m != "-")]
SOFTMAX = [f for f in EVERY if any(kind_of(m) in ("full", "window") for layer in MIXERS[f] for m in layer if m != "-")]
NO_SDPA = ("gemma2", "gpt_oss", "granite_swa", "mimo_v2_flash")  # soft caps and sinks: theirs has neither
NO_MID = ("zaya",)  # scales what it adds to, and what it adds, channel by channel
RUNS_ON = [*RECURRENT, "lfm2", "zaya", "gpt_oss"]  # over the border of packed documents, in transformers' own code
NO_FORM = ("zaya", "hunyuan_v1_dense")  # convolved queries and keys; a norm behind RoPE


def tokens_of(batch: int = 2, length: int = T, seed: int = 1) -> Tensor:
    return torch.randint(3, V, (batch, length), generator=torch.Generator().manual_seed(seed))


def left_padding() -> Tensor:
    mask = torch.ones(2, T, dtype=torch.int64)
    mask[0, :5] = 0
    return mask


def gap(got: Tensor, expected: Tensor, mask: Tensor | None = None) -> float:
    """Largest difference, in units of how large the expected values are."""
    if not expected.numel():
        return 0.0
    difference = (got - expected).abs()
    return float((difference if mask is None else difference[mask.bool()]).max()) / (1 + float(expected.abs().max()))


def caps_of(loaded: transformers.TransformersLM, cap: int = CAP) -> dict[str, int]:
    return dict.fromkeys(sorted({site.kind for site in loaded.sites}), cap)


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


# Decoding


@pytest.mark.parametrize("family", EVERY)
def test_cached_decoding_equals_one_pass(family: str) -> None:
    """Prefill and single tokens; with caps, under padding, and the logits, not only the token they pick."""
    _, loaded = pair(family)
    tokens = tokens_of()
    caps: list[dict[str, int]] = [{}, caps_of(loaded)]
    for cap in caps:
        with loaded.cap(**cap) if cap else contextlib.nullcontext():
            whole = loaded(tokens)
            cache = loaded.new_cache()
            parts = [loaded(part, cache=cache) for part in tokens.split([T - 4, 1, 1, 2], 1)]
        multi = "mamba" in {s.mixer for s in loaded.sites}  # its scan starts from nothing at several tokens
        parts = parts[:-1] if multi else parts
        got = torch.cat(parts, 1)
        assert gap(got, whole[:, : got.shape[1]]) <= CLOSE


@pytest.mark.parametrize("family", EVERY)
def test_generate_under_caps_and_padding(family: str) -> None:
    _, loaded = pair(family)
    prompt, mask = tokens_of(), left_padding()
    with loaded.cap(**caps_of(loaded)):
        out = loaded.generate(prompt, 5, attention_mask=mask)
        for row, start in ((0, 5), (1, 0)):
            if row == 0 and family in ("recurrent_gemma", "hunyuan_v1_dense"):
                continue  # convolutions that run over padding; a norm behind RoPE, so that columns matter
            context = prompt[row : row + 1, start:]
            for _ in range(5):
                context = torch.cat([context, loaded(context)[:, -1:].argmax(-1)], 1)
            assert torch.equal(out[row, T:], context[0, -5:])


@pytest.mark.parametrize("implementation", ["dynamic", "static"])
@pytest.mark.parametrize("family", EVERY)
def test_their_own_generate_runs_on_our_attention(family: str, implementation: str) -> None:
    """With caches of transformers' choosing, the logits of each step too."""
    model, _ = pair(family)
    prompt = tokens_of()
    options: dict[str, Any] = {
        "max_new_tokens": 5, "do_sample": False, "eos_token_id": None, "pad_token_id": 0, "output_logits": True,
        "return_dict_in_generate": True, **({} if implementation == "dynamic" else {"cache_implementation": "static"}),
    }  # fmt: skip
    own = model.generate(prompt, **options)
    with Attachment.of(model).on():
        ours = model.generate(prompt, **options)
    for a, b in zip(own.logits, ours.logits, strict=True):
        assert gap(b, a) <= CLOSE


@pytest.mark.parametrize("family", ["qwen3_next", "kimi_linear", "minimax", "jamba", "bamba", "falcon_h1", "zamba2"])
def test_beams_take_what_a_cap_keeps_along(family: str) -> None:
    """Beam search with a cache is beam search without one."""
    model, loaded = pair(family)
    prompt = tokens_of()
    options: dict[str, Any] = {
        "attention_mask": torch.ones_like(prompt), "max_new_tokens": 6, "num_beams": 2, "do_sample": False,
        "eos_token_id": None, "pad_token_id": 0,
    }  # fmt: skip
    with loaded.cap(recurrent=CAP):
        cached, whole = (model.generate(prompt, **options, use_cache=use) for use in (True, False))
    assert torch.equal(cached, whole)


def test_beams_over_states_that_are_not_in_the_cache_are_refused() -> None:
    """RecurrentGemma's convolutions keep theirs in the module, and transformers leaves them in the old order."""
    model, loaded = pair("recurrent_gemma")
    options: dict[str, Any] = {"max_new_tokens": 3, "num_beams": 2, "do_sample": False, "pad_token_id": 0}
    with loaded.cap(recurrent=CAP):
        with pytest.raises(ValueError, match="temporal_block keeps a part of its state outside of the cache"):
            model.generate(tokens_of(), **options)
        model.generate(tokens_of(), **options, use_cache=False)


def test_a_copied_cache_goes_on_by_itself() -> None:
    """And is reordered by itself."""
    _, loaded = pair("qwen3_next")
    tokens = tokens_of()
    with loaded.cap(recurrent=CAP):
        cache = loaded.new_cache()
        loaded(tokens[:, :-2], cache=cache)
        expected = loaded(tokens)[:, -2:]
        other = copy.deepcopy(cache)
        other.past.reorder_cache(torch.tensor([1, 0]))
        assert gap(loaded(tokens.flip(0)[:, -2:], cache=other), expected.flip(0)) <= CLOSE
        assert gap(loaded(tokens[:, -2:], cache=cache), expected) <= CLOSE


def test_a_cap_cannot_change_in_the_middle_of_a_context() -> None:
    for family in ("qwen3_next", "bamba", "minimax"):
        _, loaded = pair(family)
        cache = loaded.new_cache()
        with loaded.cap(recurrent=CAP):
            loaded(tokens_of(), cache=cache)
        for cap in (None, CAP + 1):
            with pytest.raises(ValueError, match="cannot change in the middle"), loaded.cap(recurrent=cap):
                loaded(tokens_of(2, 1), cache=cache)


@pytest.mark.parametrize("family", [f for f in SOFTMAX if f not in RUNS_ON])
def test_packed_documents_do_not_see_each_other(family: str) -> None:
    """As position ids that start again say it, with recorded statistics too."""
    model, loaded = pair(family)
    tokens = tokens_of(1)
    positions = torch.cat([torch.arange(10), torch.arange(T - 10)])[None]
    own = model(tokens, position_ids=positions, use_cache=False).logits
    with loaded.record(stats=True) as rec:
        ours = model(tokens, position_ids=positions, use_cache=False).logits
    assert gap(ours, own) <= CLOSE
    assert int(rec.stats(3).visible[0, -1, 0]) <= T - 10 + 1  # (and a sink)


@pytest.mark.parametrize("family", RUNS_ON)
def test_packed_documents_run_as_the_model_itself_runs_them(family: str) -> None:
    """States and convolutions run on across documents in transformers' own code; so they do here."""
    model, _ = pair(family)
    if not takes_positions(model):
        pytest.skip("has no positions")
    tokens = tokens_of(1)
    positions = torch.cat([torch.arange(10), torch.arange(T - 10)])[None]
    own = model(tokens, position_ids=positions, use_cache=False).logits
    with Attachment.of(model).on():
        assert gap(model(tokens, position_ids=positions, use_cache=False).logits, own) <= CLOSE


# Ladders: what drift reads is what the model attends with


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


def takes_positions(model: Any) -> bool:
    return "position_ids" in inspect.signature(type(model).forward).parameters


def same_direction(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and (a.numel() == 0 or float(torch.cosine_similarity(a, b, dim=-1).min()) > 1 - 1e-6)


def test_the_table_in_the_docs_is_what_is_found() -> None:
    page = (Path(__file__).parents[2] / "docs/families.md").read_text()
    assert family_table.table() in page, "python tests/hooks/family_table.py prints the table"


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
