"""The same on a CUDA device: training in bf16 with torch.compile, the switches, every measurement."""

import json
from pathlib import Path

import pytest
import torch

import hybridscope as hs
from hybridscope.experiments.bench import kernel_parity, stats_cells
from hybridscope.experiments.config import load_config
from hybridscope.experiments.sources import documents_for, needles_for
from hybridscope.experiments.train import train
from hybridscope.experiments.tuning import untuned
from hybridscope.hooks.kernels import attention, dispatch
from hybridscope.hooks.kernels import fused as kernels
from hybridscope.hooks.kernels.short_conv import short_conv
from hybridscope.hooks.passes import Pass

pytestmark = pytest.mark.gpu
if torch.cuda.is_available():
    untuned()  # tuning every kernel takes many minutes
PATTERNS = {"window": '["swa:8", "full"]', "recurrent": '["gdn", "full"]'}
each = pytest.mark.parametrize("kind", PATTERNS)


def ladder_of(folder: Path, kind: str, compiled: str) -> Path:
    changes = [f"model.pattern={PATTERNS[kind]}", "train.steps=40", "train.saves=2", f'train.compile="{compiled}"']
    return train(load_config("demo", changes), folder / f"{kind}-{compiled}", progress=False)


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "loss.jsonl").read_text().splitlines()]


@each
def test_compiled_training_loses_loss_like_uncompiled(tmp_path: Path, kind: str) -> None:
    compiled, plain = (losses(ladder_of(tmp_path, kind, how)) for how in ("on", "off"))
    assert plain[-1] < plain[0] - 0.02
    assert compiled == pytest.approx(plain, abs=5e-3)  # bf16 kernels fused differently


@each
def test_device_agrees_with_cpu(tmp_path: Path, kind: str) -> None:
    source = ladder_of(tmp_path, kind, "off") / "step-000040"
    cpu, gpu = hs.load(source), hs.load(source, device="cuda")
    needles = needles_for(cpu, source, 192, distractors=3)
    x = needles[:8].tokens
    with torch.no_grad():
        assert torch.allclose(gpu(x.cuda()).cpu(), cpu(x), atol=2e-5)
        with gpu.cap(**{kind: 5}), cpu.cap(**{kind: 5}):
            assert torch.allclose(gpu(x.cuda()).cpu(), cpu(x), atol=2e-5)
        with gpu.record(stats=True, resid="last") as on_gpu, cpu.record(stats=True, resid="last") as on_cpu:
            gpu(x.cuda())
            cpu(x)
    assert torch.allclose(on_gpu.stats(1).entropy.cpu(), on_cpu.stats(1).entropy, atol=1e-5)
    assert torch.allclose(on_gpu.resid(1).cpu(), on_cpu.resid(1), atol=2e-5)
    out = gpu.generate(x[:, :90].cuda(), 4)
    assert torch.equal(gpu(out[:, :-1]).argmax(-1)[:, 89:], out[:, 90:])
    # Every measurement runs where the model is, on data that is not there.
    assert len(hs.retrieval_heads(gpu, needles[:16], only_answered=False)) == 4
    assert len(hs.cap_sweep(gpu, needles[:16], windows=[16])) > 1
    assert len(hs.probe_layers(gpu, needles, seeds=1, controls=())) == 12
    documents = documents_for(gpu, source, 2)
    assert (hs.gradient_influence(gpu, documents)["influence"] >= 0).all()
    assert hs.perplexity(gpu, documents)["n"].sum() == 2 * 95


@pytest.mark.parametrize("family", list(dict.fromkeys(kernels.MIXERS.values())))
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_fused_recurrences_agree_with_torch(family: str, dtype: str) -> None:
    """Outputs, final state and every gradient; the full grid is experiments/bench/kernel_parity.py."""
    pytest.importorskip("fla", reason="the extra `gpu` is not installed")
    for row in kernel_parity.rows(family, dtype, (1, 65, 200)):
        assert row["ok"], row
        assert row["errors"]["repeats"], row


