"""What all recurrent mixers share: the site's cap, padding, the decode cache and the hook points.

A mixer fills in the recurrence of `kernels/recurrence.py`; `forward` here runs it:

    inputs(x)            what its short convolution or token shift looks back on, [B,T,C] (None: it has neither)
    mix(inputs, history) the convolution's output, or the tokens before: [B,T,...]
    terms(x, mixed, run) q, k, v, log_decay and beta, or a and b, after their hook points; and what `finish` needs
    finish(out, rest)    head outputs z [B,T,H,V] from what the recurrence read: norms, gates, skips
    weighting(rest)      what its implicit attention needs beside the terms (most mixers: nothing)
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformer_lens.hook_points import HookPoint

from ..config import Slot
from ..kernels.dispatch import recur
from ..kernels.recurrence import Read, plain, without_autocast
from ..kernels.windowed import Ring, capped, carried_keys, windowed
from ..passes import Pass, Shapes, StateCache
from ..sites import Site

FEW = 256  # of `steps`: about where the tokens together cost what they do one by one, on a CPU


class Recurrent(nn.Module):
    """x [B,T,D] -> [B,T,D].

    `hook_state` fires with the state after the call's last token: overwriting it changes cached calls that follow.
    Under a cap there is no single state, and it does not fire."""

    read: Read = "after"
    o_proj: nn.Linear

    def __init__(
        self, slot: Slot, *, heads: int, key_dim: int, value_dim: int, conv: int = 1, rope: bool = False,
        points: tuple[str, ...] = ("beta", "log_decay"),
    ) -> None:  # fmt: skip
        super().__init__()
        self.site = Site(
            layer=slot.layer, index=slot.index, name=slot.name, kind="recurrent", mixer=slot.mixer, heads=heads,
            kv_heads=heads, key_dim=key_dim, value_dim=value_dim, conv=conv, rope=rope,
        )  # fmt: skip
        for point in ("q", "k", "v", *points, "state", "z"):
            self.add_module(f"hook_{point}", HookPoint())

    def inputs(self, x: Tensor) -> Tensor | None:
        return None

    def mix(self, inputs: Tensor, history: Tensor | None) -> Tensor:
        raise NotImplementedError

    def terms(self, x: Tensor, mixed: Tensor | None, run: Pass) -> tuple[dict[str, Tensor], Any]:
        raise NotImplementedError

    def finish(self, out: Tensor, rest: Any) -> Tensor:
        raise NotImplementedError

    def weighting(self, rest: Any) -> dict[str, Tensor]:
        """What weights on the values at hook_v need beside the terms: `write` and `bonus` [B,T,H], as in
        `kernels/implicit_stats.py`."""
        return {}

    @property
    def channels(self) -> int | None:
        """Channels C of `inputs`: the convolution's, or for a token shift the model's; None where it has neither."""
        conv = getattr(self, "conv", None)
        if conv is not None:
            return conv.weight.shape[0]
        return self.o_proj.out_features if self.site.conv > 1 else None

    def cached(self, batch: int) -> dict[str, Shapes]:
        """What a cache of this site holds."""
        site, channels = self.site, self.channels
        B, H, K, V = batch, site.heads, site.key_dim, site.value_dim
        held: Shapes = {"state": (B, H, K, V)} if site.cap is None else {"keys": (B, H, K), "values": (B, H, V)}
        return {site.name: held if channels is None else {**held, "last inputs": (B, site.conv - 1, channels)}}

    def init_weights(self, std: float) -> None:
        """Matrices Normal(0, std); mixers add their published gates."""
        init_linears(self, std)

    def hook(self, name: str, x: Tensor) -> Tensor:
        """x through the hook point `hook_<name>`."""
        return self.get_submodule(f"hook_{name}")(x)

    def forward(self, x: Tensor, run: Pass) -> Tensor:
        site = self.site
        old = run.state(site.name)
        inputs, mixed = self.inputs(x), None
        if inputs is not None:
            inputs = run.compact(inputs)
            mixed = run.restore(self.mix(inputs, None if old is None else old.conv))
        terms, rest = self.terms(x, mixed, run)
        terms = {name: run.mute(run.compact(y)) for name, y in terms.items()}
        if site.tap is not None:
            more = {name: run.mute(run.compact(y)) for name, y in self.weighting(rest).items()}
            site.tap(site, {**terms, **more}, run, self.read)
        z = self.finish(run.restore(self._recur(terms, inputs, run, old)), rest)
        z = self.hook("z", z if site.edit is None else site.edit(z, run.real))
        return self.o_proj(z.flatten(-2))

    def _recur(self, terms: dict[str, Any], inputs: Tensor | None, run: Pass, old: StateCache | None) -> Tensor:
        """The recurrence under the site's cap, on compacted tensors; leaves the site's cache up to date."""
        site = self.site
        state = ring = None
        if site.cap is None:
            out, state = recur(**terms, state=None if old is None else old.state, read=self.read)
            state = self.hook("state", state)
        else:
            if old is not None and old.ring is not None:
                ring = old.ring
                out = steps(ring, terms, run, self.read)
            else:
                out = capped(**terms, cap=site.cap, conv=site.conv, read=self.read)
                ring = ring_of(terms, run, site.cap, site.conv) if run.cache is not None else None
        run.keep(site.name, old, inputs, site.conv, state=state, ring=ring, cap=site.cap)
        return out


def steps(ring: Ring, terms: dict[str, Any], run: Pass, read: Read = "after") -> Tensor:
    """The tokens of a call through the ring: [B,T,H,V]. A few go one by one, many together."""
    q, k, dtype = terms["q"], terms["k"], terms["v"].dtype
    v, log_decay, a, b = plain(**{name: y for name, y in terms.items() if name != "q"})
    terms = {"q": q, "k": k, "v": v, "log_decay": log_decay, **({} if a is None else {"a": a, "b": b})}
    if 8 * run.length >= FEW + ring.keys.shape[2]:
        return _together(ring, run, read, **terms).to(dtype)
    out = []
    for t in range(run.length):
        real = None if run.real is None else t < run.count
        out.append(ring.step(**{name: y[:, t] for name, y in terms.items()}, real=real, read=read))
    return torch.stack(out, 1).to(dtype)


@without_autocast
def _together(ring: Ring, run: Pass, read: Read, **terms: Tensor) -> Tensor:
    """`steps` for several tokens: the capped pass over the ring's, which are carried to now and so neither decay nor
    erase, and these."""
    m, n = ring.keys.shape[2], min(ring.cap, ring.keys.shape[2] + run.length)
    kept = {"k": ring.keys.transpose(1, 2), "v": ring.values.transpose(1, 2)}
    terms = {name: x.to(ring.keys.dtype) for name, x in terms.items()}
    before = {name: kept.get(name, x.new_zeros(len(x), m, *x.shape[2:])) for name, x in terms.items()}
    whole = {name: torch.cat([before[name], x], 1) for name, x in terms.items()}
    out = windowed(**whole, window=ring.cap - ring.conv + 1, read=read)[:, m:]
    free = ring.seen[:, None] + torch.arange(run.length, device=out.device) < ring.cap  # of the cap
    first = int(free.sum(1).max()) if ring.conv > 1 else 0
    if first:
        head, _ = recur(**{name: x[:, : m + first] for name, x in whole.items()}, read=read)
        head = torch.where(free[:, :first, None, None], head[:, m:], out[:, :first])
        out = torch.cat([head, out[:, first:]], 1)
    tail = {name: run.last(x, n, F.pad(before[name], (0, 0, 0, 0, n - m, 0))) for name, x in terms.items()}
    del tail["q"]
    ring.values = tail.pop("v").transpose(1, 2)
    ring.keys = carried_keys(**tail).transpose(1, 2)
    ring.seen = ring.seen + run.count
    return out


def ring_of(terms: dict[str, Any], run: Pass, cap: int, conv: int) -> Ring:
    """What decoding under `cap` goes on from after this call."""
    tail = {name: run.last(y, min(cap, run.length)) for name, y in terms.items() if name != "q"}
    value = plain(**tail)[0]
    del tail["v"]
    keys = carried_keys(**tail)
    seen = run.count.expand(value.shape[0])
    return Ring(cap, conv, keys.transpose(1, 2), value.to(keys.dtype).transpose(1, 2), seen)


@torch.no_grad()
def init_linears(module: nn.Module, std: float) -> None:
    """Normal(0, std) for every linear map of a mixer, zero for its biases."""
    for linear in module.modules():
        if isinstance(linear, nn.Linear):
            nn.init.normal_(linear.weight, std=std)
            if linear.bias is not None:
                nn.init.zeros_(linear.bias)
