"""Checkpoints of flash-linear-attention (fla): read into HybridLM and written back, without fla installed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..checkpoint import (
    CONFIG,
    WEIGHTS,
    Checkpoint,
    atomic_folder,
    check_finite,
    read_dtype,
    read_json,
    read_tokenizer,
    write_json,
)
from ..config import HybridConfig, parse_mixer
from ..model import HybridLM
from .fla_config import RWKV, read_config, write_config
from .keys import KEYS, to_foreign, to_ours


class Part(NamedTuple):
    """A module of ours, the prefix of its tensors in fla, and the entry of `keys.KEYS` that moves them (None: same
    names)."""

    ours: str
    theirs: str
    source: str | None


def parts(config: HybridConfig) -> Iterator[Part]:
    """Every module of a HybridLM that has parameters, in the order of the model."""
    yield Part("embed", "model.embeddings", None)
    if config.norm == "layer":
        yield Part("ln_embed", "model.layers.0.pre_norm", None)
    for number, layer in enumerate(config.layers):
        ours, theirs, mixer = f"blocks.{number}", f"model.layers.{number}", parse_mixer(layer)[0]
        mlp = "ffn" if mixer in RWKV else "mlp"
        yield Part(f"{ours}.ln1", f"{theirs}.attn_norm", None)
        yield Part(f"{ours}.attn", f"{theirs}.attn", None if mixer in ("full", "swa") else mixer)
        yield Part(f"{ours}.ln2", f"{theirs}.{mlp}_norm", None)
        yield Part(f"{ours}.mlp", f"{theirs}.{mlp}", f"{mixer}.mlp" if mixer in RWKV else None)
    yield Part("ln_final", "model.norm", None)
    if not config.tie_embeddings:
        yield Part("unembed", "lm_head", None)


def fill(model: HybridLM, names: Iterable[str], read: Callable[[str], Tensor], where: str) -> None:
    """Put fla's tensors into `model`, a module at a time; `read` gives the tensor of a name.

    Raises ValueError where a tensor is missing, of another shape, not finite, or has no place in the model.
    """
    names = set(names)
    layers = {int(name.split(".")[2]) for name in names if name.startswith("model.layers.")}
    if layers and max(layers) >= model.config.n_layers:
        raise ValueError(f"{where}: has layer {max(layers)}, but its config has {model.config.n_layers} layers")
    used = {"lm_head.weight"} if model.config.tie_embeddings else set()
    for part in parts(model.config):
        own = {name.removeprefix(part.theirs + "."): name for name in names if name.startswith(part.theirs + ".")}
        used.update(own.values())
        _fill_part(model, part, {key: read(name) for key, name in own.items() if not _dead(part, key)}, where)
    if "model.lower_bounds" in names:
        used.add("model.lower_bounds")
        if model.lower_bounds is not None:  # in the first layer they are not used
            _copy({"lower_bounds": model.lower_bounds}, {"lower_bounds": read("model.lower_bounds")}, where)
    elif model.lower_bounds is not None:
        raise ValueError(f"{where}: lacks tensor 'model.lower_bounds'; config and weights disagree")
    if left := sorted(names - used):
        raise ValueError(f"{where}: has an unknown tensor {left[0]!r}; config and weights disagree")
    check_finite(model.named_parameters(), where)


def _dead(part: Part, name: str) -> bool:
    """Tensors that fla keeps or kept and never reads: D of its gated delta rule, tables of RoPE."""
    return (part.source == "gdn" and name == "D") or name.startswith("rotary.")


def _fill_part(model: HybridLM, part: Part, foreign: dict[str, Tensor], where: str) -> None:
    module = model.get_submodule(part.ours)
    if part.source == "rwkv7" and "x_x" in foreign:  # its first version had the six shifts in one tensor
        foreign.update(zip((f"x_{mix}" for mix in "rwkvag"), foreign.pop("x_x"), strict=True))
    try:
        weights = foreign if part.source is None else to_ours(part.source, foreign, module)
    except ValueError as error:
        raise ValueError(f"{where}: {part.theirs}: {error}; {_disagree(model, part)}") from None
    here = module.state_dict(keep_vars=True)
    missing, extra = sorted(set(here) - set(weights)), sorted(set(weights) - set(here))
    if missing or extra:
        name, what = (missing[0], "lacks") if missing else (extra[0], "has an unknown")
        raise ValueError(f"{where}: {what} tensor '{part.theirs}.{name}'; {_disagree(model, part)}")
    _copy(here, weights, f"{where}: {part.theirs}")


def _disagree(model: HybridLM, part: Part) -> str:
    """What the config says of the layer that does not fit."""
    if not part.ours.startswith("blocks."):
        return "config and weights disagree"
    number = int(part.ours.split(".")[1])
    return f"config and weights disagree on layer {number}, by the config {model.config.layers[number]!r}"


@torch.no_grad()
def _copy(targets: Mapping[str, Tensor], weights: Mapping[str, Tensor], where: str) -> None:
    for name, target in targets.items():
        if target.shape != weights[name].shape:
            found, wanted = tuple(weights[name].shape), tuple(target.shape)
            raise ValueError(f"{where}: {name} has shape {found}; the config asks for {wanted}")
        target.copy_(weights[name])


def state_dict(model: HybridLM) -> dict[str, Tensor]:
    """The model's weights under fla's names, in fla's shapes."""
    found: dict[str, Tensor] = {}
    for part in parts(model.config):
        module = model.get_submodule(part.ours)
        moved = module.state_dict() if part.source is None else to_foreign(part.source, module, _like(part, module))
        found.update({f"{part.theirs}.{name}": x for name, x in moved.items()})
    if model.lower_bounds is not None:
        found["model.lower_bounds"] = model.lower_bounds.detach()
    return found


