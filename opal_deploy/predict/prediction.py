"""Predict prepared batches with one session, and build their records.

A record does not depend on the other images. An image with an error keeps its place in the batch as a blank image, so
that the others are computed exactly as next to a good one. Where a runtime's last bits depend on the batch size, every
forward pass can be filled up to one size (`InferenceOptions.fixed_batch`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import cast
from weakref import WeakKeyDictionary

import numpy as np

from opal_deploy.artifact.outputs import Outputs
from opal_deploy.errors import ImageError, OutOfMemory
from opal_deploy.predict.types import InferenceOptions, Pixels, Prepared, Result
from opal_deploy.preprocess.geometry import Geometry
from opal_deploy.records.build import Digests, ImageInfo, Place, build_records, error_record
from opal_deploy.records.record import Record
from opal_deploy.runtime.session import PaddingSession, PipelinedSession, Session
from opal_deploy.sources.image import InputImage
from opal_deploy.timing import NO_OP_TIMER, StageTimer


class BatchPredictor:
    """A session that predicts batches, and the largest batch that fits into its memory.

    `run`, or `submit` and `collect`, need the session; `build_results` does not, so that another thread builds records
    while the session computes the next batch.

    Attributes:
        depth: maximum batches in flight between `submit` and `collect`; 1: only `run` may be called.
    """

    def __init__(
        self,
        session: Session,
        options: InferenceOptions,
        timer: StageTimer = NO_OP_TIMER,
        print_message: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Load and run nothing yet.

        Args:
            session: the model.
            options: the options of batches and records.
            timer: receives the times of the stages `compute` and `evidence`.
            print_message: receives a line when memory was short and batches become smaller.
        """
        self._session, self._options, self._timer, self._print_message = session, options, timer, print_message
        self._pipelined = session if isinstance(session, PipelinedSession) else None
        self.depth = count_in_flight(session)
        self._max_batch = options.batch
        # only a session whose outputs depend on the batch size, as ONNX Runtime's on a CPU, needs full batches
        self._fixed_batch = options.fixed_batch and not getattr(session, "batch_invariant", False)
        self._in_flight = 0
        with _LOCKS_LOCK:
            self._lock = _LOCKS.setdefault(session, _FairLock())
        self._is_size_new = self._fixed_batch
        if self._fixed_batch:
            with self._lock:
                self._add_batch_size()

    @property
    def is_awaited(self) -> bool:
        """Whether another predictor waits for the session, which it gets once this one has no batch in flight."""
        return self._lock.is_contended

    def run(self, images: Sequence[Prepared], pixels: Pixels) -> Outputs | None:
        """Return the outputs of some images, one row each; None if all of them have errors.

        If memory is short, the images are predicted in batches of half the size, which remains the limit. No batch may
        be in flight.

        Args:
            images: at most `options.batch`.
            pixels: uint8 [rows, H0, W0, 3], the images' rows first; later rows may be overwritten.

        Raises:
            OutOfMemory: a single image does not fit. StoppedEarly: the device was lost.
        """
        if all(image.error is not None for image in images):
            return None
        parts: list[Outputs] = []
        done = 0
        while done < len(images):
            batch = self._take_rows(pixels, done, min(len(images) - done, self._max_batch))
            try:
                with self._timer.stage("compute"), self._lock:
                    self._add_batch_size()
                    outputs = self._session.run(batch)
            except (OutOfMemory, MemoryError) as error:
                self._halve_batch(len(batch), error)
                continue
            parts.append(outputs.rows(0, min(len(images) - done, len(batch))))
            done += len(parts[-1])
        return parts[0] if len(parts) == 1 else Outputs.concatenate(parts)

    def submit(self, images: Sequence[Prepared], pixels: Pixels) -> object | None:
        """Begin a batch and return its handle; None if only `run` can predict it; raise StoppedEarly.

        The arguments are those of `run`; `pixels` must not change until the batch is collected. Batches are collected
        in order, on the same thread; until then no other predictor uses the session.
        """
        session = self._pipelined
        if session is None or len(images) > self._max_batch or all(image.error is not None for image in images):
            return None
        batch = self._take_rows(pixels, 0, len(images))
        if not self._in_flight:
            self._lock.acquire()
        self._in_flight += 1
        try:
            return session.submit(batch)
        except (OutOfMemory, MemoryError):
            # `run` meets it again, and continues with smaller batches
            self._count_collected()
            return None
        except BaseException:
            self._count_collected()
            raise

    def collect(self, handle: object, images: Sequence[Prepared]) -> Outputs | None:
        """Return the outputs of the oldest batch in flight; None if memory was short and `run` must be called.

        Args:
            handle: what `submit` returned.
            images: the batch's images.

        Raises:
            StoppedEarly: the device was lost.
        """
        assert self._pipelined is not None  # there is a handle
        try:
            with self._timer.stage("compute"):
                return self._pipelined.collect(handle).rows(0, len(images))
        except (OutOfMemory, MemoryError):
            return None
        finally:
            self._count_collected()

    def _count_collected(self) -> None:
        self._in_flight -= 1
        if not self._in_flight:
            self._lock.release()

    def _take_rows(self, pixels: Pixels, start: int, count: int) -> Pixels:
        """Return `count` rows of a batch, filled up with blank images if the session needs one size."""
        if not self._fixed_batch:
            return pixels[start : start + count]
        rows = pixels[start : start + self._max_batch]
        if len(rows) < self._max_batch:
            rows = np.concatenate([rows, np.zeros((self._max_batch - len(rows), *rows.shape[1:]), rows.dtype)])
        if count < len(rows):
            rows[count:] = 0
        return rows

    def _add_batch_size(self) -> None:
        """Tell a padding session the new batch size: batches are filled up here, or its own size did not fit."""
        if self._is_size_new and isinstance(self._session, PaddingSession):
            self._session.add_batch_size(self._max_batch)
        self._is_size_new = False

    def _halve_batch(self, size: int, error: Exception) -> None:
        where = self._session.description
        if size == 1:
            reason = str(error).partition(";")[0] or type(error).__name__
            raise OutOfMemory(f"{where}: out of memory with a single image ({reason}); free memory there") from None
        self._max_batch, self._is_size_new = size // 2, True
        self._print_message(f"{where}: out of memory with a batch of {size}; going on with {self._max_batch}")

    def build_results(self, part: Sequence[Prepared], pixels: Pixels, outputs: Outputs | None) -> list[Result]:
        """Return the result of each image from its row of `outputs`, see `run`."""
        options, results = self._options, []
        with self._timer.stage("evidence"):
            errors = _find_errors(part, outputs)
            answered = [row for row, error in enumerate(errors) if error is None]
            records: Iterator[Record] = iter(())
            if outputs is not None and answered:
                infos = [self._build_info(part[row]) for row in answered]
                records = iter(
                    build_records(
                        infos, outputs.take(answered), self._session.metadata, top=options.top,
                        decision=options.decision, slot_names=options.slot_names,
                    )
                )  # fmt: skip
            for row, (prepared, error) in enumerate(zip(part, errors, strict=True)):
                if error is not None:
                    results.append(Result(self._build_error(prepared, error), prepared))
                    continue
                if options.keep_pixels:
                    prepared = replace(prepared, pixels=pixels[row].copy())
                keep = options.keep_outputs or prepared.input.drawn
                kept = outputs.rows(row, row + 1) if outputs is not None and keep else None
                results.append(Result(next(records), prepared, kept))
        return results

    def _build_info(self, prepared: Prepared) -> ImageInfo:
        request = prepared.input
        digests = Digests(prepared.image_sha256, self._options.model_sha256)
        geometry = cast(Geometry, prepared.geometry)
        return ImageInfo(request.name, geometry, digests, request.label, request.index, _find_place(request))

    def _build_error(self, prepared: Prepared, error: ImageError) -> Record:
        request, digests = prepared.input, Digests(prepared.image_sha256, self._options.model_sha256)
        return error_record(
            request.name, error.code, str(error), digests=digests, label=request.label, index=request.index,
            place=_find_place(request),
        )  # fmt: skip


