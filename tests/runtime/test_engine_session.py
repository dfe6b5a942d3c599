"""Sessions on engines give the outputs of the ONNX file that the engine was built from, in batches of any size."""

import inspect
from unittest.mock import Mock

import numpy as np
import pytest

from opal_deploy.errors import OutOfMemory, StoppedEarly, UsageError
from opal_deploy.runtime.cuda import Cuda
from opal_deploy.runtime.engine_session import KernelCache
from opal_deploy.runtime.onnx_session import OnnxSession
from opal_deploy.runtime.tensorrt import attempt, first_error, make_logger
from opal_deploy.synthetic import example_images
from tests.builders import export_onnx
from tests.runtime.bindings import NAMES, RTX_NAMES, find_missing
from tests.runtime.fakes import FakeCuda, FakeRuntimeConfig


@pytest.fixture(scope="module")
def images():
    return example_images(11, 64, 96)


@pytest.fixture(scope="module")
def expected(tiny_fp16, images):
    """Return ONNX Runtime's outputs for a part of the images."""
    session = OnnxSession(tiny_fp16, device="cpu", threads=1)
    return lambda start, stop: session.run(images[start:stop])


@pytest.fixture(scope="module")
def float_input(tiny, tmp_path_factory):
    out = tmp_path_factory.mktemp("float") / "c.onnx"
    return export_onnx(tiny.checkpoint, out, input="float32", outputs="attention").path


def assert_same(outputs, expected):
    np.testing.assert_allclose(outputs.logits, expected.logits, atol=2e-3)
    np.testing.assert_allclose(outputs.scores, expected.scores, atol=2e-3)
    assert (outputs.argmax == expected.argmax).mean() > 0.97
    assert outputs.argmax.dtype == np.int32
    assert (outputs.attention is None) == (expected.attention is None)
    if expected.attention is not None:
        np.testing.assert_allclose(outputs.attention, expected.attention, atol=2e-3)


class TestOutputs:
    @pytest.mark.parametrize("batch", [(1, 2, 4), (3, 4, 4)], ids=str)
    def test_any_number_of_images_has_the_outputs_of_onnx_runtime(
        self, open_engine_for, tiny_fp16, images, expected, batch
    ):
        session = open_engine_for(tiny_fp16, batch)
        for count in (1, 4, 5, 11):
            assert_same(session.run(images[:count]), expected(0, count))
        session.close()

    def test_a_normalised_input_and_the_attention_maps(self, open_engine_for, float_input, images):
        session = open_engine_for(float_input, (1, 2, 4))
        assert_same(session.run(images[:7]), OnnxSession(float_input, device="cpu", threads=1).run(images[:7]))

    def test_the_best_classes_alone(self, open_engine_for, tiny, tmp_path, images):
        out = export_onnx(tiny.checkpoint, tmp_path / "c.onnx", outputs="topk", top_k=2).path
        expected = OnnxSession(out, device="cpu", threads=1).run(images[:7]).top
        for before, after in zip(expected, open_engine_for(out, (1, 2, 4)).run(images[:7]).top, strict=True):
            assert after.dtype == before.dtype
            np.testing.assert_allclose(after, before, atol=2e-3)

    def test_cuda_graphs_change_no_output(self, open_engine_for, tiny_fp16, images, expected):
        session = open_engine_for(tiny_fp16, (1, 2, 4), cuda_graphs=True)
        # the second and third time from recorded graphs, in both sets of buffers
        for count in (8, 8, 8, 3, 11):
            assert_same(session.run(images[:count]), expected(0, count))


class TestBuffers:
    def test_graphs_are_recorded_where_there_is_memory_for_a_second_context(self, stand, images, expected):
        stand.open(cuda_graphs=True).run(images[:8])
        # two parts of four
        assert stand.cuda.launched == 2
        session = stand.open(cuda_graphs=True)
        stand.trt.memory_is_full = True
        assert_same(session.run(images[:8]), expected(0, 8))
        assert stand.cuda.launched == 2

    def test_tensorrt_for_rtx_compiles_before_the_first_batch_and_records_by_itself(self, make_stand, images):
        stand = make_stand(rtx=True)
        for graphs in (True, False):
            stand.open(cuda_graphs=graphs).run(images[:8])
        assert (stand.trt.strategies, stand.cuda.launched) == ([("whole", "eager"), (None, "eager")], 0)


