"""A session that answers by brightness, which can be worked out by hand, and helpers that many tests share."""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from opal_deploy.artifact.metadata import Metadata
from opal_deploy.artifact.outputs import Outputs, cosines
from opal_deploy.errors import OutOfMemory, StoppedEarly
from opal_deploy.inference.executor import predict_stream
from opal_deploy.inference.types import InferenceOptions, InputImage
from opal_deploy.records.record import Record
from opal_deploy.runtime.session import ImageBatch, Session, check_batch

GRID = (4, 4)


class BrightSession:
    """Two classes, `dim` and `bright`, of two slots each. Every channel's maximum is at the brightest cell.

    Args:
        fails_at: the batch (from 0) at which the device is lost; None: never.
        hold: awaited before each batch is answered; None: no waiting.
    """

    description = "brightness on CPU"

    def __init__(
        self,
        *,
        fails_at: int | None = None,
        hold: threading.Event | None = None,
        input_size: tuple[int, int] = (32, 32),
    ) -> None:
        distance = {"distance": "l2", "epsilon": 1e-8}
        self.metadata = Metadata(("dim", "bright"), 2, distance, "exact", "none", GRID, input_size)
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
        height, width = self.metadata.input_size
        cells = images.reshape(len(images), rows, height // rows, cols, width // cols, 3).mean(axis=(2, 4, 5))
        cells = cells.reshape(len(images), -1)
        brightness = cells.max(axis=1) / 255
        scores = np.stack([1.001 - brightness] * 2 + [brightness + 0.001] * 2, axis=1).astype(np.float32)
        logits = -np.sqrt(np.maximum(2 - 2 * cosines(scores, 2, 1e-8), 0)).astype(np.float32)
        return Outputs(logits, np.repeat(cells.argmax(axis=1)[:, None], 4, axis=1).astype(np.int32), scores)


class QueuedSession(BrightSession):
    """A device with a queue, strict about its protocol; it reads a batch's images only when the batch is collected."""

    depth = 3

    def __init__(self, full_at: int | None = None) -> None:
        super().__init__()
        self.full_at, self.queue, self.longest = full_at, deque[ImageBatch](), 0
        self.user: int | None = None

    def run(self, images: ImageBatch) -> Outputs:
        assert not self.queue
        return super().run(images)

    def submit(self, images: ImageBatch) -> object:
        assert len(self.queue) < self.depth
        assert self.user in (None, threading.get_ident())
        self.user = threading.get_ident()
        self.queue.append(images)
        self.longest = max(self.longest, len(self.queue))
        return images

    def collect(self, handle: object) -> Outputs:
        assert self.user == threading.get_ident()
        images = self.queue.popleft()
        assert images is handle
        if not self.queue:
            self.user = None
        if len(self.batches) == self.full_at:
            self.full_at = None
            raise OutOfMemory("full")
        return super().run(images)


def predict(requests: Iterable[InputImage | Path], *sessions: Session, **options: Any) -> list[Record]:
    listed = (InputImage(one.name, one) if isinstance(one, Path) else one for one in requests)
    return [result.record for result in predict_stream(listed, sessions, InferenceOptions(**options))]


def code(record: Record) -> str | None:
    return record["error"]["code"] if "error" in record else None


def read_results(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "results.jsonl").read_text("utf-8").splitlines()]


def save(path: Path, size: tuple[int, int] = (60, 40), shade: int = 90) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (shade, shade, shade)).save(path, "PNG")
    return path


def wait_until(condition: Callable[[], bool]) -> None:
    limit = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.01)


def own_threads() -> set[str]:
    return {t.name for t in threading.enumerate() if t.name.startswith(("decode", "session-", "service-"))}
