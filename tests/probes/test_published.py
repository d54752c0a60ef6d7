"""compat="qiao2026" gives the numbers of the scripts of arXiv 2606.15378, kept in qiao2026_scores.toml.

`tokenizer`, `network` and `ROWS` are what those scripts were given, as a checkpoint folder and a JSON-lines file.
"""

from __future__ import annotations

import inspect
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

import hybridscope as hs
from hybridscope.probes.published import occurrences, read_row, spellings
from hybridscope.probes.tracking import track_step

THEIRS = tomllib.loads((Path(__file__).parent / "qiao2026_scores.toml").read_text())
LAYERS, HEADS = 3, 4
CLOSE = 2e-6  # their sums are in fp32; entropies are around 4 nats
FACT = "One of the special magic numbers for {} is: {}."
ASKED = " What is the special magic number for {0}? The special magic number for {0} is{1}"
QUIET = ("The harbour was quiet.", "Bread is sold by nine.", "Only the clock goes on.", "Nobody had asked the pilot.")


def prompt(value: object, before: int, after: int, end: str = "", key: str = "old bridge", facts: int = 1) -> str:
    sentences = [QUIET[i % 4] for i in range(before + after)]
    sentences[before:before] = [FACT.format(key, value)] * facts
    return " ".join(sentences) + ASKED.format(key, end)


ROWS: list[dict[str, Any]] = [
    {"input": prompt(4711, 1, 3, ":"), "outputs": ["4711"]},
    {"input": prompt(4724, 2, 1), "outputs": ["4724"]},
    {"input": prompt(4737, 0, 4, ": "), "outputs": ["4737"]},
    {"input": prompt(1987, 2, 2, ":", facts=2), "outputs": ["1987"]},  # it stands there twice
    {"input": prompt(1987, 3, 1, ":"), "outputs": ["7187"]},  # and here not at all
    {"input": prompt(71, 1, 2), "outputs": ["71", "the clock"], "answer": " 71 ", "target": ["quiet", " "]},
    {"prompt": prompt(871, 0, 2, ":"), "needle": "871", "input": " "},
    {"context": prompt(77, 2, 0), "outputs": "7"},  # overlapping
    {"input": prompt("4711 or 47110", 1, 1, ": 4711 is"), "outputs": [4711]},
    {"input": "871 is it", "outputs": ["871 is it"]},
]


def tokenizer() -> PreTrainedTokenizerFast:
    """A token a byte; <s> in front, </s> behind."""
    names = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    made = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=made)


def network() -> Qwen2ForCausalLM:
    """A window layer between two full ones, weights drawn by NumPy's frozen generator in the order of their names."""
    model = Qwen2ForCausalLM(Qwen2Config(
        vocab_size=len(tokenizer()), hidden_size=32, intermediate_size=48, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=2, max_position_embeddings=512, use_sliding_window=True,
        sliding_window=24, layer_types=["full_attention", "sliding_attention", "full_attention"],
        tie_word_embeddings=False,
    ))  # fmt: skip
    draws = np.random.RandomState(0)
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            values = torch.from_numpy(draws.standard_normal(tuple(weight.shape)))
            weight.copy_(1 + 0.1 * values if "norm" in name else 0.35 * values)
    return model.eval()


@pytest.fixture(scope="module")
def model():
    return hs.load(network())


@pytest.fixture(scope="module")
def prompts() -> hs.Needles:
    return hs.needles_from_texts(ROWS, tokenizer(), compat="qiao2026")


def scores(table) -> np.ndarray:
    return table.pivot(index="layer", columns="head", values="score").to_numpy()


# Against the scripts


def test_mass_scores_and_the_heads_chosen_are_those_of_the_published_script(model, prompts):
    for batch in (1, 4):  # one at a time, as they are there, and padded
        table = hs.retrieval_heads(model, prompts, compat="qiao2026", batch=batch)
        assert scores(table) == pytest.approx(np.array(THEIRS["mass"]["layer_head_scores"]), abs=CLOSE)
        assert (table["n"] == THEIRS["mass"]["samples_used"]).all()
        assert table[["layer", "head"]].head(4).to_numpy().tolist() == THEIRS["mass"]["target_heads"]
    assert len(prompts) == THEIRS["mass"]["samples_used"] + THEIRS["mass"]["samples_missing_needle"]
    heads = THEIRS["mass"]["target_heads"]
    assert any(layer == 1 for layer, _ in heads)  # one of the window's


