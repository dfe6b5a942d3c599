"""A session that answers by brightness: what it says of a picture can be worked out by hand."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest

from opal_deploy.artifact.metadata import Metadata
from opal_deploy.artifact.outputs import Outputs, cosines
from opal_deploy.errors import StoppedEarly
from opal_deploy.runtime.session import ImageBatch, check_batch

GRID = (4, 4)
INPUT = (32, 32)


class BrightSession:
    """Two classes, `dim` and `bright`, of two slots each. Every channel's maximum is at the brightest cell.

    Args:
        fails_at: the batch (from 0) at which the device is lost; None: never.
        hold: awaited before each batch is answered; None: no waiting.
    """

    description = "brightness on CPU"

    def __init__(self, *, fails_at: int | None = None, hold: threading.Event | None = None) -> None:
        self.metadata = Metadata(
            ("dim", "bright"), 2, {"distance": "l2", "epsilon": 1e-8}, "exact", "none", GRID, INPUT
        )
        self.fails_at, self.hold = fails_at, hold
        self.batches: list[int] = []

    def run(self, images: ImageBatch) -> Outputs:
        check_batch(images, self.metadata)
        if self.hold is not None:
            self.hold.wait(30)
        if len(self.batches) == self.fails_at:
            raise StoppedEarly("the device was lost")
        self.batches.append(len(images))
        rows, cols = GRID
        height, width = INPUT
        cells = images.reshape(len(images), rows, height // rows, cols, width // cols, 3).mean(axis=(2, 4, 5))
        cells = cells.reshape(len(images), -1)
        brightness = cells.max(axis=1) / 255
        scores = np.stack([1.001 - brightness] * 2 + [brightness + 0.001] * 2, axis=1).astype(np.float32)
        logits = -np.sqrt(np.maximum(2 - 2 * cosines(scores, 2, 1e-8), 0)).astype(np.float32)
        return Outputs(logits, np.repeat(cells.argmax(axis=1)[:, None], 4, axis=1).astype(np.int32), scores)


SessionMaker = Callable[..., BrightSession]


@pytest.fixture
def bright_session() -> SessionMaker:
    return BrightSession
