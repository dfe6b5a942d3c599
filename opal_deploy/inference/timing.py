"""Where a run's time goes: seconds by stage and by thread, and who waited for whom.

Each thread adds to sums of its own, so that the work itself takes no lock; they are put together when somebody asks.
A stage begun inside another takes its time from it: reading happens while a picture is decoded, and is not decoding.
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from time import perf_counter as _wall_seconds
from time import thread_time as _cpu_seconds
from typing import Any, Literal, get_args

Stage = Literal["read", "decode", "resize", "batch", "transfer", "compute", "evidence", "draw", "write"]
ThreadRole = Literal["decoders", "session", "drawers", "loop"]
WaitReason = Literal["pictures", "session", "drawing", "disk"]

# in the order in which an image passes them
STAGES: tuple[Stage, ...] = get_args(Stage)
STATIONS: tuple[ThreadRole, ...] = get_args(ThreadRole)


@dataclass(frozen=True)
class StageTime:
    """What one stage took on one kind of threads.

    Attributes:
        station: threads that do the same work: those that decode, those that hold a session, those that draw, and the
            one that runs the loop.
        stage: `read` opens and reads files; `draw` makes overlays, their JPEG and the report's thumbnails; `compute`
            is all of `Session.run` where `transfer` is not told apart.
        wall: seconds, summed over threads. cpu: seconds of processor time of these threads; a runtime's own threads
            are not among them. calls: how often it was entered.
    """

    station: ThreadRole
    stage: Stage
    wall: float
    cpu: float
    calls: int


@dataclass(frozen=True)
class StageTimes:
    """Everything a clock has seen.

    Attributes:
        stages: in the order of stations, then of stages; those that never happened are absent.
        waits: seconds that the loop stood still, by what it waited for; `disk` is its writing of records.
    """

    stages: tuple[StageTime, ...] = ()
    waits: tuple[tuple[WaitReason, float], ...] = ()

    def of_stage(self, stage: Stage) -> StageTime | None:
        """A stage's sum over all stations, under the first one's name; None if it never happened."""
        found = [row for row in self.stages if row.stage == stage]
        if not found:
            return None
        return StageTime(
            found[0].station,
            stage,
            sum(row.wall for row in found),
            sum(row.cpu for row in found),
            sum(row.calls for row in found),
        )

    def of_station(self, station: ThreadRole) -> tuple[StageTime, ...]:
        """The rows of one kind of threads."""
        return tuple(row for row in self.stages if row.station == station)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"stages": [asdict(row) for row in self.stages], "waits": dict(self.waits)}


class StageTimer:
    """Adds up stages and waits of one run; every method may be called from any thread."""

    def __init__(self) -> None:
        self._mine = threading.local()
        self._threads: list[_Thread] = []
        self._lock = threading.Lock()

    def join(self, station: ThreadRole) -> None:
        """Count the calling thread to `station`; a thread that never joined is the loop's."""
        self._thread().station = station

    def stage(self, name: Stage) -> AbstractContextManager[None]:
        """Time the block as one call of a stage, whether it ends well or by an exception."""
        thread = self._thread()
        return _Timer(thread, name)

    def attribute(self, name: Stage, seconds: float) -> None:
        """Count `seconds` of the block that is being timed to another stage: what a device reports of its own work."""
        thread = self._thread()
        row = thread.sums(name)
        row.wall += seconds
        row.calls += 1
        if thread.running is not None:
            thread.running.inner_wall += seconds

    def add(self, name: Stage, wall: float, cpu: float, calls: int) -> None:
        """Count what another process took for a stage while the calling thread waited for it."""
        row = self._thread().sums(name)
        row.wall += wall
        row.cpu += cpu
        row.calls += calls

    def waiting(self, what: WaitReason) -> AbstractContextManager[None]:
        """Time the block as waiting; it takes no time from stages, nor they from it."""
        return _Wait(self._thread().waits, what)

    def read(self) -> StageTimes:
        """The sums so far; exact once the threads have ended, within the calls in work before."""
        stages: dict[tuple[ThreadRole, Stage], _Sums] = {}
        waits: dict[WaitReason, float] = {}
        with self._lock:
            threads = list(self._threads)
        for thread in threads:
            for stage, sums in list(thread.stages.items()):
                stages.setdefault((thread.station, stage), _Sums()).add(sums)
            for what, seconds in list(thread.waits.items()):
                waits[what] = waits.get(what, 0.0) + seconds
        return StageTimes(
            tuple(
                StageTime(station, stage, row.wall, row.cpu, row.calls)
                for station in STATIONS
                for stage in STAGES
                if (row := stages.get((station, stage))) is not None
            ),
            tuple((what, waits[what]) for what in get_args(WaitReason) if what in waits),
        )

    def _thread(self) -> _Thread:
        try:
            thread: _Thread = self._mine.thread
        except AttributeError:
            thread = self._mine.thread = _Thread()
            with self._lock:
                self._threads.append(thread)
        return thread


