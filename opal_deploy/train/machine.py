"""The processes, device and precision of a run, by Lightning Fabric.

Under torchrun every process works on its share of each global batch. Sums over all shares make losses, gradients and
metrics equal to one process's with the whole batch. The first process writes.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from lightning_fabric import Fabric
from lightning_fabric.plugins.environments.lightning import LightningEnvironment
from lightning_fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from torch import Tensor, distributed, nn

from opal_deploy.errors import StoppedEarly, UsageError
from opal_deploy.runtime.devices import available_cpus
from opal_deploy.runtime.torch_session import torch_device

# cores that prepare no images: one feeds the GPU, one is left to everything else
_OTHER_CORES = 2
_PRECISIONS: dict[str, Literal["32-true", "bf16-mixed", "16-mixed"]] = {
    "fp32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"
}  # fmt: skip


def start_fabric(device: str, precision: str) -> tuple[Fabric, str]:
    """Join the processes that torchrun started, or only this one; return them and the precision's name.

    With several processes each takes the GPU of its local rank. The precision `auto` is float32 on a CPU; on a GPU
    bfloat16 where it is native, else float16.

    UsageError: no such device, or fewer GPUs than processes.
    """
    size, local_size = int(os.environ.get("WORLD_SIZE", "1")), local_processes()
    chosen = torch_device(device)
    devices: int | list[int] = local_size if size > 1 else 1
    if chosen.type == "cuda" and size == 1:
        devices = [chosen.index or 0]
    elif chosen.type == "cuda" and (device not in ("auto", "cuda") or local_size > torch.cuda.device_count()):
        raise UsageError(
            f"device {device!r} for {local_size} processes on this machine, which has {torch.cuda.device_count()} GPUs;"
            " give cuda and start one process per GPU: each takes a GPU of its own"
        )
    if precision == "auto":
        has_bf16 = chosen.type == "cuda" and torch.cuda.get_device_capability(chosen) >= (8, 0)
        precision = "fp32" if chosen.type != "cuda" else "bf16" if has_bf16 else "fp16"
    # it would announce every process and precision
    logging.getLogger("lightning_fabric").setLevel(logging.WARNING)
    fabric = Fabric(
        accelerator=chosen.type, devices=devices, num_nodes=max(size // local_size, 1),
        strategy="ddp" if size > 1 else "auto", precision=_PRECISIONS[precision],
        # torchrun only: a run inside a Slurm job is one process unless torchrun starts more
        plugins=[TorchElasticEnvironment() if size > 1 else LightningEnvironment()],
    )  # fmt: skip
    fabric.launch()
    return fabric, precision


def local_processes() -> int:
    """Return the number of the run's processes on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def sum_over_processes(fabric: Fabric, *values: float) -> list[float]:
    """Return each value summed over all processes, in float64."""
    sums: Any = fabric.all_reduce(torch.tensor(values, dtype=torch.float64, device=fabric.device), reduce_op="sum")
    return list(sums.tolist())


def gather(fabric: Fabric | None, value: Any) -> list[Any]:
    """Return the values of all processes, by rank."""
    if fabric is None or fabric.world_size == 1:
        return [value]
    values: list[Any] = [None] * fabric.world_size
    distributed.all_gather_object(values, value)
    return values


def share_buffers(fabric: Fabric, module: nn.Module) -> None:
    """Give every process the first one's buffers (running batch statistics)."""
    if fabric.world_size > 1:
        for buffer in module.buffers():
            distributed.broadcast(buffer, 0)


def average_gradients(fabric: Fabric, parameters: list[nn.Parameter]) -> None:
    """Average the gradients of parameters that Fabric does not wrap over all processes."""
    if fabric.world_size > 1:
        for gradient in (parameter.grad for parameter in parameters if parameter.grad is not None):
            distributed.all_reduce(gradient)
            gradient /= fabric.world_size


def default_num_workers(device: torch.device, cached: bool) -> int:
    """Return the number of processes that prepare images for one process of the run.

    On a CPU none where images are cached, since they would take the network's cores; otherwise one, which prefetches.
    On a GPU its share of the machine's cores but two, at least one.
    """
    if device.type == "cpu":
        return 0 if cached or available_cpus() == 1 else 1
    return max(1, available_cpus() // local_processes() - _OTHER_CORES)


def set_tf32(enabled: bool) -> None:
    """Allow or forbid TF32 in float32 arithmetic, whatever PyTorch's own defaults."""
    torch.set_float32_matmul_precision("high" if enabled else "highest")
    torch.backends.cudnn.allow_tf32 = enabled


def get_random_state(device: torch.device) -> dict[str, Tensor]:
    """Return the state of this process's torch generators, which stochastic depth and dropout draw from."""
    cuda = {"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {}
    return {"cpu": torch.get_rng_state(), **cuda}


def set_random_state(state: dict[str, Tensor], device: torch.device) -> None:
    """Restore what `get_random_state` returned."""
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)


@contextmanager
def explained_memory_errors() -> Iterator[None]:
    """Turn errors for lack of memory into StoppedEarly."""
    try:
        yield
    except RuntimeError as error:
        # torch.OutOfMemoryError on a GPU, and texts without a class of their own on a CPU and of a killed worker
        if not any(text in str(error) for text in ("out of memory", "allocate", "DataLoader worker")):
            raise
        raise StoppedEarly(
            "out of memory; close other programs and repeat the command with --resume and --workers 0, or start again "
            "with --overwrite and a smaller --batch-size or --size"
        ) from None
