"""Numbers in the docs come from files: every table stands under the command that prints it."""

import re
from pathlib import Path

import pytest

from hybridscope.experiments.bench import tables

ROOT = Path(__file__).parents[1]
MARKED = re.compile(r"<!-- hybridscope bench table --out (\S+) -->\n\n(.*?)\n\n<!-- end -->", re.DOTALL)
PAGES = sorted((ROOT / "docs").glob("*.md"))


def test_every_results_file_is_shown() -> None:
    shown = {file for page in PAGES for file, _ in MARKED.findall(page.read_text())}
    assert shown == {str(f.relative_to(ROOT)) for f in (ROOT / "experiments/results").glob("*.json")}


@pytest.mark.parametrize(("file", "text"), [m for page in PAGES for m in MARKED.findall(page.read_text())])
def test_tables_are_what_the_command_prints(file: str, text: str) -> None:
    assert text == tables.markdown(tables.load(ROOT / file)).strip()
