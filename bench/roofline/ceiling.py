"""What a device could do at most, from its data sheet or measured, and what share of that a measurement reached."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Literal

from opal_deploy.bench.roofline.work import BYTES_PER_ELEMENT, Work
from opal_deploy.errors import UsageError

Bound = Literal["compute", "memory"]


@dataclass(frozen=True)
class Ceiling:
    """Of one device.

    Attributes:
        name: of the device.
        flops: FLOPs a second by precision, dense; int8 in integer operations. A precision that is not there is one
            that the device lacks, or that nobody measured.
        bytes_per_second: of its memory.
        source: the document, or what was timed.
        measured: timed on the device itself, not read from its data sheet.
    """

    name: str
    flops: Mapping[str, float]
    bytes_per_second: float
    source: str
    measured: bool = False

    def attainable(self, intensity: float, precision: str) -> float:
        """FLOPs a second at so many FLOPs per byte: the roofline.

        Raises:
            UsageError: the device has no figure for the precision.
        """
        return min(self.peak(precision), intensity * self.bytes_per_second)

    def peak(self, precision: str) -> float:
        """FLOPs a second of arithmetic alone. Raises UsageError as `attainable` does."""
        if precision not in self.flops:
            raise UsageError(f"{self.name} has no figure for {precision}; it has {', '.join(self.flops)}")
        return self.flops[precision]

    def ridge(self, precision: str) -> float:
        """FLOPs per byte from which arithmetic is the bound. Raises UsageError as `attainable` does."""
        return self.peak(precision) / self.bytes_per_second

    def images_per_second(self, work: Work, batch: int, precision: str) -> float:
        """Of a network at a batch. Raises UsageError as `attainable` does."""
        return batch * self.attainable(work.intensity(batch, precision), precision) / work.flops(batch)

    def bound(self, work: Work, batch: int, precision: str) -> Bound:
        """What limits it. Raises UsageError as `attainable` does."""
        return "compute" if work.intensity(batch, precision) >= self.ridge(precision) else "memory"


@dataclass(frozen=True)
class Share:
    """What part of its ceiling a measurement reached.

    Attributes:
        ceiling: images a second.
        fraction: measured over ceiling; over 1 if the ceiling does not hold, as when layers are fused or cached.
        bound: what limits the ceiling.
        source: the ceiling's.
    """

    ceiling: float
    fraction: float
    bound: Bound
    source: str


def share(
    work: Work,
    batch: int,
    precision: str,
    device_name: str,
    images_per_second: float,
    measured: Ceiling | None = None,
) -> Share | None:
    """Of a throughput; None where no ceiling is known for this device and precision.

    Args:
        work: of the network that was timed.
        batch, precision: that it was timed with.
        device_name: as NVML or CUDA names it, `cuda:0 ` before it or not.
        images_per_second: that it reached.
        measured: is used instead of a data sheet, where it has the precision.
    """
    sheet = device_named(device_name)
    for ceiling in (measured, sheet):
        if ceiling is not None and precision in ceiling.flops and precision in BYTES_PER_ELEMENT:
            most = ceiling.images_per_second(work, batch, precision)
            return Share(most, images_per_second / most, ceiling.bound(work, batch, precision), ceiling.source)
    return None


def device_named(name: str) -> Ceiling | None:
    """A known GPU by the name that NVML and CUDA give it, whole; None for any other.

    Part of a name is not enough: an L40 is not an L4, and a MIG instance is not its GPU.
    """
    wanted = _plain(name)
    for device in _table():
        if wanted in {_plain(known) for known in device.names}:
            return device.ceiling
    return None


def find_device(text: str) -> Ceiling:
    """What `--gpu` means: a short name such as `a100-80gb`, or a device's own.

    Raises:
        UsageError: not one of those known; it lists them.
    """
    for device in _table():
        if text.casefold() == device.key:
            return device.ceiling
    if found := device_named(text):
        return found
    raise UsageError(f"--gpu {text!r}: no figures for it; known are {', '.join(known_devices())}")


def known_devices() -> list[str]:
    """Short names, in the table's order."""
    return [device.key for device in _table()]


@dataclass(frozen=True)
class _Device:
    key: str
    names: tuple[str, ...]
    ceiling: Ceiling


@cache
def _table() -> tuple[_Device, ...]:
    raw = tomllib.loads(files(__package__).joinpath("devices.toml").read_text(encoding="utf-8"))
    devices = []
    for key, entry in raw["devices"].items():
        flops = {precision: value * 1e12 for precision, value in entry["tflops"].items()}
        ceiling = Ceiling(entry["title"], flops, entry["gb_per_second"] * 1e9, entry["source"])
        devices.append(_Device(key, tuple(entry["names"]), ceiling))
    return tuple(devices)


def _plain(name: str) -> str:
    words = name.casefold().replace("-", " ").split()
    return " ".join(word for word in words if word not in ("nvidia", "tesla") and not word.startswith("cuda:"))
