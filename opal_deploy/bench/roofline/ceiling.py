"""The most that a device can do, from its data sheet or measured, and the share of it that a measurement reached."""

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
    """The most that one device can do.

    Attributes:
        name: the device's.
        flops: FLOPs a second by precision, dense; int8 in integer operations. A precision is missing where the device
            lacks it or nobody measured it.
        bytes_per_second: bandwidth of its memory.
        source: the document, or what was timed.
        measured: whether it was timed on the device itself, not read from its data sheet.
    """

    name: str
    flops: Mapping[str, float]
    bytes_per_second: float
    source: str
    measured: bool = False

    def attainable(self, intensity: float, precision: str) -> float:
        """Return the FLOPs a second that are possible at an intensity in FLOPs per byte: the roofline.

        Raises:
            UsageError: the device has no figure for the precision.
        """
        return min(self.peak(precision), intensity * self.bytes_per_second)

    def peak(self, precision: str) -> float:
        """Return the FLOPs a second of arithmetic alone; UsageError if the device has no figure for the precision."""
        if precision not in self.flops:
            raise UsageError(f"{self.name} has no figure for {precision}; it has {', '.join(self.flops)}")
        return self.flops[precision]

    def ridge(self, precision: str) -> float:
        """Return the FLOPs per byte from which arithmetic is the bound; errors are those of `peak`."""
        return self.peak(precision) / self.bytes_per_second

    def images_per_second(self, work: Work, batch: int, precision: str) -> float:
        """Return the most images a second of a network at a batch; errors are those of `peak`."""
        return batch * self.attainable(work.intensity(batch, precision), precision) / work.flops(batch)

    def bound(self, work: Work, batch: int, precision: str) -> Bound:
        """Return which of the two limits a network at a batch; errors are those of `peak`."""
        return "compute" if work.intensity(batch, precision) >= self.ridge(precision) else "memory"


@dataclass(frozen=True)
class Share:
    """The part of its ceiling that a measurement reached.

    Attributes:
        ceiling: images a second.
        fraction: measured over ceiling; over 1 where the ceiling does not hold, as when layers are fused or cached.
        bound: what limits the ceiling.
        source: the ceiling's.
    """

    ceiling: float
    fraction: float
    bound: Bound
    source: str


def compute_share(
    work: Work,
    batch: int,
    precision: str,
    device_name: str,
    images_per_second: float,
    measured: Ceiling | None = None,
) -> Share | None:
    """Return the share of its ceiling that a throughput reached; None where no ceiling is known for it.

    Args:
        work: of the network that was timed.
        batch: images a forward pass.
        precision: of the network.
        device_name: as NVML or CUDA names it, with or without `cuda:0 ` before it.
        images_per_second: the throughput.
        measured: a ceiling to use instead of the data sheet, where it has the precision.
    """
    sheet = find_by_driver_name(device_name)
    for ceiling in (measured, sheet):
        if ceiling is not None and precision in ceiling.flops and precision in BYTES_PER_ELEMENT:
            limit = ceiling.images_per_second(work, batch, precision)
            return Share(limit, images_per_second / limit, ceiling.bound(work, batch, precision), ceiling.source)
    return None


def find_by_driver_name(name: str) -> Ceiling | None:
    """Return the GPU that NVML and CUDA give this whole name; None for one that is not known.

    Part of a name is not enough: an L40 is not an L4, and a MIG instance is not its GPU.
    """
    normalized = _normalize(name)
    for device in _read_devices():
        if normalized in {_normalize(known) for known in device.names}:
            return device.ceiling
    return None


def find_device(text: str) -> Ceiling:
    """Return the GPU that `--gpu` names: by a short name such as `a100-80gb-sxm`, or by its driver's name.

    Raises:
        UsageError: the name is not known; the message lists those that are.
    """
    for device in _read_devices():
        if text.casefold() == device.key:
            return device.ceiling
    if ceiling := find_by_driver_name(text):
        return ceiling
    raise UsageError(f"--gpu {text!r}: no figures for it; known are {', '.join(known_devices())}")


def known_devices() -> list[str]:
    """Return the short names of all GPUs, in the file's order."""
    return [device.key for device in _read_devices()]


@dataclass(frozen=True)
class _Device:
    key: str
    names: tuple[str, ...]
    ceiling: Ceiling


@cache
def _read_devices() -> tuple[_Device, ...]:
    raw = tomllib.loads(files(__package__).joinpath("devices.toml").read_text(encoding="utf-8"))
    devices = []
    for key, entry in raw["devices"].items():
        flops = {precision: value * 1e12 for precision, value in entry["tflops"].items()}
        ceiling = Ceiling(entry["title"], flops, entry["gb_per_second"] * 1e9, entry["source"])
        devices.append(_Device(key, tuple(entry["names"]), ceiling))
    return tuple(devices)


def _normalize(name: str) -> str:
    words = name.casefold().replace("-", " ").split()
    return " ".join(word for word in words if word not in ("nvidia", "tesla") and not word.startswith("cuda:"))
