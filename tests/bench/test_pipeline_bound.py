"""What bounds a run, from times that are known."""

from __future__ import annotations

import json

import pytest

from opal_deploy.bench.pipeline.bottleneck import Pass, find_bottleneck
from opal_deploy.inference.timing import Stage, StageTime, StageTimes, ThreadRole, WaitReason

THREADS: dict[ThreadRole, int] = {"decoders": 2, "drawers": 2, "session": 1, "loop": 1}
Rows = dict[tuple[ThreadRole, Stage], tuple[float, float]]


def one_pass(rows: Rows, waits: dict[WaitReason, float], *, seconds: float = 10.0, cpu: float = 4.0) -> Pass:
    """100 images; `rows`: wall and processor seconds."""
    stages = tuple(StageTime(station, stage, *times, 100) for (station, stage), times in rows.items())
    return Pass(100, seconds, cpu, StageTimes(stages, tuple(waits.items())))


def test_a_session_that_never_rests_is_the_bound() -> None:
    rows: Rows = {
        ("decoders", "decode"): (4.0, 3.0),
        ("session", "batch"): (0.3, 0.2),
        ("session", "compute"): (9.0, 0),
    }

    bound = find_bottleneck([one_pass(rows, {"session": 8.0, "pictures": 1.0})], THREADS, cores=2)

    assert (bound.station, bound.stage) == ("session", "compute")
    assert bound.busy == pytest.approx({"decoders": 0.2, "session": 0.93, "loop": 0.1})
    assert bound.line() == (
        "bound by compute: the session is busy 93% of the time (decoders 20%, loop 10%); 2 cores are 20% busy"
    )


def test_capacity_is_what_a_station_would_reach_if_it_never_waited() -> None:
    rows: Rows = {("decoders", "decode"): (4.0, 3.0), ("session", "compute"): (8.0, 0)}

    bound = find_bottleneck([one_pass(rows, {"session": 9.5})], THREADS, cores=2)

    # 100 images took each of the two decoders 2 s, the session 8 s and the loop half a second
    assert bound.capacity == pytest.approx({"decoders": 50.0, "session": 12.5, "loop": 200.0})


@pytest.mark.parametrize(
    ("rows", "station", "stage"),
    [
        ({("decoders", "read"): (3, 1), ("decoders", "decode"): (15, 9)}, "decoders", "decode"),
        ({("decoders", "read"): (15, 1), ("decoders", "decode"): (3, 3)}, "decoders", "read"),
        ({("drawers", "draw"): (18, 9), ("session", "compute"): (5, 1)}, "drawers", "draw"),
        ({("session", "transfer"): (6, 0), ("session", "compute"): (3, 0)}, "session", "transfer"),
    ],
)
def test_the_largest_stage_of_the_busiest_station_is_named(rows: Rows, station: ThreadRole, stage: str) -> None:
    bound = find_bottleneck([one_pass(rows, {"pictures": 9.9})], THREADS, cores=8)
    assert (bound.station, bound.stage) == (station, stage)


@pytest.mark.parametrize(
    ("writing", "stage"), [(8.0, "write"), (1.0, "finding images and scheduling")], ids=["disk", "scheduling"]
)
def test_a_loop_that_waits_for_nobody_is_the_bound(writing: float, stage: str) -> None:
    rows: Rows = {("session", "compute"): (2.0, 0), ("loop", "write"): (writing, 1)}
    bound = find_bottleneck([one_pass(rows, {"session": 0.5, "disk": writing})], THREADS, cores=8)
    assert (bound.station, bound.stage) == ("loop", stage)
    assert bound.waited == pytest.approx({"session": 0.05, "disk": writing / 10})


def test_where_the_cores_are_busy_their_shares_are_told() -> None:
    rows: Rows = {("decoders", "decode"): (6.0, 3.8), ("session", "compute"): (9.5, 5.7)}

    bound = find_bottleneck([one_pass(rows, {"session": 9.0}, cpu=19.0)], THREADS, cores=2)

    assert bound.cores_busy == pytest.approx(0.95)
    assert bound.cpu == pytest.approx({"decode": 0.2, "compute": 0.3, "rest": 0.5})
    assert bound.line().endswith(
        "2 cores are 95% busy, shared by the runtime's threads and the rest 50%, compute 30%, decode 20%"
    )


def test_busy_cores_bound_where_no_station_does() -> None:
    rows: Rows = {("decoders", "decode"): (10.0, 9.0), ("session", "compute"): (6.0, 6)}
    bound = find_bottleneck([one_pass(rows, {"session": 9.0}, cpu=18.0)], THREADS, cores=2)
    assert (bound.station, bound.stage) == (None, None)
    assert bound.line().startswith(
        "bound by the cores: no station is always busy (decoders 50%, session 60%, loop 10%)"
    )


def test_no_bound_is_made_up_where_nothing_is_busy() -> None:
    rows: Rows = {("session", "compute"): (5.0, 1)}
    bound = find_bottleneck([one_pass(rows, {"session": 8.0}, cpu=2.0)], THREADS, cores=2)
    assert bound.station is None
    assert bound.line().startswith("bound by nothing clearly: ")


def test_several_passes_are_judged_together() -> None:
    rows: Rows = {("session", "compute"): (6.0, 0)}
    idle, full = one_pass(rows, {}), one_pass(rows, {}, seconds=6.0)
    assert find_bottleneck([idle, full], THREADS, cores=2).busy["session"] == pytest.approx(12 / 16)


def test_a_verdict_is_json() -> None:
    bound = find_bottleneck([one_pass({("session", "compute"): (9.0, 0)}, {"session": 9.0})], THREADS, cores=1)
    document = json.loads(json.dumps(bound.to_dict()))
    assert document["station"] == "session"
    assert document["line"] == bound.line()
