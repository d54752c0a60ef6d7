"""HybridConfig: the layer pattern as data, and the mistakes it refuses."""

import json
import re
from collections.abc import Callable
from typing import Any, cast

import jaxtyping
import pytest

from hybridscope import HybridConfig, ratio
from hybridscope.hooks.config import RATIOS, parse_layer, parse_mixer

WIDTHS: dict[str, Any] = {"n_layers": 4, "d_model": 32, "n_heads": 4, "vocab_size": 11}


def config(pattern: Any = ("gdn", "full"), **options: Any) -> HybridConfig:
    return HybridConfig(pattern, **{**WIDTHS, **options})


# The pattern


@pytest.mark.parametrize(
    ("pattern", "n_layers", "layers"),
    [
        (("full",), 3, ("full", "full", "full")),
        (("swa:4", "full"), 4, ("swa:4", "full", "swa:4", "full")),
        (("gdn", "gdn", "full"), 5, ("gdn", "gdn", "full", "gdn", "gdn")),  # a cut period is fine
        (["full", "gdn", "gdn", "nope"], 4, ("full", "gdn", "gdn", "nope")),
        (("gdn", "full", "gdn", "full"), 2, ("gdn", "full")),
    ],
)
def test_layers_are_the_tiled_pattern(pattern: Any, n_layers: int, layers: tuple[str, ...]) -> None:
    assert config(pattern, n_layers=n_layers).layers == layers


def test_a_list_gives_every_layer() -> None:
    with pytest.raises(ValueError, match="lists 2 layers but n_layers=4"):
        config(["gdn", "full"])


@pytest.mark.parametrize("pattern", [("gdn",) * 24 + ("full",), ("gdn", "gdn", "gdn", "gdn", "swa:8", "full")])
def test_a_tiling_that_loses_a_mixer_is_refused(pattern: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="never reach"):
        config(pattern)
    assert "full" not in config(("gdn",)).layers  # pure is asked for by writing it


@pytest.mark.parametrize("pattern", [(), [], "full"])
def test_pattern_must_be_a_sequence_of_mixers(pattern: Any) -> None:
    with pytest.raises(ValueError, match="non-empty tuple or list"):
        config(pattern)


@pytest.mark.parametrize("mixer", ["fulll", "", "swa", "swa:", "swa:x", "swa:2.5", "gdn:4", "full:3", ":3", "SWA:3"])
def test_unknown_mixers_are_refused(mixer: str) -> None:
    with pytest.raises(ValueError, match="pattern: "):
        config((mixer,))


@pytest.mark.parametrize("window", [0, -1])
def test_a_window_below_one_is_refused(window: int) -> None:
    with pytest.raises(ValueError, match="must be >= 1"):
        config((f"swa:{window}",))
    assert parse_mixer("swa:1") == ("swa", 1)


def test_ratio_writes_n_efficient_layers_per_full_layer() -> None:
    assert ratio("gdn", 3) == ("gdn", "gdn", "gdn", "full")
    assert ratio("swa:64", 1, full="nope") == ("swa:64", "nope")
    assert ratio("gdn", None) == ("gdn",)
    assert config(ratio("gdn", 3), n_layers=8).layers.count("full") == 2
    with pytest.raises(ValueError, match="never reach 'full'"):
        config(ratio("gdn", 24), n_layers=24)


def test_ratios_by_name() -> None:
    assert [len(ratio("gdn", r)) for r in RATIOS] == [1, 25, 13, 7, 4, 2]
    assert ratio("gdn", "pure") == ("gdn",)
    assert ratio("swa:8|gdn", "1:1") == ("swa:8|gdn", "full")


