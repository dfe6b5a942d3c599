"""The protocol of all engines: a batch of images in, `Outputs` out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from opal_deploy.artifact.metadata import Metadata
from opal_deploy.artifact.outputs import FloatArray, Outputs

ImageBatch = NDArray[np.uint8]


class Session(Protocol):
    """One loaded model on one device. `run` may be called from one thread at a time."""

    @property
    def metadata(self) -> Metadata:
        """The model's metadata."""

    @property
    def device(self) -> str:
        """`cpu`, or `cuda:N`, which may be followed by the GPU's name."""

    @property
    def description(self) -> str:
        """One line for users: engine, device, threads, precision."""

    def run(self, images: ImageBatch) -> Outputs:
        """Return the outputs for a batch.

        Args:
            images: uint8 [N, H0, W0, 3], RGB, of the model's input size, N at least 1.

        Raises:
            StoppedEarly: the device was lost; OutOfMemory: its memory is full.
            ValueError: another shape or dtype.
        """


@runtime_checkable
class PipelinedSession(Session, Protocol):
    """A session that accepts further batches while one is being computed, so that its device never waits for them."""

    @property
    def depth(self) -> int:
        """The number of batches that may be in flight, at least 2."""

    def submit(self, images: ImageBatch) -> object:
        """Begin a batch and return its handle without waiting for the outputs.

        Args:
            images: see `run`; they must not change until the batch is collected.

        Raises:
            ValueError: another shape or dtype, or `depth` batches are in flight. The errors of `run`.
        """

    def collect(self, handle: object) -> Outputs:
        """Wait for a batch and return its outputs; batches are collected in the order of submission.

        Raises:
            StoppedEarly: the device was lost; OutOfMemory: its memory is full.
        """


@runtime_checkable
class PinningSession(Session, Protocol):
    """A session that copies images to its device directly from page-locked memory of the caller.

    Batches from other memory go through a buffer of the session: the same outputs, one more copy.
    """

    def register_buffer(self, address: int, size: int) -> bool:
        """Page-lock `size` bytes of host memory; return False if the system refuses, which only costs speed.

        The memory must stay until `unregister_buffer`, or until the session is closed. Both may be called from any
        thread, while another one runs batches from other memory.
        """

    def unregister_buffer(self, address: int) -> None:
        """Unlock memory of `register_buffer` once nothing copies from it; an unknown address is ignored."""


@runtime_checkable
class PaddingSession(Session, Protocol):
    """A session that pads batches to one of a few sizes, because its runtime is slow when sizes change."""

    def add_batch_size(self, size: int) -> None:
        """Execute batches of `size` images without padding, for a caller whose batches all have one size."""


@runtime_checkable
class SplitSession(Session, Protocol):
    """A session that can run a batch on each of its cores, which takes less time than sharing one batch."""

    def split(self, is_busy: Callable[[int], bool]) -> list[Session]:
        """Return one session per core, for as many threads; or the session itself, if it cannot be split.

        Args:
            is_busy: called with the number of cores before each batch; if False, the batch runs on all of them.
        """


@runtime_checkable
class AttentionSession(Session, Protocol):
    """A session that returns attention maps on request, although its model does not output them: PyTorch's."""

    def run_with_attention(self, images: ImageBatch) -> Outputs:
        """Return what `run` returns, with the attention maps, float32 [N, K, H, W]."""

    def run_normalised(self, images: FloatArray) -> Outputs:
        """Return the same for float32 [N, 3, H0, W0], already normalised."""


@contextmanager
def pinned(session: Session, images: ImageBatch) -> Iterator[None]:
    """Page-lock images for a session's device during the block; do nothing for sessions that cannot use that."""
    if not isinstance(session, PinningSession) or not session.register_buffer(images.ctypes.data, images.nbytes):
        yield
        return
    try:
        yield
    finally:
        session.unregister_buffer(images.ctypes.data)


def check_batch(images: ImageBatch, metadata: Metadata) -> None:
    """Raise ValueError unless a batch is uint8 [N, H0, W0, 3] of the model's input size, N at least 1."""
    height, width = metadata.input_size
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[1:] != (height, width, 3) or not len(images):
        raise ValueError(f"images {images.dtype} {list(images.shape)}; expected uint8 [N, {height}, {width}, 3]")
