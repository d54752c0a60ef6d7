"""Capping one kind of layer: what binds, what breaks, over the same positions for every window."""

from __future__ import annotations

import dataclasses
import math
from itertools import pairwise

import planted
import pytest
import torch
from helpers import model_of, tokens_of
from planted import T, needles

import hybridscope as hs
from hybridscope.probes import capsweep
from hybridscope.probes.needles import score_answers

COLUMNS = [
    "kind", "layer", "site", "mixer", "window", "sinks", "binds", "distance_low", "distance_high", "n", "within",
    "positions", "log_ppl", "delta_log_ppl", "needle_accuracy", "delta_needle_accuracy", "answer_loss",
    "delta_answer_loss", "reach",
]  # fmt: skip


@pytest.fixture(scope="module")
def model():
    return planted.planted()


@pytest.fixture(scope="module")
def prompts():
    return needles(30)


@pytest.fixture(scope="module")
def hybrid():
    return model_of("swa:4", "gdn", "full", "nope", n_kv_heads=2)


def prompts_for(model, length=24, n=6):
    made = hs.make_needles(n, length)
    made.tokens %= 41
    made.answers %= 41
    return made


def at(table, **where):
    for name, value in where.items():
        table = table[table[name] == value]
    assert len(table) == 1
    return table.iloc[0]


# What breaks


def test_full_layers_lose_exactly_the_needles_that_lie_beyond_the_cap(model, prompts):
    windows = [5, 15, 30, 45]
    table = hs.cap_sweep(model, prompts, kinds=["full"], windows=windows, sinks=(0,))
    assert at(table, kind="none")["needle_accuracy"] == 1
    for window in windows:
        seen = (prompts.distance < window).float().mean().item()
        row = at(table, kind="full", window=window)
        assert row["needle_accuracy"] == pytest.approx(seen, abs=1e-6)
        assert row["delta_needle_accuracy"] == pytest.approx(seen - 1, abs=1e-6)


def test_the_window_layer_breaks_it_only_below_its_own_window(model, prompts):
    table = hs.cap_sweep(model, prompts, kinds=["window"], windows=[1, 2, 3], sinks=(0,))
    assert at(table, window=1)["needle_accuracy"] < 0.5
    for window in (2, 3):
        assert not at(table, window=window)["binds"]
        assert at(table, window=window)["needle_accuracy"] == 1


def test_one_layer_at_a_time(model, prompts):
    """Layer 1 reads the needle, layer 2 nothing."""
    table = hs.cap_sweep(model, prompts, kinds=["full"], windows=[5], sinks=(0,), by_layer=True)
    assert table["layer"].tolist() == [-1, 1, 2]
    assert at(table, layer=1)["needle_accuracy"] < 0.5
    assert at(table, layer=2)["needle_accuracy"] == 1
    assert at(table, layer=2)["binds"]
    assert table["reach"].isna().all()  # the other full layer still sees everything


def test_sinks_keep_the_first_tokens_visible(model):
    """Needles within the first four tokens survive any cap that spares them."""
    made = needles(40, depth=(0, 0))
    assert (made.spans["value"] <= 4).all()
    table = hs.cap_sweep(model, made, kinds=["full"], windows=[5], sinks=(0, 4))
    assert at(table, kind="full", sinks=0)["needle_accuracy"] == 0
    assert at(table, kind="full", sinks=4)["needle_accuracy"] == 1


def test_parallel_sites_are_capped_one_by_one():
    model = model_of("gdn", "full+swa:8", "full", n_kv_heads=2)
    made = prompts_for(model)
    table = hs.cap_sweep(model, made, kinds=["full", "window"], windows=[4], sinks=(0,), by_layer=True)
    assert table[["layer", "site", "kind", "mixer"]].to_numpy().tolist() == [
        [-1, -1, "none", ""], [1, 0, "full", "full"], [2, 0, "full", "full"], [1, 1, "window", "swa:8"],
    ]  # fmt: skip
    for row in table.iloc[1:].itertuples():
        with model.cap({(row.layer, row.site): 4}):
            expected = score_answers(model, made)[1].mean().item()
        assert row.answer_loss == pytest.approx(expected, abs=1e-12)
        assert row.delta_answer_loss == row.answer_loss - table["answer_loss"].iloc[0] != 0


# By distance


def test_accuracy_by_distance_is_one_inside_the_cap_and_none_beyond_it(model, prompts):
    windows = [8, 20, 35]
    table = hs.cap_sweep(model, prompts, kinds=["full"], windows=windows, sinks=(0,), by_distance=True)
    near = table.dropna(subset="distance_low")
    edges = [0, 8, 20, 35, int(prompts.distance.max()) + 1]
    for window in [None, *windows]:
        rows = near[near["window"].isna() if window is None else near["window"] == window]
        assert list(zip(rows["distance_low"], rows["distance_high"], strict=True)) == list(pairwise(edges))
        reached = (rows["distance_high"] <= (window or T)).astype(float)
        assert (rows["within"] == reached).all()
        assert (rows["needle_accuracy"] == reached).all()
        assert (rows["delta_needle_accuracy"] == reached - 1).all()
        inside = [((prompts.distance >= a) & (prompts.distance < b)).sum().item() for a, b in pairwise(edges)]
        assert rows["n"].tolist() == inside
        whole = table[table["distance_low"].isna() & table["window"].isin(rows["window"])].iloc[0]
        assert (rows["needle_accuracy"] * rows["n"]).sum() == pytest.approx(whole["needle_accuracy"] * 30)
        assert (rows["answer_loss"] * rows["n"]).sum() == pytest.approx(whole["answer_loss"] * 30)
        assert whole["n"] == 30
    assert near["log_ppl"].isna().all()


