"""Settings that a run derives from its machine, and the machine's description in config.json."""

from __future__ import annotations

import contextlib
import multiprocessing
import platform
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import nn

from opal_deploy._version import __version__
from opal_deploy.artifact.files import compute_sha256
from opal_deploy.errors import UsageError
from opal_deploy.model import backbones
from opal_deploy.model.network import OpalNetwork
from opal_deploy.runtime.devices import available_cpus
from opal_deploy.train.recipe import TrainingPrecision

# more processes than this only wait for one GPU
_MAX_WORKERS = 8


def default_num_workers(device: torch.device, cached: bool) -> int:
    """Return the number of processes that prepare images.

    On a CPU none where images are cached: augmenting is a few per cent of an epoch, and processes would take the
    network's cores; otherwise one, which prefetches. On a GPU all cores but one, at most 8. None where a process would
    import the caller's script, which then would train again unless the call is under `if __name__ == "__main__":`.
    """
    if _spawns_processes() and "opal_deploy.cli" not in sys.modules:
        return 0
    if device.type == "cpu":
        return 0 if cached or available_cpus() == 1 else 1
    return max(1, min(available_cpus() - 1, _MAX_WORKERS))


def _spawns_processes() -> bool:
    """Return whether a new process imports the main module again (macOS, Windows); changes no setting."""
    # the first is the default
    method = multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]
    return method != "fork"


def set_tf32(enabled: bool) -> None:
    """Allow TF32 in float32 arithmetic, or forbid it, which overrides PyTorch's own defaults."""
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
        if precision == "fp16" and device.type == "cpu":
            raise UsageError("precision fp16 on a CPU: use bf16 or fp32, or a GPU")
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
    """Return where the backbone's first weights came from, the sha256 of their file, and what their makers say."""
    if weights is None:
        return {"origin": "random"}
    name = network.config.backbone
    library = backbones.get_library(name)
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
