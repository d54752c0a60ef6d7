"""Checks of the tables that come in: a figure says which column it misses, rather than failing halfway."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import pandas as pd

Rows: TypeAlias = Any
"""A checked DataFrame. (Its stubs make a union of every look-up, which no arithmetic passes.)"""


def check(table: pd.DataFrame, figure: str, *columns: str) -> Rows:
    """The table itself, if it has rows and these columns; else ValueError naming figure and column."""
    for column in columns:
        if column not in table.columns:
            have = ", ".join(map(str, table.columns))
            raise ValueError(f"figures.{figure}: the table has no column {column!r}; it has: {have}")
    if table.empty:
        raise ValueError(f"figures.{figure}: the table is empty")
    return table


def single(rows: Rows, figure: str, *columns: str) -> Rows:
    """The rows, if no two agree in these columns; else ValueError: a line mixes what should be told apart."""
    twice = rows.loc[rows.duplicated(list(columns), keep=False), list(columns)]
    if len(twice):
        where = ", ".join(f"{column}={value}" for column, value in twice.iloc[0].items())
        raise ValueError(f"figures.{figure}: several rows for {where}; select one run, model or setting first")
    return rows


def pick(table: Rows, **equal: Any) -> Rows:
    """The rows whose columns equal these values."""
    keep = np.ones(len(table), dtype=bool)
    for column, value in equal.items():
        keep &= (table[column] == value).to_numpy(dtype=bool)
    return table.loc[keep]


def overall(table: Rows) -> Rows:
    """The rows over all needles, of a sweep of caps that may hold rows by distance as well."""
    return table.loc[table["distance_low"].isna()] if "distance_low" in table.columns else table


def numbers(table: Rows, column: str) -> np.ndarray:
    """A column as floats."""
    return table[column].to_numpy(dtype=float)


def has_values(table: Rows, column: str) -> bool:
    """Whether the column exists and is not NaN throughout."""
    return column in table.columns and bool(table[column].notna().any())