def _find_errors(part: Sequence[Prepared], outputs: Outputs | None) -> list[ImageError | None]:
    if outputs is None:
        return [prepared.error for prepared in part]
    # half precision overflows for some images, and JSON has no NaN
    finite = outputs.rows(0, len(part)).is_finite().tolist()
    not_finite = ImageError("not_finite", "the model's logits for it are NaN or infinite")
    return [
        prepared.error or (None if is_finite else not_finite) for prepared, is_finite in zip(part, finite, strict=True)
    ]


def _find_place(request: InputImage) -> Place:
    place = Place(detection=request.detection)
    return place if request.frame is None else place._replace(frame=request.frame.index, time=request.frame.seconds)


def count_in_flight(session: Session) -> int:
    """Return how many batches a session may hold at a time."""
    return session.depth if isinstance(session, PipelinedSession) else 1


class _FairLock:
    """A lock that is granted in the order of the requests, and may be released by another thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._requests = self._releases = 0

    @property
    def is_contended(self) -> bool:
        """Whether a thread waits for the lock."""
        return self._requests - self._releases > 1

    def acquire(self) -> None:
        """Wait for the lock."""
        with self._changed:
            turn, self._requests = self._requests, self._requests + 1
            self._changed.wait_for(lambda: self._releases == turn)

    def release(self) -> None:
        """Hand the lock to the thread that waits longest."""
        with self._changed:
            self._releases += 1
            self._changed.notify_all()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *details: object) -> None:
        self.release()


# only one predictor at a time uses a session
_LOCKS: WeakKeyDictionary[Session, _FairLock] = WeakKeyDictionary()
_LOCKS_LOCK = threading.Lock()
