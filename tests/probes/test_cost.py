"""Cost: formulas agree with what real caches hold, and say what the published ratios come to."""

from __future__ import annotations

import dataclasses
import inspect
import sys
from pathlib import Path

import pytest
import torch

import hybridscope as hs
from hybridscope import figures
from hybridscope.hooks.config import KINDS
from hybridscope.probes import foreign_cache
from hybridscope.probes.cost import all_full, cache_bytes, measured_bytes
from hybridscope.probes.foreign_cache import held

sys.path.append(str(Path(__file__).parents[1] / "hooks"))
from families import WINDOW, build

D, H, G, B = 32, 4, 2, 3
ENTRIES = ["swa:7" if name == "swa" else name for name in KINDS] + ["swa:1", "swa:7|gdn", "full+mamba2"]


def config(*pattern: str, layers: int = 2, **options) -> hs.HybridConfig:
    return hs.HybridConfig(pattern, layers, D, H, 41, **{"n_kv_heads": G, **options})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("entry", ENTRIES)
def test_bytes_by_formula_are_those_of_a_real_cache(entry, dtype):
    cfg = config(entry)
    model = hs.HybridLM(cfg).to(dtype).eval()
    tokens = torch.randint(0, 41, (B, 21))
    cache = model.new_cache()
    with torch.no_grad():
        for start, stop in ((0, 1), (1, 6), (6, 20), (20, 21)):  # short, prefilled further, a step
            model.hidden(tokens[:, start:stop], cache=cache)
            assert measured_bytes(cache) == cache_bytes(cfg, stop, B, dtype)


def test_the_formulas_written_out():
    bf16 = torch.bfloat16
    assert cache_bytes(config("full"), 100, B, bf16) == hs_bytes(
        kv=2 * B * 100 * G * 2 * 8 * 2
    )  # layers ... K + V, bytes
    assert cache_bytes(config("swa:7"), 100, B, bf16) == hs_bytes(kv=2 * B * 6 * G * 2 * 8 * 2)
    state, tail = H * 8 * 16 * 4, 3 * (2 * H * 8 + H * 16) * 2  # fp32 [K,V] a head; c - 1 inputs to q, k and v
    assert cache_bytes(config("gdn"), 100, B, bf16) == hs_bytes(state=2 * B * (state + tail))
    assert cache_bytes(config("gdn"), 10_000, B, bf16) == cache_bytes(config("gdn"), 1, B, bf16)


def hs_bytes(kv: int = 0, state: int = 0):
    from hybridscope.probes.cost import CacheBytes

    return CacheBytes(kv, state)


@pytest.mark.parametrize(("ratio", "layers", "kv"), [("3:1", 28, 4), ("6:1", 28, 7), ("3:1", 24, 4), ("6:1", 24, 8)])
def test_the_published_four_to_seven_times(ratio, layers, kv):
    """arXiv 2507.06457: "4x to 7x smaller KV cache at 3:1 to 6:1". Of keys and values alone that is N + 1 to 1,
    exactly, where N + 1 divides the layers (24 layers have 3 full ones at 6:1, not 24/7: 8x); with the states it is
    less, and comes close only at long contexts."""
    cfg = hs.HybridConfig(hs.ratio("gdn", ratio), layers, 2048, 16, 1000)
    table = hs.cost(cfg, [1024, 4096, 65_536], measure=False, dtype=torch.bfloat16).query("model == 'hybrid'")
    assert table.kv_ratio.tolist() == [kv] * 3
    short, middle, long = table.cache_ratio
    assert short < 3 < middle < long < kv
    assert long > 0.95 * kv


