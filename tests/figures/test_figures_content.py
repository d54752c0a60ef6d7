"""What is drawn is what the table says, for every kind in it."""

import math

import figure_tables as tables
import matplotlib
import numpy as np
import pandas as pd
import pytest
from matplotlib.colors import to_rgba

from hybridscope import figures
from hybridscope.figures.style import KINDS


def lines(axes):
    return {line.get_label(): line for line in axes.get_lines()}


def colors(figure):
    """Every colour of a line, patch or outline in the figure."""
    artists = [artist for axes in figure.axes for artist in [*axes.get_lines(), *axes.patches]]
    found = {tuple(to_rgba(a.get_color())) for a in artists if hasattr(a, "get_color")}
    patches = [a for a in artists if hasattr(a, "get_facecolor")]
    return found | {tuple(a.get_facecolor()) for a in patches} | {tuple(a.get_edgecolor()) for a in patches}


def test_probe_curve_draws_the_accuracies_along_depth():
    table = tables.probe()
    axes = figures.probe_curve(table).axes[0]
    real = table.query("control == 'none'").pivot(index="layer", columns="where", values="accuracy")
    probe = lines(axes)["probe"]
    np.testing.assert_allclose(probe.get_xdata(), np.arange(-0.5, 4, 0.5))
    assert list(probe.get_ydata()[::2]) == [*real["pre"], real["post"].iloc[-1]]
    assert list(probe.get_ydata()[1::2]) == list(real["mid"])
    shuffled = table.query("control == 'shuffled' and where == 'mid'")["accuracy"]
    assert list(lines(axes)["shuffled"].get_ydata()[1::2]) == list(shuffled)


def test_probe_curve_shows_each_mixers_gain_in_its_kinds_colour():
    table = tables.probe()
    bars = figures.probe_curve(table).axes[1].patches
    gains = {round(bar.get_x() + bar.get_width() / 2): (bar.get_height(), bar.get_facecolor()) for bar in bars}
    for row in table.dropna(subset="gain").itertuples():
        height, color = gains[row.layer]
        assert height == pytest.approx(row.gain)
        assert color == to_rgba(KINDS[row.kind].color)


def test_probe_curve_gives_each_target_a_panel_and_needs_no_gain_column():
    assert len(figures.probe_curve(tables.probe(targets=("value", "depth"))).axes) == 5
    assert len(figures.probe_curve(tables.probe().drop(columns=["gain", "mixer"])).axes) == 2


def test_probe_curve_of_what_the_mixers_add_alone_has_its_markers_and_no_line():
    table = tables.probe()
    table = table[table["where"] == "mid"].assign(where="delta", gain=np.nan)
    axes = figures.probe_curve(table).axes[0]
    alone = [line for line in axes.lines if str(line.get_label()).startswith("_delta")]
    expected = table.loc[table["control"] == "none", "accuracy"].tolist()
    assert [float(line.get_ydata()[0]) for line in alone] == expected


def test_cap_curves_draw_the_measured_caps_and_put_the_others_on_the_baseline():
    table = tables.caps()
    accuracy, perplexity = figures.cap_curves(table).axes
    for axes, column in ((accuracy, "needle_accuracy"), (perplexity, "log_ppl")):
        base = table[column].iloc[0]
        for kind in ("full", "window", "recurrent"):
            rows = table.query("layer == -1 and kind == @kind and sinks == 4")
            bound, free = lines(axes)[f"_binds {kind}, 4 sinks"], lines(axes)[f"_free {kind}, 4 sinks"]
            assert list(bound.get_ydata()) == list(rows[rows["binds"]][column])
            assert list(free.get_xdata()) == list(rows[~rows["binds"]]["window"])
            assert (free.get_ydata() == base).all()
            assert free.get_markerfacecolor() == "white"


def test_cap_curves_tell_sinks_by_line_style_and_drop_an_unmeasured_panel():
    (axes,) = figures.cap_curves(tables.caps().assign(needle_accuracy=np.nan)).axes
    assert "perplexity" in axes.get_ylabel()
    drawn = lines(axes)
    assert drawn["full, 0 sinks"].get_linestyle() != drawn["full, 4 sinks"].get_linestyle()
    assert drawn["full, 0 sinks"].get_color() == drawn["full, 4 sinks"].get_color()


