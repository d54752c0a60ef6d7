"""fla's config.json and HybridConfig, both ways.

fla's config names a family, whose mixer every layer has but those in `attn`: a section `{"layers": [...],
"num_heads": ...}` of softmax attention, or a list of such sections. Ratios in a checkpoint's name are not read:
published "hybrid-3-1" models have one attention layer in every three.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..config import KINDS, HybridConfig, parse_mixer

if TYPE_CHECKING:
    from ..model import HybridLM

FAMILIES = {
    "transformer": "full", "gla": "gla", "hgrn": "hgrn", "hgrn2": "hgrn2", "retnet": "retnet", "delta_net": "deltanet",
    "gated_deltanet": "gdn", "kda": "kda", "rwkv6": "rwkv6", "rwkv7": "rwkv7",
}  # fmt: skip
"""fla's model types and our mixers. Its Mamba-2 is transformers', and is read there."""

RWKV = ("rwkv6", "rwkv7")

# What a family's config may say only in one way (None: also its absence), since our mixer has no other form.
ONLY: dict[str, dict[str, Any]] = {
    "gla": {
        "use_short_conv": False, "use_output_gate": True, "feature_map": None, "clamp_min": None, "use_gk": True,
        "use_gv": False,
    },
    "hgrn": {"use_short_conv": False},
    "hgrn2": {"use_short_conv": False},
    "retnet": {"use_short_conv": False, "use_output_gate": True, "feature_map": None},
    "delta_net": {
        "use_short_conv": True, "use_gate": False, "use_beta": True, "use_output_norm": True, "qk_norm": "l2",
        "qk_activation": "silu",
    },
    "gated_deltanet": {"use_short_conv": True, "use_gate": True, "output_gate_activation": ("swish", "silu")},
    "kda": {"use_short_conv": True, "safe_gate": False, "lower_bound": None},
    "rwkv6": {"norm_first": True, "norm_bias": True},
    "rwkv7": {"norm_first": True, "norm_bias": True},
    "transformer": {"qkv_bias": False},
}  # fmt: skip

ROPE = 10_000.0  # where a section of attention does not say


def is_fla(config: Mapping[str, Any]) -> bool:
    """Whether config.json's content is of a family read here."""
    return config.get("model_type") in FAMILIES


def read_config(config: Mapping[str, Any], where: str = "config") -> HybridConfig:
    """The HybridConfig of fla's config.json content.

    Raises ValueError for an unknown family, a missing entry, layers that do not exist or are named twice, and
    options that HybridLM has no form for, each by name.
    """
    family = config.get("model_type")
    if family not in FAMILIES:
        raise ValueError(f"{where}: model_type {family!r} is not a family of fla read here: {', '.join(FAMILIES)}")
    mixer = FAMILIES[family]
    try:
        return _read(family, mixer, config)
    except KeyError as error:
        raise ValueError(f"{where}: {family} config lacks {error.args[0]!r}") from None
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: {error}") from None


def _read(family: str, mixer: str, config: Mapping[str, Any]) -> HybridConfig:
    D, n_layers = config["hidden_size"], config["num_hidden_layers"]
    only = {"attnres_block_size": None, "hidden_act": "sqrelu" if family in RWKV else "swish", **ONLY[family]}
    if family in ("gla", "hgrn", "hgrn2", "retnet", "transformer"):
        only["elementwise_affine"] = True
    if family in ("gla", "retnet"):
        only["num_kv_heads"] = (None, config["num_heads"])
    for name, known in only.items():
        allowed = known if isinstance(known, tuple) else (known,)
        if name in config and config[name] not in allowed:
            raise ValueError(f"{family} with {name}={config[name]!r}: HybridLM only has {allowed[-1]!r}")
    pattern, shared = _layers(family, mixer, config)
    if mixer in RWKV and set(pattern) != {mixer}:
        raise ValueError(f"{family} with attention layers: HybridLM has no attention layer with RWKV's channel mix")
    options = {} if mixer == "full" else {mixer: _options(family, config)}
    own = options.get(mixer, {})
    heads = shared.get("num_heads") or own.get("heads", 1)
    return HybridConfig(
        pattern, n_layers, D, heads, config["vocab_size"], n_kv_heads=shared.get("num_kv_heads"),
        head_dim=None if shared else own.get("key_dim", D), d_ff=_inner_width(family, config),
        rope_base=shared.get("rope_theta", ROPE), qk_norm=bool(mixer == "full" and config.get("qk_norm")),
        tie_embeddings=bool(config.get("tie_word_embeddings", False)),
        norm="layer" if mixer in RWKV else "rms", norm_eps=config["norm_eps"], mixers=options,
    )  # fmt: skip


