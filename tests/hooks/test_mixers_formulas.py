"""Each mixer against its layer's published formula, written out here from the paper and in the names of
flash-linear-attention's layer: the key map, projections, convolutions, gates, scales, norms; outputs and gradients.

Mixers that transformers has in plain torch (mamba2, lightning, hawk) are in test_mixers_transformers.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from fla_layers import LAYERS, MIXERS, D, H, weights
from helpers import RECURRENT, assert_close
from torch import Tensor, nn

from hybridscope import HybridConfig, HybridLM
from hybridscope.hooks.adapters.keys import to_ours
from hybridscope.hooks.mixers.hgrn import cumulative
from hybridscope.hooks.passes import Pass

EPS, T = 1e-3, 11  # an eps that shows where it is added
Weights = dict[str, Tensor]


def linear(w: Weights, name: str, x: Tensor) -> Tensor:
    y = x @ w[f"{name}.weight"].T
    return y + w[f"{name}.bias"] if f"{name}.bias" in w else y


def heads(x: Tensor, n: int = H) -> Tensor:
    return x.view(*x.shape[:2], n, -1)


def unroll(transition: Tensor, write: Tensor, q: Tensor) -> Tensor:
    """S = transition_t S + write_t, o_t = S^T q_t; transition [B,T,H,K,K], write [B,T,H,K,V], q [B,T,H,K]."""
    S, out = torch.zeros_like(write[:, 0]), []
    for t in range(q.shape[1]):
        S = transition[:, t] @ S + write[:, t]
        out.append((S * q[:, t, ..., None]).sum(-2))
    return torch.stack(out, 1)


def outer(x: Tensor, y: Tensor) -> Tensor:
    return x[..., :, None] * y[..., None, :]


def diag(x: Tensor) -> Tensor:
    return torch.diag_embed(x)


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + EPS) * weight


def unit(x: Tensor) -> Tensor:
    return x / torch.sqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def convolved(w: Weights, name: str, x: Tensor) -> Tensor:
    """SiLU of the causal convolution, width 4, of one projection."""
    y = linear(w, f"{name}_proj", x).transpose(1, 2)
    return F.silu(F.conv1d(F.pad(y, (3, 0)), w[f"{name}_conv1d.weight"], groups=y.shape[1])).transpose(1, 2)


def output(w: Weights, o: Tensor) -> Tensor:
    return o.flatten(2) @ w["o_proj.weight"].T


# The layers


def gla(w: Weights, x: Tensor) -> Tensor:
    q, k, v, g = (heads(linear(w, f"{name}_proj", x)) for name in "qkvg")
    alpha = heads(linear(w, "gk_proj.1", linear(w, "gk_proj.0", x)).sigmoid() ** (1 / 16))
    o = unroll(diag(alpha), outer(k, v), q / math.sqrt(q.shape[-1]))
    return output(w, rms(o, w["g_norm_swish_gate.weight"]) * F.silu(g))


def forget_gate(w: Weights, x: Tensor) -> Tensor:
    """In layer 1 of 2: at least the first entry of the softmax over layers 1, 2 less that of layer 0."""
    bound = w["lower_bounds"].softmax(0)[1]
    return bound + (1 - bound) * linear(w, "f_proj", x).sigmoid()


def hgrn(w: Weights, x: Tensor) -> Tensor:
    f, i = forget_gate(w, x), linear(w, "i_proj", x)
    h, out = torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        h = f[:, t] * h + (1 - f[:, t]) * F.silu(i[:, t])
        out.append(h)
    return output(w, rms(torch.stack(out, 1), w["g_norm.weight"]) * F.silu(linear(w, "g_proj", x)))


def hgrn2(w: Weights, x: Tensor) -> Tensor:
    f = heads(forget_gate(w, x))
    q = heads(F.silu(linear(w, "q_proj", x)))
    o = unroll(diag(f), outer(1 - f, heads(linear(w, "i_proj", x))), q / math.sqrt(q.shape[-1]))
    return output(w, rms(o.flatten(2), w["g_norm.weight"]))


def retnet(w: Weights, x: Tensor) -> Tensor:
    """The parallel form; rotations as complex numbers."""
    q, k, v, g = (heads(linear(w, f"{name}_proj", x)) for name in "qkvg")
    half, t = q.shape[-1] // 2, torch.arange(T).double()
    turn = torch.exp(1j * t[:, None] * 10_000.0 ** (-torch.arange(half) / half))[:, None]
    q, k = (torch.complex(y[..., :half], y[..., half:]) * turn for y in (q, k))
    scores = torch.einsum("bthk,bshk->bhts", q, k.conj()).real / math.sqrt(2 * half)
    gamma = 1 - 2.0 ** (-5 - torch.arange(H).double())
    decay = gamma[:, None, None] ** (t[:, None] - t).clamp(min=0) * (t[:, None] >= t)
    o = torch.einsum("bhts,bshv->bthv", scores * decay, v)
    return output(w, rms(o, w["g_norm_swish_gate.weight"]) * F.silu(g))


def delta(w: Weights, x: Tensor, alpha: Tensor, key_heads: int) -> Tensor:
    """S = (I - beta k k^T) diag(alpha) S + beta k v^T; alpha [B,T,H,K]."""
    q, k = (unit(heads(convolved(w, name, x), key_heads)).repeat_interleave(H // key_heads, 2) for name in "qk")
    beta = linear(w, "b_proj", x).sigmoid()[..., None]
    erase = torch.eye(k.shape[-1]) - outer(beta * k, k)
    v = heads(convolved(w, "v", x))
    return rms(unroll(erase @ diag(alpha), outer(beta * k, v), q / math.sqrt(q.shape[-1])), w["o_norm.weight"])


def deltanet(w: Weights, x: Tensor) -> Tensor:
    return output(w, delta(w, x, torch.ones(*x.shape[:2], H, 4), key_heads=H))


def gdn(w: Weights, x: Tensor) -> Tensor:
    alpha = torch.exp(-w["A_log"].exp() * F.softplus(linear(w, "a_proj", x) + w["dt_bias"]))
    o = delta(w, x, alpha[..., None].expand(-1, -1, -1, 4), key_heads=2)
    return output(w, o * F.silu(heads(linear(w, "g_proj", x))))


def kda(w: Weights, x: Tensor) -> Tensor:
    step = heads(F.softplus(linear(w, "f_proj.1", linear(w, "f_proj.0", x)) + w["dt_bias"]))
    o = delta(w, x, torch.exp(-w["A_log"].exp()[:, None] * step), key_heads=2)
    return output(w, o * heads(linear(w, "g_proj.1", linear(w, "g_proj.0", x))).sigmoid())


def earlier(x: Tensor) -> Tensor:
    """The token before, less the token."""
    return F.pad(x, (0, 0, 1, 0))[:, :-1] - x


def rwkv6(w: Weights, x: Tensor) -> Tensor:
    """o_t = r (S_{t-1} + u k v^T), then S_t = w S_{t-1} + k v^T."""
    low = torch.tanh(linear(w, "x_proj.0.linear", x + earlier(x) * w["x_proj.0.mu"])).view(*x.shape[:2], 5, 3)
    mixed = {}
    for n, name in enumerate("rwkvg"):
        mix = w["x_bias"][n] + low[:, :, n] @ w["x_proj.2.weight"].view(D, 5, 3)[:, n].T
        mixed[name] = x + earlier(x) * mix
    r, k, v = (heads(linear(w, f"{name}_proj.linear", mixed[name])) for name in "rkv")
    low_w = torch.tanh(linear(w, "w_proj.linear.lora.0", mixed["w"]))
    decay = heads(torch.exp(-torch.exp(linear(w, "w_proj.linear.lora.2", low_w))))
    S, out = torch.zeros_like(outer(k, v)[:, 0]), []
    for t in range(T):
        kv = outer(k, v)[:, t]
        out.append(((S + w["bonus"][..., None] * kv) * r[:, t, ..., None]).sum(-2))
        S = decay[:, t, ..., None] * S + kv
    o = torch.stack(out, 1).flatten(0, 1).flatten(1)
    o = F.group_norm(o, H, w["g_norm.weight"], w["g_norm.bias"], EPS).view(*x.shape[:2], -1)
    return output(w, o * F.silu(linear(w, "g_proj.linear", mixed["g"])))


def rwkv7(w: Weights, x: Tensor) -> Tensor:
    """S_t = (diag(w) - (a c) c^T) S_{t-1} + k v^T with c the unit removal key."""
    mixed = {name: x + earlier(x) * w[f"x_{name}"] for name in "rwkvag"}

    def low_rank(name: str, y: Tensor, activation: Callable[[Tensor], Tensor] = lambda y: y) -> Tensor:
        return linear(w, f"{name}_lora.lora.2", activation(linear(w, f"{name}_lora.lora.0", y)))

    decay = torch.exp(-math.exp(-0.5) * low_rank("w", mixed["w"], torch.tanh).sigmoid())
    k, v = linear(w, "k_proj", mixed["k"]), linear(w, "v_proj", mixed["v"])
    blend = low_rank("v", mixed["v"]).sigmoid()
    v = heads(v * (1 - blend) + w["first"] * blend)
    a = low_rank("a", mixed["a"]).sigmoid()
    removal = heads(k * w["k_k"])
    removal = removal / removal.norm(dim=-1, keepdim=True)
    k, r, a = heads(k * (1 + (a - 1) * w["k_a"])), heads(linear(w, "r_proj", mixed["r"])), heads(a)
    o = unroll(diag(heads(decay)) - outer(a * removal, removal), outer(k, v), r)
    o = F.group_norm(o.flatten(0, 1).flatten(1), H, w["g_norm.weight"], w["g_norm.bias"], r.shape[-1] * EPS)
    o = heads(o.view(*x.shape[:2], -1)) + (r * k * w["r_k"]).sum(-1, keepdim=True) * v
    return output(w, o.flatten(2) * low_rank("g", mixed["g"], torch.sigmoid))


def rwkv6_mlp(w: Weights, x: Tensor) -> Tensor:
    key = F.relu(linear(w, "key.linear", x + earlier(x) * w["key.mu"])) ** 2
    return linear(w, "receptance.linear", x + earlier(x) * w["receptance.mu"]).sigmoid() * linear(w, "value", key)


def rwkv7_mlp(w: Weights, x: Tensor) -> Tensor:
    return linear(w, "value", F.relu(linear(w, "key", x + earlier(x) * w["x_k"])) ** 2)


FORMULAS: dict[str, Callable[[Weights, Tensor], Tensor]] = {
    "gla": gla, "hgrn": hgrn, "hgrn2": hgrn2, "retnet": retnet, "deltanet": deltanet, "gdn": gdn, "kda": kda,
    "rwkv6": rwkv6, "rwkv6.mlp": rwkv6_mlp, "rwkv7": rwkv7, "rwkv7.mlp": rwkv7_mlp,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _double() -> object:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("source", LAYERS)
def test_outputs_and_gradients_are_those_of_the_formula(source: str) -> None:
    """With fla's weights through the key map, in the second of two layers (bounds and blends begin there)."""
    mixer = source.split(".")[0]
    config = HybridConfig((mixer,), 2, D, H, 32, d_ff=24, norm_eps=EPS, mixers={mixer: LAYERS[source][3]})
    block = HybridLM(config).layers[1]
    module: nn.Module = block.mlp if source.endswith(".mlp") else block.attn
    theirs = {name: x.requires_grad_() for name, x in weights(source).items()}
    module.load_state_dict(to_ours(source, theirs, module))
    x = torch.randn(2, T, D, requires_grad=True)
    run = Pass(None, None, 2, T, x.device)
    # What comes from outside the layer: HGRN's bounds, RWKV-7's first values.
    bounds, first = torch.randn(2, D), torch.randn(2, T, 16)
    run.shared = {"lower_bounds": cumulative(bounds), "rwkv7 values of 4 heads": first}

    got, expected = module(x, run), FORMULAS[source]({**theirs, "lower_bounds": bounds, "first": first}, x)
    assert_close(got, expected, "model")
    cotangent = torch.randn_like(got)
    names = list(theirs)
    found = dict(zip(["x", *names], torch.autograd.grad(expected, [x, *theirs.values()], cotangent), strict=True))
    got.backward(cotangent)
    assert x.grad is not None
    assert_close(x.grad, found.pop("x"), "gradient")
    carried = to_ours(source, found, module)
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None, name
        assert_close(parameter.grad, carried[name], "gradient")


def test_the_formulas_cover_all_layers_of_fla() -> None:
    assert FORMULAS.keys() == LAYERS.keys()
    assert set(MIXERS) | {"mamba2", "lightning", "hawk"} == set(RECURRENT)


@pytest.mark.parametrize("mixer", ["deltanet", "gdn", "kda"])
def test_negative_eigenvalues_double_beta(mixer: str) -> None:
    x = torch.randn(1, T, D)
    run = Pass(None, None, 1, T, x.device)
    betas = []
    for negative in (False, True):
        torch.manual_seed(0)
        options = {**LAYERS[mixer][3], "negative_eigenvalues": negative}
        module = HybridLM(HybridConfig((mixer,), 1, D, H, 32, mixers={mixer: options})).layers[0].attn
        module.hook_beta.add_hook(lambda beta, hook: betas.append(beta))
        module(x, run)
    assert torch.equal(betas[1], 2 * betas[0])