def _like(part: Part, module: nn.Module) -> dict[str, Tensor]:
    """Empty tensors with the names and shapes that fla gives a module of ours."""
    have, like = module.state_dict(), {}
    for theirs, ours, *_ in KEYS[part.source or ""]:
        if ours not in have:
            continue
        names, whole = [name.split("|")[0] for name in theirs.split()], have[ours]
        if ours == "conv.weight":
            sizes = [have[f"{name}_proj.weight"].shape[0] for name in "qkv"]
            shapes = [(size, 1, whole.shape[-1]) for size in sizes]
        elif len(names) > 1:  # token shifts of RWKV-7
            shapes = [(1, 1, whole.shape[-1])] * len(names)
        else:
            shapes = [tuple(whole.shape)]
        like.update({name: whole.new_empty(shape) for name, shape in zip(names, shapes, strict=True)})
    return like


# Folders


def load(folder: Path, *, dtype: Any = None, device: Any = None) -> HybridLM:
    """A HybridLM from a folder that fla's `save_pretrained` wrote; see `checkpoint.load`."""
    checkpoint = Checkpoint(folder, 0)
    content = read_json(folder / CONFIG)
    return build(content, checkpoint.names(), checkpoint.tensor, str(folder), folder, dtype=dtype, device=device)


def build(
    content: Mapping[str, Any], names: Iterable[str], read: Callable[[str], Tensor], where: str,
    tokenizer: Path | None = None, *, dtype: Any = None, device: Any = None,
) -> HybridLM:  # fmt: skip
    """A HybridLM from fla's config and tensors read by name; the tokenizer from a folder, where there is one."""
    names = set(names)
    if "tie_word_embeddings" not in content:
        content = {**content, "tie_word_embeddings": "lm_head.weight" not in names}
    model = HybridLM(read_config(content, where))
    if "model.embeddings.weight" not in names:
        raise ValueError(f"{where}: lacks tensor 'model.embeddings.weight'; config and weights disagree")
    stored = read("model.embeddings.weight").dtype
    fill(model.to(stored if dtype is None else read_dtype(dtype)), names, read, where)
    model.notes = {"fla": dict(content)}
    model.tokenizer = None if tokenizer is None else read_tokenizer(tokenizer)
    return model.to(device).eval() if device is not None else model.eval()


def save(model: HybridLM, folder: str | Path) -> None:
    """Write a checkpoint folder that fla (and `hs.load`) reads: config.json, model.safetensors and the tokenizer.

    Raises ValueError for a model that no family of fla has a form for, or a folder with something else in it.
    """
    from safetensors.torch import save_file

    if Path(folder).exists() and any(Path(folder).iterdir()):
        raise ValueError(f"{folder}: is not empty; choose another folder")
    content = write_config(model)
    weights = {name: x.detach().cpu().contiguous().clone() for name, x in state_dict(model).items()}
    with atomic_folder(folder) as temporary:
        write_json(temporary / CONFIG, content)
        save_file(weights, temporary / WEIGHTS, metadata={"format": "pt"})
        if model.tokenizer is not None:
            model.tokenizer.save_pretrained(temporary)
