"""Options of a TensorRT build, and the choice of builder and GPU by the rule of `opal-deploy export --trt`.

1. TensorRT, where it and a GPU are present and the target is that GPU: an engine for the machine it is built on.
2. Otherwise TensorRT for RTX, ahead of time, which needs no GPU: for every --target, by default the GPU present, by
   default sm80.
3. Otherwise one line with what to install.

`--builder` forces one of the two.
"""

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
    UNLISTED,
    example_gpus,
    parse_target,
    sm_name,
)

# receives (phase, steps done, steps in all); raising KeyboardInterrupt ends the build
OnProgress = Callable[[str, int, int], None]
# receives (severity, message) of the builder
OnMessage = Callable[[str, str], None]

DEFAULT_BATCH = BatchRange(1, 64, 256)
# the target that stands for the GPU present, whatever it is: TensorRT for RTX may or may not know it
CURRENT = "current"
# buffers for the largest batch are kept on the device and in pinned memory
_MAX_BATCH = 4096
_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30}


@dataclass(frozen=True)
class BuildOptions:
    """The options of an engine's build; None leaves an option to the builder.

    Attributes:
        batch: batch sizes that the engine takes, and the one to tune for.
        workspace: bytes of device memory that one layer may use while it runs.
        timing_cache: file that keeps how fast each kernel was, read before and written after the build.
        optimization_level: 0 (builds fastest) to 5 (runs fastest).
        version_compatible: newer libraries of the same major version can run the engine.
        hardware_compatible: `ampere+` or `same` (all GPUs of one compute capability); None: the GPU it is built on.
        strip_weights: leave the weights out; loading puts them back from the ONNX file.
        refit: keep the weights replaceable.
    """

    batch: BatchRange = DEFAULT_BATCH
    workspace: int | None = None
    timing_cache: Path | None = None
    optimization_level: int | None = None
    version_compatible: bool = False
    hardware_compatible: str | None = None
    strip_weights: bool = False
    refit: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Return the options that change the engine, for the sidecar; the timing cache does not."""
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

    def check_builder(self, builder: str, *, gpu: bool) -> None:
        """Raise UsageError, with the option and the reason, for an option that a builder does not have.

        Args:
            builder: `tensorrt` or `tensorrt-rtx`.
            gpu: whether the machine has a GPU.
        """
        if builder != TENSORRT_RTX:
            return
        title = TITLES[builder]
        missing = {
            "--timing-cache": self.timing_cache is not None,
            "--version-compatible": self.version_compatible,
            "--hardware-compatible": self.hardware_compatible is not None,
        }
        for option, requested in missing.items():
            if requested:
                raise UsageError(
                    f"{option}: {title} has no such option (its engines are compiled on the GPU that runs them); "
                    "leave it out, or build with --builder tensorrt on a machine with a GPU"
                )
        for option, requested in {"--strip-weights": self.strip_weights, "--refit": self.refit}.items():
            if requested and not gpu:
                raise UsageError(f"{option}: {title} needs a GPU here for that; leave it out")


@dataclass(frozen=True)
class EngineTarget:
    """The builder and GPU of one engine.

    Attributes:
        builder: `tensorrt` or `tensorrt-rtx`.
        sm: compute capability, such as `sm80`.
        gpu: the GPU present, if the engine is for it.
        reason: why this builder and this GPU, for people.
        current: ask the builder for the GPU present instead of naming a compute capability.
    """

    builder: str
    sm: str
    gpu: Gpu | None
    reason: str
    current: bool = False


@dataclass(frozen=True)
class EngineRequest:
    """The engines to build from one ONNX file.

    Attributes:
        targets: builder and GPU of each engine.
        folder: where engines and sidecars go.
        driver: the machine's driver and GPUs.
        build: options of every build.
        rebuild: build even where the same engine is there already.
        overwrite: replace engines that are there and are others.
        on_message: receives everything that the builder logs.
        on_progress: receives the builder's progress.

    Raises:
        UsageError: a builder does not have one of the options.
    """

    targets: Sequence[EngineTarget]
    folder: Path
    driver: Driver
    build: BuildOptions = BuildOptions()
    rebuild: bool = False
    overwrite: bool = True
    on_message: OnMessage | None = None
    on_progress: OnProgress = lambda *_: None

    def __post_init__(self) -> None:
        for target in self.targets:
            self.build.check_builder(target.builder, gpu=bool(self.driver.gpus))


def parse_batch(text: str) -> BatchRange:
    """Return the batch sizes of `1:64:256`, or of `64` for one fixed size.

    Raises:
        UsageError: another text, or sizes out of order or range.
    """
    parts = text.split(":")
    if len(parts) not in (1, 3) or not all(part.isdecimal() for part in parts):
        raise UsageError(f"--batch {text!r}: expected MIN:OPT:MAX such as 1:64:256, or one number for a fixed size")
    sizes = [int(part) for part in (parts * 3 if len(parts) == 1 else parts)]
    if not 1 <= sizes[0] <= sizes[1] <= sizes[2] <= _MAX_BATCH:
        raise UsageError(f"--batch {text!r}: expected 1 <= MIN <= OPT <= MAX <= {_MAX_BATCH}")
    return BatchRange(*sizes)


def parse_bytes(text: str) -> int:
    """Return the bytes of `4G`, `512M` or `1073741824`, between 1 MiB and 1024 GiB.

    Raises:
        UsageError: another text, or a size out of range.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg]?)(?:i?b)?", text.strip().lower())
    if not match or float(match[1]) <= 0:
        raise UsageError(f"--workspace {text!r}: expected a size such as 512M or 4G")
    size = int(float(match[1]) * _UNITS[match[2]])
    if not 1 << 20 <= size <= 1 << 40:
        raise UsageError(f"--workspace {text!r}: expected between 1M and 1024G")
    return size


