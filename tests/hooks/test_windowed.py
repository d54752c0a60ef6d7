"""windowed() and capped(): exact caps on recurrences. What lies outside the window never enters the
arithmetic."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import Largest, assert_close, error
from hypothesis import given, settings
from hypothesis import strategies as st
from test_fused import FAMILIES, HOPPER, read_of, stand_in
from test_fused import inputs as family_inputs
from torch import Tensor

from hybridscope.experiments.bench import kernel_parity
from hybridscope.hooks.kernels import fused
from hybridscope.hooks.kernels import windowed as kernel
from hybridscope.hooks.kernels.dispatch import use_kernels
from hybridscope.hooks.kernels.earlier_block import earlier_block_reference
from hybridscope.hooks.kernels.recurrence import Read, plain, recurrence, recurrence_reference
from hybridscope.hooks.kernels.windowed import Ring, capped, carried_keys, windowed, windowed_reference

Inputs = dict[str, Any]
KINDS = ["scalar", "vector", "delta", "vector+low rank"]
T = 23


def inputs(kind: str, length: int = T, *, B: int = 2, H: int = 2, K: int = 4, V: int = 3) -> Inputs:
    """Signed fp64 inputs with every |A_t| <= 1; `vector+low rank` has an A_t that is not symmetric."""
    width = K if kind.startswith("vector") else 1
    k = torch.nn.functional.normalize(torch.randn(B, length, H, K).double(), dim=-1)
    x: Inputs = {
        "q": torch.randn(B, length, H, K).double(),
        "k": k,
        "v": torch.randn(B, length, H, V).double(),
    }
    x["log_decay"] = -0.4 * torch.rand(B, length, H, width).double()
    if kind == "delta":
        x.update(a=k, b=-x["log_decay"].exp() * 2 * torch.rand(B, length, H, 1).double() * k)
    if kind == "vector+low rank":
        a, b = (torch.nn.functional.normalize(torch.randn(B, length, H, K).double(), dim=-1) for _ in range(2))
        x.update(a=a, b=0.5 * b)
    return x


def restarts(x: Inputs, read: Read = "after") -> list[Tensor]:
    """The loop over time restarted at every token s: restarts(x)[s][:, t - s] is row t from tokens s..t
    alone."""
    length = x["q"].shape[1]
    return [recurrence_reference(**{name: y[:, s:] for name, y in x.items()}, read=read)[0] for s in range(length)]


def rows_from(table: list[Tensor], starts: list[int]) -> Tensor:
    """Row t restarted at starts[t]."""
    return torch.stack([table[s][:, t - s] for t, s in enumerate(starts)], 1)


def window_rows(table: list[Tensor], w: int) -> Tensor:
    return rows_from(table, [max(0, t - w + 1) for t in range(len(table))])


def cap_rows(table: list[Tensor], cap: int, conv: int) -> Tensor:
    """Row t: uncapped where t < cap, else restarted cap - conv + 1 tokens back."""
    return rows_from(table, [0 if t < cap else t - (cap - conv + 1) + 1 for t in range(len(table))])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [1, 8, T])
def test_equals_the_restarted_loop_for_every_window(kind: str, length: int) -> None:
    """w that divide T, that do not, w = 1, w >= T."""
    x = inputs(kind, length)
    table = restarts(x)
    for w in range(1, length + 3):
        assert error(windowed(**x, window=w), window_rows(table, w)) < 2e-15, w


@pytest.mark.parametrize("kind", KINDS)
def test_reading_before_the_write(kind: str) -> None:
    """The window still ends at the present token, whose own write the read leaves out."""
    x = inputs(kind)
    table = restarts(x, "before")
    for w in (1, 2, 5, 8, T, T + 1):
        assert error(windowed(**x, window=w, read="before"), window_rows(table, w)) < 2e-15, w
        assert torch.equal(windowed_reference(**x, window=w, read="before"), window_rows(table, w))
    for cap, conv in ((2, 2), (7, 2), (9, 4), (T + 1, 2)):
        assert error(capped(**x, cap=cap, conv=conv, read="before"), cap_rows(table, cap, conv)) < 2e-15, cap


def test_the_reference_restarts_too() -> None:
    x = inputs("delta", 9)
    assert torch.equal(windowed_reference(**x, window=4), window_rows(restarts(x), 4))


def test_windows_longer_than_a_chunk() -> None:
    """Blocks of more than one chunk of the recurrence underneath."""
    x = inputs("delta", 110, B=1, H=1)
    for w in (33, 50, 64):
        got = windowed(**x, window=w)
        for t in (w, 70, 96, 109):
            span = {name: y[:, t - w + 1 : t + 1] for name, y in x.items()}
            assert_close(got[:, t], recurrence_reference(**span)[0][:, -1])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("elements", [1, 4 * 4 * 7 * 3])
def test_slabs_change_nothing(kind: str, elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One block at a time, or three, instead of all."""
    x = inputs(kind)
    for w in (1, 2, 5, 7):
        expected = windowed(**x, window=w)
        with monkeypatch.context() as patch:
            patch.setattr(kernel, "BLOCK_ELEMENTS", elements)
            assert_close(windowed(**x, window=w), expected)


