"""Q/K drift: what moves it, what must not, and that it is computed without dense forms or needless reads."""

from __future__ import annotations

import dataclasses
import gc
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import hybridscope as hs
from hybridscope.hooks.checkpoint import Checkpoint, write_json
from hybridscope.hooks.projections import qk_projections
from hybridscope.probes import drift
from hybridscope.probes.drift import qk_drift

H, G, K, D = 4, 2, 8, 24  # K is not D / H

Weights = dict[str, torch.Tensor]


def config(pattern: tuple[str, ...] = ("full",), **options) -> hs.HybridConfig:
    options = {"n_kv_heads": G, "head_dim": K, "d_ff": 8, **options}
    return hs.HybridConfig(pattern, len(pattern), D, H, 16, **options)


def weights(cfg: hs.HybridConfig) -> Weights:
    """fp64, with norm weights that are not all one, so that leaving them out would show."""
    state = {name: w.detach().double().clone() for name, w in hs.HybridLM(cfg).state_dict().items()}
    return {n: w.uniform_(0.5, 2) if "ln" in n or "norm" in n else w for n, w in state.items()}


def put(folder: Path, cfg: hs.HybridConfig, state: Weights, step: int) -> Checkpoint:
    path = folder / f"step-{step:06d}"
    path.mkdir()
    write_json(path / "config.json", {"format": "hybridscope", "model": cfg.to_dict()})
    save_file({n: w.contiguous() for n, w in state.items()}, path / "model.safetensors")
    return Checkpoint(path, step)


def pair(folder: Path, cfg: hs.HybridConfig, before: Weights, after: Weights) -> list[Checkpoint]:
    return [put(folder, cfg, after, 1), put(folder, cfg, before, 2)]


def heads_of(w: torch.Tensor) -> torch.Tensor:
    return w.unflatten(0, (-1, K))


def orthogonal(n: int) -> torch.Tensor:
    return torch.linalg.qr(torch.randn(n, n, dtype=torch.float64))[0]


def turn(pairs: torch.Tensor) -> torch.Tensor:
    """[K,K] rotation of each pair (d, d + K/2) by its own angle."""
    cos, sin = torch.diag(pairs.cos()), torch.diag(pairs.sin())
    return torch.cat([torch.cat([cos, -sin], 1), torch.cat([sin, cos], 1)])