def test_a_table_of_two_models_and_its_figure():
    cfg = config("gdn", "full", layers=4)
    table = hs.cost(cfg, [8, 16, 32], batch=2, new_tokens=2)
    assert table[["model", "length"]].to_numpy().tolist() == [[m, n] for n in (8, 16, 32) for m in ("hybrid", "full")]
    for name in ("kv", "state"):
        assert (table[f"measured_{name}_bytes"] == table[f"{name}_bytes"]).all()
    assert (table[["prefill_tokens_per_s", "decode_ms"]] > 0).all(axis=None)
    full = table[table.model == "full"]
    assert (full[["kv_ratio", "cache_ratio", "prefill_ratio", "decode_ratio"]] == 1).all(axis=None)
    hybrid = table[table.model == "hybrid"].reset_index()
    assert hybrid.prefill_ratio.to_numpy() == pytest.approx(
        hybrid.prefill_tokens_per_s.to_numpy() / full.prefill_tokens_per_s.to_numpy()
    )
    assert set(all_full(cfg).layers) == {"full"}
    figures.cost(table).draw_without_rendering()


def test_a_model_keeps_its_dtype_and_a_pure_recurrence_has_no_keys():
    model = hs.HybridLM(config("gla")).double()
    table = hs.cost(model, [5], new_tokens=1)
    assert set(table.dtype) == {"float64"}
    assert table.kv_ratio[0] == float("inf")
    assert next(model.parameters()).dtype == torch.float64
    with pytest.raises(ValueError, match="weights are"):
        hs.cost(model, [5], dtype=torch.float32)


# Models of transformers


def in_the_cache(past) -> tuple[int, int]:
    """Bytes of the tensors in a transformers cache, by the names that transformers gives them."""
    layers = [vars(layer) for layer in past.layers]
    kv = [layer[name] for layer in layers for name in ("keys", "values") if layer.get(name) is not None]
    states = [x for layer in layers for name in STATES for x in layer.get(name, {}).values() if x is not None]
    states += getattr(past, "linear_cache", [])
    return sum(x.nbytes for x in kv), sum(x.nbytes for x in states if isinstance(x, torch.Tensor))


STATES = ("conv_states", "recurrent_states")
FAMILIES = (
    "hunyuan_v1_dense", "mistral", "gemma3_text", "gpt_oss", "minicpm3", "qwen3_next", "kimi_linear", "minimax",
    "falcon_h1", "zamba2", "lfm2", "mamba2",
)  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_bytes_of_a_transformers_model_are_those_of_its_real_cache(family, dtype):
    """Shorter and longer than windows and convolutions, after a prefill and after a step from it."""
    model = hs.load(build(family).to(dtype))
    lengths = [1, 3, WINDOW - 1, WINDOW, WINDOW + 1, 40]
    table = hs.cost(model, lengths, batch=B, measure=False).query("model == 'hybrid'")
    for length, kv, state in table[["length", "kv_bytes", "state_bytes"]].itertuples(index=False):
        tokens = torch.randint(3, 60, (B, length))
        for parts in ([length], [length - 1, 1]):
            cache = model.new_cache()
            with torch.no_grad():
                for part in tokens.split([n for n in parts if n], 1):
                    model.hidden(part, cache=cache)
            assert in_the_cache(cache.past) == (kv, state)


def test_the_formulas_of_transformers_models_written_out():
    """Of widths set in tests/hooks/families.py: G = 2 heads of 8 at 4 layers; a Gated DeltaNet of 2 key heads of 6 and
    4 value heads of 8, 4 inputs of its convolution kept, of 4 layers in 3."""

    def of(family: str, dtype: torch.dtype) -> list[float]:
        row = hs.cost(hs.load(build(family).to(dtype)), [100], batch=B, measure=False).iloc[0]
        return row[["kv_bytes", "state_bytes", "kv_ratio"]].tolist()

    token = 2 * (8 + 8) * 2
    assert of("ministral3", torch.bfloat16) == [B * 4 * 100 * token, 0, 1]
    assert of("mistral", torch.bfloat16) == [B * 4 * (WINDOW - 1) * token, 0, pytest.approx(100 / (WINDOW - 1))]
    seen = 3 * (WINDOW - 1) + 100
    assert of("gemma3_text", torch.bfloat16) == [B * seen * token, 0, pytest.approx(400 / seen)]
    state = 4 * 6 * 8 * 4 + 4 * (2 * 2 * 6 + 4 * 8) * 2
    assert of("qwen3_next", torch.bfloat16) == [B * 100 * token, B * 3 * state, 4]