def test_our_own_definition_is_another(model, prompts):
    """So that the comparison above can tell: the value alone, from the same row, gives other numbers."""
    ours = hs.retrieval_heads(model, prompts, "mass", rows="published", only_answered=False, full_only=False)
    assert np.abs(scores(ours) - np.array(THEIRS["mass"]["layer_head_scores"])).max() > 0.01


def test_entropies_are_those_of_the_published_script(model, prompts):
    """All prompts, those without the answer too, over the last rows of the prompt."""
    heads = [(layer, head) for layer in range(LAYERS) for head in range(HEADS)]
    table = track_step(model, prompts, heads, compat="qiao2026")
    for name in ("entropy", "entropy_norm"):
        mean = table.groupby(["layer", "head"])[name].mean().to_numpy().reshape(LAYERS, HEADS)
        assert mean == pytest.approx(np.array(THEIRS["entropy"][name]), abs=CLOSE)
    assert table["sample"].nunique() == THEIRS["entropy"]["samples_used"] == len(ROWS)
    assert table.loc[table["mass"].isna(), "sample"].unique().tolist() == [4]  # the prompt without its answer
    mass = table.groupby(["layer", "head"])["mass"].mean().to_numpy().reshape(LAYERS, HEADS)
    assert mass == pytest.approx(np.array(THEIRS["mass"]["layer_head_scores"]), abs=CLOSE)


# How rows are read


def test_prompts_are_tokenised_by_themselves_with_special_tokens_and_cut_at_8192():
    made = hs.needles_from_texts([{"input": "x" * 9000, "outputs": ["x"]}, ROWS[0]], tokenizer(), compat="qiao2026")
    assert made.attention_mask is not None
    for i, size in enumerate((8192, len(ROWS[0]["input"]) + 2)):
        last = int(made.query_row[i])
        assert made.tokens[i, last] == 1
        assert made.attention_mask[i, : last + 1].sum() == size


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"question": "q", "text": "t"}, ("t", [])),
        ({"input": " ", "prompt": 3, "context": "c", "outputs": 5}, ("c", [])),
        ({"input": "i", "outputs": ["a", 7, " "], "answer": " a ", "target": [" b"]}, ("i", ["a", "7", " b"])),
    ],
)
def test_fields(row, expected):
    assert read_row(row) == expected


def test_rows_without_prompt_or_answer_are_left_out_and_said():
    made = hs.needles_from_texts([{"outputs": ["a"]}, ROWS[0], {"input": "x"}], tokenizer(), compat="qiao2026")
    assert list(made.left_out) == [0, 2]
    assert len(made) == 1
    with pytest.raises(ValueError, match="compat='wu'"):
        inspect.unwrap(hs.needles_from_texts)(ROWS, tokenizer(), compat="wu")


def test_the_colon_before_and_the_stop_behind_a_value_count():
    ids = tokenizer()("so: 47. 47, 7", add_special_tokens=False)["input_ids"]
    marked = occurrences(torch.tensor(ids), spellings(tokenizer(), ["47"]))
    assert "".join("^" if m else "." for m in marked.tolist()) == "..^^^^^^^^..."
    assert not occurrences(torch.tensor([5, 6]), [[5, 6, 7]]).any()
    assert occurrences(torch.tensor([5, 6]), [[5, 6]]).all()


def test_made_texts_know_their_spellings_and_keep_them_in_subsets(model):
    made = hs.make_needles(4, 400, haystack="repeat", tokenizer=tokenizer(), values=3)
    assert made.spellings is not None
    part = made[torch.tensor([2, 0])]
    assert part.spellings == [made.spellings[2], made.spellings[0]]
    text = tokenizer().decode(made.answers[1].tolist()).strip()
    assert made.spellings[1] == spellings(tokenizer(), [text])
    table = hs.retrieval_heads(model, made, "mass", compat="qiao2026")
    alone = hs.retrieval_heads(model, made, "mass", rows="published", only_answered=False, full_only=False)
    assert (scores(table)[::2] > scores(alone)[::2]).all()  # the colon, the space and the full stop