@pytest.mark.parametrize(("at", "pattern"), [(0, "fggg"), (1, "gfgg"), (3, "gggf"), (None, "gggf")])
def test_the_full_layer_stands_where_it_is_put(at: int | None, pattern: str) -> None:
    assert "".join(mixer[0] for mixer in ratio("gdn", 3, at=at)) == pattern


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("gdn", 0), "n >= 1"), (("gdn", 2, "swa:4"), "not a full"), (("gnd", 2), "unknown"),
        (("gdn", "3to1"), "expected N:1 or pure"), (("gdn", "0:1"), "n >= 1"), (("gdn", 3, "full", 4), "at=4"),
    ],
)  # fmt: skip
def test_ratio_refuses(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ratio(*arguments)


def test_parallel_mixers() -> None:
    assert parse_layer("gdn") == (("gdn",), False)
    assert parse_layer("swa:4|gdn") == (("swa:4", "gdn"), True)
    assert parse_layer("full + mamba2") == (("full", "mamba2"), False)
    slots = config(["gdn", "swa:4|gdn", "full", "full+gdn"], n_kv_heads=2).slots
    assert [(s.name, s.index, s.heads, s.kv_heads) for s in slots(1)] == [
        ("blocks.1.attn.parts.0", 0, 2, 1), ("blocks.1.attn.parts.1", 1, 2, 1),
    ]  # fmt: skip
    assert [(s.mixer, s.heads, s.kv_heads) for s in slots(3)] == [("full", 4, 2), ("gdn", 4, 2)]
    assert [s.name for s in slots(0)] == ["blocks.0.attn"]


def test_spaces_around_an_entry_mean_nothing() -> None:
    assert config([" rwkv7", "full "], n_layers=2).layers == ("rwkv7", "full")
    assert config(("gdn ", " full"), n_layers=4).layers == ("gdn", "full") * 2


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("swa:4|gdn+full", "expected one of them"), ("swa:4|", "unknown mixer ''"), ("gdn|gnd", "unknown mixer 'gnd'"),
        ("full|gdn|nope", "n_heads=4 is not a multiple"), ("full|swa", "needs a window"),
    ],
)  # fmt: skip
def test_parallel_mistakes_are_named(entry: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        config((entry,))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: config(mixers=["gdn"]), "mixers=['gdn']: expected options by mixer"),
        (lambda: config(mixers={"gdn": 4}), "mixers: gdn=4: expected options by name"),
        (lambda: ratio("gdn", cast(Any, 2.5)), "n=2.5 efficient layers"),
    ],
)
def test_values_of_another_type_are_named(
    make: Callable[[], Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # a user's session checks no annotations
    with pytest.raises(ValueError, match=re.escape(message)):
        make()


# Widths


def test_derived_widths() -> None:
    c = config(d_model=96, n_heads=4)
    assert (c.n_kv_heads, c.head_dim, c.d_ff) == (4, 24, 256)
    assert c.d_ff is not None
    c = config(d_model=32)
    assert (c.d_ff, c.d_ff % 32, c.d_ff >= 8 * 32 / 3) == (96, 0, True)


@pytest.mark.parametrize(
    "field", ["n_layers", "d_model", "n_heads", "vocab_size", "n_kv_heads", "head_dim", "d_ff", "context"]
)
@pytest.mark.parametrize("value", [0, -4, True])
def test_widths_are_whole_and_positive(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{field}="):
        config(**{field: value})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"d_model": 30}, "not a multiple of n_heads"),
        ({"n_kv_heads": 3}, "must divide n_heads"),
        ({"n_kv_heads": 8}, "must divide n_heads"),
        ({"head_dim": 7}, "must be even"),
        ({"mixers": {"gnd": {}}}, "unknown mixer 'gnd'"),
        ({"mixers": {"gdn": {"convolution": 4}}}, "no option 'convolution'"),
        ({"mixers": {"full": {"heads": 4}}}, "no option 'heads'"),
        ({"mixers": {"gdn": {"conv": 0}}}, "conv"),
        ({"mixers": {"gdn": {"key_dim": -8}}}, "key_dim"),
        ({"mixers": {"gdn": {"conv": None}}}, "conv"),
        ({"mixers": {"gdn": {"negative_eigenvalues": 2}}}, "negative_eigenvalues"),
    ],
)
def test_impossible_models_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config(**options)


def test_odd_head_dim_is_fine_without_rotation() -> None:
    assert config(("gdn", "nope"), head_dim=7).head_dim == 7


# Plain data and back


@pytest.mark.parametrize(
    "c",
    [
        config(("swa:4", "full")),
        config(
            ["full", "gdn", "gdn", "nope"],
            n_kv_heads=2,
            qk_norm=True,
            tie_embeddings=True,
            context=64,
            rope_base=1e4,
        ),
        config(("gdn",), mixers={"gdn": {"value_dim": 16, "conv": 2}}),
    ],
)
def test_round_trip_through_json(c: HybridConfig) -> None:
    back = HybridConfig.from_dict(json.loads(json.dumps(c.to_dict())))
    assert back.layers == c.layers  # aperiodic lists too
    assert back.to_dict() == c.to_dict()
    assert back.options("gdn") == c.options("gdn")


def test_from_dict_names_a_wrong_key() -> None:
    data = config().to_dict()
    with pytest.raises(ValueError, match="unknown key 'n_layer'"):
        HybridConfig.from_dict({**data, "n_layer": 3})
    del data["d_model"]
    with pytest.raises(ValueError, match="missing key 'd_model'"):
        HybridConfig.from_dict(data)


def test_options_fill_in_defaults() -> None:
    c = config(mixers={"gdn": {"conv": 2}})
    assert c.options("gdn")["conv"] == 2
    assert c.options("gdn")["negative_eigenvalues"] is False
