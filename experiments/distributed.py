"""Training on several processes: what each of them holds, sees and sums up.

Every process makes the whole batch and trains on its rows; the weights, or each process's share of them, are
PyTorch's business (DistributedDataParallel, or FSDP2's fully_shard). A process alone is a team of one.
"""

from __future__ import annotations

import atexit
import dataclasses
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map_only

from ..hooks.checkpoint import check_finite

if TYPE_CHECKING:
    from ..hooks.model import HybridLM
    from .config import TrainConfig


@dataclasses.dataclass(frozen=True)
class Team:
    """The processes of one run: this one's `rank` of `size`, its `device`, and how they share work (ddp, fsdp)."""

    device: torch.device
    rank: int = 0
    size: int = 1
    parallel: str = "ddp"

    @property
    def first(self) -> bool:
        """Whether this process is the one that writes files."""
        return self.rank == 0

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier()

    def share(self, batch: Tensor) -> Tensor:
        """This process's rows of a batch [B,...]."""
        return batch.chunk(self.size)[self.rank]

    def mean(self, value: float) -> float:
        """A number averaged over the processes."""
        if self.size == 1:
            return value
        total = torch.tensor(value, dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return total.item() / self.size

    def wrap(self, model: HybridLM) -> nn.Module:
        """What to call in the model's place. Gradients come out averaged over the processes; under FSDP the model's
        parameters become shares, so optimisers are made after this."""
        if self.size == 1:
            return model
        if self.parallel == "ddp":
            return DistributedDataParallel(model)
        mesh = init_device_mesh(self.device.type, (self.size,))
        for block in model.layers:
            fully_shard(block, mesh=mesh, shard_placement_fn=self._placement)
        fully_shard(model, mesh=mesh, shard_placement_fn=self._placement)
        return model

    def check_muon(self, weights: Mapping[str, Tensor]) -> None:
        """ValueError for a weight that Muon cannot train in shares: under FSDP each process needs a row of it, or an
        equal part of its columns."""
        for name, weight in weights.items():
            rows, columns = weight.shape
            if self.parallel == "fsdp" and rows < self.size and self._placement(weight) is None:
                raise ValueError(
                    f'train.parallel="fsdp" under train.optimizer="muon": {self.size} processes cannot share {name} '
                    f'[{rows}, {columns}]; expected at most {rows} processes, a divisor of {columns}, or "ddp"'
                )

    def _placement(self, weight: Tensor) -> Shard | None:
        """Columns, where they come out even, for a matrix with fewer rows than processes: to rows that few, DTensor
        does not add a whole matrix, as Muon's step does. None: rows."""
        narrow = weight.ndim == 2 and weight.shape[0] < self.size
        return Shard(1) if narrow and weight.shape[1] % self.size == 0 else None

    def gather(self, state: Any) -> Any:
        """A state dict as a process alone would have it, on the first process; on the others it has holes."""

        def whole(share: DTensor) -> Tensor | None:
            full = share.full_tensor()
            return full.cpu() if self.first else None

        return tree_map_only(DTensor, whole, state)


def team(config: TrainConfig, device: torch.device) -> Team:
    """The team that torchrun's environment describes; each process has its own GPU.

    Raises ValueError where the processes cannot split `train.batch` evenly.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        return Team(device)
    if config.batch % (size * config.accumulate):
        raise ValueError(
            f"train.batch={config.batch}: expected a multiple of {size} processes x train.accumulate="
            f"{config.accumulate}"
        )
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        atexit.register(dist.destroy_process_group)  # not sooner: a process that joins a second time may hang
    return Team(device, dist.get_rank(), size, config.parallel)


def whole_gradients(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """A pre-hook of Muon's step, which takes matrices whole: under FSDP every process gathers the gradients, takes the
    same step and keeps its share of the weights. Sharded steps came out five times slower, and rounded differently."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            if isinstance(p.grad, DTensor):
                p.grad = p.grad.redistribute(placements=[Replicate()])


def load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any], where: str) -> None:
    """`optimizer.load_state_dict` of a whole state dict, split as the optimiser has it.

    ValueError, which `where` begins, for a state that is not that of these parameters; the optimiser is as it was.
    """
    if not isinstance(state, dict) or not isinstance(state.get("state"), dict) or "param_groups" not in state:
        raise ValueError(f"{where}: expected an optimiser's state and param_groups")
    if len(state["param_groups"]) != len(optimizer.param_groups):
        groups = len(state["param_groups"]), len(optimizer.param_groups)
        raise ValueError(f"{where}: has {groups[0]} groups of parameters; expected {groups[1]}")
    muon = isinstance(optimizer, torch.optim.Muon)
    names = {"momentum_buffer"} if muon else {"step", "exp_avg", "exp_avg_sq"}
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    saved = state["state"]
    odd = sorted(set(saved) ^ set(range(len(parameters))))
    if saved and odd:  # none before the first step
        raise ValueError(f"{where}: state[{odd[0]}] is missing or unknown; expected 0..{len(parameters) - 1}")
    for index, entry in saved.items():
        p = parameters[index]
        if not isinstance(entry, dict) or set(entry) != names or not all(isinstance(x, Tensor) for x in entry.values()):
            found = sorted(entry) if isinstance(entry, dict) else entry
            raise ValueError(f"{where}: state[{index}] holds {found}; expected tensors {sorted(names)}")
        for name, value in entry.items():
            shape = () if name == "step" else tuple(p.shape)
            if tuple(value.shape) != shape:
                raise ValueError(f"{where}: state[{index}].{name} has shape {tuple(value.shape)}; expected {shape}")
        check_finite(entry.items(), f"{where}: state[{index}]")
        if isinstance(p, DTensor):
            placements = [Replicate()] if muon else p.placements
            for name in sorted(names - {"step"}):  # a set's order differs between processes, which meet here
                entry[name] = distribute_tensor(entry[name], p.device_mesh, placements)
    optimizer.load_state_dict(state)
