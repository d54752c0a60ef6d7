"""attention(): the fused call under windows, sinks, limits and padding equals the dense fp64 reference."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from helpers import Largest, assert_close
from torch import Tensor

from hybridscope.hooks.kernels import attention as kernel
from hybridscope.hooks.kernels import flex
from hybridscope.hooks.kernels.attention import attention, attention_reference

W = 7
SEGMENTS = torch.tensor([[0] * 3 + [1] * 10 + [2] * 6, [0] * 18 + [1]])


def qkv(
    T: int = 19, S: int | None = None, *, B: int = 2, H: int = 4, G: int = 2, K: int = 6, V: int = 6,
    dtype: torch.dtype = torch.float64,
) -> dict[str, Tensor]:  # fmt: skip
    S = T if S is None else S
    shapes = {"q": (B, T, H, K), "k": (B, S, G, K), "v": (B, S, G, V)}
    return {name: torch.randn(shape, dtype=dtype) for name, shape in shapes.items()}


def test_the_reference_is_softmax_over_the_last_w_keys() -> None:
    """By hand: one head, W = 2, so row 2 mixes values 1 and 2 by their two exponentials."""
    q, k, v = (
        torch.tensor(values, dtype=torch.float64).view(1, 3, 1, 1)
        for values in ([0.3, -0.2, 0.9], [0.5, 1.5, -0.4], [1.0, 10.0, 100.0])
    )
    out = attention_reference(q=q, k=k, v=v, window=2).flatten()
    first, second = math.exp(0.9 * 1.5), math.exp(0.9 * -0.4)
    assert float(out[2]) == pytest.approx((10 * first + 100 * second) / (first + second), rel=1e-15)
    assert out[0] == 1.0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1), (1, 1)])
@pytest.mark.parametrize(
    "limits",
    [{}, {"window": 1}, {"window": W}, {"window": 2, "sinks": 3}, {"window": 3, "sinks": 2, "limit": 9}],
)
def test_equals_the_reference(dtype: torch.dtype, heads: tuple[int, int], limits: dict[str, int]) -> None:
    x = qkv(H=heads[0], G=heads[1], dtype=dtype)
    assert_close(attention(**x, **limits), attention_reference(**x, **limits))
    assert_close(attention(**x, **limits, scale=0.7), attention_reference(**x, **limits, scale=0.7))


@pytest.mark.parametrize("window", [None, 1, W, 300])
def test_beyond_one_block_of_rows(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "ROWS", 8)
    x = qkv(8 * 3 + 5)
    for sinks in (0, 3):
        assert_close(attention(**x, window=window, sinks=sinks), attention_reference(**x, window=window, sinks=sinks))
    positions = torch.arange(29)[None]
    assert_close(
        attention(**x, window=window, q_pos=positions, k_pos=positions),
        attention_reference(**x, window=window),
    )


@pytest.mark.parametrize("window", [W - 1, W, W + 1])
def test_the_window_counts_the_query(window: int) -> None:
    """A change to the key W back changes nothing, bitwise; to the key W - 1 back, it does."""
    x = qkv()
    before = attention(**x, window=window)
    for distance, same in ((window, True), (window - 1, False)):
        y = {name: value.clone() for name, value in x.items()}
        y["k"][:, 18 - distance] += 1
        y["v"][:, 18 - distance] += 1
        assert torch.equal(attention(**y, window=window)[:, 18], before[:, 18]) is same


@pytest.mark.parametrize("window", [19, 20, 10**6])
def test_a_window_that_cannot_bind_is_no_window(window: int) -> None:
    x = qkv()
    assert torch.equal(attention(**x, window=window), attention(**x))
    assert torch.equal(attention(**x, window=window, sinks=3), attention(**x))
    positions = torch.arange(19)[None]
    where = {"q_pos": positions, "k_pos": positions}
    assert torch.equal(attention(**x, window=window, **where), attention(**x, **where))
    assert not torch.equal(attention(**x, window=18), attention(**x))


@pytest.mark.parametrize("window", [None, 3, 30])
def test_limit_bounds_everything(window: int | None) -> None:
    """Neither a wider window nor a sink reaches past `limit`."""
    x = qkv()
    for sinks in (0, 3):
        got = attention(**x, window=window, sinks=sinks, limit=5)
        assert_close(got, attention_reference(**x, window=window, sinks=sinks, limit=5))
    if window != 3:
        assert torch.equal(attention(**x, window=window, limit=5), attention(**x, window=5))


def test_sinks_are_the_first_positions() -> None:
    x = qkv()
    before = attention(**x, window=3, sinks=2)
    for key, same in ((0, False), (1, False), (2, True), (15, True), (16, False)):
        y = {**x, "v": x["v"].clone()}
        y["v"][:, key] += 1
        assert torch.equal(attention(**y, window=3, sinks=2)[:, 18], before[:, 18]) is same


@pytest.mark.parametrize("limits", [{}, {"window": 4}, {"window": 4, "sinks": 2}])
def test_padding_by_position(limits: dict[str, int]) -> None:
    """Keys at negative positions do not exist; where real tokens stand among them does not matter."""
    x = qkv(9)
    at = [torch.tensor([0, 1, 4, 5, 6, 9, 10, 12, 13]), torch.tensor([5, 6, 7, 8, 9, 10, 11, 12, 13])]
    wide = {name: torch.full((2, 14, *value.shape[2:]), 1e3).double() for name, value in x.items()}
    q_pos, k_pos = torch.zeros(2, 14, dtype=torch.int64), torch.full((2, 14), -1)
    for n in range(2):
        q_pos[n, at[n]] = k_pos[n, at[n]] = torch.arange(9)
        for name in wide:
            wide[name][n, at[n]] = x[name][n]
    out = attention(**wide, **limits, q_pos=q_pos, k_pos=k_pos)
    for n in range(2):
        assert_close(out[n, at[n]], attention(**x, **limits)[n])


def test_few_queries_over_many_keys() -> None:
    """Decoding: the last rows of a whole pass, with one position row for all samples or one each."""
    x = qkv(12)
    whole = attention(**x, window=5)
    last = {**x, "q": x["q"][:, 9:]}
    for rows in (1, 2):
        where = {"q_pos": torch.arange(9, 12).expand(rows, -1), "k_pos": torch.arange(12).expand(rows, -1)}
        assert_close(attention(**last, window=5, **where), whole[:, 9:])
    mixed = {"q_pos": torch.arange(9, 12)[None], "k_pos": torch.arange(12).expand(2, -1)}
    assert_close(attention(**last, window=5, **mixed), whole[:, 9:])


EXTRAS: list[dict[str, Any]] = [
    {"softcap": 1.5},
    {"sink_logits": torch.tensor([-1e4, -1.0, 0.5, 9.0]).double()},
    {"softcap": 1.5, "sink_logits": torch.tensor([-1e4, -1.0, 0.5, 9.0]).double()},
    {"q_seg": SEGMENTS, "k_seg": SEGMENTS},
]


@pytest.mark.parametrize("extra", EXTRAS, ids=lambda extra: "+".join(extra))
@pytest.mark.parametrize("limits", [{}, {"window": 4}, {"window": 4, "sinks": 2}, {"window": 40}], ids=str)
@pytest.mark.parametrize("V", [6, 4])
def test_foreign_scores(extra: dict[str, Any], limits: dict[str, int], V: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Soft caps, learnable sinks, packed documents: forward and gradients, with and without positions."""
    monkeypatch.setattr(kernel, "ROWS", 5)
    monkeypatch.setattr(kernel, "SCORES", 100)
    x = {name: value.requires_grad_() for name, value in qkv(V=V).items()}
    positions = torch.arange(19).expand(2, -1)
    weight = torch.randn(2, 19, 4, V).double()
    expected = attention_reference(**x, **limits, **extra)
    wanted = torch.autograd.grad((expected * weight).sum(), list(x.values()))
    ways: list[dict[str, Any]] = [{}, {"q_pos": positions, "k_pos": positions}]
    for where in ways:
        out = attention(**x, **limits, **extra, **where)
        assert_close(out, expected)
        for got, g in zip(torch.autograd.grad((out * weight).sum(), list(x.values())), wanted, strict=True):
            assert_close(got, g, "gradient")


