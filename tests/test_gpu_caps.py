"""Caps on a CUDA device: the five points of KERNELS.md section 2 on the fused path, zero leak meaning bitwise."""

import math
from typing import Any

import pytest
import torch
from helpers import RECURRENT, model_of, pad, tokens_of
from torch import Tensor

from hybridscope import HybridLM, use_kernels
from hybridscope.experiments.bench import kernel_parity
from hybridscope.experiments.tuning import untuned
from hybridscope.hooks.kernels import attention
from hybridscope.hooks.kernels import fused as kernels
from hybridscope.hooks.kernels.earlier_block import earlier_block, earlier_block_reference
from hybridscope.hooks.kernels.recurrence import recurrence
from hybridscope.hooks.kernels.windowed import capped
from hybridscope.hooks.passes import Cache

pytestmark = pytest.mark.gpu
if torch.cuda.is_available():
    untuned()  # tuning every kernel takes many minutes
FAMILIES = list(dict.fromkeys(kernels.MIXERS.values()))
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
MODEL = {"bf16": 3e-2, "fp32": 5e-3}
"""Largest `error` of a one-layer model's logits: kernel_parity's bound and the rounding of the layers around it."""
each = pytest.mark.parametrize("family", FAMILIES)
in_both = pytest.mark.parametrize("dtype", DTYPES)
MIXERS = ["full", "nope", "swa:64", *RECURRENT]


def read_of(family: str) -> Any:
    return "before" if family == "before" else "after"


def inputs(family: str, T: int, dtype: str = "bf16", **shape: int) -> dict[str, Any]:
    pytest.importorskip("fla", reason="the extra `gpu` is not installed")
    x: dict[str, Any] = kernel_parity.inputs(family, T, **{"H": 2} | shape, dtype=DTYPES[dtype])
    del x["state"]
    return x


def run(x: dict[str, Any], family: str, cap: int, conv: int = 1) -> Tensor:
    with use_kernels("fused"):
        return capped(**x, cap=cap, conv=conv, read=read_of(family))


def changed(x: Tensor, y: Tensor) -> Tensor:
    """Which rows [T] differ."""
    return (x != y).flatten(2).any(-1).any(0)


# The capped recurrences


@each
@in_both
@pytest.mark.parametrize(("T", "cap", "conv"), [(200, 1, 1), (200, 9, 4), (333, 64, 1), (333, 70, 2), (1000, 300, 4)])
def test_errors_are_those_of_the_uncapped_kernel(family: str, dtype: str, T: int, cap: int, conv: int) -> None:
    x = inputs(family, T, dtype)
    wide = {name: y.float() for name, y in x.items()}
    with use_kernels("torch"):
        expected = capped(**wide, cap=cap, conv=conv, read=read_of(family))
    found = kernel_parity.error(run(x, family, cap, conv), expected)
    assert found < kernel_parity.tolerance(family, dtype)[0]


@each
@in_both
@pytest.mark.parametrize("w", [2, 5, 9, 70])
def test_no_token_outside_the_window_changes_a_row(family: str, dtype: str, w: int) -> None:
    """For every t mod w: another token t-w changes nothing at t, bitwise; its loud value at t-w+1 does."""
    x = inputs(family, 200, dtype)
    other = {name: y.roll(7, 1) for name, y in x.items()}
    before = run(x, family, w)
    assert torch.equal(run(x, family, w), before)
    for i in range(60, 60 + min(w, 20)):
        y = {name: z.clone() for name, z in x.items()}
        for name, z in y.items():
            z[:, i] = other[name][:, i]
        y["v"][:, i] *= 100
        rows = changed(run(y, family, w), before)
        assert not rows[i + w :].any(), (i, rows.nonzero())
        assert not rows[:i].any(), (i, rows.nonzero())
        if w < 10:  # what is old fades, and 16 bits have no room for it
            assert rows[i + w - 1], i


