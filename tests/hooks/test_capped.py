"""capped(): a cap is the loop restarted under a convolution, and its ring continues it token by token."""

from __future__ import annotations

import pytest
import torch
from helpers import assert_close, error
from hypothesis import given, settings
from hypothesis import strategies as st
from restarted import KINDS, Inputs, T, cap_rows, inputs, restarts

from hybridscope.hooks.kernels.recurrence import recurrence
from hybridscope.hooks.kernels.windowed import Ring, capped, carried_keys

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


@settings(max_examples=30, deadline=None, derandomize=True)
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