def test_slabs_bound_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """At w = 1 every token is a block with a state of its own; a slab holds a bounded number of them."""
    monkeypatch.setattr(kernel, "BLOCK_ELEMENTS", 2**12)
    x = inputs("delta", 700, B=1, H=1)
    with Largest() as seen:
        windowed(**x, window=1)
    assert seen.elements <= 2 * 2**12


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("w", [1, 3, 5, 8])
def test_nothing_outside_the_window_leaks(kind: str, w: int) -> None:
    """Everything before t-w+1 and after t, of every input, times 1e4 or replaced: row t is bitwise the
    same."""
    x = inputs(kind)
    before = windowed(**x, window=w)
    for t in range(T):
        inside = torch.zeros(T, dtype=torch.bool)
        inside[max(0, t - w + 1) : t + 1] = True
        outside = ~inside.view(1, T, 1, 1)
        loud = {n: torch.where(outside, y * (1 if n == "log_decay" else 1e4), y) for n, y in x.items()}
        other = {n: torch.where(outside, y, z) for (n, z), y in zip(x.items(), inputs(kind).values(), strict=True)}
        assert torch.equal(windowed(**loud, window=w)[:, t], before[:, t])
        assert torch.equal(windowed(**other, window=w)[:, t], before[:, t])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("w", [1, 3, 5, 8])
def test_the_window_is_tight(kind: str, w: int) -> None:
    """For every t mod w: token t-w+1 changes row t, token t-w does not."""
    x = inputs(kind)
    before = windowed(**x, window=w)
    for i in range(T - w):
        y = {**x, "v": x["v"].clone()}
        y["v"][:, i] += 1
        after = windowed(**y, window=w)
        assert torch.equal(after[:, i + w], before[:, i + w])
        assert not torch.equal(after[:, i + w - 1], before[:, i + w - 1])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("w", [1, 4, 7])
def test_jacobian_zero_pattern(kind: str, w: int) -> None:
    """d row t / d token i is exactly zero outside t-w < i <= t and nonzero inside, at t mod w in {0, 1,
    w-1}."""
    x = {name: y.requires_grad_() for name, y in inputs(kind, B=1, H=1).items()}
    out = windowed(**x, window=w)
    for t in {2 * w, 2 * w + 1, 3 * w - 1}:
        grads = torch.autograd.grad(out[:, t].sum(), list(x.values()), retain_graph=True)
        for name, g in zip(x, grads, strict=True):
            hit = (g != 0).any(-1).flatten()
            assert not hit[: t - w + 1].any(), name
            assert not hit[t + 1 :].any(), name
        values = dict(zip(x, grads, strict=True))["v"]
        assert (values != 0).any(-1).flatten()[t - w + 1 : t + 1].all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("w", [1, 4, 11])
def test_gradients(kind: str, w: int) -> None:
    x = {name: y.requires_grad_() for name, y in inputs(kind, 11).items()}
    weight = torch.randn(2, 11, 2, 3).double()
    grads = [
        torch.autograd.grad((f(**x, window=w) * weight).sum(), list(x.values())) for f in (windowed, windowed_reference)
    ]
    for got, expected in zip(*grads, strict=True):
        assert_close(got, expected, "gradient")


def test_strong_decay_underflows_to_the_truth() -> None:
    for kind in KINDS:
        x = inputs(kind)
        x["log_decay"] = torch.where(torch.rand_like(x["log_decay"]) < 0.5, -50.0, x["log_decay"])
        table = restarts(x)
        for w in (1, 6, 9):
            assert_close(windowed(**x, window=w), window_rows(table, w))


