"""A measured ceiling: what it records, and what it refuses. No test asserts a speed."""

from __future__ import annotations

import pytest
import torch

from opal_deploy.bench.measurement import Measurement
from opal_deploy.bench.roofline.measure import CeilingOptions, measure_ceiling, read_ceiling
from opal_deploy.errors import UsageError


def options(*precisions: str) -> CeilingOptions:
    return CeilingOptions(threads=1, precisions=precisions, copy_bytes=2**16, matrix_size=32, repeats=4, warm_up=2)


@pytest.fixture(scope="module")
def measured() -> Measurement:
    return measure_ceiling(options("fp32", "bf16"))


def test_figures_are_the_best_of_the_repeats_and_noise_is_marked(measured: Measurement) -> None:
    assert measured.figures.keys() == {"copy", "matmul_fp32", "matmul_bf16"}
    for figure in measured.figures.values():
        assert len(figure.repeats) == 4
        assert figure.value == max(figure.repeats) > 0
    noisy = {f"noisy: {name}" for name, figure in measured.figures.items() if figure.is_noisy}
    assert set(measured.marks) == noisy


def test_the_line_names_what_was_timed_and_reads_back_as_a_ceiling_in_base_units(measured: Measurement) -> None:
    assert "32 x 32 by 32 x 32" in measured.timed
    assert measured.settings["warm_up"] == 2
    assert measured.case == {"threads": 1}
    assert measured.target is not None
    assert measured.target.device == "cpu"
    copy = Measurement.from_line(measured.to_line())
    assert copy.figures == measured.figures
    ceiling = read_ceiling(copy)
    assert (ceiling.measured, ceiling.name) == (True, "cpu, 1 thread")
    assert ceiling.bytes_per_second == pytest.approx(measured.figures["copy"].value * 1e9)
    assert ceiling.peak("bf16") == pytest.approx(measured.figures["matmul_bf16"].value * 1e12)


def test_torch_is_left_as_it_was() -> None:
    before = torch.get_num_threads(), torch.backends.cuda.matmul.allow_tf32
    measure_ceiling(options("tf32"))
    assert (torch.get_num_threads(), torch.backends.cuda.matmul.allow_tf32) == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *((CeilingOptions(device=device), f"device '?{device}") for device in ("tpu", "cuda:99", "meta")),
        (CeilingOptions(precisions=("int8",)), "--precision int8: a measured ceiling knows fp32, tf32, fp16, bf16"),
    ],
)
def test_unknown_devices_and_precisions_are_refused(options: CeilingOptions, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        measure_ceiling(options)


def test_another_measurement_is_no_ceiling() -> None:
    with pytest.raises(UsageError, match="kind latency is no ceiling; measure one"):
        read_ceiling(Measurement("latency", None, {}, {}))
