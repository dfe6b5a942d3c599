"""A session that costs nothing: what remains of a run is the pipeline itself."""

from __future__ import annotations

from collections.abc import Iterable

from opal_deploy.artifact.metadata import Metadata
from opal_deploy.artifact.outputs import Outputs
from opal_deploy.runtime.session import ImageBatch, Session, check_batch


class ReplaySession:
    """Answers with outputs that a network computed beforehand, in turn and again from the first, as views.

    Attributes:
        metadata: the model's, so that records and overlays are as much work as its own.
        description: says so.
    """

    def __init__(self, metadata: Metadata, outputs: Outputs, origin: str) -> None:
        self.metadata = metadata
        self.description = f"no network: answers computed beforehand by {origin}"
        self._count = len(outputs)
        self._next = 0
        # twice, so that answers that wrap around are a view too
        self._outputs = Outputs.concatenate([outputs, outputs])

    @staticmethod
    def of(session: Session, batches: Iterable[ImageBatch]) -> ReplaySession:
        """What `session` answers to `batches`."""
        answers = Outputs.concatenate([session.run(batch) for batch in batches])
        return ReplaySession(session.metadata, answers, session.description)

    def run(self, images: ImageBatch) -> Outputs:
        """See `Session.run`; raises ValueError for a batch larger than what was computed."""
        check_batch(images, self.metadata)
        if len(images) > self._count:
            raise ValueError(f"a batch of {len(images)}; only {self._count} answers were computed")
        start = self._next
        self._next = (start + len(images)) % self._count
        return self._outputs.rows(start, start + len(images))
