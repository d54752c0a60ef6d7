"""Triton's tuning: all configurations compiled before one is timed."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(("how", "compiled"), [("as usual", 0), ("side by side", 4)])
def test_configurations_are_compiled_before_any_is_timed(
    how: str, compiled: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton", reason="the extra `gpu` is not installed")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    script = Path(__file__).with_name("tuned_kernel.py")
    run = subprocess.run([sys.executable, str(script), how], capture_output=True, text=True, check=False)
    assert run.stdout.split() == [str(compiled)], run.stderr[-2000:]
