"""The bottleneck, the measurement and the text of a run of `bench pipeline`, from known times."""

import pytest

from opal_deploy.bench.bottleneck import Pass, find_bottleneck
from opal_deploy.bench.measurement import Measurement
from opal_deploy.bench.monitor import MemoryCurve, Monitor
from opal_deploy.bench.options import PipelineOptions
from opal_deploy.bench.pipeline import PipelineResult, Variant, build_measurement
from opal_deploy.timing import Stage, StageTime, StageTimes, ThreadRole

THREADS = {"decoders": 2, "drawers": 2, "session": 1, "loop": 1}
Rows = dict[tuple[ThreadRole, Stage], tuple[float, float]]
FLAT = MemoryCurve(tuple(map(float, range(20))), (100.0,) * 20)
LEAK = MemoryCurve(tuple(map(float, range(20))), tuple(100.0 + 5 * second for second in range(20)))


def one_pass(rows, waits, *, seconds=10.0, cpu=4.0):
    """100 images; `rows`: wall and CPU seconds."""
    stages = tuple(StageTime(role, stage, *times, 100) for (role, stage), times in rows.items())
    return Pass(100, seconds, cpu, StageTimes(stages, tuple(waits.items())))


def test_a_session_that_never_waits_is_the_bottleneck():
    rows = {("decoders", "decode"): (4.0, 3.0), ("session", "batch"): (0.3, 0.2), ("session", "compute"): (9.0, 0)}
    bottleneck = find_bottleneck([one_pass(rows, {"session": 8.0, "images": 1.0})], THREADS, cores=2)
    assert (bottleneck.role, bottleneck.stage) == ("session", "compute")
    assert bottleneck.busy == pytest.approx({"decoders": 0.2, "session": 0.93, "loop": 0.1})
    text = "bound by compute: the session is busy 93% of the time (decoders 20%, loop 10%); 2 cores are 20% busy"
    assert bottleneck.describe() == text
    # several passes are judged together
    passes = [one_pass(rows, {}), one_pass(rows, {}, seconds=14.8)]
    assert find_bottleneck(passes, THREADS, cores=2).busy["session"] == pytest.approx(18.6 / 24.8)


@pytest.mark.parametrize(
    ("rows", "waits", "role", "stage"),
    [
        ({("decoders", "read"): (3, 1), ("decoders", "decode"): (15, 9)}, {"pictures": 9.9}, "decoders", "decode"),
        ({("decoders", "read"): (15, 1), ("decoders", "decode"): (3, 3)}, {"pictures": 9.9}, "decoders", "read"),
        ({("drawers", "draw"): (18, 9), ("session", "compute"): (5, 1)}, {"pictures": 9.9}, "drawers", "draw"),
        # a loop that waits for nobody
        ({("session", "compute"): (2, 0), ("loop", "write"): (8, 1)}, {"session": 0.5, "disk": 8}, "loop", "write"),
        ({("session", "compute"): (2, 0), ("loop", "write"): (1, 1)}, {"session": 0.5, "disk": 1}, "loop",
         "finding images and scheduling"),
    ],
)  # fmt: skip
def test_the_largest_stage_of_the_busiest_threads_is_named(rows, waits, role, stage):
    bottleneck = find_bottleneck([one_pass(rows, waits)], THREADS, cores=8)
    assert (bottleneck.role, bottleneck.stage) == (role, stage)
    assert bottleneck.loop_waited_for == pytest.approx({reason: seconds / 10 for reason, seconds in waits.items()})


def test_the_shares_of_busy_cores_are_listed():
    rows = {("decoders", "decode"): (6.0, 3.8), ("session", "compute"): (9.5, 5.7)}
    bottleneck = find_bottleneck([one_pass(rows, {"session": 9.0}, cpu=19.0)], THREADS, cores=2)
    assert bottleneck.cores_busy == pytest.approx(0.95)
    assert bottleneck.cpu_share == pytest.approx({"decode": 0.2, "compute": 0.3, "rest": 0.5})
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
        ({("session", "compute"): (5.0, 1)}, 8.0, 2.0, "no clear bottleneck: "),
    ],
    ids=["cores", "nothing"],
)  # fmt: skip
def test_no_bottleneck_is_made_up(rows, waited, cpu, text):
    bottleneck = find_bottleneck([one_pass(rows, {"session": waited}, cpu=cpu)], THREADS, cores=2)
    assert (bottleneck.role, bottleneck.stage) == (None, None)
    assert bottleneck.describe().startswith(text)


def build_result(bare, infer, memory=FLAT):
    """The result of passes of known rates."""
    alone, made = (tuple(Pass(100, 100 / rate, 2.0) for rate in rates) for rates in (bare, infer))
    variant = Variant("infer", made, memory, find_bottleneck(made, {}, 2))
    return PipelineResult(100, 101, 2, "a session", alone, (variant,), 345.0)


def measurement_of(fake_target, result, *marks):
    monitor = Monitor([], {"cpu": "not here"})
    monitor.marks = marks
    return build_measurement(result, fake_target(0, lambda _: None), monitor, PipelineOptions(repeats=3))


def test_a_measurement_has_the_ratios_of_neighbours_the_cpu_time_and_the_monitor(fake_target):
    result = build_result((100, 100, 104), (80, 90, 91))
    measurement = measurement_of(fake_target, result, "busy: other processes")
    figures = measurement.figures
    assert figures["infer_share"].repeats == pytest.approx((0.8, 0.9, 0.875))
    assert figures["infer_share"].value == pytest.approx(0.875)
    # the medians' ratio would be another
    assert figures["infer"].value / figures["bare"].value == pytest.approx(0.9)
    assert figures["infer.cpu"].value == pytest.approx(20.0)
    assert measurement.conditions == {"cpu": {"not_sampled": "not here"}}
    assert measurement.marks[-1] == "busy: other processes"
    assert Measurement.from_line(measurement.to_line()) == measurement


@pytest.mark.parametrize(
    ("rates", "memory", "marks"),
    [((80, 81), FLAT, ()), ((80, 95), FLAT, ("noisy",)), ((80, 95), LEAK, ("noisy", "growing memory: infer"))],
    ids=["none", "noisy", "both"],
)
def test_doubts_are_marked(fake_target, rates, memory, marks):
    assert measurement_of(fake_target, build_result((100, 101), rates, memory)).marks == marks
