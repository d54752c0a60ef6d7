"""RULER: our scores are the package's, a perfect model gets 1 and a silent one 0, a killed run goes on."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import english
import numpy as np
import pytest
import torch

import hybridscope as hs
from hybridscope.experiments import cli, ruler
from hybridscope.experiments.answers import continuations
from hybridscope.experiments.records import Records, average_interval, score_interval
from hybridscope.hooks.checkpoint import save

needs_package = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ruler.NEEDS), reason="the extra `eval` is not installed"
)
TOKENIZER = english.tokenizer("bytes")


def model_with(kind: str = "bytes", context: int | None = None) -> hs.HybridLM:
    torch.manual_seed(1)
    options: dict[str, Any] = {} if context is None else {"context": context}
    model = hs.HybridLM(hs.HybridConfig(["swa:8", "gdn", "full"], 3, 32, 2, len(TOKENIZER), **options)).eval()
    model.tokenizer = english.tokenizer(kind)
    return model


class Answers(torch.nn.Module):
    """Says what `answers` holds for a prompt, or nothing."""

    context, sites = None, ()

    def __init__(self, answers: dict[str, list[str]]) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.tokenizer, self.answers, self.calls = english.tokenizer("bytes"), answers, 0
        self.tokenizer.eos_token = "</s>"

    def generate(self, tokens, new_tokens, attention_mask=None, eos_token_id=None):
        self.calls += 1
        rows = []
        for row, ids in enumerate(tokens):
            real = ids if attention_mask is None else ids[attention_mask[row]]
            said = ", ".join(self.answers.get(self.tokenizer.decode(real), []))
            rows.append([*self.tokenizer(said)["input_ids"], eos_token_id])
        longest = max(map(len, rows))
        return torch.cat([tokens, torch.tensor([r + [eos_token_id] * (longest - len(r)) for r in rows])], 1)


def samples(n: int = 5) -> list[dict[str, Any]]:
    return [{"index": i, "input": f"The pilot {'waited ' * i}:", "outputs": [f"N{i}", f"m{i}"]} for i in range(n)]


@pytest.fixture
def short(monkeypatch):
    """RULER's tasks with answers of 4 tokens and samples of ours, so that the package is not needed."""
    monkeypatch.setattr(ruler, "describe", lambda task: ("", {}, "", 4))
    monkeypatch.setattr(ruler, "make_prompts", lambda task, length, n, *rest, **options: samples(n))
    monkeypatch.setattr(ruler, "package", Path)
    monkeypatch.setattr(ruler.importlib.metadata, "version", lambda name: "1")


# Scores


