"""Leading rows of a tensor in a safetensors file, in one read.

Q/K drift wants a few rows of each of many files. Mapping a file, as `safe_open` does, parses its header at every
opening and costs a page fault for every 4 KB touched; a plain read at the rows' offset costs neither.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

TYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "I64": torch.int64, "I32": torch.int32,
    "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


class Header:
    """A safetensors file's header: where each tensor lies."""

    def __init__(self, file: Path) -> None:
        self.file = file
        with open(file, "rb") as f:
            size = int.from_bytes(f.read(8), "little")
            self.entries: Mapping[str, Any] = json.loads(f.read(size))
        self.start = 8 + size

    def read(self, name: str, rows: slice) -> Tensor:
        """The tensor, or those of its leading rows. ValueError where the file ends early or the type is not known."""
        entry = self.entries[name]
        shape, kind = list(entry["shape"]), entry["dtype"]
        if kind not in TYPES:
            raise ValueError(f"{self.file}: {name!r} holds {kind}; expected one of {', '.join(TYPES)}")
        begin, end = entry["data_offsets"]
        every = rows == slice(None)
        first, stop, step = (0, 1, 1) if every else rows.indices(shape[0])
        if not every and step == 1:
            per_row = (end - begin) // max(1, shape[0])
            shape[0] = max(0, stop - first)
            begin, end = begin + first * per_row, begin + (first + shape[0]) * per_row
        found = torch.empty(end - begin, dtype=torch.uint8)
        memory: Any = found.numpy()
        with open(self.file, "rb", buffering=0) as f:
            f.seek(self.start + begin)
            view, done = memoryview(memory), 0
            while done < len(view):
                got = f.readinto(view[done:])
                if not got:
                    raise ValueError(f"{self.file}: truncated in the middle of {name!r}")
                done += got
        tensor = found.view(TYPES[kind]).view(shape)
        return tensor if every or step == 1 else tensor[rows]
