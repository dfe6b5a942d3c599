"""The provenance of a measurement: processor, GPU, driver, libraries, command and time. No host or user names."""

from __future__ import annotations

import contextlib
import datetime
import functools
import os
import platform
import shlex
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from opal_deploy.runtime.devices import available_cpus, read_driver

# distributions whose versions affect the figures
_DISTRIBUTIONS = (
    "opal-deploy", "onnxruntime", "onnxruntime-gpu", "torch", "torchvision", "tensorrt-cu13", "tensorrt-rtx-cu13",
    "cuda-bindings", "numpy", "pillow",
)  # fmt: skip
_GOVERNOR = Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")


@functools.cache
def describe_machine() -> dict[str, Any]:
    """Return processor, cores, memory, GPUs, driver and versions."""
    driver = read_driver()
    facts: dict[str, Any] = {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "usable_cores": available_cpus(),
        "governor": _read(_GOVERNOR),
        "memory_gb": _memory_gb(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": _versions(),
    }
    if driver.gpus:
        facts["gpus"] = [
            {
                "name": gpu.name,
                "memory_gb": None if gpu.memory is None else round(gpu.memory / 1e9, 1),
                "compute_capability": ".".join(map(str, gpu.compute_capability)),
            }
            for gpu in driver.gpus
        ]
        facts["driver"] = driver.version
        facts["cuda"] = None if driver.cuda is None else ".".join(map(str, driver.cuda))
    return facts


def provenance() -> dict[str, Any]:
    """Return the fields of a `Measurement` that every benchmark fills alike: `machine`, `command`, `when`."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return {"machine": describe_machine(), "command": format_command_line(sys.argv), "when": now}


def format_command_line(arguments: Sequence[str]) -> str:
    """Return the command as it could be typed again, with file names instead of this machine's paths."""
    return shlex.join(["opal-deploy", *(_without_folder(argument) for argument in arguments[1:])])


def _without_folder(argument: str) -> str:
    option, equals, value = argument.partition("=")
    if equals and option.startswith("-"):
        return f"{option}={_without_folder(value)}"
    path = Path(argument)
    has_location = path.is_absolute() or argument.startswith("~") or ".." in path.parts
    return path.name if len(path.parts) > 1 and (has_location or _exists(path)) else argument


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # such as a name that is too long
        return False


def _versions() -> dict[str, str]:
    versions = {}
    for name in _DISTRIBUTIONS:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as stream:
            return next(line.split(":", 1)[1].strip() for line in stream if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or "unknown"


def _memory_gb() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1)
    except (AttributeError, ValueError, OSError):
        return None


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip() or None
    except OSError:
        return None