@each
@in_both
def test_nothing_outside_the_window_enters_the_arithmetic(family: str, dtype: str) -> None:
    """Everything outside times 1e4, but for keys that erase and are units."""
    x, w = inputs(family, 300, dtype), 70
    before = run(x, family, w)
    loud = ["q", "v"] if "delta" in family or family == "low rank" else ["q", "k", "v"]
    for t in (69, 70, 139, 140, 141, 209, 299):
        outside = torch.ones(300, dtype=torch.bool, device="cuda")
        outside[max(0, t - w + 1) : t + 1] = False
        y = {name: z.clone() for name, z in x.items()}
        for name in loud:
            y[name][:, outside] *= 1e4
        assert torch.equal(run(y, family, w)[:, t], before[:, t]), t


@each
@pytest.mark.parametrize("w", [5, 70])
def test_jacobian_zero_pattern(family: str, w: int) -> None:
    x = {name: y.requires_grad_() for name, y in inputs(family, 230, B=1).items()}
    out = run(x, family, w)
    for t in (2 * w, 2 * w + 1, 3 * w - 1):
        named = {name: x[name] for name in "qkv"}
        grads = torch.autograd.grad(out[:, t].float().sum(), list(named.values()), retain_graph=True)
        for name, grad in zip(named, grads, strict=True):
            hit = (grad != 0).flatten(2).any(-1)[0]
            assert not hit[: t - w + 1].any(), name
            assert not hit[t + 1 :].any(), name
        assert (grads[-1] != 0).flatten(2).any(-1)[0, max(t - w + 1, t - 4) : t].all()


@each
@in_both
def test_gradients(family: str, dtype: str) -> None:
    x = {name: y.requires_grad_() for name, y in inputs(family, 200, dtype).items()}
    wide = {name: y.detach().float().requires_grad_() for name, y in x.items()}
    weight = torch.randn(x["v"].shape, device="cuda")
    got = torch.autograd.grad((run(x, family, 70).float() * weight).sum(), list(x.values()))
    with use_kernels("torch"):
        out = capped(**wide, cap=70, read=read_of(family))
    expected = torch.autograd.grad((out * weight).sum(), list(wide.values()))
    for name, ours, theirs in zip(x, got, expected, strict=True):
        # The transports are one more pass of the kernel, and of its backward.
        assert kernel_parity.error(ours, theirs) < 2 * kernel_parity.tolerance(family, dtype)[1], name


@each
@in_both
def test_a_cap_of_the_whole_context_is_no_cap(family: str, dtype: str) -> None:
    x = inputs(family, 200, dtype)
    with use_kernels("fused"):
        free, _ = kernels.fused(**x, read=read_of(family))
    assert torch.equal(run(x, family, 200, 4), free)
    assert torch.equal(run(x, family, 10**6, 4), free)
    assert not torch.equal(run(x, family, 9, 4), free)


@each
def test_more_blocks_than_one_launch_takes(family: str) -> None:
    """2,048 heads in blocks of 16: 131,072 programs on an axis that has 65,535."""
    x = inputs(family, 1024, B=1, H=2048 if family != "elementwise" else 64, K=16, V=16)
    wide = {name: y.float() for name, y in x.items()}
    with use_kernels("torch"):
        expected = capped(**wide, cap=16, read=read_of(family))
    assert kernel_parity.error(run(x, family, 16), expected) < kernel_parity.TOLERANCE["bf16"][0]


