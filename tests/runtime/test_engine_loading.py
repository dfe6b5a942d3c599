"""What is asked before native code sees an engine, and what the first load on a machine does."""

import json
import re
from dataclasses import replace
from unittest.mock import Mock

import pytest

from opal_deploy.artifact.engine_file import checks_path, read_checks, sidecar_path
from opal_deploy.errors import ArtifactError, UsageError, VerificationError
from opal_deploy.runtime import tensorrt
from opal_deploy.runtime.devices import Driver, Gpu
from tests.export.conftest import needs_rtx

A100 = Gpu(0, "NVIDIA A100-SXM4-80GB", 80 << 30, (8, 0))
L4 = Gpu(0, "NVIDIA L4", 24 << 30, (8, 9))
OLD_DRIVER = {"driver": Driver("550.54", (12, 4), (L4,))}
NO_GPU = {"driver": Driver(problem="no NVIDIA driver found")}
VERSION = "11.4.0.106"
BUILDER = {"name": "tensorrt", "version": VERSION, "cuda": 13}
LEAN_ONLY = {"version": None, "lean": VERSION}
LEAN = {"options": {"batch": [1, 2, 4], "lean": True}}


def refusal(stand):
    """Return the one line of a refusal; the plan must not have been touched."""
    with pytest.raises(ArtifactError) as raised:
        stand.open()
    assert raised.value.exit_code == 2
    assert stand.trt.deserialized == 0
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_a_flipped_bit_or_a_missing_end_of_the_plan_is_found(stand):
    content = stand.path.read_bytes()
    for damaged in (content[:-1] + bytes([content[-1] ^ 4]), content[:-9], b""):
        stand.path.write_bytes(damaged)
        assert re.search(r"damaged.*c\.fp16\.onnx --trt --rebuild", refusal(stand))


