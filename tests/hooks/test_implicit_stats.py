"""implicit_stats(): the weights are those by which a recurrence sums its values, and the statistics are theirs."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from helpers import RECURRENT, Largest, assert_close, model_of, pad, tokens_of
from torch import Tensor

from hybridscope import HybridLM, ImplicitStats, Stats, attention_stats, implicit_stats
from hybridscope.hooks.kernels import implicit_stats as kernel
from hybridscope.hooks.kernels.implicit_stats import implicit_weights
from hybridscope.hooks.kernels.recurrence import Read, plain, recurrence_reference
from hybridscope.hooks.passes import Cache

Inputs = dict[str, Any]
KINDS = ["none", "scalar", "vector", "delta", "vector+low rank"]
T = 23
LEFT, RIGHT, INSIDE = list(range(5, 15)), list(range(10)), [0, 1, 3, 6, 7, 8, 10, 11, 13]


def inputs(kind: str, length: int = T, *, B: int = 2, H: int = 2, K: int = 4) -> Inputs:
    """Signed fp64 inputs; every A_t is at most 1, that of `vector+low rank` not symmetric."""
    k = torch.nn.functional.normalize(torch.randn(B, length, H, K).double(), dim=-1)
    x: Inputs = {"q": torch.randn(B, length, H, K).double(), "k": k}
    if kind != "none":
        x["log_decay"] = -0.4 * torch.rand(B, length, H, K if kind.startswith("vector") else 1).double()
    if kind == "delta":
        x["beta"] = 2 * torch.rand(B, length, H).double()
    if kind == "vector+low rank":
        a, b = (torch.nn.functional.normalize(torch.randn(B, length, H, K).double(), dim=-1) for _ in range(2))
        x.update(a=a, b=0.5 * b)
    return x


def products(x: Inputs, read: Read = "after") -> Tensor:
    """w_tj = q_t^T A_t ... A_{j+1} k_j with every A_t written out, [B,T,H,T]."""
    q, k = x["q"], x["k"]
    written, g, a, b = plain(k=k, v=k, **{name: y for name, y in x.items() if name not in ("q", "k")})
    A = torch.diag_embed(g.exp().expand_as(k))  # type: ignore[union-attr]
    if a is not None and b is not None:
        A = A + b[..., :, None] * a[..., None, :]
    B, length, H, _ = q.shape
    w = torch.zeros(B, length, H, length, dtype=q.dtype)
    for t in range(length):
        back = q[:, t]
        last = t if read == "after" else t - 1
        for j in range(last, -1, -1):
            w[:, t, :, j] = (back * written[:, j]).sum(-1)
            back = torch.einsum("bhij,bhi->bhj", A[:, j], back)
    return w


def windowed(w: Tensor, cap: int, conv: int) -> Tensor:
    """Weights of what a capped row sees: all of it before token `cap`, then the last cap - conv + 1 tokens."""
    t, j = torch.arange(w.shape[1])[:, None], torch.arange(w.shape[1])
    return w * ((t < cap) | (t - j < cap - conv + 1))[:, None]


def of_weights(w: Tensor, sets: Tensor) -> dict[str, Tensor]:
    """Every statistic by its definition, from weights [B,T,H,T]."""
    length = w.shape[-1]
    size = w.abs().sum(-1)
    p = w.abs() / size.clamp(min=1e-300)[..., None]
    distance = (torch.arange(length)[:, None] - torch.arange(length)).clamp(min=0)
    bins = torch.tensor([d.bit_length() for d in range(length)])[distance]  # [T,T]
    wanted = torch.nn.functional.one_hot(bins, (length - 1).bit_length() + 1).double()
    return {
        "lse": size.log(),
        "entropy": -torch.special.xlogy(p, p).sum(-1),
        "mass": torch.einsum("brhs,bsn->brhn", p, sets.double()),
        "top1": p.argmax(-1),
        "top1_prob": p.amax(-1),
        "distance": (p * distance[:, None]).sum(-1),
        "sink_mass": torch.zeros_like(size),
        "histogram": torch.einsum("brhs,rsn->brhn", p, wanted),
        "signed": torch.einsum("brhs,bsn->brhn", w, sets.double()),
        "signed_total": w.sum(-1),
    }


def check(got: ImplicitStats, w: Tensor, sets: Tensor, rows: Any = slice(None)) -> None:
    read = (w != 0).any(-1)[:, rows]
    for name, value in of_weights(w, sets).items():
        found, expected = getattr(got, name), value[:, rows]
        if name == "top1":
            assert torch.equal(found[read], expected[read])
        else:
            assert torch.equal(found[~read], expected[~read])
            assert_close(found[read], expected[read], torch.float64)


def sets_of(length: int = T, B: int = 2) -> Tensor:
    return torch.rand(B, length, 3) < torch.tensor([0.1, 0.5, 1.0])


# Against the products written out


@pytest.mark.parametrize("read", ["after", "before"])
@pytest.mark.parametrize("kind", KINDS)
def test_equals_explicit_products(kind: str, read: Read, monkeypatch: pytest.MonkeyPatch) -> None:
    """One chunk, several, chunks of one token; any amount at once; uncapped and capped."""
    x, sets = inputs(kind), sets_of()
    free = products(x, read)
    v = torch.randn(2, T, 2, 3).double()
    assert_close(torch.einsum("brht,bthv->brhv", free, v), recurrence_reference(**x, v=v, read=read)[0])
    ways: list[tuple[int, int, list[int | None]]]
    ways = [(64, 2**23, [None, 9]), (8, 2**23, [None, 1, 7, 9, T, T + 5]), (5, 1, [None, 9]), (1, 2**9, [7])]
    for chunk, elements, caps in ways:
        monkeypatch.setattr(kernel, "CHUNK", chunk)
        monkeypatch.setattr(kernel, "ELEMENTS", elements)
        for cap in caps:
            conv = 4 if cap == 9 else 1
            w = free if cap is None else windowed(free, cap, conv)
            assert_close(implicit_weights(**x, read=read, cap=cap, conv=conv), w)
            got = implicit_stats(**x, labels=sets, read=read, cap=cap, conv=conv, histogram=True)
            check(got, w, sets)
            t = torch.arange(T)
            low = 0 if cap is None else torch.where(t < cap, 0, t - cap + conv)
            visible = t - low + (read == "after")
            assert torch.equal(got.visible, visible[None, :, None].expand(2, -1, 2))


def test_outside_the_cap_is_zero_bitwise() -> None:
    """Whatever stands there: earlier tokens a thousand times as large change no weight inside."""
    x = inputs("scalar")
    loud = {name: y * torch.where(torch.arange(T) < 10, 1e3, 1.0)[:, None, None] for name, y in x.items()}
    for y in (x, {**loud, "log_decay": x["log_decay"]}):
        w = implicit_weights(**y, cap=6, conv=3, rows=[20, 15])
        assert (w[:, 0, :, :17] == 0).all()
        assert (w[:, 1, :, :12] == 0).all()
        assert_close(w, implicit_weights(**x, cap=6, conv=3, rows=[20, 15]))


@pytest.mark.parametrize("kind", KINDS)
def test_rows_subset(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In any order, repeated, from the end, or other rows for each sample."""
    monkeypatch.setattr(kernel, "CHUNK", 6)
    x, sets = inputs(kind), sets_of()
    whole = implicit_stats(**x, labels=sets, histogram=True)
    for rows in ([5, 22, 5, 0], [-1, -T], torch.tensor([[3, 22, 11], [18, 0, -2]]), []):
        got = implicit_stats(**x, rows=rows, labels=sets, histogram=True)
        index = torch.as_tensor(rows, dtype=torch.int64).expand(2, -1) % T
        for name, value in whole.fields().items():
            expected = torch.stack([value[n, index[n]] for n in range(2)])
            assert_close(getattr(got, name).double(), expected.double())


