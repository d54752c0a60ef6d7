"""Labels move apart by the least that is needed, and colours survive a grey print."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridscope.figures.labels import spread
from hybridscope.figures.style import KINDS, MAGNITUDE, lightness, text_on

heights = st.lists(st.floats(0, 100), min_size=1, max_size=8)


@settings(max_examples=60, deadline=None)
@given(heights)
def test_spread_keeps_order_gap_and_bounds(wanted):
    placed = spread(wanted, gap=9.0, low=-5.0, high=105.0)
    order = np.argsort(wanted, kind="stable")
    assert (np.diff(placed[order]) >= 9.0 - 1e-6).all()
    assert placed.min() >= -5.0 - 1e-6
    assert placed.max() <= 105.0 + 1e-6


def test_spread_leaves_labels_that_are_far_apart():
    np.testing.assert_allclose(spread([50.0, 10.0, 90.0], 9.0, 0.0, 100.0), [50.0, 10.0, 90.0])


def test_spread_shares_the_move():
    np.testing.assert_allclose(spread([50.0, 50.0], 10.0, 0.0, 100.0), [45.0, 55.0])


def test_kinds_differ_in_grey_and_by_marker():
    levels = [lightness(style.color) for style in KINDS.values()]
    assert all(abs(a - b) >= 15 for a, b in combinations(levels, 2))
    assert len({style.marker for style in KINDS.values()}) == len(KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_text_in_a_kinds_colour_reads(kind):
    style = KINDS[kind]
    assert lightness(style.ink) <= 50  # on white: contrast of about 4.5 and more
    assert abs(lightness(style.color) - lightness(text_on(style.color))) >= 40


def test_magnitude_darkens_throughout():
    levels = [lightness(MAGNITUDE(x)[:3]) for x in np.linspace(0, 1, 20)]
    assert (np.diff(levels) < 0).all()
