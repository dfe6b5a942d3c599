"""Sessions of ONNX Runtime and PyTorch: the same outputs, the same refusals, full memory told from a lost device."""

import os
from dataclasses import replace
from itertools import product
from unittest.mock import Mock

import numpy as np
import onnx
import pynvml
import pytest
import torch
from onnx import helper, numpy_helper

from opal_deploy.artifact import onnx_file
from opal_deploy.errors import ArtifactError, OutOfMemory, StoppedEarly, UsageError, VerificationError
from opal_deploy.runtime.cuda_session import open_onnx_session
from opal_deploy.runtime.devices import Driver, GpuSensors, NvmlError, read_driver
from opal_deploy.runtime.gates import GATES
from opal_deploy.runtime.onnx_session import OnnxSession, available_cpus, translate_errors
from opal_deploy.runtime.openvino_session import OpenvinoSession
from opal_deploy.runtime.select import open_sessions
from opal_deploy.runtime.torch_session import TorchSession
from opal_deploy.runtime.verification import compare_outputs, verify_test_vectors
from opal_deploy.synthetic import example_images

IMAGES = example_images(5, 64, 96)
FP32, FP32_ELSEWHERE = GATES["fp32"], GATES["fp32"].relaxed_for_machine()


@pytest.fixture(scope="module")
def session(tiny):
    return OnnxSession(tiny.path, device="cpu", threads=2)


@pytest.fixture(scope="module")
def torch_session(tiny):
    return TorchSession(tiny.checkpoint, device="cpu")


class TestOnnxRuntimeOnTheCpu:
    def test_it_gives_pytorchs_outputs(self, session, torch_session):
        assert compare_outputs(torch_session.run_reference(IMAGES), session.run(IMAGES), session.metadata, FP32)

    def test_outputs_depend_on_neither_batch_nor_strides(self, session):
        whole, alone, flipped = session.run(IMAGES), session.run(IMAGES[3:4]), IMAGES[:, :, ::-1]
        np.testing.assert_allclose(whole.logits[3:4], alone.logits, rtol=1e-5)
        np.testing.assert_array_equal(whole.argmax[3:4], alone.argmax)
        np.testing.assert_array_equal(session.run(flipped).logits, session.run(flipped.copy()).logits)

    def test_a_batch_of_another_shape_is_the_callers_bug(self, session, torch_session, in_openvino):
        others = (
            IMAGES.astype(np.float32), IMAGES[0], IMAGES[:0], IMAGES[:, :32], IMAGES.transpose(0, 3, 1, 2),
            IMAGES[..., :1],
        )  # fmt: skip
        for each, images in product((session, torch_session, in_openvino), others):
            with pytest.raises(ValueError, match=r"expected uint8 \[N, 64, 96, 3\]"):
                each.run(images)

    def test_a_graph_that_asks_for_terabytes_finds_no_memory(self, tiny, tmp_path):
        model = onnx.load(tiny.path)
        (logits,) = (node for node in model.graph.node if "logits" in node.output)
        logits.output[0] = "small"
        model.graph.initializer.append(numpy_helper.from_array(np.array([1 << 40]), "side"))
        model.graph.node.append(helper.make_node("ConstantOfShape", ["side"], ["huge"]))
        model.graph.node.append(helper.make_node("ReduceSum", ["huge"], ["sum"], keepdims=0))
        model.graph.node.append(helper.make_node("Add", ["small", "sum"], ["logits"]))
        onnx.save(model, tmp_path / "m.onnx")
        with pytest.raises(OutOfMemory, match="4398046511104"):
            OnnxSession(tmp_path / "m.onnx", device="cpu", check_digest=False).run(IMAGES)

    def test_threads_are_as_many_as_the_process_may_use(self, tiny, session, monkeypatch):
        assert session.description.startswith("ONNX Runtime ")
        assert session.description.endswith(" on CPU, 2 threads, fp32")
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: {2, 5, 7}, raising=False)
        assert OnnxSession(tiny.path, device="cpu").threads == available_cpus() == 3

    def test_a_graph_that_onnx_runtime_refuses_is_one_line(self, tiny, tmp_path):
        model = onnx.load(tiny.path)
        model.graph.node[-1].op_type = "Nonsense"
        onnx.save(model, tmp_path / "m.onnx")
        with pytest.raises(ArtifactError, match=r"\A.*ONNX Runtime refuses it.*\Z"):
            OnnxSession(tmp_path / "m.onnx", device="cpu", check_digest=False)


@pytest.fixture(scope="module")
def in_openvino(tiny):
    return OpenvinoSession(tiny.path, threads=1)


def test_openvino_runs_on_the_cpu_only(tiny):
    with pytest.raises(UsageError, match=r"\Adevice cuda:1: .*\Z"):
        open_sessions(tiny.path, device="1", runtime="openvino")