@needs_package
def test_scores_equal_the_package_scorer(tmp_path) -> None:
    """Its own evaluate.py, run on predictions of every kind, task by task and sample by sample."""
    rng = random.Random(0)
    words = ["Alpha", "beta-9", "GAMMA delta", "7361", "é", "a\tb", "x\x01y"]
    rows: dict[str, list[dict[str, Any]]] = {}
    for task in ruler.TASKS:
        for index in range(12):
            outputs = rng.sample(words, rng.randint(1, 4))
            said = rng.sample(words, rng.randint(0, len(words)))
            pred = rng.choice([" ", "\n", "\x00", ""]).join(rng.choice([str.upper, str.lower, str])(w) for w in said)
            row = {"index": index, "input": "", "outputs": outputs, "pred": pred + rng.choice(["", "\n", "\x02"])}
            rows.setdefault(task, []).append({**row, "others": {"id": index}})
    data = tmp_path / "data"
    data.mkdir()
    for task, lines in rows.items():
        (data / f"{task}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "nltk/tokenizers/punkt").mkdir(parents=True)  # it asks whether this is there, and does not use it
    script = ruler.package() / "eval/evaluate.py"
    out = subprocess.run(
        [sys.executable, str(script), "--data_dir", str(data)], capture_output=True, text=True, check=False,
        env={**ruler.os.environ, "NLTK_DATA": str(tmp_path / "nltk"), "PYTHONPATH": ruler.os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert out.returncode == 0, out.stderr
    theirs = json.loads((data / "per_sample_scores.json").read_text())
    assert set(theirs) == set(ruler.TASKS)
    table = dict(
        zip(*[line.split(",")[1:] for line in (data / "summary.csv").read_text().split("\n")[1:3]], strict=True)
    )
    nulls = (data / "summary.csv").read_text().split("\n")[3].split(",")[1:]
    for task, null in zip(theirs, nulls, strict=True):
        ours = [ruler.score(task, row["pred"], row["outputs"]) for row in rows[task]]
        assert [100 * s for s in ours] == pytest.approx(theirs[task])
        assert round(100 * float(np.mean(ours)), 2) == pytest.approx(float(table[task]), abs=0.01)
        assert sum(not ruler.clean(row["pred"]) for row in rows[task]) == int(null.split("/")[0])
    assert len({s for task in theirs.values() for s in task}) > 4  # fractions too


def test_a_perfect_and_a_silent_model(short, tmp_path) -> None:
    perfect = Answers({row["input"]: row["outputs"] for row in samples()})
    for name, model, value in (("perfect", perfect, 1.0), ("silent", Answers({}), 0.0)):
        table = ruler.ruler(model, [64, 128], tmp_path / f"{name}.jsonl", weights=name, n=5, batch=2)
        assert set(table["task"]) == {*ruler.TASKS, "average"}
        assert set(table["length"]) == {64, 128}
        assert (table["score"] == value).all()
        assert (table["empty"] == 1 - value).all()
        assert (table["high"] - table["low"] > 0.01).all()  # five samples do not prove it
        assert ((table["low"] <= value) & (table["high"] >= value)).all()


def test_qa_asks_for_any_and_the_rest_for_all() -> None:
    assert ruler.score("qa_1", "the PILOT", ["pilot", "ferry"]) == 1
    assert ruler.score("vt", "the PILOT", ["pilot", "ferry"]) == 0.5
    with pytest.raises(ValueError, match="without references"):
        ruler.score("vt", "", [])


def test_intervals_have_a_width_and_cover() -> None:
    assert score_interval([1.0] * 20)[1] < 0.9
    for n in range(1, 40):  # and end at 0 and at 1, no rounding beyond
        assert score_interval([0.0] * n)[1] == 0
        assert score_interval([1.0] * n)[2] == 1
        assert average_interval([score_interval([0.0] * n)] * 13)[1] == 0
    value, low, high = score_interval([0.25, 0.5, 1.0, 0.75] * 10)
    assert low < value < high
    assert average_interval([(1.0, 0.8, 1.0), (0.0, 0.0, 0.2)]) == pytest.approx((0.5, 0.4, 0.6))


# Runs


def test_a_killed_run_goes_on_and_ends_the_same(short, tmp_path) -> None:
    model = Answers({row["input"]: row["outputs"][:1] for row in samples()})
    asked = {"weights": "w", "tasks": ["vt", "qa_1"], "n": 5, "batch": 2}
    whole = ruler.ruler(model, [64], tmp_path / "a.jsonl", **asked)
    lines = (tmp_path / "a.jsonl").read_bytes().splitlines(keepends=True)
    assert len(lines) == 10
    assert {"task", "length", "index", "tokens", "pred", "outputs", "score", "run"} == set(json.loads(lines[0]))
    (tmp_path / "b.jsonl").write_bytes(b"".join(lines[:3]) + lines[3][:20])  # killed while it wrote the fourth
    model.calls = 0
    again = ruler.ruler(model, [64], tmp_path / "b.jsonl", **asked)
    assert model.calls == 5  # of 6: the first batch was there
    assert again.equals(whole)
    assert (tmp_path / "b.jsonl").read_bytes() == (tmp_path / "a.jsonl").read_bytes()
    model.calls = 0
    assert len(ruler.ruler(model, [64], tmp_path / "a.jsonl", **{**asked, "tasks": ["vt"], "n": 3})) == 2
    assert model.calls == 0
    with pytest.raises(ValueError, match="another measurement"):
        ruler.ruler(model, [64], tmp_path / "a.jsonl", **{**asked, "weights": "other"})


def test_records_know_about_caps_and_configs(short, tmp_path) -> None:
    model = model_with()
    asked = {"weights": "w", "tasks": ["vt"], "n": 2}
    ruler.ruler(model, [64], tmp_path / "a.jsonl", **asked)
    turned = hs.HybridLM(dataclasses.replace(model.config, rope_base=500.0)).eval()
    turned.tokenizer = model.tokenizer
    with pytest.raises(ValueError, match="another measurement"):  # rotary bases are in no weight
        ruler.ruler(turned, [64], tmp_path / "a.jsonl", **asked)
    with model.cap(full=2), pytest.raises(ValueError, match="another measurement"):
        ruler.ruler(model, [64], tmp_path / "a.jsonl", **asked)
    with model.ablate([(2, 0)]), pytest.raises(ValueError, match="only caps"):
        ruler.ruler(model, [64], tmp_path / "b.jsonl", **asked)


def test_a_prompt_that_leaves_less_room_gets_a_shorter_answer(short, tmp_path) -> None:
    longest = max(len(TOKENIZER(row["input"])["input_ids"]) for row in samples(2))
    asked: dict[str, Any] = {"weights": "w", "tasks": ["vt"], "n": 2}
    assert len(ruler.ruler(model_with(context=longest), [longest], tmp_path / "a.jsonl", **asked)) == 2
    with pytest.raises(ValueError, match=f"a prompt of {longest} tokens exceeds {longest - 1}"):
        ruler.ruler(model_with(context=longest - 1), [longest - 1], tmp_path / "b.jsonl", **asked)
    with pytest.raises(ValueError, match="longer than the model's context"):
        ruler.ruler(model_with(context=8), [9], tmp_path / "b.jsonl", **asked)
    with pytest.raises(ValueError, match="length=0: expected >= 1"):
        ruler.ruler(model_with(), [0], tmp_path / "b.jsonl", **asked)
    with pytest.raises(ValueError, match="batch=0: expected >= 1"):
        ruler.ruler(model_with(), [64], tmp_path / "b.jsonl", batch=0, **asked)


def test_foreign_lines_are_refused(tmp_path) -> None:
    (tmp_path / "a.jsonl").write_text('{"task": "vt"}\n')
    with pytest.raises(ValueError, match="line 1 is not a record"):
        Records(tmp_path / "a.jsonl", "run", ruler.KEY)


@pytest.mark.parametrize("kind", ["ours", "transformers"])
def test_a_batch_answers_as_its_samples_alone(kind) -> None:
    """Prompts of several lengths, through the caches, ours and a transformers model's; each ends where it ends."""
    if kind == "ours":
        model: Any = model_with()
    else:
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        model = hs.load(LlamaForCausalLM(LlamaConfig(
            vocab_size=len(TOKENIZER), hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, max_position_embeddings=128,
        )).eval())  # fmt: skip
        model.tokenizer = english.tokenizer("bytes")
    prompts = [model.tokenizer(text)["input_ids"] for text in english.TEXTS]
    together = continuations(model, prompts, 12)
    assert together == [continuations(model, [ids], 12)[0] for ids in prompts]
    assert len(set(together)) == 3
    first = model.generate(torch.tensor([prompts[0]]), 3)[0, -3:].tolist()
    assert first[2] not in first[:2]
    model.tokenizer.eos_token = model.tokenizer.convert_ids_to_tokens(first[2])
    assert continuations(model, prompts[:1], 12) == [model.tokenizer.decode(first[:2])]


# The generator


@needs_package
def test_prompts_are_the_generator_s_and_fit(tmp_path) -> None:
    """`fwe` as well, whose generator leaves no room for the answer; a second call makes nothing."""
    rows = ruler.make_prompts("fwe", 600, 2, TOKENIZER, tmp_path)
    assert len(rows) == 2
    for row in rows:
        assert len(TOKENIZER(row["input"])["input_ids"]) + ruler.describe("fwe")[3] <= 600
        assert all(word in row["input"] for word in row["outputs"])
        assert row["input"].endswith("three most frequently appeared words are:")
    (file,) = tmp_path.iterdir()
    before = file.stat().st_mtime_ns
    assert ruler.make_prompts("fwe", 600, 1, TOKENIZER, tmp_path) == rows[:1]
    assert file.stat().st_mtime_ns == before


@needs_package
def test_every_task_is_described() -> None:
    assert {ruler.describe(task)[3] for task in ruler.TASKS} == {128, 30, 120, 50, 32}


def test_a_generator_that_loops_or_fails_is_named(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(ruler, "package", lambda: tmp_path)
    with pytest.raises(ValueError, match=r"vt at 64 tokens: no sample in 0\.5 s"):
        ruler.watch([sys.executable, "-c", "while True: pass"], "vt at 64 tokens", tmp_path / "log", 0.5)
    with pytest.raises(ValueError, match="the generator failed: ZeroDivisionError"):
        ruler.watch([sys.executable, "-c", "1 / 0"], "vt", tmp_path / "log")
    with pytest.raises(ValueError, match="punkt_tab, which is not here"):
        ruler.watch([sys.executable, "-c", "raise LookupError('punkt')"], "vt", tmp_path / "log")


def test_a_generator_ends_with_the_run_that_was_killed(tmp_path) -> None:
    script, log = tmp_path / "loop.py", tmp_path / "log"
    script.write_text("import time\nfor _ in range(5000):\n    print('on', flush=True)\n    time.sleep(0.02)\n")
    code = f"""
from pathlib import Path
import sys
from hybridscope.experiments import ruler
ruler.package = Path
ruler.watch([sys.executable, "-c", ruler.GUARD, {str(script)!r}], "vt", Path({str(log)!r}))
"""
    run = subprocess.Popen([sys.executable, "-c", code])
    wait_for(lambda: log.is_file() and log.stat().st_size > 0)
    run.kill()
    run.wait()

    def silent() -> bool:
        before = log.stat().st_size
        time.sleep(0.5)
        return log.stat().st_size == before

    wait_for(silent)


def test_a_guarded_script_is_told_its_arguments_and_finds_its_neighbours(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(ruler, "package", lambda: tmp_path)
    (tmp_path / "neighbour.py").write_text("value = 7")
    script = tmp_path / "made.py"
    script.write_text("import sys, neighbour\nprint(__name__, sys.argv[1:], neighbour.value)")
    ruler.watch([sys.executable, "-c", ruler.GUARD, str(script), "--n", "3"], "vt", tmp_path / "log")
    assert (tmp_path / "log").read_text().split("\n")[0] == "__main__ ['--n', '3'] 7"


def wait_for(done: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end
        time.sleep(0.05)


# The command


def refused(capsys, *args: str) -> str:
    with pytest.raises(SystemExit) as stop:
        cli.main(list(args))
    assert stop.value.code == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    return line


def test_command(short, tmp_path, capsys) -> None:
    save(model_with(), tmp_path / "model")
    with contextlib.chdir(tmp_path):
        cli.main(["ruler", "model", "--length", "64", "--tasks", "vt,qa_1", "--n", "3", "--out", "r.parquet"])
        assert capsys.readouterr().out.strip().splitlines()[-2:] == ["r-samples.jsonl", "r.parquet"]
        assert "RULER has" in refused(capsys, "ruler", "model", "--tasks", "vtt")
        assert "n=0" in refused(capsys, "ruler", "model", "--n", "0")
    assert len((tmp_path / "r-samples.jsonl").read_text().splitlines()) == 6
    assert hs.experiments.tables.read_table(tmp_path / "r.parquet")[1]["measurement"] == "ruler"


def test_without_the_package_it_says_what_to_install(monkeypatch) -> None:
    monkeypatch.setattr(ruler, "NEEDS", ("no_such_package",))
    with pytest.raises(ImportError, match=r"no_such_package not installed; pip install 'hybridscope\[eval\]'"):
        ruler.package()