class NoOpTimer(StageTimer):
    """Times nothing and costs next to nothing."""

    def join(self, station: ThreadRole) -> None:
        """Nothing."""

    def stage(self, name: Stage) -> AbstractContextManager[None]:
        """Nothing."""
        return _NOTHING

    def attribute(self, name: Stage, seconds: float) -> None:
        """Nothing."""

    def add(self, name: Stage, wall: float, cpu: float, calls: int) -> None:
        """Nothing."""

    def waiting(self, what: WaitReason) -> AbstractContextManager[None]:
        """Nothing."""
        return _NOTHING


class _Sums:
    __slots__ = ("calls", "cpu", "wall")

    def __init__(self) -> None:
        self.wall, self.cpu, self.calls = 0.0, 0.0, 0

    def add(self, other: _Sums) -> None:
        self.wall += other.wall
        self.cpu += other.cpu
        self.calls += other.calls


class _Thread:
    """One thread's sums, and its innermost stage in work."""

    __slots__ = ("running", "stages", "station", "waits")

    def __init__(self) -> None:
        self.station: ThreadRole = "loop"
        self.stages: dict[Stage, _Sums] = {}
        self.waits: dict[WaitReason, float] = {}
        self.running: _Timer | None = None

    def sums(self, name: Stage) -> _Sums:
        row = self.stages.get(name)
        if row is None:
            row = self.stages[name] = _Sums()
        return row


class _Timer:
    __slots__ = ("_cpu", "_name", "_outer", "_thread", "_wall", "inner_cpu", "inner_wall")

    def __init__(self, thread: _Thread, name: Stage) -> None:
        self._thread, self._name = thread, name
        self.inner_wall = self.inner_cpu = 0.0

    def __enter__(self) -> None:
        self._outer = self._thread.running
        self._thread.running = self
        self._cpu = _cpu_seconds()
        self._wall = _wall_seconds()

    def __exit__(self, *_: object) -> None:
        wall = _wall_seconds() - self._wall
        cpu = _cpu_seconds() - self._cpu
        row = self._thread.sums(self._name)
        row.wall += wall - self.inner_wall
        row.cpu += cpu - self.inner_cpu
        row.calls += 1
        outer = self._thread.running = self._outer
        if outer is not None:
            outer.inner_wall += wall
            outer.inner_cpu += cpu


class _Wait:
    __slots__ = ("_started", "_waits", "_what")

    def __init__(self, waits: dict[WaitReason, float], what: WaitReason) -> None:
        self._waits, self._what = waits, what

    def __enter__(self) -> None:
        self._started = _wall_seconds()

    def __exit__(self, *_: object) -> None:
        self._waits[self._what] = self._waits.get(self._what, 0.0) + _wall_seconds() - self._started


_NOTHING: AbstractContextManager[None] = nullcontext()
NO_OP_TIMER = NoOpTimer()
