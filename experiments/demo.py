"""The demo: train a small hybrid that learns needle retrieval, then take every measurement on its checkpoints."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from .. import figures
from ..hooks.checkpoint import atomic_file, write_json
from ..hooks.ladder import ladder as open_ladder
from ..probes.capsweep import cap_sweep
from ..probes.drift import qk_drift
from ..probes.influence import gradient_influence
from ..probes.layerwise import probe_layers
from ..probes.needles import make_needles, needle_accuracy
from ..probes.retrieval import retrieval_heads
from .config import load_config
from .sources import language_of
from .tables import provenance, save_table
from .track import track_to
from .train import train

FAR = (0.0, 0.75)  # depths at which a needle lies beyond the model's windows and FULL_CAP
FULL_CAP = 16  # tokens; less than any needle's distance
DISTRACTORS = 3


@dataclasses.dataclass
class Demo:
    """What the demo leaves: tables, figures and the headline numbers."""

    folder: Path
    tables: dict[str, Path]
    figures: dict[str, Path]
    numbers: dict[str, float]


def demo(out: str | Path, overrides: list[str] | None = None, *, progress: bool = True) -> Demo:
    """Run the demo into `out`: ladder/, tables/*.parquet, figures/*.png, numbers.json. A finished ladder is reused."""
    began = time.perf_counter()
    folder = Path(out)
    config = load_config("demo", overrides or [])
    train(config, folder / "ladder", progress=progress)
    steps = open_ladder(folder / "ladder")
    first, final = steps[0].load(), steps.final.load()
    language = language_of(steps.final.path)
    length, half_window = config.data.length, max(1, min(s.window for s in final.sites if s.window) // 2)

    def needles(n: int, seed: int, length: int = length) -> Any:
        return make_needles(
            n,
            length,
            values=language.values,
            language=language,
            depth=FAR,
            distractors=DISTRACTORS,
            seed=seed,
        )

    choose, measure = needles(128, seed=1), needles(128, seed=2)
    seeds = {"choose": 1, "measure": 2, "probe": 3, "influence": 4}
    made: dict[str, pd.DataFrame] = {}

    ranking = retrieval_heads(final, choose, "mass", only_answered=False, batch=64)
    top = [(int(h[0]), int(h[1]), int(h[2])) for h in ranking[["layer", "site", "head"]].head(4).to_numpy()]
    made["heads"] = ranking.merge(
        retrieval_heads(final, choose, "copy", only_answered=False, batch=64).rename(columns={"score": "copy"})[
            ["layer", "site", "head", "copy"]
        ]
    )
    made["track"] = track_to(folder / "tables/track.parquet", steps, measure, top, batch=64)
    made["drift"] = qk_drift(steps, heads=top)
    made["caps"] = cap_sweep(
        final, measure, kinds=["full", "window"], windows=sorted({half_window, 8, FULL_CAP, 32, 64}), batch=64
    )
    probed = needles(20 * language.values, seed=3)
    made["probe"] = probe_layers(final, probed, seeds=2, batch=128)
    asked = needles(64, seed=4, length=length - 1)
    whole = torch.cat([asked.tokens, asked.answers], 1)
    made["influence"] = gradient_influence(final, whole, rows=[length - 2], bins=16)

    numbers = _numbers(made, first, final, measure, top[0], half_window)
    tables = {name: folder / f"tables/{name}.parquet" for name in made}
    for name, table in made.items():
        if name != "track":
            facts = provenance(name, steps.final.path, seeds=seeds, config=config.to_dict())
            save_table(table, tables[name], facts)
    drawn = {
        "probe": figures.probe_curve(made["probe"]),
        "caps": figures.cap_curves(made["caps"]),
        "formation": figures.formation(made["track"], made["drift"], width=figures.DOUBLE),
        "influence": figures.influence(made["influence"]),
        "heads": figures.heads_map(made["heads"], top=4, label="needle mass"),
    }
    paths = {name: figures.save(figure, folder / f"figures/{name}.png") for name, figure in drawn.items()}
    numbers["seconds"] = time.perf_counter() - began
    with atomic_file(folder / "numbers.json") as temporary:
        write_json(temporary, numbers)
    return Demo(folder, tables, paths, numbers)


def _numbers(
    made: dict[str, Any], first: Any, final: Any, measure: Any, best: tuple[int, int, int], half_window: int
) -> dict[str, float]:
    track, caps, probe = made["track"], made["caps"], made["probe"]
    head = track[(track[["layer", "site", "head"]] == list(best)).all(axis=1)]
    mass, entropy = head["mass"].to_numpy(), head["entropy"].to_numpy()
    after_full = probe.query("kind == 'full' and where != 'pre'").groupby("control")["accuracy"].max().to_dict()

    def capped(kind: str, window: int) -> float:
        row = caps.query("kind == @kind and window == @window and sinks == 0")
        return float(row["needle_accuracy"].to_numpy()[0])

    return {
        "needle_accuracy_first": needle_accuracy(first, measure, 64),
        "needle_accuracy_final": needle_accuracy(final, measure, 64),
        "best_head_mass_first": float(mass[0]),
        "best_head_mass_final": float(mass[-1]),
        "best_head_entropy_first": float(entropy[0]),
        "best_head_entropy_final": float(entropy[-1]),
        "accuracy_full_capped": capped("full", FULL_CAP),
        "accuracy_window_capped": capped("window", half_window),
        "probe_accuracy_best": float(after_full["none"]),
        "probe_accuracy_shuffled": float(after_full["shuffled"]),
        "probe_chance": float(probe["chance"].to_numpy()[0]),
    }
