"""record() of recurrent sites: the implicit attention of every mixer, under caps and padding, beside softmax heads."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from helpers import RECURRENT, assert_close, model_of, pad, tokens_of
from hybrid import INSIDE, LEFT, RIGHT
from implicit_oracle import of_weights, sets_of
from torch import Tensor

from hybridscope import HybridLM, ImplicitStats, Stats
from hybridscope.hooks.kernels.implicit_stats import implicit_weights
from hybridscope.hooks.kernels.recurrence import Read
from hybridscope.hooks.passes import Cache

# Every mixer


def seen(model: HybridLM, tokens: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Weights of all rows on the values at hook_v [B,T,H,T], those values, and what the recurrence (with RWKV-6's
    bonus) put out; the real tokens of each sample first."""
    mixer, found = model.layers[0].mixers[0], {}
    finish = mixer.finish

    def tap(site: Any, terms: dict[str, Tensor], run: Any, read: Read) -> None:
        x = {name: y for name, y in terms.items() if name != "v"}
        found["run"], found["w"] = run, implicit_weights(**x, read=read, cap=site.cap, conv=site.conv)

    def finished(out: Tensor, rest: Any) -> Tensor:
        found["out"] = out + rest[0][..., None] * rest[1] if mixer.site.mixer == "rwkv6" else out
        return finish(out, rest)

    mixer.site.tap, mixer.finish = tap, finished
    try:
        model.run_with_hooks(
            tokens, mask, fwd_hooks=[("blocks.0.attn.hook_v", lambda v, hook: found.update(v=v))]
        )  # fmt: skip
    finally:
        mixer.site.tap, mixer.finish = None, finish
    run = found["run"]
    return found["w"], run.mute(run.compact(found["v"])), run.mute(run.compact(found["out"]))


@pytest.mark.parametrize("cap", [None, 4, 7])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("mixer", RECURRENT)
def test_weights_times_values_are_the_output(mixer: str, padded: bool, cap: int | None) -> None:
    model, tokens, mask = model_of(mixer), tokens_of(3, 15), None
    if padded:
        rows = [tokens_of(1, len(at), seed=n)[0] for n, at in enumerate((LEFT, RIGHT, INSIDE))]
        tokens, mask = pad(rows, [LEFT, RIGHT, INSIDE], 15)
    with model.cap({0: cap}):
        w, v, out = seen(model, tokens, mask)
    assert_close(torch.einsum("brht,bthv->brhv", w, v), out, "model")
    assert float(out.abs().max()) > 1e-3


@pytest.mark.parametrize("mixer", RECURRENT)
def test_record_gives_the_statistics_of_the_mixer(mixer: str) -> None:
    model, tokens, sets = model_of(mixer, "full"), tokens_of(2, 15), sets_of(15)
    with model.record(stats=Stats(labels=sets, recurrent=True, histogram=False)) as rec:
        logits = model(tokens)
    assert torch.equal(logits, model(tokens))
    w, _, _ = seen(model, tokens)
    got = rec.stats(0)
    assert isinstance(got, ImplicitStats)
    expected = of_weights(w, sets)
    for name in ("entropy", "mass", "top1_prob", "distance", "signed", "signed_total"):
        assert_close(getattr(got, name), expected[name], "model")
    assert torch.equal(got.top1, expected["top1"])
    assert not isinstance(rec.stats(1), ImplicitStats)


@pytest.mark.parametrize("cap", [None, 6])
@pytest.mark.parametrize("mixer", ["rwkv6", "gdn", "mamba2", "hawk"])
def test_padding_changes_nothing(mixer: str, cap: int | None) -> None:
    """top1 is a column of the caller's matrix, distance counts real tokens, and padding rows read nothing."""
    model, places = model_of(mixer), [LEFT, RIGHT, INSIDE]
    rows = [tokens_of(1, len(at), seed=n)[0] for n, at in enumerate(places)]
    tokens, mask = pad(rows, places, 15)
    labels = torch.rand(3, 15) < 0.4
    with model.cap({0: cap}), model.record(stats=Stats(labels=labels, recurrent=True)) as rec:
        model(tokens, mask)
    for n, at in enumerate(places):
        with (
            model.cap({0: cap}),
            model.record(stats=Stats(labels=labels[n : n + 1, at], recurrent=True)) as alone,
        ):
            model(rows[n][None])
        for name in [f.name for f in dataclasses.fields(ImplicitStats) if f.name != "histogram"]:
            value = getattr(alone.stats(0), name)
            found = getattr(rec.stats(0), name)[n, at]
            if name == "top1":
                assert torch.equal(found, torch.tensor(at)[value[0]])
            else:
                assert_close(found.double(), value[0].double(), "model")
        gone = [t for t in range(15) if t not in at]
        assert (rec.stats(0).visible[n, gone] == 0).all()
        assert (rec.stats(0).mass[n, gone] == 0).all()


