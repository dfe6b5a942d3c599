"""Measure where a run's time goes: seconds by stage and by thread, and which thread waited for which.

Each thread adds to sums of its own, so that the work itself takes no lock; `StageTimer.read` puts them together. A
stage that is entered inside another takes its time from the outer one: reading a file while it is decoded counts as
reading, not as decoding.
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from time import perf_counter as _wall_seconds
from time import thread_time as _cpu_seconds
from typing import Any, Literal, get_args

Stage = Literal["read", "decode", "resize", "compute", "evidence", "draw", "write"]
ThreadRole = Literal["decoders", "session", "drawers", "loop"]
WaitReason = Literal["pictures", "session", "drawing", "disk"]

# in the order in which an image passes them
STAGES: tuple[Stage, ...] = get_args(Stage)
THREAD_ROLES: tuple[ThreadRole, ...] = get_args(ThreadRole)


@dataclass(frozen=True)
class StageTime:
    """The time of one stage on the threads of one role.

    Attributes:
        role: of the threads: those that decode, those that hold a session, those that draw, and the one that runs the
            loop.
        stage: `read` opens and reads files; `draw` makes overlays, sheets, their files and the report's thumbnails;
            `compute` is a session's work, or the wait for it where batches are in flight.
        wall: seconds, summed over threads.
        cpu: seconds of processor time of these threads; without those of a runtime's own threads.
        calls: number of times that the stage was entered.
    """

    role: ThreadRole
    stage: Stage
    wall: float
    cpu: float
    calls: int

    def to_dict(self) -> dict[str, Any]:
        """Return the values under the keys of summary.json."""
        return {
            "station": self.role, "stage": self.stage, "wall": self.wall, "cpu": self.cpu, "calls": self.calls
        }  # fmt: skip


@dataclass(frozen=True)
class StageTimes:
    """All times that a timer has measured.

    Attributes:
        stages: in the order of THREAD_ROLES, then of STAGES; those that were never entered are absent.
        waits: seconds that the loop waited, by reason; `disk` is its own writing of records.
    """

    stages: tuple[StageTime, ...] = ()
    waits: tuple[tuple[WaitReason, float], ...] = ()

    def sum_stage(self, stage: Stage) -> StageTime | None:
        """Return a stage's sum over all roles, under the first one's name; None if it was never entered."""
        rows = [row for row in self.stages if row.stage == stage]
        if not rows:
            return None
        return StageTime(
            rows[0].role,
            stage,
            sum(row.wall for row in rows),
            sum(row.cpu for row in rows),
            sum(row.calls for row in rows),
        )

    def select_role(self, role: ThreadRole) -> tuple[StageTime, ...]:
        """Return the times of the threads of one role."""
        return tuple(row for row in self.stages if row.role == role)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON value that summary.json holds."""
        return {"stages": [row.to_dict() for row in self.stages], "waits": dict(self.waits)}


class StageTimer:
    """A stopwatch of one run's stages and waits; every method may be called from any thread."""

    def __init__(self) -> None:
        self._local = threading.local()
        self._threads: list[_Thread] = []
        self._lock = threading.Lock()

    def register_thread(self, role: ThreadRole) -> None:
        """Count the calling thread's stages under `role`; those of a thread never registered are the loop's."""
        self._thread().role = role

    def stage(self, name: Stage) -> AbstractContextManager[None]:
        """Time the block as one call of a stage, whether it ends well or by an exception."""
        thread = self._thread()
        return _Timer(thread, name)

    def add(self, name: Stage, wall: float, cpu: float, calls: int) -> None:
        """Count the time that another process took for a stage while the calling thread waited for it."""
        row = self._thread().sums(name)
        row.wall += wall
        row.cpu += cpu
        row.calls += calls

    def waiting(self, reason: WaitReason) -> AbstractContextManager[None]:
        """Time the block as waiting; it takes no time from stages, nor they from it."""
        return _Wait(self._thread().waits, reason)

    def read(self) -> StageTimes:
        """Return the sums so far; a stage that a thread is in counts once it is left."""
        stages: dict[tuple[ThreadRole, Stage], _Sums] = {}
        waits: dict[WaitReason, float] = {}
        with self._lock:
            threads = list(self._threads)
        for thread in threads:
            for stage, sums in list(thread.stages.items()):
                stages.setdefault((thread.role, stage), _Sums()).add(sums)
            for reason, seconds in list(thread.waits.items()):
                waits[reason] = waits.get(reason, 0.0) + seconds
        return StageTimes(
            tuple(
                StageTime(role, stage, row.wall, row.cpu, row.calls)
                for role in THREAD_ROLES
                for stage in STAGES
                if (row := stages.get((role, stage))) is not None
            ),
            tuple((reason, waits[reason]) for reason in get_args(WaitReason) if reason in waits),
        )

    def _thread(self) -> _Thread:
        try:
            thread: _Thread = self._local.thread
        except AttributeError:
            thread = self._local.thread = _Thread()
            with self._lock:
                self._threads.append(thread)
        return thread


class NoOpTimer(StageTimer):
    """A StageTimer that measures nothing and costs next to nothing."""

    def register_thread(self, role: ThreadRole) -> None:
        """Do nothing."""

    def stage(self, name: Stage) -> AbstractContextManager[None]:
        """Do nothing."""
        return _NOTHING

    def add(self, name: Stage, wall: float, cpu: float, calls: int) -> None:
        """Do nothing."""

    def waiting(self, reason: WaitReason) -> AbstractContextManager[None]:
        """Do nothing."""
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
    """One thread's sums, and the innermost stage that it is in."""

    __slots__ = ("role", "running", "stages", "waits")

    def __init__(self) -> None:
        self.role: ThreadRole = "loop"
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
    __slots__ = ("_reason", "_started", "_waits")

    def __init__(self, waits: dict[WaitReason, float], reason: WaitReason) -> None:
        self._waits, self._reason = waits, reason

    def __enter__(self) -> None:
        self._started = _wall_seconds()

    def __exit__(self, *_: object) -> None:
        self._waits[self._reason] = self._waits.get(self._reason, 0.0) + _wall_seconds() - self._started


_NOTHING: AbstractContextManager[None] = nullcontext()
NO_OP_TIMER = NoOpTimer()
