"""Models of other libraries with the widths of ours, to compare training speed with.

    fla-gdn            flash-linear-attention's GatedDeltaNetForCausalLM as shipped, not compiled: it brings fused
                       convolutions, norms, SwiGLU and cross entropy
    fla-gdn-compiled   the same under torch.compile
    fla-kda            its KDAForCausalLM, likewise
    llama              transformers' LlamaForCausalLM on SDPA, compiled, with our loss

fla's gated delta rule refuses its backward on some machines (hooks/kernels/fused.py). There `fla-gdn` runs the kernel
that our model runs, chunk_kda with the decay broadcast, everything else as shipped.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...hooks.config import HybridConfig
from ...hooks.kernels import fused as kernels

PEERS = {"fla-gdn": "gdn@pure", "fla-gdn-compiled": "gdn@pure", "fla-kda": "kda@pure", "llama": "full"}
"""Each peer, and our pattern of the same architecture."""
AS_SHIPPED = ("fla-gdn", "fla-kda")
"""Peers that are not compiled."""


@dataclasses.dataclass
class Peer:
    """A model, its loss on tokens [B,T], and what was changed in it."""

    model: nn.Module
    loss: Callable[[Tensor], Tensor] | None
    """None: the model's output has logits, and the caller brings the loss."""
    notes: list[str]


def build(name: str, config: HybridConfig, device: torch.device) -> Peer:
    """The peer of `config`, weights on `device`; ImportError says what to install."""
    if name == "llama":
        return _llama(config, device)
    try:
        import fla.models as models
    except ImportError as error:
        raise ImportError(f"{name} needs flash-linear-attention ({error}): {kernels.INSTALL}") from error
    mixer = name.split("-")[1]
    o = config.options(mixer)
    K: Any = o["key_dim"] or config.head_dim
    V: Any = o["value_dim"] or (2 * K if mixer == "gdn" else K)
    kind, model_kind = {
        "gdn": (models.GatedDeltaNetConfig, models.GatedDeltaNetForCausalLM),
        "kda": (models.KDAConfig, models.KDAForCausalLM),
    }[mixer]
    theirs = kind(
        hidden_size=config.d_model, num_heads=o["heads"] or config.n_heads, num_v_heads=o["value_heads"], head_dim=K,
        expand_v=V / K, conv_size=o["conv"], hidden_ratio=None, intermediate_size=config.d_ff,
        num_hidden_layers=config.n_layers, vocab_size=config.vocab_size, norm_eps=config.norm_eps, use_cache=False,
        tie_word_embeddings=config.tie_embeddings,
    )  # fmt: skip
    with device:
        model = model_kind(theirs)
    model.train()
    notes = _own_kernel(device) if mixer == "gdn" else []
    forward: Any = torch.compile(model) if name.endswith("compiled") else model
    return Peer(model, lambda x: forward(input_ids=x, labels=x).loss, notes)


def _llama(config: HybridConfig, device: torch.device) -> Peer:
    from transformers import LlamaConfig, LlamaForCausalLM

    assert config.d_ff is not None
    theirs = LlamaConfig(
        hidden_size=config.d_model, intermediate_size=config.d_ff, num_hidden_layers=config.n_layers,
        num_attention_heads=config.n_heads, num_key_value_heads=config.n_kv_heads, head_dim=config.head_dim,
        vocab_size=config.vocab_size, rms_norm_eps=config.norm_eps, max_position_embeddings=65_536, use_cache=False,
        tie_word_embeddings=config.tie_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_base},
    )  # fmt: skip
    theirs._attn_implementation = "sdpa"
    with device:
        model = LlamaForCausalLM(theirs)
    model.train()
    return Peer(model, None, [])


def _own_kernel(device: torch.device) -> list[str]:
    """Give fla's GDN layer the kernel that ours trains with on this machine; says so."""
    if device.type != "cuda":
        return []
    triton, capability = kernels.machine(device)
    op, why = kernels.path_of("delta scalar", triton=triton, capability=capability, training=True)
    if op != "chunk_kda":
        return []
    from fla.layers import gated_deltanet as layer
    from fla.ops.kda import chunk_kda

    layer.chunk_gated_delta_rule = functools.partial(through_kda, chunk_kda)  # type: ignore[assignment]
    return [f"op {op} in place of chunk_gated_delta_rule: {why}"]


def through_kda(
    op: Callable[..., Any], *, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, A_log: Tensor,
    dt_bias: Tensor, use_gate_in_kernel: bool, **rest: Any,
) -> Any:  # fmt: skip
    """fla's gated delta rule, as its layer calls it, through chunk_kda: the head's decay broadcast over K."""
    assert use_gate_in_kernel
    decay = -A_log.float().exp() * F.softplus(g.float() + dt_bias.float())
    return op(q=q, k=k, v=v, g=decay[..., None].expand(*decay.shape, k.shape[-1]), beta=beta, **rest)
