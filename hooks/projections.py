"""Where the query and key maps of a checkpoint lie, per softmax site, read read off its config and its files' headers.

Whoever compares weights over a ladder (Q/K drift) needs tensor names, head rows and what folds into the attention
score; no model is built and no weight is read here. For transformers checkpoints names and shapes say most of it: which
rows are a head's, gates inside q_proj, norms on heads or on all of them, low-rank (MLA) maps. What they cannot say, a
line in FAMILIES does. Of a family without one the maps are found, but not what folds into the score (`form`).
"""

from __future__ import annotations

import dataclasses
import os
import re
from typing import Any

from .adapters.fla_config import is_fla, read_config
from .checkpoint import OWN, Checkpoint
from .config import KINDS, HybridConfig, parse_mixer


@dataclasses.dataclass(frozen=True)
class Rules:
    """What names and shapes do not say of a family: which of its layers turn q and k (`rope`: all, none, window, listed
    in no_rope_layers, or as the config's position_embedding_type says), how rotary dimensions pair up (`halves`,
    `neighbours`, `spread` over the whole head), whether norm weights are stored as w of 1 + w (`unit`) and norms take
    the mean off (`centred`), whether q and k are normed without a weight (`normed`), and whether the score is a form in
    the weights at all (not with norms behind RoPE, or convolutions)."""

    rope: str = "all"
    pairs: str = "halves"
    unit: bool = False
    centred: bool = False
    normed: bool = False
    form: bool = True


PLAIN, UNIT, NOPE = Rules(), Rules(unit=True), Rules(rope="none")
FAMILIES: dict[str, Rules] = {
    **dict.fromkeys(["llama", "qwen2", "qwen3", "qwen3_moe", "mixtral", "mistral", "ministral", "ministral3"], PLAIN),
    **dict.fromkeys(["granite", "granite_swa", "gpt_oss", "minimax", "falcon_h1", "bamba", "lfm2", "olmo3"], PLAIN),
    **dict.fromkeys(["olmo_hybrid", "mimo_v2_flash", "minicpm3", "phi3"], PLAIN),
    **dict.fromkeys(["gemma2", "gemma3_text", "recurrent_gemma"], UNIT),
    **dict.fromkeys(["qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"], UNIT),
    **dict.fromkeys(["jamba", "nemotron_h", "kimi_linear"], NOPE),
    "zamba2": Rules(rope="config"),
    "granitemoehybrid": Rules(rope="config"),
    "smollm3": Rules(rope="listed"),
    "exaone4": Rules(rope="window"),
    "lara_mini": Rules(rope="window"),
    "cohere2": Rules(rope="window", pairs="neighbours", centred=True),
    "llama4_text": Rules(rope="listed", pairs="neighbours", normed=True),
    "gpt_neox": Rules(centred=True),
    "bailing_hybrid": Rules(pairs="neighbours"),
    "gemma4_text": Rules(pairs="spread"),
    "hunyuan_v1_dense": Rules(form=False),
    "zaya": Rules(form=False),
}
QUERIES = ("q_proj", "q_b_proj", "qkv_proj", "query_key_value")  # module names, any of which gives attention away
INPUT_NORMS = ("input_layernorm", "temporal_pre_norm", "operator_norm", "norm")
STATES = (
    "A_log",
    "slope_rate",
    "conv1d",
    "dt_bias",
    "q_conv1d",
)  # of mixers that have q_proj and k_proj and no softmax


@dataclasses.dataclass(frozen=True)
class Latent:
    """The first factor of a low-rank map: rows 0..rank-1 of `name` [>= rank, D], and the weight of the norm between."""

    name: str
    rank: int
    norm: str