# Recording


def test_tables_put_both_kinds_on_one_scale() -> None:
    model, tokens, sets = model_of("gdn|swa:3", "full"), tokens_of(2, 15), sets_of(15)
    with model.record(stats=Stats(rows=[-1, 4], labels=sets, recurrent=True)) as rec:
        model(tokens)
    table = rec.table()
    assert set(table.kind) == {"recurrent", "window", "full"}
    recurrent = table[table.kind == "recurrent"]
    assert set(recurrent.layer) == {0}
    assert (recurrent.site == 0).all()
    assert recurrent.notna().all(axis=None)
    assert table[table.kind != "recurrent"][["signed_0", "signed_total"]].isna().all(axis=None)
    for name in ("mass_2", "entropy_norm", "top1_prob"):
        assert table[name].between(0, 1 + 1e-12).all()
    line = recurrent.set_index(["sample", "head", "row"]).loc[(1, 1, 14)]
    assert line.signed_1 == float(rec.stats(0).signed[1, 0, 1, 1])  # type: ignore[attr-defined]


def test_off_unless_asked_for() -> None:
    model, tokens = model_of("gdn", "full"), tokens_of(2, 15)
    with model.record(stats=True) as rec:
        model(tokens)
    assert set(rec.table().layer) == {1}
    with pytest.raises(ValueError, match=r"no softmax statistics; hs.Stats\(recurrent=True\)"):
        rec.stats(0)


def test_recordings_nest() -> None:
    model, tokens = model_of("gla", "full"), tokens_of(2, 15)
    with (
        model.record(stats=Stats(rows=[3], recurrent=True)) as outer,
        model.record(stats=Stats(rows=[7, 9], recurrent=True)) as inner,
    ):
        model(tokens)
    assert outer.stats(0).entropy.shape == (2, 1, 2 * 2)
    assert inner.rows(0).tolist() == [[7, 9]]


def test_a_context_in_several_calls_is_refused() -> None:
    """Before anything runs: the cache stays as it was. Calls without a wanted row are none of its business."""
    model, tokens = model_of("gdn", "full"), tokens_of(2, 15)
    cache = Cache()
    with model.record(stats=Stats(rows=[5, 8], recurrent=True)) as rec:
        model(tokens[:, :9], cache=cache)
        out = model(tokens[:, 9:], cache=cache)
    assert_close(out, model(tokens)[:, 9:], "model")
    with model.record(stats=Stats(rows=[5, 8], recurrent=True)) as whole:
        model(tokens)
    assert_close(rec.stats(0).entropy, whole.stats(0).entropy, "model")
    for rows in ([5, 12], None, [-1]):
        cache = Cache()
        model(tokens[:, :9], cache=cache)
        with (
            model.record(stats=Stats(rows=rows, recurrent=True)),
            pytest.raises(ValueError, match=r"blocks.0.attn is recurrent.*whole context in one call"),
        ):
            model(tokens[:, 9:], cache=cache)
        assert_close(model(tokens[:, 9:], cache=cache), out, "model")


def test_labels_shorter_than_the_context() -> None:
    """Under a cache columns beyond the labels are in no set, as at softmax sites; otherwise lengths must agree."""
    model, tokens = model_of("gdn", "full"), tokens_of(2, 15)
    labels = torch.rand(2, 9) < 0.5
    spec = Stats(rows=[14], labels=labels, recurrent=True)
    with model.record(stats=spec) as rec:
        model(tokens, cache=Cache())
    wide = torch.nn.functional.pad(labels, (0, 6))
    with model.record(stats=Stats(rows=[14], labels=wide, recurrent=True)) as whole:
        model(tokens)
    for layer in (0, 1):
        assert_close(rec.stats(layer).mass, whole.stats(layer).mass, "model")
    with model.record(stats=spec), pytest.raises(ValueError, match="labels: shape"):
        model(tokens)
