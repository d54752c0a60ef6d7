"""Reading transformers checkpoints from folders, GGUF files and the hub, with errors that name what is
wrong."""

from __future__ import annotations

import contextlib
import re
import shutil
import sys
import tempfile
import warnings
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from ..checkpoint import CONFIG, read_dtype, read_json, write_json

LONGEST = 600  # characters of another library's sentence that are worth repeating
TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")


@contextlib.contextmanager
def without_fla() -> Iterator[None]:
    """Hide flash-linear-attention on a machine without CUDA: transformers binds its kernels when it first
    imports a model's code, and there they raise "0 active drivers"."""
    if torch.cuda.is_available():
        yield
        return
    missing = object()
    before: Any = sys.modules.get("fla", missing)
    sys.modules["fla"] = None  # type: ignore[assignment]  # import then fails, as if it were not installed
    try:
        yield
    finally:
        if before is missing:
            del sys.modules["fla"]
        else:
            sys.modules["fla"] = before


def read_config(content: Mapping[str, Any], where: str) -> Any:
    """A transformers config from the content of a config.json, its family's defaults filled in.

    ValueError for a family that this version of transformers does not know, or options that it does not take.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    family = str(content.get("model_type"))
    if family not in CONFIG_MAPPING:
        raise ValueError(f"{where}: model_type {family!r} is unknown to this version of transformers")
    with tempfile.TemporaryDirectory() as folder:  # infinities have a spelling of their own, which only this reads
        write_json(Path(folder) / CONFIG, content)
        try:
            return CONFIG_MAPPING[family].from_pretrained(folder)
        except Exception as error:  # whatever a broken config provokes in there
            raise ValueError(f"{where}: {_line(error)}") from error


def read(where: str, options: dict[str, Any], dtype: Any, device_map: Any) -> tuple[Any, Any]:
    """Model and tokenizer (None where there is none) from a folder, GGUF file or hub id; see
    `transformers.load`."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = Path(where).expanduser()
    local = folder.exists()
    if local:
        where, extra = _local(folder, bool(options.get("trust_remote_code")))
        options = {**options, **extra}
    elif folder.is_absolute() or where.startswith((".", "~")) or where.count("/") > 1:
        raise FileNotFoundError(f"{where}: no such folder")
    chosen: dict[str, Any] = {}
    if device_map is not None:  # what is offloaded to disk and not stored as it is used needs a place
        chosen = {"device_map": device_map, "offload_folder": tempfile.mkdtemp(prefix="hybridscope-offload-")}
    if dtype is not None and dtype != "auto":
        read_dtype(dtype)
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            where, **options, **chosen, dtype="auto" if dtype is None else dtype, output_loading_info=True,
            ignore_mismatched_sizes=True,  # so that they are listed, and refused below
        )  # fmt: skip
        model, info = loaded
        if chosen:
            weakref.finalize(model, shutil.rmtree, chosen["offload_folder"], ignore_errors=True)
    except ImportError as error:
        raise ImportError(f"{where}: {_line(error)}") from error
    except OSError as error:
        raise OSError(
            f"{where}: {'' if local else 'no such folder, and not to be had from the hub: '}{_line(error)}"
        ) from error
    except Exception as error:  # whatever a broken checkpoint provokes in there
        raise ValueError(f"{where}: {_line(error)}") from error
    _check_complete(where, model, info)
    tokenizer = None
    if not local or "gguf_file" in options or any((folder / name).is_file() for name in TOKENIZERS):
        try:
            tokenizer = AutoTokenizer.from_pretrained(where, **options)
        except (OSError, ValueError, KeyError) as error:
            if local:
                raise ValueError(f"{where}: its tokenizer cannot be read ({_line(error)})") from error
    return model.eval(), tokenizer


def _local(path: Path, remote_code: bool) -> tuple[str, dict[str, Any]]:
    """What to load from a folder (or GGUF file), after checking what can be checked without reading
    weights."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if path.is_file():
        if path.suffix != ".gguf":
            raise ValueError(f"{path}: expected a folder with config.json, or a .gguf file")
        return str(path.parent), {"gguf_file": path.name}
    config = path / CONFIG
    if not config.is_file():
        files = sorted(path.glob("*.gguf"))
        if len(files) > 1:
            raise ValueError(f"{path}: {len(files)} GGUF files; name one of them, such as {files[0]}")
        if files:
            return str(path), {"gguf_file": files[0].name}
        raise FileNotFoundError(f"{config}: missing")
    content = read_json(config)
    kind = content.get("model_type")
    if kind is None:
        raise ValueError(f"{config}: has no model_type, so it is not a transformers config")
    if "auto_map" in content and kind not in CONFIG_MAPPING and not remote_code:
        raise ValueError(
            f"{config}: model_type {kind!r} comes with its own code; pass trust_remote_code=True to run it"
        )
    if "auto_map" not in content and kind not in CONFIG_MAPPING:
        raise ValueError(f"{config}: model_type {kind!r} is unknown to this version of transformers")
    if "auto_map" not in content and kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise ValueError(f"{config}: model_type {kind!r} is not a causal language model")
    _check_files(path)
    return str(path), {}


def _check_files(folder: Path) -> None:
    """Every weight file is there and whole (headers only)."""
    from safetensors import SafetensorError, safe_open

    index = folder / "model.safetensors.index.json"
    if index.is_file():
        listed = read_json(index).get("weight_map")
        if not isinstance(listed, dict):
            raise ValueError(f"{index}: has no weight_map, a JSON object from tensor to file")
        files = [folder / name for name in sorted(set(listed.values()))]
    else:
        files = sorted(folder.glob("*.safetensors"))
    for file in files:
        if not file.is_file():
            raise FileNotFoundError(f"{file}: missing; {index.name} lists it")
        try:
            with safe_open(file, "pt"):
                pass
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{file}: truncated or not a safetensors file ({_line(error)})") from None
    if not files and not list(folder.glob("*.bin")):
        raise FileNotFoundError(f"{folder / 'model.safetensors'}: missing")


def _check_complete(where: str, model: Any, info: dict[str, Any]) -> None:
    """ValueError where weights were missing or of another shape, or hold layers that the config does not
    have."""
    missing, unexpected = sorted(info["missing_keys"]), sorted(info["unexpected_keys"])
    if missing:
        raise ValueError(f"{where}: lacks tensor {missing[0]!r} ({len(missing)} missing); config and weights disagree")
    for mismatch in info["mismatched_keys"]:
        raise ValueError(
            f"{where}: {mismatch[0]} has shape {tuple(mismatch[1])}; the config asks for {tuple(mismatch[2])}"
        )
    depth = getattr(model.config.get_text_config(decoder=True), "num_hidden_layers", None)
    for name in unexpected:
        layer = re.search(r"\.(?:layers|h|blocks)\.(\d+)\.", name)
        if layer and depth is not None and int(layer[1]) >= depth:
            raise ValueError(f"{where}: has {name!r}, but its config has {depth} layers")
    if unexpected:
        warnings.warn(f"{where}: {len(unexpected)} tensors unused, such as {unexpected[0]!r}", stacklevel=2)


def _line(error: BaseException) -> str:
    """The first sentence of an error."""
    first, *more = [line.strip() for line in (str(error).strip() or type(error).__name__).splitlines()]
    said = f"{first} {more[0]}" if more and first.endswith(":") else first
    return said if len(said) <= LONGEST else f"{said[: LONGEST // 2]} ... {said[-LONGEST // 2 :]}"
