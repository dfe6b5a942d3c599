"""Times of a run: sums by stage and thread role that add up, whatever threads and errors do."""

import numpy as np
import pytest

from opal_deploy import timing
from opal_deploy.predict.prepare import InferenceOptions
from opal_deploy.run.setup import RunOptions
from opal_deploy.sources.image import InputImage
from opal_deploy.timing import StageTimer
from opal_deploy.visualization.report import ReportOptions
from tests.bright import BrightSession, save, write_run


@pytest.fixture
def spend(monkeypatch):
    """Let seconds pass, and of the processor's time."""
    now = np.zeros(2)
    monkeypatch.setattr(timing, "_wall_seconds", lambda: float(now[0]))
    monkeypatch.setattr(timing, "_cpu_seconds", lambda: float(now[1]))

    def spend(wall, cpu):
        now[:] += wall, cpu

    return spend


def rows(times):
    return {row.stage: (row.wall, row.cpu, row.calls) for row in times.stages}


def test_a_stage_has_its_own_calls_seconds_and_processor_time(spend):
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
    with timer.waiting("images"):
        spend(1, 0)
    times = timer.read()
    assert rows(times) == {
        "read": (20, 10, 2), "decode": (2, 1, 1), "compute": (8, 4, 1), "write": (4, 0, 1),
    }  # fmt: skip
    assert times.waits == (("images", 1), ("disk", 4))


def test_an_exception_ends_its_stage_and_passes_through(spend):
    timer = StageTimer()
    with pytest.raises(KeyError), timer.stage("decode"), timer.stage("read"):
        raise KeyError
    with timer.stage("draw"):
        spend(1, 0)
        # what has ended can be read while the rest runs
        assert [row.stage for row in timer.read().stages] == ["read", "decode"]
    # it is not counted as if it were still inside the one that failed
    assert rows(timer.read()) == {"read": (0, 0, 1), "decode": (0, 0, 1), "draw": (1, 0, 1)}


def test_a_run_times_every_stage_where_it_happens(tmp_path):
    images = [save(tmp_path / f"{n}.png", (300, 200)) for n in range(9)]
    (tmp_path / "out").mkdir()
    options = RunOptions(tmp_path / "out", InferenceOptions(batch=4), ReportOptions())
    summary = write_run(options, map(InputImage.at, images), BrightSession())
    found = {(row.role, row.stage): row.calls for row in summary.times.stages}
    assert found == {
        # resized for the model, and to be drawn on
        ("decoders", "read"): 9, ("decoders", "decode"): 9, ("decoders", "resize"): 18, ("session", "compute"): 3,
        ("loop", "evidence"): 3, ("drawers", "draw"): 9, ("drawers", "write"): 9, ("loop", "write"): 9,
    }  # fmt: skip
    assert [what for what, _ in summary.times.waits] == ["images", "session", "drawing", "disk"]
