"""Sessions of ONNX Runtime's real CUDA provider: batches in flight, the sizes that are executed, memory."""

import numpy as np
import pytest

from opal_deploy.artifact.metadata import IMAGENET_MEAN, IMAGENET_STD
from opal_deploy.errors import OutOfMemory, StoppedEarly, UsageError
from opal_deploy.predict.executor import BatchPredictor
from opal_deploy.predict.prepare import InferenceOptions
from opal_deploy.preprocess.resize import normalise
from opal_deploy.runtime.cuda_session import open_onnx_session
from opal_deploy.runtime.session import PaddingSession, PinningSession, PipelinedSession

BYTES = 24 * 4  # of an image of the copying model, in float32
PIXELS = np.random.default_rng(0).integers(0, 256, (300, 2, 4, 3), np.uint8)
LOGITS = normalise(PIXELS, IMAGENET_MEAN, IMAGENET_STD).reshape(300, 24)


def blank(count):
    return np.zeros((count, 64, 128, 3), np.uint8)


def executed(gpu):
    """Return how many images each execution of the copying model had."""
    return [int(call.split()[2]) // BYTES for call in gpu.calls("cudaMemcpyAsync 3 ")]


def test_batches_in_flight_are_collected_in_order_with_their_own_outputs(gpu, copying_model):
    before = gpu.library.stubLive(), gpu.library.stubUsed(0)
    session = open_onnx_session(copying_model, device="cuda:0")
    for kind in (PipelinedSession, PinningSession, PaddingSession):
        assert isinstance(session, kind)
    assert "on CUDA device 0, fp32" in session.description
    parts = [(0, 2), (2, 3), (3, 11)]
    for _ in range(2):
        handles = [session.submit(PIXELS[start:stop].copy()) for start, stop in parts]
        for call in (session.submit, session.run):
            with pytest.raises(ValueError, match="in flight"):
                call(PIXELS[:1])
        with pytest.raises(ValueError, match="in the order"):
            session.collect(handles[1])
        for handle, (start, stop) in zip(handles, parts, strict=True):
            np.testing.assert_array_equal(session.collect(handle).logits, LOGITS[start:stop])
    # a batch whose handle is gone is in nobody's way
    session.submit(PIXELS[:3])
    np.testing.assert_array_equal(session.run(PIXELS[4:6]).logits, LOGITS[4:6])
    session.close()
    assert (gpu.library.stubLive(), gpu.library.stubUsed(0)) == before


def test_batches_are_padded_to_a_few_sizes_and_each_has_a_session_of_its_own(gpu, sessions, copying_model):
    session = open_onnx_session(copying_model, device="cuda:0")
    for count in (1, 2, 5, 8, 3, 1, 11):
        np.testing.assert_array_equal(session.run(PIXELS[:count]).logits, LOGITS[:count])
    assert executed(gpu) == [1, 8, 8, 8, 8, 1, 16]
    assert len(sessions) == 3
    # a caller whose batches are all of one size pays for no padding; larger batches go in parts
    BatchPredictor(session, InferenceOptions(batch=3, fixed_batch=True))
    session.run(PIXELS[:3])
    np.testing.assert_array_equal(session.run(PIXELS[:257]).logits, LOGITS[:257])
    session.add_batch_size(300)
    session.run(PIXELS[:257])
    assert executed(gpu)[7:] == [3, 256, 1, 300]
    assert len(sessions) == 6


@pytest.mark.parametrize(("code", "kind"), [(2, OutOfMemory), (719, StoppedEarly)])
def test_after_a_failed_batch_the_ones_before_and_after_are_right(gpu, copying_model, code, kind):
    session = open_onnx_session(copying_model, device="cuda:0")
    first = session.submit(PIXELS[:2])
    gpu.set(errors=f"copyOnDevice@0={code}")
    with pytest.raises(kind, match=rf"ONNX Runtime failed on a batch of 8 \(CUDA failure {code}: ") as raised:
        session.submit(PIXELS[2:5])
    assert type(raised.value) is kind
    gpu.set(errors="")
    np.testing.assert_array_equal(session.collect(first).logits, LOGITS[:2])
    np.testing.assert_array_equal(session.run(PIXELS[2:5]).logits, LOGITS[2:5])


@pytest.mark.parametrize(("code", "kind"), [(2, OutOfMemory), (719, UsageError)])
def test_a_device_that_does_not_load_a_model_is_one_line(gpu, model, code, kind):
    gpu.set(errors=f"cudaMemGetInfo@0={code}")
    with pytest.raises(kind, match=rf"\A.*\(CUDA failure {code}: [^\n]*\Z"):
        open_onnx_session(model, device="cuda:0")


def test_a_batch_that_failed_takes_no_memory(gpu, model):
    gpu.set(memory=128 << 20)
    before = gpu.library.stubUsed(0)
    session = open_onnx_session(model, device="cuda:0")
    session.run(blank(8))
    with pytest.raises(OutOfMemory, match="ONNX Runtime failed on a batch of 256"):
        session.run(blank(256))
    assert gpu.library.stubUsed(0) == before
    gpu.set(errors="cudaHostAlloc@0=2")
    with pytest.raises(OutOfMemory, match="cudaHostAlloc"):
        session.run(blank(64))
    assert gpu.library.stubUsed(0) == before
    gpu.set(errors="")
    assert len(session.run(blank(64))) == 64