def test_auto_is_fused_on_a_gpu() -> None:
    pytest.importorskip("fla", reason="the extra `gpu` is not installed")
    x = kernel_parity.inputs("delta vector", 65, dtype=torch.bfloat16)
    got, _ = dispatch.recur(**x)
    with dispatch.use_kernels("fused"):
        assert torch.equal(dispatch.recur(**x)[0], got)
    with dispatch.use_kernels("torch"):
        expected, _ = dispatch.recur(**x)
    assert not torch.equal(expected, got)  # rounded elsewhere: another path
    assert kernel_parity.error(got, expected) < kernel_parity.TOLERANCE["bf16"][0]


def test_fused_recurrences_under_compile_and_autocast() -> None:
    """As the training loop runs them: fp32 tensors, bf16 kernels, gradients through a graph break."""
    pytest.importorskip("fla", reason="the extra `gpu` is not installed")
    x = {n: y.requires_grad_() for n, y in kernel_parity.inputs("delta scalar", 100).items()}

    def loss(**y: torch.Tensor) -> torch.Tensor:
        out, state = dispatch.recur(**y)
        return (out.float() * 2).square().sum() + state.square().sum()

    grads = []
    for path, f in (("auto", torch.compile(loss)), ("torch", loss)):
        with dispatch.use_kernels(path), torch.autocast("cuda", torch.bfloat16, enabled=path == "auto"):
            value = f(**x)
        grads.append(torch.autograd.grad(value, list(x.values())))
    for name, got, expected in zip(x, *grads, strict=True):
        assert kernel_parity.error(got, expected) < 2 * kernel_parity.TOLERANCE["bf16"][1], name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("T", [2, 3, 64, 1000])
@pytest.mark.parametrize("history", [False, True])
def test_short_convolutions_agree_with_torch(dtype: torch.dtype, T: int, history: bool) -> None:
    """Output and every gradient against the torch path in fp64."""
    pytest.importorskip("fla", reason="the extra `gpu` is not installed")
    shapes = {"x": (2, T, 96), "weight": (96, 4), "bias": (96,), "history": (2, 3, 96)}
    inputs = {n: torch.randn(s, device="cuda") for n, s in shapes.items() if history or n != "history"}
    inputs = {n: y if n in ("weight", "bias") else y.to(dtype) for n, y in inputs.items()}  # as under autocast
    results = []
    for path, cast in (("auto", None), ("torch", torch.float64)):
        x = {n: y.to(cast or y.dtype).requires_grad_() for n, y in inputs.items()}
        with dispatch.use_kernels(path):
            out = short_conv(**x, silu=True)
        weights = torch.linspace(-1, 2, out.numel(), device="cuda").view_as(out).to(out.dtype)
        results.append([out, *torch.autograd.grad(out, list(x.values()), weights)])
    for got, expected in zip(*results, strict=True):
        assert kernel_parity.error(got, expected) < (1e-5 if dtype == torch.float32 else 1e-2)


