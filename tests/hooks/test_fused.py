"""fused(): which op each family gets, and what it is handed. The ops here are stand-ins in fla's conventions, made of
the reference recurrence, so that the mapping is checked in numbers; the kernels themselves are checked on a GPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import assert_close, error
from torch import Tensor

from hybridscope.experiments import doctor
from hybridscope.experiments.bench import kernel_parity as parity
from hybridscope.hooks.kernels import dispatch
from hybridscope.hooks.kernels import fused as kernels
from hybridscope.hooks.kernels.dispatch import recur, step, use_kernels
from hybridscope.hooks.kernels.recurrence import recurrence, recurrence_reference

FAMILIES = list(dict.fromkeys(kernels.MIXERS.values()))
HOPPER, AMPERE = (9, 0), (8, 0)
each = pytest.mark.parametrize("family", FAMILIES)


def read_of(family: str) -> Any:
    return "before" if family == "before" else "after"


def inputs(family: str, T: int = 21, **shape: Any) -> dict[str, Any]:
    return parity.inputs(family, T, device="cpu", **{"H": 2, "K": 5, "V": 7} | shape)


def stand_in(name: str, seen: dict[str, Any] | None = None) -> Callable[..., Any]:
    """fla's op `name` by its signature: its argument names, shapes and dtypes, and what it gives no gradient to."""

    def hgrn(x: Tensor, g: Tensor, initial_state: Tensor | None, output_final_state: bool) -> tuple[Tensor, Tensor]:
        assert (x.ndim, g.shape, output_final_state) == (3, x.shape, True)
        assert x.dtype == g.dtype == torch.float32
        assert x.is_contiguous()
        assert g.is_contiguous()
        assert initial_state is None or initial_state.shape == x[:, 0].shape
        one = torch.ones_like(x)[..., None]
        state = None if initial_state is None else initial_state[..., None, None]
        out, final = recurrence_reference(q=one, k=one, v=x[..., None], log_decay=g[..., None], state=state)
        return out[..., 0], final[..., 0, 0]

    def op(*, scale: float, initial_state: Tensor | None, output_final_state: bool, **x: Tensor) -> Any:
        assert scale == 1.0
        assert output_final_state
        if seen is not None:
            seen.update(x, initial_state=initial_state)
        q = x.pop("r") if name == "chunk_rwkv6" else x.pop("q")
        assert q.shape == x["k"].shape
        assert not q.shape[-1] % 16
        assert not x["v"].shape[-1] % 16
        assert q.dtype == x["k"].dtype == x["v"].dtype
        assert initial_state is None or initial_state.dtype == torch.float32
        gate = {"chunk_rwkv6": "w", "chunk_dplr_delta_rule": "gk"}.get(name, "g")
        g = None if name == "chunk_delta_rule" else x.pop(gate)
        if name == "chunk_rwkv6":
            assert not x.pop("u").any()
        if g is not None:
            assert g.dtype == torch.float32
            per_head = name in ("chunk_simple_gla", "chunk_gated_delta_rule")
            assert g.shape == (q.shape[:3] if per_head else q.shape)
            g = g[..., None] if per_head else g
        assert set(x) == {"k", "v"} | {
            "chunk_delta_rule": {"beta"}, "chunk_gated_delta_rule": {"beta"}, "chunk_kda": {"beta"},
            "chunk_dplr_delta_rule": {"a", "b"},
        }.get(name, set())  # fmt: skip
        read: Any = "before" if name == "chunk_rwkv6" else "after"
        return recurrence_reference(q=q, **x, log_decay=g, state=initial_state, read=read)

    return hgrn if name == "fused_recurrent_hgrn" else op


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The CPU in the place of a Hopper with Triton 3.6, stand-ins in the place of fla; `op`: the last one used."""
    used: dict[str, Any] = {}

    def find(name: str) -> Callable[..., Any]:
        used.update(op=name, terms={})
        return stand_in(name, used["terms"])

    monkeypatch.setattr(kernels, "DEVICE", "cpu")
    monkeypatch.setattr(kernels, "machine", lambda device: used.get("machine", ("3.6.0", HOPPER)))
    monkeypatch.setattr(kernels, "fla_op", find)
    return used


@pytest.mark.parametrize("version", ["3.3.1", "3.4.0", "3.6.0", "3.7.0", "3.7.1", "3.8.0"])
@pytest.mark.parametrize("capability", [AMPERE, HOPPER, (10, 0)])
@pytest.mark.parametrize("training", [True, False])
def test_the_rule_avoids_what_hopper_gets_wrong(version: str, capability: tuple[int, int], training: bool) -> None:
    refused = training and capability == HOPPER and version in ("3.4.0", "3.6.0", "3.7.0")
    machine: dict[str, Any] = {"triton": version, "capability": capability, "training": training}
    expected = {
        "scalar": "chunk_gla" if refused else "chunk_simple_gla", "vector": "chunk_gla", "before": "chunk_rwkv6",
        "elementwise": "fused_recurrent_hgrn", "delta": "chunk_delta_rule", "delta vector": "chunk_kda",
        "delta scalar": "chunk_kda" if refused else "chunk_gated_delta_rule", "low rank": "chunk_dplr_delta_rule",
    }  # fmt: skip
    for family in FAMILIES:
        op, why = kernels.path_of(family, **machine)
        assert op == expected[family]
        assert ("Hopper" in why) == (refused and family in ("scalar", "delta scalar"))
    assert kernels.path_of("delta", **machine, dtype=torch.float32)[0] == "chunk_kda"  # chunk_delta_rule: 16-bit only


@each
@pytest.mark.parametrize("machine", [("3.6.0", HOPPER), ("3.7.1", HOPPER)])
@pytest.mark.parametrize("T", [1, 21])
@pytest.mark.parametrize("state", [True, False])
def test_the_op_gets_what_the_recurrence_says(
    on_gpu: dict[str, Any], family: str, machine: Any, T: int, state: bool
) -> None:
    """Outputs, final state and every gradient, odd head dims included."""
    on_gpu["machine"] = machine
    x = inputs(family, T)
    if not state:
        del x["state"]
    leaves = {name: y.requires_grad_() for name, y in x.items()}
    grads, results = [], []
    for f in (kernels.fused, recurrence_reference):
        out, final = f(**leaves, read=read_of(family))
        weights = (torch.linspace(-1, 2, out.numel()).view(out.shape), torch.linspace(3, -1, final.numel()))
        loss = (out * weights[0]).sum() + (final.flatten() * weights[1]).sum()
        results.append((out, final))
        grads.append(torch.autograd.grad(loss, list(leaves.values()), allow_unused=True))
    for got, expected in zip(*results, strict=True):
        assert got.dtype == expected.dtype
        assert_close(got, expected)
    for name, got, expected in zip(leaves, *grads, strict=True):
        assert (got is None) == (expected is None), name
        assert got is None or error(got, expected) < 5e-6, name  # fp32, sums in another order


@each
def test_dtypes(on_gpu: dict[str, Any], family: str) -> None:
    """16-bit q, k, v; fp32 decays and states; under autocast fp32 ones are cast too, and the output keeps v's dtype."""
    x = inputs(family, dtype=torch.bfloat16)
    out, state = kernels.fused(**x, read=read_of(family))
    assert (out.dtype, state.dtype) == (torch.bfloat16, torch.float32)
    if family == "elementwise":
        return
    terms = on_gpu["terms"]
    assert terms["k"].dtype == torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        out, _ = kernels.fused(**inputs(family), read=read_of(family))
    assert (out.dtype, on_gpu["terms"]["v"].dtype) == (torch.float32, torch.bfloat16)