def test_within_counts_needles_that_the_sinks_spare_and_those_of_a_native_window(model):
    made = needles(40, depth=(0, 0))
    table = hs.cap_sweep(model, made, kinds=["full", "window"], windows=[5], sinks=(0, 4), by_distance=[0, 10, 48])
    rows = table.dropna(subset="distance_low")
    assert (rows["distance_low"] == 10).all()  # no needle is nearer
    assert at(rows, kind="full", sinks=0)["within"] == 0
    assert at(rows, kind="full", sinks=4)["within"] == at(rows, kind="full", sinks=4)["needle_accuracy"] == 1
    assert at(rows, kind="none")["within"] == 1
    assert at(rows, kind="window", sinks=4)["within"] == 0  # sinks stay within the native window
    assert at(rows, kind="window", sinks=4)["needle_accuracy"] == 1


def test_within_of_padded_prompts_and_of_chunks(model, prompts):
    late = dataclasses.replace(
        prompts, attention_mask=torch.arange(T).expand(30, T) >= 3, spans=prompts.spans,
    )  # fmt: skip
    (full,) = [s for s in model.sites if s.mixer == "full"]
    start = prompts.spans["value"][:, 0]
    seen = capsweep.Setting("full", [full], 5, 4).sees(late)
    assert torch.equal(seen, (prompts.distance < 5) | (start - 3 < 4))
    chunk = dataclasses.replace(full, kind="window", mixer="chunk:10", window=10)
    seen = capsweep.Setting("window", [chunk], 100, 0).sees(prompts)
    assert torch.equal(seen, start >= 40)  # the question stands at 46 and 47


def test_buckets_by_number_or_edges(model, prompts):
    swept = hs.cap_sweep(model, prompts, kinds=["full"], windows=[8], sinks=(0,), by_distance=3)
    rows = swept[swept["kind"] == "none"].dropna(subset="distance_low")
    assert rows["distance_high"].iloc[-1] == prompts.distance.max() + 1
    assert 1 < len(rows) <= 3
    assert rows["n"].sum() == 30


# Perplexity


def test_log_perplexity_is_over_the_same_positions_for_every_window(hybrid):
    """Rows from the largest window on, each setting by hand."""
    texts = tokens_of(5, 40)
    windows = [4, 7, 20]
    table = hs.cap_sweep(hybrid, texts=texts, kinds=["full", "recurrent"], windows=windows, sinks=(0,), batch=2)
    base = hybrid.loss(texts, per_token=True)[:, 20:].mean().item()
    assert at(table, kind="none")["log_ppl"] == pytest.approx(base, abs=1e-12)
    for kind in ("full", "recurrent"):
        for window in windows:
            with hybrid.cap(**{kind: window}):
                expected = hybrid.loss(texts, per_token=True)[:, 20:].mean().item()
            row = at(table, kind=kind, window=window)
            assert row["log_ppl"] == pytest.approx(expected, abs=1e-12)
            assert row["delta_log_ppl"] == row["log_ppl"] - at(table, kind="none")["log_ppl"]
            assert row["delta_log_ppl"] != 0


def test_what_was_not_given_is_nan(hybrid, model, prompts):
    texts_only = hs.cap_sweep(hybrid, texts=tokens_of(2, 30), kinds=["full"], windows=[8], sinks=(0,))
    assert texts_only["needle_accuracy"].isna().all()
    assert texts_only["log_ppl"].notna().all()
    needles_only = hs.cap_sweep(model, prompts, kinds=["full"], windows=[8], sinks=(0,))
    assert needles_only["log_ppl"].isna().all()
    assert list(needles_only) == list(texts_only) == COLUMNS


@pytest.mark.parametrize(("windows", "positions"), [([4, 18], 1), ([4], 15), ([4, 18, 99], 1)])
def test_it_says_how_many_positions_it_is_over(hybrid, windows, positions):
    """The last token of a text predicts nothing, and windows that no text can feel do not count."""
    texts = tokens_of(3, 20)
    table = hs.cap_sweep(hybrid, texts=texts, kinds=["full"], windows=windows, sinks=(0,))
    assert (table["positions"] == positions).all()
    assert hybrid.loss(texts, per_token=True)[:, -positions:].mean().item() == pytest.approx(table["log_ppl"].iloc[0])


