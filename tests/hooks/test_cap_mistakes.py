"""cap() and knockout() of what they cannot do: said by name, with nothing changed; and whole numbers of any library."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
import torch
from helpers import assert_close, model_of, pad, tokens_of
from hybrid import HYBRID

from hybridscope import HybridLM
from hybridscope.hooks.instrumented import Instrumented
from hybridscope.hooks.passes import Cache

T = 14


@pytest.fixture(name="model", scope="module")
def _model() -> HybridLM:
    return model_of(*HYBRID, n_kv_heads=2)


def cap(model: HybridLM, *layers: Any, **options: Any) -> Any:
    """Without the checks of types that the tests add."""
    return inspect.unwrap(Instrumented.cap)(model, *layers, **options)


def knockout(model: HybridLM, **options: Any) -> Any:
    return inspect.unwrap(Instrumented.knockout)(model, **{"rows": [3], "keys": [1], **options})


@pytest.mark.parametrize(
    ("layers", "options", "message"),
    [
        (8, {}, "layers=8: expected layers or"),
        ([3], {}, r"layers=\[3\]: expected layers or"),
        ("full", {}, "layers='full': expected layers or"),
        ({(3,): 8}, {}, r"the key \(3,\); expected a layer or \(layer, site\)"),
        ({(3, 0, 0): 8}, {}, r"the key \(3, 0, 0\); expected a layer or \(layer, site\)"),
        ({"full": 8}, {}, "layer 'full': expected whole numbers"),
        ({True: 8}, {}, "layer True: expected whole numbers"),
        ({3.0: 8}, {}, "layer 3.0: expected whole numbers"),
        ({(3, 0.5): 8}, {}, "layer 3 site 0.5: expected whole numbers"),
        (None, {"full": 8.0}, "8.0; expected a whole number >= 1"),
        (None, {"full": torch.tensor(True)}, "expected a whole number >= 1"),
        (None, {"full": 8, "sinks": True}, "sinks=True: expected a whole number >= 0"),
        (None, {"full": 8, "sinks": None}, "sinks=None: expected a whole number >= 0"),
        (None, {"full": 8, "sinks": 2.0}, "sinks=2.0: expected a whole number >= 0"),
    ],
)
def test_what_is_no_cap_is_named(model: HybridLM, layers: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message), cap(model, layers, **options):
        pass
    assert not any(site.active for site in model.sites)


@pytest.mark.parametrize("number", [np.int64, np.uint8, torch.tensor])
def test_whole_numbers_of_any_library_are_caps(model: HybridLM, number: Any) -> None:
    with model.cap({number(3): number(7), (number(2), number(0)): number(5)}, sinks=number(2)):
        assert [(s.cap, s.sinks) for s in model.sites] == [(None, 0), (None, 0), (5, 2), (7, 2)]
        assert all(type(s.cap) is int for s in model.sites[2:])
    with model.cap(full=number(7)):
        assert [s.cap for s in model.sites] == [None, None, 7, 7]


@pytest.mark.parametrize("huge", [2**31, 2**63 - 1, 10**30])
def test_a_cap_or_sinks_beyond_any_context_are_the_whole_context(model: HybridLM, huge: int) -> None:
    """Under padding and while decoding as well, where positions are tensors."""
    row, at = tokens_of(1, T), [2, *range(4, T + 3)]
    tokens, mask = pad([row[0]], [at], T + 3)
    free = model(row)
    for options in ({"full": huge, "window": huge, "recurrent": huge}, {"full": 3, "sinks": huge}):
        with model.cap(**options):
            cache = Cache()
            steps = [model(row[:, t : t + 1], cache=cache) for t in range(T)]
            assert_close(model(row), free, "model")
            assert_close(model(tokens, mask)[:, at], free, "model")
            assert_close(torch.cat(steps, 1), free, "model")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rows": [3.7]}, r"rows: expected .* got \[3.7\]"),
        ({"rows": [True, False]}, r"rows: expected .* got \[True, False\]"),
        ({"rows": None}, "rows: expected .* got None"),
        ({"rows": "a"}, "rows: expected .* got 'a'"),
        ({"rows": [[1], [2, 3]]}, r"rows: expected .* got \[\[1\], \[2, 3\]\]"),
        ({"keys": None}, "keys: expected .* got None"),
        ({"keys": "x"}, "keys: expected .* got 'x'"),
        ({"keys": [1.5]}, r"keys: expected .* got \[1.5\]"),
        ({"layers": 3}, "layers=3: expected a list"),
        ({"layers": [True]}, "layer True: expected whole numbers"),
        ({"layers": [2.0]}, "layer 2.0: expected whole numbers"),
        ({"heads": [(2, 1.9)]}, r"head \(2, 1.9\): expected \(layer, head\)"),
        ({"heads": [(2, True)]}, r"head \(2, True\): expected \(layer, head\)"),
        ({"heads": (2, 1)}, r"head 2: expected \(layer, head\)"),
    ],
)
def test_a_knockout_of_nothing_or_of_what_is_no_column_is_named(
    model: HybridLM, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message), knockout(model, **options):
        pass
    assert not any(site.active for site in model.sites)


def test_a_knockout_needs_a_softmax() -> None:
    with (
        pytest.raises(ValueError, match="no softmax sites to cut edges from; it has: recurrent"),
        model_of("gdn").knockout(rows=[3], keys=[1]),
    ):
        pass
