"""What is told of a measured case, from passes that are known."""

from __future__ import annotations

from dataclasses import replace

import pytest

from opal_deploy.artifact.metadata import Metadata
from opal_deploy.artifact.outputs import Outputs
from opal_deploy.bench.measurement import Measurement, Target
from opal_deploy.bench.memory import MemoryCurve
from opal_deploy.bench.monitor import Monitor
from opal_deploy.bench.pipeline.bottleneck import Pass, find_bottleneck
from opal_deploy.bench.pipeline.cases import Case
from opal_deploy.bench.pipeline.formatting import build_measurement, format_result, format_summary
from opal_deploy.bench.pipeline.measure import CaseResult, Variant
from opal_deploy.bench.targets.loading import LoadedTarget
from opal_deploy.runtime.session import ImageBatch


class NoSession:
    description = "nothing on CPU"
    metadata = Metadata(("a", "b"), 2, {"distance": "l2", "epsilon": 1e-8}, "exact", "none", (4, 4), (32, 32))

    def run(self, images: ImageBatch) -> Outputs:
        raise NotImplementedError


MONITOR = Monitor([], {"cpu": "not here"})
OPENED = LoadedTarget(NoSession(), Target("a.onnx"), 2)
FLAT = MemoryCurve(tuple(map(float, range(20))), (100.0,) * 20)
LEAK = MemoryCurve(tuple(map(float, range(20))), tuple(100.0 + 5 * second for second in range(20)))


def passes(*rates: float) -> tuple[Pass, ...]:
    return tuple(Pass(100, 100 / rate, 2.0) for rate in rates)


def result(bare: tuple[Pass, ...] = (), infer: tuple[Pass, ...] = (), memory: MemoryCurve = FLAT) -> CaseResult:
    made = infer or passes(80, 90, 91)
    bound = find_bottleneck(made, {}, 2)
    return CaseResult(Case(8, 2), 100, 101, "a session", bare, (Variant("infer", made, memory, bound),), 345.0)


def record_of(found: CaseResult) -> Measurement:
    return build_measurement(found, OPENED, MONITOR, repeats=3, network=True)


def test_a_record_reads_back_equal() -> None:
    found = record_of(result(passes(100, 100, 104)))
    assert Measurement.from_line(found.to_line()) == found


def test_what_the_monitor_saw_is_recorded() -> None:
    monitor = Monitor([], {"cpu": "not here"})
    monitor.marks = ("busy: other processes",)
    found = build_measurement(result(), OPENED, monitor, repeats=3, network=True)
    assert found.conditions == {"cpu": {"not_sampled": "not here"}}
    assert found.marks[-1] == "busy: other processes"


def test_shares_are_of_neighbours_in_time() -> None:
    figures = record_of(result(passes(100, 100, 104))).figures
    assert figures["infer_share"].repeats == pytest.approx((0.8, 0.9, 0.875))
    assert figures["infer_share"].value == pytest.approx(0.875)
    # the medians' ratio would be another
    assert figures["infer"].value / figures["bare"].value == pytest.approx(0.9)


def test_processor_time_is_an_image_s_share_of_the_process_s() -> None:
    figures = record_of(result(passes(100, 100, 104))).figures
    assert figures["infer.cpu"].value == pytest.approx(20.0)


@pytest.mark.parametrize(
    ("rates", "memory", "marks"),
    [
        ((80.0, 81.0), FLAT, ()),
        ((80.0, 95.0), FLAT, ("noisy",)),
        ((80.0, 81.0), LEAK, ("growing memory: infer",)),
        ((80.0, 95.0), LEAK, ("noisy", "growing memory: infer")),
    ],
)
def test_doubts_are_marked(rates: tuple[float, ...], memory: MemoryCurve, marks: tuple[str, ...]) -> None:
    assert record_of(result(passes(100, 101), passes(*rates), memory)).marks == marks


def test_a_noisy_rate_is_called_so_to_people() -> None:
    told = list(format_result(result(passes(100, 101, 102), passes(80, 95, 99))))
    assert "  session alone: 101.0 images/s (spread 2% over 3)" in told
    assert "  infer: 95.0 images/s (spread 20% over 3, NOISY): 94.1% of the session alone" in told
    assert told[0] == "100 of 101 pictures, batch 8, 2 workers, pictures as given; a session"
    assert told[-1] == "  peak memory 345 MB"


def test_without_a_bare_session_no_share_is_told() -> None:
    told = list(format_result(result(infer=passes(80))))
    assert "  infer: 80.0 images/s (once)" in told
    assert not any("session alone" in line for line in told)


def test_growth_is_a_line_a_case() -> None:
    small = result(passes(100, 100, 100))
    other = replace(small, case=Case(8, 1, (500, 375)), peak_megabytes=400.0)
    assert list(format_summary([small, other])) == [
        "batch 8, 2 workers, pictures as given: infer 90.0 images/s (90% of the session alone), peak 345 MB",
        "batch 8, 1 worker, pictures 500x375: infer 90.0 images/s (90% of the session alone), peak 400 MB",
    ]
