"""Bench results as Markdown: every number of docs/benchmarks.md comes from a file through here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from . import caps_table, probe_table, stats_table

Row = dict[str, Any]


def load(file: str | Path) -> Row:
    """A results file; ValueError where it is none of ours."""
    path = Path(file)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such results")
    try:
        result = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path}: not JSON ({error})") from None
    if not isinstance(result, dict) or result.get("bench") not in TABLES:
        raise ValueError(f"{path}: not the results of a bench ({', '.join(TABLES)})")
    return result


def markdown(result: Row) -> str:
    """The tables of one bench's results."""
    return TABLES[result["bench"]](result)


def train(result: Row) -> str:
    """A table for each size and length, and what is missing."""
    lines = [_where(result)]
    peaks = [p for p in result["measured_peak"].values() if p]
    if result["nominal_peak"]:
        lines.append(
            f"MFU is of {result['nominal_peak'] / 1e12:.0f} TFLOP/s (nominal, dense bf16)"
            + (f"; a large matrix product reached {max(peaks) / 1e12:.0f} here." if peaks else ".")
        )
    good = [row for row in result["rows"] if row["status"] == "ok"]
    for size, length in dict.fromkeys((row["size"], row["length"]) for row in good):
        mine = [row for row in good if (row["size"], row["length"]) == (size, length)]
        counts = sorted({row["tokens_per_step"] for row in mine})
        lines += ["", f"### {size}, T = {length:,}", "", f"{' or '.join(f'{n:,}' for n in counts)} tokens a step.", ""]
        lines += _grid(_HEAD, [_cells(row) for row in mine])
    failed = [row for row in result["rows"] if row["status"] != "ok"]
    if failed:
        lines += ["", "Failed:", "", *[f"- {row['id']}: {_plain(row['exception'])}" for row in failed]]
    if result["not_run"]:
        lines += ["", f"Not run: {len(result['not_run'])} cells, {result['not_run'][0]} the first of them."]
    notes = dict.fromkeys(f"{row['pattern']}: {note}" for row in good for note in row["notes"])
    lines += ["", *[f"- {_plain(note)}" for note in notes]] if notes else []
    if any(row[f"vs_{key}_session"] for row in good for key in ("full", "peer")):
        lines += ["", "\\* against a measurement of another session."]
    return "\n".join(lines)


_HEAD = ("pattern", "parameters", "tokens/s", "MFU", "MFU, whole square", "peak GiB", "vs full", "vs peer", "")


def _cells(row: Row) -> list[str]:
    def share(name: str) -> str:
        return "" if row[name] is None else f"{row[name]:.1%}"

    def times(name: str) -> str:
        if row[name] is None:
            return ""
        return f"{row[name]:.2f}{'' if row[name + '_session'] is None else ' *'}"

    how = ", ".join(row["tags"]) or ("as shipped" if row["pattern"].startswith("fla-") else "")
    memory = "" if row["peak_memory_gib"] is None else f"{row['peak_memory_gib']:.1f}"
    return [
        f"`{row['pattern']}`", f"{row['parameters'] / 1e6:.1f}M", f"{row['tokens_per_second']:,.0f}", share("mfu"),
        share("mfu_whole"), memory, times("vs_full"), times("vs_peer"), how,
    ]  # fmt: skip


def parity(result: Row) -> str:
    """Loss curves of the fused path beside the torch path's."""
    head = ("mixer", "dtype", "path", "loss at first", "torch, last", "fused, last", "difference", "of the drop", "")
    rows = []
    for row in result["rows"]:
        if row["status"] != "ok":
            rows.append([f"`{row['mixer']}`", row["dtype"], _plain(row["exception"])[:80], *[""] * 5, "failed"])
            continue
        rows.append([
            f"`{row['mixer']}`", row["dtype"], row["op"], f"{row['torch_first']:.4f}", f"{row['torch_last']:.4f}",
            f"{row['fused_last']:.4f}", f"{row['largest_difference']:.1e}", f"{row['of_drop']:.2%}",
            "ok" if row["ok"] else "OVER",
        ])  # fmt: skip
    missing = [f"Not run: {', '.join(result['not_run'])}."] if result["not_run"] else []
    return "\n".join([_where(result), "", *_grid(head, rows), "", *missing])


def kernels(result: Row) -> str:
    """Largest errors of each fused recurrence over all lengths and head shapes."""
    head = ("mixers", "dtype", "op", "without gradients", "output", "state", "gradients", "within bounds")
    rows = []
    for family, dtype in dict.fromkeys((row["family"], row["dtype"]) for row in result["rows"]):
        mine = [row for row in result["rows"] if (row["family"], row["dtype"]) == (family, dtype)]
        errors = [row["errors"] for row in mine if "errors" in row]
        worst = [max((e[name] for e in errors), default=float("inf")) for name in ("out", "state")]
        worst.append(max((v for e in errors for name, v in e.items() if name.startswith("d_")), default=float("inf")))
        names = ", ".join(f"`{mixer}`" for mixer in mine[0]["mixers"])
        ops = [mine[0].get(op, "?") for op in ("op", "op_inference")]
        rows.append([
            names, dtype, ops[0], "same" if ops[0] == ops[1] else ops[1], *[f"{w:.1e}" for w in worst],
            f"{sum(row['ok'] for row in mine)}/{len(mine)}",
        ])  # fmt: skip
    rows.sort(key=lambda row: (row[1], row[0]))
    over = [
        f"{r['family']} {r['dtype']} T = {r['T']}: {', '.join(r.get('over', ['failed']))}"
        for r in result["rows"]
        if not r["ok"]
    ]
    lengths = ", ".join(f"{n:,}" for n in sorted({row["T"] for row in result["rows"]}))
    lines = [_where(result), f"T = {lengths}; largest errors relative to the reference.", "", *_grid(head, rows)]
    return "\n".join([*lines, *(["", f"Over its bound: {'; '.join(over)}."] if over else [])])


