"""The part of a session on an NVIDIA GPU that is the same whatever computes the batches."""

from __future__ import annotations

import contextlib

from opal_deploy.artifact.metadata import Metadata
from opal_deploy.artifact.outputs import Outputs
from opal_deploy.runtime.pipeline import DEPTH, PendingBatch, Pipeline
from opal_deploy.runtime.session import BatchTimes, ImageBatch, check_batch


class PipelineSession:
    """A session that hands its batches to a `Pipeline`, which the subclass creates as `_pipeline`.

    Attributes:
        metadata: of the model.
    """

    metadata: Metadata
    _pipeline: Pipeline | None = None

    @property
    def _loaded(self) -> Pipeline:
        if self._pipeline is None:
            raise ValueError("the session is closed")
        return self._pipeline

    def _prepare(self, images: ImageBatch) -> None:
        """Check a batch, and make ready for its size, before it is begun."""
        check_batch(images, self.metadata)

    @property
    def depth(self) -> int:
        """See `PipelinedSession.depth`."""
        return DEPTH

    def run(self, images: ImageBatch) -> Outputs:
        """See `Session.run`."""
        self._prepare(images)
        return self._loaded.run(images)

    def submit(self, images: ImageBatch) -> PendingBatch:
        """See `PipelinedSession.submit`; a batch that takes several executions waits for its first parts."""
        self._prepare(images)
        return self._loaded.submit(images)

    def collect(self, handle: object) -> Outputs:
        """See `PipelinedSession.collect`."""
        return self._loaded.collect(handle)

    def run_staged(self, images: ImageBatch) -> tuple[Outputs, BatchTimes]:
        """See `StagedSession.run_staged`; everything runs on one stream, in which nothing overlaps."""
        self._prepare(images)
        return self._loaded.run_staged(images)

    def register_buffer(self, address: int, size: int) -> bool:
        """See `PinningSession.register_buffer`."""
        return self._loaded.register(address, size)

    def unregister_buffer(self, address: int) -> None:
        """See `PinningSession.unregister_buffer`."""
        self._loaded.unregister(address)

    def close(self) -> None:
        """Free device and page-locked memory."""
        if self._pipeline is not None:
            self._pipeline.close()
        self._pipeline = None

    def __del__(self) -> None:
        # at the interpreter's end the libraries may be gone already, and the memory with them
        with contextlib.suppress(Exception):
            self.close()
