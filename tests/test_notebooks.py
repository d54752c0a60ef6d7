"""The notebooks run from top to bottom on the demo's ladder, show their figures, and use public names only."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

import hybridscope as hs

FOLDER = Path(__file__).parents[1] / "notebooks"
FIGURES = {"01_needle_probe": 3, "02_cap_a_layer_type": 2, "03_retrieval_head_formation": 2}
BAR = re.compile(r"\d+%\|.*\| \d+/\d+ \[")  # a progress bar: all that may stand on stderr

each = pytest.mark.parametrize("name", FIGURES)


def read(name: str) -> Any:
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)


def test_every_notebook_is_tested() -> None:
    assert sorted(path.stem for path in FOLDER.glob("*.ipynb")) == sorted(FIGURES)


@each
def test_runs_on_the_demo(name: str, demo: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYBRIDSCOPE_DEMO", str(demo.folder))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    notebook = read(name)
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(FOLDER)}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    said = "\n".join(o["text"] for o in outputs if o["output_type"] == "stream" and o["name"] == "stderr")
    unexpected = [line for line in re.split(r"[\r\n]+", said) if line.strip() and not BAR.search(line)]
    assert unexpected == []
    assert sum("image/png" in output.get("data", {}) for output in outputs) >= FIGURES[name]


@each
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
