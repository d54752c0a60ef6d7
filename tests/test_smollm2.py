"""A real pretrained model as positive control: its retrieval heads are found, and it cannot answer without them."""

import pytest

import hybridscope as hs
from hybridscope.experiments.cli import main
from hybridscope.experiments.tables import read_table

PROMPTS = 6
LENGTH = 400


@pytest.fixture(scope="module")
def needles(smol):
    def make(seed: int) -> hs.Needles:
        return hs.make_needles(
            PROMPTS, LENGTH, haystack="essay", tokenizer=smol.tokenizer, values=None, depth=(0.1, 0.6), seed=seed
        )

    return make


def test_retrieval_heads_of_a_real_model(smol, tmp_path, monkeypatch, capsys) -> None:
    """`hybridscope heads smollm2`, on the model that is loaded already."""
    monkeypatch.setattr("hybridscope.hooks.checkpoint.load", lambda source: smol)
    out = tmp_path / "heads.parquet"
    size = ["--n", str(PROMPTS), "--length", str(LENGTH), "--draws", "2", "--out", str(out)]
    main(["heads", "smollm2", *size])
    answers = int(capsys.readouterr().out.split("answers ")[1].split(" of ")[0])
    assert answers > 0.6 * PROMPTS
    heads, facts = read_table(out)
    assert facts["command"].startswith("hybridscope heads smollm2")
    assert len(heads) == 30 * 9
    assert heads["score"].iloc[0] > 0.5
    assert heads["score"].between(0, 1).all()
    assert heads["retrieval"].mean() < 0.1  # sparse, as published
    effect = read_table(tmp_path / "heads-causal.parquet")[0].groupby("ablated")["accuracy"].mean()
    assert effect["none"] > 0.6
    assert effect["top"] < effect["random"] - 0.5


def test_capping_every_layer_short_of_the_needle_loses_it(smol, needles) -> None:
    near, far = needles(2)[:2], int(needles(2)[:2].distance.min())
    with smol.cap(full=far // 2, sinks=4):
        assert hs.needle_accuracy(smol, near) == 0
