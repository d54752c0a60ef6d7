"""Checkpoints: load(), the folder format of our own models, atomic writes, and reading single tensors.

A checkpoint is a folder: config.json, model.safetensors and, where there is one, tokenizer.json. It is written under
a temporary name and renamed, so what carries the final name is whole.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from .instrumented import Instrumented
    from .model import HybridLM
    from .tensor_rows import Header

CONFIG, WEIGHTS, TOKENIZER = "config.json", "model.safetensors", "tokenizer.json"
OPTIONS = ("revision", "dtype", "device", "device_map", "trust_remote_code", "context", "config")  # of any reader
OWN = "hybridscope"  # the "format" entry by which config.json says it is ours


def load(source: Any, **options: Any) -> Instrumented:
    """An instrumented model, ready to measure, whatever `source` is.

    `source`: a hybridscope checkpoint folder; a transformers or fla checkpoint folder or hub id; a step of a flame run
    (a DCP folder); a transformers or fla model object; a HybridLM (returned as it is); a Checkpoint of a ladder; or
    "smollm2", the packaged real model. Options go to the source's adapter (`revision` for hub ids; `dtype`,
    `device_map`, `trust_remote_code` for transformers; `dtype`, `device` for our own and fla's; `config` too for DCP).
    `dtype` defaults to what is stored. Weights of fla are copied into a HybridLM.

    Raises FileNotFoundError where there is no checkpoint, OSError where the hub does not give it, ValueError for an
    unknown option or revision, a truncated file, weights that do not fit the config, or NaN weights, each naming the
    thing.
    """
    from .instrumented import Instrumented

    if isinstance(source, Instrumented):
        _no_options(options, "an instrumented model", ())
        return source
    if isinstance(source, Checkpoint):
        return source.load(**options)
    if not isinstance(source, str | os.PathLike):
        return _load_object(source, options)
    if str(source) == "smollm2":
        from .adapters import smollm2

        return smollm2.load(**options)
    folder = Path(source).expanduser()
    revision = options.pop("revision", None)
    if folder.exists():
        if revision is not None:
            raise ValueError(f"revision={revision!r}: {folder} is a local folder, which has no revisions")
    elif not may_be_hub_id(source):
        raise FileNotFoundError(f"{folder}: no such checkpoint")
    else:
        from .adapters import hub

        _only(options, "a hub id", OPTIONS)  # before anything is fetched
        folder = hub.snapshot(str(source), revision)
    return load_folder(folder, options)


def may_be_hub_id(source: str | os.PathLike[str]) -> bool:
    """Whether something that is no folder here may be a name on the hub: no Path object, not written as a path."""
    return isinstance(source, str) and not source.startswith((".", "~", "/", "runs/")) and source.count("/") <= 1


def load_folder(folder: Path, options: dict[str, Any]) -> Instrumented:
    """`load` for a folder (or GGUF file) on this machine, by what its config.json says."""
    content = read_json(folder / CONFIG) if (folder / CONFIG).is_file() else {}
    if content.get("format") == OWN:
        return _load_own(folder, **options)
    if (folder / ".metadata").is_file():
        from .adapters import flame

        return flame.load(folder, **options)
    from .adapters.fla_config import is_fla

    if is_fla(content):
        from .adapters import fla

        return fla.load(folder, **_only(options, "a checkpoint of fla", ("dtype", "device")))
    if not content and (steps := sorted(folder.glob("step-*"))):
        raise ValueError(f"{folder} is a ladder; open it with hs.ladder, or one of its steps, e.g. {steps[-1]}")
    from .adapters import transformers

    return transformers.load(folder, **options)


def _load_object(model: Any, options: dict[str, Any]) -> Instrumented:
    """A model object of transformers; one of fla is copied."""
    from torch import nn

    if not isinstance(model, nn.Module):
        raise ValueError(f"load: {model!r:.80} is a {type(model).__name__}; expected a folder, a hub id or a model")
    from .adapters import transformers
    from .adapters.fla_config import is_fla

    config: Any = getattr(model, "config", None)
    content = config.to_dict() if hasattr(config, "to_dict") else {}
    if is_fla(content):
        from .adapters import fla

        weights = model.state_dict()
        chosen = _only(options, "a model of fla", ("dtype", "device"))
        return fla.build(content, weights, weights.__getitem__, type(model).__name__, **chosen)
    return transformers.load(model, **options)


def _is_own(folder: Path) -> bool:
    config = folder / CONFIG
    if not config.is_file():
        return False
    return read_json(config).get("format") == OWN


def _load_own(folder: Path, *, dtype: Any = None, device: Any = None, **unknown: Any) -> HybridLM:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    from .config import HybridConfig
    from .model import HybridLM

    _no_options(unknown, "a hybridscope checkpoint", ("dtype", "device"))
    notes = read_json(folder / CONFIG)
    content = notes.pop("model", None)
    if not isinstance(content, dict):
        raise ValueError(f"{folder / CONFIG}: has no model section")
    try:
        model = HybridLM(HybridConfig.from_dict(content))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{folder / CONFIG}: {error}") from None
    file = folder / WEIGHTS
    if not file.is_file():
        raise FileNotFoundError(f"{file}: missing")
    try:
        weights = load_file(file)
    except SafetensorError as error:
        raise ValueError(f"{file}: truncated or not a safetensors file ({error})") from None
    check_weights(weights, model.state_dict(), str(file))
    model.notes = {name: note for name, note in notes.items() if name != "format"}
    model.to(weights["embed.weight"].dtype).load_state_dict(weights)
    if (folder / TOKENIZER).is_file():
        from transformers import PreTrainedTokenizerFast

        model.tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / TOKENIZER))
    if dtype is not None:
        model = model.to(read_dtype(dtype))
    return model.to(device).eval() if device is not None else model.eval()


def read_dtype(dtype: Any) -> Any:
    """A torch dtype from itself or its name; ValueError for anything else."""
    import torch

    wanted = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(wanted, torch.dtype):
        raise ValueError(f"dtype={dtype!r}: expected a torch dtype or its name, e.g. bfloat16")
    return wanted


def read_tokenizer(folder: Path) -> Any:
    """The tokenizer that lies in a foreign checkpoint's folder as tokenizer.json, with its special tokens; or None."""
    if not (folder / TOKENIZER).is_file():
        return None
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(folder)


