"""A run small enough to train in a second: as TOML and as a RunConfig."""

from __future__ import annotations

from hybridscope.experiments.config import RunConfig, load_config

TOML = """
[model]
pattern = ["swa:4", "full"]
n_layers = 2
d_model = 16
n_heads = 2
d_ff = 16
init_std = 0.1

[data]
length = 32
vocab_size = 24
keys = 4
values = 4
needles = 2

[train]
steps = 12
batch = 8
lr = 1e-2
warmup = 2
saves = 3
"""


def config(tmp_path, *overrides: str) -> RunConfig:
    file = tmp_path / "tiny.toml"
    file.write_text(TOML)
    return load_config(file, overrides)
