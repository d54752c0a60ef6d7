"""The recurrence through flash-linear-attention's CUDA kernels (fla 0.6): same signature as `recurrence`.

Each family of mixers has its op. Two of them have a second one: the backward of fla's simple GLA and gated delta
rule gives wrong gradients on Hopper with Triton 3.4 to 3.7.0 and refuses to run there, so those train through the
op with a decay per channel, the scalar broadcast over K (the same mathematics).

Matrix products inside the kernels are in the inputs' 16-bit dtype, or in TF32 for fp32 inputs; decays and states are
fp32. fla sums decays over a chunk and takes differences, so `FLOOR` bounds each from below: e^-80 is nothing beside
an fp32 state, where -inf would give NaN and huge sums would cost weak decays their digits.
"""

from __future__ import annotations

import importlib
import re
import warnings
from collections.abc import Callable
from typing import Any, Literal, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from .recurrence import Read

Function = TypeVar("Function", bound=Callable[..., Any])
Family = Literal["scalar", "vector", "before", "elementwise", "delta", "delta scalar", "delta vector", "low rank"]

MIXERS: dict[str, Family] = {
    "retnet": "scalar", "lightning": "scalar", "mamba2": "scalar", "gla": "vector", "hgrn2": "vector",
    "rwkv6": "before", "hgrn": "elementwise", "hawk": "elementwise", "deltanet": "delta", "gdn": "delta scalar",
    "kda": "delta vector", "rwkv7": "low rank",
}  # fmt: skip
"""How each mixer fills in the recurrence."""

MODULES = {
    "chunk_simple_gla": "fla.ops.simple_gla",
    "chunk_gla": "fla.ops.gla",
    "chunk_rwkv6": "fla.ops.rwkv6",
    "fused_recurrent_hgrn": "fla.ops.hgrn",
    "chunk_delta_rule": "fla.ops.delta_rule",
    "chunk_gated_delta_rule": "fla.ops.gated_delta_rule",
    "chunk_kda": "fla.ops.kda",
    "chunk_dplr_delta_rule": "fla.ops.generalized_delta_rule",
    "causal_conv1d_fwd": "fla.modules.causal_conv1d",
    "causal_conv1d_bwd": "fla.modules.causal_conv1d",
}
MAX_KEY_DIM = {  # the state's K x BV tile must fit on chip; the others split K
    "chunk_delta_rule": 256, "chunk_gated_delta_rule": 256, "chunk_kda": 256, "chunk_dplr_delta_rule": 256,
}  # fmt: skip
MAX_HEADS = 65_535  # batch x heads is one axis of CUDA's launch grid
WIDTH = 16  # K and V are padded to a multiple of it: the smallest tile of a tensor core
FLOOR = -80.0
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
DEVICE = "cuda"
INSTALL = 'pip install "hybridscope[gpu]"'


def family_of(
    *, k: Tensor, v: Tensor, log_decay: Tensor | None, beta: Tensor | None = None, a: Tensor | None = None,
    read: Read = "after",
) -> Family:  # fmt: skip
    """Which of the special cases these arguments of `recurrence` are."""
    if a is not None:
        return "low rank"
    vector = log_decay is not None and log_decay.shape[-1] > 1
    if beta is not None:
        return "delta" if log_decay is None else "delta vector" if vector else "delta scalar"
    if read == "before":
        return "before"
    if k.shape[-1] == v.shape[-1] == 1:
        return "elementwise"
    return "vector" if vector else "scalar"


def path_of(
    family: Family, *, triton: str, capability: tuple[int, int], training: bool, dtype: torch.dtype = torch.bfloat16
) -> tuple[str, str]:
    """The fla op that serves a family, and why, by Triton's version and the GPU's compute capability."""
    version = tuple(int(part) for part in re.findall(r"\d+", triton)[:3])
    refused = training and capability[0] == 9 and (3, 4) <= version < (3, 7, 1)
    why = f"scalar decay broadcast over K: {{}}'s backward refuses Hopper with Triton {triton} (needs >= 3.7.1)"
    match family:
        case "scalar" if refused:
            return "chunk_gla", why.format("chunk_simple_gla")
        case "scalar":
            return "chunk_simple_gla", "one decay per head"
        case "vector":
            return "chunk_gla", "a decay per channel"
        case "before":
            return "chunk_rwkv6", "reads the state before it is written"
        case "elementwise":
            return (
                "fused_recurrent_hgrn",
                "K = V = 1: a scan per channel, all in fp32 (chunk_hgrn's repeated runs differed at T >= 1,000)",
            )
        case "delta" if dtype == torch.float32:
            return "chunk_kda", "chunk_delta_rule takes no fp32; a decay of 1 is the same"
        case "delta":
            return "chunk_delta_rule", "delta rule without decay"
        case "delta scalar" if refused:
            return "chunk_kda", why.format("chunk_gated_delta_rule")
        case "delta scalar":
            return "chunk_gated_delta_rule", "delta rule, one decay per head"
        case "delta vector":
            return "chunk_kda", "delta rule, a decay per channel"
        case "low rank":
            return "chunk_dplr_delta_rule", "general a, b beside the decay"


def machine(device: torch.device) -> tuple[str, tuple[int, int]]:
    """Triton's version and the device's compute capability."""
    import triton

    return triton.__version__, torch.cuda.get_device_capability(device)


