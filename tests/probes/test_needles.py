"""Needle data: exact lengths, spans that hold what they say, and nothing cut; in tokens and in English."""

from __future__ import annotations

import inspect
import re

import english
import pytest
import torch
from helpers import model_of

import hybridscope as hs
from hybridscope.probes.haystacks import REPEATED, TokenLanguage
from hybridscope.probes.needles import NEEDLE, QUESTION, answered

LANGUAGE = TokenLanguage(vocab_size=60, keys=10, values=8)
ENGLISH = [(kind, haystack) for kind in english.KINDS for haystack in ("repeat", "essay")]
LENGTH = 260  # about twice what needle and question take with these tokenizers


@pytest.fixture(scope="module")
def tokenizers():
    return {kind: english.tokenizer(kind) for kind in english.KINDS}


def tokens(n=40, length=64, **options) -> hs.Needles:
    return hs.make_needles(n, length, **{"language": LANGUAGE, **options})


def english_needles(tokenizer, haystack="essay", n=6, length=LENGTH, **options) -> hs.Needles:
    texts = english.TEXTS if haystack == "essay" else None
    return hs.make_needles(n, length, haystack=haystack, tokenizer=tokenizer, texts=texts, **options)


@pytest.fixture(params=["tokens", *ENGLISH], ids=lambda p: p if isinstance(p, str) else "-".join(p))
def made(request, tokenizers) -> hs.Needles:
    """A dozen prompts of each haystack."""
    if request.param == "tokens":
        return tokens(12)
    return english_needles(tokenizers[request.param[0]], request.param[1], 12)


# Every haystack


def test_answer_rows_predict_the_answer_at_the_very_end(made):
    n, T = made.tokens.shape
    A = made.answers.shape[1]
    assert T in (64, LENGTH)
    assert made.answer_rows.tolist() == [list(range(T - A, T))] * n
    assert torch.equal(made.tokens[:, T - A + 1 :], made.answers[:, :-1])  # given, but for the last token
    assert torch.equal(made.query_row, made.answer_rows[:, 0])
    assert torch.equal(made.spans["question"][:, 1] - 1 <= made.query_row, torch.ones(n, dtype=torch.bool))


def test_spans_nest_and_the_value_is_the_answer(made):
    needle, key, value, question = (made.spans[s] for s in ("needle", "key", "value", "question"))
    for inner in (key, value):
        assert (needle[:, 0] <= inner[:, 0]).all()
        assert (inner[:, 1] <= needle[:, 1]).all()
    assert (key[:, 1] <= value[:, 0]).all()
    assert (needle[:, 1] <= question[:, 0]).all()
    for i in range(len(made)):
        assert torch.equal(made.tokens[i, slice(*value[i].tolist())], made.answers[i])
    assert torch.equal(made.distance, made.query_row - value[:, 0])


def test_the_removed_prompt_differs_inside_the_needle_only(made):
    column = torch.arange(made.tokens.shape[1])
    inside = (column >= made.spans["needle"][:, :1]) & (column < made.spans["needle"][:, 1:])
    changed = made.tokens != made.removed
    assert not (changed & ~inside).any()
    assert (changed & inside).any(1).all()
    for i in range(len(made)):
        needle = " ".join(map(str, made.removed[i][inside[i]].tolist()))
        assert " ".join(map(str, made.answers[i].tolist())) not in needle


def test_depth_is_where_the_needle_stands(made):
    start, stop = made.spans["needle"].T
    room = made.spans["question"][:, 0] - (stop - start)
    assert torch.allclose(made.depth, start.double() / room)
    assert torch.equal(made.labels["depth"], (made.depth * 10).long().clamp(max=9))


def test_one_depth_for_all():
    one = hs.make_needles(6, 96, values=4, depth=0.5, language=LANGUAGE)
    assert torch.allclose(one.depth, torch.tensor(0.5).double(), atol=0.02)


def test_values_are_balanced(made):
    counts = torch.bincount(made.labels["value"], minlength=8)
    assert counts.max() - counts.min() <= 1
    assert made.classes["value"] == 8


def test_key_labels_mark_the_value_and_the_needle(made):
    labels = made.key_labels()
    for bit, name in enumerate(("value", "needle")):
        rows, columns = ((labels >> bit) & 1).nonzero().T
        for i in range(len(made)):
            a, b = made.spans[name][i].tolist()
            assert columns[rows == i].tolist() == list(range(a, b))


# The token language


