"""The machine of a run: its processes and devices, precision, workers, and their description in config.json.

Under torchrun every process works on its share of each global batch. Sums over all shares make losses, gradients and
metrics equal to one process's with the whole batch. The first process writes.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import platform
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn

from opal_deploy._version import __version__
from opal_deploy.artifact.files import compute_sha256
from opal_deploy.errors import UsageError
from opal_deploy.model.backbones import get_library
from opal_deploy.model.network import OpalNetwork
from opal_deploy.runtime.devices import available_cpus
from opal_deploy.runtime.torch_session import torch_device
from opal_deploy.train.recipe import TrainingPrecision, check_precision

# cores that prepare no images: one feeds the GPU, one is left to everything else
_OTHER_CORES = 2


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
        local_size: the number of them on this machine.
    """

    device: torch.device
    rank: int = 0
    size: int = 1
    local_size: int = 1

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
        """Wait until every process has reached this call."""
        if self.size > 1:
            distributed.barrier()

    def wrap_ddp(self, network: nn.Module) -> nn.Module:
        """Return the network for training, on the device: with several processes, gradients are averaged over them."""
        network = network.to(self.device)
        if self.size == 1:
            return network
        devices = [self.device] if self.device.type == "cuda" else None
        return nn.parallel.DistributedDataParallel(network, device_ids=devices)


@contextlib.contextmanager
def join_process_group(device: str) -> Iterator[ProcessGroup]:
    """Yield the group of all processes that torchrun started, or of this process only.

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
                "start one per GPU (torchrun --nproc-per-node)"
            )
        chosen = torch.device("cuda", local_rank)
        torch.cuda.set_device(chosen)
    if chosen.type == "cuda":
        # without the device NCCL guesses it at the first barrier, and connects only then
        distributed.init_process_group("nccl", device_id=chosen)
    else:
        distributed.init_process_group("gloo")
    try:
        local_size = int(os.environ.get("LOCAL_WORLD_SIZE", size))
        yield ProcessGroup(chosen, distributed.get_rank(), distributed.get_world_size(), local_size)
    finally:
        distributed.destroy_process_group()


def default_num_workers(group: ProcessGroup, cached: bool) -> int:
    """Return the number of processes that prepare images for one process of the run.

    On a CPU none where images are cached: augmenting takes a few per cent of an epoch, and processes would take the
    network's cores; otherwise one, which prefetches. On a GPU its share of the machine's cores but two, at least one.
    None where a process would import the caller's script, which trains again unless the call is under
    `if __name__ == "__main__":`.
    """
    # macOS and Windows spawn; asking for the start method must not set it, and the first one listed is the default
    method = multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]
    if method != "fork" and "opal_deploy.cli" not in sys.modules:
        return 0
    if group.device.type == "cpu":
        return 0 if cached or available_cpus() == 1 else 1
    return max(1, available_cpus() // group.local_size - _OTHER_CORES)


def set_tf32(enabled: bool) -> None:
    """Allow or forbid TF32 in float32 arithmetic, whatever PyTorch's own defaults."""
    torch.set_float32_matmul_precision("high" if enabled else "highest")
    torch.backends.cudnn.allow_tf32 = enabled


@dataclass(frozen=True)
class MixedPrecision:
    """Automatic mixed precision.

    Attributes:
        device_type: `cpu` or `cuda`.
        dtype: type of the convolutions; None is float32 throughout.
    """

    device_type: str
    dtype: torch.dtype | None

    @staticmethod
    def select(device: torch.device, precision: TrainingPrecision = "auto") -> MixedPrecision:
        """Return the precision for a device.

        `auto` is float32 on a CPU; on a GPU bfloat16 where the GPU computes it natively, else float16.

        Raises:
            UsageError: float16 on a CPU, which has no fast float16 arithmetic.
        """
        check_precision(precision, device.type)
        if precision == "auto":
            if device.type != "cuda":
                return MixedPrecision(device.type, None)
            native = torch.cuda.get_device_capability(device) >= (8, 0)
            return MixedPrecision(device.type, torch.bfloat16 if native else torch.float16)
        dtypes = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
        return MixedPrecision(device.type, dtypes[precision])

    @property
    def name(self) -> str:
        """fp32, bf16 or fp16."""
        return {None: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}[self.dtype]

    def autocast(self) -> contextlib.AbstractContextManager[None]:
        """Return the context of the forward pass."""
        if self.dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device_type, dtype=self.dtype)

    def build_scaler(self) -> torch.amp.GradScaler:
        """Return the loss scaler, which is enabled for float16 only."""
        return torch.amp.GradScaler(self.device_type, enabled=self.dtype == torch.float16)


def check_batch_norm(network: OpalNetwork, local_batch: int) -> None:
    """Raise UsageError where batch normalisation would see a single value per channel in a process's local batch."""
    normalizes = any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in network.modules())
    if normalizes and local_batch == 1 and network.grid == (1, 1):
        raise UsageError(
            f"batches of one image with a single cell in {network.config.backbone}: batch normalisation needs two "
            "values; give a larger --batch-size or --size"
        )


def describe_weights(network: OpalNetwork, weights: str | None) -> dict[str, Any]:
    """Return the origin of the backbone's initial weights, the sha256 of their file, and its library's details."""
    if weights is None:
        return {"origin": "random"}
    name = network.config.backbone
    library = get_library(name)
    path = Path(weights) if Path(weights).is_file() else library.find_downloaded(name, weights)
    details = library.get_pretrained_config(name, weights).details
    return {
        "origin": network.weights_origin,
        "sha256": None if path is None else compute_sha256(path),
        **({"pretrained_cfg": details} if details else {}),
    }


def package_versions() -> dict[str, str]:
    """Return the versions of Python and of all packages that a run's metrics depend on."""
    versions = {"opal-deploy": __version__, "python": platform.python_version()}
    for package in ("torch", "torchvision", "timm", "numpy", "pillow", "scikit-learn"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return versions
