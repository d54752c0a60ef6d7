"""Where the query and key projections of a checkpoint lie, per softmax site, read from its config.json alone.

Whoever compares weights over a ladder (Q/K drift) needs tensor names, head rows and what folds into the
attention score; no model is built and no weight is read here.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

from .checkpoint import CONFIG, OWN, read_json
from .config import KINDS, HybridConfig, parse_mixer

# transformers families laid out as Llama is: RMS norm with a plain weight before separate q_proj and k_proj,
# heads in consecutive rows, RoPE over whole heads on pairs (d, d + K/2). True: RMS norm with a weight [K] on
# every query and key head.
LLAMA_LIKE = {
    "granite": False,
    "llama": False,
    "mistral": False,
    "mixtral": False,
    "qwen2": False,
    "qwen3": True,
    "qwen3_moe": True,
    "smollm3": False,
}


@dataclasses.dataclass(frozen=True)
class QKProjection:
    """The query and key projections of one softmax site: names of tensors in the checkpoint, their layout.

    `q` [H K, D] and `k` [G K, D] hold head h in consecutive rows. `gain` [D]: weight of the norm whose output
    they read. `q_norm`, `k_norm` [K]: RMS norm weights on every head; `q_bias` [H K], `k_bias` [G K]: biases;
    None where there is none. `rotary`: how many leading dimensions of a head RoPE turns, in pairs
    (d, d + rotary/2); 0 without RoPE.
    """

    layer: int
    site: int
    kind: str
    heads: int
    kv_heads: int
    head_dim: int
    width: int
    rotary: int
    q: str
    k: str
    gain: str
    q_norm: str | None = None
    k_norm: str | None = None
    q_bias: str | None = None
    k_bias: str | None = None

    def kv_head(self, head: int) -> int:
        """The key/value head that query head `head` reads."""
        return head // (self.heads // self.kv_heads)

    def rows(self, first: int, last: int | None = None) -> slice:
        """Rows of `q` (of `k` for key/value heads) that hold heads first..last, `last` included."""
        last = first if last is None else last
        return slice(first * self.head_dim, (last + 1) * self.head_dim)


def qk_projections(folder: str | os.PathLike[str]) -> list[QKProjection]:
    """The softmax sites of a checkpoint folder, ours or transformers' of a Llama-like family, in layer order.

    Raises ValueError for a family whose layout is not known here, FileNotFoundError without a config.json.
    """
    file = Path(folder) / CONFIG
    if not file.is_file():
        raise FileNotFoundError(f"{file}: missing")
    config = read_json(file)
    if config.get("format") == OWN:
        return _own(HybridConfig.from_dict(config["model"]))
    family = config.get("model_type")
    if family not in LLAMA_LIKE:
        known = ", ".join(["hybridscope", *LLAMA_LIKE])
        raise ValueError(f"{file}: where q and k lie in model_type={family!r} is not known here; known: {known}")
    return _llama_like(str(family), config)


def _own(config: HybridConfig) -> list[QKProjection]:
    assert config.head_dim is not None
    found = []
    for slot in (slot for layer in range(config.n_layers) for slot in config.slots(layer)):
        mixer, _ = parse_mixer(slot.mixer)
        if KINDS[mixer] not in ("full", "window"):
            continue
        found.append(
            QKProjection(
                layer=slot.layer, site=slot.index, kind=KINDS[mixer], heads=slot.heads, kv_heads=slot.kv_heads,
                head_dim=config.head_dim, width=config.d_model,
                rotary=0 if mixer == "nope" else config.head_dim,
                q=f"{slot.name}.q_proj.weight", k=f"{slot.name}.k_proj.weight", gain=f"blocks.{slot.layer}.ln1.weight",
                q_norm=f"{slot.name}.q_norm.weight" if config.qk_norm else None,
                k_norm=f"{slot.name}.k_norm.weight" if config.qk_norm else None,
            )
        )  # fmt: skip
    return found


def _llama_like(family: str, raw: dict[str, Any]) -> list[QKProjection]:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config = CONFIG_MAPPING[family].from_dict(raw)  # fills in the family's defaults
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    window = "window" if getattr(config, "sliding_window", None) else "full"
    default_type = "sliding_attention" if window == "window" else "full_attention"
    types = getattr(config, "layer_types", None) or [default_type] * config.num_hidden_layers
    turned = getattr(config, "no_rope_layers", None) or [1] * config.num_hidden_layers  # 1 means with RoPE
    biased = family == "qwen2" or getattr(config, "attention_bias", False)
    found = []
    for layer, kind in enumerate(types):
        attn = f"model.layers.{layer}.self_attn"
        found.append(
            QKProjection(
                layer=layer, site=0, kind="window" if kind == "sliding_attention" else "full",
                heads=config.num_attention_heads, kv_heads=config.num_key_value_heads, head_dim=head_dim,
                width=config.hidden_size, rotary=head_dim if turned[layer] else 0,
                q=f"{attn}.q_proj.weight", k=f"{attn}.k_proj.weight",
                gain=f"model.layers.{layer}.input_layernorm.weight",
                q_norm=f"{attn}.q_norm.weight" if LLAMA_LIKE[family] else None,
                k_norm=f"{attn}.k_norm.weight" if LLAMA_LIKE[family] else None,
                q_bias=f"{attn}.q_proj.bias" if biased else None,
                k_bias=f"{attn}.k_proj.bias" if biased else None,
            )
        )  # fmt: skip
    return found
