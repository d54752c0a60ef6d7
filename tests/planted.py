"""A model with retrieval heads set by hand, so that what they do is known in closed form.

Layer 0 (a window of 2, attention uniform) writes the mean of a token and the one before it. Layer 1 (no positions)
finds the token that followed the query's token before: with strength L its score there is L, and 0 elsewhere. Head 0 of
layer 1 writes what it reads; the unembedding reads only that. Layer 2 does nothing, or (`last="gdn"`) is a recurrence
with weights at random that cannot retrieve: its state is gone after one token, so that it sees no further than its
convolution, and it writes where the unembedding does not read.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch

import hybridscope as hs
from hybridscope.probes.haystacks import TokenLanguage

LANGUAGE = TokenLanguage(vocab_size=24, keys=8, values=8)
T, HEADS, HEAD = 48, 4, (1, 0, 0)
MASS = 0.9
STRONG = math.log(MASS / (1 - MASS) * (T - 1))  # the strength that puts MASS on one of T keys
WEAK = math.log(T - 1)  # ... and one half


def planted(
    strength: Mapping[int, float] = {0: STRONG, 2: WEAK},
    tokens: Mapping[int, Iterable[int]] = {},
    last: str = "full",
) -> hs.HybridLM:
    """`strength` by head of layer 1; `tokens`: by head, the query tokens it answers to (all)."""
    V = LANGUAGE.vocab_size
    D = 3 * V
    config = hs.HybridConfig(["swa:2", "nope", last], 3, D, HEADS, V, head_dim=V, d_ff=2, norm_eps=1e-14, context=T)
    model = hs.HybridLM(config).double().eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter.zero_()
    eye = torch.eye(V, dtype=torch.float64)
    own, mean, read = slice(0, V), slice(V, 2 * V), slice(2 * V, 3 * V)
    model.embed.weight[:, own] = eye
    model.unembed.weight[:, read] = eye
    first, second = model.layers[0].attn, model.layers[1].attn
    first.v_proj.weight[own, own] = eye / D**0.5
    first.o_proj.weight[mean, own] = eye
    scale = (D / 1.5) ** 0.5  # of the norm, where a token and the one before it differ
    for head, logit in strength.items():
        rows = slice(head * V, (head + 1) * V)
        wanted = torch.zeros(V, dtype=torch.float64)
        wanted[list(tokens.get(head, range(V)))] = 1
        second.q_proj.weight[rows, own] = logit * V**0.5 / scale * wanted.diag()
        second.k_proj.weight[rows, mean] = 2 / scale * eye
        second.k_proj.weight[rows, own] = -1 / scale * eye
    second.v_proj.weight[own, own] = eye / scale
    second.o_proj.weight[read, own] = eye
    if last == "gdn":
        forgetful = model.layers[2].attn
        torch.manual_seed(0)
        forgetful.init_weights(0.3)
        forgetful.o_proj.weight[read] = 0
        forgetful.decay.log_rate.fill_(math.log(1000.0))  # e^-1000 a token and more
        forgetful.decay.bias.fill_(1.0)
        forgetful.decay_proj.weight.zero_()
    return model


def needles(n: int, seed: int = 0, **options) -> hs.Needles:
    return hs.make_needles(n, T, values=LANGUAGE.values, language=LANGUAGE, seed=seed, **options)


def mass_of(strength: float, visible: int = T) -> float:
    """Attention on the one key that matches."""
    return math.exp(strength) / (math.exp(strength) + visible - 1)


def entropy_of(strength: float, visible: int = T) -> float:
    return math.log(math.exp(strength) + visible - 1) - mass_of(strength, visible) * strength
