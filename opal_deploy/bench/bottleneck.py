"""Find the bottleneck of a run from measured times: threads that are always busy, or the cores that all share.

Threads with the same role share work. A role's busy share is the time that its threads spent in stages, divided by the
time that they had. The bottleneck is nearly always busy while the others wait for it. If all cores are busy too, as on
a machine without a GPU, stages slow each other down, and the shares of CPU time show which costs most.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

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

    def milliseconds(self, stage: Stage, kind: Literal["wall", "cpu"]) -> float:
        """Return milliseconds per image of wall or CPU time in a stage; 0 for one that was never entered."""
        return 1000 * float(getattr(self.times.sum_stage(stage), kind, 0.0)) / self.images


@dataclass(frozen=True)
class Bottleneck:
    """The bottleneck of a run, and the shares that it was found from.

    Attributes:
        role: the threads that limit the run; None if none clearly does.
        stage: their largest stage; None if `role` is.
        busy: busy share of each role's threads, 0 ... 1; the loop is busy unless it waits.
        loop_waited_for: share of the time that the loop waited, by reason; `disk` is writing records.
        cores_busy: share of the cores' time that the process used.
        cpu_share: share of the process's CPU time by stage; REST is the runtime's threads and everything outside
            stages, which includes most of a network on the CPU.
    """

    role: ThreadRole | None
    stage: str | None
    busy: dict[ThreadRole, float]
    loop_waited_for: dict[str, float]
    cores: int
    cores_busy: float
    cpu_share: dict[str, float]

    def describe(self) -> str:
        """Return one line for a person: `bound by compute: the session is busy 93% of the time; ...`."""
        others = ", ".join(f"{name} {share:.0%}" for name, share in self.busy.items() if name != self.role)
        if self.role is not None:
            verb = "are" if self.role.endswith("s") else "is"
            text = f"bound by {self.stage}: the {self.role} {verb} busy {self.busy[self.role]:.0%} of the time"
            text += f" ({others})" if others else ""
        else:
            what = "bound by the cores" if self.cores_busy >= BUSY else "no clear bottleneck"
            text = f"{what}: no group of threads is always busy ({others})"
        text += f"; {self.cores} core{'s are' if self.cores > 1 else ' is'} {self.cores_busy:.0%} busy"
        if self.cores_busy >= BUSY:
            largest = sorted(self.cpu_share.items(), key=lambda item: -item[1])[:4]
            titles = {REST: "the runtime's threads and the rest"}
            text += ", shared by " + ", ".join(f"{titles.get(name, name)} {share:.0%}" for name, share in largest)
        return text


def find_bottleneck(passes: Sequence[Pass], threads: Mapping[ThreadRole, int], cores: int) -> Bottleneck:
    """Find the bottleneck of one or more passes of the same case.

    Args:
        threads: number of threads of each role; the loop has one.
    """
    seconds = sum(one.seconds for one in passes)
    waits, cpu = defaultdict[str, float](float), defaultdict[str, float](float)
    work: dict[ThreadRole, dict[str, float]] = {role: defaultdict(float) for role in THREAD_ROLES}
    for one in passes:
        for reason, waited in one.times.waits:
            waits[reason] += waited
        for row in one.times.stages:
            work[row.role][row.stage] += row.wall
            cpu[row.stage] += row.cpu
    # writing is the loop's own work
    loop_seconds = seconds - sum(waited for reason, waited in waits.items() if reason != "disk")
    work["loop"][_SCHEDULING] = loop_seconds - sum(work["loop"].values())
    busy = {role: sum(each.values()) / (seconds * threads.get(role, 1)) for role, each in work.items() if each}
    busy["loop"] = max(loop_seconds, 0.0) / seconds
    busiest = max(busy, key=lambda role: busy[role])
    is_bottleneck = busy[busiest] >= BUSY
    cpu_seconds = sum(one.cpu_seconds for one in passes)
    measured = STAGES if cpu_seconds > 0 else ()
    shares: dict[str, float] = {stage: cpu[stage] / cpu_seconds for stage in measured if stage in cpu}
    return Bottleneck(
        role=busiest if is_bottleneck else None,
        stage=max(work[busiest], key=lambda stage: work[busiest][stage]) if is_bottleneck else None,
        busy=busy,
        loop_waited_for={reason: waited / seconds for reason, waited in waits.items()},
        cores=cores,
        cores_busy=cpu_seconds / (seconds * cores),
        # process and threads have separate clocks, so the difference may be slightly negative
        cpu_share={**shares, REST: max(1.0 - sum(shares.values()), 0.0)} if cpu_seconds > 0 else {},
    )
