"""Following heads over a ladder of planted models, whose masses are known; in memory and into a table that grows."""

from __future__ import annotations

import inspect
import math
import shutil
import warnings
from pathlib import Path

import planted
import pytest
import torch
from helpers import model_of
from planted import LANGUAGE, STRONG, T, needles
from safetensors.torch import load_file, save_file

import hybridscope as hs
from hybridscope.experiments.tables import read_table
from hybridscope.experiments.track import samples_of, track_to
from hybridscope.hooks.checkpoint import Checkpoint, write_json

FOLLOWED = [(1, 0), (1, 0, 2)]
STRENGTHS = {0: 0.0, 10: 2.0, 20: STRONG}


def write_ladder(folder: Path) -> Path:
    for step, strength in STRENGTHS.items():
        planted.planted({0: strength, 2: 1.0}).save(folder / f"step-{step:06d}")
    write_json(folder / "run.json", {"steps": list(STRENGTHS), "tokens_per_step": 100})
    return folder


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    return write_ladder(tmp_path_factory.mktemp("ladder"))


@pytest.fixture
def ladder(saved, tmp_path) -> hs.hooks.ladder.Ladder:
    return hs.ladder(shutil.copytree(saved, tmp_path / "ladder"))


@pytest.fixture
def loads(monkeypatch) -> list[int]:
    """The steps loaded, in order."""
    seen: list[int] = []
    load = Checkpoint.load

    def counted(self, **options):
        seen.append(self.step)
        return load(self, **options)

    monkeypatch.setattr(Checkpoint, "load", counted)
    return seen


def spoil(folder: Path, step: int) -> None:
    """NaN weights: the ladder opens, the step does not load."""
    file = folder / f"step-{step:06d}" / "model.safetensors"
    weights = load_file(file)
    weights["embed.weight"][0, 0] = torch.nan
    save_file(weights, file)


# track()


def test_followed_heads_have_their_known_mass_entropy_and_copy_score_at_every_step(ladder):
    table = hs.track(ladder, needles(8), FOLLOWED, last_rows=1)
    head = table.query("head == 0").set_index("step")
    for step, strength in STRENGTHS.items():
        assert head["mass"][step] == pytest.approx(planted.mass_of(strength), abs=1e-9)
        assert head["entropy"][step] == pytest.approx(planted.entropy_of(strength), abs=1e-9)
        assert head["tokens"][step] == 100 * step
    assert head["copy"].tolist() == [0, 1, 1]
    assert head["accuracy"].iloc[-1] == 1
    other = table.query("head == 2")
    assert other["mass"].to_numpy() == pytest.approx(planted.mass_of(1.0), abs=1e-9)  # the same at every step


def test_unanswered_prompts_count_too(ladder):
    """Accuracy stands beside: at step 0 nothing is answered, and the mass is still there."""
    first = hs.track(ladder, needles(8), FOLLOWED).query("step == 0")
    assert (first["accuracy"] == 0).all()
    assert (first["mass"] > 0).all()


