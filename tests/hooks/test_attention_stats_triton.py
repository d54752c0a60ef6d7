"""The Triton kernel of attention_stats() on a CPU: its cases run in a process of their own, where Triton interprets."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers import run_interpreted

from hybridscope import attention_stats, use_kernels
from hybridscope.hooks.kernels import attention_stats as module

CASES = Path(__file__).with_name("cases_attention_stats_triton.py")


def test_in_the_interpreter() -> None:
    run_interpreted(CASES)


def test_it_is_chosen_for_cuda_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """By policy, never by failure; tensors that only say they are on CUDA are enough to see it."""

    def path(impl: module.Impl = "auto", dtype: torch.dtype = torch.float32, K: int = 8, cuda: bool = True) -> str:
        q = torch.zeros(1, 2, 2, K, dtype=dtype)
        monkeypatch.setattr(torch.Tensor, "is_cuda", cuda)
        return module._path(impl, q, q, None)

    q = torch.zeros(1, 2, 2, 8)
    assert [path(dtype=d) for d in (torch.float32, torch.bfloat16, torch.float16)] == ["triton"] * 3
    assert [path(dtype=torch.float64), path(K=257), path(cuda=False)] == ["torch"] * 3
    assert module._path("auto", q, q, torch.zeros(1, 2, 2, dtype=torch.bool)) == "torch"
    assert [path("torch"), path("reference"), path("triton")] == ["torch", "reference", "triton"]
    with use_kernels("torch"):
        assert path() == "torch"
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"hybridscope\[gpu\].*use_kernels"):
        path("triton")


def test_without_a_gpu_it_says_so() -> None:
    pytest.importorskip("triton", reason="the extra `gpu` is not installed")
    q = torch.zeros(1, 2, 2, 8)
    with pytest.raises(ValueError, match="expected CUDA"):
        attention_stats(q, q, impl="triton")
