"""Features of needle prompts: residual-stream vectors at one column per sample, in memory or streamed to a folder.

A folder holds one array [N,D] in fp32 for each place (layer and where), plan.json (what was measured) and progress.json
(how many samples are done). Both are written atomically, progress after the arrays have reached the disk, so that a run
that was killed goes on where it stood. Memory holds one batch.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from ..hooks.checkpoint import atomic_file, read_json, write_json
from .arguments import at_least_one
from .needles import Needles

Where = Literal["pre", "mid", "post", "delta"]
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of a weight's element
INCIDENTAL = ("transformers_version", "dtype", "torch_dtype", "architectures", "use_cache")  # of a config
SAVE_EVERY = 20.0  # seconds of work that a kill may cost


class Features(Sequence[np.ndarray]):
    """Arrays [N,D] of a folder, one a place, each mapped when asked for."""

    def __init__(self, files: Sequence[Path]) -> None:
        self.files = list(files)

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: Any) -> Any:
        return np.load(self.files[index], mmap_mode="r")

    def only(self, places: Sequence[int]) -> Features:
        return Features([self.files[i] for i in places])


@torch.no_grad()
def extract(
    model: Any,
    needles: Needles,
    places: Sequence[tuple[int, Where]],
    *,
    removed: bool = False,
    position: Tensor | Literal["query"] = "query",
    batch: int = 32,
    folder: str | os.PathLike[str] | None = None,
) -> np.ndarray | Features:
    """Features [places,N,D] in fp32 at one column per sample; with a `folder` on disk, going on where it stands.

    Raises ValueError for activations that are NaN or infinite (naming the first layer), a position that is no column
    of every prompt or is padding, and for a folder that holds the features of another model, of other prompts or
    places, or any while heads are ablated or edited.
    """
    at_least_one(batch=batch)
    columns = _columns(needles, position)
    if folder is None:
        out: np.ndarray | None = None
        for start, rows in _batches(model, needles, places, removed, columns, batch, 0):
            if out is None:
                out = np.empty((len(places), len(needles), rows.shape[2]), np.float32)
            out[:, start : start + rows.shape[1]] = rows
        assert out is not None
        return out
    folder = Path(folder)
    if (folder / "plan.json").is_file() and any(site.edit or site.knockout for site in model.sites):
        raise ValueError(
            f"features_dir: {folder} holds features, and ablations, edits and knockouts have no name by which to tell "
            "whether they are the same; give a new folder"
        )
    files = [folder / f"{layer:03d}-{where}.npy" for layer, where in places]
    done = _opened(folder, _plan(model, needles, places, removed, columns))
    handles: list[int] = []
    saved = time.monotonic()
    try:
        for start, rows in _batches(model, needles, places, removed, columns, batch, done):
            if not handles:
                shape = (len(needles), rows.shape[2])
                begin = [_created(file, shape) if start == 0 else _data_of(file, shape) for file in files]
                handles += [os.open(file, os.O_WRONLY) for file in files]
            for handle, first, row in zip(handles, begin, rows, strict=True):
                _write(handle, row, first + start * row[0].nbytes)
            done = start + rows.shape[1]
            if done == len(needles) or time.monotonic() - saved >= SAVE_EVERY:
                for handle in handles:
                    os.fsync(handle)
                _save(folder / "progress.json", {"samples": done})
                saved = time.monotonic()
    finally:
        for handle in handles:
            os.close(handle)
    return Features(files)


def _columns(needles: Needles, position: Tensor | str) -> Tensor:
    """The column of each sample, [N]."""
    if isinstance(position, str):
        if position != "query":
            raise ValueError(f'position={position!r}: expected "query" or a column for each prompt, [{len(needles)}]')
        return needles.query_row
    columns = torch.as_tensor(position)
    if columns.shape != (len(needles),) or columns.is_floating_point():
        raise ValueError(
            f'position: {columns.dtype} of shape {tuple(columns.shape)}; expected "query" or a column for each '
            f"prompt, [{len(needles)}]"
        )
    mask, T = needles.attention_mask, needles.tokens.shape[1]
    if mask is not None and int(columns.min()) >= -T and int(columns.max()) < T:
        padding = ~mask.bool().gather(1, (columns % T)[:, None].long().to(mask.device))[:, 0]
        if bool(padding.any()):
            n = int(padding.int().argmax())
            raise ValueError(f"position: column {int(columns[n])} of prompt {n} is padding; expected a real token")
    return columns


def _batches(
    model: Any, needles: Needles, places: Sequence[tuple[int, Where]], removed: bool, columns: Tensor, batch: int,
    done: int,
) -> Iterator[tuple[int, np.ndarray]]:  # fmt: skip
    """The first sample and the features [places,b,D] of each batch from sample `done` on."""
    device = next(model.parameters()).device
    starts = range(done, len(needles), batch)
    for start in tqdm(starts, desc="features", disable=len(starts) < 20):
        part = needles[start : start + batch]
        tokens = part.removed if removed else part.tokens
        assert tokens is not None
        mask = None if part.attention_mask is None else part.attention_mask.to(device)
        with model.record(resid=columns[start : start + batch, None].to(device)) as rec:
            model.hidden(tokens.to(device), mask)
        rows = []
        for layer, where in places:
            value = rec.resid(layer, where)[:, 0].float().cpu()
            if not bool(value.isfinite().all()):
                raise ValueError(f"layer {layer} ({where}): activations are NaN or infinite")
            rows.append(value.numpy())
        yield start, np.stack(rows)


def _plan(
    model: Any, needles: Needles, places: Sequence[tuple[int, Where]], removed: bool, columns: Tensor
) -> dict[str, Any]:
    """What features depend on."""
    tokens = needles.removed if removed else needles.tokens
    switches = [(s.cap, s.sinks, len(s.knockout), s.edit is not None) for s in model.sites]
    return {
        "version": 3,
        "model": _hash(*(_fingerprint(p) for p in model.parameters()), str(switches), architecture(model)),
        "prompts": _hash(*(x for x in (tokens, columns, needles.attention_mask) if x is not None)),
        "samples": len(needles),
        "places": [[layer, where] for layer, where in places],
    }


def architecture(model: Any) -> str:
    """What a model is beside its weights: its sites and its config, since windows and rotary bases are in no weight."""
    config = getattr(model, "config", None)
    foreign = getattr(getattr(model, "model", None), "config", None)
    if foreign is not None:
        its = foreign.to_diff_dict()
        config = {name: its[name] for name in sorted(its) if name not in INCIDENTAL and not name.startswith("_")}
    return f"{[repr(site) for site in model.sites]} {config}"


def _fingerprint(weight: Tensor, n: int = 256) -> Tensor:
    """Some of a weight's bits as integers, and their sum: one changed value shows in it, on any device alike."""
    bits = weight.detach().flatten().view(BITS[weight.element_size()])
    sums = [part.sum(dtype=torch.int64) for part in bits.split(2**22)]  # a sum at once would copy it in 64 bits
    return torch.cat([bits[:: max(1, len(bits) // n)].long(), torch.stack(sums).sum()[None]])


def _hash(*parts: Tensor | str) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        data = part.encode() if isinstance(part, str) else np.ascontiguousarray(part.cpu().numpy()).data
        digest.update(f"{getattr(part, 'shape', '')}".encode())
        digest.update(data)
    return digest.hexdigest()


def _opened(folder: Path, plan: dict[str, Any]) -> int:
    """How many samples of this plan the folder holds; a new folder gets the plan."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "plan.json").is_file():
        if any(f for f in folder.iterdir() if not f.name.startswith(".")):
            raise ValueError(f"features_dir: {folder} holds something else; give a new folder")
        _save(folder / "plan.json", plan)
        return 0
    stored = read_json(folder / "plan.json")
    other = [name for name in plan if stored.get(name) != plan[name]]
    if other:
        raise ValueError(f"features_dir: {folder} holds features of another run ({', '.join(other)} differ)")
    progress = folder / "progress.json"
    return int(read_json(progress)["samples"]) if progress.is_file() else 0


def _save(file: Path, data: dict[str, Any]) -> None:
    with atomic_file(file) as temporary:
        write_json(temporary, data)


def _created(file: Path, shape: tuple[int, int]) -> int:
    """A new array file; where its numbers begin."""
    array = np.lib.format.open_memmap(file, "w+", np.float32, shape)
    return array.offset


def _data_of(file: Path, shape: tuple[int, int]) -> int:
    array = np.load(file, mmap_mode="r")
    if array.shape != shape:
        raise ValueError(f"features_dir: {file} has shape {array.shape}; expected {shape}")
    return array.offset


def _write(handle: int, rows: np.ndarray, offset: int) -> None:
    data = np.ascontiguousarray(rows).data.cast("B")
    while data:
        written = os.pwrite(handle, data, offset)
        data, offset = data[written:], offset + written
