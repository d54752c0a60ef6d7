"""Tables on disk: Parquet, written atomically, with where the numbers come from in the file's metadata."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from ..hooks.checkpoint import Checkpoint, atomic_file
from ..probes.needles import Needles
from . import report
from .train import commit, machine, versions

KEY = b"hybridscope"


def provenance(measurement: str, source: Any, **settings: Any) -> dict[str, Any]:
    """What a table's numbers came from: the measurement and its settings, the checkpoint with its weight hash,
    versions, machine, commit and command."""
    path = Path(str(source))
    weights = None
    if path.is_dir() and any(path.glob("*.safetensors")):
        weights = Checkpoint(path, 0).weight_hash()
    return {
        "measurement": measurement, "source": path.name if path.is_absolute() else str(source), "weights": weights,
        "settings": settings, "versions": versions(), "machine": machine(), "commit": commit(),
        "command": report.COMMAND,
    }  # fmt: skip


def save_table(table: pd.DataFrame, path: str | Path, facts: dict[str, Any]) -> Path:
    """Write `table` as Parquet with `facts` (see `provenance`) in its metadata."""
    data = pa.Table.from_pandas(table, preserve_index=False)
    data = data.replace_schema_metadata({**(data.schema.metadata or {}), KEY: json.dumps(facts).encode()})
    with atomic_file(path) as temporary:
        pq.write_table(data, temporary)
    return Path(path)


def read_table(path: str | Path) -> tuple[pd.DataFrame, dict[str, Any]]:
    """A table and its provenance ({} for a file that is not ours); ValueError where it is not Parquet."""
    file = Path(path)
    if not file.is_file():
        raise FileNotFoundError(f"{file}: no such table")
    try:
        data = pq.read_table(file)
    except pa.ArrowException as error:
        raise ValueError(f"{file}: not a Parquet table ({error})") from None
    return data.to_pandas(), json.loads((data.schema.metadata or {}).get(KEY, b"{}"))


def needles_hash(needles: Needles) -> str:
    """SHA-256 of the prompts and their answers."""
    digest = hashlib.sha256(needles.tokens.numpy().tobytes())
    digest.update(needles.answers.numpy().tobytes())
    return digest.hexdigest()