@dataclasses.dataclass(frozen=True)
class QKProjection:
    """The query and key maps of one softmax site: names of tensors in the checkpoint, their layout.

    Head h of `q` is `head_dim` rows from `q_start` + h `q_stride` on, of `k` likewise (stride 0: `head_dim`); both may
    be one tensor. `gain`, `gain_bias` [D]: weight and bias of the norm whose output they read. `q_norm`, `k_norm` [K],
    or [heads K] where the norm is `over_all` heads; `normed` also for norms without a weight. `q_bias`, `k_bias`:
    biases. None where there is none. `unit`: norm weights are 1 + what is stored; `centred`: the input norm takes the
    mean off.

    `rotary`: how many dimensions of a head RoPE turns, pairs (first + i step, ... + apart); 0 without RoPE.

    MLA: `q` and `k` read latents (`q_latent`, `k_latent`), heads of `k` have `head_dim - k_shared_rows` rows of their
    own and end in rows that all heads share, from row `k_shared_start` of `k_latent.name`. The map of a head is then
    the product, norm weight included: `effective`. `form` False: no score form is known.
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
    gain: str | None
    gain_bias: str | None = None
    q_norm: str | None = None
    k_norm: str | None = None
    q_bias: str | None = None
    k_bias: str | None = None
    q_start: int = 0
    k_start: int = 0
    q_stride: int = 0
    k_stride: int = 0
    over_all: bool = False
    normed: bool = False
    unit: bool = False
    centred: bool = False
    first: int = 0
    step: int = 1
    apart: int | None = None
    q_latent: Latent | None = None
    k_latent: Latent | None = None
    k_shared_rows: int = 0
    k_shared_start: int = 0
    form: bool = True

    @property
    def effective(self) -> bool:
        """Whether the maps are products of stored tensors."""
        return self.q_latent is not None or self.k_latent is not None

    def kv_head(self, head: int) -> int:
        """The key/value head that query head `head` reads."""
        return head // (self.heads // self.kv_heads)

    def pairs(self) -> tuple[list[int], list[int]]:
        """The dimensions that RoPE turns, and their partners."""
        half = self.rotary // 2
        a = [self.first + i * self.step for i in range(half)]
        apart = half if self.apart is None else self.apart
        return a, [d + apart for d in a]


def qk_projections(folder: str | os.PathLike[str] | Checkpoint) -> list[QKProjection]:
    """The softmax sites of a checkpoint or its folder, ours, fla's or transformers', in layer order.

    Raises ValueError where no q and k are found, FileNotFoundError without a config.json or weights.
    """
    checkpoint = folder if isinstance(folder, Checkpoint) else Checkpoint(os.fspath(folder), 0)
    config = checkpoint.config()
    if config.get("format") == OWN:
        return _own(HybridConfig.from_dict(config["model"]))
    if is_fla(config):
        return _fla(config, repr(checkpoint))
    return _foreign(checkpoint, config)


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
                k_norm=f"{slot.name}.k_norm.weight" if config.qk_norm else None, normed=config.qk_norm,
            )
        )  # fmt: skip
    return found


def _fla(config: dict[str, Any], where: str) -> list[QKProjection]:
    """fla's attention has our layout under other names."""

    def renamed(site: QKProjection) -> QKProjection:
        layer = f"model.layers.{site.layer}."
        names = {n: v.replace(f"blocks.{site.layer}.", layer) for n, v in vars(site).items() if isinstance(v, str)}
        return dataclasses.replace(site, **{**names, "kind": site.kind, "gain": f"{layer}attn_norm.weight"})

    return [renamed(site) for site in _own(read_config(config, where))]


# transformers


def _foreign(checkpoint: Checkpoint, raw: dict[str, Any]) -> list[QKProjection]:
    from .adapters.pretrained import read_config as read_foreign_config

    config = read_foreign_config(raw, repr(checkpoint))
    config = config.get_text_config(decoder=True)
    rules = FAMILIES.get(config.model_type, Rules(form=False))
    shapes = checkpoint.shapes()
    found = []
    for name in shapes:
        place = re.match(rf"(.*\blayers\.(\d+)\..*?)({'|'.join(QUERIES)})\.weight$", name)
        if place and not re.search("vision|visual|audio|mtp", name):
            site = _module(config, rules, int(place[2]), place[1], shapes)
            found += [] if site is None else [site]
    if not found:
        raise ValueError(f"{checkpoint}: finds no query and key projections of model_type={config.model_type!r}")
    return sorted(found, key=lambda site: site.layer)


