"""On the page: units, text sizes, nothing overlaps or is clipped, nothing leaks, bad tables are named."""

import subprocess
import sys
from itertools import combinations

import figure_tables as tables
import matplotlib.image
import matplotlib.pyplot as plt
import pandas as pd
import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text

from hybridscope import figures
from hybridscope.figures import DOUBLE

DRAW = {
    "probe_curve": lambda **o: figures.probe_curve(tables.probe(tables.MIXED), **o),
    "probe_curve deep": lambda **o: figures.probe_curve(tables.probe(tables.DEEP, ("value", "depth")), **o),
    "cap_curves": lambda **o: figures.cap_curves(tables.caps(), **o),
    "cap_heatmap": lambda **o: figures.cap_heatmap(tables.caps(), **o),
    "cap_distance": lambda **o: figures.cap_distance(tables.distances(), **o),
    "layer_importance": lambda **o: figures.layer_importance(tables.importance(), **o),
    "layer_importance small": lambda **o: figures.layer_importance(tables.importance(windows=(8,), sinks=(0,)), **o),
    "layer_importance deep": lambda **o: figures.layer_importance(tables.importance(["full"] * 24), **o),
    "formation": lambda **o: figures.formation(tables.track(), tables.drift(), top=6, **o),
    "influence": lambda **o: figures.influence(tables.influence(), **o),
    "perplexity": lambda **o: figures.perplexity(tables.loss(), **o),
    "heads_map": lambda **o: figures.heads_map(tables.scores(), **o),
    "logit_lens": lambda **o: figures.logit_lens(tables.lens(), **o),
    "patching": lambda **o: figures.patching(tables.patches(), **o),
    "patching sites": lambda **o: figures.patching(tables.patches(heads=0), **o),
    "cost": lambda **o: figures.cost(tables.costs(), **o),
    "cost formulas": lambda **o: figures.cost(tables.costs(measured=False), **o),
}


@pytest.fixture(scope="module", params=[(name, width) for name in DRAW for width in (figures.SINGLE, DOUBLE)], ids=str)
def figure(request) -> Figure:
    name, width = request.param
    return DRAW[name](width=width)


def texts(figure: Figure) -> list[Text]:
    """Every visible text; of tick labels only those inside their axis' limits, as those are drawn."""
    figure.draw_without_rendering()
    found = [text for text in figure.findobj(Text) if text.get_visible() and text.get_text().strip()]
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            drawn = axis._update_ticks()
            ticks = [*axis.get_major_ticks(), *axis.get_minor_ticks()]
            hidden = {label for tick in ticks if tick not in drawn for label in (tick.label1, tick.label2)}
            found = [text for text in found if text not in hidden]
    return found


def test_texts_are_readable_inside_the_page_and_do_not_overlap(figure):
    page = figure.bbox.padded(1)
    boxes = {text: Text.get_window_extent(text) for text in texts(figure)}  # without an annotation's hairline
    for text, box in boxes.items():
        assert text.get_fontsize() >= 7
        assert page.x0 <= box.x0 <= box.x1 <= page.x1, text.get_text()
        assert page.y0 <= box.y0 <= box.y1 <= page.y1, text.get_text()
    for (a, first), (b, second) in combinations(boxes.items(), 2):
        wide = min(first.x1, second.x1) - max(first.x0, second.x0)
        high = min(first.y1, second.y1) - max(first.y0, second.y0)
        assert min(wide, high) <= 1.0, (a.get_text(), b.get_text(), wide, high)


def test_axis_labels_carry_units(figure):
    unitless = {"layer", "head", "optimiser step", "tokens", "score", ""}
    labels = [label for axes in figure.axes for label in (axes.get_xlabel(), axes.get_ylabel())]
    assert any(labels)
    assert all(label in unitless or "(" in label for label in labels), labels


def test_no_pyplot_figure_is_left_behind(figure):
    assert plt.get_fignums() == []


def test_figures_import_neither_pyplot_nor_torch():
    code = "import sys, hybridscope.figures; print({'matplotlib.pyplot', 'torch'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