def attention(result: Row) -> str:
    """What each kernel reaches on each shape."""
    head = (
        "B, T, H, G, K",
        "window",
        "path",
        "forward ms",
        "both ms",
        "forward TFLOP/s",
        "both TFLOP/s",
        "worst error",
    )
    rows = []
    for row in result["rows"]:
        what = [", ".join(str(row[name]) for name in "BTHGK"), str(row["window"] or "none"), f"`{row['path']}`"]
        if row["status"] != "ok":
            rows.append([*what, "failed", _plain(row["exception"])[:60], "", "", ""])
            continue
        speed = [row["forward_flops_per_second"], row["both_flops_per_second"]]
        rows.append([
            *what, f"{row['forward_ms']:.2f}", f"{row['both_ms']:.2f}", *[f"{s / 1e12:.0f}" for s in speed],
            f"{max(row['errors'].values()):.1e}",
        ])  # fmt: skip
    return "\n".join([_where(result), "", *_grid(head, rows)])


def parallel(result: Row) -> str:
    """Trainings on several GPUs beside one."""
    head = ("processes", "parallel", "loss at first", "at last", "difference", "of the drop", "weights' norm", "")
    rows = []
    for row in result["rows"]:
        what = [str(row["processes"]), row["parallel"]]
        if row["status"] != "ok":
            rows.append([*what, _plain(row["exception"])[-80:], *[""] * 4, "failed"])
            continue
        rows.append([
            *what, f"{row['losses'][0]:.4f}", f"{row['losses'][-1]:.4f}", f"{row['largest_difference']:.1e}",
            f"{row['of_drop']:.2%}", f"{row['weight_norm']:.4f}", "ok" if row["ok"] else "OVER",
        ])  # fmt: skip
    return "\n".join([_where(result), "", *_grid(head, rows)])


def drift(result: Row) -> str:
    """How fast each way gets at the Q/K rows."""
    ladder = result["ladder"]
    what = (
        f"{ladder['steps']} checkpoints of a 3:1 GDN hybrid, {ladder['layers']} layers, D = {ladder['width']:,}, bf16; "
        f"{ladder['bytes'] / 1e9:.2f} GB. Rates count the Q/K rows needed; `sequential` counts all bytes."
    )
    head = ("heads", "way", "page cache", "ms", "needed MB", "MB/s", "of sequential", "vs checkpoints")
    rows = [
        [
            row["heads"], f"`{row['way']}`", row["cache"], f"{1e3 * row['seconds']:,.1f}", f"{row['bytes'] / 1e6:,.2f}",
            f"{row['bytes_per_s'] / 1e6:,.1f}",
            *["" if row[name] is None else f"{row[name]:.3g}x" for name in ("of_sequential", "vs_checkpoints")],
        ]
        for row in result["rows"]
    ]  # fmt: skip
    missing = ["", f"Not run: {'; '.join(result['not_run'])}."] if result["not_run"] else []
    return "\n".join([_where(result), "", what, "", *_grid(head, rows), *missing])


def cost(result: Row) -> str:
    """Caches and speeds of hybrids and, in lines of their own, of the all-full models that they are divided by."""
    head = (
        "run", "layers", "T", "cache MiB", "times smaller", "prefill tokens/s", "times as fast", "decode ms a token",
        "times as fast", "peak GiB",
    )  # fmt: skip
    rows = []
    for row in result["rows"]:
        full = row["model"] == "full"
        peak = row["peak_bytes"]
        rows.append([
            "all full" if full else f"`{row['run']}`", "" if full else f"`{row['layers']}`", f"{row['length']:,}",
            f"{row['cache_bytes'] / 2**20:,.1f}", "" if full else f"{row['cache_ratio']:.2f}",
            f"{row['prefill_tokens_per_s']:,.0f}", "" if full else f"{row['prefill_ratio']:.2f}",
            f"{row['decode_ms']:.2f}", "" if full else f"{row['decode_ratio']:.2f}",
            "" if peak != peak else f"{peak / 2**30:.2f}",
        ])  # fmt: skip
    kinds = " and ".join(dict.fromkeys(row["dtype"] for row in result["rows"]))
    how = f"medians of {result['repeats']}; decode over {result['new_tokens']} tokens after the prefill"
    missing = ["", f"Not run: {', '.join(result['not_run'])}."] if result["not_run"] else []
    return "\n".join([_where(result), f"Batch 1, {kinds}; {how}.", "", *_grid(head, rows), *missing])


TABLES = {
    "cost": cost,
    "drift": drift,
    "train": train,
    "parity_train": parity,
    "kernel_parity": kernels,
    "attention_paths": attention,
    "attention_stats": lambda result: stats_table.markdown(result, _where(result), _grid),
    "parallel": parallel,
    "probe": lambda result: probe_table.markdown(result, _where(result), _grid),
    "caps": lambda result: caps_table.markdown(result, _where(result), _grid),
}


def _where(result: Row) -> str:
    versions = ", ".join(f"{name} {its}" for name, its in result["versions"].items() if its)
    return f"{result['device']}; {versions}; commit {result.get('commit') or 'unknown'}."


def _grid(head: tuple[str, ...], rows: list[list[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in [list(head), *rows]) for i in range(len(head))]

    def line(cells: Any) -> str:
        return "| " + " | ".join(c.ljust(w) for c, w in zip(cells, widths, strict=True)) + " |"

    return [line(head), "|" + "|".join("-" * (w + 2) for w in widths) + "|", *map(line, rows)]


def _plain(text: str) -> str:
    return " ".join(text.split()).replace("|", "/")[:300]