def rotated(state: Weights, rotation: torch.Tensor, kv_head: int = 0) -> Weights:
    """Turn one key head and all query heads that read it."""
    out = {n: w.clone() for n, w in state.items()}
    heads_of(out["blocks.0.attn.k_proj.weight"])[kv_head] = (
        rotation @ heads_of(state["blocks.0.attn.k_proj.weight"])[kv_head]
    )
    for head in range(kv_head * H // G, (kv_head + 1) * H // G):
        q = "blocks.0.attn.q_proj.weight"
        heads_of(out[q])[head] = rotation @ heads_of(state[q])[head]
    return out


def folded(state: Weights, head: int, cfg: hs.HybridConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """W_Q and W_K [K,D] of a query head with the norm weights inside."""
    a = "blocks.0.attn."
    gain = state["blocks.0.ln1.weight"]
    q = heads_of(state[a + "q_proj.weight"])[head] * gain
    k = heads_of(state[a + "k_proj.weight"])[head * G // H] * gain
    if cfg.qk_norm:
        q, k = q * state[a + "q_norm.weight"][:, None], k * state[a + "k_norm.weight"][:, None]
    return q, k


def dense(q: torch.Tensor, k: torch.Tensor, rope: bool) -> torch.Tensor:
    """The published definition, written out: D x D forms, stacked, so that their norm is the score form's."""
    if not rope:
        return (q.T @ k)[None]
    quarter = torch.tensor([[0.0, -1.0], [1.0, 0.0]], dtype=torch.float64)
    forms = []
    for d in range(K // 2):
        q2, k2 = q[[d, d + K // 2]], k[[d, d + K // 2]]
        forms += [q2.T @ k2 / math.sqrt(2), q2.T @ quarter @ k2 / math.sqrt(2)]
    return torch.stack(forms)


def test_weights_that_did_not_change_have_drift_exactly_zero(tmp_path):
    cfg = config(("full", "nope", "swa:4", "gdn"), qk_norm=True)
    first = weights(cfg)
    last = {**first, "embed.weight": first["embed.weight"] + 1}
    put(tmp_path, cfg, first, 1)
    put(tmp_path, cfg, last, 2)
    table = qk_drift(tmp_path)
    assert list(table.columns) == [
        "step", "layer", "site", "head", "kind", "maps", "q", "k", "q_rel", "k_rel", "qk_rel", "bilinear_rel",
    ]  # fmt: skip
    assert len(table) == 2 * 3 * H  # the recurrent layer has no softmax heads
    assert dict(zip(table.layer, table.kind, strict=True)) == {0: "full", 1: "full", 2: "window"}
    assert not table[["q", "k", "q_rel", "k_rel", "qk_rel", "bilinear_rel"]].to_numpy().any()


@pytest.mark.parametrize("pattern", ["full", "nope"])
@pytest.mark.parametrize("qk_norm", [False, True])
def test_agrees_with_dense_forms_and_maps_grouped_heads(tmp_path, pattern, qk_norm):
    cfg = config((pattern,), qk_norm=qk_norm)
    before, after = weights(cfg), weights(cfg)
    table = qk_drift(pair(tmp_path, cfg, before, after))
    for row in table[table.step == 1].itertuples():
        old, new = (dense(*folded(s, row.head, cfg), rope=pattern == "full") for s in (before, after))
        if qk_norm:
            old, new = old / old.norm(), new / new.norm()
        assert row.bilinear_rel == pytest.approx(float((new - old).norm() / old.norm()), rel=1e-12)
        for name, head, distance, relative in (
            ("q_proj", row.head, row.q, row.q_rel),
            ("k_proj", row.head * G // H, row.k, row.k_rel),
        ):
            a, b = (heads_of(s[f"blocks.0.attn.{name}.weight"])[head] for s in (before, after))
            assert distance == pytest.approx(float((a - b).norm()), rel=1e-12)
            assert relative == pytest.approx(float((a - b).norm() / a.norm()), rel=1e-12)
        assert row.qk_rel == row.q_rel + row.k_rel
    assert (table[table.step == 2].bilinear_rel == 0).all()


def test_the_rope_form_is_what_scores_do_over_offsets(tmp_path):
    """The mean over offsets of the squared change of the D x D form that the model itself applies at each."""
    from hybridscope.hooks.mixers.layers import rope

    cfg = config(("full",))
    before, after = weights(cfg), weights(cfg)
    table = qk_drift(pair(tmp_path, cfg, before, after), heads=[(0, 1)])
    offsets = torch.arange(0, 4000, 7)

    def forms(state: Weights) -> torch.Tensor:
        q, k = folded(state, 1, cfg)
        turned = rope(q.T.expand(len(offsets), 1, D, K).transpose(0, 1), offsets[None], 10.0)
        return torch.einsum("tdk,ke->tde", turned[0], k)

    old, new = forms(before), forms(after)
    expected = ((new - old).square().sum() / old.square().sum()).sqrt()
    assert table.bilinear_rel[0] == pytest.approx(float(expected), rel=0.03)


def test_dimensions_that_rope_leaves_alone_are_one_block(tmp_path, monkeypatch):
    """The form averaged over every angle: of the turned pairs half the squares remain, of the rest all."""
    cfg = config(("full",))
    before, after = weights(cfg), weights(cfg)
    steps = pair(tmp_path, cfg, before, after)
    monkeypatch.setattr(
        drift, "qk_projections", lambda path: [dataclasses.replace(s, rotary=4) for s in qk_projections(path)]
    )
    table = qk_drift(steps, heads=[(0, 2)])
    # Squares of the form are polynomials of degree 2 in each angle's cosine and sine: three points do.
    angles = torch.arange(3, dtype=torch.float64) * 2 * math.pi / 3

    def forms(state: Weights) -> torch.Tensor:
        q, k = folded(state, 2, cfg)
        found = []
        for pair_ in torch.cartesian_prod(angles, angles):
            rotation = torch.eye(K, dtype=torch.float64)
            rotation[:4, :4] = turn(pair_)
            found.append(q.T @ rotation @ k)
        return torch.stack(found)

    old, new = forms(before), forms(after)
    assert table.bilinear_rel[0] == pytest.approx(float((new - old).norm() / old.norm()), rel=1e-12)


def test_a_rotation_inside_a_head_without_rope_moves_only_the_raw_distance(tmp_path):
    cfg = config(("nope",))
    before = weights(cfg)
    table = qk_drift(pair(tmp_path, cfg, before, rotated(before, orthogonal(K))))
    moved = table[table.step == 1]
    assert (moved.bilinear_rel < 1e-13).all()
    assert (moved.q[moved["head"] < H // G] > 0.1).all()
    assert (moved.q[moved["head"] >= H // G] == 0).all()


def test_under_rope_only_rotations_within_frequency_pairs_are_free(tmp_path):
    cfg = config(("full",))
    before = weights(cfg)
    within = rotated(before, turn(torch.linspace(0.3, 2.5, K // 2).double()))
    across = rotated(before, orthogonal(K))
    steps = [put(tmp_path, cfg, s, n) for n, s in enumerate([within, across, before])]
    table = qk_drift(steps, heads=[(0, 0)])
    assert (table.qk_rel[:2] > 0.1).all()
    assert table.bilinear_rel[0] < 1e-13
    assert table.bilinear_rel[1] > 0.1


@pytest.mark.parametrize("pattern", ["full", "nope"])
def test_a_relative_change_of_one_in_a_million_is_recovered(tmp_path, pattern):
    cfg = config((pattern,))
    before = weights(cfg)
    name = "blocks.0.attn.q_proj.weight"
    table = qk_drift(pair(tmp_path, cfg, before, {**before, name: before[name] * (1 + 1e-6)}))
    assert table.bilinear_rel[0] == pytest.approx(1e-6, rel=1e-6)
    assert table.q_rel[0] == pytest.approx(1e-6, rel=1e-6)


def test_the_scale_of_w_q_counts_unless_a_norm_divides_it_out(tmp_path):
    name = "blocks.0.attn.q_proj.weight"
    for qk_norm, expected in ((False, 2.0), (True, 0.0)):
        cfg = config(("full",), qk_norm=qk_norm)
        before = weights(cfg)
        (folder := tmp_path / str(qk_norm)).mkdir()
        table = qk_drift(pair(folder, cfg, before, {**before, name: before[name] * 3}))
        assert table.q_rel[0] == pytest.approx(2.0)
        assert table.bilinear_rel[0] == pytest.approx(expected, abs=1e-13)


def test_norm_weights_count_in_the_form_alone(tmp_path):
    cfg = config(("nope",))
    before = weights(cfg)
    table = qk_drift(pair(tmp_path, cfg, before, {**before, "blocks.0.ln1.weight": torch.ones(D).double()}))
    assert (table.qk_rel == 0).all()
    assert (table.bilinear_rel[:H] > 0.1).all()


def test_references(tmp_path):
    cfg = config(("full",))
    states = [weights(cfg) for _ in range(3)]
    steps = [put(tmp_path, cfg, s, n) for n, s in zip((10, 20, 30), states, strict=True)]
    by = {
        r: qk_drift(hs.ladder(tmp_path), heads=[(0, 0)], reference=r).set_index("step")
        for r in ("final", "first", "previous", 20)
    }
    assert by["final"].bilinear_rel[30] == by["first"].bilinear_rel[10] == by[20].bilinear_rel[20] == 0
    assert math.isnan(by["previous"].q[10])
    assert by["previous"].q[20] == by["first"].q[20]
    assert by["previous"].bilinear_rel[30] == by[20].bilinear_rel[30] > 0
    for wrong in ("last", 15):
        with pytest.raises(ValueError, match="reference"):
            qk_drift(steps, reference=wrong)


@pytest.mark.parametrize("heads", [[(0, H)], [(1, 0)], [(5, 0)], [(0, 1, 0)], [(0,)], []])
def test_a_head_that_is_not_there_is_an_error(tmp_path, heads):
    cfg = config(("full", "gdn"))
    with pytest.raises(ValueError, match="head"):
        qk_drift([put(tmp_path, cfg, weights(cfg), 1)], heads=heads)


def test_a_ladder_whose_shapes_change_names_step_and_tensor(tmp_path):
    wide = config(("full",), head_dim=2 * K)
    steps = [put(tmp_path, c, weights(c), n) for n, c in ((1, config(("full",))), (2, wide))]
    with pytest.raises(ValueError, match=r"step 2: blocks\.0\.attn\.q_proj\.weight"):
        qk_drift(steps)
    state = weights(config(("full",)))
    state["blocks.0.attn.k_proj.weight"] = torch.ones(G * K, D + 1)
    steps = [steps[0], put(tmp_path, config(("full",)), state, 3)]
    with pytest.raises(ValueError, match=r"step 3: blocks\.0\.attn\.k_proj\.weight"):
        qk_drift(steps)


def test_only_the_wanted_rows_are_read(tmp_path, monkeypatch):
    cfg = config(("gdn", "full", "nope"), qk_norm=True)
    steps = [put(tmp_path, cfg, weights(cfg), n) for n in range(3)]
    read: dict[str, list[tuple[int, ...]]] = {}
    tensor = Checkpoint.tensor

    def counted(self, name, rows=slice(None)):
        found = tensor(self, name, rows)
        read.setdefault(name, []).append(tuple(found.shape))
        return found

    monkeypatch.setattr(Checkpoint, "tensor", counted)
    qk_drift(steps, heads=[(1, 0), (1, 3), (1, 2)])
    a = "blocks.1.attn."
    norms = {a + "q_norm.weight", a + "k_norm.weight", "blocks.1.ln1.weight"}
    assert set(read) == {a + "q_proj.weight", a + "k_proj.weight", *norms}
    # Heads 0, and 2 with 3 in one read; key heads 0 and 1 are neighbours.
    assert set(read[a + "q_proj.weight"]) == {(K, D), (2 * K, D)}
    assert set(read[a + "k_proj.weight"]) == {(2 * K, D)}


def test_a_ladder_of_150_steps_takes_the_memory_of_a_few(tmp_path, monkeypatch):
    """Tensors alive while a site is read: as many bytes at step 145 as at step 5, in all sites."""
    cfg = config(("full", "gdn", "nope"))
    state, steps = weights(cfg), 150
    q = "blocks.0.attn.q_proj.weight"
    for n in range(steps):  # on a straight line to the final step
        put(tmp_path, cfg, {**state, q: state[q] * (2 - n / (steps - 1))}, n)
    alive: dict[int, list[int]] = {}
    tensor = Checkpoint.tensor

    def watched(self, name, rows=slice(None)):
        found = tensor(self, name, rows)
        if name.endswith("k_proj.weight") and self.step in (5, 75, 145):
            storages = {x.untyped_storage().data_ptr(): x for x in gc.get_objects() if type(x) is torch.Tensor}
            alive.setdefault(self.step, []).append(sum(x.untyped_storage().nbytes() for x in storages.values()))
        return found

    monkeypatch.setattr(Checkpoint, "tensor", watched)
    table = qk_drift(tmp_path)
    assert len(table) == steps * 2 * H
    assert len(alive[5]) == 2
    assert alive[5] == alive[75] == alive[145]
    curve = table[(table.layer == 0) & (table["head"] == 1)]
    assert curve.q_rel.to_numpy() == pytest.approx(1 - curve.step.to_numpy() / (steps - 1), abs=1e-12)
    assert not table[table.layer == 2].q_rel.any()


# transformers' checkpoints

LLAMA_LIKE = ("granite", "llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "smollm3")
TINY = {
    "vocab_size": 16, "hidden_size": D, "intermediate_size": 16, "num_hidden_layers": 2,
    "num_attention_heads": H, "num_key_value_heads": G, "head_dim": K,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
EXTRA = {"smollm3": {"no_rope_layers": [1, 0]}, "qwen2": {"layer_types": ["full_attention"] * 2}}
MOE = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8, "num_local_experts": 2}


def foreign(family: str, folder: Path) -> Checkpoint:
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    options = {**TINY, **EXTRA.get(family, {}), **(MOE if "moe" in family or family == "mixtral" else {})}
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**options)).double()
    for name, p in model.named_parameters():
        if "norm" in name or "bias" in name:
            torch.nn.init.uniform_(p, 0.5, 2)
    model.save_pretrained(folder)
    return Checkpoint(folder, int(folder.name.split("-")[1]))


@pytest.mark.parametrize("family", LLAMA_LIKE)
def test_transformers_families_hold_the_tensors_where_they_are_looked_for(tmp_path, family):
    a, b = (foreign(family, tmp_path / f"checkpoint-{n}") for n in (1, 2))
    sites = qk_projections(a.path)
    assert len(sites) == 2
    for site in sites:
        named = (site.q, site.k, site.gain, site.q_norm, site.k_norm, site.q_bias, site.k_bias)
        assert {n for n in named if n} <= set(a.names())
        here = {n for n in a.names() if f".{site.layer}.self_attn." in n}
        values = {n for n in here if ".v_proj." in n or ".o_proj." in n}
        assert here - values <= set(named)  # nothing that shapes a score is left out
    table = qk_drift([a, b])
    assert (table[table.step == 1].bilinear_rel > 0.1).all()
    assert [s.rotary for s in sites] == ([K, 0] if family == "smollm3" else [K, K])


def test_biases_are_part_of_the_transformers_form(tmp_path):
    a, b = (foreign("qwen2", tmp_path / f"checkpoint-{n}") for n in (1, 2))
    site = qk_projections(a.path)[0]
    table = qk_drift([a, b], heads=[(0, 3)])

    def form(c: Checkpoint) -> torch.Tensor:
        sides = []
        for weight, bias, head in ((site.q, site.q_bias, 3), (site.k, site.k_bias, 1)):
            assert bias is not None
            w = heads_of(c.tensor(weight))[head] * c.tensor(site.gain)
            sides.append(torch.cat([w, heads_of(c.tensor(bias))[head][:, None]], 1))
        return dense(*sides, rope=True)

    expected = (form(a) - form(b)).norm() / form(b).norm()
    assert table.bilinear_rel[0] == pytest.approx(float(expected), rel=1e-12)


def test_a_family_that_nobody_described_gives_raw_distances_and_says_so(tmp_path):
    a, b = (foreign("olmo2", tmp_path / f"checkpoint-{n}") for n in (1, 2))
    with pytest.warns(UserWarning, match="bilinear_rel is NaN"):
        table = qk_drift([a, b])
    raw = heads_of(a.tensor("model.layers.1.self_attn.k_proj.weight")) - heads_of(
        b.tensor("model.layers.1.self_attn.k_proj.weight")
    )
    assert table[(table.step == 1) & (table.layer == 1)].k.tolist() == pytest.approx(
        [float(raw[h * G // H].norm()) for h in range(H)]
    )
    assert table.bilinear_rel.isna().all()


def test_what_has_no_query_and_key_maps_is_named(tmp_path):
    (folder := tmp_path / "checkpoint-1").mkdir()
    write_json(folder / "config.json", {"model_type": "nobodys"})
    with pytest.raises(ValueError, match="nobodys"):
        qk_drift([Checkpoint(folder, 1)])
    write_json(folder / "config.json", {"model_type": "mamba"})
    save_file({"backbone.layers.0.mixer.A_log": torch.ones(2)}, folder / "model.safetensors")
    with pytest.raises(ValueError, match="finds no query and key projections of model_type='mamba'"):
        qk_drift([Checkpoint(folder, 1)])
