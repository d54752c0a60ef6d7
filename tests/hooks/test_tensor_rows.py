"""Rows read straight from a safetensors file are those that the library's own reader gives."""

from __future__ import annotations

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from hybridscope.hooks.checkpoint import Checkpoint
from hybridscope.hooks.tensor_rows import TYPES, Header


def test_every_type_shape_and_slice(tmp_path):
    file = tmp_path / "model.safetensors"
    state = {kind: torch.randint(0, 2, (7, 3)).to(dtype) for kind, dtype in TYPES.items()}
    state |= {
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 4),
        "wide": torch.randn(5, 2, 3),
        "line": torch.randn(9),
    }
    save_file(state, file)
    checkpoint = Checkpoint(tmp_path, 0)
    with safe_open(file, framework="pt") as f:
        for name, tensor in state.items():
            assert (
                torch.equal(checkpoint.tensor(name).view(torch.uint8), tensor.view(torch.uint8))
                if tensor.ndim
                else (checkpoint.tensor(name) == tensor)
            )
            for rows in (
                (slice(1, 4), slice(-2, None), slice(3, 3), slice(2, 99), slice(0, 7, 2)) if tensor.ndim else ()
            ):
                found, expected = checkpoint.tensor(name, rows), f.get_tensor(name)[rows]
                assert found.dtype == expected.dtype
                assert found.shape == expected.shape
                assert torch.equal(found.double(), expected.double())


def test_a_file_that_ends_early_is_named(tmp_path):
    file = tmp_path / "model.safetensors"
    save_file({"a": torch.randn(100)}, file)
    header = Header(file)
    with open(file, "r+b") as f:
        f.truncate(file.stat().st_size - 8)
    with pytest.raises(ValueError, match="truncated in the middle of 'a'"):
        header.read("a", slice(None))
