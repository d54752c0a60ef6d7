"""Parameter names of foreign mixers and ours, as one table: what an adapter for their checkpoints moves weights by.

A source named after a mixer is the layer of that name in flash-linear-attention (fla.layers), except `mamba2`,
`lightning` and `hawk`, which are transformers' Mamba2Mixer (Bamba's and Falcon-H1's are laid out the same),
MiniMaxLightningAttention and RecurrentGemmaRecurrentBlock. The other sources are transformers' model types, and the
channel mixes of RWKV ("rwkv6.mlp"). HGRN's lower bounds belong to the whole model, in fla too, and move as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter

import torch
from torch import Tensor, nn

_CONVS = ("q_conv1d.weight k_conv1d.weight v_conv1d.weight", "conv.weight")
_QKVO = tuple((f"{name}_proj.weight", f"{name}_proj.weight") for name in "qkvo")
_RVKO = (("r_proj.weight", "q_proj.weight"), *_QKVO[1:])
_GATED_NORM = ("g_norm_swish_gate.weight|g_norm.weight", "out_norm.weight")
_DECAY = (("A_log", "decay.log_rate"), ("dt_bias", "decay.bias"))

KEYS: dict[str, tuple[tuple[str, ...], ...]] = {
    "gla": (
        *_QKVO, ("g_proj.weight", "gate_proj.weight"), ("gk_proj.0.weight", "decay_in.weight"),
        ("gk_proj.1.weight", "decay_out.weight"), ("gk_proj.1.bias", "decay_out.bias"), _GATED_NORM,
    ),
    "hgrn": (
        ("i_proj.weight", "v_proj.weight"), ("f_proj.weight", "decay_proj.weight"),
        ("g_proj.weight", "gate_proj.weight"), ("g_norm.weight", "out_norm.weight"), ("o_proj.weight", "o_proj.weight"),
    ),
    "hgrn2": (
        ("q_proj.weight", "q_proj.weight"), ("f_proj.weight", "decay_proj.weight"), ("i_proj.weight", "v_proj.weight"),
        ("g_norm.weight", "out_norm.weight"), ("o_proj.weight", "o_proj.weight"),
    ),
    "retnet": (*_QKVO, ("g_proj.weight", "gate_proj.weight"), _GATED_NORM),
    "deltanet": (*_QKVO, ("b_proj.weight", "beta_proj.weight"), _CONVS, ("o_norm.weight", "out_norm.weight")),
    "gdn": (
        *_QKVO, ("g_proj.weight", "gate_proj.weight"), ("a_proj.weight", "decay_proj.weight"),
        ("b_proj.weight", "beta_proj.weight"), *_DECAY, _CONVS, ("o_norm.weight", "out_norm.weight"),
    ),
    "kda": (
        *_QKVO, ("g_proj.0.weight", "gate_in.weight"), ("g_proj.1.weight", "gate_out.weight"),
        ("g_proj.1.bias", "gate_out.bias"), ("f_proj.0.weight", "decay_in.weight"),
        ("f_proj.1.weight", "decay_out.weight"), ("b_proj.weight", "beta_proj.weight"), *_DECAY, _CONVS,
        ("o_norm.weight", "out_norm.weight"),
    ),
    "rwkv6": (
        ("x_proj.0.mu", "shift"), ("x_proj.0.linear.weight", "mix_in.weight"), ("x_proj.2.weight", "mix_out"),
        ("x_bias", "shifts"), ("r_proj.linear.weight", "q_proj.weight"), ("k_proj.linear.weight", "k_proj.weight"),
        ("v_proj.linear.weight", "v_proj.weight"), ("g_proj.linear.weight", "gate_proj.weight"),
        ("w_proj.linear.lora.0.weight", "decay_in.weight"), ("w_proj.linear.lora.2.weight", "decay_out.weight"),
        ("w_proj.linear.lora.2.bias", "decay_out.bias"), ("bonus", "bonus"), ("g_norm.weight", "out_norm.weight"),
        ("g_norm.bias", "out_norm.bias"), ("o_proj.weight", "o_proj.weight"),
    ),
    "rwkv6.mlp": (
        ("key.mu", "shift"), ("key.linear.weight", "up_proj.weight"), ("value.weight", "down_proj.weight"),
        ("receptance.mu", "gate_shift"), ("receptance.linear.weight", "gate_proj.weight"),
    ),
    "rwkv7": (
        *_RVKO, ("x_r x_w x_k x_v x_a x_g", "shifts"), ("k_k", "removal"), ("k_a", "kappa"), ("r_k", "bonus"),
        *((f"{theirs}_lora.lora.{i}", f"{ours}.{j}") for theirs, ours in (("w", "decay"), ("a", "rate"), ("v", "blend"))
          for i, j in (("0.weight", "enter.weight"), ("2.weight", "leave.weight"), ("2.bias", "leave.bias"))),
        ("g_lora.lora.0.weight", "gate.enter.weight"), ("g_lora.lora.2.weight", "gate.leave.weight"),
        ("g_norm.weight", "out_norm.weight"), ("g_norm.bias", "out_norm.bias"),
    ),
    "rwkv7.mlp": (("x_k", "shift"), ("key.weight", "up_proj.weight"), ("value.weight", "down_proj.weight")),
    "mamba2": (
        ("in_proj.weight", "gate_proj.weight v_proj.weight k_proj.weight q_proj.weight decay_proj.weight"),
        ("conv1d.weight", "conv.weight"), ("conv1d.bias", "conv.bias"), *_DECAY, ("D", "skip"),
        ("norm.weight", "out_norm.weight"), ("out_proj.weight", "o_proj.weight"),
    ),
    "lightning": (
        ("qkv_proj.weight", "q_proj.weight k_proj.weight v_proj.weight", "site.heads"),
        ("output_gate.weight", "gate_proj.weight"), ("norm.weight", "out_norm.weight"),
        ("out_proj.weight", "o_proj.weight"),
        *((name, "") for name in ("slope_rate", "query_decay", "key_decay", "diagonal_decay")),
    ),
    "hawk": (
        *((f"{theirs}.{name}", f"{ours}.{name}") for theirs, ours in
          (("linear_x", "v_proj"), ("linear_y", "gate_proj"), ("linear_out", "o_proj"), ("conv_1d", "conv"))
          for name in ("weight", "bias")),
        ("rg_lru.recurrent_param", "decay_rate"), ("rg_lru.input_gate_weight", "input_gate.weight"),
        ("rg_lru.input_gate_bias", "input_gate.bias"), ("rg_lru.recurrent_gate_weight", "decay_gate.weight"),
        ("rg_lru.recurrent_gate_bias", "decay_gate.bias"),
    ),
    "qwen3_next": (  # gdn
        ("in_proj_qkvz.weight", "q_proj.weight k_proj.weight v_proj.weight gate_proj.weight", "key_heads"),
        ("in_proj_ba.weight", "beta_proj.weight decay_proj.weight", "key_heads"), ("conv1d.weight", "conv.weight"),
        *_DECAY, ("norm.weight", "out_norm.weight"), ("out_proj.weight", "o_proj.weight"),
    ),
    "olmo_hybrid": (  # gdn
        *_QKVO, ("g_proj.weight", "gate_proj.weight"), ("a_proj.weight", "decay_proj.weight"),
        ("b_proj.weight", "beta_proj.weight"), *_DECAY, ("conv1d.weight", "conv.weight"),
        ("o_norm.weight", "out_norm.weight"),
    ),
    "kimi_linear": (  # kda
        *_QKVO, ("g_a_proj.weight", "gate_in.weight"), ("g_b_proj.weight", "gate_out.weight"), ("", "gate_out.bias"),
        ("forget_gate.f_a_proj.weight", "decay_in.weight"), ("forget_gate.f_b_proj.weight", "decay_out.weight"),
        ("b_proj.weight", "beta_proj.weight"), ("forget_gate.A_log", "decay.log_rate"),
        ("forget_gate.dt_bias", "decay.bias"), ("conv1d.weight", "conv.weight"), ("o_norm.weight", "out_norm.weight"),
    ),
}  # fmt: skip
"""Per source, entries (foreign names, our names[, heads]): the rows of the foreign tensors, one tensor after another,
are those of ours. `heads` names the attribute that counts the heads which a foreign tensor goes through one by one,
with the rows of each of ours for that head. "a|b": either name. No foreign name: zero there. None of ours: derived from
the config there. An entry for a part that a module does not have (the blend in RWKV-7's first layer) is passed over."""


def to_ours(source: str, foreign: Mapping[str, Tensor], module: nn.Module) -> dict[str, Tensor]:
    """The state dict for `module`, one of our mixers, from that of a foreign layer.

    Raises ValueError for a missing key, one that our mixer has no place for, or shapes that do not fit.

    >>> mixer.load_state_dict(to_ours("qwen3_next", layer.linear_attn.state_dict(), mixer))
    """
    have, moved, used = module.state_dict(), {}, set()
    for theirs, ours, groups in _entries(source, foreign, module):
        used.update(theirs)
        if not theirs:
            moved.update({name: torch.zeros_like(have[name]) for name in ours})
        elif ours:
            _need(source, theirs, foreign)
            moved.update(_move(source, foreign, theirs, 1, have, ours, groups))
    left = sorted(set(foreign) - used)
    if left:
        raise ValueError(f"{source}: our {type(module).__name__} has no place for {left[0]!r}; it has {_list(have)}")
    assert moved.keys() == have.keys(), sorted(have.keys() ^ moved.keys())
    return moved


def to_foreign(source: str, module: nn.Module, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The foreign layer's state dict from `module`, one of our mixers: `to_ours` backwards.

    `like`: a state dict of the foreign layer, for its names and shapes; what it derives from its config stays as it is.
    Raises ValueError as `to_ours` does, and for a parameter that has to be zero there.
    """
    have, moved = module.state_dict(), {}
    for theirs, ours, groups in _entries(source, like, module):
        if not theirs:
            for name in ours:
                if have[name].any():
                    raise ValueError(f"{source}: has no {name!r}, so that ours must be zero")
        elif ours:
            _need(source, theirs, like)
            moved.update(_move(source, have, ours, groups, like, theirs, 1))
        else:
            moved.update({name: like[name] for name in theirs if name in like})
    left = sorted(set(like) - set(moved))
    if left:
        raise ValueError(f"{source}: our {type(module).__name__} has nothing for {left[0]!r}; it has {_list(have)}")
    return moved


def _entries(source: str, foreign: Mapping[str, Tensor], module: nn.Module) -> list[tuple[list[str], list[str], int]]:
    """The table's entries for `module`: foreign names, our names, groups."""
    if source not in KEYS:
        raise ValueError(f"unknown source {source!r} of weights; known: {', '.join(sorted(KEYS))}")
    have, found = module.state_dict(), []
    for x in "qkv" if "conv.weight" in have else "":  # in ours they are one tensor, which any widths of that sum fit
        conv, rows = foreign.get(f"{x}_conv1d.weight"), have.get(f"{x}_proj.weight")
        if conv is not None and rows is not None and conv.shape[0] != rows.shape[0]:
            raise ValueError(
                f"{source}: {x}_conv1d.weight {list(conv.shape)} does not fit {x}_proj.weight {list(rows.shape)}"
            )
    for theirs, ours, *groups in KEYS[source]:
        names = ours.split()
        if names and not any(name in have for name in names):
            continue
        either = [name.split("|") for name in theirs.split()]
        chosen = [next((name for name in names if name in foreign), names[0]) for names in either]
        found.append((chosen, names, int(attrgetter(groups[0])(module)) if groups else 1))
    return found


def _need(source: str, names: Sequence[str], foreign: Mapping[str, Tensor]) -> None:
    for name in names:
        if name not in foreign:
            raise ValueError(f"{source}: lacks {name!r}; it has {_list(foreign)}")


def _move(
    source: str, state: Mapping[str, Tensor], names: Sequence[str], groups: int, like: Mapping[str, Tensor],
    targets: Sequence[str], target_groups: int,
) -> dict[str, Tensor]:  # fmt: skip
    """The tensors `names` of `state`, group by group, dealt out to `targets` in the shapes they have in `like`."""
    parts, shapes = [state[name] for name in names], [like[name].shape for name in targets]
    ends = {shape[-1] for shape in [*(part.shape for part in parts), *shapes] if sum(n != 1 for n in shape) > 1}
    if sum(part.numel() for part in parts) != sum(shape.numel() for shape in shapes) or len(ends) > 1:
        found = ", ".join(f"{name} {list(part.shape)}" for name, part in zip(names, parts, strict=True))
        wanted = ", ".join(f"{name} {list(shape)}" for name, shape in zip(targets, shapes, strict=True))
        raise ValueError(f"{source}: {found} does not fit {wanted}")
    flat = torch.cat([part.reshape(groups, -1) for part in parts], 1)
    pieces = flat.reshape(target_groups, -1).split([shape.numel() // target_groups for shape in shapes], 1)
    return {name: piece.reshape(shape) for name, piece, shape in zip(targets, pieces, shapes, strict=True)}


def _list(state: Mapping[str, Tensor]) -> str:
    return ", ".join(sorted(state))