def check_weights(weights: Mapping[str, Tensor], expected: Mapping[str, Tensor], where: str) -> None:
    """ValueError where names or shapes differ from the model's, or a weight is not finite; names the first."""
    missing, extra = sorted(set(expected) - set(weights)), sorted(set(weights) - set(expected))
    if missing or extra:
        name, what = (missing[0], "lacks") if missing else (extra[0], "has an unknown")
        raise ValueError(f"{where}: {what} tensor {name!r}; config and weights do not belong together")
    for name, tensor in weights.items():
        if tensor.shape != expected[name].shape:
            raise ValueError(
                f"{where}: {name} has shape {tuple(tensor.shape)}; the config asks for {tuple(expected[name].shape)}"
            )
    check_finite(weights.items(), where)


def check_finite(tensors: Iterable[tuple[str, Tensor]], where: str) -> None:
    """ValueError naming the first tensor that holds a NaN or an infinity."""
    for name, tensor in tensors:
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise ValueError(f"{where}: {name} holds NaN or infinite values")


def save(
    model: HybridLM,
    folder: str | Path,
    extra: Mapping[str, Any] | None = None,
    state: Mapping[str, Tensor] | None = None,
) -> None:
    """Write a checkpoint folder atomically, replacing an older one of the same name.

    `extra` goes into config.json beside the model's config and what was noted there when it was loaded; `state` is
    the model's whole state dict, where the model itself holds only a share of it. ValueError for NaN weights, or a
    folder that holds something else: it is not overwritten.
    """
    from safetensors.torch import save_file

    if Path(folder).exists() and not _is_own(Path(folder)) and any(Path(folder).iterdir()):
        raise ValueError(f"{folder}: holds something else than a hybridscope checkpoint; choose another folder")
    state = model.state_dict() if state is None else state
    check_finite(state.items(), f"save to {folder}")
    with atomic_folder(folder) as temporary:
        write_json(temporary / CONFIG, {"format": OWN, "model": model.config.to_dict(), **model.notes, **(extra or {})})
        weights = {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}
        if model.config.tie_embeddings:
            weights["unembed.weight"] = weights["unembed.weight"].clone()
        save_file(weights, temporary / WEIGHTS)
        if model.tokenizer is not None:
            model.tokenizer.backend_tokenizer.save(str(temporary / TOKENIZER))


@contextlib.contextmanager
def atomic_folder(folder: str | Path) -> Iterator[Path]:
    """A temporary folder beside `folder` that takes its name when the block ends well, and vanishes otherwise."""
    final = Path(folder)
    final.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{final.name}.", dir=final.parent))
    temporary.chmod(0o755)
    old = temporary.with_name(temporary.name + ".old")
    try:
        yield temporary
        for file in temporary.iterdir():
            _sync(file)
        if final.exists():
            final.rename(old)
        temporary.rename(final)
    except BaseException:
        if old.exists():
            old.rename(final)
        raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