class TestDevices:
    @pytest.mark.parametrize("device", ["gpu", "tpu", "cuda:x", "cuda:-1", ""])
    def test_an_unknown_device_is_refused_by_both_engines(self, tiny, device):
        for open_session, source in ((open_onnx_session, tiny.path), (TorchSession, tiny.checkpoint)):
            with pytest.raises(UsageError, match="expected auto, cpu, cuda or cuda:N"):
                open_session(source, device=device)

    def test_without_a_provider_for_cuda_auto_takes_the_cpu_and_cuda_names_the_extra(self, tiny, monkeypatch):
        monkeypatch.setattr("onnxruntime.get_available_providers", lambda: ["CPUExecutionProvider"])
        monkeypatch.setattr("opal_deploy.runtime.onnx_session.find_gpu_problem", lambda: "")
        assert "on CPU" in open_onnx_session(tiny.path, device="auto", threads=1).description
        with pytest.raises(UsageError, match=r"opal-deploy\[gpu\]"):
            open_onnx_session(tiny.path, device="cuda")

    def test_where_there_is_no_driver_cuda_says_so_and_names_no_package(self, tiny, monkeypatch):
        monkeypatch.setattr("onnxruntime.get_available_providers", lambda: ["CPUExecutionProvider"])
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.setattr(pynvml, "nvmlLib", None)
        monkeypatch.setattr(pynvml, "CDLL", Mock(side_effect=OSError("libnvidia-ml.so.1")))
        assert read_driver() == Driver(problem="no NVIDIA driver found (libnvidia-ml.so.1)")
        with pytest.raises(NvmlError, match="Not Found"):
            GpuSensors(0)
        for open_session, source in ((open_onnx_session, tiny.path), (TorchSession, tiny.checkpoint)):
            with pytest.raises(UsageError, match=r"no NVIDIA driver found .*or use --device cpu") as refused:
                open_session(source, device="cuda")
            assert "pip" not in str(refused.value)

    def test_a_gpu_that_is_not_there_is_refused_by_torch(self, tiny, monkeypatch):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        with pytest.raises(UsageError, match="cuda:2: PyTorch sees 2"):
            TorchSession(tiny.checkpoint, device="cuda:2")

    def test_a_list_of_devices_that_makes_no_sense_is_refused(self, tiny):
        for text in ("0,0", "0,x", "1;2", "-1", ",", "0,"):
            with pytest.raises(UsageError):
                open_sessions(tiny.path, device=text)


class TestFailures:
    def test_onnx_runtime(self):
        # what `tests/gpu_stubs`, whose cuBLAS never fails, cannot provoke
        text = "CUBLAS failure 3: CUBLAS_STATUS_ALLOC_FAILED ; GPU=0\nsecond line"
        with pytest.raises(OutOfMemory, match=r"\AONNX Runtime failed on a batch of 5 \(.*\Z"), translate_errors(5):
            raise RuntimeError(text)

    @pytest.mark.parametrize(
        ("error", "kind"),
        [
            (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB"), OutOfMemory),
            (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"), OutOfMemory),
            (RuntimeError("CUDA error: unspecified launch failure"), StoppedEarly),
            (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), RuntimeError),
        ],
    )
    def test_pytorch(self, tiny, torch_session, monkeypatch, error, kind):
        monkeypatch.setattr(tiny.checkpoint.network, "explain", Mock(side_effect=error))
        with pytest.raises(kind) as raised:
            torch_session.run(IMAGES)
        assert type(raised.value) is kind


class TestTorchReference:
    def test_other_orders_of_summation_move_outputs_by_rounding_only_and_are_undone(self, torch_session):
        before = torch_session.run(IMAGES)
        others = [run(IMAGES) for run in (*torch_session.float32_runs, torch_session.run_float64)]
        np.testing.assert_array_equal(before.logits, torch_session.run(IMAGES).logits)
        for other in others:
            np.testing.assert_allclose(before.logits, other.logits, atol=1e-5)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_file_reproduces_its_own_test_vectors_and_no_other_networks(precision, tiny, tiny_fp16, another):
    either = OnnxSession(tiny.path if precision == "fp32" else tiny_fp16, device="cpu", threads=2)
    report = verify_test_vectors(either, "c.onnx")
    assert report
    assert report.images == 4
    either.metadata = replace(either.metadata, test_vectors=onnx_file.read_metadata(another).test_vectors)
    with pytest.raises(VerificationError, match="does not reproduce its own test vectors"):
        verify_test_vectors(either, "c.onnx")
    either.metadata = replace(either.metadata, test_vectors={})
    with pytest.raises(ArtifactError, match="no test vectors"):
        verify_test_vectors(either, "c.onnx")


@pytest.mark.gpu
class TestCuda:
    def test_outputs_are_the_cpus_in_batches_of_any_size(self, tiny, torch_session):
        gpu_session = open_onnx_session(tiny.path, device="cuda:0")
        whole = gpu_session.run(IMAGES)
        assert compare_outputs(torch_session.run_reference(IMAGES), whole, gpu_session.metadata, FP32_ELSEWHERE)
        for start, stop in ((0, 1), (1, 3), (3, 5)):
            np.testing.assert_allclose(gpu_session.run(IMAGES[start:stop]).logits, whole.logits[start:stop], atol=1e-5)

    def test_batches_in_flight_from_page_locked_memory_have_the_same_outputs(self, tiny):
        session = open_onnx_session(tiny.path, device="cuda:0")
        images = IMAGES.copy()
        assert session.register_buffer(images.ctypes.data, images.nbytes)
        expected = OnnxSession(tiny.path, device="cpu", threads=1).run(IMAGES)
        for _ in range(4):
            handles = [session.submit(images[start : start + 2]) for start in (0, 1, 3)]
            for start, handle in zip((0, 1, 3), handles, strict=True):
                np.testing.assert_allclose(
                    session.collect(handle).logits, expected.logits[start : start + 2], atol=1e-4
                )
        session.close()

    def test_half_precision_reproduces_its_vectors(self, tiny_fp16):
        assert verify_test_vectors(open_onnx_session(tiny_fp16, device="cuda"), "c.fp16.onnx")

    def test_torch_on_the_gpu_gives_the_cpus_outputs(self, tiny, session, torch_session):
        reference = torch_session.run_reference(IMAGES)
        try:
            outputs = TorchSession(tiny.checkpoint, device="cuda").run(IMAGES)
        finally:
            tiny.checkpoint.network.cpu()
        assert compare_outputs(reference, outputs, session.metadata, FP32_ELSEWHERE)
