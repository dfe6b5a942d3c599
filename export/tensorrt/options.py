"""What an engine's builder may be told, and which builder knows what."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opal_deploy.artifact.engine_file import BatchRange
from opal_deploy.errors import UsageError
from opal_deploy.runtime.tensorrt.bindings import TENSORRT_RTX, TITLES

DEFAULT_BATCH = BatchRange(1, 64, 256)

# buffers for MAX pictures are kept on the device and in pinned memory
_MOST = 4096
_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30}


@dataclass(frozen=True)
class BuildOptions:
    """How an engine is built; what is None is left to the builder.

    Attributes:
        batch: the batch sizes that it must take, and the one to tune for.
        workspace: bytes of device memory that one layer may use while it runs.
        timing_cache: a file that keeps how fast each kernel was, read before and written after the build.
        optimization_level: 0 (builds fastest) to 5 (runs fastest).
        version_compatible: newer libraries of the same major version can run it.
        hardware_compatible: `ampere+` or `same` (all GPUs of one compute capability); None: the GPU it is built on.
        strip_weights: leave the weights out; they are put back from the ONNX file when it is loaded.
        refit: keep it possible to replace the weights.
    """

    batch: BatchRange = DEFAULT_BATCH
    workspace: int | None = None
    timing_cache: Path | None = None
    optimization_level: int | None = None
    version_compatible: bool = False
    hardware_compatible: str | None = None
    strip_weights: bool = False
    refit: bool = False

    def recorded(self) -> dict[str, Any]:
        """For the sidecar: what changes the engine, so not the timing cache."""
        return {
            "batch": [self.batch.least, self.batch.best, self.batch.most],
            "workspace": self.workspace,
            "optimization_level": self.optimization_level,
            "version_compatible": self.version_compatible,
            "hardware_compatible": self.hardware_compatible,
            "strip_weights": self.strip_weights,
            "refit": self.refit,
            "tf32": False,
        }

    def check_for(self, builder: str, *, gpu: bool) -> None:
        """Refuse what a builder does not have, before it fails in the middle.

        Args:
            builder: `tensorrt` or `tensorrt-rtx`.
            gpu: whether the machine has a GPU.

        Raises:
            UsageError: with the option and the reason.
        """
        if builder != TENSORRT_RTX:
            return
        title = TITLES[builder]
        absent = {
            "--timing-cache": self.timing_cache is not None,
            "--version-compatible": self.version_compatible,
            "--hardware-compatible": self.hardware_compatible is not None,
        }
        for option, given in absent.items():
            if given:
                raise UsageError(
                    f"{option}: {title} has no such thing (its engines are compiled on the GPU that runs them); "
                    "leave it out, or build with --builder tensorrt on a machine with a GPU"
                )
        for option, given in {"--strip-weights": self.strip_weights, "--refit": self.refit}.items():
            if given and not gpu:
                raise UsageError(f"{option}: {title} needs a GPU here for that; leave it out")


def parse_batch(text: str) -> BatchRange:
    """`1:64:256`, or `64` for one fixed size.

    Raises:
        UsageError: something else.
    """
    parts = text.split(":")
    if len(parts) not in (1, 3) or not all(part.isdecimal() for part in parts):
        raise UsageError(f"--batch {text!r}: expected MIN:OPT:MAX such as 1:64:256, or one number for a fixed size")
    sizes = [int(part) for part in (parts * 3 if len(parts) == 1 else parts)]
    if not 1 <= sizes[0] <= sizes[1] <= sizes[2] <= _MOST:
        raise UsageError(f"--batch {text!r}: expected 1 <= MIN <= OPT <= MAX <= {_MOST}")
    return BatchRange(*sizes)


def parse_bytes(text: str) -> int:
    """`4G`, `512M`, `1073741824` to bytes.

    Raises:
        UsageError: something else.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg]?)(?:i?b)?", text.strip().lower())
    if not match or float(match[1]) <= 0:
        raise UsageError(f"--workspace {text!r}: expected a size such as 512M or 4G")
    size = int(float(match[1]) * _UNITS[match[2]])
    if not 1 << 20 <= size <= 1 << 40:
        raise UsageError(f"--workspace {text!r}: expected between 1M and 1024G")
    return size
