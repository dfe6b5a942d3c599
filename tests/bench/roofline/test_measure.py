"""A measured ceiling: what it records, and what it refuses. No test asserts a speed."""

from __future__ import annotations

import pytest
import torch

from opal_deploy.bench.measurement import Measurement
from opal_deploy.bench.roofline.measure import CeilingOptions, measure_ceiling, read_ceiling
from opal_deploy.errors import UsageError

SMALL = {"copy_bytes": 2**16, "matrix_size": 32, "repeats": 4, "warm_up": 2}


@pytest.fixture(scope="module")
def measured() -> Measurement:
    return measure_ceiling(CeilingOptions(threads=1, precisions=("fp32", "bf16"), **SMALL))  # type: ignore[arg-type]


class TestTheMeasurement:
    def test_is_the_best_of_the_repeats_that_it_keeps(self, measured: Measurement) -> None:
        assert measured.figures.keys() == {"copy", "matmul_fp32", "matmul_bf16"}
        for figure in measured.figures.values():
            assert len(figure.repeats) == 4
            assert figure.value == max(figure.repeats) > 0

    def test_says_what_was_timed_and_on_what(self, measured: Measurement) -> None:
        assert "32 x 32 by 32 x 32" in measured.timed
        assert measured.settings["warm_up"] == 2
        assert measured.case == {"threads": 1}
        assert measured.target is not None
        assert measured.target.device == "cpu"

    def test_survives_its_line(self, measured: Measurement) -> None:
        read = Measurement.from_line(measured.to_line())
        assert read.figures == measured.figures
        assert read_ceiling(read) == read_ceiling(measured)

    def test_becomes_a_ceiling_in_base_units(self, measured: Measurement) -> None:
        ceiling = read_ceiling(measured)
        assert ceiling.measured
        assert ceiling.name == "cpu, 1 thread"
        assert ceiling.bytes_per_second == pytest.approx(measured.figures["copy"].value * 1e9)
        assert ceiling.peak("bf16") == pytest.approx(measured.figures["matmul_bf16"].value * 1e12)

    def test_marks_a_noisy_figure(self, measured: Measurement) -> None:
        noisy = {f"noisy: {name}" for name, figure in measured.figures.items() if figure.is_noisy}
        assert set(measured.marks) == noisy


class TestTorchAfterwards:
    def test_is_as_it_was(self) -> None:
        before = torch.get_num_threads(), torch.backends.cuda.matmul.allow_tf32
        measure_ceiling(CeilingOptions(threads=1, precisions=("tf32",), **SMALL))  # type: ignore[arg-type]
        assert (torch.get_num_threads(), torch.backends.cuda.matmul.allow_tf32) == before


class TestRefusals:
    @pytest.mark.parametrize("device", ["tpu", "cuda:99", "meta"])
    def test_no_such_device(self, device: str) -> None:
        with pytest.raises(UsageError, match=f"device '?{device}"):
            measure_ceiling(CeilingOptions(device=device))

    def test_no_such_precision(self) -> None:
        with pytest.raises(UsageError, match="--precision int8: a measured ceiling knows fp32, tf32, fp16, bf16"):
            measure_ceiling(CeilingOptions(precisions=("int8",)))

    def test_another_measurement_is_no_ceiling(self) -> None:
        with pytest.raises(UsageError, match="kind latency is no ceiling; measure one"):
            read_ceiling(Measurement("latency", None, {}, {}))