class TestKernelCache:
    """Kernels that TensorRT for RTX compiled are kept for the next start; nothing about them is ever fatal."""

    @pytest.fixture
    def rtx(self, make_stand):
        return make_stand(rtx=True)

    def test_the_next_start_reads_what_the_first_batch_compiled(self, rtx, images):
        rtx.open().run(images[:3])
        kept = rtx.path.with_name(rtx.path.name + ".kernels")
        assert kept.is_file()
        assert rtx.trt.cache_reads == []
        rtx.open()
        # the test vectors were batches of 4
        assert rtx.trt.cache_reads == [bytes([3, 4])]
        # neither another engine's nor a damaged one reaches native code
        KernelCache(rtx.path, "0" * 64, FakeRuntimeConfig(rtx.trt).create_runtime_cache())
        content = kept.read_bytes()
        for other in (content[:-1], b"", content[:5] + b"?" + content[6:]):
            kept.write_bytes(other)
            rtx.open()
        assert rtx.trt.cache_reads == [bytes([3, 4])]

    def test_beside_a_read_only_engine_nothing_is_kept_and_that_is_no_error(self, rtx, images):
        rtx.path.with_name(rtx.path.name + ".kernels").mkdir()
        for _ in range(2):
            rtx.open().run(images[:3])
        assert rtx.trt.cache_reads == []


class TestFailures:
    def test_a_failed_execution_can_be_resumed_and_the_next_batch_is_right(self, stand, images, expected):
        session = stand.open()
        stand.trt.failures = 1
        with pytest.raises(StoppedEarly, match="failed on a batch of 3 on NVIDIA L4: Cask convolution") as stop:
            session.run(images[:3])
        assert stop.value.exit_code == 5
        assert_same(session.collect(session.submit(images[4:7])), expected(4, 7))
        session.close()
        assert (stand.cuda.memory, stand.cuda.streams, stand.cuda.live_events) == ({}, {}, 0)

    @pytest.mark.parametrize("method", ["copy_to_device", "synchronize_event"])
    def test_a_lost_device_stops_the_run_and_leaves_no_events(self, stand, images, method):
        session = stand.open()
        before = stand.cuda.live_events
        setattr(stand.cuda, method, Mock(side_effect=StoppedEarly("launch failure (719)")))
        with pytest.raises(StoppedEarly, match="launch failure"):
            session.run(images[:3])
        assert stand.cuda.live_events == before

    @pytest.mark.parametrize("method", ["allocate", "allocate_pinned"])
    def test_full_memory_says_what_to_do(self, make_stand, method):
        stand = make_stand(batch=(1, 64, 256))
        setattr(stand.cuda, method, Mock(side_effect=OutOfMemory("cudaMalloc failed: out of memory")))
        expected = r"no room for 256 .*cudaMalloc failed: out of memory.*--rebuild --batch"
        with pytest.raises(UsageError, match=expected):
            stand.open()

    def test_a_plan_without_room_is_one_line(self, stand):
        stand.trt.memory_is_full = True
        with pytest.raises(UsageError, match=r"no room .* on NVIDIA L4: .*could not be allocated"):
            stand.open()

    def test_the_cpu_is_no_device_for_an_engine(self, stand):
        with pytest.raises(UsageError, match=r"only on NVIDIA GPUs.*c\.fp16\.onnx"):
            stand.open(device="cpu")


class TestFakes:
    """The stand-ins have no method that the real classes lack."""

    def test_cuda_has_the_methods_of_the_fake(self):
        methods = {name for name in vars(FakeCuda) if not name.startswith("_")}
        assert len(methods) > 15
        for name in methods:
            fake, real = (inspect.signature(getattr(kind, name)).parameters for kind in (FakeCuda, Cuda))
            assert list(fake) == list(real), name

    def test_tensorrt_for_rtx_has_every_name(self):
        real = pytest.importorskip("tensorrt_rtx")
        assert callable(real.nptype)
        assert find_missing(real, NAMES) == find_missing(real, RTX_NAMES) == []


def test_a_failing_calls_reason_is_its_own_and_not_an_earlier_ones():
    real = pytest.importorskip("tensorrt_rtx")
    logger = make_logger(real)
    runtime = real.Runtime(logger)
    for content, reason in ((b"short", "bufferSize"), (bytes(4096), "serialization version"), (b"again", "bufferSize")):
        assert attempt(logger, runtime.deserialize_cuda_engine, content) is None
        assert reason in first_error(logger)
