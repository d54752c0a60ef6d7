"""The logit lens: the model itself at the last layer, a closed form on planted weights, every family's final norm."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

import planted
import pytest
import torch
from helpers import assert_close, model_of, pad, tokens_of

import hybridscope as hs
from hybridscope import figures

sys.path.append(str(Path(__file__).parents[1] / "hooks"))
import families


def last(table):
    return table[table.layer == table.layer.max()]


@pytest.mark.parametrize("pattern", [("swa:4", "full", "gdn"), ("full+mamba2", "rwkv7"), ("full",)])
def test_the_last_layer_is_the_model(pattern):
    model, tokens = model_of(*pattern), tokens_of(3, 12)
    log_p = model(tokens).log_softmax(-1)
    table = hs.logit_lens(model, tokens, [0, 5, -1], top=3, batch=2)
    rows = last(table)
    expected = log_p[:, [0, 5, 11]].flatten(0, 1)
    assert rows["sample"].tolist() == [n for n in range(3) for _ in range(3)]
    assert rows["row"].tolist() == [0, 5, 11] * 3
    for n in range(3):
        assert_close(torch.tensor(rows[f"top_log_prob_{n}"].to_numpy()), expected.sort(-1, True).values[:, n], "model")
        assert rows[f"top_{n}"].tolist() == expected.argsort(-1, True)[:, n].tolist()
    assert (rows["rank"] == 1).all()
    assert (rows["target"] == rows["top_0"]).all()
    assert rows["kl"].max() < 1e-12
    assert (table.loc[table.layer < table.layer.max(), "kl"] > 0).all()


@pytest.mark.parametrize("where", ["pre", "mid", "post"])
def test_every_layer_is_the_recorded_stream_through_norm_and_unembedding(where):
    model, tokens = model_of("gdn", "full", "swa:3"), tokens_of(2, 9)
    table = hs.logit_lens(model, tokens, [4], where=where, target=[7]).set_index(["sample", "layer"])
    final = model(tokens)[:, 4].log_softmax(-1)
    with model.record(resid=[4]) as rec:
        model(tokens)
    for layer in range(3):
        log_p = model.unembed(model.ln_final(rec.resid(layer, where)))[:, 0].log_softmax(-1)
        for n in range(2):
            row = table.loc[(n, layer)]
            assert row["log_prob"] == pytest.approx(float(log_p[n, 7]), abs=1e-11)
            assert row["rank"] == 1 + int((log_p[n] > log_p[n, 7]).sum())
            assert row["kl"] == pytest.approx(float((final[n].exp() * (final[n] - log_p[n])).sum()), abs=1e-11)


def test_a_planted_model_knows_the_answer_from_the_layer_on_that_reads_it():
    model, needles = planted.planted(), planted.needles(8)
    table = hs.logit_lens(model, needles.tokens, needles.answer_rows, target=needles.answers)
    assert (table[table.layer == 0]["log_prob"] + torch.log(torch.tensor(24.0)).item()).abs().max() < 1e-6  # uniform
    assert (table[table.layer >= 1]["rank"] == 1).all()
    assert table[table.layer >= 1]["kl"].max() < 1e-12  # layer 2 does nothing


def test_targets_and_padding():
    model, tokens = model_of("full", "gdn"), tokens_of(1, 8)
    table = last(hs.logit_lens(model, tokens, [2, 3], target="next"))
    log_p = model(tokens).log_softmax(-1)
    assert table["target"].tolist() == tokens[0, 3:5].tolist()
    assert table["log_prob"].tolist() == pytest.approx(
        [float(log_p[0, i, tokens[0, i + 1]]) for i in (2, 3)], abs=1e-11
    )
    padded, mask = pad([tokens[0]], [range(3, 11)], 12)
    plain, shifted = hs.logit_lens(model, tokens), hs.logit_lens(model, padded, attention_mask=mask)
    assert shifted["row"].unique().tolist() == [10]  # the last real one
    assert shifted["log_prob"].tolist() == pytest.approx(plain["log_prob"].tolist(), abs=1e-11)
    with pytest.raises(ValueError, match="rows: column 1 of sample 0 is padding"):
        hs.logit_lens(model, padded, [1], attention_mask=mask)
    with pytest.raises(ValueError, match="padding comes after column 10 of sample 0"):
        hs.logit_lens(model, padded, [10], target="next", attention_mask=mask)


@pytest.mark.parametrize("family", ["qwen3_next", "gemma2", "nemotron_h", "lfm2", "gpt_neox"])
def test_transformers_families_have_their_final_norm_found(family):
    own, model = families.pair(family)
    tokens = tokens_of(2, 10)
    table = hs.logit_lens(model, tokens, [4, -1])
    log_p = own(tokens).logits.log_softmax(-1)[:, [4, 9]].flatten(0, 1)
    assert last(table)["log_prob"].tolist() == pytest.approx(log_p.max(-1).values.tolist(), abs=1e-5)
    assert last(table)["kl"].max() < 1e-6
    assert table["layer"].nunique() == model.depth
    assert set(table["kind"]) <= {"full", "window", "recurrent", "conv", "none"}
    figures.logit_lens(table).draw_without_rendering()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"rows": [12]}, "rows"), ({"rows": "first"}, "rows"), ({"rows": []}, "rows"), ({"where": "delta"}, "where"),
        ({"top": 0}, "top"), ({"target": "next"}, "comes after the last column"), ({"target": [1, 2]}, "target"),
        ({"target": "best"}, "target"), ({"target": [1.5]}, "whole numbers"),
    ],
)  # fmt: skip
def test_mistakes_are_named(options, named):
    options = {"rows": [-1], **options}
    lens = inspect.unwrap(hs.logit_lens)  # without the checks of types that the tests add
    with pytest.raises(ValueError, match=named):
        lens(model_of("full"), tokens_of(2, 12), **options)


def test_a_model_that_does_more_after_its_last_layer_is_refused(monkeypatch):
    model = model_of("full", "gdn")
    hidden = model.hidden
    monkeypatch.setattr(model, "hidden", lambda *args: 2 * hidden(*args))
    with pytest.raises(ValueError, match="from the model's hidden states"):
        hs.logit_lens(model, tokens_of(1, 6))
