"""Steps of a flame or torchtitan run: folders of torch.distributed.checkpoint (DCP), read without converting them.

A step folder holds `.metadata` and `*.distcp`: a model of fla or transformers under its own tensor names. The model's
config.json is not part of it: it is looked for in the folder, beside it and above. `.metadata` is a pickle: open only
what you would also run.
"""

from __future__ import annotations

import hashlib
import pickle
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..checkpoint import CONFIG, Checkpoint, check_finite, read_dtype, read_json, read_tokenizer
from ..instrumented import Instrumented
from . import fla, fla_config

WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")  # of torch.compile and activation checkpointing
TOP = ("model.", "lm_head.")  # where the tensors of a causal language model begin


class DcpCheckpoint(Checkpoint):
    """A step of a flame run. Tensors are read one at a time, whole, and optimiser states not at all."""

    def __init__(self, path: str | Path, step: int, config: str | Path | Mapping[str, Any] | None = None) -> None:
        super().__init__(path, step)
        self._config = config
        self._keys: dict[str, str] | None = None  # the model's name of a tensor -> its name in the folder
        self._metadata: Any = None

    def _config_file(self) -> Path:
        """The model's config.json."""
        if isinstance(self._config, str | Path):
            return Path(self._config)
        places = [self.path, self.path.parent, self.path.parent.parent]
        file = next((place / CONFIG for place in places if (place / CONFIG).is_file()), None)
        if file is None:
            raise FileNotFoundError(f"{self.path}: no config.json in it or up to two folders above; give config=")
        return file

    def config(self) -> dict[str, Any]:
        """The content of the model's config.json; FileNotFoundError where there is none."""
        if isinstance(self._config, Mapping):
            return dict(self._config)
        file = self._config_file()
        if not file.is_file():
            raise FileNotFoundError(f"{file}: missing")
        return read_json(file)

    def files(self) -> list[Path]:
        """The .distcp files that the metadata name."""
        return sorted({self.path / info.relative_path for info in self._read_metadata().storage_data.values()})

    def names(self) -> dict[str, Path]:
        """The model's tensors and the folder; ValueError for a broken folder, FileNotFoundError for a missing file."""
        self._tensors()
        return dict.fromkeys(self._tensors(), self.path)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every tensor of the model, from the metadata alone."""
        about = self._read_metadata().state_dict_metadata
        return {name: tuple(about[key].size) for name, key in self._tensors().items()}

    def tensor(self, name: str, rows: slice = slice(None)) -> Tensor:
        """One tensor, whatever number of ranks it was saved from, or some of its leading rows."""
        from torch.distributed.checkpoint.filesystem import FileSystemReader
        from torch.distributed.checkpoint.state_dict_loader import load as load_into

        key = self._tensors().get(name)
        if key is None:
            raise ValueError(f"{self.path}: no tensor {name!r}")
        about = self._read_metadata().state_dict_metadata[key]
        into = {key: torch.empty(about.size, dtype=about.properties.dtype)}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # and a single process is meant
            load_into(into, storage_reader=FileSystemReader(self.path), no_dist=True)
        return into[key][rows]

    def weight_hash(self, sample: bool = False) -> str:
        """SHA-256 of the model's tensors; `sample=True`: of four of them."""
        digest, names = hashlib.sha256(), sorted(self._tensors())
        for name in names[:: max(1, len(names) // 4)] if sample else names:
            digest.update(name.encode())
            digest.update(self.tensor(name).reshape(-1).view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    def load(self, **options: Any) -> Instrumented:
        """The instrumented model: a HybridLM for a family of fla, else transformers' own; `dtype`, `device`."""
        unknown = sorted(set(options) - {"dtype", "device"})
        if unknown:
            raise ValueError(f"load: unknown option {unknown[0]!r} for a DCP folder; it takes: config, dtype, device")
        content, names = self.config(), self._tensors()
        place = self.path if isinstance(self._config, Mapping) else self._config_file().parent
        if fla_config.is_fla(content):
            return fla.build(content, names, self.tensor, str(self.path), place, **options)
        return self._transformers(content, place, **options)

    def _transformers(
        self, content: dict[str, Any], place: Path, dtype: Any = None, device: Any = None
    ) -> Instrumented:
        from transformers import AutoModelForCausalLM

        from . import transformers
        from .pretrained import read_config, without_fla

        config = read_config(content, str(self.path))
        with without_fla():
            model = AutoModelForCausalLM.from_config(config)
        names, state = self._tensors(), model.state_dict()
        tied = set(getattr(model, "all_tied_weights_keys", None) or {})
        missing, extra = sorted(set(state) - set(names) - tied), sorted(set(names) - set(state))
        if missing or extra:
            name, what = (missing[0], "lacks") if missing else (extra[0], "has an unknown")
            raise ValueError(f"{self.path}: {what} tensor {name!r}; config and weights disagree")
        stored = next(iter(self._read_metadata().state_dict_metadata[key] for key in names.values()))
        model.to(stored.properties.dtype if dtype is None else read_dtype(dtype))
        for name, target in model.state_dict().items():
            if name in names:
                found = self.tensor(name)
                if found.shape != target.shape:
                    raise ValueError(
                        f"{self.path}: {name} has shape {tuple(found.shape)}; the config asks for {tuple(target.shape)}"
                    )
                target.copy_(found)
        check_finite(model.named_parameters(), str(self.path))
        wrapped = transformers.load(model.eval() if device is None else model.to(device).eval())
        wrapped.tokenizer = read_tokenizer(place)
        return wrapped

    def _read_metadata(self) -> Any:
        if self._metadata is None:
            from torch.distributed.checkpoint.filesystem import FileSystemReader

            try:
                self._metadata = FileSystemReader(self.path).read_metadata()
            except (pickle.UnpicklingError, EOFError, AttributeError, ValueError) as error:
                raise ValueError(f"{self.path / '.metadata'}: truncated or not DCP metadata ({error})") from None
        return self._metadata

    def _tensors(self) -> dict[str, str]:
        """The model's tensor names -> names in the folder, after checking that their bytes are there."""
        if self._keys is not None:
            return self._keys
        metadata = self._read_metadata()
        tensors = [key for key, about in metadata.state_dict_metadata.items() if hasattr(about, "properties")]
        inside = "model." if any(key.startswith(("model.model.", "model.lm_head.")) for key in tensors) else ""
        keys: dict[str, str] = {}
        for key in tensors:
            name = key.removeprefix(inside)
            for wrapper in WRAPPERS:
                name = name.replace(wrapper, "")
            if key.startswith(inside) and name.startswith(TOP):
                keys[name] = key
        if not keys:
            some = ", ".join(tensors[:3])
            raise ValueError(
                f"{self.path}: no tensor of a causal language model of fla or transformers in it, but {some}"
            )
        chosen = set(keys.values())
        for index, info in metadata.storage_data.items():
            if index.fqn in chosen:
                file = self.path / info.relative_path
                if not file.is_file():
                    raise FileNotFoundError(f"{file}: missing; .metadata lists it")
                if file.stat().st_size < info.offset + info.length:
                    raise ValueError(f"{file}: truncated")
        self._keys = keys
        return keys


def load(folder: Path, *, config: str | Path | Mapping[str, Any] | None = None, **options: Any) -> Instrumented:
    """The model in one DCP folder; see `checkpoint.load`."""
    return DcpCheckpoint(folder, 0, config).load(**options)
