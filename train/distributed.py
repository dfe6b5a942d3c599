"""One process, or several that torchrun started: who this one is, and what they agree on.

Every process works on its share of each global batch; sums over all shares make losses, gradients and metrics those of
one process with the whole batch. One process writes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed, nn

from opal_deploy.errors import UsageError
from opal_deploy.model.network import OpalNetwork
from opal_deploy.runtime.torch_session import torch_device


def is_main_process() -> bool:
    """Whether this process is the one that speaks and writes; known before the processes join."""
    return int(os.environ.get("RANK", "0")) == 0


@dataclass(frozen=True)
class ProcessGroup:
    """The processes of one run.

    Attributes:
        rank: this process, 0 ... size-1.
        size: how many there are.
        device: where this one computes.
    """

    device: torch.device
    rank: int = 0
    size: int = 1

    @property
    def is_writer(self) -> bool:
        """Whether this process writes files and lines."""
        return self.rank == 0

    def total(self, *values: float) -> list[float]:
        """Each value summed over all processes, in float64."""
        if self.size == 1:
            return list(values)
        sums = torch.tensor(values, dtype=torch.float64, device=self.device)
        distributed.all_reduce(sums)
        return [float(value) for value in sums.tolist()]

    def everyone(self, value: Any) -> list[Any]:
        """The value of each process, by rank, in every process."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        distributed.all_gather_object(found, value)
        return found

    def share_buffers(self, module: nn.Module) -> None:
        """The first process's buffers (running batch statistics) in every process."""
        if self.size > 1:
            for buffer in module.buffers():
                distributed.broadcast(buffer, 0)

    def wait(self) -> None:
        """Until every process has come here."""
        if self.size > 1:
            distributed.barrier()


@contextmanager
def join_process_group(device: str) -> Iterator[ProcessGroup]:
    """This process's group: of all that torchrun started, or of this one alone.

    Args:
        device: `auto`, `cpu`, `cuda`; with several processes each takes the GPU of its local rank.

    Raises:
        UsageError: no such device, or fewer GPUs than processes.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        yield ProcessGroup(torch_device(device))
        return
    local = int(os.environ.get("LOCAL_RANK", "0"))
    chosen = torch_device(device)
    if chosen.type == "cuda":
        if device not in ("auto", "cuda"):
            raise UsageError(f"device {device!r} for {size} processes: give cuda, and each takes a GPU of its own")
        if local >= torch.cuda.device_count():
            raise UsageError(
                f"{local + 1} processes or more on this machine, which has {torch.cuda.device_count()} GPUs; "
                "start one a GPU (torchrun --nproc-per-node)"
            )
        chosen = torch.device("cuda", local)
        torch.cuda.set_device(chosen)
    distributed.init_process_group("nccl" if chosen.type == "cuda" else "gloo")
    try:
        yield ProcessGroup(chosen, distributed.get_rank(), distributed.get_world_size())
    finally:
        distributed.destroy_process_group()


def wrap_ddp(network: OpalNetwork, group: ProcessGroup) -> nn.Module:
    """The network as training calls it: gradients averaged over the group's processes."""
    if group.size == 1:
        return network
    devices = [group.device] if group.device.type == "cuda" else None
    return nn.parallel.DistributedDataParallel(network, device_ids=devices)


def convert_sync_batch_norm(network: OpalNetwork) -> OpalNetwork:
    """Batch statistics over all processes' shares, as one process with the whole batch has them; GPUs only."""
    found: OpalNetwork = nn.SyncBatchNorm.convert_sync_batchnorm(network)  # type: ignore[no-untyped-call]
    return found