def choose_engine_targets(
    builder: str | None,
    names: Sequence[str],
    driver: Driver,
    version_of: Callable[[str], str | None] = installed_version,
) -> list[EngineTarget]:
    """Return the engines to build by the module's rule, one a GPU, each GPU once.

    Args:
        builder: `tensorrt`, `tensorrt-rtx`, or None for the rule.
        names: GPUs as the user named them; empty for the default.
        driver: the machine's driver and GPUs.
        version_of: returns the installed version of a builder, None if it is missing.

    Raises:
        MissingExtra: the builder that is needed is not installed.
        UsageError: no builder here can build for a GPU.
    """
    gpu = driver.gpus[0] if driver.gpus else None
    here = sm_name(gpu.compute_capability) if gpu else None
    chosen = list(dict.fromkeys(CURRENT if name == CURRENT else parse_target(name) for name in names))
    if CURRENT in chosen and gpu is None:
        raise UsageError(f"--target {CURRENT}: no GPU here ({driver.problem}); name a target such as sm80")
    if builder != TENSORRT_RTX and version_of(TENSORRT) is not None and gpu is not None:
        if all(sm in (here, CURRENT) for sm in chosen):
            return [EngineTarget(TENSORRT, str(here), gpu, f"{TITLES[TENSORRT]} and a GPU are here ({gpu.name})")]
        if builder == TENSORRT:
            others = ", ".join(sm for sm in chosen if sm != here)
            raise UsageError(
                f"--target {others}: {TITLES[TENSORRT]} builds for the GPU that is here, {gpu.name} ({here}); run this "
                "command on that other GPU, or use --builder tensorrt-rtx"
            )
    if builder == TENSORRT:
        if version_of(TENSORRT) is None:
            raise MissingExtra("tensorrt-cu13 with its libraries", EXTRAS[TENSORRT], "--builder tensorrt")
        raise UsageError(
            f"--builder tensorrt: it builds on the GPU that is to run the engine: {driver.problem or 'none is here'}; "
            "copy the ONNX file there, or use --builder tensorrt-rtx"
        )
    if version_of(TENSORRT_RTX) is None:
        tensorrt = "" if gpu is None else "; or TensorRT for the GPU that is here: pip install 'opal-deploy[trt]'"
        raise UsageError(
            "export --trt needs TensorRT for RTX, which builds engines with or without a GPU: "
            f"pip install 'opal-deploy[{EXTRAS[TENSORRT_RTX]}]'{tensorrt}"
        )
    return [_ahead_of_time(sm, gpu, here) for sm in chosen or [here or DEFAULT_TARGET]]


def _ahead_of_time(sm: str, gpu: Gpu | None, here: str | None) -> EngineTarget:
    if sm == CURRENT:
        return EngineTarget(TENSORRT_RTX, str(here), gpu, f"--target {CURRENT}, the GPU that is here", current=True)
    if int(sm.removeprefix("sm")) < 75:
        raise UsageError(f"{sm}: what is built for CUDA 13 runs on sm75 and newer; use the ONNX file on a CPU")
    if sm not in AHEAD_OF_TIME:
        like = f" ({example_gpus(sm)})" if example_gpus(sm) else ""
        raise UsageError(
            f"{sm}{like}: {TITLES[TENSORRT_RTX]} builds for {', '.join(AHEAD_OF_TIME)}; install TensorRT on that "
            "machine (pip install 'opal-deploy[trt]') and run this command there with the ONNX file, or run the fp16 "
            "ONNX file there with ONNX Runtime (pip install 'opal-deploy[gpu]')"
        )
    if sm == here and gpu is not None:
        reason = f"ahead of time, for the GPU that is here ({gpu.name})"
        if sm == UNLISTED:
            reason += (
                f"; NVIDIA does not list {sm} for {TITLES[TENSORRT_RTX]}: where ONNX Runtime can use the GPU, infer "
                "prefers the ONNX file; install TensorRT for an engine that is sure to run (pip install "
                "'opal-deploy[trt]')"
            )
        return EngineTarget(TENSORRT_RTX, sm, gpu, reason)
    why = "no GPU here" if gpu is None else f"not the GPU that is here, {here}"
    return EngineTarget(TENSORRT_RTX, sm, None, f"ahead of time: {why}")
