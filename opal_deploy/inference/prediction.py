"""From prepared pictures to records: one session's forward passes, whatever its memory and single images do.

A record depends on its image alone. An image with an error keeps its place in the batch as a blank picture, so that the
others are computed exactly as they would be beside a good one; and where a runtime's last bits depend on how many
pictures it is given at a time, every pass can be filled up to one size (`fixed_batch`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, cast
from weakref import WeakKeyDictionary

import numpy as np

from opal_deploy.artifact.outputs import Outputs
from opal_deploy.errors import OutOfMemory
from opal_deploy.inference.decoding.prepare import Prepared
from opal_deploy.inference.timing import NO_OP_TIMER, StageTimer
from opal_deploy.preprocess.geometry import Geometry
from opal_deploy.records.record import Record, build_record, error_record, with_digests
from opal_deploy.runtime.session import ImageBatch, Session, StagedSession

# a session answers one batch at a time, whoever asks
_LOCKS: WeakKeyDictionary[Session, threading.Lock] = WeakKeyDictionary()
_LOCKS_LOCK = threading.Lock()


class PredictorOptions(Protocol):
    """What an `Answerer` reads of its options; `EngineOptions` has it all."""

    @property
    def batch(self) -> int: ...
    @property
    def fixed_batch(self) -> bool: ...
    @property
    def top(self) -> int: ...
    @property
    def min_margin(self) -> float | None: ...
    @property
    def time_transfers(self) -> bool: ...
    @property
    def model_sha256(self) -> str | None: ...
    @property
    def keep_outputs(self) -> bool: ...


@dataclass(frozen=True)
class Result:
    """One image's record with what drawings of it need.

    Attributes:
        record: as it is written.
        prepared: the picture.
        outputs: its own row of the forward pass, N = 1; None unless it was asked for, or where there is an error.
    """

    record: Record
    prepared: Prepared
    outputs: Outputs | None = None


class BatchPredictor:
    """One session, and how many pictures its memory takes at a time."""

    def __init__(
        self,
        session: Session,
        options: PredictorOptions,
        clock: StageTimer = NO_OP_TIMER,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._session, self._options, self._clock, self._say = session, options, clock, say
        self._most = options.batch
        # a runtime that answers each picture alike in any company needs no filling up; ONNX Runtime's CPU kernels do so
        self._fixed = options.fixed_batch and not getattr(session, "batch_invariant", False)
        with _LOCKS_LOCK:
            self._lock = _LOCKS.setdefault(session, threading.Lock())

    def answer(self, batch: Sequence[Prepared]) -> list[Result]:
        """Records of at most `options.batch` images, in their order.

        Where memory does not suffice, what failed is tried again with half as many pictures at a time, and that stays
        the limit.

        Raises:
            OutOfMemory: a single picture does not fit. StoppedEarly: the device was lost.
        """
        results: list[Result] = []
        while len(results) < len(batch):
            part = batch[len(results) : len(results) + self._most]
            try:
                results += self._part(part)
            except (OutOfMemory, MemoryError) as error:
                self._halve(len(self._fill(part)), error)
        return results

    def _fill(self, part: Sequence[Prepared]) -> range:
        """The rows of the forward pass that answers `part`."""
        return range(self._most if self._fixed else len(part))

    def _part(self, part: Sequence[Prepared]) -> list[Result]:
        outputs = None
        first = next((entry.pixels for entry in part if entry.pixels is not None), None)
        if first is not None:
            with self._clock.stage("batch"):
                images = np.empty((len(self._fill(part)), *first.shape), first.dtype)
                for row in self._fill(part):
                    pixels = part[row].pixels if row < len(part) else None
                    images[row] = 0 if pixels is None else pixels
            with self._clock.stage("compute"), self._lock:
                outputs = self._run(images)
        with self._clock.stage("evidence"):
            return [self._result(entry, row, outputs) for row, entry in enumerate(part)]

    def _run(self, images: ImageBatch) -> Outputs:
        session = self._session
        if not (self._options.time_transfers and isinstance(session, StagedSession)):
            return session.run(images)
        outputs, stages = session.run_staged(images)
        copies = [part for part in (stages.host_to_device, stages.device_to_host) if part is not None]
        if copies:
            self._clock.attribute("transfer", sum(copies))
        return outputs

    def _halve(self, size: int, error: Exception) -> None:
        where = self._session.description
        if size == 1:
            why = str(error).partition(";")[0] or type(error).__name__
            raise OutOfMemory(f"{where}: out of memory with a single picture ({why}); free memory there") from None
        self._most = size // 2
        self._say(f"{where}: out of memory with {size} pictures at a time; going on with {self._most}")

    def _result(self, entry: Prepared, row: int, outputs: Outputs | None) -> Result:
        record = self._record(entry, row, outputs)
        if not self._options.keep_outputs or outputs is None or record["status"] == "error":
            return Result(record, entry)
        return Result(record, entry, outputs.rows(row, row + 1))

    def _record(self, entry: Prepared, row: int, outputs: Outputs | None) -> Record:
        return with_digests(self._answered(entry, row, outputs), entry.file_sha256, self._options.model_sha256)

    def _answered(self, entry: Prepared, row: int, outputs: Outputs | None) -> Record:
        if entry.error is not None:
            return entry.error
        answers = cast(Outputs, outputs)
        if not np.isfinite(answers.logits[row]).all():
            # half precision overflows for some pictures; NaN is no answer, and no JSON
            return error_record(entry.request.name, "not_finite", "the model's answer for it is not a finite number")
        return build_record(
            entry.request.name,
            cast(Geometry, entry.geometry),
            answers,
            row,
            self._session.metadata,
            top=self._options.top,
            min_margin=self._options.min_margin,
        )