@each
def test_resets_stay_finite(on_gpu: dict[str, Any], family: str) -> None:
    """fla takes differences of summed decays: -inf must not reach it."""
    x = inputs(family)
    if "log_decay" not in x:
        pytest.skip("no decay")
    x["log_decay"][:, 10] = -torch.inf
    out, state = kernels.fused(**x, read=read_of(family))
    assert on_gpu["op"] == "fused_recurrent_hgrn" or min(
        float(y.min()) for n, y in on_gpu["terms"].items() if n in ("g", "w", "gk")
    ) == pytest.approx(kernels.FLOOR)
    for got, expected in zip((out, state), recurrence_reference(**x, read=read_of(family)), strict=True):
        assert_close(got, expected)


@each
def test_no_tokens_leave_the_state(on_gpu: dict[str, Any], family: str) -> None:
    x = inputs(family, 0)
    out, state = kernels.fused(**x, read=read_of(family))
    assert out.shape == x["v"].shape
    assert torch.equal(state, x["state"])
    del x["state"]
    assert not kernels.fused(**x, read=read_of(family))[1].any()


@each
def test_inputs_are_left_alone(on_gpu: dict[str, Any], family: str) -> None:
    x = inputs(family)
    kept = {name: y.clone() for name, y in x.items()}
    kernels.fused(**x, read=read_of(family))
    assert all(torch.equal(x[name], kept[name]) for name in x)


