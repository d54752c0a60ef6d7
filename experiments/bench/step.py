"""One cell of bench train: a model, a training step, its time, memory and arithmetic."""

from __future__ import annotations

import contextlib
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ...hooks.config import HybridConfig
from ...hooks.kernels import fused as kernels
from ...hooks.model import HybridLM
from ..loss import token_loss
from . import flops, peers
from .cells import Cell, config_of

Row = dict[str, Any]


def measure(cell: Cell, device: torch.device, *, warmup: int = 4, steps: int = 12, seconds: float = 6.0) -> Row:
    """Train `cell` for warm-up steps and then up to `steps` timed ones, at least 3 and no longer than `seconds`."""
    with _attention(cell.options["attention"]):
        return _measure(cell, device, warmup, steps, seconds)


def _attention(name: str) -> contextlib.AbstractContextManager[Any]:
    """Prefer one of SDPA's kernels; where it cannot run, SDPA takes the next."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if name == "auto":
        return contextlib.nullcontext()
    first = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}[name]
    rest = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    return sdpa_kernel([first, *(b for b in rest if b != first)], set_priority=True)


def _measure(cell: Cell, device: torch.device, warmup: int, steps: int, seconds: float) -> Row:
    torch.manual_seed(0)
    config = config_of(cell)
    with device if cell.pattern not in peers.PEERS else torch.device("meta"):
        ours = HybridLM(config)
    model, loss_of, notes = _prepared(cell, config, ours, device)
    optimizer = torch.optim.AdamW(_groups(model), lr=3e-4, betas=(0.9, 0.95), fused=device.type == "cuda")
    draw = torch.Generator().manual_seed(1)
    shape = (cell.batch, cell.length)
    batches = [torch.randint(config.vocab_size, shape, generator=draw).to(device) for _ in range(4)]

    def step(i: int) -> Tensor:
        with _autocast(device):
            loss = loss_of(batches[i % len(batches)])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    start = time.monotonic()
    first = float(step(0))
    compiled = time.monotonic() - start
    for i in range(1, warmup):
        step(i)
    clock = Clock(device)
    clock.tick()
    step(warmup)
    clock.tick()
    count = max(3, min(steps, int(seconds / max(clock.seconds()[0], 1e-6))))
    _reset_peak(device)
    clock, last = Clock(device), torch.tensor(first)
    clock.tick()
    for i in range(count):  # nothing waits for the device in between
        last = step(warmup + 1 + i)
        clock.tick()
    times = clock.seconds()
    peak = torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else None
    profile = _profile(lambda: step(0), device)
    each = statistics.median(times)
    per_token = flops.flops_per_token(ours, cell.length)
    whole = flops.flops_per_token(ours, cell.length, whole=True)
    tokens = cell.batch * cell.length
    row: Row = {
        "layers": list(config.layers), "d_model": config.d_model, "vocab_size": config.vocab_size,
        "mixers": {m: dict(o) for m, o in config.mixers.items() if m in config.names}, "batch": cell.batch,
        "tokens_per_step": tokens, "parameters": sum(p.numel() for p in model.parameters()),
        "parameters_ours": sum(p.numel() for p in ours.parameters()), "matrix_elements": flops.matrix_elements(ours),
        "seconds_per_step": each, "fastest": min(times), "slowest": max(times), "steps": len(times),
        "tokens_per_second": tokens / each, "flops_per_token": per_token, "flops_per_token_whole": whole,
        "flops_per_second": per_token * tokens / each, "flops_per_second_whole": whole * tokens / each,
        "peak_memory_gib": peak, "first_step_seconds": compiled, "loss_first": first, "loss_last": float(last),
        "graph_breaks": _breaks(), "ops": _ops(cell, config, device), "notes": notes, "profile": profile,
    }  # fmt: skip
    if not all(map(_finite, (row["loss_first"], row["loss_last"]))):
        raise ArithmeticError(f"loss {row['loss_first']} at first and {row['loss_last']} at the end")
    return row


def _prepared(
    cell: Cell, config: HybridConfig, ours: HybridLM, device: torch.device
) -> tuple[nn.Module, Callable[[Tensor], Tensor], list[str]]:
    """The model, its loss on a batch, and notes."""
    options = cell.options
    theirs: Any = None
    notes: list[str] = []
    model: nn.Module = ours
    if cell.pattern in peers.PEERS:
        theirs = peers.build(cell.pattern, config, device)
        model, notes = theirs.model, theirs.notes
        if theirs.loss is not None:  # fla's models are meant to run as they are; its loss is its own
            return model, theirs.loss, notes
    forward: Any = model
    if options["compile"] == "model":
        forward = torch.compile(model)
    elif options["compile"] == "blocks":
        for block in ours.layers if theirs is None else model.model.layers:  # type: ignore[union-attr]
            block.compile()
    compiled = options["loss"] == "compiled" and options["compile"] != "none"
    weight = torch.ones(cell.batch, cell.length - 1, device=device)

    def loss_of(x: Tensor) -> Tensor:
        out = forward(x)
        return token_loss(out if theirs is None else out.logits, x, weight, compiled=compiled)

    return model, loss_of, notes


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    """As the training loop has them: linear maps and embeddings decay, nothing else."""
    decayed = {id(m.weight) for m in model.modules() if isinstance(m, nn.Linear | nn.Embedding)}
    p = list(model.parameters())
    return [
        {"params": [x for x in p if id(x) in decayed], "weight_decay": 0.1},
        {"params": [x for x in p if id(x) not in decayed], "weight_decay": 0.0},
    ]


@contextlib.contextmanager
def _autocast(device: torch.device) -> Iterator[None]:
    if device.type == "cuda":
        with torch.autocast("cuda", torch.bfloat16):
            yield
    else:
        yield


class Clock:
    """Seconds between ticks, on the device's own time."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.ticks: list[Any] = []

    def tick(self) -> None:
        if self.cuda:
            self.ticks.append(torch.cuda.Event(enable_timing=True))
            self.ticks[-1].record()
        else:
            self.ticks.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """From each tick to the next; waits for the device."""
        pairs = list(itertools.pairwise(self.ticks))
        if not self.cuda:
            return [after - before for before, after in pairs]
        torch.cuda.synchronize()
        return [before.elapsed_time(after) / 1e3 for before, after in pairs]


