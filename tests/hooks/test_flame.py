"""Runs of flame: DCP folders as a ladder, loaded without a conversion step, a tensor at a time."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
import torch.distributed.checkpoint.filesystem as filesystem
from families import build
from torch import Tensor
from torch.distributed.checkpoint.state_dict_saver import save

import hybridscope as hs
from hybridscope.hooks.adapters import fla
from hybridscope.hooks.adapters.fla_config import read_config
from hybridscope.hooks.adapters.flame import DcpCheckpoint

TOKENS = torch.arange(8)[None]
CONFIG = {
    "model_type": "gated_deltanet", "hidden_size": 16, "num_hidden_layers": 2, "num_heads": 2, "head_dim": 4,
    "expand_v": 2, "intermediate_size": 24, "vocab_size": 41, "norm_eps": 1e-6, "tie_word_embeddings": False,
    "attn": {"layers": [1], "num_heads": 4, "num_kv_heads": 2},
}  # fmt: skip
Q = "model.layers.1.attn.q_proj.weight"


def model_at(step: int) -> hs.HybridLM:
    torch.manual_seed(step)
    return hs.HybridLM(read_config(CONFIG))


def put(folder: Path, weights: dict[str, Tensor], step: int, inside: str = "model.") -> None:
    """A step as torchtitan's checkpointer saves it: the model, an optimiser as large again twice, counters."""
    state: dict[str, Any] = {inside + name: x.detach() for name, x in weights.items()}
    state.update({f"optimizer.state.{name}.exp_avg": torch.zeros_like(x) for name, x in weights.items()})
    state["train_state"] = {"step": step}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        save(state, storage_writer=filesystem.FileSystemWriter(folder / f"step-{step}"), no_dist=True)


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    run = tmp_path_factory.mktemp("run")
    for step in (10, 200):
        put(run / "checkpoint", fla.state_dict(model_at(step)), step)
    (run / "config.json").write_text(json.dumps(CONFIG))
    return run


@pytest.fixture
def run(saved: Path, tmp_path: Path) -> Path:
    """A copy to spoil."""
    return shutil.copytree(saved, tmp_path / "run")


def test_steps_are_a_ladder_and_load_as_hybrids(saved: Path) -> None:
    ladder = hs.ladder(saved / "checkpoint")
    assert ladder.steps == [10, 200]
    for step, checkpoint in ladder:
        model = checkpoint.load()
        assert [site.mixer for site in model.sites] == ["gdn", "full"]
        assert torch.equal(model(TOKENS), model_at(step)(TOKENS))
    assert torch.equal(hs.load(saved / "checkpoint/step-10", dtype="float64")(TOKENS), model_at(10).double()(TOKENS))


