"""Softmax attention: `full` (RoPE), `nope` (no positions), `swa:W` (RoPE, the last W keys, self included).

Grouped KV heads (arXiv 2305.13245), optional RMS norm on q and k before RoPE (arXiv 2302.05442).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformer_lens.hook_points import HookPoint

from ..attend import attend
from ..config import KINDS, HybridConfig, Slot, parse_mixer
from ..passes import Pass, Shapes
from ..sites import Site
from .layers import RMSNorm, rope


class Attention(nn.Module):
    """x [B,T,D] -> [B,T,D]. Cache: keys and values, 2 G K bytes-per-value per token (W of them for swa)."""

    def __init__(self, config: HybridConfig, slot: Slot) -> None:
        super().__init__()
        mixer, window = parse_mixer(slot.mixer)
        H, G, K, D = slot.heads, slot.kv_heads, slot.head_dim, config.d_model
        self.site = Site(
            layer=slot.layer, index=slot.index, name=slot.name, kind=KINDS[mixer], mixer=slot.mixer, heads=H,
            kv_heads=G, key_dim=K, value_dim=K, window=window, rope=mixer != "nope",
        )  # fmt: skip
        self.rope_base = config.rope_base
        self.q_proj = nn.Linear(D, H * K, bias=False)
        self.k_proj = nn.Linear(D, G * K, bias=False)
        self.v_proj = nn.Linear(D, G * K, bias=False)
        self.o_proj = nn.Linear(H * K, D, bias=False)
        self.q_norm = RMSNorm(K, config.norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(K, config.norm_eps) if config.qk_norm else nn.Identity()
        self.hook_q, self.hook_k, self.hook_v, self.hook_z = (
            HookPoint(),
            HookPoint(),
            HookPoint(),
            HookPoint(),
        )
        if self.site.rope:
            self.hook_rot_q, self.hook_rot_k = HookPoint(), HookPoint()

    def forward(self, x: Tensor, run: Pass) -> Tensor:
        site = self.site
        q = self.q_norm(self.hook_q(self.q_proj(x).unflatten(-1, (site.heads, site.key_dim))))
        k = self.k_norm(self.hook_k(self.k_proj(x).unflatten(-1, (site.kv_heads, site.key_dim))))
        v = self.hook_v(self.v_proj(x).unflatten(-1, (site.kv_heads, site.value_dim)))
        position = run.positions(site)
        if site.rope:
            q = self.hook_rot_q(rope(q, position, self.rope_base, run))
            k = self.hook_rot_k(rope(k, position, self.rope_base, run))
        k, v, view = run.attend_to(site, k, v, position)
        z = self.hook_z(attend(site, q, k, v, view=view))
        return self.o_proj(z.flatten(-2))

    def cached(self, batch: int) -> dict[str, Shapes]:
        """What a cache of this site holds."""
        site = self.site
        keys, values = (batch, site.kv_heads, site.key_dim), (batch, site.kv_heads, site.value_dim)
        return {site.name: {"keys": keys, "values": values}}

    @torch.no_grad()
    def init_weights(self, std: float) -> None:
        for linear in (self.q_proj, self.k_proj, self.v_proj, self.o_proj):
            nn.init.normal_(linear.weight, std=std)
