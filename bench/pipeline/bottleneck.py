"""What bounds a run, from measured times: the station that is busy all the time, or the cores that all of them share.

A station is the threads that do the same work. Its busy share is the time that its threads spent in stages, of all
the time that they had; at full load it would reach its capacity, images/s divided by that share. The one that bounds
the run is busy nearly always, the others wait for it. Where the cores are busy all the time too, as on a machine
without a GPU, stages slow each other down, and the share of processor time says which costs most.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from opal_deploy.inference.timing import STAGES, THREAD_ROLES, Stage, StageTimes, ThreadRole

# from here on something is called busy all the time
BUSY = 0.8
REST = "rest"
_SCHEDULING = "finding images and scheduling"


@dataclass(frozen=True)
class Pass:
    """One run over the pictures.

    Attributes:
        images: usable pictures. seconds: from the first file to the last record.
        cpu_seconds: processor time of the whole process meanwhile, the runtime's own threads included.
        times: where the time went; empty for the bare session.
    """

    images: int
    seconds: float
    cpu_seconds: float
    times: StageTimes = field(default_factory=StageTimes)

    @property
    def rate(self) -> float:
        """Images a second."""
        return self.images / self.seconds


@dataclass(frozen=True)
class Bottleneck:
    """The verdict and what it rests on.

    Attributes:
        station, stage: what bounds the run; both None where nothing does clearly. `stage` may also say what the loop
            does outside stages.
        busy: share of their time that each station's threads were busy, 0 ... 1; for the loop, what it did not wait.
        capacity: images/s that each station would reach if it never waited.
        waited: share of the time that the loop waited, by what for; `disk` is its writing of records.
        cores: that the process may use. cores_busy: share of their time that it used.
        cpu: share of the process's processor time by stage; `rest` is a runtime's own threads and everything outside
            stages, so for a network on the CPU most of `compute` stands there.
    """

    station: ThreadRole | None
    stage: str | None
    busy: dict[ThreadRole, float]
    capacity: dict[ThreadRole, float]
    waited: dict[str, float]
    cores: int
    cores_busy: float
    cpu: dict[str, float]

    def line(self) -> str:
        """For a person: `bound by compute: the session is busy 93 % of the time; ...`."""
        others = [f"{name} {share:.0%}" for name, share in self.busy.items() if name != self.station]
        if self.station is not None:
            verb = "are" if self.station.endswith("s") else "is"
            told = f"bound by {self.stage}: the {self.station} {verb} busy {self.busy[self.station]:.0%} of the time"
            told += f" ({', '.join(others)})" if others else ""
        elif self.cores_busy >= BUSY:
            told = f"bound by the cores: no station is always busy ({', '.join(others)})"
        else:
            told = f"bound by nothing clearly: no station is always busy ({', '.join(others)})"
        plural = "s are" if self.cores > 1 else " is"
        told += f"; {self.cores} core{plural} {self.cores_busy:.0%} busy"
        most = sorted(self.cpu.items(), key=lambda item: -item[1])[:4]
        if self.cores_busy >= BUSY:
            told += ", shared by " + ", ".join(f"{_title(name)} {share:.0%}" for name, share in most)
        return told

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "station": self.station, "stage": self.stage, "busy": self.busy, "capacity": self.capacity,
            "loop_waited_for": self.waited, "cores": self.cores, "cores_busy": self.cores_busy, "cpu_share": self.cpu,
            "line": self.line(),
        }  # fmt: skip


def find_bottleneck(passes: Sequence[Pass], threads: Mapping[ThreadRole, int], cores: int) -> Bottleneck:
    """Judge one or more passes of the same case.

    Args:
        passes: at least one.
        threads: of each station; the loop has one.
        cores: that the process may use.
    """
    seconds = sum(one.seconds for one in passes)
    images = sum(one.images for one in passes)
    waits: dict[str, float] = {}
    for one in passes:
        for what, waited in one.times.waits:
            waits[what] = waits.get(what, 0.0) + waited
    # its writing is work of the loop's own
    looped = seconds - sum(waited for what, waited in waits.items() if what != "disk")
    busy: dict[ThreadRole, float] = {}
    for station in THREAD_ROLES:
        if work := _stages_of(passes, station):
            busy[station] = sum(work.values()) / (seconds * threads.get(station, 1))
    busy["loop"] = max(looped, 0.0) / seconds
    capacity = {station: images / seconds / share for station, share in busy.items() if share > 0}
    busiest = max(busy, key=lambda station: busy[station])
    bounds = busy[busiest] >= BUSY
    cpu_seconds = sum(one.cpu_seconds for one in passes)
    return Bottleneck(
        busiest if bounds else None,
        _largest_part(passes, busiest, looped) if bounds else None,
        busy,
        capacity,
        {what: waited / seconds for what, waited in waits.items()},
        cores,
        cpu_seconds / (seconds * cores),
        _cpu_shares(passes, cpu_seconds),
    )


def _stages_of(passes: Sequence[Pass], station: ThreadRole) -> dict[Stage, float]:
    found: dict[Stage, float] = {}
    for one in passes:
        for row in one.times.select_role(station):
            found[row.stage] = found.get(row.stage, 0.0) + row.wall
    return found


def _largest_part(passes: Sequence[Pass], station: ThreadRole, looped: float) -> str:
    parts: dict[str, float] = {str(stage): wall for stage, wall in _stages_of(passes, station).items()}
    if station == "loop":
        parts[_SCHEDULING] = looped - sum(parts.values())
    return max(parts, key=lambda name: parts[name])


def _cpu_shares(passes: Sequence[Pass], cpu_seconds: float) -> dict[str, float]:
    if cpu_seconds <= 0:
        return {}
    shares: dict[str, float] = {}
    for stage in STAGES:
        rows = [row for one in passes if (row := one.times.sum_stage(stage)) is not None]
        if rows:
            shares[stage] = sum(row.cpu for row in rows) / cpu_seconds
    # two clocks of the system, read apart: their difference may fall a little short
    shares[REST] = max(1.0 - sum(shares.values()), 0.0)
    return shares


def _title(name: str) -> str:
    return "the runtime's threads and the rest" if name == REST else name
