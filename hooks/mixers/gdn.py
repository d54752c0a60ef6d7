"""Gated DeltaNet (arXiv 2412.06464): a state that decays and erases before it writes.

    S_t = alpha_t (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T,   o_t = S_t^T q_t / sqrt(K)

In the reference recurrence: log_decay = log alpha (one scalar a head), a = k, b = -alpha beta k, v -> beta v.
State: H K V numbers a sequence, whatever its length, and c-1 inputs of the convolution.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformer_lens.hook_points import HookPoint

from ..config import HybridConfig
from ..kernels.recurrence import recurrence
from ..kernels.windowed import Ring, capped, carried_keys, check_cap
from ..passes import Pass, StateCache
from ..sites import Site
from .layers import RMSNorm, ShortConv


class GatedDeltaNet(nn.Module):
    """x [B,T,D] -> [B,T,D]. Options: heads, value_heads (a multiple), key_dim, value_dim (2 key_dim), conv
    (4), negative_eigenvalues (beta in [0, 2], arXiv 2411.12537).

    `hook_state` fires with the state after the call's last token: overwriting it changes cached calls that
    follow. Under a cap there is no single state, and it does not fire."""

    def __init__(self, config: HybridConfig, layer: int) -> None:
        super().__init__()
        o = config.options("gdn")
        D = config.d_model
        self.key_heads = o["heads"] or config.n_heads
        H = o["value_heads"] or self.key_heads
        K = o["key_dim"] or config.head_dim
        assert K is not None
        V = o["value_dim"] or 2 * K
        if H % self.key_heads:
            raise ValueError(f"mixers: gdn value_heads={H} must be a multiple of heads={self.key_heads}")
        self.site = Site(
            layer=layer, name=f"blocks.{layer}.attn", kind="recurrent", mixer="gdn", heads=H,
            kv_heads=H, key_dim=K, value_dim=V, conv=o["conv"],
        )  # fmt: skip
        self.beta_scale = 2.0 if o["negative_eigenvalues"] else 1.0
        self.q_proj = nn.Linear(D, self.key_heads * K, bias=False)
        self.k_proj = nn.Linear(D, self.key_heads * K, bias=False)
        self.v_proj = nn.Linear(D, H * V, bias=False)
        self.gate_proj = nn.Linear(D, H * V, bias=False)
        self.beta_proj = nn.Linear(D, H, bias=False)
        self.decay_proj = nn.Linear(D, H, bias=False)
        self.decay_rate = nn.Parameter(torch.empty(H))  # log of the rate
        self.decay_bias = nn.Parameter(torch.empty(H))
        self.conv = ShortConv(2 * self.key_heads * K + H * V, o["conv"])
        self.out_norm = RMSNorm(V, config.norm_eps)
        self.o_proj = nn.Linear(H * V, D, bias=False)
        self.hook_q, self.hook_k, self.hook_v, self.hook_z = (
            HookPoint(),
            HookPoint(),
            HookPoint(),
            HookPoint(),
        )
        self.hook_beta, self.hook_log_decay, self.hook_state = HookPoint(), HookPoint(), HookPoint()

    def forward(self, x: Tensor, run: Pass) -> Tensor:
        site = self.site
        H, K, V = site.heads, site.key_dim, site.value_dim
        cache = run.cache.sites.get(site.name) if run.cache is not None else None
        assert cache is None or isinstance(cache, StateCache)
        projected = run.compact(torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x)], -1))
        mixed = run.restore(self.conv(projected, None if cache is None else cache.conv))
        q, k, v = mixed.split([self.key_heads * K, self.key_heads * K, H * V], -1)
        repeat = H // self.key_heads
        q, k = (F.normalize(y.unflatten(-1, (self.key_heads, K)), dim=-1).repeat_interleave(repeat, 2) for y in (q, k))
        q, k, v = self.hook_q(q), self.hook_k(k), self.hook_v(v.unflatten(-1, (H, V)))
        beta = self.hook_beta(self.beta_scale * self.beta_proj(x).sigmoid())  # [B,T,H]
        wide = torch.promote_types(x.dtype, torch.float32)
        rate = self.decay_rate.to(wide).exp()
        log_decay = self.hook_log_decay(-rate * F.softplus(self.decay_proj(x).to(wide) + self.decay_bias))

        decay = log_decay[..., None]
        tensors: dict[str, Any] = {
            "q": q * K**-0.5, "k": k, "v": beta[..., None] * v, "log_decay": decay,
            "a": k, "b": -decay.exp() * beta[..., None] * k,
        }  # fmt: skip
        tensors = {name: run.mute(run.compact(y)) for name, y in tensors.items()}
        out = run.restore(self._mix(tensors, projected, run, cache))
        z = self.out_norm(out) * F.silu(self.gate_proj(x).unflatten(-1, (H, V)))
        z = self.hook_z(z if site.edit is None else site.edit(z, run.real))
        return self.o_proj(z.flatten(-2))

    def _mix(self, tensors: dict[str, Any], projected: Tensor, run: Pass, cache: StateCache | None) -> Tensor:
        """The recurrence under the site's cap, on compacted tensors; leaves the site's cache up to date."""
        site = self.site
        state = ring = None
        if site.cap is None:
            out, state = recurrence(**tensors, state=None if cache is None else cache.state)
            state = self.hook_state(state)
        elif cache is not None and cache.ring is not None:
            ring = cache.ring
            steps = [
                ring.step(
                    **{name: y[:, t] for name, y in tensors.items()},
                    real=None if run.real is None else t < run.count,
                )
                for t in range(run.length)
            ]
            out = torch.stack(steps, 1)
        else:
            check_cap(site.cap, site.conv)
            if run.length <= site.cap:
                out, state = recurrence(**tensors)
            else:
                out = capped(**tensors, cap=site.cap, conv=site.conv)
            if run.cache is not None:
                ring = self._ring(tensors, run, site.cap)
        if run.cache is not None:
            conv = run.last(projected, site.conv - 1, None if cache is None else cache.conv)
            run.cache.sites[site.name] = StateCache(state, ring, conv, site.cap)
        return out

    def _ring(self, tensors: dict[str, Any], run: Pass, cap: int) -> Ring:
        tail = {name: run.last(y, min(cap, run.length)) for name, y in tensors.items() if name != "q"}
        value = tail.pop("v")
        keys = carried_keys(**tail)
        seen = run.count.expand(value.shape[0])
        return Ring(cap, self.site.conv, keys.transpose(1, 2), value.to(keys.dtype).transpose(1, 2), seen)

    @torch.no_grad()
    def init_weights(self, std: float) -> None:
        inputs = (self.q_proj, self.k_proj, self.v_proj, self.gate_proj, self.beta_proj, self.decay_proj)
        for linear in (*inputs, self.o_proj):
            nn.init.normal_(linear.weight, std=std)
        self.conv.init_weights()
        # As published: rates uniform in [1, 16], time steps log-uniform in [1e-3, 1e-1] through the softplus.
        self.decay_rate.uniform_(1, 16).log_()
        step = torch.exp(torch.empty_like(self.decay_bias).uniform_(math.log(1e-3), math.log(1e-1)))
        self.decay_bias.copy_(step + torch.log(-torch.expm1(-step)))