def test_cap_heatmap_marks_what_cannot_bind_and_what_was_not_measured():
    table = tables.caps(sinks=(0,))
    table = table[~((table["layer"] == 3) & (table["window"] == 4))]
    hatches = [patch.get_hatch() for patch in figures.cap_heatmap(table).axes[0].patches]
    assert hatches.count("/////") == (~table.query("layer >= 0")["binds"]).sum()
    assert hatches.count("....") == 1


@pytest.mark.parametrize("value", ["delta_needle_accuracy", "delta_log_ppl"])
def test_cap_heatmap_holds_the_table_and_darkens_with_harm(value):
    table = tables.caps(sinks=(0,))
    image = figures.cap_heatmap(table, value=value).axes[0].images[0]
    rows = table.query("layer >= 0")
    grid = rows.pivot(index="window", columns="layer", values=value).to_numpy()
    np.testing.assert_allclose(np.ma.filled(image.get_array(), np.nan), grid)
    harm = np.where(np.isnan(grid), 0, np.abs(grid))
    assert image.cmap(image.norm(grid.flat[harm.argmax()]))[0] < 0.3
    assert image.cmap(image.norm(0.0))[0] > 0.9


@pytest.mark.parametrize(("value", "sign"), [("delta_needle_accuracy", -1), ("delta_log_ppl", 1)])
@pytest.mark.parametrize(
    "harm", [[0.0, 0.0], [0.0, -0.1], [-0.3, -0.1], [0.0, 1e-12], [0.0, 0.4], [-0.3, 0.4], [0.2, 0.4]]
)
def test_cap_heatmap_is_white_without_harm_and_darkest_at_the_most(value, sign, harm):
    table = tables.caps(["full", "full"], sinks=(0,), windows=(4,))
    table.loc[table["layer"] >= 0, value] = [sign * h for h in harm]
    image = figures.cap_heatmap(table, value=value).axes[0].images[0]
    colors = [image.cmap(image.norm(sign * h)) for h in harm]
    assert image.cmap(image.norm(0.0))[:3] == (1, 1, 1)
    for color, amount in zip(colors, harm, strict=True):
        assert (color[:3] == (1, 1, 1)) is (amount < 1e-9)
    if max(harm) > 0.01:
        assert colors[np.argmax(harm)] == image.cmap(image.norm(sign * 9.0))
        assert colors[np.argmax(harm)][0] < 0.2
    low, high = sorted(image.get_clim())
    assert high - low == pytest.approx(max(0.01, *harm))


def test_cap_heatmap_gives_parallel_sites_a_column_each():
    table = tables.caps(["full", "full"], sinks=(0,)).assign(site=0, mixer="full")
    beside = table.query("layer == 1").assign(site=1, kind="window", mixer="swa:8", delta_needle_accuracy=-0.25)
    figure = figures.cap_heatmap(pd.concat([table, beside]))
    image = figure.axes[0].images[0].get_array()
    assert image.shape == (5, 3)
    assert (image[:-1, 2] == -0.25).all()
    assert [t.get_text() for t in figure.axes[1].get_xticklabels()] == ["0.0", "1.0", "1.1"]
    assert {"full", "swa:8"} <= {t.get_text() for t in figure.axes[1].texts}


def test_cap_curves_and_heatmap_leave_rows_by_distance_out():
    table = tables.caps(sinks=(0,))
    bucket = table.assign(distance_low=0.0, distance_high=8.0, needle_accuracy=0.0, delta_needle_accuracy=-1.0)
    both = pd.concat([table.assign(distance_low=np.nan, distance_high=np.nan), bucket])
    plain, mixed = figures.cap_curves(table), figures.cap_curves(both)
    for a, b in zip(plain.axes[0].get_lines(), mixed.axes[0].get_lines(), strict=True):
        assert list(a.get_ydata()) == list(b.get_ydata())
    images = [figures.cap_heatmap(t).axes[0].images[0].get_array() for t in (table, both)]
    np.testing.assert_array_equal(np.ma.filled(images[0], 9), np.ma.filled(images[1], 9))


