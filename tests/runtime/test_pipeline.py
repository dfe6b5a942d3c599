"""Batches in flight on a stand-in for a GPU: sessions of ONNX Runtime and of TensorRT alike."""

import numpy as np
import onnxruntime
import pytest

from opal_deploy.errors import OutOfMemory, StoppedEarly, UsageError
from opal_deploy.predict.executor import BatchPredictor
from opal_deploy.predict.prepare import InferenceOptions
from opal_deploy.runtime import cuda_session
from opal_deploy.runtime.cuda_session import open_onnx_session
from opal_deploy.runtime.onnx_session import CUDA, OnnxSession
from opal_deploy.runtime.session import PaddingSession, PinningSession, PipelinedSession, StagedSession
from opal_deploy.synthetic import example_images
from tests.runtime.conftest import L4
from tests.runtime.fakes import FakeCuda

IMAGES = example_images(11, 64, 96)
_InferenceSession = onnxruntime.InferenceSession


class OnnxOnFakeCuda(_InferenceSession):
    """ONNX Runtime's CUDA provider: bound memory, and work that waits on the stream that the session was given."""

    loaded = []  # noqa: RUF012
    refusal = failure = ""

    def __init__(self, path, options, *, providers, enable_fallback):
        if self.refusal:
            raise RuntimeError(self.refusal)
        (self.name, self.options), _ = providers
        self.stream = self.cuda.streams[int(self.options["user_compute_stream"])]
        self.executed = []
        super().__init__(path, options, providers=["CPUExecutionProvider"])
        self.loaded.append(self)

    def get_providers(self):
        return [self.name, "CPUExecutionProvider"] if hasattr(self, "name") else []

    def run_with_iobinding(self, iobinding, run_options=None):
        if self.failure:
            raise RuntimeError(self.failure)
        self.executed.append(iobinding)
        if run_options.get_run_config_entry("disable_synchronize_execution_providers") != "1":
            self.stream.drain()
        run = super().run_with_iobinding
        self.stream.push(lambda: run(iobinding))


@pytest.fixture
def gpu(monkeypatch, tiny):
    """`open(**options)` of an ONNX file on a GPU; `cuda` is the stand-in."""
    cuda = FakeCuda(L4)
    kind = type("OnnxOnThisCuda", (OnnxOnFakeCuda,), {"cuda": cuda, "loaded": []})
    monkeypatch.setattr(cuda_session, "runs_on_cuda", lambda device: device != "cpu")
    monkeypatch.setattr(cuda_session, "Cuda", lambda index, extra: cuda)
    monkeypatch.setattr(cuda_session, "_DEVICE_TYPE", "cpu")
    monkeypatch.setattr(onnxruntime, "InferenceSession", kind)
    cuda.open = lambda **options: open_onnx_session(tiny.path, device="cuda", threads=1, **options)
    cuda.loaded, cuda.kind = kind.loaded, kind
    return cuda


@pytest.fixture(params=["onnxruntime", "tensorrt"])
def session_and_cuda(request):
    if request.param == "tensorrt":
        stand = request.getfixturevalue("make_stand")(request.getfixturevalue("tiny").path)
        return stand.open(), stand.cuda
    cuda = request.getfixturevalue("gpu")
    return cuda.open(), cuda


@pytest.fixture(scope="module")
def expected(tiny):
    return OnnxSession(tiny.path, device="cpu", threads=1).run(IMAGES).rows


def assert_same(outputs, expected):
    np.testing.assert_allclose(outputs.logits, expected.logits, atol=1e-5)
    np.testing.assert_array_equal(outputs.argmax, expected.argmax)


def test_batches_in_flight_are_collected_in_order_with_the_outputs_of_the_cpu(session_and_cuda, expected):
    session, cuda = session_and_cuda
    for kind in (PipelinedSession, PinningSession, StagedSession):
        assert isinstance(session, kind)
    assert session.depth == 3
    # the last one is in parts for the engine, whose largest batch is 4
    parts = [(0, 2), (2, 3), (3, 11)]
    for _ in range(2):
        handles = [session.submit(IMAGES[start:stop].copy()) for start, stop in parts]
        for call in (session.submit, session.run, session.run_staged):
            with pytest.raises(ValueError, match="in flight"):
                call(IMAGES[:1])
        with pytest.raises(ValueError, match="in the order"):
            session.collect(handles[1])
        for handle, part in zip(handles, parts, strict=True):
            assert_same(session.collect(handle), expected(*part))
    # a batch whose handle is gone is in nobody's way
    session.submit(IMAGES[:3])
    assert_same(session.run(IMAGES[4:6]), expected(4, 6))
    assert_same(session.run_staged(IMAGES[4:6])[0], expected(4, 6))
    assert cuda.memory
    session.close()
    assert (cuda.memory, cuda.streams, cuda.live_events) == ({}, {}, 0)


