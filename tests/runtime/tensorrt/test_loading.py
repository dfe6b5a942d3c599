"""What is asked before native code sees an engine, and what the first load on a machine does."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from opal_deploy.artifact.engine_file import checks_path, read_checks, sidecar_path
from opal_deploy.errors import ArtifactError, MissingExtra, VerificationError
from opal_deploy.runtime.nvml import Driver, Gpu
from opal_deploy.runtime.tensorrt import bindings
from opal_deploy.runtime.tensorrt.bindings import Bindings
from opal_deploy.runtime.tensorrt.compatibility import find_incompatibility

A100 = Gpu(0, "NVIDIA A100-SXM4-80GB", 80 << 30, (8, 0))
H100 = Gpu(0, "NVIDIA H100 80GB HBM3", 80 << 30, (9, 0))
T4 = Gpu(0, "Tesla T4", 15 << 30, (7, 5))


def refused(stand: Any, **options: Any) -> str:
    """The one line of a refusal; the plan must not have been touched."""
    with pytest.raises(ArtifactError) as refusal:
        stand.open(**options)
    assert refusal.value.exit_code == 2
    assert stand.trt.deserialised == 0
    line = str(refusal.value)
    assert "\n" not in line
    return line


class TestFiles:
    @pytest.mark.parametrize("place", [0, 1, 1000, 0.3, 0.5, 0.9, -1])
    def test_a_flipped_bit_in_the_plan(self, stand: Any, place: float) -> None:
        content = bytearray(stand.path.read_bytes())
        content[int(place * len(content)) if 0 < place < 1 else int(place)] ^= 4
        stand.path.write_bytes(content)
        line = refused(stand)
        assert "damaged" in line
        assert "c.fp16.onnx --trt --rebuild" in line

    @pytest.mark.parametrize("kept", [0, 1, 0.5, 0.999])
    def test_a_truncated_plan(self, stand: Any, kept: float) -> None:
        content = stand.path.read_bytes()
        stand.path.write_bytes(content[: int(kept * len(content)) if kept < 1 else 1])
        assert "damaged" in refused(stand)

    def test_every_flipped_byte_of_the_sidecar(self, stand: Any) -> None:
        sidecar = sidecar_path(stand.path)
        content = sidecar.read_bytes()
        for place in range(0, len(content), max(1, len(content) // 150)):
            changed = bytearray(content)
            changed[place] ^= 1
            sidecar.write_bytes(changed)
            # white space between values may change without changing what is said
            if chr(content[place]) not in " \n":
                assert "damaged" in refused(stand), place

    @pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b'{"digest": 1}', b"\xff\xfe", b"[" * 100_000])
    def test_no_sidecar_of_ours(self, stand: Any, content: bytes) -> None:
        sidecar_path(stand.path).write_bytes(content)
        assert "not a sidecar of ours" in refused(stand)

    def test_no_sidecar_at_all(self, stand: Any) -> None:
        sidecar_path(stand.path).unlink()
        assert "its sidecar c.fp16.sm89.trt.engine.json is missing" in refused(stand)

    def test_no_engine_at_all(self, stand: Any) -> None:
        stand.path.unlink()
        assert "no such engine" in refused(stand)

    def test_another_schema(self, stand: Any) -> None:
        stand.describe(schema=2)
        line = refused(stand)
        assert "sidecar schema 2 found, 1 expected" in line
        assert "--trt" in line

    def test_the_plan_is_looked_at_before_the_schema(self, stand: Any) -> None:
        stand.describe(schema=2)
        stand.path.write_bytes(b"other")
        assert "damaged" in refused(stand)


class TestMachine:
    """In the order builder and version, compute capability, driver."""

    def test_no_gpu(self, stand: Any) -> None:
        stand.driver = Driver(problem="no NVIDIA driver found (libnvidia-ml.so.1)")
        assert "runs on an NVIDIA GPU only: no NVIDIA driver found" in refused(stand)

    def test_its_library_is_not_installed(self, stand: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        stand.library = None
        monkeypatch.setattr(bindings, "installed_version", lambda name: None)
        assert "needs TensorRT 11.4.0.106, which is not installed: pip install 'opal-deploy[trt]'" in refused(stand)

    def test_another_version(self, stand: Any) -> None:
        stand.library = replace(stand.library, version="11.5.0.1")
        line = refused(stand)
        assert "built by TensorRT 11.4.0.106, and 11.5.0.1 is installed here" in line
        assert "c.fp16.onnx --trt --rebuild --batch 1:2:4" in line

    @pytest.mark.parametrize(
        ("here", "runs"), [("11.4.0.106", True), ("11.5.0.1", True), ("11.3.0.9", False), ("12.0", False)]
    )
    def test_a_version_compatible_engine_runs_with_newer_libraries_of_its_major_version(
        self, stand: Any, here: str, runs: bool
    ) -> None:
        sidecar = stand.describe(options={"batch": [1, 2, 4], "version_compatible": True})
        found = find_incompatibility(sidecar, stand.driver.gpus[0], stand.driver, here)
        assert (found == "") is runs

    def test_a_version_compatible_engine_may_bring_its_own_runtime_and_no_other(self, stand: Any) -> None:
        stand.open()
        assert stand.trt.host_code_allowed is False
        stand.describe(options={"batch": [1, 2, 4], "version_compatible": True})
        stand.open()
        assert stand.trt.host_code_allowed is True

    def test_another_system(self, stand: Any) -> None:
        stand.describe(builder={"name": "tensorrt", "version": "11.4.0.106", "cuda": 13, "platform": "Windows AMD64"})
        assert "it was built on Windows AMD64, and this is " in refused(stand)

    def test_another_compute_capability(self, stand: Any) -> None:
        stand.cudart.name, stand.cudart.capability = A100.name, (8, 0)
        line = refused(stand)
        assert "built for sm89 (L4, L40), and NVIDIA A100-SXM4-80GB is sm80" in line
        assert "--trt --rebuild" in line

    @pytest.mark.parametrize(("gpu", "runs"), [(A100, True), (H100, True), (T4, False)])
    def test_a_hardware_compatible_engine_runs_on_ampere_and_newer(self, stand: Any, gpu: Gpu, runs: bool) -> None:
        sidecar = stand.describe(options={"batch": [1, 2, 4], "hardware_compatible": "ampere+"})
        assert (find_incompatibility(sidecar, gpu, stand.driver, "11.4.0.106") == "") is runs

    def test_a_driver_that_is_too_old(self, stand: Any) -> None:
        stand.driver = replace(stand.driver, version="550.54", cuda=(12, 4))
        assert "needs CUDA 13, and driver 550.54 runs CUDA 12.4 at most; update the driver" in refused(stand)

    def test_the_order(self, stand: Any) -> None:
        stand.library = replace(stand.library, version="12.0")
        stand.cudart.capability = (8, 0)
        stand.driver = replace(stand.driver, cuda=(12, 4))
        assert "12.0 is installed" in refused(stand)
        stand.library = replace(stand.library, version="11.4.0.106")
        assert "is sm80" in refused(stand)
        stand.cudart.capability = (8, 9)
        assert "runs CUDA 12.4" in refused(stand)

    def test_a_builder_of_a_later_version_of_ours(self, stand: Any) -> None:
        stand.describe(builder={"name": "tensorrt-next", "version": "1"})
        assert "built by 'tensorrt-next', which this version does not know" in refused(stand)

    def test_the_memory_library_is_not_installed(self, stand: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        stand.cudart = None
        with pytest.raises(MissingExtra, match=r"cuda-bindings.*opal-deploy\[trt-rtx\]"):
            stand.open()


class TestFirstLoad:
    def test_the_test_vectors_run_and_the_outcome_is_kept_beside_the_engine(self, stand: Any) -> None:
        session = stand.open()
        assert session.description.endswith("fp16, checked now")
        assert sum(stand.trt.executed) == 4
        (check,) = read_checks(stand.path)
        assert check.passed
        assert check.machine == {
            "gpu": "NVIDIA L4", "compute_capability": [8, 9], "driver": "580.95.05", "runtime": "tensorrt 11.4.0.106",
            "gpu_uuid": "000102030405060708090a0b0c0d0e0f",
        }  # fmt: skip
        assert check.report["images"] == 4

    def test_the_second_load_asks_nothing(self, stand: Any) -> None:
        stand.open()
        stand.trt.executed.clear()
        assert "checked here 20" in stand.open().description
        assert stand.trt.executed == []

    @pytest.mark.parametrize("change", ["driver", "gpu", "its twin", "plan"])
    def test_another_machine_or_plan_is_checked_anew(
        self, stand: Any, make_stand: Callable[..., Any], tiny: Any, change: str
    ) -> None:
        stand.open()
        if change == "driver":
            stand.driver = replace(stand.driver, version="581.00")
        elif change == "gpu":
            stand.cudart.name = "NVIDIA L40S"
        elif change == "its twin":
            stand.cudart.uuid = bytes(16)
        else:
            stand = make_stand(tiny.path)
        stand.trt.executed.clear()
        assert "checked now" in stand.open().description
        assert sum(stand.trt.executed) == 4
        assert len(read_checks(stand.path)) == 2

    def test_an_engine_that_answers_wrongly_never_answers(
        self, make_stand: Callable[..., Any], another: Path, tiny_fp16: Path
    ) -> None:
        stand = make_stand(another)
        stand.onnx = tiny_fp16
        stand.describe()
        for _ in range(2):
            with pytest.raises(VerificationError, match="does not reproduce its own test vectors") as failure:
                stand.open()
            assert failure.value.exit_code == 4
            assert "--trt --rebuild" in str(failure.value)
            (check,) = read_checks(stand.path)
            assert not check.passed

    @pytest.mark.parametrize("content", [b"", b"{", b'{"checks": [{}]}', b'{"checks": 3}', b"[]"])
    def test_a_damaged_record_of_outcomes_is_made_anew(self, stand: Any, content: bytes) -> None:
        checks_path(stand.path).write_bytes(content)
        assert "checked now" in stand.open().description
        assert json.loads(checks_path(stand.path).read_text())["checks"][0]["passed"] is True

    def test_in_a_folder_that_cannot_be_written_it_is_checked_every_time(
        self, stand: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def read_only(**_: Any) -> None:
            raise OSError(30, os.strerror(30))

        monkeypatch.setattr("tempfile.mkstemp", read_only)
        for _ in range(2):
            assert "checked at every start" in stand.open().description
        assert not checks_path(stand.path).exists()


class TestStrippedWeights:
    OPTIONS = {"batch": [1, 2, 4], "strip_weights": True}  # noqa: RUF012

    @pytest.fixture
    def stripped(self, stand: Any, tiny_fp16: Path) -> Any:
        stand.onnx = stand.path.with_name("c.fp16.onnx")
        stand.onnx.write_bytes(tiny_fp16.read_bytes())
        stand.describe(options=self.OPTIONS)
        return stand

    def test_they_are_put_back_from_the_onnx_file_beside_it(self, stripped: Any) -> None:
        stripped.open()
        assert stripped.trt.refitted == [str(stripped.onnx)]

    def test_without_that_file_it_is_refused(self, stripped: Any) -> None:
        stripped.onnx.unlink()
        with pytest.raises(ArtifactError, match=r"c\.fp16\.onnx, which holds its weights, is not beside it"):
            stripped.open()

    def test_with_another_file_of_that_name_it_is_refused(self, stripped: Any, another: Path) -> None:
        stripped.onnx.write_bytes(another.read_bytes())
        with pytest.raises(ArtifactError, match="not the file that it was built from"):
            stripped.open()
        assert stripped.trt.refitted == []


@pytest.mark.parametrize("name", ["tensorrt", "tensorrt-rtx"])
def test_a_library_that_does_not_load_is_one_line(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: str) -> Bindings:
        raise OSError("libnvinfer.so.11: cannot open shared object file")

    monkeypatch.setattr(bindings, "installed_version", lambda _: "11.4")
    monkeypatch.setattr("importlib.import_module", broken)
    with pytest.raises(Exception, match=r"installed but does not load \(libnvinfer\.so\.11"):
        bindings.load(name, "a test")
