"""Predict prepared images in batches with one session, and build their records.

A record depends on its image alone. An image with an error keeps its place in the batch as a blank image, so that the
others are computed exactly as they would be beside a good one; and where a runtime's last bits depend on the size of
the batch, every forward pass can be filled up to one size (`InferenceOptions.fixed_batch`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import cast
from weakref import WeakKeyDictionary

import numpy as np

from opal_deploy.artifact.outputs import Outputs
from opal_deploy.errors import ImageError, OutOfMemory
from opal_deploy.inference.timing import NO_OP_TIMER, StageTimer
from opal_deploy.inference.types import InferenceOptions, Prepared, Result
from opal_deploy.preprocess.geometry import Geometry
from opal_deploy.records.record import Digests, ImageInfo, Record, build_records, error_record
from opal_deploy.runtime.session import ImageBatch, PaddingSession, Session, StagedSession
from opal_deploy.visualization.slot_names import SlotNames

# a session runs one batch at a time, however many predictors share it
_LOCKS: WeakKeyDictionary[Session, threading.Lock] = WeakKeyDictionary()
_LOCKS_LOCK = threading.Lock()


class BatchPredictor:
    """A session that predicts batches, and the largest batch that its memory takes."""

    def __init__(
        self,
        session: Session,
        options: InferenceOptions,
        timer: StageTimer = NO_OP_TIMER,
        print_message: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Load nothing and run nothing yet.

        Args:
            session: the model.
            options: the options of batches and records.
            timer: gets the times of the stages `batch`, `transfer`, `compute` and `evidence`.
            print_message: is called when memory was short and batches are smaller from then on.
        """
        self._session, self._options, self._timer, self._print_message = session, options, timer, print_message
        self._max_batch = options.batch
        self._slot_names = options.slot_names or SlotNames()
        # a session whose outputs do not depend on the batch's size needs no filling up; ONNX Runtime's CPU kernels do
        self._fixed_batch = options.fixed_batch and not getattr(session, "batch_invariant", False)
        self._announce_batch_size()
        with _LOCKS_LOCK:
            self._lock = _LOCKS.setdefault(session, threading.Lock())

    def predict(self, batch: Sequence[Prepared]) -> list[Result]:
        """Return the results of at most `options.batch` images, in their order.

        Where memory does not suffice, the images that failed are predicted again in batches of half the size, which
        stays the limit from then on.

        Raises:
            OutOfMemory: a single image does not fit. StoppedEarly: the device was lost.
        """
        results: list[Result] = []
        while len(results) < len(batch):
            part = batch[len(results) : len(results) + self._max_batch]
            try:
                results += self._predict_part(part)
            except (OutOfMemory, MemoryError) as error:
                self._halve_batch(self._num_rows(part), error)
        return results

    def _num_rows(self, part: Sequence[Prepared]) -> int:
        return self._max_batch if self._fixed_batch else len(part)

    def _predict_part(self, part: Sequence[Prepared]) -> list[Result]:
        outputs = None
        first = next((prepared.pixels for prepared in part if prepared.pixels is not None), None)
        if first is not None:
            with self._timer.stage("batch"):
                images = np.empty((self._num_rows(part), *first.shape), first.dtype)
                for row in range(len(images)):
                    pixels = part[row].pixels if row < len(part) else None
                    images[row] = 0 if pixels is None else pixels
            with self._timer.stage("compute"), self._lock:
                outputs = self._run(images)
        with self._timer.stage("evidence"):
            return self._build_results(part, outputs)

    def _run(self, images: ImageBatch) -> Outputs:
        session = self._session
        if not (self._options.time_transfers and isinstance(session, StagedSession)):
            return session.run(images)
        outputs, stages = session.run_staged(images)
        copies = [seconds for seconds in (stages.host_to_device, stages.device_to_host) if seconds is not None]
        if copies:
            self._timer.attribute("transfer", sum(copies))
        return outputs

    def _announce_batch_size(self) -> None:
        # a batch that is filled up here already needs no filling up by its session
        if self._fixed_batch and isinstance(self._session, PaddingSession):
            self._session.add_batch_size(self._max_batch)

    def _halve_batch(self, size: int, error: Exception) -> None:
        where = self._session.description
        if size == 1:
            reason = str(error).partition(";")[0] or type(error).__name__
            raise OutOfMemory(f"{where}: out of memory with a single image ({reason}); free memory there") from None
        self._max_batch = size // 2
        self._announce_batch_size()
        self._print_message(f"{where}: out of memory with a batch of {size}; going on with {self._max_batch}")

    def _build_results(self, part: Sequence[Prepared], outputs: Outputs | None) -> list[Result]:
        """Return the result of each image; `outputs` has a row for each, None where no image could be prepared."""
        options = self._options
        errors = self._find_errors(part, outputs)
        answered = [row for row, error in enumerate(errors) if error is None]
        infos = [self._build_info(part[row]) for row in answered]
        records: Iterator[Record] = iter(())
        if outputs is not None and answered:
            names = self._slot_names
            records = iter(
                build_records(
                    infos, outputs.take(answered), self._session.metadata,
                    top=options.top, min_margin=options.min_margin, slot_name=names.name if names else None,
                )
            )  # fmt: skip
        results = []
        for row, (prepared, error) in enumerate(zip(part, errors, strict=True)):
            if error is not None:
                results.append(Result(self._build_error(prepared, error), prepared))
            else:
                kept = outputs.rows(row, row + 1) if outputs is not None and options.keep_outputs else None
                results.append(Result(next(records), prepared, kept))
        return results

    def _find_errors(self, part: Sequence[Prepared], outputs: Outputs | None) -> list[ImageError | None]:
        if outputs is None:
            return [prepared.error for prepared in part]
        # half precision overflows for some images, and JSON has no NaN
        finite = np.isfinite(outputs.logits[: len(part)]).min(axis=1).tolist()
        return [
            ImageError("not_finite", "the model's logits for it are NaN or infinite")
            if prepared.error is None and not is_finite
            else prepared.error
            for prepared, is_finite in zip(part, finite, strict=True)
        ]

    def _build_info(self, prepared: Prepared) -> ImageInfo:
        request = prepared.request
        digests = Digests(prepared.file_sha256, self._options.model_sha256)
        return ImageInfo(request.name, cast(Geometry, prepared.geometry), digests, request.truth, request.index)

    def _build_error(self, prepared: Prepared, error: ImageError) -> Record:
        request, digests = prepared.request, Digests(prepared.file_sha256, self._options.model_sha256)
        return error_record(
            request.name, error.code, str(error), digests=digests, truth=request.truth, index=request.index
        )
