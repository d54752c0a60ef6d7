"""Prints the table of docs/families.md, from the tiny models in families.py: python tests/hooks/family_table.py"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from families import FAMILIES, pair

from hybridscope.hooks.adapters import interface
from hybridscope.hooks.projections import QKProjection, qk_projections
from hybridscope.hooks.sites import Site

COLUMNS = (
    "family", "layers", "kind", "mixer", "heads", "KV", "K / V", "conv", "window", "positions", "sinks", "soft cap",
    "q and k",
)  # fmt: skip


def maps(site: QKProjection) -> str:
    """How q and k are stored, in words."""
    words = ["MLA" if site.effective else "fused" if site.q == site.k else "rows"]
    if site.q != site.k and site.q_stride > site.head_dim:
        words.append("gate in q_proj")
    if site.q_bias:
        words.append("biases")
    if site.normed:
        words.append("norm over all heads" if site.over_all else "norm per head")
    if 0 < site.rotary < site.head_dim:
        words.append(f"RoPE on {site.rotary} of {site.head_dim}")
    return ", ".join(words if site.form else [*words, "no score form"])


def rows(family: str) -> list[list[str]]:
    """One row per kind of site in a family."""
    model, loaded = pair(family)
    scores: dict[str, tuple[bool, bool]] = {}

    def attend(site: Site, *args: Any, softcap: float | None = None, sink_logits: Any = None, **more: Any) -> Any:
        scores[site.name] = (sink_logits is not None, softcap is not None)
        return interface_attend(site, *args, softcap=softcap, sink_logits=sink_logits, **more)

    interface_attend = interface.attend
    with mock.patch.object(interface, "attend", attend), torch.no_grad():
        loaded(torch.arange(3, 9)[None])
    stored: dict[int, str] = {}
    if any(site.softmax for site in loaded.sites):
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            stored = {p.layer: maps(p) for p in qk_projections(Path(folder))}
    found: dict[tuple[str, ...], list[int]] = {}
    for site in loaded.sites:
        sink, cap = scores.get(site.name, (False, False))
        how = stored.get(site.layer, "") if site.softmax else ""
        what = (
            site.kind, f"`{site.mixer}`", str(site.heads), str(site.kv_heads), f"{site.key_dim} / {site.value_dim}",
            str(site.conv) if site.conv > 1 else "", str(site.window or ""),
            ("RoPE" if site.rope else "none") if site.softmax else "", "yes" if sink else "", "yes" if cap else "", how,
        )  # fmt: skip
        found.setdefault(what, []).append(site.layer)
    return [[f"`{family}`", ", ".join(map(str, layers)), *what] for what, layers in found.items()]


def table() -> str:
    lines = [COLUMNS, ("---",) * len(COLUMNS), *[row for family in FAMILIES for row in rows(family)]]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


if __name__ == "__main__":
    print(table())
