"""Softmax attention at a site, with its switches: every attention layer of every source goes through here.

Off, a switch costs one attribute test. On, caps become a window of the same fused call, knocked-out rows are
split off and redone, statistics are computed beside the fused call. Nothing falls back to eager attention.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .kernels.attention import ROWS, attention, visible
from .passes import View
from .sites import Site


def attend(
    site: Site, q: Tensor, k: Tensor, v: Tensor, *, view: View | None = None, scale: float | None = None,
    softcap: float | None = None, sink_logits: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Outputs z [B,T,H,V] of heads q [B,T,H,K] over k [B,S,G,K], v [B,S,G,V], under the site's switches."""
    where: dict[str, Any] = {} if view is None else view.where
    score: dict[str, Any] = {"scale": scale, "softcap": softcap, "sink_logits": sink_logits}
    z = attention(q=q, k=k, v=v, **score, **site.span, **where, newest=view is not None and view.newest)
    if site.knockout:
        z = _knock_out(site, z, q, k, v, view, **score)
    if site.tap is not None:
        site.tap(site, q, k, view, **score)
    return z if site.edit is None else site.edit(z, None if view is None else view.real)


def edges(site: Site, rows: Tensor, view: View | None, batch: int, keys: int) -> Tensor | None:
    """Edges that knockouts hide from the query columns `rows` [1 or B,R]: [B,R,1 or H,S]; None: none."""
    device = rows.device
    k_col = torch.arange(keys, device=device)[None] if view is None else view.k_col
    hidden = None
    for rows_out, keys_out, heads in site.knockout:
        if {rows_out.shape[0], keys_out.shape[0]} - {1, batch}:
            raise ValueError(
                f"knockout: rows for {rows_out.shape[0]} samples and keys for {keys_out.shape[0]}; "
                f"this call has {batch}"
            )
        row_hit = (rows[..., None] == rows_out.to(device)[:, None, :]).any(-1)  # [1 or B,R]
        mask = keys_out.to(device).expand(batch, -1)
        last = mask.shape[1] - 1
        key_hit = mask.gather(1, k_col.expand(batch, -1).clamp(max=last)) & (k_col <= last)
        edge = (row_hit[:, :, None] & key_hit[:, None, :])[:, :, None]
        if heads is not None:
            chosen = torch.zeros(site.heads, 1, dtype=torch.bool, device=device)
            chosen[list(heads)] = True
            edge = edge & chosen
        hidden = edge if hidden is None else hidden | edge
    return hidden


def _knock_out(site: Site, z: Tensor, q: Tensor, k: Tensor, v: Tensor, view: View | None, **score: Any) -> Tensor:
    """Redo the rows that a knockout names, ROWS at a time, without the edges it hides."""
    T = q.shape[1]
    columns = torch.arange(T, device=q.device)
    if view is None:
        view = View(columns[None], columns[None], columns[None], columns[None])
    columns = view.q_col[0]
    named = torch.cat([rows.flatten() for rows, _, _ in site.knockout]).to(q.device)
    local = torch.isin(columns, named).nonzero()[:, 0]
    if not local.numel():
        return z
    parts = []
    for rows in local.split(ROWS):
        hidden = edges(site, columns[rows][None], view, q.shape[0], k.shape[1])
        assert hidden is not None
        q_seg = None if view.q_seg is None else view.q_seg[:, rows]
        seen = visible(view.q_pos[:, rows], view.k_pos, **site.span, q_seg=q_seg, k_seg=view.k_seg)
        parts.append(_dense(q[:, rows], k, v, seen[:, :, None] & ~hidden, **score))
    return z.index_copy(1, local, torch.cat(parts, 1).to(z.dtype))


def _dense(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor, *, scale: float | None, softcap: float | None,
    sink_logits: Tensor | None,
) -> Tensor:  # fmt: skip
    """Softmax of a few rows q [B,R,H,K] over the keys in `seen` [B,R,1 or H,S]; zeros without any."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    keys, values = (x.repeat_interleave(q.shape[2] // k.shape[2], 2).to(dtype) for x in (k, v))
    scale = float(q.shape[-1] ** -0.5) if scale is None else scale
    scores = torch.einsum("brhk,bshk->brhs", q.to(dtype), keys) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen, -torch.inf)
    # One more key, of value zero: the learnable sink, or what takes the weight of a row that sees nothing.
    if sink_logits is not None:
        spare = sink_logits.to(dtype)[:, None].expand(*scores.shape[:-1], 1)
    else:
        spare = torch.zeros_like(scores[..., :1]).masked_fill(seen.any(-1, keepdim=True), -torch.inf)
    weights = torch.cat([scores, spare], -1).softmax(-1)[..., :-1]
    return torch.einsum("brhs,bshv->brhv", weights, values)