COLUMNS = {
    "probe_curve": (tables.probe, "layer kind where target control accuracy low high chance"),
    "cap_curves": (tables.caps, "kind layer window sinks binds"),
    "cap_heatmap": (tables.caps, "kind layer window sinks binds"),
    "cap_distance": (
        tables.distances,
        "kind layer window sinks binds distance_low distance_high needle_accuracy",
    ),
    "layer_importance": (tables.importance, "kind layer site window sinks binds rank importance"),
    "formation": (tables.track, "step layer site head kind entropy mass copy"),
    "influence": (tables.influence, "target distance influence"),
    "perplexity": (tables.loss, "position_low position_high loss"),
    "heads_map": (tables.scores, "layer site head kind score"),
    "logit_lens": (tables.lens, "sample row layer kind log_prob kl"),
    "patching": (tables.patches, "direction rows layer site head kind recovered"),
    "cost": (tables.costs, "model length batch cache_bytes"),
}


@pytest.mark.parametrize("name", COLUMNS)
def test_a_missing_column_is_named(name):
    make, columns = COLUMNS[name]
    table = make()
    for column in columns.split():
        with pytest.raises(ValueError, match=rf"figures\.{name}: the table has no column '{column}'"):
            getattr(figures, name)(table.drop(columns=column))


@pytest.mark.parametrize("name", COLUMNS)
def test_an_empty_table_is_an_error(name):
    with pytest.raises(ValueError, match=rf"figures\.{name}: the table is empty"):
        getattr(figures, name)(COLUMNS[name][0]().iloc[:0])


@pytest.mark.parametrize("name", COLUMNS)
def test_a_table_that_mixes_two_runs_is_an_error(name):
    table = COLUMNS[name][0]()
    with pytest.raises(ValueError, match=rf"figures\.{name}: several rows for"):
        getattr(figures, name)(pd.concat([table, table]))


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (lambda: figures.probe_curve(tables.probe().assign(kind="softmax")), "'kind' holds 'softmax'"),
        (lambda: figures.probe_curve(tables.probe().assign(where="end")), "'where' holds"),
        (
            lambda: figures.probe_curve(tables.probe().query("control != 'none'")),
            "'control' has no row 'none'",
        ),
        (lambda: figures.cap_curves(tables.caps().query("kind != 'none'")), "no row 'none'"),
        (lambda: figures.cap_curves(tables.caps().query("layer >= 0 or kind == 'none'")), "no row -1"),
        (lambda: figures.cap_heatmap(tables.caps().query("layer < 0")), "no row >= 0"),
        (lambda: figures.cap_heatmap(tables.caps(), value="loss"), "value='loss'"),
        (lambda: figures.cap_distance(tables.distances().query("kind != 'none'")), "no row 'none'"),
        (lambda: figures.cap_distance(tables.distances().query("kind == 'none'")), "no row -1"),
        (lambda: figures.cap_distance(tables.distances().assign(distance_low=float("nan"))), "by_distance=True"),
        (lambda: figures.cap_distance(tables.distances().replace("full", "ful")), "'kind' holds 'ful'"),
        (lambda: figures.layer_importance(tables.importance().assign(kind="ful")), "'kind' holds 'ful'"),
        (lambda: figures.formation(tables.track(), heads=[(9, 9)]), r"\(9, 0, 9\)"),
        (lambda: figures.influence(tables.influence().assign(influence=0.0)), "no positive number"),
    ],
)
def test_other_mistakes_are_named(draw, message):
    with pytest.raises(ValueError, match=message):
        draw()


def test_save_writes_a_whole_png_or_nothing(tmp_path):
    figure = DRAW["perplexity"]()
    path = figures.save(figure, tmp_path / "new" / "loss.png")
    assert matplotlib.image.imread(path).shape[1] == round(figures.SINGLE * 200)
    figure.axes[0].set_title("$\\nonsense{$")
    before = path.read_bytes()
    with pytest.raises(ValueError, match="nonsense"):
        figures.save(figure, path)
    assert path.read_bytes() == before
    assert [p.name for p in path.parent.iterdir()] == ["loss.png"]
    with pytest.raises(ValueError, match=r"\.jpg"):
        figures.save(figure, tmp_path / "loss.jpg")


def test_a_notebook_can_show_the_figure_by_itself():
    data, size = DRAW["perplexity"]()._repr_png_()
    assert data.startswith(b"\x89PNG")
    assert size["width"] == 510
