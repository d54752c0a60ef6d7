"""What this machine has, and which path every recurrent mixer takes on it, and why."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

PACKAGES = ("hybridscope", "torch", "triton", "flash-linear-attention", "transformers", "transformer-lens", "nnsight")


def doctor() -> dict[str, Any]:
    """`versions` (None: not installed), `gpu` (None, or name, capability, GiB), `policy`, and `paths`: a record per
    mixer and dtype with the path that training and inference take, and the reason."""
    import torch

    from ..hooks.kernels import dispatch

    versions: dict[str, str | None] = {"python": platform.python_version()} | {p: _version(p) for p in PACKAGES}
    gpu = None
    if torch.cuda.is_available():
        its = torch.cuda.get_device_properties(0)
        gpu = {"name": its.name, "capability": [its.major, its.minor], "memory_gib": round(its.total_memory / 2**30, 1)}
    device = torch.device("cuda" if gpu else "cpu")
    return {
        "versions": versions, "gpu": gpu, "policy": dispatch.policy(),
        "paths": [_path(mixer, device, dtype, versions) for mixer in dispatch.kernels.MIXERS for dtype in _dtypes()],
    }  # fmt: skip


def report(found: dict[str, Any]) -> str:
    """The same for a terminal."""
    gpu, lines = found["gpu"], []
    for name, its in found["versions"].items():
        lines.append(f"{name:24s}{its or 'not installed'}")
    if gpu:
        capability = ".".join(map(str, gpu["capability"]))
        lines.append(f"{'GPU':24s}{gpu['name']}, capability {capability}, {gpu['memory_gib']} GiB")
    else:
        lines.append(f"{'GPU':24s}none: everything runs in torch on the CPU")
    lines += ["", f"Recurrences (kernels: {found['policy']})"]
    paths = found["paths"]
    if len({(p["training"], p["why"]) for p in paths}) == 1:  # the same everywhere
        lines.append(f"{'all mixers':24s}{paths[0]['training']}: {paths[0]['why']}")
    else:
        lines.append(f"{'mixer':11s}{'dtype':10s}{'training':25s}{'inference':25s}why")
        lines += [f"{p['mixer']:11s}{p['dtype']:10s}{p['training']:25s}{p['inference']:25s}{p['why']}" for p in paths]
    lines.append("Short convolutions take fla's causal_conv1d wherever hgrn, which has no products either, is fused.")
    lines.append("One token without gradients is a plain torch step on any path.")
    return "\n".join(lines)


def _dtypes() -> tuple[Any, ...]:
    import torch

    return torch.bfloat16, torch.float32


def _path(mixer: str, device: Any, dtype: Any, versions: dict[str, str | None]) -> dict[str, str]:
    """Path of one mixer: "torch", the fla op, or an error."""
    from ..hooks.kernels import dispatch
    from ..hooks.kernels import fused as kernels

    family = kernels.MIXERS[mixer]
    row = {"mixer": mixer, "dtype": str(dtype).removeprefix("torch.")}
    try:
        path, why = dispatch.choose(family, device, dtype)
    except ValueError as error:
        return row | {"training": "error", "inference": "error", "why": str(error)}
    if path == "torch":
        return row | {"training": path, "inference": path, "why": why}
    if versions["flash-linear-attention"] is None or versions["triton"] is None:
        why = f'flash-linear-attention is not installed: {kernels.INSTALL}, or use_kernels("torch")'
        return row | {"training": "error", "inference": "error", "why": why}
    triton, capability = kernels.machine(device)
    ops = [
        kernels.path_of(family, triton=triton, capability=capability, training=training, dtype=dtype)
        for training in (True, False)
    ]
    return row | {"training": ops[0][0], "inference": ops[1][0], "why": ops[0][1]}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
