"""Ladders and models from a hub: revisions are steps, nothing is fetched too early, and what goes wrong is one line."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hub_server import Hub, serve
from transformers import LlamaConfig, LlamaForCausalLM

import hybridscope as hs
from hybridscope.hooks.adapters import fla
from hybridscope.hooks.adapters.fla_config import read_config
from hybridscope.hooks.adapters.hub import HubCheckpoint

PYTHIA, OLMO = "some/pythia", "some/hybrid"
TOKENS = torch.arange(3, 11)[None]


def llama(step: int) -> LlamaForCausalLM:
    torch.manual_seed(step)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=41, hidden_size=16, intermediate_size=8, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=64,
        )
    ).eval()  # fmt: skip


def gla(step: int) -> hs.HybridLM:
    torch.manual_seed(step)
    attn = {"layers": [1], "num_heads": 2}
    return hs.HybridLM(
        read_config(
            {
                "model_type": "gla", "hidden_size": 16, "num_hidden_layers": 2, "num_heads": 2, "intermediate_size": 8,
                "vocab_size": 41, "norm_eps": 1e-6, "expand_k": 1, "expand_v": 1, "attn": attn,
            }
        )
    )  # fmt: skip


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    for step in (0, 1000, 2000):
        llama(step).save_pretrained(folder / f"step{step}")
    for step in (1000, 5000):
        fla.save(gla(step), folder / f"gla{step}")
    return folder


@pytest.fixture
def online(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What HF_HUB_OFFLINE=0 and an empty cache are to a new process."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_PROGRESS_BARS", True)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


@pytest.fixture
def hub(saved: Path, online: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    from huggingface_hub import constants

    hub = Hub()
    for name, revision in (
        ("step2000", "main"),
        ("step0", "step0"),
        ("step1000", "step1000"),
        ("step2000", "step2000"),
    ):
        hub.put(PYTHIA, revision, saved / name)
    hub.put(OLMO, "stage1-step1000-tokens5B", saved / "gla1000")
    hub.put(OLMO, "stage1-step5000-tokens21B", saved / "gla5000")
    hub.put(OLMO, "stage2-step1000-tokens3B", saved / "gla5000")
    with serve(hub):
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        )
        yield hub


def test_revisions_are_a_ladder_of_which_nothing_is_fetched_before_it_is_loaded(hub: Hub) -> None:
    ladder = hs.ladder(PYTHIA)
    assert ladder.steps == [0, 1000, 2000]  # main is no step
    assert hub.asked == []
    with torch.no_grad():
        assert torch.allclose(ladder.step(1000).load()(TOKENS), llama(1000)(TOKENS).logits, atol=1e-5)
    assert {name.split("/")[0] for name in hub.asked} == {"step1000"}
    before = len(hub.asked)
    name = "model.layers.1.self_attn.q_proj.weight"
    assert torch.equal(ladder.step(1000).tensor(name), llama(1000).state_dict()[name])
    assert len(hub.asked) == before  # from the cache
    assert repr(ladder[0]) == "HubCheckpoint(step=0, some/pythia@step0)"


def test_revisions_with_stages_and_tokens_of_fla_models(hub: Hub) -> None:
    with pytest.raises(ValueError, match=r'both step 1000; choose with revisions, e\.g\. "stage1-\*"'):
        hs.ladder(OLMO)
    ladder = hs.ladder(OLMO, revisions="stage1-*")
    assert ladder.steps == [1000, 5000]
    assert [ladder.tokens(step) for step in ladder.steps] == [5_000_000_000, 21_000_000_000]
    model = ladder.final.load(dtype="float32")
    assert [site.mixer for site in model.sites] == ["gla", "full"]
    assert torch.equal(model(TOKENS), gla(5000)(TOKENS))


def test_one_revision_of_a_model(hub: Hub) -> None:
    with torch.no_grad():
        wanted = {step: llama(step)(TOKENS).logits for step in (0, 2000)}
        assert torch.allclose(hs.load(PYTHIA, revision="step0")(TOKENS), wanted[0], atol=1e-5)
        assert torch.allclose(hs.load(PYTHIA)(TOKENS), wanted[2000], atol=1e-5)


def test_wrong_names_are_one_line(hub: Hub) -> None:
    for wrong, kind, said in (
        (
            lambda: hs.load(PYTHIA, revision="step7"),
            ValueError,
            "some/pythia: no revision 'step7'; it has main, step0, ",
        ),
        (lambda: hs.load("some/nothing"), OSError, "no such repository, or a private one"),
        (lambda: hs.ladder("some/nothing"), OSError, "no such repository, or a private one"),
        (lambda: hs.ladder(PYTHIA, revisions="stage*"), ValueError, "an empty ladder; expected revisions"),
        (lambda: hs.ladder(PYTHIA, config="config.json"), ValueError, "config: only for DCP folders"),
        (lambda: hs.load(PYTHIA, revison="step0"), ValueError, "unknown option 'revison' for a hub id; it takes: "),
    ):
        with pytest.raises(kind, match=said) as error:
            wrong()
        assert "\n" not in str(error.value)
    assert hub.asked == []


def test_missing_and_lost_revisions_are_warned_about_and_the_rest_is_kept(hub: Hub) -> None:
    with pytest.warns(UserWarning, match="some/pythia: step 7 left out: missing"):
        ladder = hs.ladder(PYTHIA, steps=[0, 7, 2000])
    assert ladder.steps == [0, 2000]
    hub.lost.add("step1000")
    with pytest.warns(UserWarning, match="step 1000 left out: some/pythia: no revision 'step1000'"):
        assert hs.ladder(PYTHIA).steps == [0, 2000]


def test_two_revisions_with_the_same_weights_are_refused_before_any_is_fetched(hub: Hub, saved: Path) -> None:
    hub.put(PYTHIA, "step3000", saved / "step1000")
    with pytest.raises(ValueError, match="steps 1000 and 3000 hold identical weights"):
        hs.ladder(PYTHIA)
    assert hub.asked == []


def test_a_broken_download_is_one_line_and_leaves_nothing_that_loads(hub: Hub) -> None:
    hub.broken.add("model.safetensors")
    checkpoint = hs.ladder(PYTHIA)[0]
    with pytest.raises(OSError, match="some/pythia@step0: the hub's answer broke off") as error:
        checkpoint.load()
    assert "\n" not in str(error.value)
    hub.broken.clear()
    with torch.no_grad():
        assert torch.allclose(checkpoint.load()(TOKENS), llama(0)(TOKENS).logits, atol=1e-5)


def test_a_missing_shard_is_named(hub: Hub, saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved / "gla1000", tmp_path / "a")
    (tmp_path / "a/model.safetensors").rename(tmp_path / "a/model-00001-of-00002.safetensors")
    (tmp_path / "a/model.safetensors.index.json").write_text(
        '{"weight_map": {"a": "model-00002-of-00002.safetensors"}}'
    )
    hub.put("some/shards", "main", tmp_path / "a")
    with pytest.raises(FileNotFoundError, match=r"model-00002-of-00002\.safetensors: missing"):
        hs.load("some/shards")


def test_code_that_comes_with_a_model_is_refused(hub: Hub, saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved / "step0", tmp_path / "a")
    (tmp_path / "a/config.json").write_text('{"model_type": "own", "auto_map": {"AutoConfig": "own.Own"}}')
    hub.put("some/own", "main", tmp_path / "a")
    with pytest.raises(ValueError, match="'own' comes with its own code; pass trust_remote_code=True"):
        hs.load("some/own")


def test_offline_the_cached_revisions_are_the_ladder(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    for step in (0, 2000):
        hs.ladder(PYTHIA).step(step).path  # noqa: B018  # fetches it
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    count = len(hub.asked)
    ladder = hs.ladder(PYTHIA)
    assert ladder.steps == [0, 2000]
    with torch.no_grad():
        assert torch.allclose(ladder.final.load()(TOKENS), llama(2000)(TOKENS).logits, atol=1e-5)
    assert len(hub.asked) == count


def test_offline_and_unreachable_are_said_in_one_line(online: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    for wrong in (lambda: hs.load(PYTHIA), lambda: hs.ladder(PYTHIA)):
        with pytest.raises(OSError, match=r"from the hub: no connection to http://127\.0\.0\.1:9") as error:
            wrong()
        assert "\n" not in str(error.value)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    for wrong in (lambda: hs.load(PYTHIA, revision="step0"), lambda: hs.ladder(PYTHIA)):
        with pytest.raises(OSError, match="not to be had from the hub: offline") as error:
            wrong()
        assert "\n" not in str(error.value)


def test_the_endpoint_of_the_environment_is_asked(saved: Path, tmp_path: Path) -> None:
    """HF_ENDPOINT and HF_HOME as a user sets them; then, offline, what they left."""
    hub = Hub()
    for step in (0, 1000):
        hub.put(PYTHIA, f"step{step}", saved / f"step{step}")
    program = """