def test_tokens_are_marker_key_value_and_the_question_repeats_the_key():
    made = tokens()
    for i in range(len(made)):
        a, b = made.spans["needle"][i].tolist()
        marker, key, value = made.tokens[i, a:b].tolist()
        assert marker == LANGUAGE.MARKER
        assert 2 <= key < LANGUAGE.first_value
        assert value == LANGUAGE.first_value + int(made.labels["value"][i])
        assert made.tokens[i, slice(*made.spans["question"][i].tolist())].tolist() == [LANGUAGE.MARKER, key]
        assert made.tokens[i, -2:].tolist() == [LANGUAGE.MARKER, key]


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (0.2, 0.4), (0.0, 0.0), (1.0, 1.0)])
def test_depths_are_spread_evenly_over_the_range_asked_for(low, high):
    made = tokens(50, 200, depth=(low, high))
    start = made.spans["needle"][:, 0].double()
    spread = (start - 1) / (200 - 6)
    ideal = low + (high - low) * (torch.arange(50) + 0.5) / 50
    assert (spread.sort().values - ideal).abs().max() < (high - low) / 50 + 1 / 190


def test_distractors_never_use_the_asked_key():
    made = tokens(60, 64, distractors=5)
    for row, (a, _) in zip(made.tokens.tolist(), made.spans["needle"].tolist(), strict=True):
        asked = row[-1]
        markers = [t for t, token in enumerate(row) if token == LANGUAGE.MARKER]
        assert len(markers) == 5 + 2
        assert [t for t in markers if row[t + 1] == asked] == [a, 62]


def test_every_sample_of_the_token_language_is_its_own_group():
    assert len(tokens(200).group.unique()) == 200


def test_the_seed_decides_everything():
    one, same, other = tokens(seed=3), tokens(seed=3), tokens(seed=4)
    assert torch.equal(one.tokens, same.tokens)
    assert torch.equal(one.removed, same.removed)
    assert torch.equal(one.labels["value"], same.labels["value"])
    assert not torch.equal(one.tokens, other.tokens)
    assert not torch.equal(one.labels["value"], other.labels["value"])


# English


@pytest.mark.parametrize(("kind", "haystack"), ENGLISH)
def test_spans_decode_to_what_they_claim(tokenizers, kind, haystack):
    made = english_needles(tokenizers[kind], haystack, values=["30 apples", "31 pears"], distractors=1)

    def text(i: int, span: torch.Tensor) -> str:
        return tokenizers[kind].decode(made.tokens[i, slice(*span.tolist())]).strip()

    for i in range(len(made)):
        key = text(i, made.spans["key"][i])
        value = text(i, made.spans["value"][i]).rstrip(".")  # some tokenizers merge the full stop in
        assert value == ["30 apples", "31 pears"][made.labels["value"][i]]
        assert text(i, made.spans["needle"][i]) == NEEDLE.format(key=key, value=value)
        assert text(i, made.spans["question"][i]) == QUESTION.format(key=key)
        assert tokenizers[kind].decode(made.answers[i][made.answers[i] >= 0]).strip() == value
        told = re.findall(r"numbers for (\w+ \w+) is: ([^.]+)\.", tokenizers[kind].decode(made.tokens[i]))
        assert len(told) == 2
        assert told.count((key, value)) == 1
        assert [k for k, _ in told].count(key) == 1  # the distractor has another


@pytest.mark.parametrize(("kind", "haystack"), ENGLISH)
def test_lengths_are_exact_down_to_the_shortest_and_nothing_is_cut(tokenizers, kind, haystack):
    with pytest.raises(ValueError, match=r"take \d+ tokens") as error:
        english_needles(tokenizers[kind], haystack, 1, 12)
    shortest = int(re.findall(r"take (\d+) tokens", str(error.value))[0])
    with pytest.raises(ValueError, match=str(shortest)):
        english_needles(tokenizers[kind], haystack, 1, shortest - 1)
    for length in [*range(shortest, shortest + 12), 2 * shortest]:
        made = english_needles(tokenizers[kind], haystack, 1, length)
        whole = tokenizers[kind].decode([*made.tokens[0], made.answers[0, -1]])
        key = tokenizers[kind].decode(made.tokens[0, slice(*made.spans["key"][0].tolist())]).strip()
        value = str(31415920 + int(made.labels["value"][0]))
        assert made.tokens.shape == (1, length)
        assert NEEDLE.format(key=key, value=value) in whole
        assert whole.endswith(f"{QUESTION.format(key=key)} {value}")


@pytest.mark.parametrize("kind", english.KINDS)
def test_a_token_put_in_front_stays_in_front(tokenizers, kind):
    begins = tokenizers[kind]("a")["input_ids"][0] == 0
    made = english_needles(tokenizers[kind])
    assert ((made.tokens[:, 0] == 0) == begins).all()
    assert not (made.tokens[:, 1:] <= 1).any()  # no special token anywhere else


