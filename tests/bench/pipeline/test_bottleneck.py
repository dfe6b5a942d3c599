"""The bottleneck of a run, from known times."""

from __future__ import annotations

import json

import pytest

from opal_deploy.bench.pipeline.bottleneck import Pass, find_bottleneck
from opal_deploy.inference.timing import Stage, StageTime, StageTimes, ThreadRole, WaitReason

THREADS: dict[ThreadRole, int] = {"decoders": 2, "drawers": 2, "session": 1, "loop": 1}
Rows = dict[tuple[ThreadRole, Stage], tuple[float, float]]


def one_pass(rows: Rows, waits: dict[WaitReason, float], *, seconds: float = 10.0, cpu: float = 4.0) -> Pass:
    """100 images; `rows`: wall and CPU seconds."""
    stages = tuple(StageTime(role, stage, *times, 100) for (role, stage), times in rows.items())
    return Pass(100, seconds, cpu, StageTimes(stages, tuple(waits.items())))


def test_a_session_that_never_waits_is_the_bottleneck() -> None:
    rows: Rows = {
        ("decoders", "decode"): (4.0, 3.0),
        ("session", "batch"): (0.3, 0.2),
        ("session", "compute"): (9.0, 0),
    }
    bottleneck = find_bottleneck([one_pass(rows, {"session": 8.0, "pictures": 1.0})], THREADS, cores=2)
    assert (bottleneck.role, bottleneck.stage) == ("session", "compute")
    assert bottleneck.busy == pytest.approx({"decoders": 0.2, "session": 0.93, "loop": 0.1})
    text = "bound by compute: the session is busy 93% of the time (decoders 20%, loop 10%); 2 cores are 20% busy"
    assert bottleneck.describe() == text
    document = json.loads(json.dumps(bottleneck.to_dict()))
    assert (document["station"], document["line"]) == ("session", text)
    # 100 images took each of the two decoders 2 s, the session 9.3 s and the loop one second
    assert bottleneck.capacity == pytest.approx({"decoders": 50.0, "session": 100 / 9.3, "loop": 100.0})
    # several passes are judged together
    passes = [one_pass(rows, {}), one_pass(rows, {}, seconds=14.8)]
    assert find_bottleneck(passes, THREADS, cores=2).busy["session"] == pytest.approx(18.6 / 24.8)


@pytest.mark.parametrize(
    ("rows", "role", "stage"),
    [
        ({("decoders", "read"): (3, 1), ("decoders", "decode"): (15, 9)}, "decoders", "decode"),
        ({("decoders", "read"): (15, 1), ("decoders", "decode"): (3, 3)}, "decoders", "read"),
        ({("drawers", "draw"): (18, 9), ("session", "compute"): (5, 1)}, "drawers", "draw"),
        ({("session", "transfer"): (6, 0), ("session", "compute"): (3, 0)}, "session", "transfer"),
    ],
)
def test_the_largest_stage_of_the_busiest_threads_is_named(rows: Rows, role: ThreadRole, stage: str) -> None:
    bottleneck = find_bottleneck([one_pass(rows, {"pictures": 9.9})], THREADS, cores=8)
    assert (bottleneck.role, bottleneck.stage) == (role, stage)


@pytest.mark.parametrize(
    ("writing", "stage"), [(8.0, "write"), (1.0, "finding images and scheduling")], ids=["disk", "scheduling"]
)
def test_a_loop_that_waits_for_nobody_is_the_bottleneck(writing: float, stage: str) -> None:
    rows: Rows = {("session", "compute"): (2.0, 0), ("loop", "write"): (writing, 1)}
    bottleneck = find_bottleneck([one_pass(rows, {"session": 0.5, "disk": writing})], THREADS, cores=8)
    assert (bottleneck.role, bottleneck.stage) == ("loop", stage)
    assert bottleneck.waits == pytest.approx({"session": 0.05, "disk": writing / 10})


def test_the_shares_of_busy_cores_are_listed() -> None:
    rows: Rows = {("decoders", "decode"): (6.0, 3.8), ("session", "compute"): (9.5, 5.7)}
    bottleneck = find_bottleneck([one_pass(rows, {"session": 9.0}, cpu=19.0)], THREADS, cores=2)
    assert bottleneck.cores_busy == pytest.approx(0.95)
    assert bottleneck.cpu == pytest.approx({"decode": 0.2, "compute": 0.3, "rest": 0.5})
    assert bottleneck.describe().endswith(
        "2 cores are 95% busy, shared by the runtime's threads and the rest 50%, compute 30%, decode 20%"
    )


@pytest.mark.parametrize(
    ("rows", "waited", "cpu", "text"),
    [
        (
            {("decoders", "decode"): (10.0, 9.0), ("session", "compute"): (6.0, 6)}, 9.0, 18.0,
            "bound by the cores: no group of threads is always busy (decoders 50%, session 60%, loop 10%)",
        ),
        ({("session", "compute"): (5.0, 1)}, 8.0, 2.0, "bound by nothing clearly: "),
    ],
    ids=["cores", "nothing"],
)  # fmt: skip
def test_no_bottleneck_is_made_up(rows: Rows, waited: float, cpu: float, text: str) -> None:
    bottleneck = find_bottleneck([one_pass(rows, {"session": waited}, cpu=cpu)], THREADS, cores=2)
    assert (bottleneck.role, bottleneck.stage) == (None, None)
    assert bottleneck.describe().startswith(text)
