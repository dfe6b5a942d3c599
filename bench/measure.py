"""How a measurement is told: every repeat, the median and the spread, and what machine it was."""

from __future__ import annotations

import os
import platform
import statistics
import sys
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from opal_deploy.runtime.onnx_session import available_cpus

# a spread over this is marked: the machine was not quiet
NOISY = 0.10


@dataclass(frozen=True)
class Rate:
    """Images per second over several repeats.

    Attributes:
        name: what was timed. repeats: one figure each, in the order measured.
    """

    name: str
    repeats: tuple[float, ...]

    @property
    def median(self) -> float:
        """Of the repeats."""
        return statistics.median(self.repeats)

    @property
    def spread(self) -> float:
        """(largest - smallest) / median."""
        return (max(self.repeats) - min(self.repeats)) / self.median

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "name": self.name, "unit": "images/s", "median": self.median, "spread": self.spread,
            "repeats": list(self.repeats), "noisy": self.spread > NOISY,
        }  # fmt: skip

    def line(self) -> str:
        """For a person."""
        note = ", NOISY" if self.spread > NOISY else ""
        return f"{self.name}: {self.median:.1f} images/s (spread {self.spread:.0%} over {len(self.repeats)}{note})"


def machine() -> dict[str, Any]:
    """Processor, cores and versions that the figures depend on."""
    versions = {}
    for package in ("opal-deploy", "onnxruntime", "onnxruntime-gpu", "tensorrt-rtx-cu13", "torch", "numpy", "pillow"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "usable_cores": available_cpus(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": versions,
        "command": " ".join(sys.argv[1:]),
    }


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as stream:
            return next(line.split(":", 1)[1].strip() for line in stream if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or "unknown"


def peak_megabytes() -> float:
    """Largest resident memory of this process so far.

    From /proc where there is one: `getrusage` of a child process counts the memory of its parent at the fork.
    """
    try:
        with open("/proc/self/status") as stream:
            return next(int(line.split()[1]) / 1024 for line in stream if line.startswith("VmHWM"))
    except (OSError, StopIteration):
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
