"""Names of devices and runtimes as users write them, and the CPUs that this process may use.

A device name is `auto`, `cpu`, `cuda` or `cuda:N`; a list of GPUs may be written as numbers, such as `0,1`.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from opal_deploy.errors import UsageError

if TYPE_CHECKING:
    from opal_deploy.runtime.session import Session

# default batch sizes
CPU_BATCH, GPU_BATCH = 8, 64

_EXPECTED = "expected auto, cpu, cuda, cuda:N, or numbers such as 0 or 0,1"


def available_cpus() -> int:
    """Return the number of CPUs that this process may use: its affinity, not the machine's count."""
    return len(available_cpu_ids())


def available_cpu_ids() -> set[int]:
    """Return the CPUs that this process may use, by their numbers; all of them where the system has no affinity."""
    try:
        return os.sched_getaffinity(0)
    except AttributeError:  # not on macOS and Windows
        return set(range(os.cpu_count() or 1))


def parse_device(device: str) -> tuple[str, int]:
    """Split one device name into its kind (`auto`, `cpu` or `cuda`) and its number, 0 where none is given.

    Raises:
        UsageError: not a device name.
    """
    kind, _, number = device.partition(":")
    if kind not in ("auto", "cpu", "cuda") or (number and not number.isdigit()):
        raise UsageError(f"device {device!r}: expected auto, cpu, cuda or cuda:N")
    return kind, int(number or 0)


def split_devices(devices: str) -> list[str]:
    """Return one device name for each session: numbers become `cuda:N`, a name stays as it is.

    Raises:
        UsageError: neither a device name nor a list of different numbers.
    """
    if devices.split(":")[0] in ("auto", "cpu", "cuda"):
        return [devices]
    numbers = devices.split(",")
    if not all(number.isdigit() for number in numbers) or len(set(numbers)) != len(numbers):
        raise UsageError(f"device {devices!r}: {_EXPECTED}")
    return [f"cuda:{number}" for number in numbers]


def default_batch(session: Session) -> int:
    """Return the default batch size for the device of a session."""
    return CPU_BATCH if "on cpu" in session.description.lower() else GPU_BATCH


def default_workers(cores: int | None = None) -> int:
    """Return the default number of decode workers: all cores but two, at least two of them.

    Two cores are left to the sessions' threads and to the thread that builds and writes records.

    Args:
        cores: None: all that this process may use.
    """
    cores = cores or available_cpus()
    return max(cores - 2, min(cores, 2))
