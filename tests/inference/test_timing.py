"""Times of a run: sums by stage and thread role that add up, whatever threads and errors do."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from opal_deploy.inference import timing
from opal_deploy.inference.run.report import ReportOptions
from opal_deploy.inference.run.run import LocalBackend, RunOptions, run
from opal_deploy.inference.run.summary import Summary
from opal_deploy.inference.timing import NO_OP_TIMER, StageTimer, StageTimes
from opal_deploy.inference.types import InferenceOptions, InputImage
from tests.inference.bright import BrightSession


@pytest.fixture
def spend(monkeypatch: pytest.MonkeyPatch) -> Callable[[float, float], None]:
    """Let seconds pass, and of the processor's time."""
    now = np.zeros(2)
    monkeypatch.setattr(timing, "_wall_seconds", lambda: float(now[0]))
    monkeypatch.setattr(timing, "_cpu_seconds", lambda: float(now[1]))

    def spend(wall: float, cpu: float) -> None:
        now[:] += wall, cpu

    return spend


def rows(times: StageTimes) -> dict[str, tuple[float, float, int]]:
    return {row.stage: (row.wall, row.cpu, row.calls) for row in times.stages}


def test_a_stage_has_its_own_calls_seconds_and_processor_time(spend: Callable[[float, float], None]) -> None:
    timer = StageTimer()
    with timer.stage("decode"):
        spend(2, 1)
        for _ in range(2):
            with timer.stage("read"):
                spend(10, 5)
    with timer.stage("compute"):
        spend(8, 4)
    with timer.waiting("disk"), timer.stage("write"):
        spend(4, 0)
    with timer.waiting("pictures"):
        spend(1, 0)
    times = timer.read()
    assert rows(times) == {
        "read": (20, 10, 2), "decode": (2, 1, 1), "compute": (8, 4, 1), "write": (4, 0, 1),
    }  # fmt: skip
    assert times.waits == (("pictures", 1), ("disk", 4))


def test_an_exception_ends_its_stage_and_passes_through(spend: Callable[[float, float], None]) -> None:
    timer = StageTimer()
    with pytest.raises(KeyError), timer.stage("decode"), timer.stage("read"):
        raise KeyError
    with timer.stage("draw"):
        spend(1, 0)
        # what has ended can be read while the rest runs
        assert [row.stage for row in timer.read().stages] == ["read", "decode"]
    # it is not counted as if it were still inside the one that failed
    assert rows(timer.read()) == {"read": (0, 0, 1), "decode": (0, 0, 1), "draw": (1, 0, 1)}


def test_threads_add_up_under_their_role() -> None:
    timer = StageTimer()
    barrier = threading.Barrier(3)

    def work(_: int) -> None:
        barrier.wait(10)
        for _ in range(200):
            with timer.stage("decode"):
                pass

    with ThreadPoolExecutor(3, initializer=timer.register_thread, initargs=("decoders",)) as pool:
        list(pool.map(work, range(3)))
    with timer.stage("decode"):
        time.sleep(0.05)
    decoders, loop = timer.read().stages
    assert [(row.role, row.calls) for row in (decoders, loop)] == [("decoders", 600), ("loop", 1)]
    # sleeping takes time, and none of the processor's
    assert loop.wall >= 0.05 > loop.cpu
    both = timer.read().sum_stage("decode")
    assert both is not None
    assert (both.calls, both.wall) == (601, decoders.wall + loop.wall)


def test_the_no_op_timer_measures_nothing() -> None:
    NO_OP_TIMER.register_thread("decoders")
    with NO_OP_TIMER.stage("decode"), NO_OP_TIMER.waiting("disk"):
        pass
    assert NO_OP_TIMER.read() == StageTimes()


def run_in(
    folder: Path, count: int, size: tuple[int, int], workers: int, sessions: int = 1, draw: bool = True
) -> Summary:
    (folder / "out").mkdir()
    noise = np.random.default_rng(0).integers(0, 255, (size[1], size[0], 3), np.uint8)

    def requests() -> Iterator[InputImage]:
        for n in range(count):
            Image.fromarray(noise).save(folder / f"{n}.jpg", quality=95)
            yield InputImage(str(n), folder / f"{n}.jpg")

    options = RunOptions(folder / "out", InferenceOptions(batch=4, workers=workers), ReportOptions() if draw else None)
    return run(requests(), LocalBackend([BrightSession() for _ in range(sessions)]), options)


def test_a_run_times_every_stage_where_it_happens(tmp_path: Path) -> None:
    summary = run_in(tmp_path, 9, (300, 200), 2)
    found = {(row.role, row.stage): row.calls for row in summary.times.stages}
    # opened, and read at least once
    assert found.pop(("decoders", "read")) >= 18
    assert found == {
        ("decoders", "decode"): 9,
        # for the model, and to be drawn on
        ("decoders", "resize"): 18,
        ("session", "compute"): 3,
        ("loop", "evidence"): 3,
        ("drawers", "draw"): 9,
        ("drawers", "write"): 9,
        ("loop", "write"): 9,
    }
    assert [what for what, _ in summary.times.waits] == ["pictures", "session", "drawing", "disk"]


@pytest.mark.parametrize(("workers", "sessions"), [(1, 1), (3, 2)])
def test_no_role_is_busier_than_its_threads(tmp_path: Path, workers: int, sessions: int) -> None:
    summary = run_in(tmp_path, 24, (300, 200), workers, sessions, draw=False)
    for role, count in {"decoders": workers, "session": sessions, "loop": 1}.items():
        spent = sum(row.wall for row in summary.times.stages if row.role == role)
        assert 0 < spent <= summary.seconds * count
    assert sum(seconds for _, seconds in summary.times.waits) <= summary.seconds