def test_heads_are_chosen_on_one_half_and_measured_on_the_other(tmp_path):
    """Head 0 answers only to the keys of the first half: best there, and blind on what it is measured on."""
    made = needles(40)
    key = made.tokens[:, -1]
    low = torch.arange(2, 2 + LANGUAGE.keys // 2)
    mine = torch.isin(key, low)
    order = torch.cat([mine.nonzero()[:8, 0], (~mine).nonzero()[:8, 0]])
    planted.planted({0: STRONG, 2: 1.0}, tokens={0: low.tolist()}).save(tmp_path / "step-1")
    table = hs.track(hs.ladder(tmp_path), made[order], top=1)
    assert table[["layer", "site", "head"]].to_numpy().tolist() == [[1, 0, 0]]
    assert table["mass"].iloc[0] == pytest.approx(1 / T, abs=1e-9)


def test_all_heads_are_those_of_full_sites(ladder):
    table = hs.track(ladder, needles(4), "all")
    assert set(table["layer"]) == {1, 2}
    assert len(table) == 3 * 8


def test_without_heads_the_best_of_the_final_step_are_followed_back(ladder):
    table = hs.track(ladder, needles(8), top=2)
    assert set(map(tuple, table[["layer", "site", "head"]].to_numpy())) == {(1, 0, 0), (1, 0, 2)}
    assert sorted(table["step"].unique()) == [0, 10, 20]


def test_a_list_of_checkpoints_is_a_ladder(ladder):
    table, expected = (hs.track(x, needles(4), FOLLOWED) for x in (list(ladder.checkpoints), ladder))
    columns = [c for c in expected if c != "tokens"]  # run.json is not there to say
    assert table[columns].equals(expected[columns])


def test_a_step_that_does_not_load_is_warned_about_and_left_out(ladder):
    spoil(ladder.path, 10)
    with pytest.warns(UserWarning, match=r"step 10 left out: .*embed\.weight holds NaN"):
        table = hs.track(ladder, needles(4), FOLLOWED)
    assert table["step"].unique().tolist() == [0, 20]


def test_a_ladder_of_which_nothing_loads_is_an_error(ladder):
    for step in STRENGTHS:
        spoil(ladder.path, step)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(ValueError, match="no step could be loaded"):
            hs.track(ladder, needles(4), FOLLOWED)


@pytest.mark.parametrize(("head", "named"), [((1, 9), r"heads 0\.\.3"), ((7, 0), "layer 7"), ((1,), "expected")])
def test_a_head_that_is_not_there_is_an_error(ladder, tmp_path, head, named):
    with pytest.raises(ValueError, match=named):
        hs.track(ladder, needles(4), [head])
    with pytest.raises(ValueError, match=named):  # and no warning per step
        track_to(tmp_path / "t.parquet", ladder, needles(4), [head])


def test_heads_of_a_recurrence_have_nothing_to_follow(tmp_path):
    model_of("gdn", "full").save(tmp_path / "step-1")
    made = hs.make_needles(4, 30)
    made.tokens %= 41
    with pytest.raises(ValueError, match="no attention to follow"):
        hs.track(hs.ladder(tmp_path), made, [(0, 0)])


def test_records_per_prompt_average_to_the_table(ladder):
    made = needles(6)
    table, every = (hs.track(ladder, made, FOLLOWED, samples=s) for s in (False, True))
    assert len(every) == 6 * len(table)
    assert every["sample"].unique().tolist() == list(range(6))
    means = every.groupby(["step", "layer", "site", "head"], sort=False, as_index=False)["mass"].mean()
    assert means["mass"].equals(table["mass"])
    alone = hs.track(ladder, made[2:3], FOLLOWED)
    own = every[every["sample"] == 2].reset_index(drop=True)
    for name in ("mass", "copy", "entropy", "accuracy"):
        assert (own[name] - alone[name]).abs().max() < 1e-12


def test_heads_chosen_at_each_step_are_the_best_of_that_step(tmp_path):
    """Head 2 leads at first and head 0 at the end; following the final step's head back misses the first."""
    for step, first, second in ((0, 1.0, 3.0), (10, 2.0, 3.0), (20, STRONG, 3.0)):
        planted.planted({0: first, 2: second}).save(tmp_path / f"step-{step}")
    ladder = hs.ladder(tmp_path)
    each, back = hs.track(ladder, needles(16), "each", top=1), hs.track(ladder, needles(16), top=1)
    assert each["head"].tolist() == [2, 2, 0]
    assert back["head"].tolist() == [0, 0, 0]
    assert each["mass"].tolist() == pytest.approx([planted.mass_of(s) for s in (3.0, 3.0, STRONG)], abs=1e-9)


def test_compat_divides_the_entropy_of_row_i_by_the_log_of_i_plus_1_whatever_it_sees(ladder):
    """Under a window of 2 that is log 2 over log(i + 1); where every key is visible it is our own."""
    made, heads = needles(4), [(0, 0), (2, 0)]
    table = hs.track(ladder, made, heads, last_rows=1, compat="qiao2026").query("step == 20").set_index("layer")
    assert table["entropy_norm"][0] == pytest.approx(math.log(2) / math.log(T), abs=1e-9)
    assert table["entropy_norm"][2] == pytest.approx(1, abs=1e-9)
    ours = hs.track(ladder, made, heads, last_rows=1).query("step == 20").set_index("layer")
    assert ours["entropy_norm"].to_numpy() == pytest.approx(1, abs=1e-6)
    assert table["entropy"].to_numpy() == pytest.approx(ours["entropy"].to_numpy())
    assert table["mass"][2] == pytest.approx(1 / (T - 1), abs=1e-9)  # from the row before the prompt's last
    with pytest.raises(ValueError, match="compat='wu'"):
        inspect.unwrap(hs.track)(ladder, made, heads, compat="wu")


def test_a_ladder_whose_shapes_change_is_an_error_that_names_the_steps(tmp_path):
    for step, heads in ((0, 4), (10, 2)):
        model_of("swa:4", "full", heads=heads, seed=step).save(tmp_path / f"step-{step}")
    made = hs.make_needles(8, 30)
    made.tokens %= 41
    with pytest.raises(ValueError, match=r"a ladder is one model, and steps 0 and 10 differ: .*swa:4.* became .*swa:4"):
        hs.track(hs.ladder(tmp_path), made, [(1, 0)])
    with pytest.raises(ValueError, match="steps 10 and 0 differ"):  # chosen at the final step
        track_to(tmp_path / "t.parquet", hs.ladder(tmp_path), made)


def test_one_prompt_cannot_be_halved(ladder):
    with pytest.raises(ValueError, match="at least 2 prompts"):
        hs.track(ladder, needles(1))


# track_to()


def test_the_table_on_disk_is_what_track_returns(ladder, tmp_path):
    made = needles(8)
    table = track_to(tmp_path / "t.parquet", ladder, made, FOLLOWED)
    stored, facts = read_table(tmp_path / "t.parquet")
    assert stored.equals(table)
    assert stored.equals(hs.track(ladder, made, FOLLOWED))
    assert facts["measurement"] == "track"
    assert set(facts["settings"]["hashes"]) == {"0", "10", "20"}
    records, _ = read_table(samples_of(tmp_path / "t.parquet"))
    assert records.equals(hs.track(ladder, made, FOLLOWED, samples=True))


def test_heads_chosen_at_each_step_resume_too(ladder, tmp_path, loads):
    file = tmp_path / "t.parquet"
    table = track_to(file, ladder, needles(8), "each", top=2)
    assert table.equals(hs.track(ladder, needles(8), "each", top=2))
    loads.clear()
    assert track_to(file, ladder, needles(8), "each", top=2).equals(table)
    assert loads == []
    with pytest.raises(ValueError, match="holds another measurement"):
        track_to(file, ladder, needles(8), "each", top=1)


def test_an_interrupted_table_resumes_and_no_step_is_measured_twice(ladder, tmp_path, loads, monkeypatch):
    whole = track_to(tmp_path / "whole.parquet", ladder, needles(8), FOLLOWED)
    loads.clear()
    counted = Checkpoint.load

    def killed(self, **options):
        if self.step == 20:
            raise KeyboardInterrupt
        return counted(self, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoint, "load", killed)
        with pytest.raises(KeyboardInterrupt):
            track_to(tmp_path / "t.parquet", ladder, needles(8), FOLLOWED)
    assert read_table(tmp_path / "t.parquet")[0]["step"].unique().tolist() == [0, 10]
    assert track_to(tmp_path / "t.parquet", ladder, needles(8), FOLLOWED).equals(whole)
    assert loads == [0, 10, 20]
    assert track_to(tmp_path / "t.parquet", ladder, needles(8), FOLLOWED).equals(whole)
    assert loads == [0, 10, 20]


def test_new_steps_and_changed_weights_are_measured_and_nothing_else(ladder, tmp_path, loads):
    file, made = tmp_path / "t.parquet", needles(8)
    track_to(file, ladder, made, FOLLOWED)
    loads.clear()
    planted.planted({0: 1.0}).save(ladder.path / "step-000010")
    planted.planted({0: 3.0}).save(ladder.path / "step-000015")
    again = hs.ladder(ladder.path)
    table = track_to(file, again, made, FOLLOWED)
    assert loads == [10, 15]
    assert table.equals(hs.track(again, made, FOLLOWED))


def test_a_table_of_other_prompts_or_heads_is_refused_and_kept(ladder, tmp_path):
    file = tmp_path / "t.parquet"
    before = track_to(file, ladder, needles(8), FOLLOWED)
    for made, heads in ((needles(8, seed=1), FOLLOWED), (needles(8), [(1, 0)]), (needles(8), "all")):
        with pytest.raises(ValueError, match="holds another measurement"):
            track_to(file, ladder, made, heads)
    assert read_table(file)[0].equals(before)


def test_a_step_that_does_not_load_is_left_out_and_measured_once_it_does(ladder, tmp_path, saved):
    file = tmp_path / "t.parquet"
    spoil(ladder.path, 10)
    with pytest.warns(UserWarning, match="step 10 left out"):
        assert track_to(file, ladder, needles(4), FOLLOWED)["step"].unique().tolist() == [0, 20]
    name = "step-000010/model.safetensors"
    shutil.copy(saved / name, ladder.path / name)
    assert track_to(file, ladder, needles(4), FOLLOWED)["step"].unique().tolist() == [0, 10, 20]


def test_a_ladder_without_token_counts_can_be_tracked(ladder, tmp_path):
    (ladder.path / "run.json").unlink()
    table = track_to(tmp_path / "t.parquet", hs.ladder(ladder.path), needles(4), FOLLOWED)
    assert table["tokens"].isna().all()
    assert len(table) == 6
