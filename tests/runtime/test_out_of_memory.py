"""A memory that is full is told apart from a device that is lost: the first can be mended with a smaller batch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from opal_deploy.errors import OutOfMemory, StoppedEarly
from opal_deploy.runtime.onnx_session import OnnxSession
from opal_deploy.runtime.torch_session import TorchSession

PICTURES = np.zeros((2, 96, 96, 3), np.uint8)


def failing(error: Exception) -> object:
    def run(*_: object) -> None:
        raise error

    return run


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        ("BFCArena::AllocateRawInternal Failed to allocate memory for requested buffer of size 51380224", OutOfMemory),
        ("BFCArena Available memory of 0 is smaller than requested bytes of 1024", OutOfMemory),
        ("CUDA failure 2: out of memory ; GPU=0", OutOfMemory),
        ("CUBLAS failure 3: CUBLAS_STATUS_ALLOC_FAILED ; GPU=0", OutOfMemory),
        ("std::bad_alloc", OutOfMemory),
        ("CUDA failure 719: unspecified launch failure ; GPU=0", StoppedEarly),
    ],
)
def test_onnx_runtime(exact_model: Path, monkeypatch: pytest.MonkeyPatch, words: str, kind: type[Exception]) -> None:
    session = OnnxSession(exact_model, device="cpu", threads=1)
    monkeypatch.setattr(session, "_run_cpu", failing(RuntimeError(words)))
    with pytest.raises(StoppedEarly, match=r"ONNX Runtime failed on a batch of 2 \(") as raised:
        session.run(PICTURES)
    assert type(raised.value) is kind


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB"), OutOfMemory),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"), OutOfMemory),
        (RuntimeError("CUDA error: unspecified launch failure"), StoppedEarly),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), RuntimeError),
    ],
)
def test_pytorch(exact_model: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, kind: type[Exception]) -> None:
    session = TorchSession(exact_model.with_suffix(".pt"), device="cpu")
    monkeypatch.setattr(session._network, "explain", failing(error))
    with pytest.raises(kind) as raised:
        session.run(PICTURES)
    assert type(raised.value) is kind
