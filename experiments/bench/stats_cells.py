"""What bench stats measures, a cell at a time: checks of the kernel, attention beside its statistics, whole models."""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ...hooks import attend
from ...hooks.config import HybridConfig
from ...hooks.kernels.attention_stats import AttentionStats, attention_stats
from ...hooks.model import HybridLM
from ...hooks.record import Stats, record
from .attention_paths import seen
from .step import Clock

Row = dict[str, Any]
HEADS = 16
MODEL: Row = {"n_layers": 24, "d_model": 1024, "n_heads": 16, "vocab_size": 512}
FEW = 64
"""Rows of the "64 rows" measurements, the last ones."""


@dataclasses.dataclass(frozen=True)
class Cell:
    """check/DTYPE/CASE, op/T/D/GROUP(/WINDOW), flex/T/D/GROUP(/WINDOW) or model/T."""

    id: str

    @property
    def parts(self) -> list[str]:
        return self.id.split("/")


CASES: dict[str, Row] = {  # of the checks; K, G and T where they are not 64, 4 and 1,000
    "plain": {},
    "long": {"T": 4096, "K": 128, "histogram": True},
    "window": {"window": 129, "sinks": 3, "K": 128},
    "limit": {"window": 100, "sinks": 5, "limit": 400, "K": 80},
    "gemma": {"softcap": 30.0, "K": 256, "G": 2, "window": 512},
    "gpt-oss": {"sink_logits": True, "window": 128, "G": 1},
    "documents": {"cu_seqlens": [0, 1, 130, 130, 777, 1000], "K": 96},
    "left-padding": {"padding": 137, "histogram": True},
    "rows": {"rows": [999, 0, 500, 501, 63, 64], "K": 16},
    "huge": {"size": 2000.0},
    "both-ways": {"causal": False, "K": 72},
}
PLAN = [
    "check/bf16/plain", "check/fp32/plain", "check/fp32/long", "check/bf16/window",
    "op/16384/128/1", "op/65536/128/1", "op/16384/64/1", "model/16384", "model/65536", "op/65536/64/1",
    "op/65536/128/1/2048", "model/8192", "op/16384/128/4", "op/4096/128/1", "op/131072/128/1",
    *[f"check/{dtype}/{case}" for dtype in ("fp32", "bf16") for case in CASES
      if (dtype, case) not in (("bf16", "plain"), ("fp32", "plain"), ("fp32", "long"), ("bf16", "window"))],
    "check/fp16/plain", "check/fp16/long",
    "op/65536/128/4", "op/4096/64/1", "op/131072/64/1", "op/65536/64/1/2048", "op/16384/64/4", "op/65536/64/4",
    "op/4096/128/4", "op/4096/64/4", "op/131072/128/4", "op/131072/64/4",
    *[cell for T in (16_384, 65_536, 4096, 131_072) for D in (128, 64) for G in (1, 4)
      if (cell := f"op/{T}/{D}/{G}/2048") not in ("op/65536/128/1/2048", "op/65536/64/1/2048")],
    "flex/65536/128/1/2048", "flex/65536/64/1/2048",
    *[f"flex/{T}/{D}/{G}" for G in (1, 4) for D in (128, 64) for T in (16_384, 65_536, 4096, 131_072)],
]  # fmt: skip
"""What is asked for, in this order."""


def measure(cell: Cell, device: torch.device) -> Iterator[Row]:
    """The records of one cell, as they come; what fails in it is a record too."""
    kind, *rest = cell.parts
    if kind == "check":
        yield {"kind": "check", "dtype": rest[0], "case": rest[1], **check(rest[0], rest[1], device)}
    elif kind == "model":
        yield from whole_model(int(rest[0]), device)
    else:
        T, D, group, *window = map(int, rest)
        yield from operators(kind, T, D, group, window[0] if window else None, device)


