"""The results of bench stats as Markdown."""

from __future__ import annotations

from typing import Any

Row = dict[str, Any]
HEAD = ("path", "ms", "vs cuDNN", "TFLOP/s", "of the QK^T floor", "GiB")


def markdown(result: Row, where: str, grid: Any) -> str:
    """Statistics beside attention on each shape, whole models, and errors against the oracle.

    `where` says what was measured on; `grid(head, rows)` makes the lines of a table.
    """
    lines = [where]
    if result["measured_peak"]:
        lines.append(f"A large bf16 matrix product reached {result['measured_peak'] / 1e12:.0f} TFLOP/s here.")
    kinds = {kind: [row for row in result["rows"] if row.get("kind") == kind] for kind in ("op", "model", "check")}
    for key in sorted({_shape(row) for row in kinds["op"]}):
        T, D, G, window = key
        mine = [row for row in kinds["op"] if _shape(row) == key]
        name = f"T = {T:,}, D = {D}, {mine[0]['H']} heads over {G}" + (f", window {window:,}" if window else "")
        head = (*HEAD[:2], "vs FlexAttention" if window else HEAD[2], *HEAD[3:])
        lines += ["", f"### {name}", "", *grid(head, [_op(row) for row in mine])]
    if kinds["model"]:
        cells = [[f"{row['T']:,}", row["path"], _ms(row), _ratio(row), _gib(row)] for row in kinds["model"]]
        lines += ["", "### Whole model", "", *grid(("T", "path", "ms", "vs plain", "GiB"), cells)]
    if checks := [row for row in kinds["check"] if row["status"] == "ok"]:
        head = ("case", "inputs", "of the bound", "other top key", "second run", "")
        lines += ["", "### Against the fp64 oracle", "", *grid(head, [_check(row) for row in checks])]
    if broken := [row for row in result["rows"] if row["status"] == "failed"]:
        lines += ["", "Failed:", ""]
        lines += [f"- {r['cell']} {r.get('path', '')}: {_plain(r['exception'])}" for r in broken]
    if result["not_run"]:
        lines += ["", f"Not run: {', '.join(result['not_run'])}."]
    return "\n".join(lines)


def _shape(row: Row) -> tuple[int, int, int, int]:
    return row["T"], row["D"], row["G"], row["window"] or 0


def _op(row: Row) -> list[str]:
    rate = f"{row['tflops']:.0f}" if "tflops" in row else ""
    floor = f"{row['of_floor']:.0%}" if row.get("of_floor") else ""
    return [row["path"], _ms(row), _ratio(row), rate, floor, _gib(row)]


def _check(row: Row) -> list[str]:
    other = f"{row['errors'].get('top1_differs', 0):.2%}"
    second, verdict = "equal" if row["repeats"] else "DIFFERS", "ok" if row["ok"] else "OVER"
    return [row["case"], row["dtype"], f"{row['worst']:.2f}", other, second, verdict]


def _ms(row: Row) -> str:
    return f"{row['ms']:.2f}" if row["status"] == "ok" else row["status"]


def _ratio(row: Row) -> str:
    return f"{row['ratio']:.2f}x" if row.get("ratio") else ""


def _gib(row: Row) -> str:
    return f"{row['peak_gib']:.2f}" if "peak_gib" in row else ""


def _plain(text: str) -> str:
    return " ".join(text.split()).replace("|", "/")[:300]
