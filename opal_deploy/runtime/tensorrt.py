"""TensorRT, its lean runtime and TensorRT for RTX: their Python bindings, and which engines run on which GPUs.

All have one API under their own import names; the lean runtime has only the part that runs engines. Compatibility is
read from an engine's sidecar: TensorRT crashes or misbehaves on engines of other versions and GPUs, so it is checked
before native code sees the engine.
"""

from __future__ import annotations

import importlib
import platform
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from opal_deploy.artifact.engine_file import Sidecar
from opal_deploy.errors import MissingExtra, UsageError, first_line, install_command
from opal_deploy.runtime.cuda import CUDA_VERSION, visible_driver
from opal_deploy.runtime.devices import Driver, Gpu
from opal_deploy.runtime.diagnostics import tensorrt_version

T = TypeVar("T")
TENSORRT = "tensorrt"
TENSORRT_LEAN = "tensorrt-lean"
TENSORRT_RTX = "tensorrt-rtx"
# the name of each builder in file names, and of each library as an extra of opal-deploy and for people
SHORT_NAMES = {TENSORRT: "trt", TENSORRT_RTX: "rtx"}
EXTRAS = {TENSORRT: "trt", TENSORRT_LEAN: "trt-lean", TENSORRT_RTX: "trt-rtx"}
TITLES = {TENSORRT: "TensorRT", TENSORRT_LEAN: "TensorRT's lean runtime", TENSORRT_RTX: "TensorRT for RTX"}

# NVIDIA's table of compute capabilities (developer.nvidia.com/cuda-gpus): the data centres' GPUs and some others
_GPUS = {
    "sm75": ("t4", "rtx2080ti", "rtx6000", "rtx8000"),
    "sm80": ("a100", "a30", "a800"),
    "sm86": ("a10", "a10g", "a2", "a16", "a40", "a6000", "rtxa6000", "rtx3080", "rtx3090"),
    "sm89": ("l4", "l40", "l40s", "l20", "rtx6000ada", "rtx4080", "rtx4090"),
    "sm90": ("h100", "h200", "h800", "h20", "gh200"),
    "sm100": ("b100", "b200", "gb200"),
    "sm120": ("rtx5080", "rtx5090", "rtxpro6000"),
    "sm121": ("gb10", "dgxspark"),
}
_BY_NAME = {name: sm for sm, names in _GPUS.items() for name in names}

# what TensorRT for RTX builds without a GPU
AHEAD_OF_TIME = ("sm75", "sm80", "sm86", "sm89", "sm120", "sm121")
DEFAULT_TARGET = "sm80"


@dataclass(frozen=True)
class Bindings:
    """A loaded library, `tensorrt`, `tensorrt-lean` or `tensorrt-rtx`.

    `version` is the full one, such as 11.4.0.106: engines are bound to it.
    """

    name: str
    module: Any
    version: str

    @property
    def title(self) -> str:
        """The library's name and version, for messages."""
        return f"{TITLES[self.name]} {self.version}"


def installed_version(name: str) -> str | None:
    """Return the full version of an installed library, without importing it; None if any part of it is missing."""
    return tensorrt_version(name) if name in TITLES else None


def load(name: str, purpose: str) -> Bindings:
    """Import `tensorrt`, `tensorrt-lean` or `tensorrt-rtx`.

    Raises:
        MissingExtra: the library is not installed; `purpose` says what needs it.
        UsageError: it is installed, but does not load.
    """
    if installed_version(name) is None:
        raise MissingExtra(f"{name}-cu13", EXTRAS[name], purpose)
    try:
        module = importlib.import_module(name.replace("-", "_"))
    except Exception as error:  # a missing library is FileNotFoundError, OSError or ImportError
        raise UsageError(f"{TITLES[name]} does not load ({first_line(error)}); see `opal-deploy doctor`") from None
    return Bindings(name, module, str(module.__version__))


