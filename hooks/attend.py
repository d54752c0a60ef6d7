"""Softmax attention at a site, with its switches: every attention layer of every source goes through here.

Off, a switch costs one attribute test. On, caps become a window of the same fused call, knocked-out rows are split
off and redone, statistics are computed beside the fused call. Nothing falls back to eager attention.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .kernels.attention import attention, visible
from .passes import View
from .sites import Site


def attend(
    site: Site, q: Tensor, k: Tensor, v: Tensor, *, view: View | None = None, scale: float | None = None
) -> Tensor:
    """Per-head outputs z [B,T,H,V] of q [B,T,H,K] over k [B,S,G,K], v [B,S,G,V], under the site's switches."""
    where: dict[str, Any] = {} if view is None else {"q_pos": view.q_pos, "k_pos": view.k_pos}
    z = attention(q=q, k=k, v=v, scale=scale, **site.span, **where)
    if site.knockout:
        z = _knock_out(site, z, q, k, v, view, scale)
    if site.tap is not None:
        site.tap(site, q, k, view, scale)
    return z if site.edit is None else site.edit(z)


def edges(site: Site, rows: Tensor, view: View | None, batch: int, keys: int) -> Tensor | None:
    """Edges hidden by the site's knockouts, for all heads: [B,R,S,H-or-1]; None where there are none."""
    device = rows.device
    k_col = torch.arange(keys, device=device)[None] if view is None else view.k_col
    hidden = None
    for rows_out, keys_out, heads in site.knockout:
        row_hit = (rows[..., None] == rows_out.to(device)[:, None, :]).any(-1)  # [B,R]
        mask = keys_out.to(device)
        inside = k_col < mask.shape[1]
        both = max(mask.shape[0], k_col.shape[0])
        key_hit = mask.expand(both, -1).gather(1, k_col.expand(both, -1).clamp(max=mask.shape[1] - 1)) & inside
        edge = (row_hit[:, :, None] & key_hit[:, None, :])[..., None]
        if heads is not None:
            chosen = torch.zeros(site.heads, dtype=torch.bool, device=device)
            chosen[list(heads)] = True
            edge = edge & chosen
        edge = edge.expand(batch, -1, -1, -1)
        hidden = edge if hidden is None else hidden | edge
    return hidden


def _knock_out(
    site: Site, z: Tensor, q: Tensor, k: Tensor, v: Tensor, view: View | None, scale: float | None
) -> Tensor:
    """Redo the rows that a knockout names, without the edges it hides; the softmax renormalises over the rest."""
    B, T, H, K = q.shape
    columns = (torch.arange(T, device=q.device) if view is None else view.q_col[0]).tolist()
    wanted = {c for rows, _, _ in site.knockout for c in rows.flatten().tolist()}
    local = torch.tensor([t for t, c in enumerate(columns) if c in wanted], dtype=torch.int64, device=q.device)
    if not local.numel():
        return z
    pos = torch.arange(T, device=q.device)[None]
    q_pos, k_pos = (pos, pos) if view is None else (view.q_pos, view.k_pos)
    rows = torch.tensor(columns, device=q.device)[local][None]
    hidden = edges(site, rows, view, B, k.shape[1])
    assert hidden is not None
    seen = visible(q_pos[:, local], k_pos, **site.span)
    group = H // k.shape[2]
    dtype = torch.promote_types(q.dtype, torch.float32)
    keys, values = (x.repeat_interleave(group, 2).to(dtype) for x in (k, v))
    scores = torch.einsum("brhk,bshk->brsh", q[:, local].to(dtype), keys) * (K**-0.5 if scale is None else scale)
    scores = scores.masked_fill(~(seen[..., None] & ~hidden), -torch.inf)
    weights = scores.softmax(2).nan_to_num(0.0)  # a row that loses every key reads nothing
    redone = torch.einsum("brsh,bshv->brhv", weights, values).to(z.dtype)
    return z.index_copy(1, local, redone)
