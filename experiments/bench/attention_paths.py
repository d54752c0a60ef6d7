"""Kernels that could serve softmax attention in training: speed and error, full and under a window.

    python -m hybridscope.experiments.bench.attention_paths --out attention_paths.json

Forward and backward of SDPA's kernels (causal), and of three ways to do a window: `bands` (the rows in blocks, each
under a mask, as every device can), `flash` (one call of torch's flash kernel, what attention() takes on a GPU) and
`flex` (FlexAttention, compiled). Errors are against fp64 on a shorter sequence: largest difference over the largest
value, of outputs and of each gradient. About a minute.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ...hooks.kernels import attention as kernel
from ..train import commit
from . import workers
from .flops import nominal_peak
from .step import Clock
from .train import need_device, version_of

SHAPES = [(8, 4096, 16, 16, 64), (2, 16_384, 16, 16, 64), (8, 4096, 12, 2, 64), (8, 4096, 8, 8, 128)]  # B T H G K
WINDOWS = (None, 128, 512, 2048)
Function = Callable[[Tensor, Tensor, Tensor], Tensor]


def paths(window: int | None, length: int) -> dict[str, Function]:
    """The candidates for one window, on q [B,T,H,K], k and v [B,T,G,K]."""
    if window is None:
        named = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
        return {"sdpa": _sdpa, **{name: _with(backend) for name, backend in named.items()}}
    out: dict[str, Function] = {"flash": lambda q, k, v: kernel.attention(q=q, k=k, v=v, window=window)}
    if length <= 4096:
        out["bands"] = lambda q, k, v: _bands(q, k, v, window)
    return out | {"flex": flex_window(window, length)}


def _sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return kernel.attention(q=q, k=k, v=v)


def _with(backend: SDPBackend) -> Function:
    def f(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return _sdpa(q, k, v)

    return f


def _bands(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    with mock.patch.object(kernel, "_flash_takes", return_value=False):
        return kernel.attention(q=q, k=k, v=v, window=window)


def flex_window(window: int, length: int) -> Function:
    """FlexAttention under a window, compiled for one length."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def inside(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (i >= j) & (i - j < window)

    mask = create_block_mask(inside, None, None, length, length, device="cuda", _compile=True)
    compiled = torch.compile(flex_attention, dynamic=False)

    def f(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out: Any = compiled(q, k, v, block_mask=mask, enable_gqa=q.shape[1] != k.shape[1])
        return out.transpose(1, 2)

    return f


def inputs(B: int, T: int, H: int, G: int, K: int, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    """q, k, v that want gradients, and the output's gradient."""
    draw = torch.Generator().manual_seed(0)
    shapes = [(B, T, H, K), (B, T, G, K), (B, T, G, K), (B, T, H, K)]
    x = [torch.randn(s, generator=draw).to("cuda", dtype) for s in shapes]
    return [*(y.requires_grad_() for y in x[:3]), x[3]]


def timed(f: Function, x: list[Tensor], repeats: int = 10) -> tuple[float, float]:
    """Median seconds of a forward pass, and of forward and backward together."""
    *qkv, grad = x
    spent = []
    for backward in (False, True):
        clock = Clock(torch.device("cuda"))
        for _ in range(repeats + 3):
            out = f(*qkv)
            if backward:
                torch.autograd.grad(out, qkv, grad)
            clock.tick()
        spent.append(statistics.median(clock.seconds()[2:]))
    return spent[0], spent[1]


def errors(f: Function, x: list[Tensor], window: int | None) -> dict[str, float]:
    """Of the output and of each gradient."""
    *qkv, grad = x
    out = f(*qkv)
    got = [out, *torch.autograd.grad(out, qkv, grad)]
    wide = [y.detach().double().requires_grad_() for y in qkv]
    reference = kernel.attention_reference(q=wide[0], k=wide[1], v=wide[2], window=window)
    expected = [reference, *torch.autograd.grad(reference, wide, grad.double())]
    pairs = zip(("out", "dq", "dk", "dv"), got, expected, strict=True)
    return {name: float((a.double() - b).abs().max() / b.abs().max()) for name, a, b in pairs}


def seen(length: int, window: int | None) -> float:
    """Keys that a query sees on average."""
    w = min(length, window or length)
    return (w * (w + 1) / 2 + (length - w) * w) / length


def measure(shape: tuple[int, int, int, int, int], window: int | None) -> list[workers.Row]:
    """A record for each candidate; an exception is recorded and the rest goes on."""
    B, T, H, G, K = shape
    rows = []
    short = 1000 if window is None or window < 1000 else 2 * window
    for name in paths(window, T):
        row: workers.Row = {"B": B, "T": T, "H": H, "G": G, "K": K, "window": window, "path": name, "status": "ok"}
        try:
            forward, both = timed(paths(window, T)[name], inputs(*shape))
            flops = 4 * H * K * seen(T, window) * B * T
            row |= {"forward_ms": forward * 1e3, "both_ms": both * 1e3}
            row |= {"forward_flops_per_second": flops / forward, "both_flops_per_second": 3 * flops / both}
            row["errors"] = errors(paths(window, short)[name], inputs(1, short, H, G, K), window)
        except Exception as exception:
            row |= {"status": "failed", "exception": f"{type(exception).__name__}: {exception}"[:500]}
        rows.append(row)
        print(line_of(row), flush=True)
    return rows


def line_of(row: workers.Row) -> str:
    """One candidate for the terminal."""
    head = f"B{row['B']} T{row['T']} H{row['H']} G{row['G']} K{row['K']} window {row['window']!s:5s} {row['path']:6s}"
    if row["status"] != "ok":
        return f"{head} FAILED {' '.join(row['exception'].split())[:120]}"
    worst = max(row["errors"].values())
    rates = f"{row['forward_flops_per_second'] / 1e12:5.0f} {row['both_flops_per_second'] / 1e12:5.0f} TFLOP/s"
    return f"{head} forward {row['forward_ms']:7.3f} ms, both {row['both_ms']:7.3f} ms, {rates}, error {worst:.1e}"


def main(args: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/bench/attention_paths.json"))
    o = parser.parse_args(args)
    try:
        need_device("cuda")
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None
    gpu = torch.cuda.get_device_name()
    versions = {name: version_of(name) for name in ("torch", "triton")}
    result: workers.Row = {"bench": "attention_paths", "device": gpu, "versions": versions, "rows": []}
    result |= {"nominal_peak": nominal_peak(gpu), "commit": commit()}
    for shape in SHAPES:
        for window in WINDOWS:
            result["rows"] += measure(shape, window)
            workers.save(o.out, result)
            torch.compiler.reset()
    print(o.out)


if __name__ == "__main__":
    main()