def test_nothing_is_waited_for_until_a_batch_is_collected(gpu, expected):
    session = gpu.open()
    waits = []
    gpu.synchronize_event = lambda event: (waits.append(event), event.stream.drain(event.marker))
    gpu.synchronize_stream = lambda stream: waits.append(stream)
    handle = session.submit(IMAGES[:2])
    assert waits == []
    assert_same(session.collect(handle), expected(0, 2))
    assert len(waits) == 1


def test_images_in_registered_memory_are_copied_from_there(session_and_cuda, expected):
    session, cuda = session_and_cuda
    shared = np.empty((8, *IMAGES.shape[1:]), np.uint8)
    shared[:3] = IMAGES[:3]
    address = shared.ctypes.data
    assert session.register_buffer(address, shared.nbytes)
    assert cuda.registered == {address: shared.nbytes}
    for images, direct in ((shared[:3], True), (shared[1:3], True), (IMAGES[:3], False), (shared[:3, :, ::-1], False)):
        outputs = session.run(images)
        assert (cuda.copied_from[-1] == images.ctypes.data) == direct
        assert len(outputs) == len(images)
    assert_same(session.run(shared[1:3]), expected(1, 3))
    session.unregister_buffer(address)
    session.unregister_buffer(address)
    session.run(shared[:3])
    assert cuda.copied_from[-1] != address
    # a system that locks no more memory is only slower
    cuda.fail("register", StoppedEarly("cudaHostRegister failed: out of memory"))
    assert not session.register_buffer(address, shared.nbytes)
    assert_same(session.run(shared[:3]), expected(0, 3))
    session.close()
    assert (cuda.memory, cuda.streams, cuda.live_events, cuda.registered) == ({}, {}, 0, {})


def test_batches_are_padded_to_a_few_sizes_and_each_has_a_session_that_sees_no_other(gpu, expected):
    session = gpu.open()
    assert isinstance(session, PaddingSession)
    for count in (1, 2, 5, 8, 3, 1, 11):
        assert_same(session.run(IMAGES[:count]), expected(0, count))
    assert [len(each.executed) for each in gpu.loaded] == [2, 4, 1]
    assert {each.options["use_tf32"] for each in gpu.loaded} == {"0"}
    # a caller whose batches are all of one size pays for no padding; larger batches go in parts
    BatchPredictor(session, InferenceOptions(batch=3, fixed_batch=True))
    session.run(IMAGES[:3])
    assert len(gpu.loaded) == 4
    session.add_batch_size(300)
    many = IMAGES[np.arange(257) % len(IMAGES)]
    assert_same(session.run(many).rows(0, 11), expected(0, 11))
    assert [len(each.executed) for each in gpu.loaded[4:]] == [1], "filled up to 300, not in parts"


@pytest.mark.parametrize(
    ("text", "kind"),
    [("CUDA failure 2: out of memory", OutOfMemory), ("CUDA failure 719: unspecified launch failure", StoppedEarly)],
)
def test_after_a_failed_batch_the_ones_before_and_after_are_right(gpu, expected, text, kind):
    session = gpu.open()
    assert_same(session.run(IMAGES[:5]), expected(0, 5))
    of_eight = gpu.loaded[-1]
    first = session.submit(IMAGES[:2])
    of_eight.failure = text
    with pytest.raises(StoppedEarly, match=r"ONNX Runtime failed on a batch of 8 \(CUDA failure") as raised:
        session.submit(IMAGES[2:5])
    assert type(raised.value) is kind
    of_eight.failure = ""
    assert_same(session.collect(first), expected(0, 2))
    assert_same(session.run(IMAGES[2:5]), expected(2, 5))
    # what ONNX Runtime says of a device is the end of a line of C++
    gpu.kind.refusal = f"cuda_call.cc:154 std::conditional_t<THRW> {text} ; GPU=-1 ; hostname=vm\nmore"
    with pytest.raises(OutOfMemory if kind is OutOfMemory else UsageError, match=rf"\({text}\)"):
        gpu.open()
    # no memory for more buffers: all are given back
    gpu.fail("allocate_pinned", OutOfMemory("cudaHostAlloc failed"))
    with pytest.raises(OutOfMemory, match="cudaHostAlloc"):
        session.run(IMAGES)
    assert gpu.memory == {}


def test_half_precision_runs_in_nhwc(gpu, tiny_fp16):
    gpu.open().close()
    open_onnx_session(tiny_fp16, device="cuda", threads=1).close()
    assert [session.options["prefer_nhwc"] for session in gpu.loaded] == ["0", "1"]
    assert {session.name for session in gpu.loaded} == {CUDA}
