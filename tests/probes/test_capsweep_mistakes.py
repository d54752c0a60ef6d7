"""What a sweep of caps cannot measure: said by name before anything runs; and what is given twice is run once."""

from __future__ import annotations

import inspect

import numpy as np
import planted
import pytest
import torch
from helpers import model_of, tokens_of
from planted import needles

import hybridscope as hs

sweep = inspect.unwrap(hs.cap_sweep)  # without the checks of types that the tests add


@pytest.fixture(scope="module")
def model():
    return planted.planted()


@pytest.fixture(scope="module")
def prompts():
    return needles(8)


@pytest.fixture(scope="module")
def hybrid():
    return model_of("swa:4", "gdn", "full", n_kv_heads=2)


@pytest.fixture
def never(monkeypatch):
    """A model that is run is a failure."""

    def run(*args, **options):
        raise AssertionError("the model was run")

    monkeypatch.setattr(hs.HybridLM, "hidden", run)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"kinds": ["conv"]}, "no 'conv' sites; it has: window, recurrent, full"),
        ({"kinds": []}, r"kinds=\[\]: expected a list of kinds, some of: window, recurrent, full"),
        ({"kinds": "full"}, "kinds='full': expected a list of kinds"),
        ({"windows": []}, r"windows=\[\]: expected a list of whole numbers >= 1"),
        ({"windows": [0, 8]}, r"windows=\[0, 8\]: expected"),
        ({"windows": 8}, "windows=8: expected"),
        ({"windows": None}, "windows=None: expected"),
        ({"windows": "8"}, "windows='8': expected"),
        ({"windows": [8.0]}, r"windows=\[8.0\]: expected"),
        ({"windows": [True]}, r"windows=\[True\]: expected"),
        ({"windows": np.array([[4], [8]])}, "windows=array"),
        ({"sinks": (-1,)}, r"sinks=\(-1,\): expected a list of whole numbers >= 0"),
        ({"sinks": []}, r"sinks=\[\]: expected"),
        ({"sinks": 4}, "sinks=4: expected"),
        ({"sinks": None}, "sinks=None: expected"),
        ({"sinks": [4.0]}, r"sinks=\[4.0\]: expected"),
        ({"sinks": [True]}, r"sinks=\[True\]: expected"),
        ({"kinds": ["recurrent"], "sinks": ["x"]}, r"sinks=\['x'\]: expected"),
        ({"batch": 0}, "batch=0: expected >= 1"),
        ({"batch": 1.5}, "batch=1.5: expected >= 1, a whole number"),
        ({"kinds": ["recurrent"], "windows": [2]}, "smaller than the site's convolution width 4"),
        ({"texts": torch.zeros(1, 9, dtype=torch.int64)}, "9 tokens; the largest window 8"),
        ({"texts": [[1, 2, 3]]}, "texts: list; expected a tensor of documents"),
        ({"texts": torch.zeros(20, dtype=torch.int64)}, r"texts: shape \(20,\); expected"),
        ({"texts": torch.zeros(0, 20, dtype=torch.int64)}, r"texts: shape \(0, 20\); expected"),
        ({"by_distance": True}, "by_distance is about needles"),
        ({"texts": None}, "needles, texts, or both"),
    ],
)
def test_what_cannot_be_measured_is_an_error_before_anything_runs(hybrid, never, options, named):
    with pytest.raises(ValueError, match=named):
        sweep(hybrid, **{"texts": tokens_of(2, 20), "windows": [8], **options})


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"by_distance": [5, 3]}, "by_distance"),
        ({"by_distance": 0}, "by_distance=0"),
        ({"batch": 0}, "batch=0"),
    ],
)
def test_buckets_and_batches_of_needles_are_checked_first(model, prompts, never, options, named):
    with pytest.raises(ValueError, match=named):
        hs.cap_sweep(model, prompts, windows=[8], **options)
    with pytest.raises(ValueError, match="no prompts given"):
        hs.cap_sweep(model, prompts[:0], windows=[8], by_distance=True)


def test_a_capped_model_is_refused(hybrid, never):
    with (
        hybrid.cap(window=2),
        pytest.raises(ValueError, match=r"blocks\.0\.attn is capped at 2 already; expected a model outside `cap`"),
    ):
        hs.cap_sweep(hybrid, texts=tokens_of(1, 20), windows=[3])


@pytest.mark.parametrize("numbers", [list, tuple, iter, np.array, torch.tensor], ids=lambda f: f.__name__)
def test_settings_that_are_given_twice_are_run_once_in_their_order(model, prompts, numbers):
    table = hs.cap_sweep(
        model, prompts, kinds=["full", "window", "full"], windows=numbers([8, 5, 8]), sinks=numbers([4, 0, 4])
    )
    assert table.loc[1:, ["kind", "window", "sinks"]].to_numpy().tolist() == [
        [kind, window, sinks] for kind in ("full", "window") for window in (8, 5) for sinks in (4, 0)
    ]
