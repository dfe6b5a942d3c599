"""Compiled checkpoints: really compiled for the CPU; on a stand-in for a GPU; refused where they must be."""

import contextlib
import ctypes
import threading

import numpy as np
import pytest
import torch

from opal_deploy.errors import UsageError, VerificationError
from opal_deploy.runtime import compiled_session, diagnostics, torch_session
from opal_deploy.runtime.compiled_session import (
    CompiledSession,
    CudaCompiledSession,
    ProgramKernels,
    open_compiled_session,
)
from opal_deploy.runtime.gates import GATES
from opal_deploy.runtime.session import PaddingSession, PinningSession, PipelinedSession, StagedSession
from opal_deploy.runtime.torch_session import TorchSession
from opal_deploy.runtime.verification import compare_outputs
from opal_deploy.synthetic import example_images
from tests.builders import build_checkpoint
from tests.runtime.conftest import L4
from tests.runtime.fakes import FakeCuda

IMAGES = example_images(5, 64, 96)


@pytest.fixture
def uncompiled(monkeypatch):
    """Leave the graph as it is: what torch.compile does to it is another test's subject."""
    monkeypatch.setattr(compiled_session, "compile_graph", lambda graph: graph)
    monkeypatch.setattr(compiled_session, "find_compile_problem", lambda gpu: ("", ""))


@pytest.mark.slow
def test_a_compiled_network_answers_as_the_eager_one_and_is_compiled_once_a_size_for_all_threads():
    checkpoint = build_checkpoint()
    session, reference = open_compiled_session(checkpoint, device="cpu"), TorchSession(checkpoint, device="cpu")
    assert isinstance(session, PaddingSession)
    assert not isinstance(session, PipelinedSession)
    session.add_batch_size(3)
    outputs = []
    with torch._dynamo.config.patch(error_on_recompile=True):
        # in parts of 3 and, filled up, 2
        thread = threading.Thread(target=lambda: outputs.append(session.run(IMAGES)))
        thread.start()
        thread.join()
    gate = GATES["fp32"].relaxed_for_machine()
    assert compare_outputs(reference.run_reference(IMAGES), outputs[0], session.metadata, gate)
    assert "compiled on cpu" in session.description


@pytest.mark.parametrize(
    ("precision", "change", "expected"),
    [
        ("bf16", lambda graph: None, ""),
        ("fp32", lambda graph: graph.scale.mul_(1.01), "a cosine differs by"),
        ("fp16", lambda graph: graph.scale.mul_(1e6), "values are NaN or infinite"),
    ],
)
def test_a_size_answers_only_after_its_outputs_are_the_eager_networks(
    uncompiled, monkeypatch, precision, change, expected
):
    monkeypatch.setattr(compiled_session, "compile_graph", lambda graph: (change(graph), graph)[1])
    session = CompiledSession(build_checkpoint(), precision=precision)
    if not expected:
        assert session.run(IMAGES).logits.shape == (5, 4)
        return
    for _ in range(2):
        with pytest.raises(
            VerificationError, match=rf"\Ac0.pt: compiled for batches of 5, .*{expected}.*runtime torch.*\Z"
        ):
            session.run(IMAGES)


def test_a_machine_without_a_compiler_gets_one_line(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(
        UsageError, match=r"\Ac0.pt: cannot be compiled here: .*CXX=no-such-compiler.*--runtime torch.*\Z"
    ):
        CompiledSession(build_checkpoint())
    problem, advice = diagnostics.find_compile_problem(gpu=False)
    assert ("C++ compiler" in problem, advice) == (True, "install g++")


def test_what_torch_compile_raises_is_one_line(uncompiled, monkeypatch):
    def fail(_):
        raise AssertionError("Inductor\nfailed")

    monkeypatch.setattr(compiled_session, "compile_graph", lambda graph: fail)
    with pytest.raises(UsageError, match=r"\Ac0.pt: cannot be compiled here: .*Inductor.*\Z"):
        CompiledSession(build_checkpoint()).run(IMAGES)


def test_batches_in_flight_on_a_gpu_have_the_outputs_of_the_cpu(uncompiled, monkeypatch):
    cuda, executed = FakeCuda(L4), []

    def queue(kernels, work, stream):
        cuda.streams[int(stream)].push(work)

    def view(kernels, address, rows, name):
        shape, dtype = kernels._specs[name]
        executed.append(rows)
        memory = (ctypes.c_ubyte * (rows * int(np.prod(shape)) * dtype.itemsize)).from_address(address)
        return torch.from_numpy(np.frombuffer(memory, dtype).reshape(rows, *shape))

    for module in (compiled_session, torch_session):
        monkeypatch.setattr(module, "torch_device", lambda device: torch.device("cpu"))
    monkeypatch.setattr(compiled_session, "Cuda", lambda index, extra: cuda)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(ProgramKernels, "_queue", queue)
    monkeypatch.setattr(ProgramKernels, "_view", view)
    checkpoint = build_checkpoint()
    expected = TorchSession(checkpoint, device="cpu").run(IMAGES)
    session = CudaCompiledSession(checkpoint, precision="fp32")
    for kind in (PipelinedSession, PinningSession, PaddingSession, StagedSession):
        assert isinstance(session, kind)
    for size in (2, 4):
        session.add_batch_size(size)
    parts = [(0, 1), (1, 3), (0, 5)]  # filled up to 2; 2; 4 and 1, filled up to 2
    for _ in range(2):
        handles = [session.submit(IMAGES[start:stop].copy()) for start, stop in parts]
        for handle, (start, stop) in zip(handles, parts, strict=True):
            outputs = session.collect(handle)
            np.testing.assert_allclose(outputs.logits, expected.logits[start:stop], atol=1e-5)
            np.testing.assert_array_equal(outputs.argmax, expected.argmax[start:stop])
    assert set(executed) == {2, 4}
    session.close()
    assert not cuda.memory


@pytest.mark.gpu
@pytest.mark.parametrize("cuda_graphs", [False, True])
def test_on_a_gpu_every_size_passes_its_gate_in_half_precision(cuda_graphs):
    """Never run on hardware when this was written."""
    checkpoint = build_checkpoint()
    expected = TorchSession(checkpoint, device="cpu").run_reference(IMAGES)
    session = open_compiled_session(checkpoint, device="cuda", cuda_graphs=cuda_graphs)
    session.add_batch_size(2)
    outputs = []
    # another thread than the one that compiled, as in `infer`
    thread = threading.Thread(target=lambda: outputs.append(session.run(IMAGES)))
    thread.start()
    thread.join()
    assert compare_outputs(expected, outputs[0], session.metadata, GATES["fp16"].relaxed_for_machine())
