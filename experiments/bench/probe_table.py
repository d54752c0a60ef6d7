"""The results of bench probe as Markdown."""

from __future__ import annotations

from typing import Any

Row = dict[str, Any]
NAMES = {"cpu": "ours, CPU", "cuda": "ours, GPU"}


def markdown(result: Row, where: str, grid: Any) -> str:
    """Times and ratios, then each layer's accuracies; see `stats_table.markdown`."""
    p, rows = result["problem"], result["rows"]
    size = f"{p['layers']} layers x {p['samples']:,} samples x {p['width']:,} x {p['classes']} classes"
    lines = [where, f"{size} x {p['seeds']} seeds; {result['cores']} cores, {result['threads']} threads.", ""]
    cells = [["scikit-learn", f"{result['seconds']['scikit-learn']:.2f}", str(len(rows)), "1", "", ""]]
    devices = sorted(result["summary"])
    for name in devices:
        of, seconds = result["summary"][name], result["seconds"][name]
        off = ["", "", ""]
        if rows:
            off = [f"{of['ratio']:.1f}", f"{100 * of['accuracy_off']:.2f}", f"{of['loss_off']:+.1e}"]
        cells.append([NAMES[name], f"{seconds:.2f}", str(p["layers"]), *off])
    head = (
        "solver",
        "s",
        "layers",
        "times faster a layer",
        "largest difference, points of accuracy",
        "of loss (-: ours lower)",
    )
    lines += grid(head, cells)
    if rows:
        head = ("layer", "scikit-learn's fits, s", "accuracy", *(f"{NAMES[d]}: accuracy" for d in devices))
        lines += ["", *grid(head, [_layer(row, devices) for row in rows])]
    if result["not_run"]:
        lines += ["", f"Not run with scikit-learn: layers {', '.join(map(str, result['not_run']))}."]
    return "\n".join(lines)


def _layer(row: Row, devices: list[str]) -> list[str]:
    ours = [f"{row['ours'][d]['accuracy']:.4f}" for d in devices]
    return [str(row["layer"]), f"{row['seconds']:.2f}", f"{row['accuracy']:.4f}", *ours]
