"""Sessions of ONNX Runtime and PyTorch: the same outputs, the same refusals, full memory told from a lost device."""

from __future__ import annotations

import os
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import onnx
import pytest
import torch

from opal_deploy.artifact import onnx_file
from opal_deploy.errors import ArtifactError, OutOfMemory, StoppedEarly, UsageError, VerificationError
from opal_deploy.export.checkpoint_source import CheckpointSource
from opal_deploy.export.exporter import export
from opal_deploy.export.options import ExportOptions, ExportTargets
from opal_deploy.model.checkpoint import Checkpoint
from opal_deploy.model.config import NetworkConfig
from opal_deploy.model.network import OpalNetwork
from opal_deploy.preprocess.decode import decode
from opal_deploy.preprocess.geometry import compute_geometry
from opal_deploy.preprocess.resize import to_input
from opal_deploy.runtime import onnx_session
from opal_deploy.runtime.onnx_session import OnnxSession, available_cpus
from opal_deploy.runtime.select import open_sessions
from opal_deploy.runtime.torch_session import TorchSession
from opal_deploy.runtime.verification import GATES, compare_outputs, verify_test_vectors
from opal_deploy.synthetic import example_images

IMAGES = example_images(5, 64, 96)


class TestOnnxRuntimeOnTheCpu:
    def test_it_answers_as_pytorch_does(self, tiny):
        reference = TorchSession(tiny.checkpoint, device="cpu").run_reference(IMAGES)
        found = OnnxSession(tiny.path, device="cpu", threads=2).run(IMAGES)
        assert compare_outputs(reference, found, onnx_file.read_metadata(tiny.path), GATES["fp32"])

    def test_a_picture_has_the_same_answer_in_any_batch(self, tiny):
        session = OnnxSession(tiny.path, device="cpu", threads=2)
        whole, alone = session.run(IMAGES), session.run(IMAGES[3:4])
        np.testing.assert_allclose(whole.logits[3:4], alone.logits, rtol=1e-5)
        np.testing.assert_array_equal(whole.argmax[3:4], alone.argmax)

    def test_a_view_with_other_strides_is_answered_the_same(self, tiny):
        session = OnnxSession(tiny.path, device="cpu", threads=2)
        flipped = IMAGES[:, :, ::-1]
        np.testing.assert_array_equal(session.run(flipped).logits, session.run(flipped.copy()).logits)

    @pytest.mark.parametrize(
        "images",
        [
            IMAGES.astype(np.float32),
            IMAGES[0],
            IMAGES[:0],
            IMAGES[:, :32],
            IMAGES.transpose(0, 3, 1, 2),
            IMAGES[..., :1],
        ],
        ids=["float", "no batch", "empty", "small", "channels first", "grey"],
    )
    def test_a_batch_of_another_shape_is_the_callers_bug(self, tiny, images):
        for session in (OnnxSession(tiny.path, device="cpu"), TorchSession(tiny.checkpoint, device="cpu")):
            with pytest.raises(ValueError, match=r"expected uint8 \[N, 64, 96, 3\]"):
                session.run(images)

    def test_threads_are_as_many_as_the_process_may_use(self, tiny, monkeypatch):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: {2, 5, 7}, raising=False)
        assert OnnxSession(tiny.path, device="cpu").threads == available_cpus() == 3
        assert OnnxSession(tiny.path, device="cpu", threads=1).threads == 1

    def test_the_description_names_engine_provider_threads_and_precision(self, tiny, tiny_fp16):
        description = OnnxSession(tiny.path, device="cpu", threads=2).description
        assert description.startswith("ONNX Runtime ")
        assert description.endswith(" on CPU, 2 threads, fp32")
        assert OnnxSession(tiny_fp16, device="cpu", threads=1).description.endswith("fp16")

    def test_a_graph_that_onnx_runtime_refuses_is_one_line(self, tiny, tmp_path):
        model = onnx.load(tiny.path)
        model.graph.node[-1].op_type = "Nonsense"
        path = tmp_path / "m.onnx"
        onnx.save(model, path)
        with pytest.raises(ArtifactError, match="ONNX Runtime refuses it") as refusal:
            OnnxSession(path, device="cpu", check_digest=False)
        assert "\n" not in str(refusal.value)


