"""Times of a run: sums by stage and thread role that add up, whatever threads and errors do."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from opal_deploy.artifact.outputs import Outputs
from opal_deploy.inference.executor import predict_stream
from opal_deploy.inference.run.drawing import ReportOptions
from opal_deploy.inference.run.run import RunOptions, run
from opal_deploy.inference.run.summary import Summary
from opal_deploy.inference.timing import NO_OP_TIMER, Stage, StageTimer, StageTimes
from opal_deploy.inference.types import InferenceOptions, Request
from opal_deploy.runtime.session import BatchTimes, ImageBatch


def wall(times: StageTimes, stage: Stage) -> float:
    row = times.sum_stage(stage)
    return 0.0 if row is None else row.wall


def write_images(folder: Path, count: int, size: tuple[int, int] = (300, 200)) -> Iterator[Request]:
    noise = np.random.default_rng(0).integers(0, 255, (size[1], size[0], 3), np.uint8)
    for n in range(count):
        Image.fromarray(noise).save(folder / f"{n}.jpg", quality=95)
        yield Request(str(n), folder / f"{n}.jpg")


def run_in(folder: Path, requests: Iterator[Request], sessions: list[Any], workers: int, *, draw: bool) -> Summary:
    (folder / "out").mkdir()
    options = InferenceOptions(batch=4, workers=workers)
    return run(requests, sessions, RunOptions(folder / "out", options, ReportOptions() if draw else None))


def burn(seconds: float) -> None:
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


def test_a_stage_has_its_own_calls_seconds_and_processor_time() -> None:
    timer = StageTimer()
    started = time.perf_counter()
    with timer.stage("decode"):
        time.sleep(0.02)
        with timer.stage("read"):
            burn(0.05)
        with timer.stage("read"):
            time.sleep(0.01)
    elapsed = time.perf_counter() - started
    reading, decoding = timer.read().stages

    assert (reading.stage, reading.calls, decoding.stage, decoding.calls) == ("read", 2, "decode", 1)
    assert reading.wall >= 0.06
    assert reading.cpu >= 0.05
    assert decoding.wall >= 0.02
    assert decoding.cpu < 0.03
    assert reading.wall + decoding.wall <= elapsed


def test_attributed_time_is_taken_from_the_stage_around_it() -> None:
    timer = StageTimer()
    started = time.perf_counter()
    with timer.stage("compute"):
        time.sleep(0.05)
        timer.attribute("transfer", 0.03)
    elapsed = time.perf_counter() - started
    times = timer.read()
    assert wall(times, "transfer") == 0.03
    assert 0.02 <= wall(times, "compute") <= elapsed - 0.03


def test_an_exception_ends_its_stage_and_passes_through() -> None:
    timer = StageTimer()
    with pytest.raises(KeyError), timer.stage("decode"), timer.stage("read"):
        raise KeyError
    with timer.stage("draw"):
        time.sleep(0.01)
        # what has ended can be read while the rest runs
        assert [row.stage for row in timer.read().stages] == ["read", "decode"]
    times = timer.read()
    assert {row.stage: row.calls for row in times.stages} == {"read": 1, "decode": 1, "draw": 1}
    # it is not counted as if it were still inside the one that failed
    assert wall(times, "draw") >= 0.01


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
        pass
    times = timer.read()
    assert [(row.role, row.calls) for row in times.stages] == [("decoders", 600), ("loop", 1)]
    both = times.sum_stage("decode")
    assert both is not None
    assert both.calls == 601


def test_waiting_is_no_stage() -> None:
    timer = StageTimer()
    with timer.waiting("disk"), timer.stage("write"):
        time.sleep(0.02)
    with timer.waiting("pictures"):
        time.sleep(0.01)
    times = timer.read()
    assert [what for what, _ in times.waits] == ["pictures", "disk"]
    assert dict(times.waits)["disk"] >= wall(times, "write") >= 0.02


def test_the_no_op_timer_measures_nothing() -> None:
    NO_OP_TIMER.register_thread("decoders")
    with NO_OP_TIMER.stage("decode"), NO_OP_TIMER.waiting("disk"):
        NO_OP_TIMER.attribute("transfer", 1.0)
    assert NO_OP_TIMER.read() == StageTimes()


def test_a_run_times_every_stage_where_it_happens(tmp_path: Path, bright_session: Callable) -> None:
    summary = run_in(tmp_path, write_images(tmp_path, 9), [bright_session()], 2, draw=True)
    found = {(row.role, row.stage): row.calls for row in summary.times.stages}
    # opened, and read at least once
    assert found.pop(("decoders", "read")) >= 18
    assert found == {
        ("decoders", "decode"): 9,
        ("decoders", "resize"): 9,
        ("session", "batch"): 3,
        ("session", "compute"): 3,
        ("session", "evidence"): 3,
        ("drawers", "draw"): 9,
        ("drawers", "write"): 9,
        ("loop", "write"): 9,
    }
    assert [what for what, _ in summary.times.waits] == ["pictures", "session", "drawing", "disk"]


def test_an_image_decoded_again_for_its_overlay_is_timed_where_it_happens(
    tmp_path: Path, bright_session: Callable
) -> None:
    # over the size that is kept
    summary = run_in(tmp_path, write_images(tmp_path, 1, (2000, 1100)), [bright_session()], 1, draw=True)
    assert {row.stage for row in summary.times.select_role("drawers")} == {"read", "decode", "draw", "write"}


@pytest.mark.parametrize(("workers", "sessions"), [(1, 1), (3, 2)])
def test_no_role_is_busier_than_its_threads(
    tmp_path: Path, bright_session: Callable, workers: int, sessions: int
) -> None:
    made = [bright_session() for _ in range(sessions)]
    summary = run_in(tmp_path, write_images(tmp_path, 24), made, workers, draw=False)
    for role, count in {"decoders": workers, "session": sessions, "loop": 1}.items():
        spent = sum(row.wall for row in summary.times.stages if row.role == role)
        assert 0 < spent <= summary.seconds * count
    assert sum(seconds for _, seconds in summary.times.waits) <= summary.seconds


def test_transfers_come_from_a_session_that_reports_them_and_only_by_option(bright_session: Callable) -> None:
    def staged(images: ImageBatch) -> tuple[Outputs, BatchTimes]:
        time.sleep(0.03)
        return session.run(images), BatchTimes(0.01, 0.015, 0.005)

    def timed(*, time_transfers: bool) -> StageTimes:
        timer = StageTimer()
        requests = (Request(str(n), Image.new("RGB", (40, 40))) for n in range(8))
        list(predict_stream(requests, [session], InferenceOptions(batch=4, time_transfers=time_transfers), timer))
        return timer.read()

    session = bright_session()
    assert timed(time_transfers=True).sum_stage("transfer") is None
    session.run_staged = staged
    assert timed(time_transfers=False).sum_stage("transfer") is None
    times = timed(time_transfers=True)
    assert wall(times, "transfer") == pytest.approx(0.03)
    assert wall(times, "compute") >= 0.03
    session.run_staged = lambda images: (session.run(images), BatchTimes(None, 0.01, None))
    assert timed(time_transfers=True).sum_stage("transfer") is None
