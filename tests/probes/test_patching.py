"""Activation patching: a planted head carries everything and the others nothing, on fused paths, for foreign models."""

from __future__ import annotations

import dataclasses
import inspect
import sys
from pathlib import Path

import planted
import pytest
import torch
from helpers import Largest, assert_close, model_of, tokens_of

import hybridscope as hs
from hybridscope.probes.patching import swap_values

sys.path.append(str(Path(__file__).parents[1] / "hooks"))
import families


def test_the_planted_head_recovers_all_and_others_nothing():
    model, needles = planted.planted(), planted.needles(10)
    table = hs.patch_heads(model, needles, rows=("all", "question", "value", "haystack"), batch=10)
    there = (table.layer == 1) & (table["head"] == 0)
    at = there & table.rows.isin(["all", "question"])  # whose last token is the answer row
    assert table[at].recovered.to_numpy() == pytest.approx(1.0, abs=1e-9)
    assert table[~at].recovered.abs().max() < 1e-9
    assert len(table) == 2 * 4 * 3 * planted.HEADS
    assert set(table.direction) == {"denoise", "noise"}
    assert (table.metric == "logit_diff").all()
    assert (table.n == 10).all()
    assert table[at][["low", "high"]].to_numpy() == pytest.approx(1.0, abs=1e-9)


def test_without_the_needle_noise_finds_the_head_that_marks_it_as_well():
    """The planted head looks for the token after the key, as the head of layer 0 marks it: breaking either breaks the
    answer, but only the planted head can restore it."""
    model, needles = planted.planted(), planted.needles(6)
    table = hs.patch_heads(model, needles, "removed", batch=4).set_index(["direction", "layer", "head"])
    assert (table.metric == "loss").all()
    assert table.recovered["denoise", 1, 0] == pytest.approx(1.0, abs=1e-9)
    assert table.recovered["noise", 1, 0] == pytest.approx(1.0, abs=1e-9)
    assert table.recovered["noise", 0, 0] > 0.9
    assert table.recovered["denoise", 0, 0] < 0.01
    rest = table.drop([(d, layer, 0) for d in ("denoise", "noise") for layer in (0, 1)])
    assert rest.recovered.abs().max() < 1e-9
    marks = table.loc[("noise", 0, 0)]
    assert marks.low <= marks.recovered <= marks.high


def test_sites_heads_and_rows_of_ones_own():
    model, needles = planted.planted(), planted.needles(6)
    sites = hs.patch_heads(model, needles, by="site", directions=["denoise"])
    assert sites["head"].tolist() == [-1] * 3
    assert sites.recovered.to_numpy() == pytest.approx([0, 1, 0], abs=1e-9)
    rows = {"last": needles.answer_rows, "others": torch.arange(planted.T) < needles.answer_rows[:, :1]}
    some = hs.patch_heads(model, needles, heads=[(1, 0), (1, 0, 2)], rows=rows, directions=["denoise"])
    assert some[["layer", "head"]].to_numpy().tolist() == [[1, 0], [1, 2]] * 2
    assert some.recovered.to_numpy() == pytest.approx([1, 0, 0, 0], abs=1e-9)


def test_swapped_values_are_those_of_another_prompt():
    needles = planted.needles(9)
    swapped = swap_values(needles)
    assert (swapped.answers != needles.answers).any(1).all()
    changed = swapped.tokens != needles.tokens
    span = needles.spans["value"]
    columns = torch.arange(planted.T)
    assert not (changed & ~((columns >= span[:, :1]) & (columns < span[:, 1:]))).any()
    assert torch.equal(swapped.tokens.gather(1, span[:, :1]), swapped.answers)
    assert planted.needles(9).tokens.equal(needles.tokens)  # inputs are never modified


def foreign(family: str):
    return families.pair(family)[1]


@pytest.mark.parametrize("make", [lambda: model_of("gdn", "swa:4", "full+mamba2"), lambda: foreign("qwen3_next")])
def test_edits_run_one_after_another_and_leave_nothing_behind(make):
    model, tokens = make(), tokens_of(2, 12)
    before = model.hidden(tokens)
    for site in model.sites:
        seen = []
        with (
            model.ablate([(site.layer, site.index, 0)]),
            model.edit({site: lambda z, real, s=seen: s.append(z) or z + 1}),
        ):
            assert not torch.equal(model.hidden(tokens), before)
        assert seen[0].shape == (2, 12, site.heads, site.value_dim)
        assert not seen[0][:, :, 0].any()
        assert seen[0][:, :, 1].any()
    assert torch.equal(model.hidden(tokens), before)


