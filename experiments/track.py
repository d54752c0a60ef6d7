"""Tracking a ladder into a table that grows step by step and resumes where it stopped."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pandas as pd
from tqdm import tqdm

from ..hooks.ladder import Ladder
from ..probes.needles import Needles
from ..probes.tracking import Heads, Plan, over_samples
from .tables import needles_hash, provenance, read_table, save_table


def track_to(
    path: str | Path, ladder: Ladder, needles: Needles, heads: Heads = None, *, top: int = 4, batch: int = 16,
    compat: Any = None,
) -> pd.DataFrame:  # fmt: skip
    """`probes.track` with the table at `path` saved after every step, and its records per prompt at `samples_of(path)`.

    Steps already there for the same prompts, heads and weights are kept; a table of another measurement is an error.
    """
    file, records = Path(path), samples_of(path)
    plan = Plan.of(ladder, needles, heads, top=top, batch=batch, compat=compat)
    settings = {"heads": plan.heads, "needles": needles_hash(plan.needles), "compat": compat}
    if heads == "each":
        settings |= {"top": top, "choose": needles_hash(plan.choose)}
    settings = json.loads(json.dumps(settings))
    done: Any = pd.DataFrame()
    hashes: dict[str, str] = {}
    if file.is_file():
        before = read_table(file)[1].get("settings", {})
        if any(before.get(name) != value for name, value in settings.items()):
            raise ValueError(f"{file}: holds another measurement (other prompts or heads); choose another --out")
        if records.is_file():
            done, facts = read_table(records)
            hashes = facts.get("settings", {}).get("hashes", {})
    for step, checkpoint in tqdm(ladder, desc="track", disable=len(ladder) < 3):
        try:
            digest = checkpoint.weight_hash()
            if hashes.get(str(step)) == digest:
                continue
            model = checkpoint.load()
        except (ValueError, OSError) as error:
            warnings.warn(f"step {step} left out: {error}", stacklevel=2)
            continue
        rows = plan.measure(model, step, ladder.tokens(step))
        kept = done[done["step"] != step] if len(done) else done
        done = pd.concat([kept, rows], ignore_index=True) if len(kept) else rows
        done = done.sort_values("step", kind="stable", ignore_index=True)
        hashes[str(step)] = digest
        facts = provenance("track", ladder.path, **settings, hashes=hashes)
        save_table(done, records, {**facts, "measurement": "track-samples"})
        save_table(over_samples(done), file, facts)
    if not len(done):
        raise ValueError(f"{ladder.path}: no step could be loaded")
    return over_samples(done)


def samples_of(path: str | Path) -> Path:
    """Where the records per prompt of a tracking table are."""
    return Path(path).with_name(Path(path).stem + "-samples.parquet")