@pytest.mark.data
def test_photographs_get_pytorchs_answers_from_onnx_runtime(cub_mini, shared_weights, tmp_path):
    torch.manual_seed(0)
    network = OpalNetwork(
        NetworkConfig("resnet18", 10), weights=shared_weights / "resnet18_ktb_small.safetensors"
    ).eval()
    with torch.no_grad():
        network.head.projection.weight.mul_(4)
    checkpoint = Checkpoint(network, [str(index) for index in range(10)])
    out = tmp_path / "c.onnx"
    options = ExportOptions(images=cub_mini / "images", threads=2)
    done = export(CheckpointSource(checkpoint, out), ExportTargets({"fp32": out}), options).onnx[0]
    # not those that the export was verified on
    files = islice(sorted(cub_mini.rglob("*.jpg"))[::-1], 12)
    shown = np.stack([to_input(image, compute_geometry(image), (224, 224)) for image in map(decode, files)])
    reference = TorchSession(checkpoint, device="cpu").run_reference(shown)
    # the order of sums moves some pictures' cosines by a little over the gate; no cell may differ on any
    gate = GATES["fp32"].relaxed_for_machine()
    found = compare_outputs(reference, OnnxSession(out, device="cpu", threads=2).run(shown), done.metadata, gate)
    assert found, found.failures
    assert found.cells > 0.9 * 12 * 50, "most cells must be far enough ahead to be compared"


class TestDevices:
    @pytest.mark.parametrize("device", ["gpu", "tpu", "cuda:x", "cuda:-1", ""])
    def test_an_unknown_device_is_refused_by_both_engines(self, tiny, device):
        with pytest.raises(UsageError):
            OnnxSession(tiny.path, device=device)
        with pytest.raises(UsageError):
            TorchSession(tiny.checkpoint, device=device)

    def test_cuda_without_its_provider_names_the_extra(self, tiny, monkeypatch):
        import onnxruntime

        monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ["CPUExecutionProvider"])
        with pytest.raises(UsageError, match=r"opal-deploy\[gpu\]"):
            OnnxSession(tiny.path, device="cuda")

    @pytest.mark.parametrize(
        ("gpus", "device", "says"), [(0, "cuda:0", "no CUDA GPU"), (2, "cuda:2", "cuda:2: PyTorch sees 2")]
    )
    def test_a_gpu_that_is_not_there_is_refused_by_torch(self, tiny, monkeypatch, gpus, device, says):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        with pytest.raises(UsageError, match=says):
            TorchSession(tiny.checkpoint, device=device)

    def test_auto_takes_the_cpu_where_there_is_no_gpu(self, tiny, monkeypatch):
        monkeypatch.setattr(onnx_session, "cuda_is_usable", lambda: False)
        assert "on CPU" in OnnxSession(tiny.path, device="auto", threads=1).description

    @pytest.mark.parametrize("text", ["0,0", "0,x", "1;2", "-1", ",", "0,"])
    def test_a_list_of_devices_that_makes_no_sense_is_refused(self, tiny, text):
        with pytest.raises(UsageError):
            open_sessions(tiny.path, device=text)


def _fail_with(error: Exception) -> Any:
    def run(*_: object) -> None:
        raise error

    return run


