"""States recorded at chosen columns: those of a cache after the same prefix, wherever padding and calls lie."""

from __future__ import annotations

import families
import pytest
import torch
from helpers import RECURRENT, Largest, assert_close, model_of, pad, tokens_of

import hybridscope as hs


def after(model, tokens, site, **options):
    cache = model.new_cache()
    model(tokens, cache=cache, **options)
    return cache.sites[site.name].state


@pytest.mark.parametrize("mixer", RECURRENT)
def test_states_are_those_of_the_prefix(mixer):
    model, tokens, columns = model_of(mixer, "full"), tokens_of(2, 19), [6, 0, -1]
    with model.record(states=columns) as rec:
        logits = model(tokens)
    assert torch.equal(logits, model(tokens))  # recording changes nothing
    site = model.sites[0]
    states = rec.state(0)
    assert states.shape == (2, 3, site.heads, site.key_dim, site.value_dim)
    for n, column in enumerate((6, 0, 18)):
        assert_close(states[:, n], after(model, tokens[:, : column + 1], site), "model")


@pytest.mark.parametrize("mixer", ["gdn", "hawk", "mamba2", "rwkv6"])
@pytest.mark.parametrize(
    "columns", [range(4, 13), [0, 1, 5, 6, 7, 8, 9, 10, 12], range(9)], ids=["left", "middle", "right"]
)
def test_padding_changes_nothing(mixer, columns):
    model, real = model_of(mixer, "full"), tokens_of(2, 9)
    tokens, mask = pad([real[0], real[1]], [list(columns), range(13 - 9, 13)], 13)
    with model.record(states=[[columns[3], columns[-1]], [7, 12]]) as rec:
        model(tokens, mask)
    with model.record(states=[3, 8]) as plain:
        model(real)
    assert_close(rec.state(0), plain.state(0), "model")
    with model.record(states="last") as rec:
        model(tokens, mask)
    assert_close(rec.state(0)[:, 0], plain.state(0)[:, 1], "model")
    with model.record(states=[0]) as rec:  # before the second row's first token: nothing was read
        model(tokens, mask)
    assert not rec.state(0)[1].any()


def test_cached_calls_and_batches_are_joined():
    model, tokens = model_of("gdn", "full"), tokens_of(2, 12)
    with model.record(states=[4, 10, 11]) as whole:
        model(tokens)
    with model.record(states=[-1], resid=[-1], stats=hs.Stats(rows=[-1])) as rec:
        for row in tokens.split(1):
            cache = model.new_cache()
            for part in row.split([5, 6, 1], 1):
                model(part, cache=cache)
    assert_close(rec.state(0), whole.state(0), "model")
    assert rec.resid(0).shape[:2] == (2, 3)


def test_beside_implicit_statistics_and_in_nested_blocks():
    model, tokens = model_of("kda", "swa:4"), tokens_of(2, 10)
    with model.record(states=[4]) as outer, model.record(states=[9], stats=hs.Stats(rows=[3], recurrent=True)) as inner:
        model(tokens)
    with model.record(stats=hs.Stats(rows=[3], recurrent=True)) as plain:
        model(tokens)
    assert_close(outer.state(0)[:, 0], after(model, tokens[:, :5], model.sites[0]), "model")
    assert_close(inner.state(0)[:, 0], after(model, tokens, model.sites[0]), "model")
    assert torch.equal(inner.stats(0).entropy, plain.stats(0).entropy)


def test_only_the_wanted_states_are_held():
    model, tokens = model_of("gla", heads=4, d_model=64), tokens_of(1, 512)
    with Largest() as plain:
        model(tokens)
    with Largest() as seen, model.record(states=[100, 511]):
        model(tokens)
    assert seen.elements <= plain.elements


@pytest.mark.parametrize("family", ["qwen3_next", "kimi_linear"])
def test_transformers_states(family):
    """Of whole contexts: what the family's own cache holds at the end."""
    _, model = families.pair(family)
    tokens = tokens_of(2, 11)
    site = next(s for s in model.sites if s.kind == "recurrent")
    with torch.no_grad(), model.record(states=[4, 10]) as rec:
        model(tokens)
    for n, length in enumerate((5, 11)):
        cache = model.new_cache()
        model(tokens[:, :length], cache=cache)
        (expected,) = cache.past.layers[site.layer].recurrent_states.values()
        assert_close(rec.state(site.layer)[:, n].float(), expected.float(), torch.float32)
    cache = model.new_cache()
    with torch.no_grad(), model.record(states=[-1]):
        model(tokens[:, :5], cache=cache)
        with pytest.raises(ValueError, match="whole context in one call"):
            model(tokens[:, 5:], cache=cache)


def test_what_cannot_be_recorded_is_refused():
    model, tokens = model_of("gdn", "full"), tokens_of(2, 12)
    with model.cap(recurrent=6), model.record(states=[3]), pytest.raises(ValueError, match="no single state"):
        model(tokens)
    with model.cap(recurrent=6), model.record(states=[3]) as rec, model.cap({0: None}):
        model(tokens)  # lifted
    assert rec.state(0).shape[1] == 1
    with pytest.raises(ValueError, match=r"not recurrent; .*\(0, 0\)"):
        rec.state(1)
    with pytest.raises(ValueError, match="no recurrent sites"), model_of("full").record(states=[3]):
        pass
    with pytest.raises(ValueError, match="states='all'"), model.record(states="all"):
        pass
    with model.record(states=[12]), pytest.raises(ValueError, match="do not fit 12 tokens"):
        model(tokens)
    with model.record(resid=[3]) as rec:
        model(tokens)
    with pytest.raises(ValueError, match="not recorded"):
        rec.state(0)
    with model.record(states=[3]) as rec, pytest.raises(ValueError, match="nothing recorded"):
        rec.state(0)