def fla_op(name: str) -> Callable[..., Any]:
    """An op of fla; ImportError says what to install."""
    try:
        return getattr(importlib.import_module(MODULES[name]), name)
    except ImportError as error:
        raise ImportError(
            f"{name} of flash-linear-attention cannot be imported ({error}): {INSTALL}, "
            'or hybridscope.use_kernels("torch") for the slower torch path'
        ) from error


def compute_dtype(v: Tensor) -> torch.dtype:
    """What q, k, v are cast to: autocast's dtype where it is on, else that of v."""
    if torch.is_autocast_enabled(v.device.type):
        return torch.get_autocast_dtype(v.device.type)
    return v.dtype


def is_training(*tensors: Tensor | None) -> bool:
    """Whether a backward pass can follow."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def opaque(f: Function) -> Function:
    """Left out of torch.compile's graphs, its type kept."""
    return torch.compiler.disable(f)  # type: ignore[return-value]


@opaque
def fused(
    *, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None = None, beta: Tensor | None = None,
    a: Tensor | None = None, b: Tensor | None = None, state: Tensor | None = None, read: Read = "after",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`recurrence` in one fla op: outputs [B,T,H,V] in v's dtype and the fp32 state [B,H,K,V], gradients for both.

    Opaque to torch.compile (a graph break, as fla's ops are anyway). Raises ValueError for tensors off the GPU, fp64,
    head dims that the op refuses, or an erasure read before it; ImportError where fla is missing.
    """
    B, T, H, K = k.shape
    V = v.shape[-1]
    dtype = compute_dtype(v)
    if q.device.type != DEVICE:
        raise ValueError(f'q is on {q.device}: fused kernels need CUDA tensors; use_kernels("auto") takes either')
    if dtype not in DTYPES:
        raise ValueError(f'v is {dtype}: fused kernels take fp32, bf16 or fp16; use_kernels("torch") takes it')
    family = family_of(k=k, v=v, log_decay=log_decay, beta=beta, a=a, read=read)
    if read == "before" and family != "before":
        raise ValueError(f'read="before" with {family}: no fused kernel reads before an erasure; use_kernels("torch")')
    triton, capability = machine(q.device)
    training = is_training(q, k, v, log_decay, beta, a, b, state)
    name, _ = path_of(family, triton=triton, capability=capability, training=training, dtype=dtype)
    if MAX_KEY_DIM.get(name, K) < K:
        raise ValueError(
            f"key_dim K={K} (value_dim V={V}): {name} takes K <= {MAX_KEY_DIM[name]}; use more, narrower heads, "
            'or use_kernels("torch")'
        )
    if family != "elementwise" and B * H > MAX_HEADS:
        raise ValueError(f"batch {B} x heads {H}: {name} takes at most {MAX_HEADS} together; split the batch")
    op = fla_op(name)
    if state is not None:
        state = state.float()
    if T == 0:
        return v.new_zeros(v.shape), k.new_zeros(B, H, K, V, dtype=torch.float32) if state is None else state
    g = k.new_zeros(1, dtype=torch.float32).expand(B, T, H, 1) if log_decay is None else log_decay.float()
    g = g.clamp(min=FLOOR)
    if family == "elementwise":
        out, final = _elementwise(op, q, k, v, g, state)
        return out.to(v.dtype), final

    wide, deep = -K % WIDTH, -V % WIDTH
    q, k = (_pad(x.to(dtype), wide) for x in (q, k))
    a, b = (None if x is None else _pad(x.to(dtype), wide) for x in (a, b))
    value = _pad(v.to(dtype), deep)
    if state is not None:
        state = _pad(state, deep, wide)
    if name in ("chunk_simple_gla", "chunk_gated_delta_rule"):
        g = g[..., 0]
    elif g.shape[-1] == 1:
        g = g.expand(B, T, H, K + wide)
    else:
        g = _pad(g, wide)
    terms: dict[str, Any] = {"k": k, "v": value, "scale": 1.0, "initial_state": state, "output_final_state": True}
    if name == "chunk_rwkv6":  # its bonus u is the mixer's affair
        terms |= {"r": q, "w": g, "u": k.new_zeros(H, K + wide)}
    elif name == "chunk_dplr_delta_rule":
        terms |= {"q": q, "a": a, "b": b, "gk": g}
    else:
        terms |= {"q": q} | ({} if name == "chunk_delta_rule" else {"g": g})
    if beta is not None:
        terms["beta"] = beta.to(dtype) if name == "chunk_delta_rule" else beta.float()
    with warnings.catch_warnings():
        if dtype == torch.float32:  # fla warns that other GPUs may not do it; our parity table has this one
            warnings.filterwarnings("ignore", message=".*does not support float32", category=RuntimeWarning)
        out, final = op(**terms)
    return out[..., :V].to(v.dtype), final[..., :K, :V]


def _pad(x: Tensor, last: int, other: int = 0) -> Tensor:
    """Zeros after the last dimension and the one before it; no copy where there are none to add."""
    return F.pad(x, (0, last, 0, other)) if last or other else x


def _elementwise(
    op: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """h_t = e^g_t h_{t-1} + k_t v_t per channel (heads are channels)."""
    x = (k.float() * v.float())[..., 0].contiguous()  # [B,T,H]
    h, final = op(
        x=x, g=g[..., 0].contiguous(), initial_state=None if state is None else state[..., 0, 0].contiguous(),
        output_final_state=True,
    )  # fmt: skip
    return (q.float()[..., 0] * h)[..., None], final[..., None, None]
