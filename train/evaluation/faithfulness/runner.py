"""Pictures through a session in batches, counted."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from opal_deploy.artifact.outputs import Outputs, cosines
from opal_deploy.errors import UsageError
from opal_deploy.runtime.session import Session
from opal_deploy.train.evaluation.faithfulness.fills import Picture


class Runner:
    """A session, a batch size, and how many pictures went through so far.

    Attributes:
        passes: forward passes, counted in pictures.
    """

    def __init__(self, session: Session, batch: int) -> None:
        self._session, self._batch = session, batch
        self.passes = 0

    def run(self, pictures: NDArray[np.uint8]) -> Outputs:
        """uint8 [n, H0, W0, 3], any n of at least 1."""
        return Outputs.concatenate(
            [self._once(pictures[first : first + self._batch]) for first in range(0, len(pictures), self._batch)]
        )

    def cosines(self, wanted: Iterable[tuple[Picture, int]]) -> Iterator[tuple[float, bool]]:
        """For pictures with a class each: the class's cosine, and whether it is the answer. As few as fit a batch are
        held at a time."""
        metadata = self._session.metadata
        stream = iter(wanted)
        while group := list(itertools.islice(stream, self._batch)):
            outputs = self._once(np.stack([picture for picture, _ in group]))
            if outputs.scores is None:
                raise ValueError("a model without slots has no cosines")
            found = cosines(outputs.scores, metadata.prototypes_per_class, metadata.epsilon)
            answers = outputs.logits.argmax(axis=1)
            for row, (_, class_id) in enumerate(group):
                yield float(found[row, class_id]), bool(answers[row] == class_id)

    def _once(self, pictures: NDArray[np.uint8]) -> Outputs:
        self.passes += len(pictures)
        outputs = self._session.run(pictures)
        if not np.isfinite(outputs.logits).all():
            raise UsageError(
                "its logits for a picture with cells taken away are not finite numbers, so its faithfulness cannot be "
                "measured; its precision is too low, export fp32"
            )
        return outputs