def test_cap_distance_steps_over_the_buckets_and_marks_where_each_cap_ends():
    table = tables.distances()
    full, window = figures.cap_distance(table).axes
    assert "full" in full.get_ylabel()
    assert "window" in window.get_ylabel()
    for size in (4, 16, 64):
        for sinks in (0, 4):
            line = lines(full)[f"{size}, {sinks} sinks"]
            rows = table.query("kind == 'full' and window == @size and sinks == @sinks").dropna(subset="distance_low")
            assert list(line.get_ydata()[::2]) == list(line.get_ydata()[1::2]) == list(rows["needle_accuracy"])
            assert list(line.get_xdata()[1::2]) == list(rows["distance_high"])
        assert list(lines(full)[f"_ends {size}"].get_xdata()) == [size, size]
    drawn = lines(full)
    assert drawn["4, 0 sinks"].get_linestyle() != drawn["4, 4 sinks"].get_linestyle()
    np.testing.assert_allclose(drawn["4, 0 sinks"].get_color(), to_rgba(KINDS["full"].color)[:3])
    assert sum(drawn["64, 0 sinks"].get_color()) > sum(drawn["16, 0 sinks"].get_color())  # weaker caps are paler
    assert {name for name in lines(window) if name[0] != "_"} == {"uncapped", "4, 0 sinks", "4, 4 sinks"}  # others free


def test_layer_importance_draws_a_bar_per_site_and_setting_and_writes_the_ranks():
    table = tables.importance(["full", "gdn", "full", "full", "full"])
    table.loc[(table["layer"] == 4) & (table["window"] == 32), "binds"] = False
    figure = figures.layer_importance(table)
    assert "nats/answer token" in figure.get_supylabel()
    for axes, window in zip(figure.axes, (8, 32), strict=False):
        assert axes.get_title(loc="left") == f"capped at {window} tokens"
        for bars in axes.containers[:2]:
            rows = table[(table["window"] == window) & (table["sinks"] == int(str(bars.get_label())[0]))]
            assert [bar.get_height() for bar in bars] == list(rows["importance"])
        assert [t.get_text() for t in axes.texts] == ["1", "2", "3"]
        assert [round(t.get_position()[0]) for t in axes.texts] == [0, 1, 2]
    hatched = [patch for patch in figure.axes[1].patches if patch.get_hatch()]
    assert [round(p.get_x() + 0.5) for p in hatched] == [3]


@pytest.mark.parametrize("values", [0.0, 1e-12])
def test_layer_importance_of_nothing_is_no_plot_of_rounding(values):
    table = tables.importance().assign(importance=values, binds=False)
    for axes in figures.layer_importance(table).axes[:2]:
        assert np.ptp(axes.get_ylim()) > 0.01


def test_formation_follows_the_top_heads_by_final_mass_and_their_mean():
    track, drift = tables.track(), tables.drift()
    figure = figures.formation(track, drift, top=2)
    mass = next(axes for axes in figure.axes if "mass" in axes.get_ylabel())
    assert set(lines(mass)) == {"L3H3", "L3H2", "mean"}
    best = track.query("layer == 3 and head == 3")
    assert list(lines(mass)["L3H3"].get_ydata()) == list(best["mass"])
    both = track.query("layer == 3 and head >= 2").groupby("step")["mass"].mean()
    np.testing.assert_allclose(lines(mass)["mean"].get_ydata(), both)
    distance = next(axes for axes in figure.axes if "drift" in axes.get_ylabel())
    expected = drift.query("layer == 3 and head == 2")["qk_rel"]
    assert list(lines(distance)["L3H2"].get_ydata()) == list(expected)


def test_formation_takes_heads_by_name_and_shows_tokens_above_their_steps():
    figure = figures.formation(tables.track(), heads=[(0, 1), (1, 0, 2)])
    entropy = figure.axes[0]
    assert set(lines(entropy)) == {"L0H1", "L1H2", "mean"}
    upper = next(axes for axes in figure.axes if axes.get_xlabel() == "tokens")
    ticks = {label.get_text(): place for label, place in zip(upper.get_xticklabels(), upper.get_xticks(), strict=True)}
    assert ticks["10M"] == pytest.approx(1e7 / 16384)