def test_write_strength_and_bonus() -> None:
    """`write` is a factor on what a token writes, `bonus` a weight beside it, for a token's own value only."""
    x = inputs("vector")
    write, bonus = (torch.randn(2, T, 2).double() for _ in range(2))
    w = products(x, "before") * write.transpose(1, 2)[:, None]
    w.diagonal(dim1=1, dim2=3).copy_(bonus.transpose(1, 2))
    sets = sets_of()
    got = implicit_stats(**x, write=write, bonus=bonus, labels=sets, read="before", histogram=True)
    check(got, w, sets)
    assert torch.equal(got.visible[0, :, 0], torch.arange(T) + 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_is_computed_in_fp32(dtype: torch.dtype) -> None:
    x = {name: y.to(dtype) for name, y in inputs("delta", 150).items()}
    got, expected = (implicit_stats(**y, rows=[149, 70]) for y in (x, {name: y.double() for name, y in x.items()}))
    for name in ("lse", "entropy", "top1_prob", "distance", "signed_total"):
        assert getattr(got, name).dtype == torch.float32
        assert_close(getattr(got, name) / 150, getattr(expected, name) / 150, torch.float32)


def test_labels_are_those_of_softmax_heads() -> None:
    x, bits = inputs("scalar"), torch.randint(0, 4, (2, T), dtype=torch.uint8)
    sets = torch.stack([bits & 1 == 1, bits & 2 == 2], -1)
    assert torch.equal(implicit_stats(**x, labels=bits).signed, implicit_stats(**x, labels=sets).signed)
    one = implicit_stats(**x, labels=sets[..., 1].contiguous())
    assert torch.equal(one.mass[..., 0], implicit_stats(**x, labels=bits).mass[..., 1])
    assert implicit_stats(**x).mass.shape == implicit_stats(**x).signed.shape == (2, T, 2, 0)


# Planted


@pytest.mark.parametrize("mixer", ["gla", "delta rule"])
def test_one_written_key_has_the_whole_share(mixer: str) -> None:
    x = inputs("vector" if mixer == "gla" else "delta")
    x["k"][:, :5], x["k"][:, 6:] = 0, 0
    sets = torch.arange(T)[None, :, None].expand(2, -1, 1) == 5
    s = implicit_stats(**x, labels=sets, rows=list(range(5, T)))
    assert torch.equal(s.mass, torch.ones_like(s.mass))
    assert torch.equal(s.top1_prob, torch.ones_like(s.top1_prob))
    assert (s.top1 == 5).all()
    assert (s.entropy == 0).all()
    assert_close(s.distance[0, :, 0], torch.arange(T - 5).double())
    assert torch.equal(s.signed[..., 0], s.signed_total)
    before = implicit_stats(**x, labels=sets, rows=list(range(5)))  # nothing has been written yet
    for value in (before.mass, before.entropy, before.distance, before.top1_prob, before.signed_total):
        assert (value == 0).all()
    assert (before.lse == -math.inf).all()


def test_the_delta_rule_overwrites() -> None:
    """A key written again with strength 1 replaces its first value; without erasure both stay."""
    k = torch.zeros(1, 10, 1, 4).double()
    k[0, [2, 7], 0, 1] = 1
    x: Inputs = {"q": torch.ones(1, 10, 1, 4).double(), "k": k}
    erased = implicit_weights(**x, beta=torch.ones(1, 10, 1).double(), rows=[6, 9])[0, :, 0]
    assert erased.nonzero().tolist() == [[0, 2], [1, 7]]
    assert implicit_weights(**x, rows=[6, 9])[0, :, 0].nonzero().tolist() == [[0, 2], [1, 2], [1, 7]]


def test_one_scale_with_softmax_heads() -> None:
    """Undecayed equal keys are uniform attention: every field that both have is the same."""
    q, labels = torch.ones(1, T, 1, 4).double(), torch.rand(1, T) < 0.3
    recurrent, softmax = implicit_stats(q=q, k=q, labels=labels), attention_stats(q, 0 * q, labels=labels)
    for name in ("entropy", "visible", "mass", "top1", "top1_prob", "distance", "sink_mass", "entropy_norm"):
        assert_close(getattr(recurrent, name).double(), getattr(softmax, name).double())


def test_a_decay_sets_the_distance() -> None:
    """Shares of a scalar decay are geometric: mean distance r / (1 - r), far from the start."""
    ones = torch.ones(1, 2000, 1, 1).double()
    s = implicit_stats(q=ones, k=ones, log_decay=math.log(0.95) * ones, rows=[-1])
    assert float(s.distance) == pytest.approx(0.95 / 0.05, rel=1e-12)
    assert float(s.lse) == pytest.approx(-math.log(0.05), rel=1e-12)


def test_signs_cancel_in_signed_sums_only() -> None:
    q = torch.ones(1, 8, 1, 1).double()
    k = q * torch.tensor([1.0, -1.0]).repeat(4)[:, None, None]
    s = implicit_stats(q=q, k=k, rows=[7], labels=torch.arange(8)[None] % 2 == 1)
    assert float(s.signed_total) == 0
    assert (float(s.signed), float(s.mass)) == (-4, 0.5)


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


@pytest.mark.parametrize("kind", ["vector", "delta"])
def test_memory_is_bounded(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing grows faster than the inputs, for a few rows or all."""
    monkeypatch.setattr(kernel, "ELEMENTS", 2**14)
    for rows in ([-1, 5], None):
        largest = []
        for length in (256, 1024):
            x = inputs(kind, length, B=1, H=1)
            with Largest() as watch:
                implicit_stats(**x, rows=rows)
            largest.append(watch.elements)
        assert largest[1] <= max(2**15, 1024 * 4)


def test_mistakes_are_named() -> None:
    x = inputs("scalar")
    cases: list[tuple[Inputs, str]] = [
        ({"rows": [T]}, f"do not fit {T}"),
        ({"rows": torch.zeros(3, 1, dtype=torch.int64)}, "rows: shape"),
        ({"cap": 2, "conv": 4}, "convolution width 4"),
        ({"labels": torch.zeros(2, 9, dtype=torch.bool)}, "labels: shape"),
    ]
    for options, message in cases:
        with pytest.raises(ValueError, match=message):
            implicit_stats(**x, **options)
    model = model_of("gdn", "full")
    model.sites[0].opaque = True
    with pytest.raises(ValueError, match=r"recurrent=True.*blocks.0.attn is recurrent"):
        model.record(stats=Stats(recurrent=True)).__enter__()