def delta_rule(decay: int | None, length: int = T) -> Inputs:
    """The delta rule by its strengths, beta up to 2, with a decay of that many channels."""
    x = inputs("scalar", length)
    x["beta"] = 2 * torch.rand(2, length, 2).double()
    x["log_decay"] = None if decay is None else -0.8 * torch.rand(2, length, 2, decay).double()
    return x


def written_out(x: Inputs) -> Inputs:
    """The same with a and b, beta v in the place of v."""
    v, log_decay, a, b = plain(**{name: y for name, y in x.items() if name != "q"})
    return {"q": x["q"], "k": x["k"], "v": v, "log_decay": log_decay, "a": a, "b": b}


@pytest.mark.parametrize("decay", [None, 1, 4])
def test_the_delta_rule_by_its_strength(decay: int | None) -> None:
    """Erasure before decay in reversed time, by pairing each with its neighbour's: what a and b written out give."""
    x = delta_rule(decay)
    table = restarts(written_out(x))
    for w in (1, 2, 3, 4, 7, T - 1, T):
        assert error(windowed(**x, window=w), window_rows(table, w)) < 2e-15, w
        assert error(windowed_reference(**x, window=w), window_rows(table, w)) < 2e-15, w
    for cap, conv in ((4, 4), (9, 2), (T - 1, 4), (T, 4)):
        assert error(capped(**x, cap=cap, conv=conv), cap_rows(table, cap, conv)) < 2e-15, cap
    where = {name: y for name, y in written_out(x).items() if name not in ("q", "v")}
    given_ = {name: y for name, y in x.items() if name not in ("q", "v")}
    assert_close(carried_keys(**given_), carried_keys(**where))


@pytest.mark.parametrize("kind", ["scalar", "vector"])
def test_a_reset_is_the_end_of_every_window(kind: str) -> None:
    """A decay of -inf: nothing before it is seen, and nothing turns into NaN."""
    x = inputs(kind)
    x["log_decay"][:, 10] = -torch.inf
    table = restarts(x)
    for w in (1, 4, 7, 12):
        assert error(windowed(**x, window=w), window_rows(table, w)) < 2e-15, w


# Caps: windows of states under a convolution


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("conv", [1, 2, 4])
def test_capped_equals_the_restarted_loop_for_every_cap(kind: str, conv: int) -> None:
    x = inputs(kind)
    table = restarts(x)
    for cap in range(conv, T + 3):
        assert error(capped(**x, cap=cap, conv=conv), cap_rows(table, cap, conv)) < 2e-15, cap


@pytest.mark.parametrize("kind", KINDS)
def test_a_cap_of_the_whole_context_is_no_cap(kind: str) -> None:
    x = inputs(kind)
    free, _ = recurrence(**x)
    for cap in (T, T + 1, 10**6):
        assert torch.equal(capped(**x, cap=cap, conv=4), free)
    assert not torch.equal(capped(**x, cap=T - 1, conv=4), free)


def test_a_cap_below_the_convolution_is_refused() -> None:
    with pytest.raises(ValueError, match="cap=3: smaller than the site's convolution width 4"):
        capped(**inputs("delta"), cap=3, conv=4)


# Decoding


def ring_after(x: Inputs, n: int, cap: int, conv: int) -> Ring:
    """The ring that a prompt of n tokens leaves."""
    tail = {name: y[:, max(0, n - cap) : n] for name, y in x.items() if name != "q"}
    value = tail.pop("v").transpose(1, 2)
    return Ring(cap, conv, carried_keys(**tail).transpose(1, 2), value, torch.full((value.shape[0],), n))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("cap", "conv"), [(1, 1), (5, 1), (4, 4), (9, 4), (40, 2)])
@pytest.mark.parametrize("prompt", [1, 4, 5, 12])
def test_the_ring_continues_a_capped_pass(kind: str, cap: int, conv: int, prompt: int) -> None:
    x = inputs(kind)
    whole = capped(**x, cap=cap, conv=conv)
    ring = ring_after(x, prompt, cap, conv)
    for t in range(prompt, T):
        step = {name: y[:, t] for name, y in x.items()}
        out = ring.step(**{"a": None, "b": None, **step}, real=None)
        assert_close(out, whole[:, t])
    assert ring.keys.shape[2] <= cap
    assert ring.seen.tolist() == [T, T]