def test_tensors_are_read_one_at_a_time_and_optimisers_not_at_all(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[int] = []
    plain = filesystem.FileSystemReader.read_data

    def counted(self: Any, plan: Any, planner: Any) -> Any:
        assert not any("optimizer" in item.dest_index.fqn for item in plan.items)
        reads.append(len({item.dest_index.fqn for item in plan.items}))
        return plain(self, plan, planner)

    monkeypatch.setattr(filesystem.FileSystemReader, "read_data", counted)
    checkpoint = hs.ladder(saved / "checkpoint").final
    reads.clear()
    assert torch.equal(checkpoint.tensor(Q, slice(4, 8)), fla.state_dict(model_at(200))[Q][4:8])
    assert reads == [1]
    assert checkpoint.shapes()[Q] == (16, 16)
    assert checkpoint.shapes().keys() == fla.state_dict(model_at(200)).keys()
    checkpoint.load()
    assert set(reads) == {1}


def test_q_and_k_drift_over_a_run(saved: Path) -> None:
    """As over a ladder of ours with the same weights."""
    for step in (10, 200):
        model_at(step).save(saved / f"ours/step-{step}")
    theirs, ours = (hs.qk_drift(saved / name) for name in ("checkpoint", "ours"))
    pd.testing.assert_frame_equal(theirs, ours)
    assert theirs.query("step == 10")["bilinear_rel"].min() > 0.1


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning:transformers")
@pytest.mark.parametrize("family", ["qwen3_next", "bamba"])
def test_families_of_transformers_are_what_their_own_folders_are(family: str, tmp_path: Path) -> None:
    """Logits and drift: gates inside q_proj, norms, infinities in the config."""
    for step in (1, 2):
        model = build(family, seed=step)
        model.save_pretrained(tmp_path / f"own/step-{step}")
        put(tmp_path / "dcp", model.state_dict(), step)
    model.config.save_pretrained(tmp_path / "dcp")
    with torch.no_grad():
        assert torch.equal(*(hs.ladder(tmp_path / name).final.load()(TOKENS) for name in ("own", "dcp")))
    theirs, dcp = (hs.qk_drift(tmp_path / name) for name in ("own", "dcp"))
    pd.testing.assert_frame_equal(theirs, dcp)
    assert dcp.query("step == 1")["bilinear_rel"].min() > 0.1


def test_tensors_saved_without_a_prefix_or_from_wrapped_modules(tmp_path: Path) -> None:
    weights = fla.state_dict(model_at(3))
    put(tmp_path, weights, 3, inside="")
    wrapped = {name.replace("layers.1.", "layers.1._checkpoint_wrapped_module."): x for name, x in weights.items()}
    put(tmp_path / "other", wrapped, 3)
    for folder in (tmp_path, tmp_path / "other"):
        assert torch.equal(hs.load(folder / "step-3", config=CONFIG)(TOKENS), model_at(3)(TOKENS))


def test_models_of_transformers(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=41, hidden_size=16, intermediate_size=8, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=True,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    put(tmp_path, {name: x for name, x in model.state_dict().items() if name != "lm_head.weight"}, 1)
    config.save_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.allclose(hs.ladder(tmp_path).final.load()(TOKENS), model(TOKENS).logits, atol=1e-5)
    put(tmp_path, {"model.norm.weight": torch.ones(16)}, 2)
    with pytest.raises(ValueError, match=r"lacks tensor 'model\.embed_tokens\.weight'"):
        hs.load(tmp_path / "step-2")


def test_the_config_is_looked_for_beside_and_above_or_given(run: Path) -> None:
    (run / "config.json").rename(run / "other.json")
    with (
        pytest.warns(UserWarning, match=r"no config\.json in it or up to two folders above; give config="),
        pytest.raises(ValueError, match="empty ladder"),
    ):
        hs.ladder(run / "checkpoint")
    for config in (run / "other.json", str(run / "other.json"), CONFIG):
        assert hs.ladder(run / "checkpoint", config=config).steps == [10, 200]
    with pytest.raises(FileNotFoundError, match=r"nowhere\.json: missing"):
        hs.load(run / "checkpoint/step-10", config=run / "nowhere.json")
    with pytest.raises(ValueError, match="model_type 'samba' is unknown to this version of transformers"):
        hs.load(run / "checkpoint/step-10", config={"model_type": "samba"})


def test_broken_steps_are_warned_about_and_the_rest_is_kept(run: Path) -> None:
    step = run / "checkpoint/step-10"
    (file,) = step.glob("*.distcp")
    whole = file.read_bytes()
    for spoil, named in (
        (lambda: file.write_bytes(whole[: len(whole) // 4]), "truncated"),
        (lambda: file.unlink(), r"0\.distcp: missing; \.metadata lists it"),
        (lambda: (step / ".metadata").write_bytes(b"no"), r"\.metadata: truncated or not DCP metadata"),
    ):
        spoil()
        with pytest.warns(UserWarning, match=f"step 10 left out: .*{named}"):
            assert hs.ladder(run / "checkpoint").steps == [200]


def test_config_and_weights_that_disagree(run: Path) -> None:
    content = {**CONFIG, "attn": {"layers": [0], "num_heads": 4, "num_kv_heads": 2}}
    with pytest.raises(ValueError, match="disagree on layer 0, by the config 'full'"):
        hs.load(run / "checkpoint/step-10", config=content)
    with pytest.raises(ValueError, match="unknown option 'revision' for a DCP folder; it takes: config, dtype, device"):
        DcpCheckpoint(run / "checkpoint/step-10", 10).load(revision="main")
    with pytest.raises(ValueError, match="no tensor 'abc'"):
        DcpCheckpoint(run / "checkpoint/step-10", 10).tensor("abc")


def test_two_steps_with_the_same_weights_are_both_named(run: Path) -> None:
    """Though their optimisers, and so their files, differ."""
    weights = fla.state_dict(model_at(10))
    put(run / "checkpoint", {**weights, "extra": torch.ones(3)}, 300)
    with pytest.raises(ValueError, match="steps 10 and 300 hold identical weights"):
        hs.ladder(run / "checkpoint")
