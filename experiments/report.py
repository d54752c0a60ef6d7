"""What the commands share: reading their lists, and saving, placing and printing their tables."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd

RUNS = Path("runs")
COMMAND: str | None = None  # what the command line was called with; None: from Python


def keep(table: pd.DataFrame, name: str, source: str, file: Path, draw: Callable[[], Any], **settings: Any) -> None:
    """Save a table, then the figure that `draw` makes of it, which may fail; say where."""
    from .. import figures
    from .tables import provenance, save_table

    print(save_table(table, file, provenance(name, source, **settings)))
    print(figures.save(draw(), file.with_suffix(".png")))


def place(name: str, source: str, out: Path | None) -> Path:
    """The table's file: `out`, or runs/NAME/ and the end of the source's path, so that steps of two runs differ."""
    if out is None:
        parts = [part for part in Path(source).parts if part.strip("/.") and part != RUNS.name]
        return RUNS / name / ("-".join(parts[-3:]) + ".parquet")
    if out.suffix != ".parquet":
        raise ValueError(f"--out {out}: expected a .parquet file; the figure goes beside it")
    return out


def show(table: Any) -> None:
    """Print a table whole."""
    print(table.to_string(index=False, float_format="%.4g"))


def show_caps(table: Any, file: Path) -> None:
    """Print a sweep of caps, and where it has rows by distance those as a grid; their figure goes beside `file`."""
    from .. import figures

    near = table["distance_low"].notna()
    show(table[~near].drop(columns=["distance_low", "distance_high"]))
    if near.any():
        print(
            "\nneedle accuracy by tokens back to the needle; (in brackets) where no needle is in a capped layer's view"
        )
        show(distance_grid(table[near]))
        print(figures.save(figures.cap_distance(table), file.with_name(file.stem + "-distance.png")))


def distance_grid(rows: Any) -> Any:
    """Needle accuracy as text: a row per setting, a column per bucket of distance; in brackets where `within` is 0."""
    settings: dict[Any, dict[str, str]] = {}
    for r in rows.itertuples():
        window = "-" if r.window != r.window else str(int(r.window))
        text = f"{r.needle_accuracy:.2f}" if r.within else f"({r.needle_accuracy:.2f})"
        place = (r.kind, r.layer, r.site, window, r.sinks)
        names = {"kind": r.kind, "window": window, "sinks": str(r.sinks)}
        settings.setdefault(place, names)[f"{int(r.distance_low)}-{int(r.distance_high) - 1}"] = text
    return type(rows)(list(settings.values()))


def split(values: tuple[str, ...]) -> list[str]:
    """Lists may be written 64,128 or 64 128."""
    return [part for value in values for part in value.split(",") if part]


def number(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"--{name} {text}: expected a whole number") from None
