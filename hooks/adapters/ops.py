"""The ops that recurrent mixers of transformers models call, as the one recurrence of `kernels/recurrence.py`.

An op is recognised by the names and shapes of what it is given, not by the model it belongs to: the gated delta rule
(GDN with a decay per head, KDA with one per channel; arXiv 2412.06464, 2510.26692), the scans of Mamba-2 and Mamba
(2405.21060, 2312.00752) and that of the RG-LRU (2402.19427). Each has a form for whole sequences and one for a token.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Arguments = dict[str, Any]
# Names that packages use for the same argument, and the one used here.
ALIASES = {"q": "query", "k": "key", "v": "value", "x": "hidden_states", "u": "hidden_states", "delta": "dt"}


@dataclasses.dataclass
class Read:
    """One call of an op: which recurrence it is, its terms [B,T,H,...] in fp32 (k with all heads, `key_heads` of them
    of their own), whether it starts from nothing, and how outputs [B,T,H,V] become what the op returns.

    `write` [B,T,H]: a factor inside the values, see `kernels/implicit_stats.py`. `dtype`: of the inputs, where the op
    has 16-bit kernels (None: it scans in fp32). `time`: the axis of tokens in what the op returns.
    """

    mixer: str
    terms: dict[str, Tensor]
    key_heads: int
    fresh: bool
    answer: Callable[[Tensor], Any]
    write: Tensor | None = None
    dtype: torch.dtype | None = None
    time: int = 1


@dataclasses.dataclass(frozen=True)
class Op:
    """An op: the arguments that give it away, and how to read a call of it."""

    needs: frozenset[str]
    read: Callable[[Arguments], Read]


def op_of(function: Any) -> Op | None:
    """The op that `function` is, by the names of its parameters; None where it is none of these."""
    if not callable(function) or isinstance(function, type):
        return None
    try:
        given = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return None
    names = {ALIASES.get(name, name) for name in given}
    return next((op for op in OPS if op.needs <= names), None)


def arguments(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """What a call gives, by name; defaults included."""
    bound = inspect.signature(function).bind(*args, **kwargs)
    bound.apply_defaults()
    found: Arguments = {}
    for name, parameter in bound.signature.parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            found.update(bound.arguments.get(name, {}))
        else:
            found[ALIASES.get(name, name)] = bound.arguments[name]
    return found


def wide(*tensors: Tensor) -> list[Tensor]:
    """In fp32, or fp64 where they are."""
    return [x.to(torch.promote_types(x.dtype, torch.float32)) for x in tensors]


def _no_state(like: Tensor, *shape: int) -> Tensor:
    """What a capped op hands on as its state: there is no single one, so whoever reads this reads NaN."""
    return like.new_full(shape, torch.nan)


def _delta_rule(a: Arguments) -> Read:
    if a.get("cu_seqlens") is not None or a.get("use_gate_in_kernel"):
        raise ValueError("cu_seqlens and use_gate_in_kernel have no meaning under caps and statistics")
    dtype = a["query"].dtype
    q, k, v, g, beta = wide(a["query"], a["key"], a["value"], a["g"], a["beta"])
    key_heads, (B, _, H, V) = k.shape[2], v.shape
    q, k = (x.repeat_interleave(H // key_heads, 2) for x in (q, k))
    if a.get("use_qk_l2norm_in_kernel"):
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    scale = a.get("scale") or q.shape[-1] ** -0.5
    scalar = g.ndim == 3
    terms = {"q": q * scale, "k": k, "v": v, "log_decay": g[..., None] if scalar else g, "beta": beta}

    def answer(out: Tensor) -> tuple[Tensor, Tensor | None]:
        state = _no_state(out.float(), B, H, k.shape[-1], V) if a.get("output_final_state") else None
        return out.to(dtype), state

    return Read("gdn" if scalar else "kda", terms, key_heads, a.get("initial_state") is None, answer, dtype=dtype)


def _step(a: Arguments, bias: str, softplus: str) -> Tensor:
    dt = a["dt"]
    if a.get(bias) is not None:
        dt = dt + a[bias].to(dt.dtype).view(-1, *[1] * (1 if bias == "delta_bias" else 0))
    return F.softplus(dt) if a.get(softplus) else dt


def _gated(out: Tensor, z: Tensor | None) -> Tensor:
    return out if z is None else out * F.silu(z)


def _ssm_scan(a: Arguments) -> Read:
    """Mamba-2: x [B,T,H,V], dt [B,T,H], A [H], B and C [B,T,G,K]. Mamba, where A is [C,K] (every channel a head):
    x, dt, z [B,C,T], B and C [B,K,T]."""
    last = bool(a.get("return_final_states") or a.get("return_last_state"))
    if a["A"].ndim == 1:
        dt = _step(a, "dt_bias", "dt_softplus").clamp(*a.get("dt_limit", (0.0, float("inf"))))
        x, dt, A, b, c = wide(a["hidden_states"], dt, a["A"], a["B"], a["C"])
        groups, (B, _, H, V) = b.shape[2], x.shape
        b, c = (y.repeat_interleave(H // groups, 2) for y in (b, c))
        terms = {"q": c, "k": b, "v": dt[..., None] * x, "log_decay": (A * dt)[..., None]}
        skip = 0 if a.get("D") is None else a["D"][..., None] * x

        def answer(out: Tensor) -> Any:
            out = _gated(out + skip, a.get("z")).contiguous()
            return (out, _no_state(out, B, H, V, b.shape[-1])) if last else out

        dtype = a["hidden_states"].dtype
        return Read("mamba2", terms, groups, a.get("initial_states") is None, answer, write=dt, dtype=dtype)

    x, dt, A, b, c = wide(a["hidden_states"], _step(a, "delta_bias", "delta_softplus"), a["A"], a["B"], a["C"])
    terms, write = _channels(x.transpose(1, 2), dt.transpose(1, 2), A, b.transpose(1, 2), c.transpose(1, 2))

    def answer_channels(out: Tensor) -> Any:
        out = out[..., 0].transpose(1, 2)
        out = out if a.get("D") is None else out + x * a["D"][:, None]
        out = _gated(out, a.get("z"))
        return (out, _no_state(out, x.shape[0], *A.shape)) if last else out

    return Read("mamba", terms, 1, True, answer_channels, write=write, time=2)


def _ssm_token(a: Arguments) -> Read:
    """One token. Mamba-2: x, dt [B,H,V], A [H,V,K], B and C [B,G,K]; Mamba: x, dt [B,C], A [C,K], B and C [B,K]."""
    dtype = a["hidden_states"].dtype
    dt = a["dt"] if a.get("dt_bias") is None else a["dt"] + a["dt_bias"].to(a["dt"].dtype)
    dt = F.softplus(dt) if a.get("dt_softplus") else dt
    x, dt, A, b, c = wide(a["hidden_states"], dt, a["A"], a["B"], a["C"])
    if x.ndim == 3:
        groups, H = b.shape[1], x.shape[1]
        b, c = (y.repeat_interleave(H // groups, 1)[:, None] for y in (b, c))
        terms = {"q": c, "k": b, "v": (dt * x)[:, None], "log_decay": (A[:, 0, 0] * dt[..., 0])[:, None, :, None]}
        mixer, write = "mamba2", dt[:, None, :, 0]
    else:
        groups, mixer = 1, "mamba"
        terms, write = _channels(x[:, None], dt[:, None], A, b[:, None], c[:, None])

    def answer(out: Tensor) -> Tensor:
        out = out[:, 0] if x.ndim == 3 else out[:, 0, :, 0]
        out = out if a.get("D") is None else out + x * a["D"]
        return _gated(out, a.get("z")).to(dtype)

    return Read(mixer, terms, groups, False, answer, write=write)


def _channels(x: Tensor, dt: Tensor, A: Tensor, b: Tensor, c: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """x, dt [B,T,C], A [C,K], b, c [B,T,K] as C heads of one value channel."""
    q, k = (y[:, :, None].expand(-1, -1, A.shape[0], -1) for y in (c, b))
    return {"q": q, "k": k, "v": (dt * x)[..., None], "log_decay": dt[..., None] * A}, dt


def _rg_lru(a: Arguments) -> Read:
    """x, gate [B,T,C], reset [B,T,1]: every channel is a head of one key and one value channel."""
    dtype = a["hidden_states"].dtype
    x, gate = wide(a["hidden_states"], a["recurrent_gate"])
    one = torch.ones_like(x)[..., None]
    decay = gate.log().masked_fill(a["reset"], -torch.inf)
    terms = {"q": one, "k": one, "v": x[..., None], "log_decay": decay[..., None]}
    fresh = a.get("recurrent_states") is None or bool(a["reset"][:, 0].all())

    def answer(out: Tensor) -> tuple[Tensor, Tensor]:
        return out[..., 0].to(dtype), _no_state(x, x.shape[0], x.shape[-1])

    return Read("hawk", terms, x.shape[-1], fresh, answer)


OPS = (
    Op(frozenset({"query", "key", "value", "g", "beta"}), _delta_rule),
    Op(frozenset({"state", "hidden_states", "dt", "A", "B", "C"}), _ssm_token),
    Op(frozenset({"hidden_states", "dt", "A", "B", "C"}), _ssm_scan),
    Op(frozenset({"hidden_states", "recurrent_gate", "reset"}), _rg_lru),
)
