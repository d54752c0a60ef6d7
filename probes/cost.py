"""What a hybrid costs to run: cache bytes by formula and as measured, prefill and decode speed; beside an all-full one.

    full, nope   T tokens       x G (K + V) x bytes of a value
    swa:W        min(T, W - 1) tokens, likewise: what the next query can still see
    recurrent    H K V in fp32 at least, and the last c - 1 inputs of its convolution or token shift
    RWKV's channel mix          the last token, D

Of a transformers model, what its cache keeps of a token and its states are read off a short run (`foreign_cache.py`).

PROTOCOLS section 10. A cache also numbers its keys (position and column, 16 bytes a token of a softmax site, once for
all sequences of a batch that is not padded); that is left out on both sides.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import pandas as pd
import torch
from torch import Tensor
from tqdm import tqdm

from ..hooks.config import HybridConfig
from ..hooks.instrumented import Instrumented
from ..hooks.model import MLP, HybridLM
from ..hooks.passes import Cache, KVCache
from .foreign_cache import cache_sizes, held

REPEATS = 3
NEW_TOKENS = 16


@dataclasses.dataclass(frozen=True)
class CacheBytes:
    """Bytes of a decode cache: keys and values; states with the tails of their convolutions."""

    kv: int
    state: int

    @property
    def total(self) -> int:
        return self.kv + self.state


def cost(
    config_or_model: HybridConfig | Instrumented,
    lengths: Sequence[int] | int = (1024, 4096, 16384),
    *,
    batch: int = 1,
    measure: bool = True,
    new_tokens: int = NEW_TOKENS,
    dtype: torch.dtype | None = None,
    device: Any = None,
) -> pd.DataFrame:
    """Cache bytes, prefill and decode speed at each context length, beside the all-full model of the same widths.

    Of a config (random weights, which cost as much as trained ones), one of our models or a loaded transformers model.
    `measure=False` gives the formulas alone, and of a config needs no memory for weights. `new_tokens`: decode steps
    timed after each prefill. `dtype`, `device`: of the weights; by default the model's own, for a config bf16 on a GPU
    and fp32 elsewhere.

    No all-full twin of a transformers model is built: of "full" there are cache bytes alone, as if each of its layers
    attended to everything (`CacheSizes.full_token`), and of a model without softmax layers nothing. It is timed as it
    runs here, through our attention. Measured bytes count storage, and a window layer of transformers holds on to what
    its last keys were cut from: all of a prefill, until the next token.

    Returns [model, length, batch, dtype, kv_bytes, state_bytes, cache_bytes, measured_kv_bytes, measured_state_bytes,
    prefill_tokens_per_s, decode_ms, peak_bytes, kv_ratio, cache_ratio, prefill_ratio, decode_ratio], two records a
    length: `model` is "hybrid" or "full". Bytes are those after `length` tokens of each of `batch` sequences; measured
    ones are those of the storage that a real cache holds. Prefill is one call with a cache, logits of the last token
    alone; `decode_ms` a token (of each sequence) after it; medians, the two models in turn in one process on the same
    tokens. `peak_bytes`: CUDA memory, weights included (NaN elsewhere). Ratios are against "full" at that length, above
    1 where the hybrid is better: times smaller, times faster.

    Raises ValueError for lengths beyond the model's context, and for a transformers model whose cache is not made of
    keys, values and states.

    >>> hs.cost(HybridConfig(hs.ratio("gdn", "3:1"), 28, 512, 8, 1000), [4096], measure=False).kv_ratio[0]
    4.0
    """
    model = None if isinstance(config_or_model, HybridConfig) else config_or_model
    if model is not None and not isinstance(model, Instrumented):
        raise ValueError(
            f"cost: expected a HybridConfig or HybridLM, or a loaded transformers model, not {type(model).__name__}"
        )
    lengths = [lengths] if isinstance(lengths, int) else list(lengths)
    for name, values in (("lengths", lengths), ("batch", [batch]), ("new_tokens", [new_tokens])):
        if not values or any(int(value) != value or value < 1 for value in values):
            raise ValueError(f"{name}={values}: expected whole numbers >= 1")
    lengths = [int(length) for length in lengths]
    context = (config_or_model if model is None else model).context
    need = max(lengths) + (new_tokens if measure else 0)
    if context is not None and need > context:
        raise ValueError(f"lengths: {need} tokens are longer than the model's context of {context}")
    device = torch.device(device or ("cuda" if model is None and torch.cuda.is_available() else "cpu"))
    if model is not None:
        weight = next(model.embedding().parameters())
        if (dtype or weight.dtype) != weight.dtype:
            raise ValueError(f"dtype={dtype}: the model's weights are {weight.dtype}")
        dtype, device = weight.dtype, weight.device
    dtype = dtype or (torch.bfloat16 if device.type == "cuda" else torch.float32)
    built: dict[str, Any] = {}
    if isinstance(config_or_model, HybridConfig | HybridLM):
        config = config_or_model if isinstance(config_or_model, HybridConfig) else config_or_model.config
        configs = {"hybrid": config, "full": all_full(config)}
        sizes = {name: _by_formula(its, batch, dtype) for name, its in configs.items()}
        if measure:
            with device:
                built = {n: HybridLM(c).to(dtype).eval() for n, c in configs.items() if n == "full" or model is None}
            built |= {} if model is None else {"hybrid": model}
    else:
        sizes = _of_foreign(model, batch)
        built = {"hybrid": model} if measure else {}
    records = []
    for length in tqdm(lengths, desc="cost", disable=None if measure else True):
        timed = _time(built, length, batch, new_tokens, device) if measure else {}
        rows = {}
        for name, size in sizes.items():
            bytes_ = size(length)
            rows[name] = {
                "model": name, "length": length, "batch": batch, "dtype": str(dtype).removeprefix("torch."),
                "kv_bytes": bytes_.kv, "state_bytes": bytes_.state, "cache_bytes": bytes_.total,
                **timed.get(name, dict.fromkeys(MEASURED, float("nan"))),
            }  # fmt: skip
        for row in rows.values():
            records.append({**row, **_ratios(row, rows.get("full"))})
    return pd.DataFrame(records)


MEASURED = ("measured_kv_bytes", "measured_state_bytes", "prefill_tokens_per_s", "decode_ms", "peak_bytes")


def all_full(config: HybridConfig) -> HybridConfig:
    """The same widths with full attention in every layer."""
    return dataclasses.replace(config, pattern=["full"] * config.n_layers, mixers={})


def _by_formula(config: HybridConfig, batch: int, dtype: torch.dtype) -> Callable[[int], CacheBytes]:
    return lambda length: cache_bytes(config, length, batch, dtype)


def _of_foreign(model: Any, batch: int) -> dict[str, Callable[[int], CacheBytes]]:
    """Of a transformers model and, if anything in it attends, of its layers all full."""
    sizes = cache_sizes(model)
    found: dict[str, Callable[[int], CacheBytes]] = {
        "hybrid": lambda length: CacheBytes(*(batch * size for size in sizes.at(length)))
    }
    token = sizes.full_token
    if token is not None:
        found["full"] = lambda length: CacheBytes(batch * length * token, 0)
    return found


def cache_bytes(config: HybridConfig, length: int, batch: int = 1, dtype: torch.dtype = torch.bfloat16) -> CacheBytes:
    """Bytes of the decode cache after `length` tokens of each of `batch` sequences, by the formulas above."""
    size, wide = dtype.itemsize, torch.promote_types(dtype, torch.float32).itemsize
    with torch.device("meta"):
        model = HybridLM(config)
    kv = state = 0
    for block in model.layers:
        for mixer in block.mixers:
            site: Any = mixer.site
            if site.softmax:
                kept = length if site.window is None else min(length, site.window - 1)
                kv += kept * site.kv_heads * (site.key_dim + site.value_dim) * size
            else:
                conv: Any = getattr(mixer, "conv", None)
                channels = (
                    config.d_model if conv is None else conv.weight.shape[0]
                )  # of a token shift: the stream itself
                state += site.heads * site.key_dim * site.value_dim * wide + (site.conv - 1) * channels * size
        state += 0 if isinstance(block.mlp, MLP) else config.d_model * size
    return CacheBytes(batch * kv, batch * state)


def measured_bytes(cache: Any) -> CacheBytes:
    """Bytes of the storage that a cache (ours, or a transformers model's) holds: of keys and values, and of states."""
    if not isinstance(cache, Cache):
        tensors = list(held(cache.past))
        return CacheBytes(*(_held(*(x for _, its, x in tensors if its == kind)) for kind in ("kv", "state")))
    kv = state = 0
    for entry in cache.sites.values():
        if isinstance(entry, KVCache):
            kv += _held(entry.k, entry.v)
        else:
            ring = () if entry.ring is None else [x for x in vars(entry.ring).values() if isinstance(x, Tensor)]
            state += _held(entry.state, entry.conv, *ring)
    return CacheBytes(kv, state)


def _held(*tensors: Tensor | None) -> int:
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors if x is not None}
    return sum(storages.values())