def _reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)


def _ops(cell: Cell, config: HybridConfig, device: torch.device) -> dict[str, str]:
    """The kernel that each recurrent mixer of ours trains through."""
    if device.type != "cuda" or cell.pattern in peers.PEERS:
        return {}
    triton, capability = kernels.machine(device)
    mixers = sorted(config.names & set(kernels.MIXERS))
    return {
        m: kernels.path_of(kernels.MIXERS[m], triton=triton, capability=capability, training=True)[0] for m in mixers
    }


def _finite(x: float) -> bool:
    return x == x and abs(x) != float("inf")


def _breaks() -> dict[str, int]:
    """Why torch.compile left its graphs, shortened, and how often while tracing."""
    dynamo = sys.modules.get("torch._dynamo.utils")  # not loaded: nothing was compiled
    if dynamo is None:
        return {}
    out = {f"{k.splitlines()[0][:100]}": v for k, v in dynamo.counters["graph_break"].items()}
    return out | {"unique graphs": dynamo.counters["stats"].get("unique_graphs", 0)}


def _profile(step: Callable[[], Any], device: torch.device, top: int = 20) -> Row | None:
    """Where the device's time goes in one step: busy seconds, and the longest kernels [name, seconds, calls]."""
    if device.type != "cuda":
        return None
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
            step()
            torch.cuda.synchronize()
        spent = sorted(((e.self_device_time_total / 1e6, e.count, e.key) for e in seen.key_averages()), reverse=True)
    except Exception as exception:  # a profiler that does not work here must not cost the measurement
        return {"exception": f"{type(exception).__name__}: {exception}"[:300]}
    kernels = [[name[:120], round(seconds, 6), calls] for seconds, calls, name in spent[:top]]
    return {"busy": sum(seconds for seconds, _, _ in spent), "kernels": kernels}


def matmul_peak(device: torch.device, n: int = 8192, repeats: int = 20) -> float | None:
    """bf16 FLOP/s that this device reaches in a large matrix product of random numbers; None for a CPU."""
    if device.type != "cuda":
        return None
    a, b = (torch.randn(n, n, device=device, dtype=torch.bfloat16) for _ in range(2))
    clock = Clock(device)
    for _ in range(repeats + 5):
        _ = a @ b
        clock.tick()
    times = clock.seconds()[4:]
    return 2 * n**3 / statistics.median(times)
