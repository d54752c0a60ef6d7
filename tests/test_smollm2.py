"""A real pretrained model as positive control: its retrieval heads are found, and it cannot answer without them."""

import pytest

import hybridscope as hs

PROMPTS = 6
LENGTH = 400


@pytest.fixture(scope="module")
def needles(smol):
    def make(seed: int) -> hs.Needles:
        return hs.make_needles(
            PROMPTS, LENGTH, haystack="essay", tokenizer=smol.tokenizer, values=None, depth=(0.1, 0.6), seed=seed
        )

    return make


def test_retrieval_heads_of_a_real_model(smol, needles) -> None:
    find, check = needles(0), needles(1)
    assert hs.needle_accuracy(smol, find) > 0.6
    heads = hs.retrieval_heads(smol, find)
    assert len(heads) == 30 * 9
    assert heads["score"].iloc[0] > 0.5
    assert heads["score"].between(0, 1).all()
    # Sparse, as published: few heads retrieve.
    assert heads["retrieval"].mean() < 0.1
    effect = hs.causal_check(smol, check, heads, k=10, draws=2).groupby("ablated")["accuracy"].mean()
    assert effect["none"] > 0.6
    assert effect["top"] < effect["random"] - 0.5


def test_capping_every_layer_short_of_the_needle_loses_it(smol, needles) -> None:
    near, far = needles(2)[:2], int(needles(2)[:2].distance.min())
    with smol.cap(full=far // 2, sinks=4):
        assert hs.needle_accuracy(smol, near) == 0
