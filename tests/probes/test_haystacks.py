"""Haystacks: a token language with a fixed grammar, and English cut to the token without touching the needle."""

from __future__ import annotations

import re

import english
import numpy as np
import pytest

from hybridscope.probes.haystacks import TokenLanguage, addresses, columns, encode, text_haystack
from hybridscope.probes.needles import KEYS, NEEDLE, QUESTION

LANGUAGE = TokenLanguage(vocab_size=40, keys=6, values=5, branching=3)


@pytest.fixture(scope="module", params=english.KINDS)
def tokenizer(request):
    return english.tokenizer(request.param)


def haystack(tokenizer, name="essay", texts=english.TEXTS):
    return text_haystack(name, tokenizer, texts, NEEDLE, QUESTION, KEYS)


def test_ids_are_split_into_special_tokens_keys_values_and_filler():
    assert (LANGUAGE.first_value, LANGUAGE.first_filler) == (2 + 6, 2 + 6 + 5)
    text = LANGUAGE.filler(np.random.default_rng(0), 20, 30)
    assert (text[:, 0] == LANGUAGE.START).all()
    assert (text[:, 1:] >= LANGUAGE.first_filler).all()
    assert (text < 40).all()


def test_each_filler_token_has_as_many_successors_as_it_branches():
    text = LANGUAGE.filler(np.random.default_rng(0), 200, 50)
    follows: dict[int, set[int]] = {}
    for a, b in zip(text[:, 1:-1].ravel(), text[:, 2:].ravel(), strict=True):
        follows.setdefault(int(a), set()).add(int(b))
    assert {len(s) for s in follows.values()} == {3}


def test_one_text_alone_is_drawn_like_any_other():
    rng = np.random.default_rng(3)
    text = LANGUAGE.filler(np.random.default_rng(3), 1, 500)[0]
    now = int(rng.integers(LANGUAGE.first_filler, LANGUAGE.vocab_size, 1)[0])
    turns = rng.integers(0, LANGUAGE.branching, (500, 1))[:, 0]
    assert text[0] == LANGUAGE.START
    for t in range(1, 500):
        assert text[t] == now
        now = LANGUAGE.grammar[now - LANGUAGE.first_filler, turns[t]]


def test_the_grammar_belongs_to_the_language_not_to_the_seed():
    same = TokenLanguage(vocab_size=40, keys=6, values=5, branching=3)
    assert np.array_equal(LANGUAGE.grammar, same.grammar)


@pytest.mark.parametrize("distractors", [0, 1, 5])
@pytest.mark.parametrize("depth", [0.0, 0.3, 1.0])
def test_needles_of_the_token_language_stand_whole_and_apart(distractors, depth):
    rng = np.random.default_rng(0)
    needed = 1 + 3 * (1 + distractors) + 2
    for length in (needed, needed + 1, 40):
        made = LANGUAGE.sample(rng, length, depth, LANGUAGE.first_value, distractors)
        tokens, (start, stop) = made["tokens"], made["spans"]["needle"]
        assert len(tokens) == length
        assert tokens[start:stop].tolist() == [LANGUAGE.MARKER, made["key"], LANGUAGE.first_value]
        assert tokens[-2:].tolist() == [LANGUAGE.MARKER, made["key"]]
        markers = np.flatnonzero(tokens == LANGUAGE.MARKER)
        assert len(markers) == distractors + 2
        assert (np.diff(markers) >= 3).all()
        asked = tokens[markers + 1]
        assert len(set(asked)) == distractors + 1  # the asked key twice, every other once
        assert (asked == made["key"]).sum() == 2
    if distractors == 0:
        assert start == 1 + round(depth * (40 - needed))


@pytest.mark.parametrize(
    ("options", "named"),
    [({"vocab_size": 15}, "16"), ({"keys": 0}, "keys"), ({"values": 0}, "values"), ({"branching": 0}, "branching")],
)
def test_a_language_that_cannot_be_is_an_error(options, named):
    with pytest.raises(ValueError, match=named):
        TokenLanguage(**{"vocab_size": 40, "keys": 6, "values": 5, "branching": 3, **options})


def test_encode_leaves_out_what_would_follow_the_answer(tokenizer):
    ids, offsets = encode(tokenizer, "The harbour: 42")
    assert tokenizer.decode(ids, skip_special_tokens=True).strip() == "The harbour: 42"
    assert offsets[-1][1] == len("The harbour: 42")
    full = tokenizer("The harbour: 42")["input_ids"]
    assert full[: len(ids)] == ids  # a token put in front stays


def test_columns_cover_the_characters_and_no_more():
    offsets = [(0, 0), (0, 3), (3, 7), (7, 8)]
    assert columns(offsets, 3, 7) == (2, 3)
    assert columns(offsets, 2, 4) == (1, 3)
    assert columns(offsets, 0, 8) == (1, 4)


def test_a_tokenizer_without_offsets_is_refused():
    with pytest.raises(ValueError, match="fast tokenizer"):
        encode(object(), "text")


def test_the_text_around_the_needle_is_the_document(tokenizer):
    document = english.TEXTS[1]
    made = haystack(tokenizer, texts=[document]).sample(np.random.default_rng(0), 300, 0.5, "31415920", 0)
    a, b = made["spans"]["needle"]
    around = tokenizer.decode([*made["tokens"][:a], *made["tokens"][b : made["spans"]["question"][0]]])
    around = re.sub(r"\s+", " ", around.replace("<s>", ""))
    endless = " ".join([document] * 20)
    assert around[:-1].strip() in endless


def test_sentences_go_on_round_and_round_and_the_needle_stands_between_two(tokenizer):
    made = haystack(tokenizer, "repeat", None).sample(np.random.default_rng(0), 300, 0.5, "31415920", 0)
    before = tokenizer.decode(made["tokens"][: made["spans"]["needle"][0]])
    after = tokenizer.decode(made["tokens"][made["spans"]["needle"][1] :])
    assert before.rstrip()[-1] == "."
    assert after.strip()[0].isupper()


def test_text_without_a_sentence_is_an_error():
    with pytest.raises(ValueError, match="texts"):
        haystack(None, texts=["", "  "])


def test_more_distractors_than_keys_is_an_error(tokenizer):
    with pytest.raises(ValueError, match=f"only {len(KEYS)} keys"):
        haystack(tokenizer).sample(np.random.default_rng(0), 4000, 0.5, "31415920", len(KEYS))
    with pytest.raises(ValueError, match="only 6 keys"):
        LANGUAGE.sample(np.random.default_rng(0), 400, 0.5, 8, 6)


def test_essays_are_state_of_the_union_addresses():
    texts = addresses(2)
    assert len(texts) == 2
    assert all(len(t) > 10_000 for t in texts)
