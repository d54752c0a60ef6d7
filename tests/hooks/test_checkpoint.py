"""Checkpoints: what is saved comes back bit for bit, a failure leaves nothing half done, and broken files say so."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import english
import pytest
import safetensors.torch
import torch
from helpers import TOLERANCE, error, model_of, tokens_of
from safetensors.torch import load_file, save_file

import hybridscope as hs
from hybridscope.hooks.checkpoint import Checkpoint, atomic_file, atomic_folder, read_json, save, write_json
from hybridscope.hooks.config import KINDS

PATTERNS = [tuple(f"{m}:4" if m == "swa" else m for m in KINDS), *[(f"{m}:4" if m == "swa" else m,) for m in KINDS]]


def tiny(pattern=("swa:4", "full"), **options) -> hs.HybridLM:
    return hs.HybridLM(hs.HybridConfig(list(pattern), len(pattern), 16, 4, 41, d_ff=8, **options))


def content(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def same(a: hs.HybridLM, b: hs.HybridLM) -> bool:
    one, two = a.state_dict(), b.state_dict()
    return set(one) == set(two) and all(one[n].dtype == two[n].dtype and torch.equal(one[n], two[n]) for n in one)


@pytest.fixture
def folder(tmp_path) -> Path:
    tiny().save(tmp_path / "model")
    return tmp_path / "model"


# Round trips


@pytest.mark.parametrize("pattern", PATTERNS, ids="-".join)
@pytest.mark.parametrize("tied", [False, True])
def test_weights_and_config_come_back_bit_for_bit(tmp_path, pattern, tied):
    model = tiny(pattern, n_kv_heads=2, qk_norm=True, tie_embeddings=tied, context=64)
    model.save(tmp_path / "model")
    loaded = hs.load(tmp_path / "model")
    assert same(loaded, model)
    assert loaded.config == model.config
    assert not loaded.training
    assert (loaded.unembed.weight is loaded.embed.weight) == tied
    tokens = tokens_of(2, 12)
    assert torch.equal(loaded(tokens), model(tokens))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_stored_precision_is_kept_unless_another_is_asked_for(tmp_path, dtype):
    model = tiny(("gdn", "full")).to(dtype)
    model.save(tmp_path / "model")
    assert same(hs.load(str(tmp_path / "model")), model)
    assert hs.load(tmp_path / "model", dtype="float32").embed.weight.dtype == torch.float32
    assert hs.load(tmp_path / "model", dtype=torch.float16, device="cpu").embed.weight.dtype == torch.float16


def test_mixer_options_come_back(tmp_path):
    model = tiny(("gdn",), mixers={"gdn": {"conv": 2, "value_dim": 8, "heads": 2}})
    model.save(tmp_path / "model")
    assert hs.load(tmp_path / "model").config.options("gdn") == model.config.options("gdn")


@pytest.mark.parametrize("kind", english.KINDS)
def test_the_tokenizer_comes_along(tmp_path, kind):
    model = tiny()
    model.tokenizer = english.tokenizer(kind)
    model.save(tmp_path / "model")
    loaded = hs.load(tmp_path / "model").tokenizer
    text = "The harbour holds 31415920 apples."
    assert loaded(text)["input_ids"] == model.tokenizer(text)["input_ids"]
    assert loaded.decode([9, 30, 40]) == model.tokenizer.decode([9, 30, 40])


def test_further_facts_stand_in_the_config(tmp_path):
    save(tiny(), tmp_path / "model", {"step": 7, "data": {"keys": 3}})
    assert read_json(tmp_path / "model/config.json")["data"] == {"keys": 3}
    assert hs.load(tmp_path / "model").config.n_layers == 2


def test_a_model_is_returned_as_it_is():
    model = tiny()
    assert hs.load(model) is model
    with pytest.raises(ValueError, match="unknown option 'dtype'"):
        hs.load(model, dtype="float64")


def test_a_home_folder_may_be_written_short(folder, monkeypatch):
    monkeypatch.setenv("HOME", str(folder.parent))
    assert same(hs.load("~/model"), hs.load(folder))


# Writing


def test_saving_again_replaces_the_old_checkpoint_whole(folder):
    tokenized = tiny()
    tokenized.tokenizer = english.tokenizer("bytes")
    tokenized.save(folder)
    after = tiny(("gdn",))
    after.save(folder)
    assert same(hs.load(folder), after)
    assert sorted(content(folder)) == ["config.json", "model.safetensors"]  # no stale tokenizer
    assert [p.name for p in folder.parent.iterdir()] == ["model"]


@pytest.mark.parametrize("existing", [False, True])
@pytest.mark.parametrize("how", ["weights", "tokenizer", "kill", "rename"])
def test_a_failure_on_the_way_leaves_the_old_checkpoint_or_nothing(tmp_path, monkeypatch, existing, how):
    target = tmp_path / "model"
    if existing:
        tiny().save(target)
    before = content(target)
    model = tiny(("gdn",))
    if how == "tokenizer":
        model.tokenizer = object()
    elif how == "rename":
        rename = Path.rename

        def stuck(self, to):
            if to == target and not self.name.endswith(".old"):
                raise OSError("disk full")
            return rename(self, to)

        monkeypatch.setattr(Path, "rename", stuck)
    else:

        def broken(tensors, file):
            Path(file).write_bytes(b"half")
            raise (KeyboardInterrupt if how == "kill" else OSError("disk full"))

        monkeypatch.setattr(safetensors.torch, "save_file", broken)
    with pytest.raises((OSError, KeyboardInterrupt, AttributeError)):
        model.save(target)
    monkeypatch.undo()
    assert target.exists() == existing
    assert content(target) == before
    assert [p.name for p in tmp_path.iterdir()] == ["model"] * existing  # no temporary left


def test_a_checkpoint_is_never_seen_half_written(tmp_path, monkeypatch):
    """While the weights are being written, nothing carries the final name."""
    seen = []
    write = safetensors.torch.save_file

    def slow(tensors, file):
        seen.append((tmp_path / "model").exists())
        write(tensors, file)

    monkeypatch.setattr(safetensors.torch, "save_file", slow)
    tiny().save(tmp_path / "model")
    assert seen == [False]


def test_a_folder_of_other_things_is_not_overwritten(tmp_path):
    (tmp_path / "thesis.tex").write_text("three years")
    with pytest.raises(ValueError, match="holds something else"):
        tiny().save(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]
    (tmp_path / "empty").mkdir()
    tiny().save(tmp_path / "empty")
    assert hs.load(tmp_path / "empty").config.n_layers == 2


def test_weights_that_are_no_numbers_are_not_saved(folder):
    before = content(folder)
    model = tiny()
    with torch.no_grad():
        model.layers[1].attn.q_proj.weight[0, 0] = torch.inf
    with pytest.raises(ValueError, match=r"blocks\.1\.attn\.q_proj\.weight holds NaN or infinite"):
        model.save(folder)
    assert content(folder) == before


def test_atomic_file_replaces_or_leaves(tmp_path):
    file = tmp_path / "deep" / "x.txt"
    with atomic_file(file) as temporary:
        temporary.write_text("one")

    def fail():
        with atomic_file(file) as temporary:
            temporary.write_text("two")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert file.read_text() == "one"
    assert [p.name for p in file.parent.iterdir()] == ["x.txt"]


def test_atomic_folder_can_be_read_by_others(tmp_path):
    with atomic_folder(tmp_path / "x") as temporary:
        (temporary / "f").write_text("")
    assert (tmp_path / "x").stat().st_mode & 0o777 == 0o755


# Broken checkpoints: one line that names the thing


def refused(folder: Path, named: str, kind: type[Exception] = ValueError, **options) -> None:
    with pytest.raises(kind, match=named) as error:
        hs.load(folder, **options)
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize("keep", [0, 5, 200, -4])
def test_truncated_weights(folder, keep):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    refused(folder, r"model/model\.safetensors: truncated")


def test_garbage_weights(folder):
    (folder / "model.safetensors").write_bytes(b"\x93NUMPY" * 400)
    refused(folder, r"model\.safetensors: truncated or not a safetensors file")


def test_missing_files(folder):
    (folder / "model.safetensors").unlink()
    refused(folder, r"model\.safetensors: missing", FileNotFoundError)
    (folder / "config.json").unlink()
    refused(folder, r"config\.json: missing", FileNotFoundError)
    shutil.rmtree(folder)
    refused(folder, "model: no such checkpoint", FileNotFoundError)
    refused(Path("./nowhere"), "nowhere", FileNotFoundError)


@pytest.mark.parametrize("text", [b"{", b"\xff\xfe\x00", b"[1]", b""])
def test_garbage_config(folder, text):
    (folder / "config.json").write_bytes(text)
    refused(folder, r"config\.json: (not valid JSON|expected a JSON object)")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"n_layer": 2}, "unknown key 'n_layer'"),
        ({"n_heads": 0}, "n_heads=0"),
        ({"pattern": ["full", "mamba9"]}, "unknown mixer 'mamba9'"),
        ({"d_ff": None, "n_heads": 3}, "config.json: "),
        (None, "no model section"),
    ],
)
def test_a_config_that_is_wrong(folder, change, named):
    config = read_json(folder / "config.json")
    config["model"] = None if change is None else {**config["model"], **change}
    write_json(folder / "config.json", config)
    refused(folder, named)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"n_layers": 3, "pattern": ["swa:4", "full", "full"]}, r"lacks tensor 'blocks\.2"),
        ({"n_layers": 1, "pattern": ["full"]}, r"unknown tensor 'blocks\.1"),
        ({"pattern": ["gdn", "full"]}, r"lacks tensor 'blocks\.0\.attn"),
        ({"vocab_size": 42}, r"embed\.weight has shape \(41, 16\); the config asks for \(42, 16\)"),
    ],
)
def test_config_and_weights_that_do_not_belong_together(folder, change, named):
    config = read_json(folder / "config.json")
    config["model"].update(change)
    write_json(folder / "config.json", config)
    refused(folder, named)


@pytest.mark.parametrize("value", [torch.nan, -torch.inf])
def test_weights_that_are_no_numbers(folder, value):
    weights = load_file(folder / "model.safetensors")
    weights["blocks.1.mlp.up_proj.weight"][3, 2] = value
    save_file(weights, folder / "model.safetensors")
    refused(folder, r"blocks\.1\.mlp\.up_proj\.weight holds NaN or infinite")


def test_unknown_options_name_those_there_are(folder):
    refused(folder, "unknown option 'revison' for a hybridscope checkpoint; it takes: dtype, device", revison="main")


# Reading parts


def test_single_tensors_are_read_without_the_rest(folder):
    model, checkpoint = hs.load(folder), Checkpoint(folder, 3)
    name = "blocks.1.attn.q_proj.weight"
    assert torch.equal(checkpoint.tensor(name), model.state_dict()[name])
    assert torch.equal(checkpoint.tensor(name, slice(4, 8)), model.state_dict()[name][4:8])
    assert set(checkpoint.names()) == set(model.state_dict())
    assert same(checkpoint.load(), model)
    assert same(hs.load(checkpoint), model)
    with pytest.raises(ValueError, match="no tensor 'x'"):
        checkpoint.tensor("x")


def test_a_weight_hash_tells_weights_apart_whatever_their_names(tmp_path):
    first = tiny()
    for name in ("a", "b"):
        first.save(tmp_path / name)
    tiny().save(tmp_path / "c")
    hashes = [Checkpoint(tmp_path / n, 0).weight_hash() for n in "abc"]
    assert hashes[0] == hashes[1] != hashes[2]


def test_a_sampled_hash_reads_little_and_sees_a_trained_model(tmp_path):
    big = hs.HybridLM(hs.HybridConfig(("full",), 1, 256, 4, 1000))
    big.save(tmp_path / "a")
    with torch.no_grad():
        for p in big.parameters():
            p.mul_(1.01)
    big.save(tmp_path / "b")
    a, b = Checkpoint(tmp_path / "a", 0), Checkpoint(tmp_path / "b", 1)
    assert a.weight_hash(sample=True) != b.weight_hash(sample=True)
    assert a.weight_hash(sample=True) == a.weight_hash(sample=True)


def test_config_is_readable_json(folder):
    data = json.loads((folder / "config.json").read_text())
    assert data["format"] == "hybridscope"
    assert data["model"]["pattern"] == ["swa:4", "full"]


def test_a_loaded_model_measures_as_the_saved_one(tmp_path):
    """fp64, with every switch at work."""
    model = model_of("swa:4", "gdn", "full", n_kv_heads=2)
    model.save(tmp_path / "model")
    loaded = hs.load(tmp_path / "model")
    tokens = tokens_of(2, 20)
    with model.cap(full=6), loaded.cap(full=6):
        assert error(loaded(tokens), model(tokens)) < TOLERANCE["model"]
