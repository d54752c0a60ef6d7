"""`hybridscope fit`: a scaling law from a table of runs, on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd

from ..probes.scaling import scaling_fit
from .report import show
from .tables import provenance, read_table, save_table


def fit_table(source: str, file: Path, constant: bool, all_sizes: bool, bootstrap: int, seed: int) -> None:
    """Fit the runs in `source`, print the law and what it predicts, and save both."""
    fit = scaling_fit(read_runs(source), constant=constant, holdout=not all_sizes, bootstrap=bootstrap, seed=seed)
    print(
        f"{fit.n} runs, mean Huber loss {fit.objective:.4g}; {fit.converged} of {fit.starts} starts ended at the best"
    )
    show(fit.parameters)
    settings: dict[str, Any] = {"constant": constant, "bootstrap": bootstrap, "seed": seed, "n": fit.n}
    if len(fit.validation):
        print("\nthe largest model, held out")
        show(fit.validation)
        facts = provenance("fit-validation", source, **settings)
        save_table(fit.validation, file.with_name(file.stem + "-validation.parquet"), facts)
    print(save_table(fit.parameters, file, provenance("fit", source, **settings)))


def read_runs(source: str) -> pd.DataFrame:
    """A table of runs: Parquet, or text with a header, comma- or tab-separated."""
    file = Path(source)
    if file.suffix == ".parquet":
        return read_table(file)[0]
    if not file.is_file():
        raise FileNotFoundError(f"{file}: no such table")
    if file.suffix not in (".csv", ".tsv"):
        raise ValueError(f"{file}: expected .parquet, .csv or .tsv")
    return pd.read_csv(file, sep="\t" if file.suffix == ".tsv" else ",")