def test_no_positions_are_read_where_there_is_no_perplexity(model, prompts):
    texts = planted.needles(3).tokens
    table = hs.cap_sweep(model, prompts, texts, kinds=["full"], windows=[8], sinks=(0,), by_distance=True)
    assert table.loc[table["distance_low"].isna(), "positions"].tolist() == [T - 1 - 8] * 2
    assert (table.loc[table["distance_low"].notna(), "positions"] == 0).all()
    assert (hs.cap_sweep(model, prompts, kinds=["full"], windows=[8], sinks=(0,))["positions"] == 0).all()


# What binds


def test_a_cap_binds_only_where_it_can_change_something(hybrid):
    length = 24
    table = hs.cap_sweep(hybrid, texts=tokens_of(2, length + 8), windows=[4], sinks=(0,))
    assert table["kind"].tolist() == ["none", "window", "recurrent", "full"]
    assert table["binds"].tolist() == [False, False, True, True]  # the window is 4 itself

    made = hs.make_needles(4, length)
    made.tokens %= 41
    windows = [3, 4, 5, length - 1, length, length + 1, 10 * length]
    swept = hs.cap_sweep(hybrid, made, kinds=["full", "window"], windows=windows, sinks=(0,))
    full, window = (swept.query("kind == @k")["binds"].tolist() for k in ("full", "window"))
    assert full == [True] * 4 + [False] * 3
    assert window == [True] + [False] * 6


def test_sinks_that_fill_the_gap_leave_nothing_to_hide(hybrid):
    made = hs.make_needles(4, 24)
    made.tokens %= 41
    table = hs.cap_sweep(hybrid, made, kinds=["full"], windows=[19, 20], sinks=(0, 4))
    assert table["binds"].tolist() == [False, True, True, True, False]
    with hybrid.cap(full=20, sinks=4):
        capped = hybrid(made.tokens)
    assert (capped - hybrid(made.tokens)).abs().max() < 1e-12


def test_settings_that_cannot_bind_are_not_run_and_repeat_the_uncapped_row(hybrid, monkeypatch):
    runs = []
    measure = capsweep._measure
    monkeypatch.setattr(capsweep, "_measure", lambda *args: runs.append(1) or measure(*args))
    table = hs.cap_sweep(hybrid, texts=tokens_of(2, 30), kinds=["window"], windows=[2, 4, 16], sinks=(0, 2))
    assert len(runs) == 1 + 2  # uncapped, and window 2 with both sinks
    loose = table.query("kind == 'window' and not binds")
    assert len(loose) == 4
    assert (loose["log_ppl"] == table["log_ppl"].iloc[0]).all()
    assert (loose["delta_log_ppl"] == 0).all()


def test_one_forward_pass_per_setting_and_input_that_can_feel_it(hybrid, monkeypatch):
    """On 24-token needles and 40-token texts a cap of 30 is felt by the texts alone, one of 50 by nothing."""
    passes = []
    hidden = type(hybrid).hidden
    monkeypatch.setattr(
        type(hybrid), "hidden", lambda self, x, *args, **kw: passes.append(x.shape[1]) or hidden(self, x, *args, **kw)
    )
    options = {"kinds": ["full"], "windows": [8, 30, 50], "sinks": (0,), "batch": 8, "by_distance": True}
    table = hs.cap_sweep(hybrid, prompts_for(hybrid), tokens_of(3, 40), **options)
    assert sorted(passes) == [24, 24, 40, 40, 40]
    rows = table[table["distance_low"].isna()]
    assert rows["binds"].tolist() == [False, True, True, False]
    assert (rows["delta_log_ppl"] != 0).tolist() == [False, True, True, False]
    assert (rows["delta_answer_loss"] != 0).tolist() == [False, True, False, False]
    base = hybrid.loss(tokens_of(3, 40), per_token=True)[:, 30:].mean().item()  # 50 leaves no position and counts not
    assert rows["log_ppl"].iloc[0] == pytest.approx(base, abs=1e-12)


def test_recurrent_sites_run_without_sinks(hybrid):
    table = hs.cap_sweep(hybrid, texts=tokens_of(1, 30), windows=[8], sinks=(0, 4))
    assert table.query("kind == 'recurrent'")["sinks"].tolist() == [0]
    assert table.query("kind == 'full'")["sinks"].tolist() == [0, 4]


# Reach


def test_reach_is_that_of_the_capped_stack():
    model = model_of("swa:4", "full")
    table = hs.cap_sweep(model, texts=tokens_of(1, 30), windows=[3, 8], sinks=(0, 4))
    assert math.isnan(table["reach"].iloc[0])
    assert at(table, kind="full", window=8, sinks=0)["reach"] == 1 + 3 + 7
    assert math.isnan(at(table, kind="full", window=8, sinks=4)["reach"])  # sinks are seen from everywhere
    assert math.isnan(at(table, kind="window", window=3, sinks=0)["reach"])


def test_the_model_is_left_uncapped(model, prompts):
    hs.cap_sweep(model, prompts, windows=[5])
    assert not any(site.active for site in model.sites)
    assert hs.needle_accuracy(model, prompts) == 1
