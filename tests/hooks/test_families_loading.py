"""Loading hybrid families: beside flash-linear-attention on a machine without CUDA, split over devices, and broken."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from families import CAP, D, build, tokens_of

import hybridscope as hs

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning:transformers"),
    pytest.mark.filterwarnings("ignore::UserWarning:accelerate", "ignore:.*deprecated:DeprecationWarning"),
]

# flash-linear-attention, installed where there is no GPU

STUB = """
def _kernel(*args, **kwargs):
    raise RuntimeError("0 active drivers ([]). There should only be one.")
"""
OPS = {  # where transformers looks for them
    "ops/gated_delta_rule": ("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"),
    "ops/kda": ("chunk_kda", "fused_recurrent_kda"),
}
PROGRAM = """
import sys, torch
torch.set_num_threads(1)
import fla
from transformers import AutoModelForCausalLM
how, *folders = sys.argv[1:]
tokens = torch.arange(3, 15)[None]
for folder in folders:
    source = folder
    if how == "object":  # made before hybridscope was asked
        source = AutoModelForCausalLM.from_pretrained(folder).eval()
        try:
            source(tokens)
        except RuntimeError as error:
            print(error)
    import hybridscope as hs
    model = hs.load(source)
    with torch.no_grad():
        with model.cap(recurrent=6):
            capped = model(tokens)
        print(float((capped - model(tokens)).abs().max()), *model(tokens)[0, -1, :3].tolist())
        print(*model.generate(tokens, 3)[0, -3:].tolist())
"""


@pytest.fixture(scope="module")
def delta_folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folders = [tmp_path_factory.mktemp(family) for family in ("qwen3_next", "kimi_linear")]
    for folder in folders:
        build(folder.name.rstrip("0")).save_pretrained(folder)
    return folders


def beside(packages: Path, how: str, folders: list[Path]) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(packages), *sys.path]), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", PROGRAM, how, *map(str, folders)]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


def check_beside(packages: Path, folders: list[Path]) -> None:
    expected = []
    for folder in folders:
        loaded = hs.load(folder)
        tokens = torch.arange(3, 15)[None]
        with torch.no_grad():
            expected.append((loaded(tokens)[0, -1, :3].tolist(), loaded.generate(tokens, 3)[0, -3:].tolist()))
    for how in ("folder", "object"):
        run = beside(packages, how, folders)
        assert run.returncode == 0, run.stderr[-2000:]
        lines = run.stdout.splitlines()
        errors = [line for line in lines if "0 active drivers" in line]
        assert len(errors) == (len(folders) if how == "object" else 0)  # what users meet without us
        numbers = [[float(x) for x in line.split()] for line in lines if line not in errors]
        for (logits, picked), first, second in zip(expected, numbers[::2], numbers[1::2], strict=True):
            assert first[0] > 1e-4  # the cap reached the recurrence
            assert first[1:] == pytest.approx(logits, abs=1e-4)
            assert second == picked


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without CUDA")
def test_kernels_that_need_a_gpu_are_kept_out(tmp_path: Path, delta_folders: list[Path]) -> None:
    """A package in fla's place, with its layout and its error."""
    for folder, names in OPS.items():
        package = tmp_path / "fla" / folder
        package.mkdir(parents=True)
        body = STUB + "".join(f"{name} = _kernel\n" for name in names)
        (package / "__init__.py").write_text(body)
    (tmp_path / "fla" / "ops" / "__init__.py").write_text("")
    (tmp_path / "fla" / "__init__.py").write_text("from .ops import gated_delta_rule, kda\n__version__ = '0.6.0'\n")
    check_beside(tmp_path, delta_folders)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without CUDA")