@pytest.mark.parametrize("heads", [(4, 4), (6, 2)])
@pytest.mark.parametrize("window", [1, 5, 130, 299])
@pytest.mark.parametrize("compiled", [False, True])
def test_windows_in_one_flash_call(heads: tuple[int, int], window: int, compiled: bool) -> None:
    """Outputs and gradients of 16-bit windows against the dense softmax in fp64."""
    H, G = heads
    q, k, v = (torch.randn(2, 300, n, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for n in (H, G, G))
    assert attention._flash_takes(q, k, v)
    run = torch.compile(attention.attention) if compiled else attention.attention
    got = run(q=q, k=k, v=v, window=window)
    expected = attention.attention_reference(q=q.double(), k=k.double(), v=v.double(), window=window)
    grad = torch.randn_like(got)
    assert kernel_parity.error(got, expected) < 1e-2
    for ours, theirs in zip(
        torch.autograd.grad(got, (q, k, v), grad), torch.autograd.grad(expected, (q, k, v), grad.double()), strict=True
    ):
        assert kernel_parity.error(ours, theirs) < 2e-2


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("case", ["plain", "window", "gpt-oss", "documents", "left-padding", "rows"])
def test_attention_statistics_are_the_oracles(dtype: str, case: str) -> None:
    """The Triton kernel from poisoned buffers, within KERNELS.md's bound, and equal when repeated."""
    row = stats_cells.check(dtype, case, torch.device("cuda"))
    assert row["repeats"]
    assert row["ok"], row["errors"]


def test_attention_statistics_take_the_kernel_and_little_memory() -> None:
    q, k = (torch.randn(1, 32_768, n, 64, device="cuda", dtype=torch.bfloat16) for n in (8, 2))
    got = hs.attention_stats(q, k, window=500, histogram=True)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    again = hs.attention_stats(q, k, window=500, histogram=True, impl="triton")
    assert torch.cuda.max_memory_allocated() - before < 2**28  # a pattern of one head would be 2 GiB
    assert all(torch.equal(x, again.fields()[name]) for name, x in got.fields().items())
    rows = [3, 32_767, 20_000]
    with hs.use_kernels("torch"):
        slow = hs.attention_stats(q, k, window=500, histogram=True, rows=rows)
    for name in ("entropy", "lse", "distance", "histogram"):
        assert kernel_parity.error(getattr(got, name)[:, rows], getattr(slow, name)) < 1e-4, name


def test_recording_on_a_gpu_takes_the_kernel() -> None:
    """Left padding and a window: the model's statistics through the kernel, beside the torch path's."""
    model = hs.HybridLM(hs.HybridConfig(("full", "swa:9"), 2, 64, 4, 50, n_kv_heads=2)).cuda().eval()
    tokens = torch.randint(50, (2, 70), device="cuda")
    mask = torch.ones_like(tokens)
    mask[0, :20] = 0
    seen = []
    for path in ("auto", "torch"):
        with hs.use_kernels(path), torch.no_grad(), model.record(stats=True) as rec:
            model(tokens, attention_mask=mask)
        seen.append(rec.stats(1))
    for name in ("entropy", "top1_prob", "distance"):
        got, expected = (getattr(s, name)[mask.bool()] for s in seen)
        assert kernel_parity.error(got, expected) < 1e-4, name


@pytest.mark.parametrize("rows", [None, [3, -1]])
def test_recording_waits_for_no_gpu(rows: list[int] | None) -> None:
    model = hs.HybridLM(hs.HybridConfig(("full", "swa:9"), 2, 64, 4, 50)).cuda().eval()
    hidden = torch.randn(2, 70, 64, device="cuda")
    labels = torch.zeros(2, 70, dtype=torch.bool)
    labels[:, 20] = True
    spec = hs.Stats(rows=rows, labels=labels, top1=False)
    run = Pass(None, None, 2, 70, hidden.device)
    with torch.no_grad(), model.record(stats=spec, resid=[0, -1]) as rec:
        for block in model.layers:
            block(hidden, run, model.recorders)  # compiles the kernels
        torch.cuda.set_sync_debug_mode("error")
        try:
            for block in model.layers:
                block(hidden, run, model.recorders)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert rec.stats(1).entropy.shape[1] == (70 if rows is None else 2)


@pytest.mark.parametrize("mixer", ["full", "swa:9"])
def test_decoding_waits_for_no_gpu(mixer: str) -> None:
    """Without padding; a recording beside it neither."""
    model = hs.HybridLM(hs.HybridConfig((mixer,), 2, 64, 4, 50)).cuda().eval()
    tokens, cache = torch.randint(50, (2, 24), device="cuda"), model.new_cache()
    with torch.no_grad(), model.record(stats=hs.Stats(rows=[-1], labels=tokens < 25)) as rec:
        model(tokens[:, :20], cache=cache)
        runs = [Pass(None, cache, 2, 1, tokens.device) for _ in range(3)]
        vectors = model.embed(tokens)
        for n, run in enumerate(runs, 20):
            torch.cuda.set_sync_debug_mode("default" if n == 20 else "error")  # the first compiles the kernels
            try:
                x = vectors[:, n : n + 1]
                for block in model.layers:
                    x = block(x, run)
            finally:
                torch.cuda.set_sync_debug_mode("default")
    assert rec.stats(1).visible[0, :, 0].tolist() == [min(n, 9) if mixer != "full" else n for n in (20, 21, 22, 23)]