def test_segments_are_separate_contexts() -> None:
    """Each packed document is what it would be alone."""
    x = qkv()
    out = attention(**x, q_seg=SEGMENTS, k_seg=SEGMENTS)
    for n in range(2):
        for segment in SEGMENTS[n].unique():
            at = (SEGMENTS[n] == segment).nonzero()[:, 0]
            assert_close(out[n, at], attention(**{name: value[n : n + 1, at] for name, value in x.items()})[0])


def test_a_sink_takes_its_share() -> None:
    """A row's output shrinks by the sink's part of the denominator."""
    x = {name: torch.zeros_like(value) for name, value in qkv(4).items()}
    x["v"] += 1
    out = attention(**x, sink_logits=torch.zeros(4).double())
    keys = torch.arange(1, 5).double().view(1, 4, 1, 1)
    assert_close(out, (keys / (keys + 1)).expand_as(out))


@pytest.mark.parametrize("extra", [{}, {"softcap": 2.0}, {"sink_logits": torch.zeros(4).double()}], ids=str)
def test_a_row_without_keys_reads_zeros_and_has_gradients(extra: dict[str, Any]) -> None:
    x = {name: value.requires_grad_() for name, value in qkv(5).items()}
    where = {"q_pos": torch.arange(5).expand(2, -1), "k_pos": torch.tensor([[0, 1, 2, 3, 4], [-1] * 5])}
    out = attention(**x, **where, **extra)
    assert (out[1] == 0).all()
    assert (attention_reference(**x, **where, **extra)[1] == 0).all()
    for gradient in torch.autograd.grad(out.sum(), list(x.values())):
        assert torch.isfinite(gradient).all()
        assert (gradient[1] == 0).all()


