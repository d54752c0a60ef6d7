"""Ladders: the steps of a run in order, loaded one at a time; what is missing or broken is reported, not lost."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import hybridscope as hs
from hybridscope.hooks import checkpoint as checkpoint_module
from hybridscope.hooks.checkpoint import Checkpoint, write_json


def model_at(step: int) -> hs.HybridLM:
    torch.manual_seed(step)
    return hs.HybridLM(hs.HybridConfig(["swa:4", "full"], 2, 16, 4, 41, d_ff=8))


def put(folder: Path, name: str, seed: int) -> Path:
    model_at(seed).save(folder / name)
    return folder / name


@pytest.fixture
def folder(tmp_path) -> Path:
    for step in (0, 5, 10, 100):
        put(tmp_path, f"step-{step:06d}", step)
    write_json(tmp_path / "run.json", {"steps": [0, 5, 10, 100], "tokens_per_step": 32, "seed": 7})
    return tmp_path


def test_steps_come_in_order_each_with_its_weights(folder):
    ladder = hs.ladder(str(folder))
    assert ladder.steps == [0, 5, 10, 100]
    assert [step for step, _ in ladder] == ladder.steps
    assert len(ladder) == 4
    assert ladder.final.step == 100
    for step, checkpoint in ladder:
        assert torch.equal(checkpoint.load().state_dict()["embed.weight"], model_at(step).embed.weight)
    assert ladder.step(10).step == ladder[2].step == 10
    assert ladder.run["seed"] == 7
    assert ladder.tokens(10) == 320
    with pytest.raises(ValueError, match=r"no step 7; it has \[0, 5, 10, 100\]"):
        ladder.step(7)


def test_the_order_is_by_number_not_by_name(tmp_path):
    for step in (9, 10, 1000, 200):
        put(tmp_path, f"step-{step}", step)
    assert hs.ladder(tmp_path).steps == [9, 10, 200, 1000]


def test_opening_a_ladder_loads_no_model_and_reads_no_tensor(folder, monkeypatch):
    def forbidden(*args, **kwargs):
        raise AssertionError("read a tensor")

    loaded = []
    with monkeypatch.context() as patch:
        patch.setattr("safetensors.torch.load_file", forbidden)
        patch.setattr(Checkpoint, "tensor", forbidden)
        ladder = hs.ladder(folder)
        assert list(ladder)
    load = checkpoint_module.load
    monkeypatch.setattr(checkpoint_module, "load", lambda path, **o: loaded.append(path.name) or load(path, **o))
    for step, checkpoint in ladder:
        if step == 5:
            checkpoint.load()
            break
    assert loaded == ["step-000005"]


@pytest.mark.parametrize(
    "names", [("checkpoint-5", "checkpoint-50"), ("step1000", "step20"), ("global_step7", "step_8")]
)
def test_other_tools_names_are_steps_too(tmp_path, names):
    for n, name in enumerate(names):
        put(tmp_path, name, n)
    numbers = sorted(int("".join(c for c in name if c.isdigit())) for name in names)
    assert hs.ladder(tmp_path).steps == numbers


def test_transformers_checkpoints_form_a_ladder(tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=41, hidden_size=16, intermediate_size=8, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    for step in (10, 20):
        torch.manual_seed(step)
        model = LlamaForCausalLM(config)
        model.save_pretrained(tmp_path / f"checkpoint-{step}")
    ladder = hs.ladder(tmp_path)
    assert ladder.steps == [10, 20]
    tokens = torch.arange(8)[None]
    got = ladder.final.load()(tokens)
    assert torch.allclose(got, model(tokens).logits, atol=1e-5)
    assert [s.kind for s in ladder[0].load().sites] == ["full", "full"]


def test_things_that_are_no_steps_are_passed_over(folder):
    (folder / "step-000020").write_text("a file")
    (folder / "notes-30").mkdir()
    shutil.copytree(folder / "step-000005", folder / ".step-000040.abc")  # left by a killed run
    assert hs.ladder(folder).steps == [0, 5, 10, 100]


# Problems


def test_a_missing_step_is_warned_about(folder):
    shutil.rmtree(folder / "step-000010")
    with pytest.warns(UserWarning, match="step 10 left out: missing"):
        ladder = hs.ladder(folder)
    assert ladder.steps == [0, 5, 100]
    assert ladder.problems == {10: "missing"}


def truncate(step: Path) -> None:
    file = step / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-20])


def no_config(step: Path) -> None:
    (step / "config.json").unlink()


def no_weights(step: Path) -> None:
    (step / "model.safetensors").unlink()


@pytest.mark.parametrize(
    ("spoil", "named"), [(truncate, "truncated"), (no_config, "no config.json"), (no_weights, "no safetensors file")]
)
def test_an_unreadable_step_is_warned_about_and_the_rest_is_kept(folder, spoil, named):
    spoil(folder / "step-000005")
    with pytest.warns(UserWarning, match=f"step 5 left out: .*{named}") as caught:
        ladder = hs.ladder(folder)
    assert len(caught) == 1
    assert ladder.steps == [0, 10, 100]
    assert named in ladder.problems[5]
    assert all(checkpoint.load() for _, checkpoint in ladder)


def test_two_steps_with_the_same_weights_are_both_named(folder):
    shutil.copy(folder / "step-000005/model.safetensors", folder / "step-000100/model.safetensors")
    with pytest.raises(ValueError, match="steps 5 and 100 hold identical weights"):
        hs.ladder(folder)


def test_large_files_that_differ_in_one_place_are_no_duplicates(tmp_path):
    """The sampled hash misses it; the whole files are then compared."""
    big = hs.HybridLM(hs.HybridConfig(("full",), 1, 256, 4, 1000))
    for step in (1, 2):
        big.save(tmp_path / f"step-{step}")
    file = tmp_path / "step-2/model.safetensors"
    weights = load_file(file)
    weights["embed.weight"][500, 100] += 1
    save_file(weights, file)
    one, two = (Checkpoint(tmp_path / f"step-{s}", s) for s in (1, 2))
    assert one.weight_hash(sample=True) == two.weight_hash(sample=True)
    assert hs.ladder(tmp_path).steps == [1, 2]
    shutil.copy(tmp_path / "step-1/model.safetensors", file)
    with pytest.raises(ValueError, match="steps 1 and 2 hold identical weights"):
        hs.ladder(tmp_path)


def test_two_folders_of_one_step_are_both_named(folder):
    put(folder, "checkpoint-5", 3)
    with pytest.raises(ValueError, match=r"checkpoint-5.*step 5|step-000005.*step 5") as error:
        hs.ladder(folder)
    assert "checkpoint-5" in str(error.value)
    assert "step-000005" in str(error.value)


def test_an_empty_ladder_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="empty ladder"):
        hs.ladder(tmp_path)
    with pytest.raises(FileNotFoundError, match="nowhere: no such ladder"):
        hs.ladder(tmp_path / "nowhere")


def test_a_ladder_of_which_nothing_is_readable_is_empty(folder):
    for step in folder.glob("step-*"):
        no_weights(step)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(ValueError, match="empty ladder"):
            hs.ladder(folder)


def test_a_ladder_needs_no_run_file_but_a_broken_one_is_named(folder):
    (folder / "run.json").unlink()
    ladder = hs.ladder(folder)
    assert ladder.run == {}
    assert ladder.tokens(5) is None
    (folder / "run.json").write_text("{")
    with pytest.raises(ValueError, match=r"run\.json: not valid JSON"):
        hs.ladder(folder)