@torch.no_grad()
def _time(
    models: dict[str, Any], length: int, batch: int, new_tokens: int, device: torch.device
) -> dict[str, dict[str, float | int]]:
    """What is measured of each model; once through beforehand, unmeasured, then in turn."""
    generator = torch.Generator().manual_seed(0)
    vocab = next(iter(models.values())).vocab_size
    tokens = torch.randint(0, vocab, (batch, length + new_tokens), generator=generator).to(device)
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in models}
    found: dict[str, dict[str, float | int]] = {}
    for repeat in range(REPEATS + 1):
        for name, model in models.items():
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
            cache = model.new_cache()
            begin = _now(device)
            model.unembed_hidden(model.hidden(tokens[:, :length], cache=cache)[:, -1:])
            middle = _now(device)
            held = measured_bytes(cache)
            start = _now(device)
            for n in range(length, length + new_tokens):
                model.unembed_hidden(model.hidden(tokens[:, n : n + 1], cache=cache))
            end = _now(device)
            if repeat:
                seconds[name].append((middle - begin, (end - start) / new_tokens))
            peak = float(torch.cuda.max_memory_allocated(device)) if device.type == "cuda" else float("nan")
            found[name] = {"measured_kv_bytes": held.kv, "measured_state_bytes": held.state, "peak_bytes": peak}
    for name, pairs in seconds.items():
        prefill, decode = (statistics.median(values) for values in zip(*pairs, strict=True))
        found[name] |= {"prefill_tokens_per_s": batch * length / prefill, "decode_ms": 1e3 * decode}
    return found


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _ratios(row: dict[str, Any], full: dict[str, Any] | None) -> dict[str, float]:
    def over(a: float | int, b: float | int) -> float:
        return a / b if b else float("inf")

    if full is None:
        return dict.fromkeys(("kv_ratio", "cache_ratio", "prefill_ratio", "decode_ratio"), float("nan"))
    return {
        "kv_ratio": over(full["kv_bytes"], row["kv_bytes"]),
        "cache_ratio": over(full["cache_bytes"], row["cache_bytes"]),
        "prefill_ratio": over(row["prefill_tokens_per_s"], full["prefill_tokens_per_s"]),
        "decode_ratio": over(full["decode_ms"], row["decode_ms"]),
    }
