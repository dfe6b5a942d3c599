"""What an engine's builder may be told, and which builder knows what.

Which builder makes the engine, and for which GPU: the rule of `opal-deploy export --trt`.

1. TensorRT, where it and a GPU are present and the target is that GPU: an engine for the machine it is built on.
2. Otherwise TensorRT for RTX, ahead of time, which needs no GPU: for every --target, by default the GPU present, by
   default sm80.
3. Otherwise one line with what to install.

`--builder` forces one of the two."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opal_deploy.artifact.engine_file import BatchRange
from opal_deploy.errors import MissingExtra, UsageError
from opal_deploy.runtime.nvml import Driver, Gpu
from opal_deploy.runtime.tensorrt.bindings import EXTRAS, TENSORRT, TENSORRT_RTX, TITLES, installed_version
from opal_deploy.runtime.tensorrt.compatibility import (
    AHEAD_OF_TIME,
    DEFAULT_TARGET,
    example_gpus,
    parse_target,
    sm_name,
)

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
            "batch": [self.batch.min, self.batch.opt, self.batch.max],
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


# the GPU present, whatever it is: TensorRT for RTX may or may not know it
CURRENT = "current"


@dataclass(frozen=True)
class Choice:
    """One engine to build.

    Attributes:
        builder: `tensorrt` or `tensorrt-rtx`.
        target: such as `sm80`.
        gpu: the GPU present, if the engine is for it.
        reason: why this builder and this target, for people.
        current: ask the builder for the GPU present instead of naming a target.
    """

    builder: str
    target: str
    gpu: Gpu | None
    reason: str
    current: bool = False


def choose(
    wanted: str | None,
    targets: Sequence[str],
    driver: Driver,
    version_of: Callable[[str], str | None] = installed_version,
) -> list[Choice]:
    """The engines to build, one a target, each target once.

    Args:
        wanted: `tensorrt`, `tensorrt-rtx`, or None for the rule.
        targets: as given by the user; empty for the default.
        driver: the machine's.
        version_of: what is installed of a builder.

    Raises:
        MissingExtra: the builder that is needed is not installed. UsageError: it cannot build for a target.
    """
    gpu = driver.gpus[0] if driver.gpus else None
    here = sm_name(gpu.compute_capability) if gpu else None
    chosen = list(dict.fromkeys(CURRENT if text == CURRENT else parse_target(text) for text in targets))
    if CURRENT in chosen and gpu is None:
        raise UsageError(f"--target {CURRENT}: no GPU here ({driver.problem}); name a target such as sm80")
    if wanted != TENSORRT_RTX and version_of(TENSORRT) is not None and gpu is not None:
        if all(target in (here, CURRENT) for target in chosen):
            return [Choice(TENSORRT, str(here), gpu, f"{TITLES[TENSORRT]} and a GPU are here ({gpu.name})")]
        if wanted == TENSORRT:
            other = ", ".join(target for target in chosen if target != here)
            raise UsageError(
                f"--target {other}: {TITLES[TENSORRT]} builds for the GPU that is here, {gpu.name} ({here}); run this "
                "command on that other GPU, or use --builder tensorrt-rtx"
            )
    if wanted == TENSORRT:
        if version_of(TENSORRT) is None:
            raise MissingExtra("tensorrt-cu13 with its libraries", EXTRAS[TENSORRT], "--builder tensorrt")
        raise UsageError(
            f"--builder tensorrt: it builds on the GPU that is to run the engine: {driver.problem or 'none is here'}; "
            "copy the ONNX file there, or use --builder tensorrt-rtx"
        )
    if version_of(TENSORRT_RTX) is None:
        proper = "" if gpu is None else "; or TensorRT for the GPU that is here: pip install 'opal-deploy[trt]'"
        raise UsageError(
            "export --trt needs TensorRT for RTX, which builds engines with or without a GPU: "
            f"pip install 'opal-deploy[{EXTRAS[TENSORRT_RTX]}]'{proper}"
        )
    return [_ahead_of_time(target, gpu, here) for target in chosen or [here or DEFAULT_TARGET]]


def _ahead_of_time(target: str, gpu: Gpu | None, here: str | None) -> Choice:
    if target == CURRENT:
        return Choice(TENSORRT_RTX, str(here), gpu, "asked for the GPU that is here", current=True)
    if int(target.removeprefix("sm")) < 75:
        raise UsageError(f"{target}: what is built for CUDA 13 runs on sm75 and newer; use the ONNX file on a CPU")
    if target not in AHEAD_OF_TIME:
        like = f" ({example_gpus(target)})" if example_gpus(target) else ""
        raise UsageError(
            f"{target}{like}: {TITLES[TENSORRT_RTX]} builds for {', '.join(AHEAD_OF_TIME)}; install TensorRT on that "
            "machine (pip install 'opal-deploy[trt]') and run this command there with the ONNX file, or run the fp16 "
            "ONNX file there with ONNX Runtime (pip install 'opal-deploy[gpu]')"
        )
    if target == here:
        return Choice(TENSORRT_RTX, target, gpu, f"ahead of time, for the GPU that is here ({gpu.name if gpu else ''})")
    why = "no GPU here" if gpu is None else f"not the GPU that is here, {here}"
    return Choice(TENSORRT_RTX, target, None, f"ahead of time: {why}")