def test_english_needles_stand_at_the_sentence_end_nearest_to_their_depth(tokenizers):
    """Within half the longest sentence of the place asked for."""
    tokenizer = tokenizers["bytes"]
    longest = max(len(tokenizer(f" {s}.")["input_ids"]) for s in REPEATED.split(". "))
    for depth in (0, 0.25, 0.5, 0.75, 1):
        made = english_needles(tokenizer, "repeat", 20, 600, depth=(depth, depth))
        start, stop = made.spans["needle"].T
        room = made.spans["question"][:, 0] - (stop - start)
        assert (start - depth * room).abs().max() <= longest / 2 + 1  # the first sentence has no space before it
        assert made.depth.numpy() == pytest.approx(depth, abs=(longest / 2 + 1) / int(room.min()))


def test_a_fresh_value_per_sample_has_no_class(tokenizers):
    for kind in ("bytes", "digits"):
        made = english_needles(tokenizers[kind], n=12, values=None)
        told = [tokenizers[kind].decode(a[a >= 0]).strip() for a in made.answers]
        assert all(re.fullmatch(r"\d{7}", t) for t in told)
        assert len(set(told)) == 12
        assert (made.labels["value"] == -1).all()
        for i in range(12):  # tokenizers may split them differently: rows end together
            rows = made.answer_rows[i][made.answer_rows[i] >= 0]
            assert rows.tolist() == list(range(LENGTH - len(rows), LENGTH))
            value = made.tokens[i, slice(*made.spans["value"][i].tolist())]
            assert torch.equal(value, made.answers[i][made.answers[i] >= 0])


def test_the_same_haystack_key_and_depth_bin_are_one_group(tokenizers):
    made = english_needles(tokenizers["digits"], "repeat", 120, 300, depth_bins=2)
    key = [tokenizers["digits"].decode(t[a:b]) for t, (a, b) in zip(made.tokens, made.spans["key"], strict=True)]
    expected = [(k.strip(), b) for k, b in zip(key, made.labels["depth"].tolist(), strict=True)]
    pairs = set(zip(expected, made.group.tolist(), strict=True))
    assert len(pairs) == len(set(expected)) == len(made.group.unique()) < 120


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"n": 0}, "n=0"),
        ({"length": 5}, "need 6 tokens"),
        ({"length": 14, "distractors": 3}, "need 15 tokens"),
        ({"distractors": 10}, "only 10 keys"),
        ({"distractors": -1}, "distractors=-1"),
        ({"depth": (0.6, 0.4)}, "depth"),
        ({"depth": (0.0, 1.1)}, "depth"),
        ({"depth_bins": 0}, "depth_bins=0"),
        ({"values": 9}, "has 8"),
        ({"values": 0}, "values=0"),
        ({"values": ["a"]}, "number of candidates"),
        ({"haystack": "essay"}, "needs a tokenizer"),
    ],
)
def test_what_cannot_be_made_is_an_error_that_names_it(options, named):
    with pytest.raises(ValueError, match=re.escape(named)):
        tokens(**options)


def test_an_unknown_haystack_and_half_a_prompt_are_errors():
    make = inspect.unwrap(hs.make_needles)  # without the tests' type checks
    with pytest.raises(ValueError, match='"tokens", "repeat" or "essay"'):
        make(1, 64, haystack="noise")
    for options, named in (({"n": 3.5, "length": 64}, "n=3.5"), ({"n": 3, "length": 48.5}, "length=48.5")):
        with pytest.raises(ValueError, match=f"{named}: expected >= 1, a whole number"):
            make(**options)


# Subsets


@pytest.mark.parametrize("index", [slice(3, 7), [5, 0, 2], torch.arange(40) % 3 == 0, 4, -1], ids=str)
def test_a_subset_keeps_everything_about_its_samples(index):
    made = tokens()
    part = made[index]
    kept = torch.arange(40)[index].reshape(-1)
    assert len(part) == len(kept)
    for name in ("tokens", "removed", "answers", "answer_rows", "group", "depth"):
        assert torch.equal(getattr(part, name), getattr(made, name)[kept])
    assert torch.equal(part.spans["value"], made.spans["value"][kept])
    assert torch.equal(part.labels["depth"], made.labels["depth"][kept])


def test_batches_are_all_samples_in_order():
    made = tokens()
    parts = list(made.batches(16))
    assert [len(p) for p in parts] == [16, 16, 8]
    assert torch.equal(torch.cat([p.tokens for p in parts]), made.tokens)


# Your own texts