@pytest.mark.parametrize("make", [lambda: model_of("gdn", "swa:4", "full"), lambda: foreign("qwen3_next")])
def test_what_is_patched_is_put_where_it_was_asked_for(make):
    """By hand: head 1 of the last site at two rows."""
    model = make()
    needles = hs.make_needles(3, 16, values=4, language=planted.LANGUAGE)
    other = swap_values(needles)
    site = model.sites[-1]
    rows = torch.tensor([[3, 15]] * 3)
    table = hs.patch_heads(
        model, needles, heads=[(site.layer, site.index, 1)], rows={"two": rows}, directions=["denoise"]
    )
    outputs = []

    def keep(z, real):
        outputs.append(z.clone())
        return z

    def put(z, real):
        z = z.clone()
        z[:, [3, 15], 1] = outputs[0][:, [3, 15], 1]
        return z

    def score(tokens):
        logits = model(tokens)[:, -1].double()
        return float((logits.gather(1, needles.answers) - logits.gather(1, other.answers)).mean())

    with model.edit({site: keep}):
        source = score(needles.tokens)
    with model.edit({site: put}):
        patched = score(other.tokens)
    base = score(other.tokens)
    found = table.iloc[0]
    tolerance = 1e-9 if next(model.parameters()).dtype == torch.float64 else 1e-4
    for name, expected in (("base", base), ("source", source), ("patched", patched)):
        assert found[name] == pytest.approx(expected, abs=tolerance)
    assert found.recovered == pytest.approx((patched - base) / (source - base), abs=1e-2)


def test_no_tensor_of_t_by_t_is_made():
    model, length = model_of("gdn", "full", layers=2), 256
    needles = hs.make_needles(2, length, values=4, language=planted.LANGUAGE)
    with Largest() as plain:
        model.hidden(needles.tokens)
    with Largest() as seen:
        hs.patch_heads(model, needles, heads=[(1, 0)])
    assert seen.elements <= plain.elements


def test_left_padding_changes_nothing():
    model, needles = model_of("swa:4", "gdn", "full"), hs.make_needles(3, 16, values=4, language=planted.LANGUAGE)
    front = torch.full((3, 4), 5)
    padded = dataclasses.replace(
        needles, tokens=torch.cat([front, needles.tokens], 1), answer_rows=needles.answer_rows + 4,
        spans={n: s + 4 for n, s in needles.spans.items()}, removed=None,
        attention_mask=torch.cat([front == 0, needles.tokens >= 0], 1),
    )  # fmt: skip
    some = {"heads": [(0, 1), (1, 2), (2, 3)], "rows": ("value", "answer")}
    plain, shifted = (hs.patch_heads(model, x, **some) for x in (needles, padded))
    assert_close(torch.tensor(shifted.patched.to_numpy()), torch.tensor(plain.patched.to_numpy()), "model")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"heads": [(9, 0)]}, "layer 9"), ({"heads": [(1, 7)]}, "heads 0"), ({"rows": ["middle"]}, "unknown group"),
        ({"rows": "all"}, "expected a list"), ({"directions": "noise"}, "directions"), ({"by": "layer"}, "by="),
        ({"corrupt": "noise"}, "corrupt"), ({"corrupt": torch.zeros(2, 3, dtype=torch.int64)}, "corrupt: prompts"),
        ({"corrupt": "removed", "metric": "logit_diff"}, "no answer of their own"), ({"metric": "kl"}, "metric"),
    ],
)  # fmt: skip
def test_mistakes_are_named(options, named):
    patch = inspect.unwrap(hs.patch_heads)  # without the checks of types that the tests add
    with pytest.raises(ValueError, match=named):
        patch(planted.planted(), planted.needles(4), **options)


def test_one_prompt_has_no_interval():
    table = hs.patch_heads(planted.planted(), planted.needles(1), "removed", heads=[(1, 0)])
    assert table.recovered.tolist() == pytest.approx([1, 1])
    assert table[["low", "high"]].isna().all(axis=None)


def test_corrupt_prompts_lie_column_by_column_beside_the_clean_ones():
    model, clean = planted.planted(), planted.needles(4)
    corrupt = swap_values(clean)
    real = torch.ones_like(clean.tokens, dtype=torch.bool)
    real[1, :3] = False
    with pytest.raises(ValueError, match="corrupt: prompts padded in other places"):
        hs.patch_heads(model, clean, dataclasses.replace(corrupt, attention_mask=real))
    with pytest.raises(ValueError, match="corrupt: answers in other rows"):
        hs.patch_heads(model, clean, dataclasses.replace(corrupt, answer_rows=clean.answer_rows - 1))


def test_rows_that_mark_nothing_are_not_patched_and_found_idle():
    with pytest.raises(ValueError, match="rows: 'mine' marks no column"):
        hs.patch_heads(planted.planted(), planted.needles(4), rows={"mine": torch.full((4, 1), -1)})


def test_prompts_that_the_model_does_not_tell_apart_are_refused():
    needles, mute = planted.needles(4), planted.planted()
    mute.unembed.weight.zero_()
    with pytest.raises(ValueError, match="nothing to recover"):
        hs.patch_heads(mute, needles, heads=[(1, 0)])
    with pytest.raises(ValueError, match="same answer"):
        hs.patch_heads(planted.planted(), needles, needles)
