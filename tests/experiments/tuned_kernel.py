"""A tuned kernel compiled for a GPU that is not there; prints how many configurations exist when the first is timed."""

import sys
from typing import Any

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from hybridscope.experiments.tuning import side_by_side


class Driver:
    """Hopper, as far as compiling asks."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_benchmarker(self) -> Any:
        def timed(call: Any, quantiles: Any) -> list[float]:
            print(sum(len(kernels) for kernels, *_ in double.fn.device_caches.values()))
            raise SystemExit

        return timed


@triton.autotune(configs=[triton.Config({"N": n}, num_warps=w) for n in (16, 32) for w in (1, 2)], key=["n"])
@triton.jit
def double(x, n, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(x + at, 2 * tl.load(x + at, mask=at < n), mask=at < n)


driver.set_active(Driver())
if sys.argv[1] == "side by side":
    side_by_side()
double[(1,)](torch.zeros(8), 8)
