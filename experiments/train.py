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
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from tqdm import tqdm

from ..hooks.checkpoint import atomic_file, check_weights, read_json, save, write_json
from ..hooks.ladder import RUN
from ..hooks.mixers.hawk import BlockLinear
from ..hooks.model import HybridLM
from .config import RunConfig
from .corpus import corpus, data_hash
from .distributed import Team, load_optimizer, team, whole_gradients
from .loss import token_loss
from .tuning import side_by_side

STATE, LOG = "resume.pt", "loss.jsonl"


def train(config: RunConfig, out: str | Path, *, progress: bool = True) -> Path:
    """Train and return the ladder's folder `out`, with step-NNNNNN/ checkpoints from step 0 on, run.json and
    loss.jsonl.

    A folder that holds an unfinished run of the same config is resumed exactly where its last checkpoint stands.
    Under torchrun the processes train one model together, on the batches that one process would see, and the first
    writes what one process would write; all must see the folder, and their number may change on resuming.
    Raises ValueError when the folder holds another run or a state to resume from that cannot be read, when the loss
    stops being finite (naming the step), or when the processes cannot split a batch, or Muon's matrices, evenly.
    """
    folder = Path(out)
    t = config.train
    workers = team(t, _device(t.device))
    if workers.device.type == "cuda":
        side_by_side()
    if t.threads is not None:
        torch.set_num_threads(t.threads)
    source = corpus(config.data)
    torch.manual_seed(t.seed)
    model = HybridLM(config.hybrid()).to(workers.device)
    workers.check_muon(_muon_weights(model, config))
    folder.mkdir(parents=True, exist_ok=True)
    run = _start_or_resume(folder, config, data_hash(source, t.seed), workers)
    forward, optimizers, done = _restore(folder, run, config, model, workers)
    if workers.first:
        _forget_after(folder / LOG, done)
    compiled = t.compile == "on" or (t.compile == "auto" and workers.device.type == "cuda")
    if compiled:
        forward = torch.compile(forward)
    saves = {round(t.steps * i / t.saves) for i in range(t.saves + 1)}
    if done < 0:
        _set_window(model, t.window(0))
        _save(folder, run, model, optimizers, 0, workers)
        done = 0
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    quiet = not progress or not workers.first
    bar = tqdm(range(done, t.steps), initial=done, total=t.steps, desc="train", disable=quiet, mininterval=1)
    for step in bar:
        model.train()
        if _set_window(model, t.window(step)) and compiled:
            torch.compiler.reset()  # else the windows may use up torch.compile's limit of recompilations
        for group in groups:
            group["lr"] = group["initial_lr"] * schedule(step, t.warmup, t.steps)
        loss = _accumulate(forward, source.batch(t.seed, step, t.batch), t.accumulate, workers, compiled)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), t.clip)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        if not math.isfinite(loss) or not bool(norm.isfinite()):
            raise ValueError(f"train: loss {loss} and gradient norm {float(norm)} at step {step + 1}; lower train.lr?")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        bar.set_postfix(loss=f"{loss:.3f}")
        if workers.first:
            with open(folder / LOG, "a") as log:
                log.write(json.dumps({"step": step + 1, "loss": loss, "lr": groups[0]["lr"]}) + "\n")
        if step + 1 in saves:
            _save(folder, run, model, optimizers, step + 1, workers)
    if workers.first:
        (folder / STATE).unlink(missing_ok=True)  # a finished run has nothing to resume
    return folder


def _set_window(model: HybridLM, window: int | None) -> bool:
    """Give the swa layers their window of the schedule; returns whether that changed the model."""
    before = model.config
    if window is not None:
        model.set_window(window)
    return model.config != before


def _accumulate(forward: Any, batch: tuple[Tensor, Tensor], parts: int, workers: Team, compiled: bool = False) -> float:
    """Gradients of the weighted mean loss over the whole batch, this process's rows a part at a time; returns the
    loss."""
    tokens, weight = batch
    total = weight.sum() / workers.size  # gradients are averaged over the processes, not summed
    loss = 0.0
    shares = workers.share(tokens).chunk(parts), workers.share(weight).chunk(parts)
    for x, w in zip(*shares, strict=True):
        x, w = x.to(workers.device), w.to(workers.device)
        with _autocast(workers.device):
            logits = forward(x)
        part = token_loss(logits, x, w, total.to(workers.device), compiled=compiled)
        part.backward()
        loss += part.item()
    return workers.mean(loss)


def make_optimizers(model: HybridLM, config: RunConfig) -> list[torch.optim.Optimizer]:
    """AdamW, in which linear maps and embeddings decay and nothing else does (norms, gates, shifts, convolutions);
    under `train.optimizer = "muon"`, Muon for the weights of linear maps inside the blocks, AdamW for the rest."""
    t = config.train
    linear = list(_muon_weights(model, config).values())
    taken = {id(p) for p in linear}
    rest = [p for p in model.parameters() if id(p) not in taken]
    decayed = {id(m.weight) for m in model.modules() if isinstance(m, nn.Linear | nn.Embedding | BlockLinear)}
    groups = [
        {"params": [p for p in rest if id(p) in decayed], "weight_decay": t.weight_decay},
        {"params": [p for p in rest if id(p) not in decayed], "weight_decay": 0.0},
    ]
    fused = all(p.is_cuda for p in rest)
    optimizers: list[torch.optim.Optimizer] = [torch.optim.AdamW(groups, lr=t.lr, betas=(0.9, 0.95), fused=fused)]
    if linear:
        lr = t.lr if t.muon_lr is None else t.muon_lr
        muon = torch.optim.Muon(linear, lr=lr, weight_decay=t.weight_decay, adjust_lr_fn="match_rms_adamw")
        muon.register_step_pre_hook(whole_gradients)
        optimizers.append(muon)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["initial_lr"] = group["lr"]  # what `schedule` scales
    return optimizers