def attempt(row: Row, f: Callable[[], Row]) -> Row:
    """`row` with what f measures, or with why it could not."""
    try:
        return {**row, "status": "ok", **f()}
    except Exception as exception:
        return failed(row, exception)
    finally:
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def failed(row: Row, exception: Exception) -> Row:
    """`row` with why it could not be measured; raises what leaves the GPU unusable."""
    if "CUDA error" in str(exception):
        raise exception
    text = " ".join(str(exception).split())
    status = "out of memory" if isinstance(exception, torch.cuda.OutOfMemoryError) else "failed"
    return {**row, "status": status, "exception": f"{type(exception).__name__}: {text}"[:500]}


# Checks


def check(dtype: str, case: str, device: torch.device) -> Row:
    """Largest errors, in units of 1e-5 (1 + |ref|) + 4 eps max|s|, with poisoned buffers; is a second run equal?"""
    o = dict(CASES[case])
    T, K, G, size = (o.pop(name, usual) for name, usual in (("T", 1000), ("K", 64), ("G", 4), ("size", 1.0)))
    draw = torch.Generator().manual_seed(0)
    kind = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[dtype]
    q, k = (torch.randn(1, T, n, K, generator=draw).to(device, kind) for n in (4, G))
    q *= size
    scores = torch.einsum("bthk,bshk->bhts", q.double(), k.double().repeat_interleave(4 // G, 2)) * K**-0.5
    largest, scores = float(scores.abs().max()), None
    if o.pop("sink_logits", False):
        o["sink_logits"] = torch.tensor([-3.0, 0.0, 2.0, 9.0], device=device)
    if padding := o.pop("padding", 0):
        at = torch.arange(T, device=device)[None]
        o |= {"q_pos": at - padding, "k_pos": (at - padding).clamp(min=-1)}
        k[:, :padding] = 100
    o["labels"] = (torch.rand(1, T, 3, generator=draw) < 0.05).to(device)
    with poisoned():
        got, again = (attention_stats(q, k, impl="triton", **o) for _ in range(2))
    expected = attention_stats(q, k, impl="reference", **o)
    slack = 4 * torch.finfo(torch.float32).eps * largest
    errors = {}
    for name, ref in expected.fields().items():
        value = getattr(got, name)
        if name == "top1":
            agree = (value == ref).double().mean()
            errors["top1_differs"] = 1 - float(agree)
        elif name == "visible":
            errors[name] = 0.0 if torch.equal(value, ref) else float("inf")
        else:
            bound = 1e-5 * (1 + ref.abs()) + slack * (1 + ref.abs() if name == "distance" else 1)
            equal = value.double() == ref  # lse is -inf in both where nothing is seen
            errors[name] = float(
                torch.where(equal, 0.0, (value.double() - ref).abs() / bound).nan_to_num(torch.inf).max()
            )
    same = all(torch.equal(x, again.fields()[name]) for name, x in got.fields().items())
    worst = max(v for name, v in errors.items() if name != "top1_differs")
    return {"status": "ok", "errors": errors, "worst": worst, "repeats": same, "ok": worst <= 1 and same}


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Buffers of the kernel's launches start as NaN, or as a large negative number."""
    from ...hooks.kernels import attention_stats_launch as launch

    def filled(f: Callable[..., Any]) -> Callable[..., Any]:
        def g(*args: Any) -> Any:
            out = f(*args)
            for x in out.values() if isinstance(out, dict) else out:
                x.fill_(float("nan") if x.dtype.is_floating_point else -(2**30))
            return out

        return g

    with (
        mock.patch.object(launch, "_outputs", filled(launch._outputs)),
        mock.patch.object(launch, "_sums", filled(launch._sums)),
    ):
        yield


# Attention, and its statistics


def operators(kind: str, T: int, D: int, group: int, window: int | None, device: torch.device) -> Iterator[Row]:
    """SDPA's kernels, eager with entropies, and ours with more and more fields; FlexAttention where kind is "flex"."""
    draw = torch.Generator().manual_seed(0)
    shapes = [(1, T, n, D) for n in (HEADS, HEADS // group, HEADS // group)]
    q, k, v = (torch.randn(s, generator=draw).to(device, torch.bfloat16) for s in shapes)
    labels = torch.zeros(1, T, dtype=torch.bool, device=device)
    labels[:, T // 3 : T // 3 + 8] = True  # a needle
    pairs = HEADS * T * seen(T, window)
    row = {"kind": "op", "T": T, "D": D, "H": HEADS, "G": HEADS // group, "window": window}
    few = list(range(T - FEW, T))
    lean = {"top1": False, "distance": False, "window": window}
    ours: dict[str, Callable[[], Any]] = {
        "stats: lse, entropy": lambda: attention_stats(q, k, **lean),
        "stats: + mass": lambda: attention_stats(q, k, labels=labels, **lean),
        "stats: + top-1": lambda: attention_stats(q, k, labels=labels, window=window, distance=False),
        "stats: + distance": lambda: attention_stats(q, k, labels=labels, window=window),
        "stats: 64 rows": lambda: attention_stats(q, k, labels=labels, window=window, rows=few),
    }
    if window is None:  # as under an attention sink; random scores keep raising the maximum, which costs
        sunk = [q + 4 * D**-0.5, k.clone()]
        sunk[1][:, 0] = 4.0
        ours["stats: + top-1, key 0 leads"] = lambda: attention_stats(*sunk, labels=labels, distance=False)
    peers: dict[str, Callable[[], Any]] = {}
    if kind == "flex":
        peers["flex"] = _flex(q, k, v, window)
        ours = {"stats: + mass": ours["stats: + mass"]}
    elif window is None:
        backends = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
        peers |= {name: lambda backend=b: _sdpa(q, k, v, backend) for name, b in backends.items()}
        if T <= 16_384:
            peers["eager + entropy"] = lambda: eager_entropy(q, k, v)
    for name, f in (peers | ours).items():
        flops = (2 if name.startswith("stats") else 4) * D * (pairs if "rows" not in name else HEADS * T * FEW)
        yield attempt({**row, "path": name, "flops": flops}, lambda f=f: timed(f, device))


def timed(f: Callable[[], Any], device: torch.device, seconds: float = 0.4) -> Row:
    """Median milliseconds on the device of repeats that take about `seconds`, and the memory that one takes at most."""
    f()
    memory = peak_of(f, device)
    clock = Clock(device)
    for _ in range(3):
        clock.tick()
        f()
    clock.tick()
    once = clock.seconds()[-1]
    clock = Clock(device)
    for _ in range(max(5, min(50, int(seconds / max(once, 1e-6))))):
        clock.tick()
        f()
    clock.tick()
    times = clock.seconds()
    return {"ms": statistics.median(times) * 1e3, "fastest_ms": min(times) * 1e3, "repeats": len(times), **memory}


def peak_of(f: Callable[[], Any], device: torch.device) -> Row:
    """GiB that f holds at most, beyond what was there before."""
    if device.type != "cuda":
        f()
        return {}
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    f()
    torch.cuda.synchronize()
    return {"peak_gib": (torch.cuda.max_memory_allocated() - before) / 2**30}


def _sdpa(q: Tensor, k: Tensor, v: Tensor, backend: SDPBackend) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    with sdpa_kernel(backend):
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]
        )


def _flex(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Callable[[], Any]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    T = q.shape[1]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))

    def inside(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (i >= j) & (i - j < (window or T))

    made: list[Any] = []

    def f() -> Any:
        if not made:
            torch.compiler.reset()
            mask = create_block_mask(inside, None, None, T, T, device=q.device.type, _compile=True)
            made.extend((torch.compile(flex_attention, dynamic=False), mask))
        return made[0](q, k, v, block_mask=made[1], enable_gqa=q.shape[1] != k.shape[1])

    return f


def eager_entropy(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Attention with its whole pattern, as published scripts have it, and the entropy of every row."""
    pattern = _pattern(q, k)
    out = torch.einsum("bhts,bshv->bthv", pattern, v.repeat_interleave(q.shape[2] // v.shape[2], 2))
    return out, -(pattern * (pattern + 1e-9).log()).sum(-1)


def _pattern(q: Tensor, k: Tensor) -> Tensor:
    scores = torch.einsum("bthk,bshk->bhts", q, k.repeat_interleave(q.shape[2] // k.shape[2], 2)) * q.shape[-1] ** -0.5
    T, S = scores.shape[-2:]
    hidden = torch.ones(T, S, dtype=torch.bool, device=q.device).triu(1)
    return scores.masked_fill_(hidden, -torch.inf).float().softmax(-1).to(q.dtype)


# Whole models


@torch.no_grad()
def whole_model(T: int, device: torch.device) -> Iterator[Row]:
    """A forward pass of 24 layers: plain, with statistics of every row, of the last 64, and with all patterns kept."""
    torch.manual_seed(0)
    with device:
        model = HybridLM(HybridConfig(("full",), **MODEL)).to(torch.bfloat16).eval()
        tokens = torch.randint(MODEL["vocab_size"], (1, T))
        labels = torch.zeros(1, T, dtype=torch.bool)
        labels[:, T // 3 : T // 3 + 8] = True
    few = list(range(T - FEW, T))

    def tapped(rows: list[int] | None) -> list[AttentionStats]:
        out: list[AttentionStats] = []

        def tap(site: Any, q: Tensor, k: Tensor, view: Any, **score: Any) -> None:
            out.append(attention_stats(q, k, rows=rows, labels=labels, distance=False, **score))

        try:
            for site in model.sites:
                site.tap = tap
            model(tokens)
        finally:
            for site in model.sites:
                site.tap = None
        return out

    def recorded(rows: list[int] | None) -> Any:
        with record(model, resid=None, stats=Stats(rows=rows, labels=labels)) as rec:
            model(tokens)
        return rec

    def eager() -> list[Tensor]:
        kept: list[Tensor] = []

        def attention(*, q: Tensor, k: Tensor, v: Tensor, **_: Any) -> Tensor:
            kept.append(_pattern(q, k))
            return torch.einsum("bhts,bshv->bthv", kept[-1], v)

        with mock.patch.object(attend, "attention", attention):
            model(tokens)
        return kept

    paths: dict[str, Callable[[], Any]] = {
        "plain": lambda: model(tokens),
        "stats, all rows": lambda: tapped(None),
        "stats, 64 rows": lambda: tapped(few),
        "record(), all rows": lambda: recorded(None),
        "record(), 64 rows": lambda: recorded(few),
        "plain, again": lambda: model(tokens),
    }
    if T <= 16_384:
        paths["eager, all patterns kept"] = eager
    yield from walled(paths, {"kind": "model", "T": T}, device)


def walled(paths: dict[str, Callable[[], Any]], row: Row, device: torch.device, seconds: float = 12.0) -> Iterator[Row]:
    """As `timed`, by the clock on the wall, since what Python adds counts; the paths in turn, since a host is not
    equally fast all the time. For `seconds` in all, at least three times each."""

    def first(f: Callable[[], Any]) -> Row:
        f()
        return peak_of(f, device)

    def once(f: Callable[[], Any]) -> float:
        start = time.perf_counter()
        out = f()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        del out
        return seconds

    rows = {name: attempt({**row, "path": name}, lambda f=f: first(f)) for name, f in paths.items()}
    times: dict[str, list[float]] = {name: [] for name in paths}
    begin = time.perf_counter()
    for repeat in range(30):
        if repeat >= 3 and time.perf_counter() - begin > seconds:
            break
        for name in [name for name, its in rows.items() if its["status"] == "ok"]:
            try:
                times[name].append(once(paths[name]))
            except Exception as exception:
                rows[name] = failed(rows[name], exception)
    for name, its in times.items():
        if rows[name]["status"] == "ok":
            rows[name] |= {"ms": statistics.median(its) * 1e3, "fastest_ms": min(its) * 1e3, "repeats": len(its)}
    yield from rows.values()
