"""Training: one loop, for a CPU and for a GPU, that leaves a ladder of checkpoints and can be resumed."""

from __future__ import annotations

import contextlib
import json
import math
import platform
import subprocess
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from ..hooks.checkpoint import atomic_file, read_json, save, write_json
from ..hooks.ladder import RUN
from ..hooks.model import HybridLM
from .config import RunConfig
from .corpus import corpus, data_hash

STATE, LOG = "resume.pt", "loss.jsonl"


def train(config: RunConfig, out: str | Path, *, progress: bool = True) -> Path:
    """Train and return the ladder's folder `out`, with step-NNNNNN/ checkpoints from step 0 on, run.json and
    loss.jsonl.

    A folder that holds an unfinished run of the same config is resumed exactly where its last checkpoint stands.
    Raises ValueError when it holds another run, or when the loss stops being finite (naming the step).
    """
    folder = Path(out)
    t = config.train
    device = _device(t.device)
    if t.threads is not None:
        torch.set_num_threads(t.threads)
    source = corpus(config.data)
    torch.manual_seed(t.seed)
    model = HybridLM(config.hybrid()).to(device)
    optimizer = make_optimizer(model, config)
    folder.mkdir(parents=True, exist_ok=True)
    run = _start_or_resume(folder, config, data_hash(source, t.seed))
    done = _restore(folder, run, model, optimizer, device)
    _forget_after(folder / LOG, done)
    forward: Any = model
    if t.compile == "on" or (t.compile == "auto" and device.type == "cuda"):
        forward = torch.compile(model)
    saves = {round(t.steps * i / t.saves) for i in range(t.saves + 1)}
    if done < 0:
        _save(folder, run, model, optimizer, 0)
        done = 0
    bar = tqdm(range(done, t.steps), initial=done, total=t.steps, desc="train", disable=not progress, mininterval=1)
    for step in bar:
        model.train()
        for group in optimizer.param_groups:
            group["lr"] = t.lr * schedule(step, t.warmup, t.steps)
        loss = _accumulate(forward, source.batch(t.seed, step, t.batch), t.accumulate, device)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), t.clip)
        if not math.isfinite(loss) or not bool(norm.isfinite()):
            raise ValueError(f"train: loss {loss} and gradient norm {float(norm)} at step {step + 1}; lower train.lr?")
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        bar.set_postfix(loss=f"{loss:.3f}")
        with open(folder / LOG, "a") as log:
            log.write(json.dumps({"step": step + 1, "loss": loss, "lr": optimizer.param_groups[0]["lr"]}) + "\n")
        if step + 1 in saves:
            _save(folder, run, model, optimizer, step + 1)
    (folder / STATE).unlink(missing_ok=True)  # a finished run has nothing to resume
    return folder


def _accumulate(forward: Any, batch: tuple[Tensor, Tensor], parts: int, device: torch.device) -> float:
    """Gradients of the weighted mean loss over the whole batch, a part at a time; returns the loss."""
    tokens, weight = batch
    total = weight.sum()
    loss = 0.0
    for x, w in zip(tokens.chunk(parts), weight.chunk(parts), strict=True):
        x, w = x.to(device), w.to(device)
        with _autocast(device):
            logits = forward(x)[:, :-1]
        losses = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), x[:, 1:].flatten(), reduction="none")
        part = (losses * w.flatten()).sum() / total
        part.backward()
        loss += part.item()
    return loss