def test_with_flash_linear_attention_itself(tmp_path: Path, delta_folders: list[Path]) -> None:
    """Installs fla into a folder of its own; needs the package index."""
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(tmp_path)]
    done = subprocess.run(
        [*pip, "flash-linear-attention==0.6.0", "fla-core==0.6.0"], capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip(f"fla cannot be installed here: {done.stderr.strip().splitlines()[-1]}")
    check_beside(tmp_path, delta_folders)


# Split models


@pytest.mark.parametrize("family", ["qwen3_next", "falcon_h1", "gemma3_text"])
def test_a_model_split_between_memory_and_disk(family: str, tmp_path: Path) -> None:
    """Weights of later layers stand on the meta device and come for each call: sites, numbers and switches are those
    of the whole model."""
    pytest.importorskip("accelerate", reason="device_map needs accelerate")
    build(family).save_pretrained(tmp_path)
    whole = hs.load(tmp_path)
    names = [name for name, _ in whole.model.named_children() if name != "model"]
    names += [f"model.{name}" for name, _ in whole.model.model.named_children() if name != "layers"]
    split = dict.fromkeys(names, "cpu")
    split |= {f"model.layers.{n}": "cpu" if n < 2 else "disk" for n in range(whole.depth)}
    loaded = hs.load(tmp_path, device_map=split, dtype="float32")
    assert {p.device.type for p in loaded.model.parameters()} == {"cpu", "meta"}
    assert repr(loaded.sites) == repr(whole.sites)
    tokens = tokens_of()
    caps = dict.fromkeys({site.kind for site in whole.sites}, CAP)
    last = next(site for site in reversed(whole.sites) if site.softmax)
    with torch.no_grad():
        assert torch.equal(loaded(tokens), whole(tokens))
        recorded = []
        for model in (loaded, whole):
            with model.cap(**caps), model.record(resid="last", stats=[-1]) as rec:
                model(tokens)
            recorded.append((rec.resid(3, "delta"), rec.stats(last.layer, last.index).entropy))
        for a, b in zip(*recorded, strict=True):
            assert torch.equal(a, b)
        with loaded.cap(**caps), whole.cap(**caps):
            assert torch.equal(loaded.generate(tokens, 4), whole.generate(tokens, 4))
        assert float(loaded.loss(tokens)) == float(whole.loss(tokens))


# Bad input


def spoil_config(**changes: Any) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **changes}))

    return spoil


def spoil_index(content: str) -> Callable[[Path], None]:
    return lambda folder: (folder / "model.safetensors.index.json").write_text(content) and None


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (spoil_config(layer_types=["linear_attention", "full_attention"] * 2), "lacks tensor|has .*but its config"),
        (spoil_config(layer_types=["linear_attention"] * 3), "layer_types|num_hidden_layers"),
        (spoil_config(layer_types=["linear_attention"] * 3 + ["fuller_attention"]), "fuller_attention|layer_types"),
        (spoil_config(linear_num_value_heads=8), r"has shape \(.*\); the config asks for \("),
        (spoil_index("{"), r"index\.json: not valid JSON"),
        (spoil_index("{}"), r"index\.json: has no weight_map"),
        (spoil_config(num_hidden_layers=2, layer_types=["linear_attention"] * 2), "has .*layers.2.*has 2 layers"),
        (spoil_config(model_type="strange", auto_map={"AutoConfig": "a.B"}), "pass trust_remote_code=True"),
    ],
)
def test_a_config_that_its_weights_do_not_fit(tmp_path: Path, spoil: Callable[[Path], None], message: str) -> None:
    build("qwen3_next").save_pretrained(tmp_path)
    spoil(tmp_path)
    with pytest.raises(ValueError, match=message) as caught:
        hs.load(tmp_path)
    assert "\n" not in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    build("bamba").save_pretrained(tmp_path, max_shard_size=40_000)
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 1
    shards[1].unlink()
    with pytest.raises(FileNotFoundError, match=rf"{shards[1].name}: missing; .*index\.json lists it"):
        hs.load(tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtyp": "float32"}, "dtyp: unknown option"),
        ({"trust_remote_code": "no"}, "trust_remote_code='no': expected True or False"),
        ({"context": 0}, "context=0: expected a number of tokens >= 1"),
        ({"dtype": "float33"}, "dtype='float33': expected a torch dtype"),
        ({"revision": "step1000"}, "revision='step1000'"),
        ({"device_map": {"": "nowhere"}}, "nowhere"),
    ],
)
def test_options_are_taken_or_refused_and_never_ignored(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    build("lfm2").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=message):
        hs.load(tmp_path, **options)


def test_loading_in_another_dtype(tmp_path: Path) -> None:
    build("qwen3_5_text").save_pretrained(tmp_path)
    for dtype in ("bfloat16", torch.float64):
        loaded = hs.load(tmp_path, dtype=dtype, context=64)
        with torch.no_grad(), loaded.cap(recurrent=CAP) if dtype == "bfloat16" else contextlib.nullcontext():
            logits = loaded(tokens_of())
        assert logits.dtype == (torch.bfloat16 if dtype == "bfloat16" else dtype)
        assert logits.isfinite().all()
        assert loaded.context == 64
        assert loaded.embedding().weight.shape[1] == D