import sys, torch, hybridscope as hs
torch.set_num_threads(1)
ladder = hs.ladder("some/pythia")
with torch.no_grad():
    print(ladder.steps, ladder.final.load()(torch.arange(3, 11)[None])[0, -1, :3].tolist())
    print(hs.load("some/pythia", revision="step1000").depth)
try:
    hs.load("some/pythia", revision="step7")
except (ValueError, OSError) as error:
    print(error)
"""
    said = {}
    with serve(hub):
        for offline in ("0", "1"):
            env = {
                **os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": offline,
                "NO_PROXY": "127.0.0.1", "PYTHONPATH": os.pathsep.join(sys.path),
            }  # fmt: skip
            env = {name: x for name, x in env.items() if name not in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE")}
            run = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=False)
            assert run.returncode == 0, run.stderr[-2000:]
            said[offline] = run.stdout.splitlines()
    with torch.no_grad():
        expected = llama(1000)(TOKENS).logits[0, -1, :3].tolist()
    steps, logits = said["0"][0].split("] ")
    assert steps == "[0, 1000"
    assert json.loads(logits) == pytest.approx(expected, abs=1e-5)
    assert said["0"][1:] == ["2", "some/pythia: no revision 'step7'; it has step0, step1000"]
    assert said["1"][0] == f"[1000] {logits}"
    assert len(said["1"]) == 3
    assert said["1"][2].startswith("some/pythia@step7: no such folder, and not to be had from the hub: offline")
    assert str(tmp_path / "home") in said["1"][2]
    assert {name.split("/")[0] for name in hub.asked} == {"step1000"}


def test_snapshots_in_local_folders_are_a_ladder_too(saved: Path, tmp_path: Path) -> None:
    for step in (1000, 5000):
        shutil.copytree(saved / f"gla{step}", tmp_path / f"stage1-step{step}-tokens{step // 200}B")
    ladder = hs.ladder(tmp_path)
    assert ladder.steps == [1000, 5000]
    assert ladder.tokens(5000) == 25_000_000_000
    assert not isinstance(ladder[0], HubCheckpoint)
    assert hs.ladder(tmp_path, steps=[5000]).steps == [5000]
    with pytest.raises(ValueError, match="is a local folder, which has no revisions"):
        hs.ladder(tmp_path, revisions="stage1-*")