def test_formation_on_a_log_axis_keeps_step_0():
    steps = (0, 1, 2, 4, 8, 16, 32, 64)
    axes = figures.formation(tables.track(steps=steps), log_steps=True).axes[0]
    assert axes.get_xlim() == (0, 64)
    assert axes.get_xscale() == "symlog"


def test_formation_steps_stand_at_their_thresholds_with_their_intervals():
    """Observed, reached too late for the ladder, and there from the start."""
    rows = [(0.25, 300.0, 250.0, 350.0, ""), (0.5, 1100.0, 900.0, np.inf, "right"), (0.1, 0.0, 0.0, 40.0, "left")]
    formed = pd.DataFrame(rows, columns=["threshold", "step", "low", "high", "censored"])
    figure = figures.formation(tables.track(), formed=formed, top=2)
    mass = next(axes for axes in figure.axes if "mass" in axes.get_ylabel())
    marks = {name: line for line in mass.lines if (name := str(line.get_label())).startswith("_formed")}
    assert [(m.get_xdata()[0], m.get_ydata()[0]) for m in marks.values()] == [(r[1], r[0]) for r in rows]
    assert [m.get_marker() for m in marks.values()] == ["o", ">", "<"]
    spans = [list(line.get_xdata()) for line in mass.lines if list(line.get_ydata()) in ([0.25] * 2, [0.5] * 2)]
    assert spans == [[250, 350], [900, 1100]]  # the infinite end is cut at the ladder's
    with pytest.raises(ValueError, match="no column 'censored'"):
        figures.formation(tables.track(), formed=formed.drop(columns="censored"))


def test_heads_chosen_at_each_step_are_drawn_as_their_mean():
    """Another head at every step: no line joins them, and the mean is over all that were chosen."""
    track = tables.track()
    best = track.sort_values("mass").groupby("step").tail(2)
    first = track.query("step == 0 and layer == 1").head(2)
    chosen = pd.concat([first, best[best["step"] > 0]])
    mass = next(a for a in figures.formation(chosen).axes if "mass" in a.get_ylabel())
    assert set(lines(mass)) == {"mean"}
    np.testing.assert_allclose(lines(mass)["mean"].get_ydata(), chosen.groupby("step")["mass"].mean())


def test_influence_draws_one_line_per_model_and_lets_zeros_fall_to_the_bottom():
    table = tables.influence()
    panels = figures.influence(table).axes
    assert len(panels) == 2
    line = lines(panels[0])["full"]
    rows = table.query("target == 'loss' and model == 'full'")
    assert list(line.get_ydata()) == list(rows["influence"])
    assert list(line.get_xdata()) == [0.5, *rows["distance"][1:]]
    assert lines(panels[0])["_3:1 gdn becomes 0"].get_ydata()[-1] == panels[0].get_ylim()[0]


def test_influence_shows_intervals_where_the_table_has_them():
    table = tables.influence(targets=("loss",), models=("full",))
    bare = figures.influence(table).axes[0]
    spread = figures.influence(table.assign(low=table.influence / 2, high=2 * table.influence)).axes[0]
    assert not bare.collections
    (band,) = spread.collections
    assert band.get_paths()[0].vertices[:, 1].max() == pytest.approx(2 * table.influence.max())
    figures.influence(table.assign(low=math.nan, high=math.nan))  # one document


def test_influence_without_a_series_column_draws_one_line_per_target():
    table = tables.influence(models=("full",)).drop(columns="model")
    (axes,) = figures.influence(table).axes
    assert {"loss", "logit_sum"} <= set(lines(axes))


def test_perplexity_steps_over_the_buckets():
    table = tables.loss()
    (axes,) = figures.perplexity(table).axes
    line = lines(axes)["full 2048"]
    rows = table.query("setting == 'full 2048'")
    assert list(line.get_ydata()[::2]) == list(rows["loss"])
    assert list(line.get_xdata()[1::2]) == list(rows["position_high"])
    (axes,) = figures.perplexity(table.query("setting == 'uncapped'").drop(columns="setting")).axes
    assert set(lines(axes)) == {"loss"}