def _layers(family: str, mixer: str, config: Mapping[str, Any]) -> tuple[list[str], dict[str, Any]]:
    """The explicit layer list, and what all attention layers share: heads, key/value heads, base of RoPE."""
    n_layers = config["num_hidden_layers"]
    sections = config.get("attn") or []
    if mixer == "full":
        sections = [{**config, "layers": range(n_layers)}]
        if config.get("qk_norm") and config["norm_eps"] != 1e-5:
            raise ValueError(
                f"transformer with qk_norm: those norms have an eps of 1e-5 in fla; norm_eps={config['norm_eps']}"
            )
    pattern, found = [mixer] * n_layers, {}
    named: set[int] = set()
    for section in [sections] if isinstance(sections, Mapping) else sections:
        if section.get("qkv_bias"):
            raise ValueError("attn: qkv_bias=True; HybridLM's projections have no bias")
        heads = section["num_heads"]
        here = {
            "num_heads": heads, "num_kv_heads": section.get("num_kv_heads") or heads,
            "rope_theta": float(section.get("rope_theta") or ROPE),
        }  # fmt: skip
        if found and here != found:
            raise ValueError(f"attn: sections differ ({found} and {here}); HybridLM has one size of attention")
        found, window = here, section.get("window_size")
        for layer in section["layers"]:
            if not 0 <= layer < n_layers or layer in named:
                problem = "named twice" if layer in named else f"not there; num_hidden_layers={n_layers}"
                raise ValueError(f"attn.layers: layer {layer} is {problem}")
            named.add(layer)
            pattern[layer] = "full" if window is None else f"swa:{window}"
    return pattern, found


