"""Training data: what is scored is what can be known, and a batch is a function of seed and step."""

from __future__ import annotations

import numpy as np
import pytest
import tiny
import torch

from hybridscope.experiments.config import DataConfig
from hybridscope.experiments.corpus import SHORTEST_COPY, TokenFile, TokenMixture, corpus, data_hash

DATA = {"length": 48, "vocab_size": 40, "keys": 8, "values": 6, "needles": 3}


def mixture(**options) -> TokenMixture:
    return TokenMixture(DataConfig(**{**DATA, **options}))


@pytest.fixture(scope="module")
def needles():
    source = mixture(copy_share=0.0)
    tokens, weight = source.batch(0, 0, 64)
    return source.language, tokens, weight


@pytest.fixture(scope="module")
def copies():
    source = mixture(copy_share=1.0)
    return source.language, *source.batch(0, 0, 64)


def test_a_batch_is_a_function_of_seed_and_step():
    source = mixture()
    tokens, weight = source.batch(3, 5, 16)
    source.batch(3, 6, 16)
    again, same_weight = mixture().batch(3, 5, 16)
    assert torch.equal(tokens, again)
    assert torch.equal(weight, same_weight)
    for other in (source.batch(3, 6, 16), source.batch(4, 5, 16), source.batch(5, 3, 16)):
        assert not torch.equal(tokens, other[0])


def test_shapes_and_shares():
    tokens, weight = mixture(copy_share=0.25).batch(0, 0, 16)
    assert tokens.shape == (16, 48)
    assert weight.shape == (16, 47)
    assert tokens.dtype == torch.int64
    assert 0 <= int(tokens.min()) <= int(tokens.max()) < 40
    markers = (tokens == 1).sum(1)
    assert (markers[:12] == 6).all()  # 12 with needles: 3 told, 3 asked


def test_every_asked_needle_was_told_before_with_the_same_value(needles):
    language, tokens, _ = needles
    for row in tokens.tolist():
        seen: dict[int, list[int]] = {}
        for t in [t for t, token in enumerate(row) if token == language.MARKER]:
            seen.setdefault(row[t + 1], []).append(row[t + 2])
        assert len(seen) == 3
        for key, values in seen.items():
            assert 2 <= key < language.first_value
            assert len(values) == 2
            assert values[0] == values[1]
            assert language.first_value <= values[0] < language.first_filler


def test_weights_mark_exactly_the_answers(needles):
    """The rows at an asked key, which predict its value; nothing that is being told."""
    language, tokens, weight = needles
    for row, w in zip(tokens.tolist(), weight, strict=True):
        seen, answers = set(), []
        for t in [t for t, token in enumerate(row) if token == language.MARKER]:
            if row[t + 1] in seen:
                answers.append(t + 1)
            seen.add(row[t + 1])
        assert w.nonzero()[:, 0].tolist() == answers
        assert (w[answers] == 1).all()


def test_filler_weight_scores_filler_but_nothing_that_cannot_be_known():
    source = mixture(copy_share=0.0, filler_weight=0.25)
    tokens, weight = source.batch(0, 0, 32)
    plain, base = mixture(copy_share=0.0).batch(0, 0, 32)
    assert torch.equal(tokens, plain)
    assert (weight[base == 1] == 1).all()
    marker = tokens[:, :-1] == source.language.MARKER
    assert (weight[marker] == 0).all()  # which key comes
    key = (tokens[:, :-1] >= 2) & (tokens[:, :-1] < source.language.first_value)
    assert (weight[key & (base == 0)] == 0).all()  # which value is told
    assert (weight[~marker & ~key] == 0.25).all()


def test_weights_mark_exactly_the_second_copies(copies):
    """Each scored row predicts a token that the same stretch, earlier, went on with."""
    _, tokens, weight = copies
    for row, w in zip(tokens.tolist(), weight, strict=True):
        scored = w.nonzero()[:, 0].tolist()
        start, stop = scored[0], scored[-1] + 2  # the second copy
        size = stop - start
        assert size >= 8
        assert scored == list(range(start, stop - 1))
        copy = row[start:stop]
        earlier = [s for s in range(1, start - size + 1) if row[s : s + size] == copy]
        assert earlier
        assert (w[scored] == 1).all()
        assert stop <= len(row)


def test_copies_are_random_tokens_without_markers(copies):
    language, tokens, _ = copies
    assert (tokens[:, 0] == language.START).all()
    assert (tokens[:, 1:] >= 2).all()
    assert len(tokens[:, 1:].unique()) == 38


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"length": 18}, r"data\.length=18: 3 needles, each asked again, take 19"),
        ({"needles": 9, "length": 96}, r"data\.needles=9: more than the 8 keys"),
        ({"needles": 1, "length": SHORTEST_COPY - 1}, rf"copy_share\) take {SHORTEST_COPY}"),
        ({"vocab_size": 12}, "vocab_size=12"),
    ],
)
def test_data_that_cannot_be_made_is_an_error(options, named):
    with pytest.raises(ValueError, match=named):
        mixture(**options)


def test_the_shortest_lengths_work():
    mixture(length=19, copy_share=0.0).batch(0, 0, 8)
    mixture(length=SHORTEST_COPY, needles=1).batch(0, 0, 64)
    tokens, weight = mixture(needles=0, copy_share=0.0, filler_weight=1.0).batch(0, 0, 4)
    assert (weight == 1).all()
    assert not (tokens == 1).any()


