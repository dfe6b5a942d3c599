"""One process, or several that torchrun started: ranks, devices, and collective operations.

Every process works on its share of each global batch; sums over all shares make losses, gradients and metrics those of
one process with the whole batch. The first process writes.
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
from opal_deploy.model.backbones import get_library
from opal_deploy.model.network import OpalNetwork
from opal_deploy.runtime.torch_session import torch_device


def is_main_process() -> bool:
    """Return whether this process prints and writes; known before the processes join."""
    return int(os.environ.get("RANK", "0")) == 0


@dataclass(frozen=True)
class ProcessGroup:
    """The processes of one run.

    Attributes:
        device: the device that this process computes on.
        rank: this process, 0 ... size-1.
        size: the number of processes.
    """

    device: torch.device
    rank: int = 0
    size: int = 1

    @property
    def is_main(self) -> bool:
        """Whether this process writes files and prints."""
        return self.rank == 0

    def all_reduce_sum(self, *values: float) -> list[float]:
        """Return each value summed over all processes, in float64."""
        if self.size == 1:
            return list(values)
        sums = torch.tensor(values, dtype=torch.float64, device=self.device)
        distributed.all_reduce(sums)
        return [float(value) for value in sums.tolist()]

    def all_gather(self, value: Any) -> list[Any]:
        """Return the values of all processes, by rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        distributed.all_gather_object(values, value)
        return values

    def broadcast_buffers(self, module: nn.Module) -> None:
        """Give every process the first one's buffers (running batch statistics)."""
        if self.size > 1:
            for buffer in module.buffers():
                distributed.broadcast(buffer, 0)

    def barrier(self) -> None:
        """Wait until every process has come here."""
        if self.size > 1:
            distributed.barrier()


@contextmanager
def join_process_group(device: str) -> Iterator[ProcessGroup]:
    """Yield the group of all processes that torchrun started, or of this process alone.

    Args:
        device: `auto`, `cpu`, `cuda` or `cuda:1`; with several processes each takes the GPU of its local rank.

    Raises:
        UsageError: no such device, or fewer GPUs than processes.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        yield ProcessGroup(torch_device(device))
        return
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    chosen = torch_device(device)
    if chosen.type == "cuda":
        if device not in ("auto", "cuda"):
            raise UsageError(f"device {device!r} for {size} processes: give cuda, and each takes a GPU of its own")
        if local_rank >= torch.cuda.device_count():
            raise UsageError(
                f"{local_rank + 1} processes or more on this machine, which has {torch.cuda.device_count()} GPUs; "
                "start one a GPU (torchrun --nproc-per-node)"
            )
        chosen = torch.device("cuda", local_rank)
        torch.cuda.set_device(chosen)
    distributed.init_process_group("nccl" if chosen.type == "cuda" else "gloo")
    try:
        yield ProcessGroup(chosen, distributed.get_rank(), distributed.get_world_size())
    finally:
        distributed.destroy_process_group()


def wrap_ddp(network: nn.Module, group: ProcessGroup) -> nn.Module:
    """Return the network for training: with several processes, gradients are averaged over them."""
    if group.size == 1:
        return network
    devices = [group.device] if group.device.type == "cuda" else None
    return nn.parallel.DistributedDataParallel(network, device_ids=devices)


def convert_sync_batch_norm(network: OpalNetwork) -> OpalNetwork:
    """Return the network with batch statistics over all processes, as one process with the whole batch; GPUs only."""
    get_library(network.config.backbone).convert_sync_batch_norm(network)
    return network