@pytest.mark.parametrize("limits", [{}, {"window": 4}, {"window": 4, "sinks": 2}])
def test_gradients(limits: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "ROWS", 5)
    x = {name: value.requires_grad_() for name, value in qkv(13).items()}
    weight = torch.randn(2, 13, 4, 6).double()
    got, expected = (
        torch.autograd.grad((f(**x, **limits) * weight).sum(), list(x.values()))
        for f in (attention, attention_reference)
    )
    for g, e in zip(got, expected, strict=True):
        assert_close(g, e, "gradient")


@pytest.mark.parametrize("V", [6, 4, 9])
@pytest.mark.parametrize("mode", ["plain", "window", "sinks", "positions", "sinks by position", "gradient"])
def test_no_tensor_grows_with_the_square_of_length(mode: str, V: int) -> None:
    """Quadrupling T quadruples the largest tensor, no more (values narrower or wider than keys included)."""
    largest = []
    for T in (512, 2048):
        x: dict[str, Any] = qkv(T, B=1, H=2, G=1, V=V, dtype=torch.float32)
        if mode == "window":
            x.update(window=64)
        elif mode == "sinks":
            x.update(window=64, sinks=4)
        elif mode == "positions":
            x.update(q_pos=torch.arange(T)[None], k_pos=torch.arange(T)[None], window=64)
        elif mode == "sinks by position":
            x.update(q_pos=torch.arange(T)[None], k_pos=torch.arange(T)[None], window=64, sinks=4)
        elif mode == "gradient":
            x = {name: value.requires_grad_() for name, value in x.items()}
        with Largest() as seen:
            out = attention(**x)
            if mode == "gradient":
                out.sum().backward()
        largest.append(seen.elements)
    assert largest[1] <= 4 * largest[0]
    assert largest[1] < 2048 * 2048