@contextlib.contextmanager
def atomic_file(path: str | Path) -> Iterator[Path]:
    """The same for one file."""
    final = Path(path)
    final.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{final.name}.", suffix=final.suffix, dir=final.parent)
    os.close(handle)
    temporary = Path(name)
    temporary.chmod(0o644)
    try:
        yield temporary
        _sync(temporary)
        temporary.replace(final)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _sync(file: Path) -> None:
    with open(file, "rb") as f:
        os.fsync(f.fileno())


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; ValueError names the file where it is not one."""
    try:
        data = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path}: not valid JSON ({error})") from None
    if not isinstance(data, dict):
        raise ValueError(f"{path}: expected a JSON object")
    return data


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Write a JSON object, readable by people."""
    path.write_text(json.dumps(data, indent=1) + "\n")


def _only(options: dict[str, Any], what: str, known: tuple[str, ...]) -> dict[str, Any]:
    """`options`; ValueError for one that is not known."""
    _no_options({name: value for name, value in options.items() if name not in known}, what, known)
    return options


def _no_options(options: Mapping[str, Any], what: str, known: tuple[str, ...]) -> None:
    if options:
        takes = f"it takes: {', '.join(known)}" if known else "it takes none"
        raise ValueError(f"load: unknown option {next(iter(options))!r} for {what}; {takes}")


class Checkpoint:
    """One saved step of a ladder: `path`, `step`, `tokens` trained on where it says so, and its weights, read as
    little as needed."""

    def __init__(self, path: str | Path, step: int, tokens: int | None = None) -> None:
        self._path = Path(path)
        self.step = step
        self.tokens = tokens
        self._names: dict[str, Path] | None = None
        self._headers: dict[Path, Header] = {}

    def __repr__(self) -> str:
        return f"Checkpoint(step={self.step}, path={str(self.path)!r})"

    @property
    def path(self) -> Path:
        """Its folder."""
        return self._path

    def config(self) -> dict[str, Any]:
        """The content of its config.json; FileNotFoundError where there is none."""
        if not (self.path / CONFIG).is_file():
            raise FileNotFoundError(f"{self.path}: no config.json")
        return read_json(self.path / CONFIG)

    def load(self, **options: Any) -> Instrumented:
        """The instrumented model; see `load`."""
        return load(self.path, **options)

    def files(self) -> list[Path]:
        """The safetensors files; FileNotFoundError where there are none, or one that the index lists is not there."""
        index = self.path / (WEIGHTS + ".index.json")
        if index.is_file():
            files = [self.path / name for name in sorted(set((read_json(index).get("weight_map") or {}).values()))]
            for file in files:
                if not file.is_file():
                    raise FileNotFoundError(f"{file}: missing; {index.name} lists it")
            return files
        files = sorted(self.path.glob("*.safetensors"))
        if not files:
            raise FileNotFoundError(f"{self.path}: no safetensors file")
        return files

    def names(self) -> dict[str, Path]:
        """Tensor name to the file that holds it; ValueError where a file is truncated."""
        from safetensors import SafetensorError, safe_open

        if self._names is not None:
            return self._names
        names: dict[str, Path] = {}
        for file in self.files():
            try:
                with safe_open(file, framework="pt") as f:
                    names.update(dict.fromkeys(f.keys(), file))
            except SafetensorError as error:
                raise ValueError(f"{file}: truncated or not a safetensors file ({error})") from None
        self._names = names
        return names

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Tensor name to shape, from the files' headers."""
        from safetensors import safe_open

        shapes: dict[str, tuple[int, ...]] = {}
        names = self.names()
        for file in set(names.values()):
            with safe_open(file, framework="pt") as f:
                shapes.update({name: tuple(f.get_slice(name).get_shape()) for name in f.keys()})  # noqa: SIM118
        return {name: shapes[name] for name in names}

    def tensor(self, name: str, rows: slice = slice(None)) -> Tensor:
        """One tensor, or only some of its leading rows, without reading the rest."""
        from .tensor_rows import Header

        file = self.names().get(name)
        if file is None:
            raise ValueError(f"{self.path}: no tensor {name!r}")
        if file not in self._headers:
            self._headers[file] = Header(file)
        return self._headers[file].read(name, rows)

    def weight_hash(self, sample: bool = False) -> str:
        """SHA-256 of the weight files; `sample=True` reads only 64 stretches of 4 KiB of each (and the length)."""
        digest = hashlib.sha256()
        for file in self.files():
            size = file.stat().st_size
            with open(file, "rb") as f:
                if sample and size > 2**19:
                    digest.update(size.to_bytes(8, "little"))
                    for n in range(64):
                        f.seek(n * (size - 4096) // 63)
                        digest.update(f.read(4096))
                else:
                    while block := f.read(2**20):
                        digest.update(block)
        return digest.hexdigest()
