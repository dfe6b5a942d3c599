"""Sessions of ONNX Runtime's real CUDA provider: memory, CUDA graphs, threads and devices."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import onnxruntime
import pytest

from opal_deploy.errors import OutOfMemory
from opal_deploy.predict.prediction import BatchPredictor
from opal_deploy.predict.types import InferenceOptions, Prepared
from opal_deploy.runtime.cuda import Cuda
from opal_deploy.runtime.cuda_options import CudaOptions
from opal_deploy.runtime.cuda_session import open_onnx_session
from opal_deploy.sources.image import InputImage
from tests.gpu_stubs.conftest import SIZE

MIB = 1 << 20


def images(count):
    return np.zeros((count, *SIZE, 3), np.uint8)


def predict(session, count, messages):
    """Predict one batch as `infer` does, with what it prints."""
    predictor = BatchPredictor(session, InferenceOptions(batch=count), print_message=messages.append)
    return predictor.run([Prepared(InputImage(None, b""))] * count, images(count))


# a batch of 64 takes 80 MB with its input
@pytest.mark.parametrize(("batch", "fits"), [(256, 64), (128, 64), (64, 64)])
def test_after_a_lack_of_memory_smaller_batches_fit(gpu, model, batch, fits):
    gpu.set(memory=128 * MIB)
    session, messages = open_onnx_session(model, device="cuda:0"), []
    assert len(predict(session, batch, messages)) == batch
    going_on = [int(message.rpartition(" ")[2]) for message in messages]
    assert going_on == [size for size in (128, 64) if fits <= size < batch]
    # and what the failed sizes took was given back
    assert len(predict(session, 16, messages)) == 16
    session.close()


def test_a_batch_that_failed_takes_no_memory(gpu, model):
    gpu.set(memory=128 * MIB)
    before = gpu.library.stubUsed(0)
    session = open_onnx_session(model, device="cuda:0")
    session.run(images(8))
    with pytest.raises(OutOfMemory, match="ONNX Runtime failed on a batch of 256"):
        session.run(images(256))
    assert gpu.library.stubUsed(0) == before
    assert len(session.run(images(64))) == 64


def test_a_cuda_graph_is_recorded_once_and_serves_every_thread(gpu, model):
    session = open_onnx_session(model, device="cuda:0", cuda_options=CudaOptions(enable_cuda_graph=True))
    for _ in range(4):
        session.run(images(8))
    assert len(gpu.calls("cudaStreamBeginCapture")) == 1
    assert len(gpu.calls("cudaGraphLaunch")) == 2
    for _ in range(2):
        run_in_thread(session.run, images(8))
    assert len(gpu.calls("cudaStreamBeginCapture")) == 1
    assert len(gpu.calls("cudaGraphLaunch")) == 4
    assert len({call.thread for call in gpu.calls("cudaGraphLaunch")}) >= 2


def test_another_thread_may_allocate_while_a_cuda_graph_is_recorded(gpu, model, monkeypatch):
    options = CudaOptions(enable_cuda_graph=True)
    session, other = (open_onnx_session(model, device="cuda:0", cuda_options=options) for _ in range(2))
    record_graph, sizes = Cuda.record_graph, iter((16, 32))

    def record_late(cuda, stream, queue):
        def run_other_first():
            run_in_thread(other.run, images(next(sizes)))
            queue()

        return record_graph(cuda, stream, run_other_first)

    monkeypatch.setattr(Cuda, "record_graph", record_late)
    for _ in range(3):
        session.run(images(8))
    for _ in range(3):
        session.run(images(1))
    assert next(sizes, None) is None
    assert gpu.calls("cudaMalloc REFUSED during") == []


def run_in_thread(function, argument):
    with ThreadPoolExecutor(1) as pool:
        pool.submit(function, argument).result()


def test_loading_a_session_prints_no_warning(gpu, model, capfd):
    onnxruntime.set_default_logger_severity(2)
    open_onnx_session(model, device="cuda:0")
    assert capfd.readouterr() == ("", "")