def test_every_flipped_byte_of_the_sidecar_and_any_other_content_is_found(stand):
    sidecar = sidecar_path(stand.path)
    content = sidecar.read_bytes()
    for position in range(0, len(content), max(1, len(content) // 50)):
        changed = bytearray(content)
        changed[position] ^= 1
        sidecar.write_bytes(changed)
        if chr(content[position]) not in " \n":  # white space between values may change
            assert "damaged" in refusal(stand), position
    for other in (b"", b"{", b"[]", b"null", b'{"digest": 1}', b"\xff\xfe", b"[" * 100_000):
        sidecar.write_bytes(other)
        assert "not written by opal-deploy" in refusal(stand)


def test_missing_files_and_another_schema_are_named(stand):
    stand.describe(schema=2)
    line = refusal(stand)
    assert "sidecar schema 2 found, 1 expected" in line
    assert "--trt" in line
    sidecar_path(stand.path).unlink()
    assert "its sidecar c.fp16.sm89.trt.engine.json is missing" in refusal(stand)
    stand.path.unlink()
    assert "no such engine" in refusal(stand)


OTHER_MACHINES = {
    "no GPU": (NO_GPU, {}, "only on NVIDIA GPUs: no NVIDIA driver"),
    "no library": ({"version": None}, {}, "11.4.0.106, which is not installed: pip install 'opal-deploy[trt]'"),
    "only the lean runtime": (LEAN_ONLY, {}, "the lean runtime here runs only engines built with --lean; run c."),
    "no lean runtime": ({"version": None}, LEAN, "which is not installed: pip install 'opal-deploy[trt-lean]'"),
    "its version": ({**LEAN_ONLY, "lean": "11.5.0.1"}, LEAN, "11.5.0.1 is installed here: pip install tensorrt-lean"),
    "version": ({"version": "11.5.0.1"}, {}, "built by TensorRT 11.4.0.106, and 11.5.0.1 is installed here"),
    "system": ({}, {"builder": BUILDER | {"platform": "Windows AMD64"}}, "built on Windows AMD64, and this is "),
    "capability": ({"gpu": A100}, {}, "built for sm89 (L4, L40), and NVIDIA A100-SXM4-80GB is sm80"),
    "driver": (OLD_DRIVER, {}, "needs CUDA 13.0, and driver 550.54 runs CUDA 12.4 at most; update the driver"),
    "builder": ({}, {"builder": {"name": "tensorrt-next", "version": "1"}}, "'tensorrt-next', which this version of"),
}


@pytest.mark.parametrize(("machine", "sidecar", "says"), OTHER_MACHINES.values(), ids=OTHER_MACHINES)
def test_another_machine_is_refused(stand, machine, sidecar, says):
    stand.describe(**sidecar)
    stand.cuda.gpu = machine.get("gpu", L4)
    for name in machine.keys() - {"gpu"}:
        setattr(stand, name, machine[name])
    line = refusal(stand)
    assert says in line
    assert "c.fp16.onnx --trt --rebuild --batch 1:2:4" in line
    assert line.endswith("--lean") is (sidecar is LEAN)


def test_an_engine_for_the_lean_runtime_runs_in_it_or_in_tensorrt(stand):
    stand.describe(**LEAN)
    for installed in ((None, VERSION), (VERSION, VERSION), (VERSION, None), (VERSION, "11.5.0.1")):
        stand.version, stand.lean = installed
        used = "TensorRT's lean runtime" if stand.lean == VERSION else "TensorRT"
        assert stand.open().description.startswith(f"{used} {VERSION} on NVIDIA L4")


@needs_rtx
def test_the_real_librarys_reason_for_refusing_another_engine_is_one_line(stand):
    library = tensorrt.load("tensorrt-rtx", "a test")
    stand.trt, stand.name, stand.version = library.module, library.name, library.version
    stand.path.write_bytes(b"ftrt" + bytes(4096))
    stand.describe(builder=BUILDER | {"name": stand.name, "version": stand.version})
    with pytest.raises(ArtifactError, match=r"RTX \S+ refuses it \(.*serialization.*--trt --rebuild") as refused:
        stand.open()
    assert "\n" not in str(refused.value)


class TestFirstLoad:
    def test_the_test_vectors_run_once_and_the_outcome_is_kept_beside_the_engine(self, stand):
        assert stand.open().description.endswith("fp16, checked now")
        assert sum(stand.trt.executed) == 4
        (check,) = read_checks(stand.path)
        assert check.passed
        assert check.machine == {
            "gpu": "NVIDIA L4", "compute_capability": [8, 9], "driver": "580.95.05", "runtime": "tensorrt 11.4.0.106",
            "gpu_uuid": "000102030405060708090a0b0c0d0e0f",
        }  # fmt: skip
        assert check.report["images"] == 4
        stand.trt.executed.clear()
        assert "checked here 20" in stand.open().description
        assert stand.trt.executed == []

    @pytest.mark.parametrize("change", ["driver", "gpu", "its twin", "plan"])
    def test_another_machine_or_plan_is_checked_anew(self, stand, make_stand, tiny, change):
        stand.open()
        if change == "plan":
            stand = make_stand(tiny.path)
        stand.driver = replace(stand.driver, version="581.00") if change == "driver" else stand.driver
        stand.cuda.gpu = replace(L4, name="NVIDIA L40S") if change == "gpu" else L4
        stand.cuda.uuid = bytes(16).hex() if change == "its twin" else stand.cuda.uuid
        stand.trt.executed.clear()
        assert "checked now" in stand.open().description
        assert sum(stand.trt.executed) == 4
        assert len(read_checks(stand.path)) == 2

    def test_an_engine_with_wrong_outputs_never_runs(self, make_stand, another, tiny_fp16):
        stand = make_stand(another)
        stand.onnx = tiny_fp16
        stand.describe()
        for _ in range(2):
            with pytest.raises(VerificationError, match=r"does not reproduce its own.*--trt --rebuild") as failure:
                stand.open()
            assert failure.value.exit_code == 4
            (check,) = read_checks(stand.path)
            assert not check.passed

    def test_a_damaged_record_of_outcomes_is_made_anew(self, stand):
        for content in (b"", b"{", b'{"checks": [{}]}', b'{"checks": 3}', b"[]"):
            checks_path(stand.path).write_bytes(content)
            assert "checked now" in stand.open().description
            assert json.loads(checks_path(stand.path).read_text())["checks"][0]["passed"] is True

    def test_in_a_folder_that_cannot_be_written_it_is_checked_every_time(self, stand, monkeypatch):
        monkeypatch.setattr("tempfile.mkstemp", Mock(side_effect=OSError(30, "Read-only file system")))
        for _ in range(2):
            assert "checked at every start" in stand.open().description
        assert not checks_path(stand.path).exists()


def test_a_library_that_does_not_load_is_one_line(monkeypatch):
    monkeypatch.setattr(tensorrt, "installed_version", lambda _: "11.4")
    monkeypatch.setattr("importlib.import_module", Mock(side_effect=OSError("libnvinfer.so.11: cannot open")))
    with pytest.raises(UsageError, match=r"does not load \(libnvinfer"):
        tensorrt.load("tensorrt", "a test")