def test_layers_without_keys_are_compared_with_the_largest_full_layer():
    sizes = foreign_cache.CacheSizes(token={0: 12, 2: 10, 3: 8}, window={0: 8, 2: None, 3: None}, state=5, layers=6)
    assert sizes.at(20) == (12 * 7 + 10 * 20 + 8 * 20, 5)
    assert sizes.full_token == 12 + 10 + 8 + 3 * 10
    assert dataclasses.replace(sizes, token={0: 12}, layers=3).full_token == 3 * 12  # windows alone
    assert dataclasses.replace(sizes, token={}).full_token is None


def test_a_table_of_a_transformers_model_and_its_figure():
    """The hybrid is run; of its all-full twin there are bytes alone. What is measured is storage: a window layer's keys
    stay a slice of the whole prefill."""
    table = hs.cost(hs.load(build("qwen3_next")), [8, 16], batch=2, new_tokens=2)
    assert table[["model", "length"]].to_numpy().tolist() == [[m, n] for n in (8, 16) for m in ("hybrid", "full")]
    hybrid, full = (table[table.model == name] for name in ("hybrid", "full"))
    assert (hybrid[["prefill_tokens_per_s", "decode_ms"]] > 0).all(axis=None)
    assert full[["prefill_tokens_per_s", "decode_ms", "measured_kv_bytes"]].isna().all(axis=None)
    for name in ("kv", "state"):
        assert (hybrid[f"measured_{name}_bytes"] == hybrid[f"{name}_bytes"]).all()
    figures.cost(table).draw_without_rendering()
    windows = hs.cost(hs.load(build("mistral")), [16], new_tokens=1).iloc[0]
    assert windows["measured_kv_bytes"] == windows["kv_bytes"] / (WINDOW - 1) * 16


def test_a_transformers_model_without_softmax_has_nothing_to_compare_with():
    table = hs.cost(hs.load(build("mamba2")), [8, 16], measure=False)
    assert table["model"].tolist() == ["hybrid", "hybrid"]
    assert table["kv_bytes"].tolist() == [0, 0]
    assert table["cache_ratio"].isna().all()


def test_a_transformers_model_whose_cache_is_not_known_is_refused():
    with pytest.raises(ValueError, match="RecurrentGemmaForCausalLM keeps no cache"):
        hs.cost(hs.load(build("recurrent_gemma")), [8], measure=False)
    with pytest.raises(ValueError, match="longer than the model's context of 128"):
        hs.cost(hs.load(build("mistral")), [129], measure=False)


@pytest.mark.parametrize(
    ("layer", "kind", "each", "named"),
    [
        (-1, "state", 1, "states of fixed size"),  # grows with the context
        (7, "kv", 1, "more than its sites'"),  # where nothing attends
        (0, "kv", 0, "the same keys and values for every token"),
    ],
)
def test_a_cache_that_grows_otherwise_than_its_sites_say_is_refused(monkeypatch, layer, kind, each, named):
    def more(past):
        yield from held(past)
        yield layer, kind, torch.zeros(1 + each * past.get_seq_length())

    monkeypatch.setattr(foreign_cache, "held", more)
    with pytest.raises(ValueError, match=named):
        hs.cost(hs.load(build("hunyuan_v1_dense")), [8], measure=False)


def test_mistakes_are_named():
    short = dataclasses.replace(config("full"), context=30)
    for options, named in (({"lengths": []}, "lengths"), ({"batch": 0}, "batch"), ({"lengths": [20]}, "context")):
        with pytest.raises(ValueError, match=named):
            hs.cost(short, **{"lengths": [5], **options})
    with pytest.raises(ValueError, match="HybridConfig or HybridLM"):
        inspect.unwrap(hs.cost)(torch.nn.Linear(2, 2), [5])
