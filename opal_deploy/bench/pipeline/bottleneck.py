"""Find the bottleneck of a run from measured times: threads that are always busy, or the cores that all share.

Threads with the same role share work. A role's busy share is the time that its threads spent in stages, divided by the
time that they had; its capacity is images per second divided by that share. The bottleneck is nearly always busy while
the others wait for it. If all cores are busy too, as on a machine without a GPU, stages slow each other down, and the
shares of CPU time show which costs most.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from opal_deploy.timing import STAGES, THREAD_ROLES, Stage, StageTimes, ThreadRole

# threads or cores above this share count as always busy
BUSY = 0.8
REST = "rest"
_SCHEDULING = "finding images and scheduling"


@dataclass(frozen=True)
class Pass:
    """One run over the images.

    Attributes:
        cpu_seconds: CPU time of the whole process, including the runtime's threads.
        gpu_use: median GPU utilisation in percent; None without samples.
    """

    images: int
    seconds: float
    cpu_seconds: float
    times: StageTimes = field(default_factory=StageTimes)
    gpu_use: float | None = None

    @property
    def rate(self) -> float:
        """Images per second."""
        return self.images / self.seconds


@dataclass(frozen=True)
class Bottleneck:
    """The bottleneck of a run, and the shares that it was found from.

    Attributes:
        role: the threads that limit the run; None if none clearly does.
        stage: their largest stage; None if `role` is.
        busy: busy share of each role's threads, 0 ... 1; the loop is busy unless it waits.
        capacity: images per second that each role would reach if it never waited.
        waits: share of the time that the loop waited, by reason; `disk` is writing records.
        cores_busy: share of the cores' time that the process used.
        cpu: share of the process's CPU time by stage; `rest` is the runtime's threads and everything outside stages,
            which includes most of a network on the CPU.
    """

    role: ThreadRole | None
    stage: str | None
    busy: dict[ThreadRole, float]
    capacity: dict[ThreadRole, float]
    waits: dict[str, float]
    cores: int
    cores_busy: float
    cpu: dict[str, float]

    def describe(self) -> str:
        """Return one line for a person: `bound by compute: the session is busy 93% of the time; ...`."""
        others = [f"{name} {share:.0%}" for name, share in self.busy.items() if name != self.role]
        if self.role is not None:
            verb = "are" if self.role.endswith("s") else "is"
            text = f"bound by {self.stage}: the {self.role} {verb} busy {self.busy[self.role]:.0%} of the time"
            text += f" ({', '.join(others)})" if others else ""
        elif self.cores_busy >= BUSY:
            text = f"bound by the cores: no group of threads is always busy ({', '.join(others)})"
        else:
            text = f"no clear bottleneck: no group of threads is always busy ({', '.join(others)})"
        plural = "s are" if self.cores > 1 else " is"
        text += f"; {self.cores} core{plural} {self.cores_busy:.0%} busy"
        if self.cores_busy >= BUSY:
            largest = sorted(self.cpu.items(), key=lambda item: -item[1])[:4]
            text += ", shared by " + ", ".join(f"{_title(name)} {share:.0%}" for name, share in largest)
        return text

    def to_dict(self) -> dict[str, Any]:
        """Return the bottleneck for JSON."""
        return {
            "role": self.role, "stage": self.stage, "busy": self.busy, "capacity": self.capacity,
            "loop_waited_for": self.waits, "cores": self.cores, "cores_busy": self.cores_busy, "cpu_share": self.cpu,
            "line": self.describe(),
        }  # fmt: skip


def find_bottleneck(passes: Sequence[Pass], threads: Mapping[ThreadRole, int], cores: int) -> Bottleneck:
    """Find the bottleneck of one or more passes of the same case.

    Args:
        threads: number of threads of each role; the loop has one.
    """
    seconds = sum(one.seconds for one in passes)
    images = sum(one.images for one in passes)
    waits: defaultdict[str, float] = defaultdict(float)
    for reason, waited in (wait for one in passes for wait in one.times.waits):
        waits[reason] += waited
    # writing is the loop's own work
    loop_seconds = seconds - sum(waited for reason, waited in waits.items() if reason != "disk")
    busy: dict[ThreadRole, float] = {}
    for role in THREAD_ROLES:
        if work := _wall_by_stage(passes, role):
            busy[role] = sum(work.values()) / (seconds * threads.get(role, 1))
    busy["loop"] = max(loop_seconds, 0.0) / seconds
    busiest = max(busy, key=lambda role: busy[role])
    is_bottleneck = busy[busiest] >= BUSY
    cpu_seconds = sum(one.cpu_seconds for one in passes)
    return Bottleneck(
        role=busiest if is_bottleneck else None,
        stage=_largest_stage(passes, busiest, loop_seconds) if is_bottleneck else None,
        busy=busy,
        capacity={role: images / seconds / share for role, share in busy.items() if share > 0},
        waits={reason: waited / seconds for reason, waited in waits.items()},
        cores=cores,
        cores_busy=cpu_seconds / (seconds * cores),
        cpu=_cpu_shares(passes, cpu_seconds),
    )


def _wall_by_stage(passes: Sequence[Pass], role: ThreadRole) -> dict[Stage, float]:
    seconds: defaultdict[Stage, float] = defaultdict(float)
    for row in (row for one in passes for row in one.times.select_role(role)):
        seconds[row.stage] += row.wall
    return seconds


def _largest_stage(passes: Sequence[Pass], role: ThreadRole, loop_seconds: float) -> str:
    seconds: dict[str, float] = {str(stage): wall for stage, wall in _wall_by_stage(passes, role).items()}
    if role == "loop":
        seconds[_SCHEDULING] = loop_seconds - sum(seconds.values())
    return max(seconds, key=lambda name: seconds[name])


def _cpu_shares(passes: Sequence[Pass], cpu_seconds: float) -> dict[str, float]:
    if cpu_seconds <= 0:
        return {}
    shares: dict[str, float] = {}
    for stage in STAGES:
        rows = [row for one in passes if (row := one.times.sum_stage(stage)) is not None]
        if rows:
            shares[stage] = sum(row.cpu for row in rows) / cpu_seconds
    # process and threads have separate clocks, so the difference may be slightly negative
    shares[REST] = max(1.0 - sum(shares.values()), 0.0)
    return shares


def _title(name: str) -> str:
    return "the runtime's threads and the rest" if name == REST else name