@pytest.mark.parametrize("V", [4, 9])
def test_values_of_another_width(V: int) -> None:
    x = qkv(V=V)
    for limits in ({}, {"window": 4, "sinks": 1}):
        assert_close(attention(**x, **limits), attention_reference(**x, **limits))


def test_inputs_are_left_alone() -> None:
    x = qkv()
    kept = {name: value.clone() for name, value in x.items()}
    positions = torch.arange(19)[None]
    attention(**x, window=4, sinks=2)
    attention(**x, window=4, sinks=2, q_pos=positions, k_pos=positions)
    assert all(torch.equal(x[name], kept[name]) for name in x)
    assert torch.equal(positions, torch.arange(19)[None])


@pytest.mark.parametrize("heads", [(4, 2), (3, 3)])
@pytest.mark.parametrize("S", [1, 5, 19])
@pytest.mark.parametrize(
    "limits",
    [{}, {"window": 1}, {"window": W}, {"window": 40}, {"window": W, "limit": 3}, {"window": 2, "sinks": 3}],
)
def test_the_newest_token_needs_no_mask(
    limits: dict[str, int], S: int, heads: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    x = qkv(1, S, H=heads[0], G=heads[1])
    places = {"k_pos": torch.arange(40, 40 + S)[None], "q_pos": torch.tensor([[40 + S - 1]])}
    expected = attention_reference(**x, **limits, **places)
    if "sinks" not in limits:
        monkeypatch.setattr(kernel, "visible", lambda *_, **__: pytest.fail("a mask"))
    assert_close(attention(**x, **limits, **places, newest=True), expected)


def test_a_sink_and_a_softcap_stand_beside_the_newest_token() -> None:
    x, places = qkv(1, 9), {"k_pos": torch.arange(9)[None], "q_pos": torch.tensor([[8]])}
    for extra in ({"sink_logits": torch.randn(4, dtype=torch.float64)}, {"softcap": 1.5}):
        assert_close(attention(**x, **places, **extra, newest=True), attention_reference(**x, **places, **extra))


def test_positions_come_in_pairs() -> None:
    x = qkv(5)
    with pytest.raises(ValueError, match="both or neither"):
        attention(**x, q_pos=torch.arange(5)[None])
    with pytest.raises(ValueError, match="give q_pos and k_pos"):
        attention(**{**x, "q": x["q"][:, 2:]})
    with pytest.raises(ValueError, match="window=0"):
        attention(**x, window=0)


def test_keys_between_sinks_and_window_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Padded or cached rows, too, are scored against the sinks and the window alone."""
    monkeypatch.setattr(kernel, "ROWS", 8)
    widths = []

    def softmax(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **score: Any) -> Tensor:
        widths.append(k.shape[1])
        return real(q, k, v, mask, **score)

    real = kernel._softmax
    monkeypatch.setattr(kernel, "_softmax", softmax)
    x, at = qkv(200), torch.arange(200)[None]
    assert_close(attention(**x, window=5, sinks=3, q_pos=at, k_pos=at), attention_reference(**x, window=5, sinks=3))
    assert max(widths) <= 3 + 5 + 2 * 8  # a span with a narrow gap stays one slice


# FlexAttention (on a GPU; here its mask, in blocks, and the mathematics uncompiled)

FLEX: list[tuple[int, int, int, int | None]] = [
    (300, 1, 1, None), (300, 5, 4, None), (513, 130, 3, None), (513, 200, 130, None), (513, 100, 4, 250),
    (300, 1, 0, None), (513, 130, 0, None), (512, 256, 0, None),
]  # fmt: skip


def dense(T: int, window: int, sinks: int, limit: int | None) -> Tensor:
    at = torch.arange(T)[None]
    return kernel.visible(at, at, window=window, sinks=sinks, limit=limit)[0]


@pytest.mark.parametrize(("T", "window", "sinks", "limit"), FLEX)
def test_blocks_of_the_mask(T: int, window: int, sinks: int, limit: int | None) -> None:
    """Blocks called whole are, and no pair that is seen lies in a block that is skipped; few that need not be read."""
    mask = flex.block_mask(T, window, sinks, limit, torch.device("cpu"))
    N = -(-T // flex.BLOCK)
    pad = N * flex.BLOCK - T
    pairs = torch.nn.functional.pad(dense(T, window, sinks, limit), (0, pad, 0, pad)).view(N, flex.BLOCK, N, flex.BLOCK)
    read = mask.to_dense()[0, 0].bool()
    whole = torch.zeros(N, N, dtype=torch.bool)
    for row in range(N):
        whole[row, mask.full_kv_indices[0, 0, row, : int(mask.full_kv_num_blocks[0, 0, row])].long()] = True
    assert (read >= pairs.any(3).any(1)).all()
    assert (whole <= pairs.all(3).all(1)).all()
    assert read.sum() <= pairs.any(3).any(1).sum() + 1
    i, j = torch.meshgrid(torch.arange(T), torch.arange(T), indexing="ij")
    assert torch.equal(mask.mask_mod(i[:1, :1], i[:1, :1], i, j), dense(T, window, sinks, limit))


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(("T", "window", "sinks", "limit"), FLEX)
def test_sinks_and_long_windows_take_flex_attention_on_a_gpu(
    T: int, window: int, sinks: int, limit: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for windows alone where gradients are wanted, and for heads too narrow for it."""
    calls, flashes = [], []

    def uncompiled(*args: Any) -> Tensor:
        calls.append(args)
        return flex.flex()(*args)

    monkeypatch.setattr(kernel, "_flash_takes", lambda q, k, v: True)
    monkeypatch.setattr(kernel, "BANDS", T)
    monkeypatch.setattr(kernel, "LONG", T)
    monkeypatch.setattr(flex, "compiled", lambda: uncompiled)
    monkeypatch.setattr(kernel, "_flash", lambda q, k, v, window, scale: flashes.append(window) or v)
    x = qkv(T, K=16, V=16, dtype=torch.float32)
    assert_close(
        attention(**x, window=window, sinks=sinks, limit=limit),
        attention_reference(**x, window=window, sinks=sinks, limit=limit),
    )
    assert len(calls) == 1
    attention(**qkv(T, K=8, V=8, dtype=torch.float32), window=window, sinks=sinks, limit=limit)
    if not sinks:
        attention(**{n: z.requires_grad_() for n, z in x.items()}, window=window, limit=limit)
    assert (len(calls), len(flashes)) == (1, 0 if sinks else 2)
    for name in ("BANDS", "LONG"):
        monkeypatch.setattr(kernel, name, T + 1)  # not worth a compilation
    attention(**qkv(T, K=16, V=16, dtype=torch.float32), window=window, sinks=sinks, limit=limit)
    assert len(calls) == 1


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_is_compiled_for_many_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than the compiler's usual limit of 8, past which it gives up; again, and nothing is compiled."""
    seen = []

    def backend(graph: Any, example: Any) -> Any:
        seen.append(graph)
        return graph.forward

    made = torch.compile(flex.flex(), fullgraph=True, backend=backend)
    monkeypatch.setattr(flex, "compiled", lambda: made)
    torch.compiler.reset()
    for _ in range(2):
        for H in range(1, 12):
            x = torch.zeros(1, 128, H, 16)
            flex.attend_blocks(x, x, x, window=5, sinks=0, limit=None, scale=1.0)
        assert 9 <= len(seen) <= 12
    torch.compiler.reset()
