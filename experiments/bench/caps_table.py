"""The results of bench caps as Markdown."""

from __future__ import annotations

from typing import Any

Row = dict[str, Any]


def markdown(result: Row, where: str, grid: Any) -> str:
    """A table of times for each length and window, then errors and leaks.

    `where` says what was measured on; `grid(head, rows)` makes the lines of a table.
    """
    how = "first configuration of each kernel" if result["untuned"] else "tuned kernels"
    lines = [where, f"bf16, one sequence, forward, {how}."]
    kinds = {kind: [r for r in result["rows"] if r.get("kind") == kind] for kind in ("time", "check")}
    for T, w in sorted({(row["T"], row["window"]) for row in kinds["time"]}):
        cells = [_time(row) for row in kinds["time"] if (row["T"], row["window"]) == (T, w)]
        head = ("mixer", "H, K, V", "path", "ms", "vs uncapped", "vs FlexAttention", "GiB")
        lines += ["", f"### T = {T:,}, w = {w:,}", "", *grid(head, cells)]
    if checks := [row for row in kinds["check"] if row["status"] == "ok"]:
        head = ("mixer", "T", "w", "error", "error uncapped", "rows that leak", "")
        lines += ["", "### Errors and leaks", "", *grid(head, [_check(row) for row in checks])]
    if broken := [row for row in result["rows"] if row["status"] != "ok"]:
        lines += ["", "Failed:", ""]
        lines += [f"- {r['cell']} {r.get('path', r.get('kind', ''))}: {_plain(r['exception'])}" for r in broken]
    if result["not_run"]:
        lines += ["", f"Not run: {', '.join(result['not_run'])}."]
    return "\n".join(lines)


def _time(row: Row) -> list[str]:
    shape = ", ".join(str(row[name]) for name in "HKV")
    ms = f"{row['ms']:.2f}" if row["status"] == "ok" else row["status"]
    ratios = [f"{row[name]:.2f}x" if row.get(name) else "" for name in ("ratio", "vs_flex")]
    return [f"`{row['mixer']}`", shape, row["path"], ms, *ratios, f"{row['peak_gib']:.2f}" if "peak_gib" in row else ""]


def _check(row: Row) -> list[str]:
    errors = [f"{row[name]:.1e}" for name in ("error", "uncapped_error")]
    verdict = "ok" if row["ok"] else "OVER"
    return [f"`{row['mixer']}`", f"{row['T']:,}", f"{row['window']:,}", *errors, str(row["leaks"]), verdict]


def _plain(text: str) -> str:
    return " ".join(text.split()).replace("|", "/")[:300]