@in_both
@pytest.mark.parametrize(("w", "K", "V"), [(1, 16, 16), (70, 64, 48), (200, 128, 128), (129, 256, 256), (999, 100, 64)])
def test_what_a_block_gets_from_the_one_before(dtype: str, w: int, K: int, V: int) -> None:
    """Outputs and gradients of our own kernel, from views of larger tensors; repeated calls are equal."""
    draw = torch.Generator().manual_seed(0)
    both = torch.randn(2, 3, w, 2, V + K, generator=draw)
    k, v = (torch.randn(2, 3, w, 2, d, generator=draw)[:, 1:] * d**-0.5 for d in (K, V))
    x: dict[str, Any] = {"base": both[..., :V], "q": both[..., V:], "k": k, "v": v}
    x = {name: y.to("cuda", DTYPES[dtype]).requires_grad_() for name, y in x.items()}
    x |= {f"{n}_scale": torch.rand(x[n].shape[:-1], device="cuda", requires_grad=True) for n in "qk"}
    got, expected = earlier_block(**x), earlier_block_reference(**x)
    bounds = kernel_parity.TOLERANCE[dtype]
    assert kernel_parity.error(got, expected) < bounds[0]
    with torch.no_grad():
        for turned in (False, True):
            free = [earlier_block(**x, reversed_keys=turned) for _ in range(2)]
            assert torch.equal(*free)
            assert kernel_parity.error(free[0], earlier_block_reference(**x, reversed_keys=turned)) < bounds[0]
    weight = torch.randn_like(got)
    grads = [torch.autograd.grad((out * weight).sum(), list(x.values())) for out in (got, expected)]
    for name, ours, theirs in zip(x, *grads, strict=True):
        assert kernel_parity.error(ours, theirs) < bounds[1], name


def test_auto_caps_on_the_fused_path() -> None:
    x = inputs("delta vector", 200)
    auto = capped(**x, cap=70)
    assert torch.equal(auto, run(x, "delta vector", 70))
    with use_kernels("torch"):
        assert not torch.equal(auto, capped(**x, cap=70))
    free, _ = recurrence(**x)
    assert not torch.equal(auto, free)


# Whole models under caps


def model(mixer: str, dtype: str = "bf16", **options: Any) -> HybridLM:
    """One layer on the GPU, no channel mix that looks back."""
    pytest.importorskip("fla", reason="the extra `gpu` is not installed")
    built = model_of(mixer, d_model=128, n_kv_heads=2, mixers={}, **options)
    for name, parameter in built.named_parameters():
        if ".mlp." in name and "shift" in name:
            parameter.zero_()
        elif parameter.ndim >= 2:
            torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    return built.to("cuda", DTYPES[dtype])


def kind(of: HybridLM) -> str:
    return of.sites[0].kind


def close(got: Tensor, expected: Tensor, dtype: str) -> None:
    found = kernel_parity.error(got, expected)
    assert found < MODEL[dtype], found


@pytest.mark.parametrize("mixer", MIXERS)
@in_both
@pytest.mark.parametrize("w", [5, 70])
def test_models_leak_nothing(mixer: str, dtype: str, w: int) -> None:
    """Every token outside the window replaced at once: bitwise the same rows, whatever t mod w."""
    m, tokens = model(mixer, dtype), tokens_of(2, 230).cuda()
    with torch.no_grad(), use_kernels("fused"), m.cap(**{kind(m): w}):
        before = m(tokens)
        for last in range(80, 80 + min(w, 12)):
            other = tokens.clone()
            other[:, : last + 1] = (other[:, : last + 1] + 1) % 41
            rows = changed(m(other), before)
            assert not rows[last + w :].any(), last
            assert rows[last + 1 : last + min(w, 5)].any(), last


@pytest.mark.parametrize("mixer", MIXERS)
@pytest.mark.parametrize(
    ("dtype", "w"), [("fp32", 5), ("fp32", 70), ("bf16", 70)]
)  # norms enlarge what few tokens leave
def test_prefill_and_decode_are_the_whole_pass(mixer: str, dtype: str, w: int) -> None:
    """On the fused path, and near the torch path in fp32."""
    m, tokens = model(mixer, dtype), tokens_of(2, 150).cuda()
    with torch.no_grad(), use_kernels("fused"), m.cap(**{kind(m): w}):
        whole, cache = m(tokens), Cache()
        parts = [m(tokens[:, :129], cache=cache)]
        parts += [m(tokens[:, t : t + 1], cache=cache) for t in range(129, 150)]
    close(torch.cat(parts, 1), whole, dtype)
    m = m.float()
    with torch.no_grad(), use_kernels("torch"), m.cap(**{kind(m): w}):
        close(whole, m(tokens), dtype)


