"""Exact receptive-field caps for the recurrence of `recurrence.py`.

A window of w keeps, at token t, only the state written by tokens t-w+1..t:

    o_t = sum over i in (t-w, t] of (q_t . A_t ... A_{i+1} k_i) v_i

Time is cut into blocks of w; a window is a suffix of one block and a prefix of the next. The prefix is the
same recurrence restarted at every block. The suffix is undecayed linear attention between the query carried
back to its block's start, A_first^T ... A_t^T q_t, and the previous block's keys carried forward to that
block's end, A_last ... A_{i+1} k_i. Without erasure a transport is a product with decays. With it, it is the
recurrence itself, started from the identity; the key's runs backwards in time with the transposed transition.
Tokens outside the window never enter the arithmetic, so changing them changes nothing, bitwise. With
read="before" (RWKV-6) the sum runs over i < t, and the transitions end with A_{t-1}.

Prefixes and transports go through `dispatch.recur`: the mixer's own fused op on CUDA, blocks in the place of a batch.
The suffix does too on the torch path; on the fused one it is a kernel of ours (earlier_block.py), which needs nothing
turned round and adds it to the prefix.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import fused
from .dispatch import choose, recur
from .earlier_block import MAX_WIDTH, earlier_block
from .recurrence import Read, recurrence, recurrence_reference, without_autocast

BLOCK_ELEMENTS = 2**24  # elements of state that blocks processed together may hold, on the torch path
FUSED_ELEMENTS = 2**27  # ... and in fused kernels: 0.5 GiB, 128 blocks of 16 heads of 128 x (128 + 128)
Terms = dict[str, Any]


@without_autocast
def windowed_reference(
    *, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None = None, beta: Tensor | None = None,
    a: Tensor | None = None, b: Tensor | None = None, window: int, read: Read = "after",
) -> Tensor:  # fmt: skip
    """The specification: at every position, restart the loop `window` tokens back. Returns [B,T,H,V]."""
    terms = _given(q=q, k=k, v=v, log_decay=log_decay, beta=beta, a=a, b=b)
    rows = []
    for t in range(q.shape[1]):
        span = slice(max(0, t - window + 1), t + 1)
        out, _ = recurrence_reference(**{name: x[:, span] for name, x in terms.items()}, read=read)
        rows.append(out[:, -1])
    return torch.stack(rows, 1)


def windowed(
    *, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None = None, beta: Tensor | None = None,
    a: Tensor | None = None, b: Tensor | None = None, window: int, read: Read = "after",
) -> Tensor:  # fmt: skip
    """The same from blocks of `window` tokens, a slab of blocks at a time, on the path that the policy chooses."""
    B, T, H, K = q.shape
    terms = _given(q=q, k=k, v=v, log_decay=log_decay, beta=beta, a=a, b=b)
    family, path, dtype = _path(terms, read)
    per_block = B * H * K * (v.shape[-1] + (0 if _diagonal(terms) else K))
    blocks = (FUSED_ELEMENTS if path == "fused" else BLOCK_ELEMENTS) // per_block
    if path == "fused":
        terms = {name: x.to(dtype) if name in "qkvab" else x for name, x in terms.items()}
        if family != "elementwise":
            blocks = min(blocks, fused.MAX_HEADS // (B * H) - 1)  # one more leads each slab
    slab = max(1, blocks) * window
    own = path == "fused" and family != "elementwise" and max(K, v.shape[-1]) <= MAX_WIDTH
    outputs = []
    for start in range(0, T, slab):
        lead = window if start else 0  # the block before the slab supplies its first block's suffix
        part = {name: x[:, start - lead : start + slab] for name, x in terms.items()}
        outputs.append(_slab(**part, window=window, read=read, dtype=dtype, own=own)[:, lead:])
    out = outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1)
    return out.to(v.dtype)


@without_autocast
def _slab(*, window: int, read: Read, dtype: torch.dtype, own: bool, **terms: Any) -> Tensor:
    """`windowed` on a few blocks together, transported queries and keys in `dtype`; `own`: suffixes by our kernel."""
    B, T, H, K = terms["q"].shape
    V, N = terms["v"].shape[-1], -(-T // window)

    def cut(x: Tensor) -> Tensor:  # [B,T,H(,D)] -> [B,N,window,H(,D)]
        pad = N * window - T
        return (F.pad(x, (0, 0) * (x.ndim - 2) + (0, pad)) if pad else x).unflatten(1, (N, window))

    blocks = {name: cut(x) for name, x in terms.items()}
    blocks["v"] = values = blocks["v"].to(dtype)
    if N == 1 or window == 1:
        return _run(blocks, read).flatten(1, 2)[:, :T]
    earlier = {name: x[:, :-1] for name, x in blocks.items()}
    if _diagonal(terms):
        prefix = _run(blocks, read)
        if own and blocks["log_decay"].shape[-1] == 1:  # transports are numbers, for the kernel to multiply with
            decay = _wide(blocks["log_decay"])[..., 0].transpose(2, 3).contiguous()  # a scan likes its axis last
            to = (F.pad(decay[..., :-1], (1, 0)) if read == "before" else decay).cumsum(-1)
            left = F.pad(decay[:, :-1, :, 1:].flip(-1), (1, 0)).cumsum(-1).flip(-1)
            out = earlier_block(
                base=prefix, q=blocks["q"].to(dtype), k=earlier["k"].to(dtype), v=earlier["v"],
                q_scale=to.exp().transpose(2, 3), k_scale=left.exp().transpose(2, 3),
            )  # fmt: skip
            return out.flatten(1, 2)[:, :T]
        through = _wide(blocks["log_decay"]).cumsum(2)
        if read == "before":
            through = F.pad(through[:, :, :-1], (0, 0, 0, 0, 1, 0))
        query = (blocks["q"] * through.exp()).to(dtype)
    else:  # one scan for both: values [v | 0] onto the state [0 | identity]
        identity = F.pad(torch.eye(K, dtype=_wide(values[:0]).dtype, device=values.device), (V, 0))
        out = _run({**blocks, "v": F.pad(values, (0, K))}, read, identity.repeat(B * N, H, 1, 1))
        prefix, query = out[..., :V], out[..., V:].to(dtype)
    beta = earlier.get("beta")
    if own:
        keys = _carried(earlier, dtype)
        out = earlier_block(base=prefix, q=query, k=keys, v=earlier["v"], k_scale=beta, reversed_keys=True)
        return out.flatten(1, 2)[:, :T]
    # Key i of the previous block is inside the window iff its offset exceeds the query's: strictly causal in
    # reversed time, where keys and values come one step late.
    value = earlier["v"] if beta is None else (beta[..., None] * earlier["v"]).to(dtype)
    key = _carried(earlier, dtype, late=1)
    suffix = _run({"q": _back(query[:, 1:]), "k": key, "v": _back(value, 1)})
    out = torch.cat([prefix[:, :1], prefix[:, 1:] + _back(suffix)], 1)
    return out.flatten(1, 2)[:, :T]


def _run(blocks: Terms, read: Read = "after", state: Tensor | None = None) -> Tensor:
    """The recurrence on every block by itself: [B,N,w,H,V]."""
    B, N = blocks["q"].shape[:2]
    out, _ = recur(**{name: x.flatten(0, 1) for name, x in blocks.items()}, read=read, state=state)
    return out.unflatten(0, (B, N))


def _back(x: Tensor, late: int = 0) -> Tensor:
    """Blocks [B,N,w,...] in reversed time, `late` steps late: zeros, then the last token, the one before it ..."""
    if not late:
        return x.flip(2)
    w = x.shape[2]
    order = (w - 1 + late - torch.arange(w, device=x.device)).clamp(max=w - 1)
    x = x.index_select(2, order)
    x[:, :, :late] = 0
    return x


def _carried(blocks: Terms, dtype: torch.dtype, late: int = 0) -> Tensor:
    """Keys carried to the end of their blocks, A_last ... A_{i+1} k_i, in reversed time and `late` steps late.

    Reversed time meets the transitions of the tokens after i one step before i. For A = (I - beta k k^T) diag(alpha),
    the transposed transition erases before it decays: the decay of a token goes with the next one's erasure, and the
    last decay onto the key that is read.
    """
    key, decay = _back(blocks["k"], late), blocks.get("log_decay")
    moved = {name: _back(x, late + 1) for name, x in blocks.items() if name not in ("q", "v")}
    if _diagonal(blocks):
        return (key * _wide(moved["log_decay"]).cumsum(2).exp()).to(dtype)
    if "a" in moved:
        moved["a"], moved["b"] = moved["b"], moved["a"]
    elif decay is not None and decay.shape[-1] > 1:
        key, moved["log_decay"] = key * moved["log_decay"].exp(), _back(decay, late + 2)
    B, N, _, H, K = key.shape
    identity = torch.eye(K, dtype=torch.promote_types(dtype, torch.float32), device=key.device)
    key = key.to(dtype)
    return _run({**moved, "q": key, "v": torch.zeros_like(key)}, state=identity.repeat(B * N, H, 1, 1))


def _diagonal(terms: Terms) -> bool:
    """Whether nothing is erased."""
    return "beta" not in terms and "a" not in terms


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _given(**terms: Tensor | None) -> Terms:
    """The arguments that are there; zero decays where there is neither decay nor erasure."""
    given = {name: x for name, x in terms.items() if x is not None}
    if _diagonal(given) and "log_decay" not in given:
        given["log_decay"] = torch.zeros_like(_wide(given["k"][..., :1]))
    return given


def _path(terms: Terms, read: Read) -> tuple[fused.Family, str, torch.dtype]:
    """The family, the path it takes, and the dtype that transported queries and keys are kept in."""
    what = {name: terms.get(name) for name in ("log_decay", "beta", "a")}
    family = fused.family_of(k=terms["k"], v=terms["v"], **what, read=read)
    dtype = fused.compute_dtype(terms["v"])
    path, _ = choose(family, terms["k"].device, dtype)
    if path == "torch" or family == "elementwise":
        dtype = torch.promote_types(terms["k"].dtype, torch.float32)
    return family, path, dtype


def carried_keys(
    *, k: Tensor, log_decay: Tensor | None = None, beta: Tensor | None = None, a: Tensor | None = None,
    b: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Keys carried to the end of the span: A_last ... A_{i+1} k_i for every i, [B,T,H,K], in fp32 or fp64."""
    terms = _given(k=k, log_decay=log_decay, beta=beta, a=a, b=b)
    _, _, dtype = _path({**terms, "v": k}, "after")
    keys = _one_block(**terms, dtype=dtype)
    return keys.to(torch.promote_types(k.dtype, torch.float32))