@pytest.mark.parametrize("kind", KINDS)
def test_the_ring_forgets_bitwise(kind: str) -> None:
    """What left the window before the prompt ended, or during decoding, leaves no trace."""
    x, other = inputs(kind), inputs(kind)
    cap = 6
    for t in (12, 15, 20):
        y = {n: torch.cat([other[n][:, : t - cap + 1], z[:, t - cap + 1 :]], 1) for n, z in x.items()}
        outs = []
        for source in (x, y):
            ring = ring_after(source, 10, cap, 1)
            for s in range(10, t + 1):
                step = {name: z[:, s] for name, z in source.items()}
                out = ring.step(**{"a": None, "b": None, **step}, real=None)
            outs.append(out)
        assert torch.equal(*outs)


def test_padding_leaves_the_ring_alone() -> None:
    """A step that is padding for one sample moves only the other's ring."""
    x = inputs("delta")
    ring = ring_after(x, 8, 5, 2)
    kept = ring.keys[0].clone(), ring.values[0].clone()
    step = {name: y[:, 8] for name, y in x.items()}
    ring.step(**step, real=torch.tensor([False, True]))
    assert torch.equal(ring.keys[0], kept[0])
    assert torch.equal(ring.values[0], kept[1])
    assert ring.seen.tolist() == [8, 9]
    assert_close(ring.keys[1], ring_after(x, 9, 5, 2).keys[1])


def test_padding_leaves_a_filling_ring_alone() -> None:
    """The same while the ring still grows: the sample that paused reads as if nothing had happened."""
    x = inputs("delta")
    whole = capped(**x, cap=6, conv=2)
    ring = ring_after(x, 3, 6, 2)
    step = {name: y[:, 3] for name, y in x.items()}
    ring.step(**step, real=torch.tensor([False, True]))
    for t in range(3, 12):  # sample 0 is one step behind sample 1
        mixed = {name: torch.stack([y[0, t], y[1, t + 1]]) for name, y in x.items()}
        out = ring.step(**mixed, real=None)
        assert_close(out, torch.stack([whole[0, t], whole[1, t + 1]]))


# Any length, window and slab, drawn by hypothesis

quick = settings(max_examples=30, deadline=None, derandomize=True)


@quick
@given(kind=st.sampled_from(KINDS), length=st.integers(1, 40), w=st.integers(1, 44), slab=st.integers(1, 2**12),
       read=st.sampled_from(["after", "before"]))  # fmt: skip
def test_any_window_is_the_restarted_loop(kind: str, length: int, w: int, slab: int, read: Read) -> None:
    x = inputs(kind, length, B=1, H=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel, "BLOCK_ELEMENTS", slab)
        assert_close(windowed(**x, window=w, read=read), windowed_reference(**x, window=w, read=read))


@quick
@given(kind=st.sampled_from(KINDS), length=st.integers(2, 30), cap=st.integers(1, 33), conv=st.integers(1, 4),
       cut=st.integers(1, 29))  # fmt: skip
def test_any_cap_continues_in_its_ring(kind: str, length: int, cap: int, conv: int, cut: int) -> None:
    """A prompt of any length, then token by token: every row of the whole pass, blind to what left the window."""
    cap, cut = max(cap, conv), min(cut, length - 1)
    x, other = (inputs(kind, length, B=1, H=1) for _ in range(2))
    whole = capped(**x, cap=cap, conv=conv)
    gone = max(0, cut + 1 - cap) if cut >= cap else 0  # of the first row decoded
    y = {name: torch.cat([other[name][:, :gone], z[:, gone:]], 1) for name, z in x.items()}
    rings = [ring_after(source, cut, cap, conv) for source in (x, y)]
    for t in range(cut, length):
        step = {"a": None, "b": None, **{name: z[:, t] for name, z in x.items()}}
        out, blind = (ring.step(**step, real=None) for ring in rings)
        assert_close(out, whole[:, t])
        assert torch.equal(out, blind)


# On the fused path: the pieces go through the mixer's own op (stand-ins for fla's; the kernels are tested on a GPU)

OPS = {
    "scalar": {"chunk_simple_gla"}, "vector": {"chunk_gla", "chunk_simple_gla"},
    "before": {"chunk_rwkv6", "chunk_simple_gla"}, "elementwise": {"fused_recurrent_hgrn"},
    "delta": {"chunk_delta_rule", "chunk_kda", "chunk_simple_gla"},
    "delta scalar": {"chunk_gated_delta_rule", "chunk_simple_gla"}, "delta vector": {"chunk_kda", "chunk_simple_gla"},
    "low rank": {"chunk_dplr_delta_rule", "chunk_simple_gla"},
}  # fmt: skip


