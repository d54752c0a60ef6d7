"""Fused recurrences against the torch path, on the GPU: outputs, final state and every gradient.

    python -m hybridscope.experiments.bench.kernel_parity --out parity.json

Every family of mixers, T around a chunk's edge and long, with an initial state and a gradient through the final one.
The torch path computes in fp32 on the same (rounded) inputs. Each (family, dtype) is a process of its own, several at
a time, since nearly all the time goes into compiling kernels, and since a crash must not end the others. Kernels run
with their first configuration unless --tuned: tuning takes minutes of 16 cores (seen: 480 s did not suffice for all).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...hooks.kernels import fused as kernels
from ...hooks.kernels.recurrence import recurrence
from ..tuning import untuned

MODULE = "hybridscope.experiments.bench.kernel_parity"
LENGTHS = (64, 1, 63, 65, 1000, 4096)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

# Largest error allowed: `error`, for outputs and final state / for gradients. TF32 rounds each factor to 2^-11 = 5e-4
# and bf16 to 2^-9 = 2e-3; an output passes through a few such roundings one after another, a gradient (whose kernels
# also store the chunks' states in 16 bits) through about twice as many.
TOLERANCE: dict[str, tuple[float, float]] = {"fp32": (2e-3, 5e-3), "fp16": (2e-3, 5e-3), "bf16": (1e-2, 2e-2)}
EXACT = (1e-5, 1e-4)  # the elementwise scan in fp32: no products, sums in another order


def tolerance(family: str, dtype: str) -> tuple[float, float]:
    """Allowed `error` of outputs and state, and of gradients."""
    return EXACT if family == "elementwise" and dtype == "fp32" else TOLERANCE[dtype]


def error(got: Tensor, expected: Tensor) -> float:
    """The larger of two ratios: root mean square error to root mean square, and largest error to largest magnitude;
    inf where shapes or finiteness differ."""
    got, expected = got.detach().double(), expected.detach().double()
    if got.shape != expected.shape or not torch.isfinite(got).all():
        return float("inf")
    if not got.numel():
        return 0.0
    off = got - expected
    if not (scale := float(expected.abs().max())):
        return float(off.abs().max())
    return max(float(off.norm() / expected.norm()), float(off.abs().max()) / scale)


def inputs(
    family: str, T: int, *, B: int = 2, H: int = 4, K: int = 64, V: int = 64, dtype: torch.dtype = torch.float32,
    device: str = "cuda", seed: int = 0,
) -> dict[str, Tensor]:  # fmt: skip
    """Arguments of `recurrence` as a family's mixers give them, made on the CPU: unit keys for delta rules, weak and
    strong decays mixed, beta up to 2 for the gated delta rule. Decays, beta and state stay fp32."""
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw)

    if family == "elementwise":
        H, K, V = H * K, 1, 1
    delta = "delta" in family
    x = {"q": normal(B, T, H, K) * K**-0.5, "k": normal(B, T, H, K), "v": normal(B, T, H, V)}
    if delta or family == "low rank":
        x["k"] = F.normalize(x["k"], dim=-1)
    width = 1 if family in ("scalar", "elementwise", "delta scalar") else K
    if family != "delta":
        x["log_decay"] = -F.softplus(2 * normal(B, T, H, width) - 3)  # median e^-0.05, one in a hundred below e^-1.8
    if delta:
        x["beta"] = torch.sigmoid(normal(B, T, H)) * (2 if family == "delta scalar" else 1)
    if family == "low rank":  # RWKV-7
        x["log_decay"] = -0.606531 * torch.sigmoid(normal(B, T, H, K))
        unit = F.normalize(normal(B, T, H, K), dim=-1)
        x |= {"a": -unit, "b": unit * torch.sigmoid(normal(B, T, H, K))}
    x["state"] = normal(B, H, K, V)
    return {name: y.to(device, dtype if name in "qkvab" else torch.float32) for name, y in x.items()}


def compare(x: dict[str, Tensor], read: str, seed: int = 1) -> dict[str, Any]:
    """Errors of `fused` against the fp32 torch path on the same values: out, state, d_<input>, and the outputs without
    gradients (`out_inference`, another op on some machines); `repeats`: a second forward pass is bitwise equal."""
    draw = torch.Generator().manual_seed(seed)
    out_grad = torch.randn(x["v"].shape, generator=draw).to(x["v"])
    state_grad = torch.randn(x["state"].shape, generator=draw).to(x["state"])
    results = []
    for f, dtype in ((kernels.fused, None), (recurrence, torch.float32)):
        leaves = {name: y.detach().to(dtype or y.dtype).requires_grad_() for name, y in x.items()}
        with torch.enable_grad():
            out, state = f(**leaves, read=read)  # type: ignore[arg-type]
            loss = (out.float() * out_grad.float()).sum() + (state * state_grad).sum()
            grads = torch.autograd.grad(loss, list(leaves.values()))
        results.append((out.detach(), state.detach(), dict(zip(leaves, grads, strict=True))))
    (out, state, grads), (out_, state_, grads_) = results
    with torch.no_grad():
        inference, _ = kernels.fused(**x, read=read)  # type: ignore[arg-type]
        again, _ = kernels.fused(**x, read=read)  # type: ignore[arg-type]
    return {
        "out": error(out, out_), "state": error(state, state_), "out_inference": error(inference, out_),
        **{f"d_{name}": error(grads[name], grads_[name]) for name in grads}, "repeats": torch.equal(inference, again),
    }  # fmt: skip


def rows(
    family: kernels.Family, dtype: str, lengths: tuple[int, ...] = LENGTHS, *, device: str = "cuda", seed: int = 0
) -> Iterator[dict[str, Any]]:
    """One record per length, and at T = 1000 per head shape; an exception is recorded and the rest goes on."""
    mixers = [name for name, its in kernels.MIXERS.items() if its == family]
    cases = [(T, 4, 64, 64) for T in lengths]
    if 1000 in lengths and family != "elementwise":
        cases += [(1000, 2, 128, 128), (1000, 2, 24, 40)]  # wide; padded to the tensor cores' tiles
    for T, H, K, V in cases:
        row: dict[str, Any] = {"family": family, "mixers": mixers, "dtype": dtype, "T": T, "H": H, "K": K, "V": V}
        start = time.monotonic()
        try:
            triton, capability = kernels.machine(torch.device(device))
            for training, key in ((True, "op"), (False, "op_inference")):
                row[key], _ = kernels.path_of(
                    family, triton=triton, capability=capability, training=training, dtype=DTYPES[dtype]
                )
            x = inputs(family, T, H=H, K=K, V=V, dtype=DTYPES[dtype], device=device, seed=seed)
            errors = compare(x, "before" if family == "before" else "after", seed + 1)
            forward, backward = tolerance(family, dtype)
            bounds = {n: backward if n.startswith("d_") else forward for n in errors if n != "repeats"}
            row |= {"errors": errors, "over": [n for n, bound in bounds.items() if not errors[n] <= bound]}
            row["ok"] = not row["over"]
        except Exception as exception:  # whatever a kernel does on this machine belongs in the record
            row |= {"ok": False, "exception": f"{type(exception).__name__}: {exception}"[:2000]}
        yield row | {"seconds": round(time.monotonic() - start, 2)}


def run(
    out: Path, families: list[Any], dtypes: list[str], jobs: int, budget: float, seed: int, tuned: bool
) -> dict[str, Any]:
    """All tasks in processes of their own, `jobs` at a time, killed after `budget` seconds; saved row by row."""
    from importlib.metadata import version

    from ..train import commit

    gpu = torch.cuda.get_device_properties(0)
    names = ("torch", "triton", "flash-linear-attention", "transformers")
    result: dict[str, Any] = {
        "bench": "kernel_parity", "device": gpu.name, "commit": commit(), "capability": [gpu.major, gpu.minor],
        "versions": {n: version(n) for n in names},
        "python": platform.python_version(), "seed": seed, "tuned": tuned, "tolerance": TOLERANCE, "exact": EXACT,
        "unfinished": [], "rows": [],
    }  # fmt: skip
    lock, deadline = Lock(), time.monotonic() + budget
    environment = os.environ | {"FLA_CACHE_RESULTS": "0"}  # tuned in a crowd: not for later runs on this machine
    out.parent.mkdir(parents=True, exist_ok=True)

    def task(job: tuple[str, str]) -> None:
        family, dtype = job
        command = [sys.executable, "-m", MODULE, "--worker", "--family", family, "--dtype", dtype]
        command += ["--seed", str(seed), *(["--tuned"] if tuned else [])]
        code, said = "not started: no time left", ""
        if time.monotonic() < deadline:
            with tempfile.TemporaryFile("w+") as stderr:
                process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True, env=environment)
                code = _follow(process, deadline, keep)
                stderr.seek(0)
                said = stderr.read()[-2000:]
        if code != 0:
            with lock:
                result["unfinished"].append({"family": family, "dtype": dtype, "status": code, "stderr": said})
                _write(out, result)

    def keep(row: dict[str, Any]) -> None:
        with lock:
            result["rows"].append(row)
            _write(out, result)
            print(f"{row['family']:14s}{row['dtype']:6s}T={row['T']:<6d}K={row['K']:<5d}{_verdict(row)}", flush=True)

    _write(out, result)
    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(task, [(f, d) for d in dtypes for f in families]))
    return result


def _follow(process: subprocess.Popen[str], deadline: float, keep: Any) -> int | str:
    """Hand on a worker's rows as they come; its exit status, or why it was stopped."""
    from threading import Timer

    stopped = []
    timer = Timer(max(0.0, deadline - time.monotonic()), lambda: (stopped.append(1), process.kill()))
    timer.start()
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith('{"family"'):
            keep(json.loads(line))
    code = process.wait()
    timer.cancel()
    return "stopped: out of time" if stopped else code


