"""A recurrence that cannot retrieve, beside a head that does and alone: no measurement gives it what it cannot have."""

from __future__ import annotations

import planted
import pytest
from planted import HEAD, LANGUAGE, T

import hybridscope as hs

SITE = 2  # its layer
SEES = 4  # tokens, those of its convolution
FAR = planted.needles(32, depth=(0, 0.8))


@pytest.fixture(scope="module")
def beside():
    return planted.planted(last="gdn")


def test_the_model_retrieves_with_the_head_and_not_with_the_recurrence(beside):
    assert hs.needle_accuracy(beside, FAR) == 1
    with beside.ablate([HEAD]):
        assert hs.needle_accuracy(beside, FAR) < 0.3
    with beside.ablate([(SITE, h) for h in range(beside.sites[SITE].heads)]):
        assert hs.needle_accuracy(beside, FAR) == 1


def test_its_heads_are_not_ranked_among_those_that_attend(beside):
    heads = hs.retrieval_heads(beside, FAR)
    assert SITE not in set(heads.layer)
    assert tuple(heads.loc[0, ["layer", "site", "head"]]) == HEAD


def test_its_implicit_attention_is_on_its_own_token_alone(beside):
    stats = hs.Stats(rows=[T - 1], labels=FAR.key_labels(), recurrent=True)
    with beside.record(stats=stats) as rec:
        beside(FAR.tokens)
    found = rec.stats(SITE)
    assert found.mass.max() == 0
    assert (found.top1 == T - 1).all()
    assert found.entropy.abs().max() < 1e-12


def test_patching_it_recovers_nothing_and_the_head_everything(beside):
    table = hs.patch_heads(beside, FAR[:8], heads=[HEAD, (SITE, 0)], rows=["all"], by="site", directions=["denoise"])
    recovered = table.set_index("layer").recovered
    assert recovered[HEAD[0]] == pytest.approx(1, abs=0.1)
    assert abs(recovered[SITE]) < 0.1


def test_capping_it_changes_nothing_and_capping_the_head_everything(beside):
    table = hs.cap_sweep(beside, FAR, kinds=["recurrent", "full"], windows=[6], sinks=[0])
    accuracy = table[table.window == 6].set_index("kind").needle_accuracy
    assert accuracy["recurrent"] == 1
    assert accuracy["full"] < 0.3


def test_alone_it_carries_no_gradient_from_beyond_its_convolution(beside):
    """One token more for the window layer below it."""
    with beside.ablate([(1, h) for h in range(4)]):
        table = hs.gradient_influence(beside, FAR.tokens[:4], "logit_sum", rows=[T - 1]).set_index("distance")
    assert (table.influence[SEES + 1 :] == 0).all()


def test_beside_the_head_it_gains_nothing_and_alone_its_probe_stays_at_chance(beside):
    prompts = hs.make_needles(160, T, values=4, language=LANGUAGE, depth=(0, 0.8))
    table = hs.probe_layers(beside, prompts, controls=()).query("where == 'mid'").set_index("layer")
    assert table.accuracy[1] == table.accuracy[SITE] == 1
    assert table.gain[SITE] == 0
    with beside.ablate([(1, h) for h in range(4)]):
        table = hs.probe_layers(beside, prompts, controls=()).query("where == 'mid'")
    assert (table.accuracy < 0.45).all()  # chance is 1/4
    assert (table.low < table.chance).all()