def _module(
    config: Any, rules: Rules, layer: int, prefix: str, shapes: dict[str, tuple[int, ...]]
) -> QKProjection | None:
    """The attention module whose tensors start with `prefix`; None where it is a recurrent mixer, or has no keys of its
    own."""

    def at(*names: str, base: str = prefix) -> str | None:
        return next((base + name for name in names if base + name in shapes), None)

    if any(name.startswith(prefix + state) for state in STATES for name in shapes):
        return None
    each_layer = getattr(config, "per_layer_config", None)
    config = each_layer[layer] if each_layer else config
    kind = _kind(config, layer)
    heads, kv_heads, head_dim = _heads(config, kind)
    q_norm, k_norm = at(*_norms("q", "query")), at(*_norms("k", "key"))
    above = prefix.removesuffix(".").rpartition(".")[0] + "."
    above = above if at(*_weights(INPUT_NORMS), base=above) else above.removesuffix(".").rpartition(".")[0] + "."
    known: dict[str, Any] = {
        "layer": layer, "site": 0, "kind": kind, "q_norm": q_norm, "k_norm": k_norm, "unit": rules.unit,
        "gain": at(*_weights(INPUT_NORMS), base=above), "centred": rules.centred, "form": rules.form,
        "gain_bias": at(*[f"{norm}.bias" for norm in INPUT_NORMS], base=above),
    }  # fmt: skip
    if (fused := at("qkv_proj.weight", "query_key_value.weight")) is not None:
        each = fused.endswith("query_key_value.weight")  # [q k v] head by head, or all q, all k, all v
        known |= {"q": fused, "k": fused, "k_start": head_dim if each else heads * head_dim}
        known |= {"q_stride": 3 * head_dim, "k_stride": 3 * head_dim} if each else {}
        known["q_bias"] = known["k_bias"] = at(fused.removeprefix(prefix).replace("weight", "bias"))
    elif (up := at("kv_b_proj.weight")) is not None:
        head_dim = config.qk_nope_head_dim + config.qk_rope_head_dim
        q, down, norm = at("q_proj.weight", "q_b_proj.weight"), at("q_a_proj.weight"), at("q_a_layernorm.weight")
        latent = at("kv_a_proj_with_mqa.weight", "kv_a_proj.weight")
        assert latent is not None
        rank = config.kv_lora_rank
        known |= {
            "q": q, "k": up, "k_stride": shapes[up][0] // heads, "k_shared_rows": config.qk_rope_head_dim,
            "k_shared_start": rank, "k_latent": Latent(latent, rank, prefix + "kv_a_layernorm.weight"),
            "q_latent": Latent(down, shapes[down][0], norm) if down and norm else None,
        }  # fmt: skip
        kv_heads = heads
    else:
        q, k = at("q_proj.weight"), at("k_proj.weight")
        if q is None or k is None:
            return None
        if q_norm is not None and shapes[q_norm][0] < shapes[q][0]:
            head_dim = shapes[q_norm][0]  # heads of another width in some layers
        heads, kv_heads = (heads, shapes[k][0] // head_dim)
        gated = shapes[q][0] == 2 * heads * head_dim  # per head [q, gate]
        known |= {"q": q, "k": k, "q_stride": 2 * head_dim if gated else 0}
        known |= {"q_bias": at("q_proj.bias"), "k_bias": at("k_proj.bias")}
    known["over_all"] = q_norm is not None and shapes[q_norm][0] != head_dim
    known |= _rotation(config, rules, layer, kind, head_dim, known.get("k_shared_rows", 0))
    known["normed"] = q_norm is not None or (rules.normed and known["rotary"] > 0)
    width = shapes[known["q_latent"].name if known.get("q_latent") else known["q"]][1]
    return QKProjection(heads=heads, kv_heads=kv_heads, head_dim=head_dim, width=width, **known)


def _weights(names: tuple[str, ...]) -> list[str]:
    return [f"{name}.weight" for name in names]


def _norms(short: str, long: str) -> list[str]:
    return [f"{short}_norm.weight", f"{short}_layernorm.weight", f"{long}_layernorm.weight"]


def _kind(config: Any, layer: int) -> str:
    types = getattr(config, "layer_types", None)
    if types:
        return "window" if types[layer].startswith(("sliding", "chunked")) else "full"
    windowed = getattr(config, "sliding_window", None) or getattr(config, "attention_window_size", None)
    return "window" if windowed else "full"


def _heads(config: Any, kind: str) -> tuple[int, int, int]:
    """Query heads, key/value heads, head width."""
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "attention_head_dim", None) or getattr(config, "head_dim", None)
    if kind == "window":
        heads = getattr(config, "swa_num_attention_heads", None) or heads
        kv_heads = getattr(config, "swa_num_key_value_heads", None) or kv_heads
        head_dim = getattr(config, "swa_head_dim", None) or head_dim
    return heads, kv_heads, head_dim or config.hidden_size // heads


def _rotation(config: Any, rules: Rules, layer: int, kind: str, head_dim: int, shared: int) -> dict[str, Any]:
    """`rotary`, `first`, `step` and `apart` of a QKProjection."""
    listed = getattr(config, "no_rope_layers", None)
    turned = {
        "all": True,
        "none": False,
        "window": kind == "window",
        "listed": bool(listed[layer]) if listed else True,  # 1 means with RoPE
        "config": getattr(config, "position_embedding_type", None) == "rope" or getattr(config, "use_mem_rope", False),
    }[rules.rope]
    if not turned:
        return {"rotary": 0}
    if shared:
        rotary, first = shared, head_dim - shared
    else:
        given = getattr(config, "rope_parameters", None) or {}
        given = given.get((getattr(config, "layer_types", None) or {layer: ""})[layer], given)
        rotary, first = int(head_dim * given.get("partial_rotary_factor", 1.0)), 0
    if rules.pairs == "neighbours":
        return {"rotary": rotary, "first": first, "step": 2, "apart": 1}
    return {"rotary": rotary, "first": first, "apart": head_dim // 2 if rules.pairs == "spread" else None}