class TestFailures:
    @pytest.mark.parametrize(
        ("text", "kind"),
        [
            ("BFCArena::AllocateRawInternal Failed to allocate memory for requested buffer of size 5", OutOfMemory),
            ("BFCArena Available memory of 0 is smaller than requested bytes of 1024", OutOfMemory),
            ("CUDA failure 2: out of memory ; GPU=0\nsecond line", OutOfMemory),
            ("CUBLAS failure 3: CUBLAS_STATUS_ALLOC_FAILED ; GPU=0", OutOfMemory),
            ("std::bad_alloc", OutOfMemory),
            ("CUDA failure 719: unspecified launch failure ; GPU=0", StoppedEarly),
        ],
    )
    def test_onnx_runtime(self, tiny, monkeypatch, text, kind):
        session = OnnxSession(tiny.path, device="cpu", threads=1)
        monkeypatch.setattr(session, "_run_cpu", _fail_with(RuntimeError(text)))
        with pytest.raises(StoppedEarly, match=r"ONNX Runtime failed on a batch of 5 \(") as raised:
            session.run(IMAGES)
        assert type(raised.value) is kind
        assert "\n" not in str(raised.value)

    @pytest.mark.parametrize(
        ("error", "kind"),
        [
            (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB"), OutOfMemory),
            (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"), OutOfMemory),
            (RuntimeError("CUDA error: unspecified launch failure"), StoppedEarly),
            (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), RuntimeError),
        ],
    )
    def test_pytorch(self, tiny, monkeypatch, error, kind):
        session = TorchSession(tiny.checkpoint, device="cpu")
        monkeypatch.setattr(session._network, "explain", _fail_with(error))
        with pytest.raises(kind) as raised:
            session.run(IMAGES)
        assert type(raised.value) is kind


class TestTorchReference:
    def test_channels_last_moves_answers_by_rounding_alone_and_is_undone(self, tiny):
        session = TorchSession(tiny.checkpoint, device="cpu")
        before = session.run(IMAGES)
        other = session.run_channels_last(IMAGES)
        after = session.run(IMAGES)
        np.testing.assert_array_equal(before.logits, after.logits)
        np.testing.assert_allclose(before.logits, other.logits, atol=1e-5)

    def test_a_lead_is_relative_to_the_best_cell(self, tiny):
        session = TorchSession(tiny.checkpoint, device="cpu")
        reference = session.run_reference(IMAGES)
        mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
        images = ((torch.from_numpy(IMAGES) / 255 - mean) / std).permute(0, 3, 1, 2)
        with torch.no_grad():
            attention = tiny.checkpoint.network.explain(images).attention
        best = attention.flatten(2).sort(dim=2, descending=True).values
        expected = (best[..., 0] - best[..., 1]) / best[..., 0]
        np.testing.assert_allclose(reference.top2_margin, expected, atol=1e-5)

    def test_it_never_uses_tf32(self, tiny):
        TorchSession(tiny.checkpoint, device="cpu")
        assert not torch.backends.cuda.matmul.allow_tf32
        assert not torch.backends.cudnn.allow_tf32


class TestTestVectors:
    @pytest.mark.parametrize("precision", ["fp32", "fp16"])
    def test_a_file_reproduces_its_own(self, tiny, tiny_fp16, precision):
        path = tiny.path if precision == "fp32" else tiny_fp16
        found = verify_test_vectors(OnnxSession(path, device="cpu", threads=2), "c.onnx")
        assert found
        assert found.images == 4

    @pytest.mark.parametrize("precision", ["fp32", "fp16"])
    def test_another_networks_vectors_are_not_reproduced(self, tiny, tiny_fp16, another, precision):
        session = OnnxSession(tiny.path if precision == "fp32" else tiny_fp16, device="cpu", threads=2)
        theirs = onnx_file.read_metadata(another).test_vectors
        session.metadata = replace(session.metadata, test_vectors=theirs)
        with pytest.raises(VerificationError, match="does not reproduce its own test vectors"):
            verify_test_vectors(session, "c.onnx")

    def test_a_file_without_any_is_refused(self, tiny):
        session = OnnxSession(tiny.path, device="cpu", threads=2)
        session.metadata = replace(session.metadata, test_vectors={})
        with pytest.raises(ArtifactError, match="no test vectors"):
            verify_test_vectors(session, "c.onnx")


@pytest.mark.gpu
class TestCuda:
    """Not run where there is no NVIDIA GPU; never run on hardware when this was written."""

    def test_it_answers_as_the_cpu_does(self, tiny):
        reference = TorchSession(tiny.checkpoint, device="cpu").run_reference(IMAGES)
        session = OnnxSession(tiny.path, device="cuda")
        gate = GATES["fp32"].relaxed_for_machine()
        assert compare_outputs(reference, session.run(IMAGES), session.metadata, gate)

    def test_inputs_and_outputs_are_bound(self, tiny, monkeypatch):
        session = OnnxSession(tiny.path, device="cuda")

        def unbound(*_: Any) -> None:
            raise AssertionError("copied twice: the unbound path was taken")

        monkeypatch.setattr(session, "_run_cpu", unbound)
        found = session.run(IMAGES)
        assert found.logits.shape == (5, 4)
        assert found.argmax is not None
        assert found.argmax.dtype == np.int32

    def test_batches_of_changing_size_run_one_after_the_other(self, tiny):
        session = OnnxSession(tiny.path, device="cuda:0")
        whole = session.run(IMAGES)
        for start, stop in ((0, 1), (1, 3), (3, 5)):
            np.testing.assert_allclose(session.run(IMAGES[start:stop]).logits, whole.logits[start:stop], atol=1e-5)

    def test_auto_takes_the_gpu(self, tiny):
        assert "CUDA device 0" in OnnxSession(tiny.path, device="auto").description

    def test_tf32_is_off(self, tiny):
        session = OnnxSession(tiny.path, device="cuda")
        options = session._session.get_provider_options()["CUDAExecutionProvider"]
        assert options["use_tf32"] == "0"

    def test_a_device_that_is_not_there_is_refused(self, tiny):
        with pytest.raises(UsageError):
            OnnxSession(tiny.path, device="cuda:99")

    def test_half_precision_reproduces_its_vectors(self, tiny_fp16):
        assert verify_test_vectors(OnnxSession(tiny_fp16, device="cuda"), "c.fp16.onnx")

    def test_torch_on_the_gpu_answers_as_on_the_cpu(self, tiny):
        reference = TorchSession(tiny.checkpoint, device="cpu").run_reference(IMAGES)
        try:
            found = TorchSession(tiny.checkpoint, device="cuda").run(IMAGES)
        finally:
            tiny.checkpoint.network.cpu()
        metadata = onnx_file.read_metadata(tiny.path)
        assert compare_outputs(reference, found, metadata, GATES["fp32"].relaxed_for_machine())