@pytest.mark.parametrize("mixer", MIXERS)
def test_padding_changes_nothing(mixer: str) -> None:
    """Left, right and interior, in one batch; a batch of one; packed documents."""
    m = model(mixer, "fp32")
    lengths, width = (100, 83, 57), 130
    rows = [tokens_of(1, n, seed=n)[0] for n in lengths]
    places = [list(range(30, 130)), list(range(83)), sorted(set(range(0, 114, 2)))]
    tokens, mask = (x.cuda() for x in pad(rows, places, width))
    with torch.no_grad(), use_kernels("fused"), m.cap(**{kind(m): 20}):
        out = m(tokens, mask)
        packed = torch.cat(rows)[None].cuda()
        ids = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))[None].cuda()
        documents = m(packed, documents=ids)[0].split(lengths)
        for n, (row, at) in enumerate(zip(rows, places, strict=True)):
            alone = m(row[None].cuda())[0]
            close(out[n, at][None], alone[None], "fp32")
            close(documents[n][None], alone[None], "fp32")


@pytest.mark.parametrize("mixer", MIXERS)
def test_a_cap_of_the_whole_context_leaves_models_alone(mixer: str) -> None:
    m, tokens = model(mixer), tokens_of(2, 130).cuda()
    with torch.no_grad():
        free = m(tokens)
        with m.cap(**{kind(m): 130}):
            assert torch.equal(m(tokens), free)


# Softmax attention


@pytest.mark.parametrize("heads", [(4, 4), (6, 2)])
@pytest.mark.parametrize(
    ("T", "window", "sinks", "limit"), [(4096, 130, 4, None), (5000, 1, 1, None), (4500, 300, 200, 900)]
)
def test_sinks_in_one_flex_attention_call(heads: tuple[int, int], T: int, window: int, sinks: int, limit: Any) -> None:
    """Outputs and gradients against the dense softmax; what is neither sink nor window never matters."""
    H, G = heads
    q, k, v = (torch.randn(1, T, n, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for n in (H, G, G))
    got = attention.attention(q=q, k=k, v=v, window=window, sinks=sinks, limit=limit)
    expected = attention.attention_reference(q=q, k=k, v=v, window=window, sinks=sinks, limit=limit)
    grad = torch.randn_like(got)
    assert kernel_parity.error(got, expected) < 1e-2
    grads = [torch.autograd.grad(out, (q, k, v), grad) for out in (got, expected)]
    for ours, theirs in zip(*grads, strict=True):
        assert kernel_parity.error(ours, theirs) < 2e-2
    with torch.no_grad():
        other = k.clone(), v.clone()
        for x in other:
            x[:, sinks : T - window] = 1e4
        last = attention.attention(q=q, k=other[0], v=other[1], window=window, sinks=sinks, limit=limit)[:, -1]
    assert torch.equal(last, got[:, -1])


@pytest.mark.parametrize("window", [1, 128, 2048, 5000])
def test_long_windows_without_gradients_are_those_with(window: int) -> None:
    """FlexAttention and flash, one step below and above the length where they take turns."""
    for T in (attention.LONG - 1, attention.LONG, attention.LONG + 77):
        q, k, v = (torch.randn(1, T, n, 64, device="cuda", dtype=torch.bfloat16) for n in (4, 2, 2))
        with torch.no_grad():
            free = attention.attention(q=q, k=k, v=v, window=window)
        trained = attention.attention(q=q.requires_grad_(), k=k, v=v, window=window)
        assert kernel_parity.error(free, trained) < 1e-2


def test_sinks_take_little_memory() -> None:
    q, k, v = (torch.randn(1, 65_536, 8, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    attention.attention(q=q, k=k, v=v, window=512, sinks=4)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    attention.attention(q=q, k=k, v=v, window=700, sinks=4)
    assert torch.cuda.max_memory_allocated() - before < 4 * math.prod(q.shape) * q.itemsize
