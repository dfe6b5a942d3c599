"""Which builder makes the engine, and for which GPU: the rule of `opal-deploy export --trt`.

1. TensorRT, where it and a GPU are present and the target is that GPU: an engine for the machine it is built on.
2. Otherwise TensorRT for RTX, ahead of time, which needs no GPU: for every --target, by default the GPU present, by
   default sm80.
3. Otherwise one line with what to install.

`--builder` forces one of the two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from opal_deploy.errors import MissingExtra, UsageError
from opal_deploy.runtime.probe import Driver, Gpu
from opal_deploy.runtime.tensorrt.bindings import EXTRAS, TENSORRT, TENSORRT_RTX, TITLES, installed_version
from opal_deploy.runtime.tensorrt.targets import AHEAD_OF_TIME, DEFAULT_TARGET, examples, parse_target, sm_of

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
    here = sm_of(gpu.compute_capability) if gpu else None
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
        like = f" ({examples(target)})" if examples(target) else ""
        raise UsageError(
            f"{target}{like}: {TITLES[TENSORRT_RTX]} builds for {', '.join(AHEAD_OF_TIME)}; install TensorRT on that "
            "machine (pip install 'opal-deploy[trt]') and run this command there with the ONNX file, or run the fp16 "
            "ONNX file there with ONNX Runtime (pip install 'opal-deploy[gpu]')"
        )
    if target == here:
        return Choice(TENSORRT_RTX, target, gpu, f"ahead of time, for the GPU that is here ({gpu.name if gpu else ''})")
    why = "no GPU here" if gpu is None else f"not the GPU that is here, {here}"
    return Choice(TENSORRT_RTX, target, None, f"ahead of time: {why}")