def _verdict(row: dict[str, Any]) -> str:
    if "exception" in row:
        return row["exception"].splitlines()[0][:100]
    worst = max((n for n in row["errors"] if n != "repeats"), key=lambda n: row["errors"][n])
    over = "ok" if row["ok"] else "OVER " + " ".join(row["over"])
    return f"worst {worst} {row['errors'][worst]:.1e}  {row['seconds']:.0f} s  {over}"


def _write(file: Path, result: dict[str, Any]) -> None:
    partial = file.with_name(file.name + ".partial")
    partial.write_text(json.dumps(result, indent=1))
    os.replace(partial, file)


def table(result: dict[str, Any]) -> str:
    """The largest errors over all lengths, a line per family and dtype."""
    lines = [f"{'family':15s}{'dtype':6s}{'op':25s}{'out':>9s}{'state':>9s}{'gradient':>9s}  verdict"]
    for family, dtype in dict.fromkeys((row["family"], row["dtype"]) for row in result["rows"]):
        mine = [row for row in result["rows"] if (row["family"], row["dtype"]) == (family, dtype)]
        seen = [row["errors"] for row in mine if "errors" in row]
        out, state = (max((e[n] for e in seen), default=float("nan")) for n in ("out", "state"))
        gradient = max((v for e in seen for n, v in e.items() if n.startswith("d_")), default=float("nan"))
        good = sum(row["ok"] for row in mine)
        lines.append(
            f"{family:15s}{dtype:6s}{mine[0].get('op', '?'):25s}{out:9.1e}{state:9.1e}{gradient:9.1e}"
            f"  {good}/{len(mine)}{'' if all(e['repeats'] for e in seen) else ', repeats differ'}"
        )
    lines += [f"unfinished: {u['family']} {u['dtype']}: {u['status']}" for u in result["unfinished"]]
    return "\n".join(lines)


def main(args: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    families = list(dict.fromkeys(kernels.MIXERS.values()))
    parser.add_argument("--out", type=Path, default=Path("runs/bench/kernel_parity.json"))
    parser.add_argument("--family", action="append", choices=families, help="by default all; may be repeated")
    parser.add_argument("--dtype", action="append", choices=list(DTYPES), help="by default bf16 and fp32")
    parser.add_argument("--jobs", type=int, default=min(8, os.cpu_count() or 1), help="processes at a time")
    parser.add_argument("--budget", type=float, default=540, help="seconds; what is not done then is left out")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tuned", action="store_true", help="tune every kernel first")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    o = parser.parse_args(args)
    torch.set_num_threads(1)
    if o.worker:
        if not o.tuned:
            untuned()
        for row in rows(o.family[0], o.dtype[0], seed=o.seed):
            print(json.dumps(row), flush=True)
        return
    if not torch.cuda.is_available():
        raise SystemExit("error: kernel parity needs a CUDA device")
    result = run(o.out, o.family or families, o.dtype or ["bf16", "fp32"], o.jobs, o.budget, o.seed, o.tuned)
    print(table(result))
    print(o.out)


if __name__ == "__main__":
    main()
