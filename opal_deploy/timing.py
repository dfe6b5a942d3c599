"""Measure where a run's time goes: seconds by stage and by thread, and which thread waited for which.

Each thread adds to its own sums, so that the work itself takes no lock; `StageTimer.read` combines them. A stage inside
another takes its time from the outer one: reading a file while it is decoded counts as reading, not as decoding.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from time import perf_counter as _wall_seconds
from time import thread_time as _cpu_seconds
from typing import Any, Literal, get_args

Stage = Literal["read", "decode", "resize", "compute", "evidence", "draw", "write"]
ThreadRole = Literal["decoders", "session", "drawers", "loop"]
WaitReason = Literal["images", "session", "drawing", "disk"]

# in the order in which an image passes them
STAGES: tuple[Stage, ...] = get_args(Stage)
THREAD_ROLES: tuple[ThreadRole, ...] = get_args(ThreadRole)


@dataclass(frozen=True)
class StageTime:
    """The time of one stage on the threads of one role.

    Attributes:
        role: of the threads: decoding, sessions, drawing, or the thread that runs the loop.
        stage: `read` opens and reads files; `draw` makes overlays, their files and the report's thumbnails;
            `compute` is a session's work, or the wait for it while batches are in flight.
        wall: seconds, summed over threads.
        cpu: seconds of processor time of these threads, without a runtime's own threads.
        calls: number of times that the stage was entered.
    """

    role: ThreadRole
    stage: Stage
    wall: float
    cpu: float
    calls: int


@dataclass(frozen=True)
class StageTimes:
    """All times that a timer has measured.

    Attributes:
        stages: in the order of THREAD_ROLES, then of STAGES, without stages that were never entered.
        waits: seconds that the loop waited, by reason; `disk` is its own writing of records.
    """

    stages: tuple[StageTime, ...] = ()
    waits: tuple[tuple[WaitReason, float], ...] = ()

    def sum_stage(self, stage: Stage) -> StageTime | None:
        """Return a stage's sum over all roles, under the first one's name; None if it was never entered."""
        rows = [row for row in self.stages if row.stage == stage]
        if not rows:
            return None
        wall, cpu, calls = (sum(values) for values in zip(*((r.wall, r.cpu, r.calls) for r in rows), strict=True))
        return StageTime(rows[0].role, stage, wall, cpu, int(calls))

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON value for summary.json."""
        return {"stages": [asdict(row) for row in self.stages], "waits": dict(self.waits)}


class StageTimer:
    """A stopwatch of one run's stages and waits, for any thread; without `enabled` it measures nothing."""

    def __init__(self, *, enabled: bool = True) -> None:
        self.enabled = enabled
        self._local = threading.local()
        self._threads: list[_Thread] = []
        self._lock = threading.Lock()

    def register_thread(self, role: ThreadRole) -> None:
        """Count the calling thread's stages under `role`; an unregistered thread counts as the loop."""
        if self.enabled:
            self._thread().role = role

    def stage(self, name: Stage) -> AbstractContextManager[None]:
        """Time the block as one call of a stage, whether it ends well or by an exception."""
        return self._thread().stage(name) if self.enabled else _NOTHING

    def add(self, stages: Iterable[StageTime]) -> None:
        """Count the stages of another process, for which the calling thread waited."""
        for row in stages:
            self._thread().add(row.stage, row.wall, row.cpu, row.calls)

    def waiting(self, reason: WaitReason) -> AbstractContextManager[None]:
        """Time the block as waiting, independently of stages."""
        return self._thread().wait(reason) if self.enabled else _NOTHING

    def read(self) -> StageTimes:
        """Return the sums so far; a stage counts when it ends."""
        total = _Thread()
        stages: dict[ThreadRole, _Thread] = {}
        with self._lock:
            threads = list(self._threads)
        for thread in threads:
            for stage, sums in list(thread.stages.items()):
                stages.setdefault(thread.role, _Thread()).add(stage, *sums)
            for reason, seconds in list(thread.waits.items()):
                total.waits[reason] = total.waits.get(reason, 0.0) + seconds
        return StageTimes(
            tuple(
                StageTime(role, stage, *stages[role].stages[stage])
                for role in THREAD_ROLES
                for stage in STAGES
                if role in stages and stage in stages[role].stages
            ),
            tuple((reason, total.waits[reason]) for reason in get_args(WaitReason) if reason in total.waits),
        )

    def _thread(self) -> _Thread:
        try:
            thread: _Thread = self._local.thread
        except AttributeError:
            thread = self._local.thread = _Thread()
            with self._lock:
                self._threads.append(thread)
        return thread


@dataclass
class _Thread:
    """One thread's sums by stage and wait; `inner`: wall and CPU seconds of the stages inside the current one."""

    role: ThreadRole = "loop"
    stages: dict[Stage, tuple[float, float, int]] = field(default_factory=dict)
    waits: dict[WaitReason, float] = field(default_factory=dict)
    inner: tuple[float, float] = (0.0, 0.0)

    def add(self, name: Stage, wall: float, cpu: float, calls: int) -> None:
        before = self.stages.get(name, (0.0, 0.0, 0))
        self.stages[name] = (before[0] + wall, before[1] + cpu, before[2] + calls)

    @contextmanager
    def stage(self, name: Stage) -> Iterator[None]:
        outer, self.inner = self.inner, (0.0, 0.0)
        cpu, wall = _cpu_seconds(), _wall_seconds()
        try:
            yield
        finally:
            wall, cpu = _wall_seconds() - wall, _cpu_seconds() - cpu
            self.add(name, wall - self.inner[0], cpu - self.inner[1], 1)
            self.inner = (outer[0] + wall, outer[1] + cpu)

    @contextmanager
    def wait(self, reason: WaitReason) -> Iterator[None]:
        started = _wall_seconds()
        try:
            yield
        finally:
            self.waits[reason] = self.waits.get(reason, 0.0) + _wall_seconds() - started


_NOTHING: AbstractContextManager[None] = nullcontext()
NO_OP_TIMER = StageTimer(enabled=False)