def _inner_width(family: str, config: Mapping[str, Any]) -> int:
    """d_ff: given, or fla's rounding of hidden_ratio."""
    if config.get("intermediate_size") is not None:
        return config["intermediate_size"]
    ratio = config.get("hidden_ratio") or (3.5 if family == "rwkv6" else 4)
    width, step = config["hidden_size"] * ratio, 32
    if family not in RWKV:
        width, step = width * 2 / 3, 256
    return step * -(-int(width) // step)


def _options(family: str, c: Mapping[str, Any]) -> dict[str, Any]:
    """Our mixer's options from fla's config."""
    D = c["hidden_size"]
    if family == "hgrn":
        return {"width": int(D * (c.get("expand_ratio") or 1)), "lower_bounds": c.get("use_lower_bound", True)}
    H = c["num_heads"]
    if family == "hgrn2":
        return {
            "heads": H, "key_dim": int(c["expand_ratio"]), "value_dim": D // H,
            "lower_bounds": c.get("use_lower_bound", True),
        }  # fmt: skip
    if family == "rwkv7":
        widths = c.get("value_dim") or D
        if isinstance(widths, list) and len(set(widths)) > 1:
            raise ValueError(f"rwkv7 with value_dim={widths}: HybridLM has one for all layers")
        width = widths[0] if isinstance(widths, list) else widths
        ranks = {ours: c[theirs] for ours, theirs in RANKS7.items()}
        return {"heads": H, "key_dim": c["head_dim"], "value_dim": width // H, **ranks}
    conv = {"conv": c.get("conv_size", 4), "negative_eigenvalues": bool(c.get("allow_neg_eigval", False))}
    if family in ("gated_deltanet", "kda"):
        K = c["head_dim"]
        return {
            "heads": H, "value_heads": c.get("num_v_heads") or H, "key_dim": K, "value_dim": round(K * c["expand_v"]),
            **conv,
        }  # fmt: skip
    sizes = {"heads": H, "key_dim": round(D * c["expand_k"] / H), "value_dim": round(D * c["expand_v"] / H)}
    if family == "rwkv6":
        return {**sizes, "mix_rank": c["proj_low_rank_dim"], "decay_rank": c["gate_low_rank_dim"]}
    return {**sizes, **(conv if family == "delta_net" else {})}


RANKS7 = {
    "decay_rank": "decay_low_rank_dim", "gate_rank": "gate_low_rank_dim", "rate_rank": "a_low_rank_dim",
    "value_rank": "v_low_rank_dim",
}  # fmt: skip


def write_config(model: HybridLM) -> dict[str, Any]:
    """fla's config.json content for a HybridLM; ValueError names what fla has no form for.

    What the model was read with (token ids, initialisation, fused parts) comes back as it was.
    """
    config = model.config
    recurrent = sorted(name for name in config.names if KINDS[name] == "recurrent")
    mixer = recurrent[0] if recurrent else "full"
    family = next((theirs for theirs, ours in FAMILIES.items() if ours == mixer), None)
    for layer in config.layers:
        if "|" in layer or "+" in layer or parse_mixer(layer)[0] not in (mixer, "full", "swa"):
            raise ValueError(f"to fla: no family of fla has layers {mixer!r} and {layer!r} in one model")
    if family is None:
        raise ValueError(f"to fla: {mixer!r} is not one of the mixers written here: {', '.join(FAMILIES.values())}")
    if (config.norm == "layer") != (mixer in RWKV) or (mixer in RWKV and config.names != {mixer}):
        raise ValueError(f"to fla: fla's {family} has {'layer' if mixer in RWKV else 'rms'} norms, and all its layers")
    if mixer != "full" and config.qk_norm and config.names & {"full", "swa"}:
        raise ValueError("to fla: its hybrids have no norm on queries and keys")
    if config.names & {"full", "swa"} and config.head_dim != config.d_model // config.n_heads:
        raise ValueError(f"to fla: its attention heads are d_model / n_heads wide, not {config.head_dim}")
    sections: dict[int | None, list[int]] = {}
    for number, layer in enumerate(config.layers):
        if layer != mixer or mixer == "full":
            sections.setdefault(parse_mixer(layer)[1], []).append(number)
    shared = {"num_heads": config.n_heads, "num_kv_heads": config.n_kv_heads, "rope_theta": config.rope_base}
    attn: Any = [
        {"layers": layers, **shared, "window_size": window, "qkv_bias": False} for window, layers in sections.items()
    ]
    out = {
        **model.notes.get("fla", {}), "model_type": family, "hidden_size": config.d_model,
        "num_hidden_layers": config.n_layers, "vocab_size": config.vocab_size, "intermediate_size": config.d_ff,
        "norm_eps": config.norm_eps, "tie_word_embeddings": config.tie_embeddings,
    }  # fmt: skip
    if mixer != "full":
        return {**out, **_foreign_options(mixer, model), "attn": attn[0] if len(attn) == 1 else attn or None}
    if len(attn) > 1:
        raise ValueError("to fla: its transformer has one window for all layers")
    return {**out, **shared, "window_size": attn[0]["window_size"], "qk_norm": config.qk_norm, "qkv_bias": False}


def _foreign_options(mixer: str, model: HybridLM) -> dict[str, Any]:
    """`_options` backwards, from the built mixer, where no option is left open."""
    D, o = model.config.d_model, model.config.options(mixer)
    site = next(site for site in model.sites if site.mixer == mixer)
    H, K, V = site.heads, site.key_dim, site.value_dim
    if mixer == "hgrn":
        return {"expand_ratio": _ratio(H, D), "use_lower_bound": o["lower_bounds"]}
    if mixer == "hgrn2":
        if H * V != D:
            raise ValueError(f"to fla: hgrn2's value heads fill the model's width {D}, not {H} x {V}")
        return {"num_heads": H, "expand_ratio": K, "use_lower_bound": o["lower_bounds"]}
    if mixer == "rwkv7":
        block: Any = model.layers[-1].attn
        parts = {"decay_rank": "decay", "gate_rank": "gate", "rate_rank": "rate", "value_rank": "blend"}
        ranks = {
            theirs: getattr(block, parts[ours]).enter.weight.shape[0]
            for ours, theirs in RANKS7.items()
            if hasattr(block, parts[ours])
        }
        return {"num_heads": H, "head_dim": K, "value_dim": [H * V] * model.config.n_layers, **ranks}
    conv = {"conv_size": o.get("conv"), "allow_neg_eigval": o.get("negative_eigenvalues")}
    if mixer in ("gdn", "kda"):
        key_heads = o["heads"] or model.config.n_heads
        return {"num_heads": key_heads, "num_v_heads": H, "head_dim": K, "expand_v": _ratio(V, K), **conv}
    sizes = {"num_heads": H, "expand_k": _ratio(H * K, D), "expand_v": _ratio(H * V, D)}
    if mixer == "rwkv6":
        return {**sizes, "proj_low_rank_dim": o["mix_rank"], "gate_low_rank_dim": o["decay_rank"]}
    if mixer == "gla" and o["gate_rank"] != 16:
        raise ValueError(f"to fla: gla's gate_rank is 16 there, not {o['gate_rank']}")
    return {**sizes, **(conv if mixer == "deltanet" else {})}


def _ratio(part: int, whole: int) -> int | float:
    return part // whole if part % whole == 0 else part / whole
