"""What every engine looks like to the rest: pictures in, outputs out."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from opal_deploy.artifact.metadata import Metadata
from opal_deploy.artifact.outputs import Outputs

ImageBatch = NDArray[np.uint8]


class Session(Protocol):
    """One loaded model on one device. `run` may be called from one thread at a time."""

    @property
    def metadata(self) -> Metadata:
        """What the model is."""
        ...

    @property
    def description(self) -> str:
        """One line for a person: engine, device, threads, precision."""
        ...

    def run(self, images: ImageBatch) -> Outputs:
        """Answers for uint8 [N, H0, W0, 3] RGB pictures of the model's input size, N at least 1.

        Raises:
            StoppedEarly: the device was lost or its memory is full.
        """
        ...


def check_batch(images: ImageBatch, metadata: Metadata) -> None:
    """Raise ValueError for a batch that no session may be given: a bug of the caller's."""
    expected = (*metadata.input_size, 3)
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[1:] != expected or not len(images):
        raise ValueError(
            f"images {images.dtype} {list(images.shape)}; expected uint8 [N, {expected[0]}, {expected[1]}, 3]"
        )