# Token files


def token_file(tmp_path, ids, length=16, vocab=500) -> TokenFile:
    np.asarray(ids, dtype="<u2").tofile(tmp_path / "ids.bin")
    return TokenFile(DataConfig(length=length, vocab_size=vocab, file=str(tmp_path / "ids.bin")))


def test_a_token_file_is_read_as_little_endian_uint16(tmp_path):
    source = token_file(tmp_path, np.arange(100, 500))
    tokens, weight = source.batch(0, 0, 8)
    assert (tokens[:, 1:] - tokens[:, :-1] == 1).all()
    assert (tokens >= 100).all()
    assert (tokens < 500).all()
    assert (weight == 1).all()
    (tmp_path / "ids.bin").write_bytes(bytes([1, 2]) * 16)
    assert (token_file_at(tmp_path).batch(0, 0, 2)[0] == 1 + 2 * 256).all()


def token_file_at(tmp_path) -> TokenFile:
    return TokenFile(DataConfig(length=16, vocab_size=1000, file=str(tmp_path / "ids.bin")))


def test_sequences_start_anywhere_in_the_file_and_depend_on_seed_and_step(tmp_path):
    source = token_file(tmp_path, np.arange(40))
    first = torch.cat([source.batch(0, step, 64)[0][:, 0] for step in range(8)])
    assert set(first.tolist()) == set(range(40 - 16 + 1))  # the last whole sequence too
    assert torch.equal(source.batch(1, 2, 4)[0], source.batch(1, 2, 4)[0])
    assert not torch.equal(source.batch(1, 2, 4)[0], source.batch(1, 3, 4)[0])


def test_a_file_of_one_sequence_is_enough(tmp_path):
    assert torch.equal(token_file(tmp_path, np.arange(16)).batch(0, 0, 1)[0][0], torch.arange(16))


def test_token_files_that_do_not_fit_are_errors(tmp_path):
    with pytest.raises(ValueError, match="15 tokens; one sequence takes 16"):
        token_file(tmp_path, np.arange(15))
    with pytest.raises(ValueError, match="0 tokens"):
        token_file(tmp_path, [])
    with pytest.raises(ValueError, match=r"token id \d+ outside data\.vocab_size=300"):
        token_file(tmp_path, np.arange(300, 340), vocab=300).batch(0, 0, 4)
    (tmp_path / "ids.bin").write_bytes(b"odd" * 21)
    with pytest.raises(ValueError, match="63 bytes; uint16"):
        token_file_at(tmp_path)
    with pytest.raises(FileNotFoundError, match="no such file"):
        TokenFile(DataConfig(length=4, vocab_size=9, file=str(tmp_path / "none")))


def test_a_u32_file_holds_ids_beyond_65535(tmp_path):
    ids = np.arange(70_000, 70_100)
    ids.astype("<u4").tofile(tmp_path / "ids.u32")
    data = DataConfig(length=16, vocab_size=73_448, file=str(tmp_path / "ids.u32"))
    tokens, _ = TokenFile(data).batch(0, 0, 8)
    assert (tokens[:, 1:] - tokens[:, :-1] == 1).all()
    assert (tokens >= 70_000).all()
    (tmp_path / "ids.u32").write_bytes(b"abcd" * 16 + b"ab")
    with pytest.raises(ValueError, match="66 bytes; uint32 token ids take 4 each"):
        TokenFile(data)
    with pytest.raises(ValueError, match=r"uint16 ids cannot hold data\.vocab_size=73448; .*\.u32"):
        token_file(tmp_path, np.arange(64), vocab=73_448)


@pytest.mark.parametrize(("vocab", "made"), [(65_536, "'<u2'.*train.u16"), (65_537, "'<u4'.*train.u32")])
def test_a_dataset_without_a_file_says_how_to_make_one(vocab, made):
    data = DataConfig(length=16, vocab_size=vocab, dataset="HuggingFaceFW/fineweb-edu", tokenizer="some/tokenizer")
    with pytest.raises(ValueError, match=f"HuggingFaceFW/fineweb-edu.*nothing is downloaded.*some/tokenizer.*{made}"):
        corpus(data)


def test_a_dataset_with_a_file_is_that_file(tmp_path):
    np.arange(64, dtype="<u2").tofile(tmp_path / "ids.u16")
    data = DataConfig(length=16, vocab_size=64, dataset="HuggingFaceFW/fineweb-edu", file=str(tmp_path / "ids.u16"))
    assert isinstance(corpus(data), TokenFile)


def test_the_config_says_which_source(tmp_path):
    assert isinstance(corpus(tiny.config(tmp_path).data), TokenMixture)
    np.arange(64, dtype="<u2").tofile(tmp_path / "ids.bin")
    run = tiny.config(tmp_path, f"data.file={tmp_path / 'ids.bin'}", "data.vocab_size=64")
    assert isinstance(corpus(run.data), TokenFile)


def test_a_data_hash_tells_data_and_seeds_apart():
    hashes = [
        data_hash(mixture(), 0),
        data_hash(mixture(), 1),
        data_hash(mixture(values=5), 0),
        data_hash(mixture(filler_weight=0.1), 0),
    ]
    assert len(set(hashes)) == 4
    assert data_hash(mixture(), 0) == hashes[0]
