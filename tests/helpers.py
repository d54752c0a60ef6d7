"""What the tests of the core share: the tolerances, tiny models, and a watch on the size of tensors."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hybridscope import HybridConfig, HybridLM
from hybridscope.hooks.config import KINDS

# Largest error allowed, relative to 1 + the largest magnitude of the reference. Nothing is looser anywhere.
TOLERANCE = {
    torch.float64: 1e-13,  # a kernel against its reference
    torch.float32: 2e-6,
    "model": 1e-11,  # a whole fp64 model two ways: layers of kernels
    "gradient": 1e-11,  # fp64, through the kernel and through the reference
}

VOCAB = 41
RECURRENT = [name for name, kind in KINDS.items() if kind == "recurrent"]


def error(got: Tensor, expected: Tensor) -> float:
    """Largest difference relative to 1 + the largest magnitude expected; inf where shapes or finiteness
    differ."""
    got, expected = got.detach(), expected.detach()
    if got.shape != expected.shape or not torch.isfinite(got).all():
        return float("inf")
    if not got.numel():
        return 0.0
    return float((got.double() - expected.double()).abs().max() / (1 + expected.double().abs().max()))


def assert_close(got: Tensor, expected: Tensor, tolerance: Any = None) -> None:
    """Within TOLERANCE[tolerance], or that of `got`'s dtype."""
    allowed = TOLERANCE[got.dtype if tolerance is None else tolerance]
    found = error(got, expected)
    assert found <= allowed, f"error {found:.2e} > {allowed:.0e}"


def model_of(
    *pattern: str, layers: int | None = None, d_model: int = 16, heads: int = 4, seed: int = 0, **options: Any
) -> HybridLM:
    """A tiny fp64 model whose weights are large enough for every token to matter to every later one."""
    torch.manual_seed(seed)
    options.setdefault("mixers", {"mamba2": {"key_dim": 5, "groups": 2}})
    config = HybridConfig(pattern, layers or len(pattern), d_model, heads, VOCAB, **options)
    model = HybridLM(config).double().eval()
    for parameter in model.parameters():
        if parameter.ndim >= 2:
            torch.nn.init.normal_(parameter, std=0.3)
    return model.requires_grad_(False)


def tokens_of(batch: int, length: int, seed: int = 1) -> Tensor:
    return torch.randint(0, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


def pad(rows: Sequence[Tensor], columns: Sequence[Sequence[int]], length: int) -> tuple[Tensor, Tensor]:
    """Tokens and mask [B,length] with row n's tokens at columns[n]; padding holds arbitrary ids."""
    tokens = tokens_of(len(rows), length, seed=99)
    mask = torch.zeros(len(rows), length, dtype=torch.int64)
    for n, (row, at) in enumerate(zip(rows, columns, strict=True)):
        tokens[n, list(at)] = row
        mask[n, list(at)] = 1
    return tokens, mask


class Largest(TorchDispatchMode):
    """Watches every tensor that an operator makes: `elements` is the size of the largest one."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else (out,):
            if isinstance(x, Tensor):
                self.elements = max(self.elements, x.numel())
        return out


def run_interpreted(cases: Path) -> None:
    """Run a file of tests in a process of its own, where Triton interprets its kernels on the CPU."""
    pytest.importorskip("triton", reason="the extra `gpu` is not installed")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(cases)]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=cases.parents[2], check=False)
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
    assert " failed" not in run.stdout