@pytest.mark.parametrize("family", ["delta", "delta scalar", "delta vector", "low rank"])
def test_a_head_too_wide_for_the_op(on_gpu: dict[str, Any], family: str) -> None:
    with pytest.raises(ValueError, match=r"K=257 \(value_dim V=7\).*K <= 256.*narrower heads"):
        kernels.fused(**inputs(family, 2, K=257))


def test_other_mistakes(on_gpu: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="reads before an erasure"):
        kernels.fused(**inputs("delta scalar"), read="before")
    with pytest.raises(ValueError, match="float64"):
        kernels.fused(**{n: y.double() for n, y in inputs("vector").items()})
    monkeypatch.setattr(kernels, "MAX_HEADS", 3)
    with pytest.raises(ValueError, match=r"batch 2 x heads 2.*split the batch"):
        kernels.fused(**inputs("vector"))
    monkeypatch.setattr(kernels, "DEVICE", "cuda")
    with pytest.raises(ValueError, match="q is on cpu"):
        kernels.fused(**inputs("vector"))


def test_auto_keeps_fp32_exact_unless_tf32_is_allowed(on_gpu: dict[str, Any]) -> None:
    cpu, precision = torch.device("cpu"), torch.get_float32_matmul_precision()
    assert dispatch.choose("vector", cpu, torch.bfloat16)[0] == "fused"
    assert dispatch.choose("vector", cpu, torch.float16)[0] == "fused"
    assert dispatch.choose("vector", cpu, torch.float64)[0] == "torch"
    assert dispatch.choose("vector", cpu, torch.float32)[0] == "torch"
    assert dispatch.choose("elementwise", cpu, torch.float32)[0] == "fused"
    try:
        torch.set_float32_matmul_precision("high")
        assert dispatch.choose("vector", cpu, torch.float32)[0] == "fused"
    finally:
        torch.set_float32_matmul_precision(precision)


@each
def test_the_policy_decides(on_gpu: dict[str, Any], family: str) -> None:
    x, read = inputs(family), read_of(family)
    with use_kernels("fused"):
        assert_close(recur(**x, read=read)[0], recurrence(**x, read=read)[0])
        assert on_gpu.pop("op")
        with use_kernels("torch"):
            assert torch.equal(recur(**x, read=read)[0], recurrence(**x, read=read)[0])
            assert "op" not in on_gpu
        assert dispatch.policy() == "fused"
    assert dispatch.policy() == "auto"


def test_off_the_gpu_auto_is_torch_and_fused_an_error() -> None:
    x = inputs("delta scalar")
    assert torch.equal(recur(**x)[0], recurrence(**x)[0])
    with use_kernels("fused"), pytest.raises(ValueError, match="tensors are on cpu"):
        recur(**x)
    assert dispatch.policy() == "auto"


def test_an_unknown_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="use_kernels: 'fast'; expected one of auto, torch, fused"):
        use_kernels("fast").__enter__()
    monkeypatch.setattr(dispatch, "_policy", "fats")  # as the environment variable would leave it
    with pytest.raises(ValueError, match="HYBRIDSCOPE_KERNELS: 'fats'"):
        recur(**inputs("vector"))


def test_without_fla_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """No fallback on a GPU: a user who expects kernels learns that they are missing."""
    monkeypatch.setattr(kernels, "DEVICE", "cpu")
    monkeypatch.setattr(kernels, "machine", lambda device: ("3.6.0", HOPPER))
    monkeypatch.setitem(__import__("sys").modules, "fla", None)
    x = {n: y.bfloat16() for n, y in inputs("vector").items()}
    with pytest.raises(ImportError, match=r'pip install "hybridscope\[gpu\]", or hybridscope.use_kernels\("torch"\)'):
        recur(**x)
    recur(**{n: y if n == "state" else y[:, :1] for n, y in x.items()})  # a plain step needs none
    with use_kernels("torch"):
        recur(**x)


