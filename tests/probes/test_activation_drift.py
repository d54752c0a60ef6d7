"""Activation drift: what moves scores on fixed inputs, and that it is what the model's own attention says."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from helpers import VOCAB, Largest, tokens_of

import hybridscope as hs
from hybridscope.probes.activation_drift import activation_drift

H, G, K, D = 4, 2, 8, 24
COLUMNS = ["q_rel", "k_rel", "score_rel", "attention_tv"]


def config(*pattern: str, **options) -> hs.HybridConfig:
    options = {"n_kv_heads": G, "head_dim": K, "d_ff": 8, "context": 2048, **options}
    return hs.HybridConfig(pattern, len(pattern), D, H, VOCAB, **options)


def model(cfg: hs.HybridConfig, seed: int = 0) -> hs.HybridLM:
    torch.manual_seed(seed)
    made = hs.HybridLM(cfg).double().requires_grad_(False)
    for parameter in made.parameters():
        if parameter.ndim >= 2:
            torch.nn.init.normal_(parameter, std=0.3)
    return made


def put(folder: Path, *models: hs.HybridLM) -> Path:
    for n, m in enumerate(models):
        m.save(folder / f"step-{n:06d}")
    return folder


def turned(m: hs.HybridLM, rotation: torch.Tensor) -> hs.HybridLM:
    """The same model with all heads of layer 0 turned inside."""
    out = model(m.config)
    out.load_state_dict(m.state_dict())
    for projection in (out.layers[0].attn.q_proj, out.layers[0].attn.k_proj):
        w = projection.weight.unflatten(0, (-1, K))
        projection.weight.copy_((rotation @ w).flatten(0, 1))
    return out


def turn(angles: torch.Tensor) -> torch.Tensor:
    cos, sin = torch.diag(angles.cos()), torch.diag(angles.sin())
    return torch.cat([torch.cat([cos, -sin], 1), torch.cat([sin, cos], 1)])


def orthogonal() -> torch.Tensor:
    return torch.linalg.qr(torch.randn(K, K, dtype=torch.float64))[0]


def test_steps_that_attend_alike_have_drift_exactly_zero(tmp_path):
    first = model(config("full", "gdn", "swa:4", "nope"))
    last = model(first.config)
    last.load_state_dict(first.state_dict())
    last.unembed.weight += 1
    table = activation_drift(put(tmp_path, first, last), tokens_of(2, 20))
    assert list(table.columns) == ["step", "layer", "site", "head", "kind", *COLUMNS, "n"]
    assert list(table.layer.unique()) == [0, 2, 3]  # the recurrent layer has no queries and keys of a softmax
    assert len(table) == 2 * 3 * H
    assert (table.n == 2 * 20).all()
    assert not table[COLUMNS].to_numpy().any()


@pytest.mark.parametrize(
    ("pattern", "rotation", "free"),
    [
        ("nope", orthogonal, True),
        ("full", lambda: turn(torch.linspace(0.3, 2.5, K // 2).double()), True),
        ("full", orthogonal, False),
    ],
    ids=["nope", "within frequency pairs", "across them"],
)
def test_a_rotation_inside_a_head_moves_queries_and_keys_and_only_across_rope_pairs_scores(
    tmp_path, pattern, rotation, free
):
    torch.manual_seed(1)
    last = model(config(pattern))
    table = activation_drift(put(tmp_path, turned(last, rotation()), last), tokens_of(2, 30))
    moved = table[table.step == 0]
    assert (moved[["q_rel", "k_rel"]] > 0.1).all(axis=None)
    if free:
        assert (moved[["score_rel", "attention_tv"]] < 1e-12).all(axis=None)
    else:
        assert (moved[["score_rel", "attention_tv"]] > 0.01).all(axis=None)


@pytest.mark.parametrize("pattern", ["full", "swa:5"])
def test_agrees_with_what_the_models_attend_to(tmp_path, pattern):
    """Against patterns written out from queries and keys at the hook points."""
    cfg, tokens, T = config(pattern, qk_norm=True), tokens_of(1, 16), 16
    first, last = model(cfg, 0), model(cfg, 1)
    table = activation_drift(put(tmp_path, first, last), tokens, rows=[3, -1]).query("step == 0")
    seen = torch.ones(T, T, dtype=torch.bool).tril()
    seen = (seen & ~seen.tril(-5) if pattern == "swa:5" else seen)[[3, 15]]
    scores, queries = [], []
    for m in (first, last):
        _, cache = m.run_with_cache(tokens)
        q, k = cache["blocks.0.attn.hook_rot_q"][0], cache["blocks.0.attn.hook_rot_k"][0]
        queries.append(q)
        k = k.repeat_interleave(H // k.shape[1], 1)
        scores.append(torch.einsum("rhk,shk->hrs", q[[3, 15]], k) / math.sqrt(K))
    p, r = (s.masked_fill(~seen, -torch.inf).softmax(-1) for s in scores)
    centred = [(s - (s * seen).sum(-1, keepdim=True) / seen.sum(-1, keepdim=True)) * seen for s in scores]
    for h in range(H):
        row = table.iloc[h]
        assert row.attention_tv == pytest.approx(float((p - r)[h].abs().sum() / 4), rel=1e-9)
        a, b = (c[h] for c in centred)
        assert row.score_rel == pytest.approx(float((a - b).norm() / b.norm()), rel=1e-9)
        a, b = (q[:, h] for q in queries)
        assert row.q_rel == pytest.approx(float((a - b).norm() / b.norm()), rel=1e-9)


def test_a_constant_that_all_keys_of_a_row_share_is_no_drift(tmp_path):
    """k moves by one vector everywhere (NoPE): every score of a row by the same, which its softmax ignores."""
    last = model(config("nope"))
    first = model(last.config)
    first.load_state_dict(last.state_dict())
    first.embed.weight[:, 0] = last.embed.weight[:, 0] = 3.0  # norm 1 sees nearly a constant there
    first.embed.weight[:, 1:] *= 1e-4
    last.embed.weight[:, 1:] *= 1e-4
    first.layers[0].attn.k_proj.weight[:, 0] += 1
    table = activation_drift(put(tmp_path, first, last), tokens_of(1, 20)).query("step == 0")
    assert (table.k_rel > 0.5).all()
    assert (table.attention_tv < 1e-3).all()
    assert (table.score_rel < 0.01).all()


def test_references(tmp_path):
    models = [model(config("full"), seed) for seed in range(3)]
    ladder, tokens = hs.ladder(put(tmp_path, *models)), tokens_of(1, 12)
    by = {
        r: activation_drift(ladder, tokens, [(0, 1)], reference=r).set_index("step")
        for r in ("final", "first", "previous", 1)
    }
    assert by["final"].score_rel[2] == by["first"].score_rel[0] == by[1].score_rel[1] == 0
    assert by["previous"][COLUMNS].loc[0].isna().all()
    assert by["previous"].score_rel[1] == by["first"].score_rel[1] > 0
    assert by["previous"].attention_tv[2] == by[1].attention_tv[2] > 0


def test_long_documents_take_rows_by_keys(tmp_path):
    T = 1500
    ladder = put(tmp_path, model(config("full"), 0), model(config("full"), 1))
    with Largest() as largest:
        table = activation_drift(ladder, tokens_of(1, T), [(0, 0)])
    assert (table.n == 64).all()
    assert largest.elements < T * T / 4


def test_transformers_models(tmp_path):
    """Soft caps and a sliding window beside full layers."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    widths = {"hidden_size": D, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": H}
    made = Gemma2Config(
        vocab_size=VOCAB, num_key_value_heads=G, head_dim=K, sliding_window=4, attn_logit_softcapping=5.0, **widths
    )
    for step in (1, 2):
        torch.manual_seed(step)
        Gemma2ForCausalLM(made).save_pretrained(tmp_path / f"checkpoint-{step}")
    table = activation_drift(tmp_path, tokens_of(1, 12))
    assert set(table.kind) == {"full", "window"}
    assert (table.query("step == 1")[COLUMNS] > 0).all(axis=None)
    assert not table.query("step == 2")[COLUMNS].to_numpy().any()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"heads": [(0, H)]}, "head"),
        ({"heads": [(1, 0)]}, "recurrent"),
        ({"heads": []}, "empty"),
        ({"rows": [12]}, "rows"),
        ({"rows": []}, "rows"),
        ({"reference": "last"}, "reference"),
    ],
)
def test_mistakes_are_named(tmp_path, options, message):
    ladder = put(tmp_path, model(config("full", "gdn")))
    with pytest.raises(ValueError, match=message):
        activation_drift(ladder, tokens_of(1, 12), **options)


def test_ladders_that_are_no_ladder_are_refused(tmp_path):
    with pytest.raises(ValueError, match="steps 1 and 0 differ"):
        activation_drift(put(tmp_path / "a", model(config("full")), model(config("nope"), 1)), tokens_of(1, 12))
    broken = model(config("full", "nope"))
    broken.layers[0].attn.v_proj.weight *= 1e200  # finite, as a checkpoint must be; what it makes is not
    broken.layers[0].attn.o_proj.weight *= 1e200
    with pytest.raises(ValueError, match=r"step 0, layer 1: .* NaN"):
        activation_drift(put(tmp_path / "b", broken, model(broken.config, 1)), tokens_of(1, 12))
