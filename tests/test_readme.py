"""What the README shows runs as it stands: the three jobs on the demo's ladder."""

import re
from pathlib import Path

README = (Path(__file__).parents[1] / "README.md").read_text()


def test_the_three_jobs(demo, capsys) -> None:
    jobs = README.split("## Three jobs")[1].split("## On your own checkpoint")[0]
    blocks = re.findall(r"```python\n(.*?)```", jobs, re.DOTALL)
    assert len(blocks) == 3
    names: dict = {}
    for block in blocks:
        exec(block.replace("runs/demo", str(demo.folder)), names)
    capped, whole = capsys.readouterr().out.splitlines()[:2]
    assert float(capped.split()[0]) < 0.35  # one needle in six lies within the cap; the reach stands beside it
    assert float(whole) > 0.9