@each
@pytest.mark.parametrize("state", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_one_token_is_a_plain_step(family: str, state: bool, dtype: torch.dtype) -> None:
    x, read = {n: y.to(dtype) for n, y in inputs(family, 1).items()}, read_of(family)
    if not state:
        del x["state"]
    for got, expected in zip(step(**x, read=read), recurrence_reference(**x, read=read), strict=True):
        assert_close(got, expected)


@each
@pytest.mark.parametrize("T", [1, 9])
def test_every_path_keeps_the_dtype_of_v(on_gpu: dict[str, Any], family: str, T: int) -> None:
    """A fp32 beta, decay or state does not promote a bf16 model's activations; states are fp32."""
    for path in ("torch", "fused"):
        with use_kernels(path):
            out, state = recur(**inputs(family, T, dtype=torch.bfloat16), read=read_of(family))
        assert (out.dtype, state.dtype) == (torch.bfloat16, torch.float32)


def test_one_token_with_gradients_is_trained_on_the_chosen_path(on_gpu: dict[str, Any]) -> None:
    x = inputs("vector", 1)
    with use_kernels("fused"):
        recur(**x)
        assert "op" not in on_gpu
        x["k"].requires_grad_()
        recur(**x)
        assert on_gpu["op"] == "chunk_gla"
        with torch.no_grad():
            on_gpu.clear()
            recur(**x)
            assert not on_gpu


def test_compiled_callers_get_the_same(on_gpu: dict[str, Any]) -> None:
    """The fused call is opaque to torch.compile."""
    x = inputs("delta scalar")

    def double(**y: Any) -> Tensor:
        return 2 * recur(**y)[0] + 1

    with use_kernels("fused"):
        got = torch.compile(double, backend="eager")(**x)
        assert_close(got, double(**x))
    assert on_gpu["op"] == "chunk_gated_delta_rule"


@each
def test_the_parity_script_passes_on_stand_ins(on_gpu: dict[str, Any], family: str) -> None:
    for dtype in ("fp32", "bf16"):
        for row in parity.rows(family, dtype, (1, 19), device="cpu"):
            assert row["ok"], row
            assert row["mixers"]
            json.dumps(row)


def test_the_parity_script_records_failures_and_goes_on(
    on_gpu: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(**x: Tensor) -> Any:
        if x["q"].shape[1] == 1:
            raise RuntimeError("out of resource")
        out, state = recurrence_reference(q=x["q"], k=x["k"], v=x["v"], log_decay=x["g"], state=x["initial_state"])
        return out * 1.1, state

    monkeypatch.setattr(kernels, "fla_op", lambda name: broken)
    first, second = parity.rows("vector", "bf16", (1, 9), device="cpu")
    assert first["exception"] == "RuntimeError: out of resource"
    assert not second["ok"]
    assert {"out", "d_q"} <= set(second["over"])
    assert "state" not in second["over"]
    assert "unfinished" in parity.table(
        {"rows": [first, second], "unfinished": [{"family": "delta", "dtype": "bf16", "status": "x"}]}
    )


def test_doctor_without_a_gpu() -> None:
    found = doctor.doctor()
    assert found["gpu"] is None
    assert {p["mixer"] for p in found["paths"]} == set(kernels.MIXERS)
    assert {p["training"] for p in found["paths"]} == {"torch"}
    assert "all mixers" in doctor.report(json.loads(json.dumps(found)))
    with use_kernels("fused"):
        assert {p["training"] for p in doctor.doctor()["paths"]} == {"error"}


def test_doctor_names_the_op_and_the_reason(on_gpu: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    installed: dict[str, str] = {}
    monkeypatch.setattr(doctor, "_version", installed.get)

    def paths() -> dict[tuple[str, str], dict[str, Any]]:
        return {(p["mixer"], p["dtype"]): p for p in doctor.doctor()["paths"]}

    assert "pip install" in paths()["gdn", "bfloat16"]["why"]
    assert paths()["gdn", "bfloat16"]["training"] == "error"
    assert paths()["gdn", "float32"]["training"] == "torch"
    installed.update({"flash-linear-attention": "0.6.0", "triton": "3.6.0"})
    gdn = paths()["gdn", "bfloat16"]
    assert (gdn["training"], gdn["inference"]) == ("chunk_kda", "chunk_gated_delta_rule")
    assert "3.6.0" in gdn["why"]
    assert "chunk_kda" in doctor.report(doctor.doctor())
