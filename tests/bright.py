"""A session that answers by brightness, which can be worked out by hand, and helpers that many tests share."""

import threading
import time
import tracemalloc
from collections import deque
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
from PIL import Image

from opal_deploy.artifact.class_map import ClassMap
from opal_deploy.artifact.metadata import Metadata
from opal_deploy.artifact.opal_head import cosines
from opal_deploy.artifact.outputs import Outputs
from opal_deploy.errors import StoppedEarly
from opal_deploy.predict.executor import predict_stream
from opal_deploy.predict.prepare import InferenceOptions
from opal_deploy.records.lines import to_document
from opal_deploy.run.infer import write_records, write_tables_and_report
from opal_deploy.run.options import Interrupt
from opal_deploy.run.summary import Summary
from opal_deploy.runtime.session import ImageBatch, check_batch
from opal_deploy.sources.image import InputImage
from opal_deploy.timing import StageTimer

GRID = (4, 4)


class BrightSession:
    """Two classes, `dim` and `bright`, of two slots each. Every channel's maximum is at the brightest cell.

    Args:
        fails_at: the batch (from 0) at which the device is lost; None: never.
        hold: awaited before each batch is answered; None: no waiting.
    """

    device, description = "cpu", "brightness on CPU"

    def __init__(self, *, fails_at=None, hold=None, input_size=(32, 32)):
        distance = {"distance": "l2", "epsilon": 1e-8}
        self.metadata = Metadata(("dim", "bright"), 2, distance, "exact", "none", GRID, input_size)
        self.fails_at, self.hold = fails_at, hold
        self.batches = []

    def run(self, images):
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
        logits = -np.sqrt(np.maximum(2 - 2 * cosines(scores, ClassMap.blocks(2, 2), 1e-8), 0)).astype(np.float32)
        return Outputs(logits, np.repeat(cells.argmax(axis=1)[:, None], 4, axis=1).astype(np.int32), scores)


class QueuedSession(BrightSession):
    """A device with a queue, strict about its protocol; it reads a batch's images only when the batch is collected."""

    depth = 3

    def __init__(self, error=None, full_at=None):
        super().__init__()
        self.error, self.full_at, self.queue, self.longest = error, full_at, deque[ImageBatch](), 0
        self.user = None

    def run(self, images):
        assert not self.queue
        return super().run(images)

    def submit(self, images):
        assert len(self.queue) < self.depth
        assert self.user in (None, threading.get_ident())
        self.user = threading.get_ident()
        self.queue.append(images)
        self.longest = max(self.longest, len(self.queue))
        return images

    def collect(self, handle):
        assert self.user == threading.get_ident()
        images = self.queue.popleft()
        assert images is handle
        if not self.queue:
            self.user = None
        if len(self.batches) == self.full_at:
            raise self.error
        return super().run(images)


def predict(requests, *sessions, **options):
    listed = (InputImage(one.name, one) if isinstance(one, Path) else one for one in requests)
    return [to_document(result.record) for result in predict_stream(listed, sessions, InferenceOptions(**options))]


def write_run(options, images, *sessions, interrupt=None, **callbacks):
    """Write the records, drawings, tables and report of a run directory as `infer` does, and return their summary."""
    inference = replace(options.inference, keep_images=options.report is not None)
    options, interrupt = replace(options, inference=inference), interrupt or Interrupt()
    summary, timer, started = Summary(), StageTimer(), time.perf_counter()
    thumbnails = write_records(
        iter(images), sessions, options, summary=summary, interrupt=interrupt, timer=timer, **callbacks
    )
    if not interrupt.stopped:
        write_tables_and_report(options, summary, thumbnails)
    return summary.end(timer, started)


def code(record):
    return record["error"]["code"] if "error" in record else None


def save(path, size=(60, 40), shade=90):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (shade, shade, shade)).save(path, "PNG")
    return path


def wait_until(condition, seconds=0.01):
    limit = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < limit
        time.sleep(seconds)


@contextmanager
def memory_under(limit):
    """Fail if Python's objects of the block take more bytes than this at any moment."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < limit
    finally:
        tracemalloc.stop()


def own_threads():
    return {t.name for t in threading.enumerate() if t.name.startswith(("decode", "session-", "service-"))}