def _muon_weights(model: HybridLM, config: RunConfig) -> dict[str, nn.Parameter]:
    """What Muon trains, by name."""
    if config.train.optimizer != "muon":
        return {}
    linear = {id(m.weight) for m in model.blocks.modules() if isinstance(m, nn.Linear)}
    return {name: p for name, p in model.named_parameters() if id(p) in linear}


def schedule(step: int, warmup: int, steps: int) -> float:
    """Learning-rate factor: linear warm-up, then cosine from 1 to 0.1."""
    return min(1.0, (step + 1) / max(1, warmup)) * (0.55 + 0.45 * math.cos(math.pi * step / steps))


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
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


def _start_or_resume(folder: Path, config: RunConfig, data: str, workers: Team) -> dict[str, Any]:
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
    if workers.first:
        _write_run(folder, run)
    return run


def _write_run(folder: Path, run: dict[str, Any]) -> None:
    with atomic_file(folder / RUN) as temporary:
        write_json(temporary, run)


def _restore(
    folder: Path, run: dict[str, Any], config: RunConfig, model: HybridLM, workers: Team
) -> tuple[Any, list[torch.optim.Optimizer], int]:
    """What to train with, as the last checkpoint left it: the model to call, its optimisers, steps done (-1: new)."""
    state = _last_state(folder, run)
    workers.barrier()  # all have read; from here on the first process writes
    if "model" in state:
        check_weights(state["model"], model.state_dict(), str(folder / STATE))
        model.load_state_dict(state["model"])
    forward, optimizers = workers.wrap(model), make_optimizers(model, config)
    if "optimizers" in state:
        for i, (optimizer, saved) in enumerate(zip(optimizers, state["optimizers"], strict=True)):
            load_optimizer(optimizer, saved, f"{folder / STATE}: optimizers[{i}]")
    return forward, optimizers, state["step"]


def _last_state(folder: Path, run: dict[str, Any]) -> dict[str, Any]:
    """The last checkpoint's state; only its `step` (-1: none) for a new or a finished run.

    ValueError names the file where it is missing or broken; nothing is written then.
    """
    file = folder / STATE
    if file.is_file():
        try:
            state = torch.load(file, map_location="cpu", weights_only=True)
        except Exception as error:  # of many types, by what is wrong with the bytes
            what = f"truncated or not a state to resume from (torch.load: {type(error).__name__})"
            raise ValueError(f"{file}: {what}; restore it, or train into another --out") from None
        keys = {"model", "optimizers", "step"}
        if not isinstance(state, dict) or set(state) != keys:
            found = sorted(state) if isinstance(state, dict) else type(state).__name__
            raise ValueError(f"{file}: holds {found}; expected {sorted(keys)}")
        return state
    last = max(run["steps"], default=-1)
    if 0 < last < run["config"]["train"]["steps"]:
        raise ValueError(f"{file}: missing; the run stopped after step {last} and cannot go on without it")
    return {"step": last}


def _forget_after(log: Path, step: int) -> None:
    """Drop what a killed run logged after the step it is resumed from."""
    if log.is_file():
        lines = [line for line in log.read_text().splitlines(True) if line.endswith("\n")]  # the last may be cut off
        kept = [line for line in lines if json.loads(line)["step"] <= step]
        with atomic_file(log) as temporary:
            temporary.write_text("".join(kept))


def _save(
    folder: Path,
    run: dict[str, Any],
    model: HybridLM,
    optimizers: list[torch.optim.Optimizer],
    step: int,
    workers: Team,
) -> None:
    """The checkpoint, then run.json that lists it, then the state to resume from; each atomic."""
    parts = {"model": model.state_dict(), "optimizers": [o.state_dict() for o in optimizers], "step": step}
    state = workers.gather(parts)
    if not workers.first:
        return
    save(model, folder / f"step-{step:06d}", {"step": step, "data": run["config"]["data"]}, state["model"])
    run["steps"] = sorted({*run["steps"], step})
    _write_run(folder, run)
    with atomic_file(folder / STATE) as temporary:
        torch.save(state, temporary)


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
    """The repository's commit, where the library runs from a checkout that tracks it; "-dirty" where files differ."""
    here = Path(__file__).resolve()
    tracked = ["git", "ls-files", "--error-unmatch", here.name]
    try:
        subprocess.run(tracked, cwd=here.parent, capture_output=True, check=True)
        out = subprocess.run(["git", "rev-parse", "HEAD"], cwd=here.parent, capture_output=True, text=True, check=True)
        clean = subprocess.run(["git", "diff", "--quiet", "HEAD"], cwd=here.parent, check=False).returncode == 0
    except (OSError, subprocess.CalledProcessError):
        return None
    return out.stdout.strip() + ("" if clean else "-dirty")
