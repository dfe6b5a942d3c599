"""The text and the measurement of a case, from known passes."""

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
from opal_deploy.bench.pipeline.measure import CaseResult, PipelineOptions, Variant
from opal_deploy.bench.targets.loading import LoadedTarget
from opal_deploy.runtime.session import ImageBatch


class NoSession:
    description = "nothing on CPU"
    metadata = Metadata(("a", "b"), 2, {"distance": "l2", "epsilon": 1e-8}, "exact", "none", (4, 4), (32, 32))

    def run(self, images: ImageBatch) -> Outputs:
        raise NotImplementedError


FLAT = MemoryCurve(tuple(map(float, range(20))), (100.0,) * 20)
LEAK = MemoryCurve(tuple(map(float, range(20))), tuple(100.0 + 5 * second for second in range(20)))


def passes(*rates: float) -> tuple[Pass, ...]:
    return tuple(Pass(100, 100 / rate, 2.0) for rate in rates)


def build_result(bare: tuple[Pass, ...] = (), infer: tuple[Pass, ...] = (), memory: MemoryCurve = FLAT) -> CaseResult:
    made = infer or passes(80, 90, 91)
    variant = Variant("infer", made, memory, find_bottleneck(made, {}, 2))
    return CaseResult(Case(8, 2), 100, 101, "a session", bare, (variant,), 345.0)


def measurement_of(result: CaseResult, *marks: str) -> Measurement:
    monitor = Monitor([], {"cpu": "not here"})
    monitor.marks = marks
    return build_measurement(result, LoadedTarget(NoSession(), Target("a.onnx"), 2), monitor, PipelineOptions(3))


def test_a_measurement_has_the_ratios_of_neighbours_the_cpu_time_and_the_monitor() -> None:
    measurement = measurement_of(build_result(passes(100, 100, 104)), "busy: other processes")
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
    [
        ((80.0, 81.0), FLAT, ()),
        ((80.0, 95.0), FLAT, ("noisy",)),
        ((80.0, 81.0), LEAK, ("growing memory: infer",)),
        ((80.0, 95.0), LEAK, ("noisy", "growing memory: infer")),
    ],
    ids=["none", "noisy", "growing", "both"],
)
def test_doubts_are_marked(rates: tuple[float, ...], memory: MemoryCurve, marks: tuple[str, ...]) -> None:
    assert measurement_of(build_result(passes(100, 101), passes(*rates), memory)).marks == marks


def test_the_text_has_rates_spread_and_share() -> None:
    lines = list(format_result(build_result(passes(100, 101, 102), passes(80, 95, 99))))
    assert "  session alone: 101.0 images/s (spread 2% over 3)" in lines
    assert "  infer: 95.0 images/s (spread 20% over 3, NOISY): 94.1% of the session alone" in lines
    assert lines[0] == "100 of 101 images, batch 8, 2 workers, images as given; a session"
    assert lines[-1] == "  peak memory 345 MB"
    # no share without the session alone
    without = list(format_result(build_result(infer=passes(80))))
    assert "  infer: 80.0 images/s (once)" in without
    assert not any("session alone" in line for line in without)


def test_the_summary_has_one_line_a_case() -> None:
    small = build_result(passes(100, 100, 100))
    other = replace(small, case=Case(8, 1, (500, 375)), peak_megabytes=400.0)
    assert list(format_summary([small, other])) == [
        "batch 8, 2 workers, images as given: infer 90.0 images/s (90% of the session alone), peak 345 MB",
        "batch 8, 1 worker, images 500x375: infer 90.0 images/s (90% of the session alone), peak 400 MB",
    ]
