"""Windows that change in mid-training: every checkpoint says, and has, the window of its last step."""

from __future__ import annotations

import pytest
import tiny
import torch
from tiny import assert_same_run, killed_at, losses, weights

import hybridscope as hs
from hybridscope.experiments.corpus import corpus
from hybridscope.experiments.train import train
from hybridscope.hooks.checkpoint import read_json

SCHEDULE = "train.window_schedule=[[0.0, 2], [0.5, 12]]"


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return tiny.config(tmp_path_factory.mktemp("config"), SCHEDULE)


@pytest.fixture(scope="module")
def whole(config, tmp_path_factory):
    return train(config, tmp_path_factory.mktemp("run") / "ladder", progress=False)


def test_windows_begin_at_their_fraction_of_the_steps(tmp_path):
    t = tiny.config(tmp_path, "train.window_schedule=[[0, 16], [0.25, 3], [0.5, 512]]").train
    assert [t.window(step) for step in range(12)] == [16] * 3 + [3] * 3 + [512] * 6
    assert tiny.config(tmp_path).train.window(5) is None


def test_checkpoints_have_the_window_they_were_trained_with(whole):
    for step, window in ((0, 2), (4, 2), (8, 12), (12, 12)):
        checkpoint = hs.ladder(whole).step(step)
        assert read_json(checkpoint.path / "config.json")["model"]["pattern"] == [f"swa:{window}", "full"]
        assert [s.window for s in checkpoint.load().sites] == [window, None]


@pytest.mark.parametrize(("step", "window", "other"), [(0, 2, 12), (4, 2, 12), (8, 12, 2)])
def test_steps_see_the_window_of_the_schedule(whole, config, step, window, other):
    tokens, weight = corpus(config.data).batch(config.train.seed, step, config.train.batch)

    def loss(window: int) -> float:
        model = hs.ladder(whole).step(step).load()
        model.set_window(window)
        with torch.no_grad():
            return float((model.loss(tokens, per_token=True) * weight).sum() / weight.sum())

    logged = losses(whole)[step]["loss"]
    assert logged == pytest.approx(loss(window), rel=1e-5)
    assert logged != pytest.approx(loss(other), rel=1e-5)


def test_a_schedule_of_one_window_is_that_window_in_the_pattern(tmp_path):
    scheduled = train(tiny.config(tmp_path, "train.window_schedule=[[0.0, 7]]"), tmp_path / "a", progress=False)
    plain = train(tiny.config(tmp_path, 'model.pattern=["swa:7", "full"]'), tmp_path / "b", progress=False)
    assert losses(scheduled) == losses(plain)
    assert all(torch.equal(w, weights(plain, 12)[name]) for name, w in weights(scheduled, 12).items())


@pytest.mark.parametrize("step", [5, 6, 9])
def test_a_killed_run_goes_on_bit_for_bit(whole, config, tmp_path, monkeypatch, step):
    killed_at(monkeypatch, config, tmp_path / "ladder", "schedule", lambda now, *_: now == step)
    assert_same_run(train(config, tmp_path / "ladder", progress=False), whole)


@pytest.mark.parametrize(
    "schedule",
    ["[]", "[[0.1, 4]]", "[[0.0, 4], [0.5, 8], [0.5, 16]]", "[[0.0, 4], [0.6, 8], [0.5, 16]]", "[[0.0, 4], [1.0, 8]]",
     "[[0.0, 0]]", "[[0.0, 2.5]]", "[[0.0, 4, 8]]", "[[]]", "[[-0.5, 4], [0.0, 8]]"],
)  # fmt: skip
def test_a_schedule_that_makes_no_sense_is_an_error(tmp_path, schedule):
    with pytest.raises(ValueError, match=r"train\.window_schedule=.*expected \[\[0\.0, W\], "):
        tiny.config(tmp_path, f"train.window_schedule={schedule}")


@pytest.mark.parametrize("starts", ["0.5, 4], [0.51", "0.99"])
def test_a_window_that_no_step_would_see_is_an_error(tmp_path, starts):
    with pytest.raises(ValueError, match=r"begin at steps \[0, .*12\] of train\.steps=12|begin at steps \[0, 6, 6\]"):
        tiny.config(tmp_path, f"train.window_schedule=[[0.0, 2], [{starts}, 8]]")


def test_a_schedule_without_a_window_layer_is_an_error(tmp_path):
    with pytest.raises(ValueError, match=r"train\.window_schedule: model\.pattern=\['gdn', 'full'\] has no swa layer"):
        tiny.config(tmp_path, SCHEDULE, 'model.pattern=["gdn", "full"]')
