"""What a command measured outlives the figure of it."""

import pandas as pd
import pytest

from hybridscope.experiments.report import keep
from hybridscope.experiments.tables import read_table


def test_a_table_is_saved_before_its_figure_fails(tmp_path):
    def draw():
        raise ValueError("nothing to draw")

    file = tmp_path / "a.parquet"
    with pytest.raises(ValueError, match="nothing to draw"):
        keep(pd.DataFrame({"x": [1, 2]}), "probe", "runs/a", file, draw, seed=3)
    table, facts = read_table(file)
    assert table["x"].tolist() == [1, 2]
    assert facts["settings"]["seed"] == 3