@pytest.fixture
def ops(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The CPU in the place of a Hopper; collects the names of the ops that are asked for.

    The specification of our own kernel stands for it: test_earlier_block.py compares the two."""
    used: set[str] = set()

    def find(name: str) -> Any:
        used.add(name)
        return stand_in(name)

    monkeypatch.setattr(fused, "DEVICE", "cpu")
    monkeypatch.setattr(fused, "machine", lambda device: ("3.6.0", HOPPER))
    monkeypatch.setattr(fused, "fla_op", find)
    monkeypatch.setattr(kernel, "earlier_block", earlier_block_reference)
    return used


def capped_inputs(family: str, dtype: torch.dtype = torch.float32) -> Inputs:
    x = family_inputs(family, 50, dtype=dtype)
    del x["state"]
    return x


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("cap", "conv"), [(2, 2), (7, 1), (13, 4), (49, 1), (50, 4)])
def test_fused_pieces_make_the_same_cap(ops: set[str], family: str, cap: int, conv: int) -> None:
    """The mixer's op for what it does, never the general one; many blocks in several launches."""
    x, read = capped_inputs(family), read_of(family)
    with use_kernels("torch"):
        expected = capped(**x, cap=cap, conv=conv, read=read)
    assert not ops
    with use_kernels("fused"), pytest.MonkeyPatch.context() as patch:
        for most in (fused.MAX_HEADS, 12):
            patch.setattr(fused, "MAX_HEADS", most if family != "elementwise" else fused.MAX_HEADS)
            assert_close(capped(**x, cap=cap, conv=conv, read=read), expected)
    assert ops
    assert ops <= OPS[family]


@pytest.mark.parametrize("cap", [2, 7, 49])
def test_a_state_read_before_it_is_written_with_one_decay_a_head(ops: set[str], cap: int) -> None:
    """As RWKV-6 with a key dim of 1 has it."""
    x = capped_inputs("before")
    x["log_decay"] = x["log_decay"][..., :1]
    with use_kernels("torch"):
        expected = capped(**x, cap=cap, read="before")
    with use_kernels("fused"):
        assert_close(capped(**x, cap=cap, read="before"), expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_fused_caps_in_16_bits(ops: set[str], family: str) -> None:
    """Outputs keep v's dtype, under autocast too, and the error is that of the uncapped kernel."""
    x, read = capped_inputs(family, torch.bfloat16), read_of(family)
    wide = {name: y.float() for name, y in x.items()}
    with use_kernels("torch"):
        expected = capped(**wide, cap=9, read=read)
    got = capped(**x, cap=9, read=read)
    assert got.dtype == torch.bfloat16
    assert kernel_parity.error(got, expected) < kernel_parity.TOLERANCE["bf16"][0]
    with torch.autocast("cpu", torch.bfloat16):
        under = capped(**wide, cap=9, read=read)
    assert under.dtype == torch.float32
    assert kernel_parity.error(under, expected) < kernel_parity.TOLERANCE["bf16"][0]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_ring_starts_from_fused_keys(ops: set[str], family: str) -> None:
    x = capped_inputs(family)
    names = [name for name in x if name not in ("q", "v")]
    with use_kernels("fused"):
        keys = carried_keys(**{name: x[name][:, 4:15] for name in names})
    expected = carried_keys(**{name: x[name].double()[:, 4:15] for name in names})
    assert kernel_parity.error(keys, expected) < 1e-5
    assert bool(ops) == ("delta" in family or family == "low rank")  # elsewhere a key is only decayed


@pytest.mark.parametrize("family", FAMILIES)
def test_fused_gradients(ops: set[str], family: str) -> None:
    x, read = {name: y.requires_grad_() for name, y in capped_inputs(family).items()}, read_of(family)
    grads = []
    for path in ("fused", "torch"):
        with use_kernels(path):
            out = capped(**x, cap=9, conv=2, read=read)
        weight = torch.linspace(-1, 2, out.numel()).view(out.shape)
        grads.append(torch.autograd.grad((out * weight).sum(), list(x.values())))
    for name, got, expected in zip(x, *grads, strict=True):
        assert error(got, expected) < 2e-5, name  # fp32, sums in another order