def test_heads_map_holds_the_scores_and_outlines_the_top_heads():
    table = tables.scores()
    axes = figures.heads_map(table, top=3).axes[0]
    grid = table.pivot(index="head", columns="layer", values="score").to_numpy()
    np.testing.assert_allclose(axes.images[0].get_array(), grid)
    assert {text.get_text() for text in axes.texts} == {"L5H7", "L5H6", "L5H5"}
    assert {patch.get_edgecolor() for patch in axes.patches} == {to_rgba(KINDS["full"].color)}


def test_heads_map_gives_parallel_sites_a_column_each():
    table = tables.scores(["full", "full"])
    both = [table, table.assign(site=1, kind="recurrent", mixer="gdn", score=0.0)]
    figure = figures.heads_map(pd.concat(both), top=1)
    assert figure.axes[0].images[0].get_array().shape == (8, 4)
    assert [t.get_text() for t in figure.axes[1].get_xticklabels()] == ["0.0", "0.1", "1.0", "1.1"]
    assert figure.axes[0].texts[0].get_text() == "L1S0H7"


@pytest.mark.parametrize(
    ("draw", "kinds"),
    [
        (lambda: figures.probe_curve(tables.probe(tables.MIXED)), {"full", "window", "recurrent", "conv"}),
        (lambda: figures.cap_curves(tables.caps()), {"full", "window", "recurrent"}),
        (lambda: figures.cap_heatmap(tables.caps()), {"full", "window", "recurrent"}),
        (lambda: figures.heads_map(tables.scores()), {"full", "window"}),
        (lambda: figures.formation(tables.track(), heads=[(0, 0), (1, 0)]), {"full", "window"}),
    ],
    ids=["probe_curve", "cap_curves", "cap_heatmap", "heads_map", "formation"],
)
def test_every_kind_in_the_table_is_in_the_figure(draw, kinds):
    shown = colors(draw())
    assert all(to_rgba(KINDS[kind].color) in shown for kind in kinds)


def test_figures_ignore_and_keep_the_callers_settings():
    with matplotlib.rc_context({"font.size": 30, "axes.labelsize": 30}):
        before = dict(matplotlib.rcParams)
        axes = figures.perplexity(tables.loss()).axes[0]
        assert axes.yaxis.label.get_fontsize() == 8
        assert dict(matplotlib.rcParams) == before


def test_logit_lens_draws_the_medians_and_the_middle_half():
    table = tables.lens()
    figure = figures.logit_lens(table)
    for axes, column in zip(figure.axes, ("log_prob", "kl"), strict=False):
        (line,) = [line for line in axes.lines if line.get_label() == column]
        assert np.allclose(line.get_ydata(), table.groupby("layer")[column].median())
        low, high = (table.groupby("layer")[column].quantile(q) for q in (0.25, 0.75))
        (band,) = axes.collections
        y = band.get_paths()[0].vertices[:, 1]
        assert (y.min(), y.max()) == pytest.approx((low.min(), high.max()))


def test_patching_draws_every_share_where_its_head_is():
    table = tables.patches()
    figure = figures.patching(table)
    images = [axes.images[0] for axes in figure.axes if axes.images and axes.get_title(loc="left")]
    assert len(images) == 4
    some = table[(table.direction == "denoise") & (table.rows == "answer")]
    (image,) = [a.images[0] for a in figure.axes if a.get_title(loc="left") == "answer rows, clean into corrupt"]
    grid = np.asarray(image.get_array())
    assert grid.shape == (4, len(tables.MIXED))
    for layer, head, share in some[["layer", "head", "recovered"]].itertuples(index=False):
        assert grid[head, layer] == pytest.approx(share)
    assert {image.norm.vmin for image in images} == {table.recovered.min()}
    assert {image.norm.vmax for image in images} == {1.0}


def test_cost_draws_a_line_per_model_and_only_what_was_measured():
    table = tables.costs()
    panels = figures.cost(table).axes
    assert len(panels) == 3
    assert len(figures.cost(tables.costs(measured=False)).axes) == 1
    for axes, (column, scale) in zip(
        panels, {"cache_bytes": 2**-20, "prefill_tokens_per_s": 1e-3, "decode_ms": 1}.items(), strict=True
    ):
        for model, rows in table.groupby("model"):
            (line,) = [line for line in axes.lines if line.get_label() == model]
            assert np.allclose(line.get_ydata(), scale * rows[column])
            assert np.allclose(line.get_xdata(), rows["length"])
