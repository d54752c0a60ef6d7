"""Values that a model, its config and its key map refuse: each by its name, with what came and what was expected."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import jaxtyping
import numpy as np
import pytest
import torch
from fla_layers import LAYERS, D, H, weights
from helpers import assert_close, model_of, pad, tokens_of

from hybridscope import HybridConfig, HybridLM, ratio
from hybridscope.hooks.adapters.keys import to_foreign, to_ours


@pytest.fixture
def _unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a user's session, where no annotations are checked."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


def config(pattern: Any = ("gdn", "full"), **options: Any) -> HybridConfig:
    return HybridConfig(pattern, 2, 16, 4, 41, **options)


def raises(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        make()


# The config


@pytest.mark.usefixtures("_unchecked")
@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf, "x", None, True])
@pytest.mark.parametrize("field", ["rope_base", "norm_eps", "init_std"])
def test_scales_are_finite_and_positive(field: str, value: Any) -> None:
    least = "> 0" if field == "rope_base" else ">= 0"
    raises(lambda: config(**{field: value}), f"{field}={value!r}: expected a finite number {least}")
    for given in (10_000, np.float32(10_000)):  # a whole number is one, and numpy's
        kept = getattr(config(**{field: given}), field)
        assert type(kept) is float
        assert kept == 10_000


@pytest.mark.usefixtures("_unchecked")
def test_zero_is_a_scale_but_not_a_base() -> None:
    assert (config(norm_eps=0.0).norm_eps, config(init_std=0).init_std) == (0, 0)
    raises(lambda: config(rope_base=0), "rope_base=0: expected a finite number > 0")


@pytest.mark.usefixtures("_unchecked")
@pytest.mark.parametrize("value", ["false", "no", 0, 1, None])
@pytest.mark.parametrize("field", ["qk_norm", "tie_embeddings"])
def test_switches_are_true_or_false(field: str, value: Any) -> None:
    raises(lambda: config(**{field: value}), f"{field}={value!r}: expected True or False")


@pytest.mark.usefixtures("_unchecked")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n": True}, "ratio: n=True efficient layers"), ({"n": 3, "at": 1.5}, "ratio: at=1.5; expected"),
        ({"n": 3, "at": True}, "ratio: at=True; expected"), ({"n": 3, "at": "1"}, "ratio: at='1'; expected"),
    ],
)  # fmt: skip
def test_places_are_whole_numbers(options: dict[str, Any], message: str) -> None:
    raises(lambda: ratio("gdn", **options), message)


@pytest.mark.usefixtures("_unchecked")
def test_numpys_numbers_are_numbers() -> None:
    assert ratio("gdn", np.int64(2), at=np.int64(1)) == ("gdn", "full", "gdn")


def test_heads_of_a_mixers_own_stand_beside_a_split() -> None:
    """docs/mixers.md: whatever its part would be; the others keep their part."""

    def heads(**options: Any) -> list[tuple[str, int]]:
        return [(site.mixer, site.heads) for site in HybridLM(config(("swa:4|gdn",), mixers=options)).sites]

    assert heads() == [("swa:4", 2), ("gdn", 2)] * 2
    assert heads(gdn={"heads": 4}) == [("swa:4", 2), ("gdn", 4)] * 2
    assert heads(gdn={"value_heads": 6}) == [("swa:4", 2), ("gdn", 6)] * 2


# The model


@pytest.mark.usefixtures("_unchecked")
@pytest.mark.parametrize("window", ["4", 4.0, True, None])
def test_a_window_is_a_whole_number(window: Any) -> None:
    model = model_of("swa:3", "full")
    raises(lambda: model.set_window(window), f"window={window!r}: expected a whole number >= 1")
    assert model.sites[0].window == 3
    assert model.config.layers[0] == "swa:3"
    model.set_window(np.int64(4))
    assert model.config.to_dict()["pattern"][0] == "swa:4"


@pytest.mark.usefixtures("_unchecked")
@pytest.mark.parametrize("call", ["__call__", "hidden"])
def test_tokens_are_a_tensor(call: str) -> None:
    model: Any = model_of("gdn")
    raises(lambda: getattr(model, call)([[1, 2]]), "tokens: a list; expected a tensor of integer ids [B,T]")
    message = "tokens: torch.int64 of shape (2,); expected integer ids [B,T]"
    raises(lambda: getattr(model, call)(torch.tensor([1, 2])), message)
    raises(lambda: model.generate(torch.tensor([1, 2]), 3), message)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("mask", "first"), [([2, 1, 1], "2"), ([0, 1, -5], "-5"), ([0.0, 0.0, -1e9], "-1000000000.0"), ([1.0, 0.5], "0.5")]
)  # fmt: skip
def test_masks_say_one_or_zero(mask: list[float], first: str, packed: bool) -> None:
    """An additive mask would mark what it hides as real, and hide what it leaves."""
    tokens = tokens_of(1, len(mask))
    documents = torch.zeros_like(tokens) if packed else None
    message = f"attention_mask: has {first}; expected 1 (real) or 0 (padding) for each token, or bool"
    raises(lambda: model_of("full")(tokens, torch.tensor([mask]), documents=documents), message)


def test_masks_of_every_type_mean_the_same() -> None:
    model = model_of("gdn", "full")
    rows = [tokens_of(1, 5)[0], tokens_of(1, 3, seed=2)[0]]
    tokens, mask = pad(rows, [range(2, 7), range(3)], 7)
    expected = model(tokens, mask)
    for dtype in (torch.bool, torch.uint8, torch.float32, torch.float64):
        assert torch.equal(model(tokens, mask.to(dtype)), expected)
    assert_close(expected[0, 2:], model(rows[0][None])[0], "model")


# The key map


@pytest.mark.parametrize("source", [name for name, layer in LAYERS.items() if "q_conv1d.weight" in layer[4]])
def test_convolutions_of_swapped_widths_do_not_fit(source: str) -> None:
    """Their sum would: ours are one tensor. Neither way."""
    state = weights(source)
    module = HybridLM(HybridConfig((source,), 1, D, H, 32, mixers={source: LAYERS[source][3]})).layers[0].attn
    narrow, wide = state["q_conv1d.weight"], state["v_conv1d.weight"]
    swapped = {**state, "q_conv1d.weight": wide, "v_conv1d.weight": narrow}
    message = f"{source}: q_conv1d.weight {list(wide.shape)} does not fit q_proj.weight [{narrow.shape[0]}, {D}]"
    raises(lambda: to_ours(source, swapped, module), message)
    raises(lambda: to_foreign(source, module, swapped), message)
