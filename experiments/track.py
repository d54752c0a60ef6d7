"""Tracking a ladder into a table that grows step by step and resumes where it stopped."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pandas as pd
from tqdm import tqdm

from ..hooks.ladder import Ladder
from ..probes.needles import Needles
from ..probes.tracking import Heads, choose_heads, track_step
from .tables import needles_hash, provenance, read_table, save_table


def track_to(
    path: str | Path, ladder: Ladder, needles: Needles, heads: Heads = None, *, top: int = 4, batch: int = 16
) -> pd.DataFrame:
    """`probes.track` with the table at `path` saved after every step.

    Steps already there for the same prompts, heads and weights are kept; a table of another measurement is an error.
    """
    file = Path(path)
    chosen, measured = choose_heads(ladder, needles, heads, top=top, batch=batch)
    settings = {"heads": chosen, "needles": needles_hash(measured)}
    done: Any = pd.DataFrame()
    hashes: dict[str, str] = {}
    if file.is_file():
        done, facts = read_table(file)
        before = facts.get("settings", {})
        if before.get("needles") != settings["needles"] or not _same_heads(before.get("heads"), chosen):
            raise ValueError(f"{file}: holds another measurement (other prompts or heads); choose another --out")
        hashes = before.get("hashes", {})
    for step, checkpoint in tqdm(ladder, desc="track", disable=len(ladder) < 3):
        try:
            digest = checkpoint.weight_hash()
            if hashes.get(str(step)) == digest:
                continue
            model = checkpoint.load()
        except (ValueError, OSError) as error:
            warnings.warn(f"step {step} left out: {error}", stacklevel=2)
            continue
        rows = track_step(model, measured, chosen, batch=batch)
        rows.insert(0, "step", step)
        rows.insert(1, "tokens", ladder.tokens(step))
        kept = done[done["step"] != step] if len(done) else done
        done = pd.concat([kept, rows], ignore_index=True) if len(kept) else rows
        done = done.sort_values("step", kind="stable", ignore_index=True)
        hashes[str(step)] = digest
        save_table(done, file, provenance("track", ladder.path, **settings, hashes=hashes))
    if not len(done):
        raise ValueError(f"{ladder.path}: no step could be loaded")
    return done


def _same_heads(a: object, b: object) -> bool:
    def plain(x: object) -> object:
        return x if isinstance(x, str | None) else [tuple(h) for h in x]  # type: ignore[attr-defined]

    return plain(a) == plain(b)
