"""Exact receptive-field caps for the recurrence of `recurrence.py`.

A window of w keeps, at token t, only the state written by tokens t-w+1..t:

    o_t = sum over i in (t-w, t] of (q_t . A_t ... A_{i+1} k_i) v_i

Time is cut into blocks of w; a window is a suffix of one block and a prefix of the next. The prefix is the
same recurrence restarted at every block. The suffix is undecayed linear attention between the query carried
back to its block's start, A_first^T ... A_t^T q_t, and the previous block's keys carried forward to that
block's end, A_last ... A_{i+1} k_i. Both transports are the recurrence itself, started from the identity; the
key's runs backwards in time with the transposed transition (a and b swapped). Tokens outside the window never
enter the arithmetic, so changing them changes nothing, bitwise. With read="before" (RWKV-6) the sum runs over
i < t, and the transitions end with A_{t-1}.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from .recurrence import Read, recurrence, recurrence_reference, without_autocast

BLOCK_ELEMENTS = 2**24  # elements of state that blocks processed together may hold


@without_autocast
def windowed_reference(
    *, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, a: Tensor | None = None, b: Tensor | None = None,
    window: int, read: Read = "after",
) -> Tensor:  # fmt: skip
    """The specification: at every position, restart the loop `window` tokens back. Returns [B,T,H,V]."""
    rows = []
    for t in range(q.shape[1]):
        span = slice(max(0, t - window + 1), t + 1)
        erase: dict[str, Any] = {} if a is None or b is None else {"a": a[:, span], "b": b[:, span]}
        out, _ = recurrence_reference(
            q=q[:, span], k=k[:, span], v=v[:, span], log_decay=log_decay[:, span], **erase, read=read
        )
        rows.append(out[:, -1])
    return torch.stack(rows, 1)


@without_autocast
def windowed(
    *, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, a: Tensor | None = None, b: Tensor | None = None,
    window: int, read: Read = "after",
) -> Tensor:  # fmt: skip
    """The same from blocks of `window` tokens, a slab of blocks at a time."""
    B, T, H, K = q.shape
    per_block = B * H * K * (K + v.shape[-1])
    slab = max(1, BLOCK_ELEMENTS // per_block) * window
    tensors: dict[str, Any] = {
        "q": q,
        "k": k,
        "v": v,
        "log_decay": log_decay,
        **({} if a is None or b is None else {"a": a, "b": b}),
    }
    outputs = []
    for start in range(0, T, slab):
        lead = window if start else 0  # the block before the slab supplies its first block's suffix
        part = {name: x[:, start - lead : start + slab] for name, x in tensors.items()}
        outputs.append(_slab(part, window, read)[:, lead:])
    return torch.cat(outputs, 1)


def _slab(tensors: dict[str, Any], window: int, read: Read) -> Tensor:
    B, T, H, K = tensors["q"].shape
    V = tensors["v"].shape[-1]
    blocks = -(-T // window)
    pad = blocks * window - T

    def fold(x: Tensor) -> Tensor:  # [B,T,H,D] -> [B*blocks,window,H,D]
        return torch.nn.functional.pad(x, (0, 0, 0, 0, 0, pad)).reshape(B * blocks, window, H, x.shape[-1])

    def unfold(x: Tensor) -> Tensor:  # -> [B,blocks,window,H,D]
        return x.view(B, blocks, window, H, x.shape[-1])

    f: dict[str, Any] = {name: fold(x) for name, x in tensors.items()}
    dtype = torch.promote_types(f["q"].dtype, torch.float32)
    eye = torch.eye(K, dtype=dtype, device=f["q"].device).expand(B * blocks, H, K, K)
    state = torch.cat([eye.new_zeros(B * blocks, H, K, V), eye], -1)
    values = torch.cat([f["v"].to(dtype), f["q"].new_zeros(*f["q"].shape, dtype=dtype)], -1)
    out, _ = recurrence(**{**f, "v": values}, state=state, read=read)
    prefix, query = out.split([V, K], -1)
    if blocks == 1:
        return prefix.view(B, window, H, V)[:, :T].to(f["v"].dtype)

    key = carried_keys(**{name: x for name, x in f.items() if name not in ("q", "v")})
    query, key, value = unfold(query)[:, 1:], unfold(key)[:, :-1], unfold(f["v"].to(dtype))[:, :-1]
    # Key i of the previous block is inside the window iff its offset exceeds the query's: strictly causal in
    # flipped time.
    suffix, _ = recurrence(
        q=query.flatten(0, 1).flip(1), k=key.flatten(0, 1).flip(1), v=value.flatten(0, 1).flip(1),
        log_decay=query.new_zeros(B * (blocks - 1), window, H, 1), read="before",
    )  # fmt: skip
    suffix = suffix.flip(1).view(B, blocks - 1, window, H, V)
    out = unfold(prefix)
    out = torch.cat([out[:, :1], out[:, 1:] + suffix], 1)
    return out.reshape(B, blocks * window, H, V)[:, :T].to(f["v"].dtype)


def carried_keys(*, k: Tensor, log_decay: Tensor, a: Tensor | None = None, b: Tensor | None = None) -> Tensor:
    """Keys carried to the end of the span: A_last ... A_{i+1} k_i for every i, [B,T,H,K], in fp32 or fp64."""
    return carried(k=k, log_decay=log_decay, a=a, b=b)[0]


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
    *, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, a: Tensor | None = None, b: Tensor | None = None,
    cap: int, conv: int = 1, read: Read = "after",
) -> Tensor:  # fmt: skip
    """The recurrence of a site whose *input* reach is `cap` tokens, a convolution of width `conv` included.

    Rows t < cap cannot see further anyway and are uncapped; rows t >= cap use the last cap - conv + 1 states.
    Raises ValueError where cap < conv.
    """
    check_cap(cap, conv)
    tensors: dict[str, Any] = {
        "q": q,
        "k": k,
        "v": v,
        "log_decay": log_decay,
        **({} if a is None or b is None else {"a": a, "b": b}),
    }
    head, _ = recurrence(**{name: x[:, :cap] for name, x in tensors.items()}, read=read)
    if q.shape[1] <= cap:
        return head
    window = cap - conv + 1
    # Row `cap` looks back to token conv: earlier tokens are nobody's business from here on.
    tail = windowed(**{name: x[:, conv:] for name, x in tensors.items()}, window=window, read=read)
    return torch.cat([head, tail[:, cap - conv :]], 1)


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