@without_autocast
def _one_block(*, dtype: torch.dtype, **terms: Tensor) -> Tensor:
    return _back(_carried({name: x[:, None] for name, x in terms.items()}, dtype))[:, 0]


@without_autocast
def carried(*, k: Tensor, log_decay: Tensor, a: Tensor | None = None, b: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The carried keys, and the map that carries a query from the span's end back to its start, A_first^T ... A_last^T
    [B,H,K,K]."""
    dtype = torch.promote_types(k.dtype, torch.float32)
    B, _, H, K = k.shape
    none = torch.zeros_like(k, dtype=dtype)
    erase: dict[str, Any] = {} if a is None or b is None else {"a": b.flip(1), "b": a.flip(1)}
    out, back = recurrence(
        q=k.to(dtype).flip(1), k=none, v=none, log_decay=log_decay.flip(1), **erase,
        state=torch.eye(K, dtype=dtype, device=k.device).expand(B, H, K, K), read="before",
    )  # fmt: skip
    return out.flip(1), back


def capped(
    *, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None = None, beta: Tensor | None = None,
    a: Tensor | None = None, b: Tensor | None = None, cap: int, conv: int = 1, read: Read = "after",
) -> Tensor:  # fmt: skip
    """The recurrence of a site whose *input* reach is `cap` tokens, a convolution of width `conv` included.

    Rows t < cap cannot see further anyway and are uncapped; rows t >= cap use the last cap - conv + 1 states.
    Raises ValueError where cap < conv.
    """
    check_cap(cap, conv)
    window = cap - conv + 1
    terms = _given(q=q, k=k, v=v, log_decay=log_decay, beta=beta, a=a, b=b)
    if q.shape[1] <= cap:
        return recur(**terms, read=read)[0]
    out = windowed(**terms, window=window, read=read)
    if window == cap:
        return out
    head, _ = recur(**{name: x[:, :cap] for name, x in terms.items()}, read=read)
    return torch.cat([head[:, :cap], out[:, cap:]], 1)


def check_cap(cap: int, conv: int) -> None:
    """ValueError for a cap that is smaller than the convolution inside it."""
    if cap < conv:
        raise ValueError(f"cap={cap}: smaller than the site's convolution width {conv}; expected cap >= {conv}")


@dataclasses.dataclass
class Ring:
    """What decoding under a cap keeps: the last `cap` keys, carried to now, and values; [B,H,n,K], [B,H,n,V].

    `seen` [B] counts the row's tokens so far. Padding entries are zero and do nothing.
    """

    cap: int
    conv: int
    keys: Tensor
    values: Tensor
    seen: Tensor

    @without_autocast
    def step(
        self, *, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, a: Tensor | None = None, b: Tensor | None = None,
        real: Tensor | None = None, read: Read = "after",
    ) -> Tensor:  # fmt: skip
        """One token, q [B,H,K] ...: decay and erase the kept keys, add the new one, read. Returns [B,H,V]."""
        dtype = self.keys.dtype
        carried = log_decay.to(dtype).exp()[:, :, None] * self.keys
        if a is not None and b is not None:
            erased = torch.einsum("bhk,bhnk->bhn", a.to(dtype), self.keys)
            carried = carried + erased[..., None] * b.to(dtype)[:, :, None]
        keys = torch.cat([carried, k.to(dtype)[:, :, None]], 2)[:, :, -self.cap :]
        values = torch.cat([self.values, v.to(dtype)[:, :, None]], 2)[:, :, -self.cap :]
        n = keys.shape[2]
        age = torch.arange(n - 1, -1, -1, device=q.device)
        use = (age < self.cap - self.conv + 1) | (self.seen < self.cap)[:, None]  # [B,n]
        seen = keys
        if read == "before":  # the state before this token: its keys as they were, without the new one
            seen = torch.cat([self.keys, torch.zeros_like(k, dtype=dtype)[:, :, None]], 2)[:, :, -self.cap :]
        weights = torch.einsum("bhk,bhnk->bhn", q.to(dtype), seen).masked_fill(~use[:, None], 0)
        out = torch.einsum("bhn,bhnv->bhv", weights, values).to(v.dtype)
        if real is None:
            self.keys, self.values, self.seen = keys, values, self.seen + 1
        else:
            old_keys = torch.nn.functional.pad(self.keys, (0, 0, n - self.keys.shape[2], 0))
            old_values = torch.nn.functional.pad(self.values, (0, 0, n - self.values.shape[2], 0))
            self.keys = torch.where(real[:, None, None, None], keys, old_keys)
            self.values = torch.where(real[:, None, None, None], values, old_values)
            self.seen = self.seen + real
        return out