def make_logger(module: Any) -> Any:
    """Return a logger for a bindings module; its `errors` are the messages of severity error or worse."""

    class Log(module.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            module.ILogger.__init__(self)
            self.errors: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            # called from native code: an exception here would end the process
            try:
                if str(getattr(severity, "name", severity)) in ("ERROR", "INTERNAL_ERROR"):
                    self.errors.append(" ".join(message.split()))
            except Exception:
                pass

    return Log()


def attempt(logger: Any, call: Callable[..., T], *arguments: Any) -> T:
    """Call the library and return its result; if that reports a failure, `first_error` returns the reason."""
    # the errors of earlier calls, some of which go well in the end
    logger.errors.clear()
    return call(*arguments)


def first_error(logger: Any) -> str:
    """Return the first error of the last `attempt`, which names the cause; later errors follow from it."""
    return logger.errors[0][:300] if logger.errors else "it gave no reason"


def find_runtime(sidecar: Sidecar) -> tuple[str, str | None]:
    """Return the name of the library that runs an engine on this machine, and its version; None if it is not installed.

    That is the engine's builder, or for an engine of `export --lean` the lean runtime too. The version that built the
    engine comes first, then the lean runtime.
    """
    builder, built = str(sidecar.builder["name"]), sidecar.builder["version"]
    names = (TENSORRT_LEAN, builder) if sidecar.options.get("lean") else (builder,)
    versions = {name: installed_version(name) for name in names}
    return min(versions.items(), key=lambda item: (item[1] != built, item[1] is None))


def find_incompatibility(sidecar: Sidecar, gpu: Gpu | None, driver: Driver, version: str | None) -> str:
    """Return one line on why an engine cannot run on a machine; empty if it can.

    Checked in this order: builder and version, compute capability, driver. `gpu` is None without a GPU, `version` where
    no library that runs the engine is installed (see `find_runtime`).
    """
    name = str(sidecar.builder["name"])
    if gpu is None:
        return f"engines run only on NVIDIA GPUs: {driver.problem or 'none is here'}"
    if name not in TITLES:
        return f"it was built by {name!r}, which this version of opal-deploy does not know"
    needed, lean = f"{TITLES[name]} {sidecar.builder['version']}", sidecar.options.get("lean")
    if version is None:
        install = install_command(EXTRAS[TENSORRT_LEAN if lean else name])
        has_lean = name == TENSORRT and installed_version(TENSORRT_LEAN) is not None
        why = "; the lean runtime here runs only engines built with --lean" if has_lean else ""
        return f"it needs {needed}, which is not installed: {install}{why}"
    if sidecar.builder["version"] != version:
        advice = f": pip install {TENSORRT_LEAN}-cu13=={sidecar.builder['version']}" if lean else ""
        return f"it was built by {needed}, and {version} is installed here{advice}"
    platform_built_on = sidecar.builder.get("platform")
    if name == TENSORRT and platform_built_on not in (None, platform_name()):
        return f"it was built on {platform_built_on}, and this is {platform_name()}"
    target, present = str(sidecar.target["sm"]), sm_name(gpu.compute_capability)
    if target != present:
        return f"it was built for {describe_target(target)}, and {gpu.name} is {present}"
    if driver.cuda is not None and driver.cuda < CUDA_VERSION:
        oldest, newest = (".".join(map(str, version)) for version in (CUDA_VERSION, driver.cuda))
        return f"it needs CUDA {oldest}, and driver {driver.version} runs CUDA {newest} at most; update the driver"
    return ""


def platform_name() -> str:
    """Return this machine's system and processor, such as `Linux x86_64`, to which TensorRT engines are bound."""
    return f"{platform.system()} {platform.machine()}"


def find_incompatibility_here(sidecar: Sidecar, index: int) -> str:
    """Return why an engine cannot run on one of the GPUs that CUDA shows this process; empty if it can."""
    driver = visible_driver()
    gpu = next((gpu for gpu in driver.gpus if gpu.index == index), None)
    return find_incompatibility(sidecar, gpu, driver, find_runtime(sidecar)[1])


def parse_target(text: str) -> str:
    """Return `sm80` and the like for `sm80`, `8.0`, or a GPU's name such as `a100` or `RTX 4090`; else UsageError."""
    name = re.sub(r"[\s_-]", "", text.lower())
    for brand in ("nvidia", "geforce", "tesla"):
        name = name.removeprefix(brand)
    if re.fullmatch(r"sm\d{2,3}", name):
        return name
    if match := re.fullmatch(r"(\d{1,2})\.(\d)", name):
        return f"sm{match[1]}{match[2]}"
    if name in _BY_NAME:
        return _BY_NAME[name]
    known = "a100, a10, l4, l40s, t4, rtx4090, h100"
    raise UsageError(
        f"--target {text!r}: unknown GPU; give a compute capability such as sm80, or a name such as {known}"
    )


def sm_name(compute_capability: tuple[int, int]) -> str:
    """Return `sm80` for (8, 0)."""
    return f"sm{compute_capability[0]}{compute_capability[1]}"


def describe_target(sm: str) -> str:
    """Return a compute capability with two GPUs that have it, such as `sm80 (A100, A30)`."""
    examples = ", ".join(name.upper() for name in _GPUS.get(sm, ())[:2])
    return f"{sm} ({examples})" if examples else sm