def make_optimizer(model: HybridLM, config: RunConfig) -> torch.optim.Optimizer:
    """AdamW; matrices decay, vectors (norms, gates) do not."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": config.train.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.train.lr, betas=(0.9, 0.95))


def schedule(step: int, warmup: int, steps: int) -> float:
    """Learning-rate factor: linear warm-up, then cosine from 1 to 0.1."""
    return min(1.0, (step + 1) / max(1, warmup)) * (0.55 + 0.45 * math.cos(math.pi * step / steps))


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"train.device={name!r}: expected auto, cpu or cuda") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"train.device={name!r}: this machine has no CUDA device")
    return device


@contextlib.contextmanager
def _autocast(device: torch.device) -> Iterator[None]:
    if device.type == "cuda":
        with torch.autocast("cuda", torch.bfloat16):
            yield
    else:
        yield


def _start_or_resume(folder: Path, config: RunConfig, data: str) -> dict[str, Any]:
    """run.json: written at the start, checked on resume."""
    path = folder / RUN
    resolved = config.to_dict()
    if path.is_file():
        run = read_json(path)
        before = run.get("config", {})
        changed = [f"{s}.{k}" for s in resolved for k, v in resolved[s].items() if before.get(s, {}).get(k) != v]
        if changed or run.get("data_hash") != data:
            what = f"{changed[0]} differs" if changed else "its data differ"
            raise ValueError(f"{folder} holds another run ({what}); choose another --out or delete it")
        return run
    if any(folder.glob("step-*")):
        raise ValueError(f"{folder} holds checkpoints but no {RUN}; choose another --out")
    run = {
        "config": resolved, "seed": config.train.seed, "commit": commit(), "versions": versions(),
        "machine": machine(), "data_hash": data, "steps": [],
        "tokens_per_step": config.train.batch * config.data.length,
    }  # fmt: skip
    _write_run(folder, run)
    return run


def _write_run(folder: Path, run: dict[str, Any]) -> None:
    with atomic_file(folder / RUN) as temporary:
        write_json(temporary, run)


def _restore(
    folder: Path, run: dict[str, Any], model: HybridLM, optimizer: torch.optim.Optimizer, device: torch.device
) -> int:
    """Load the last checkpoint's state; returns its step, or -1 for a new run, or the last step of a finished one."""
    file = folder / STATE
    if file.is_file():
        state = torch.load(file, map_location=device, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        return int(state["step"])
    last = max(run["steps"], default=-1)
    if 0 < last < run["config"]["train"]["steps"]:
        raise ValueError(f"{file}: missing; the run stopped after step {last} and cannot go on without it")
    return last


def _forget_after(log: Path, step: int) -> None:
    """Drop what a killed run logged after the step it is resumed from."""
    if log.is_file():
        lines = [line for line in log.read_text().splitlines(True) if line.endswith("\n")]  # the last may be cut off
        kept = [line for line in lines if json.loads(line)["step"] <= step]
        with atomic_file(log) as temporary:
            temporary.write_text("".join(kept))


def _save(folder: Path, run: dict[str, Any], model: HybridLM, optimizer: torch.optim.Optimizer, step: int) -> None:
    """The checkpoint, then run.json that lists it, then the state to resume from; each atomic."""
    save(model, folder / f"step-{step:06d}", {"step": step, "data": run["config"]["data"]})
    run["steps"] = sorted({*run["steps"], step})
    _write_run(folder, run)
    with atomic_file(folder / STATE) as temporary:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, temporary)


def versions() -> dict[str, str]:
    """Versions of what results depend on."""
    names = ("torch", "transformers", "transformer-lens", "numpy", "scikit-learn")
    return {"python": platform.python_version(), **{name: version(name) for name in names}}


def machine() -> str:
    """The hardware, in words."""
    if torch.cuda.is_available():
        return f"{torch.cuda.get_device_name()}, {platform.machine()}"
    return f"CPU ({platform.machine()}), {torch.get_num_threads()} threads"


def commit() -> str | None:
    """The repository's commit, where the library runs from a checkout that tracks it."""
    here = Path(__file__).resolve()
    tracked = ["git", "ls-files", "--error-unmatch", here.name]
    try:
        subprocess.run(tracked, cwd=here.parent, capture_output=True, check=True)
        out = subprocess.run(["git", "rev-parse", "HEAD"], cwd=here.parent, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return out.stdout.strip()