ROWS = [
    {"input": "The harbour pilot is called Ann. Nobody asked. The pilot is", "outputs": ["Ann"]},
    {"input": "Rain fell. The sum of the apples was 4711 that day. Who counted? The sum was ", "outputs": "4711"},
    {"input": "No such thing here. It is", "outputs": ["gold"]},
    {"input": "red and red. It is", "outputs": ["red"]},
    {"input": "", "outputs": ["x"]},
    {"input": "Nothing to find", "outputs": []},
    {"input": "The old bridge was built by the gardener and the baker. It was built by", "outputs": ["baker"]},
    {"input": "The clock says 9. The clock says", "outputs": 9},
]  # fmt: skip
USED = [0, 1, 6, 7]


@pytest.mark.parametrize("kind", english.KINDS)
def test_texts_of_your_own_keep_their_spans_under_left_padding(tokenizers, kind):
    tokenizer = tokenizers[kind]
    made = hs.needles_from_texts(ROWS, tokenizer)
    assert len(made) == len(USED)
    assert made.attention_mask is not None
    first = made.attention_mask.int().argmax(1)
    for i, row in enumerate(ROWS[n] for n in USED):
        answer = row["outputs"][0] if isinstance(row["outputs"], list) else str(row["outputs"])
        length = int((made.answers[i] >= 0).sum())
        rows, answers = made.answer_rows[i, :length], made.answers[i, :length]
        assert made.attention_mask[i, first[i] :].all()
        assert made.attention_mask[i, : first[i]].sum() == 0
        assert (made.answer_rows[i, length:] == -1).all()
        assert int(rows[-1]) == made.tokens.shape[1] - 1
        ids = [*made.tokens[i, first[i] :].tolist(), int(answers[-1])]
        assert tokenizer.decode(ids, skip_special_tokens=True).strip() == f"{row['input'].rstrip()} {answer}"
        assert ids[: int(rows[0]) - int(first[i]) + 1] + answers.tolist() == ids
        assert tokenizer.decode(answers).strip() == answer
        assert tokenizer.decode(made.tokens[i, slice(*made.spans["value"][i].tolist())]).strip(" .,") == answer
        assert 0 <= made.depth[i] < 1
    assert (made.answer_rows < 0).any()  # answers of different lengths


def test_rows_that_cannot_be_used_are_named_with_the_reason(tokenizers):
    left_out = hs.needles_from_texts(ROWS, tokenizers["bytes"]).left_out
    assert set(left_out) == set(range(len(ROWS))) - set(USED)
    assert "0 times" in left_out[2]
    assert "2 times" in left_out[3]
    assert "`input`" in left_out[4]
    assert "`outputs`" in left_out[5]


def test_texts_of_one_length_need_no_mask(tokenizers):
    made = hs.needles_from_texts([ROWS[0], ROWS[0]], tokenizers["digits"])
    assert made.attention_mask is None
    assert torch.equal(made.tokens[0], made.tokens[1])


def test_no_usable_row_is_an_error_with_the_reasons(tokenizers):
    with pytest.raises(ValueError, match=r"row 0: answer 'gold' stands 0 times"):
        hs.needles_from_texts([ROWS[2]], tokenizers["bytes"])
    with pytest.raises(ValueError, match="no rows given"):
        hs.needles_from_texts([], tokenizers["bytes"])


# Accuracy


def test_accuracy_counts_whole_answers_that_the_model_gives_token_by_token(tokenizers):
    """Against each prompt alone, unpadded."""
    made = hs.needles_from_texts(ROWS, tokenizers["bytes"])
    model = model_of("gdn", "full", n_kv_heads=2)
    made.tokens %= model.vocab_size
    for i in range(len(made)):
        first = int(made.attention_mask[i].int().argmax())
        choice = model(made.tokens[i : i + 1, first:])[0].argmax(-1)
        rows = made.answer_rows[i][made.answer_rows[i] >= 0]
        made.answers[i, : len(rows)] = choice[rows - first]
    assert answered(model, made, batch=3).tolist() == [True] * 4
    assert hs.needle_accuracy(model, made) == 1
    made.answers[2, 0] = (made.answers[2, 0] + 1) % model.vocab_size
    assert answered(model, made, batch=3).tolist() == [True, True, False, True]
    assert hs.needle_accuracy(model, made) == 0.75


def test_one_wrong_token_makes_an_answer_wrong(tokenizers):
    made = english_needles(tokenizers["digits"], n=2)
    made.tokens %= 41
    model = model_of("full")
    for i in range(2):
        made.answers[i] = model(made.tokens[i : i + 1])[0, made.answer_rows[i]].argmax(-1)
    assert made.answers.shape[1] == 8
    made.answers[1, 5] = (made.answers[1, 5] + 1) % 41
    assert answered(model, made).tolist() == [True, False]
