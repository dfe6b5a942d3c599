"""Overlays and evidence sheets as encoded files, drawn from results in worker processes.

A drawing that crashes, takes too long or runs out of memory does not affect any other.
"""

from __future__ import annotations

import functools
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias, cast

from opal_deploy.artifact.measurements import EffectiveField
from opal_deploy.errors import ArtifactError, ImageError, StoppedEarly
from opal_deploy.predict.types import InferenceOptions, Result
from opal_deploy.preprocess.resize import to_display
from opal_deploy.records.record import Answered, Problem
from opal_deploy.run.sheets import SheetBuilder, get_image
from opal_deploy.timing import NO_OP_TIMER, StageTime, StageTimer
from opal_deploy.visualization.overlay import draw_overlay, encode_jpeg, show_photograph
from opal_deploy.visualization.report import make_thumbnail
from opal_deploy.worker_pool import WorkerCrashed, WorkerPool, WorkerTimeout

# JPEGs of the overlay, of its small form for the report, and of the image alone; PNGs of the sheet
Part: TypeAlias = Literal["overlay", "thumbnail", "picture", "sheet"]


@dataclass(frozen=True)
class Drawings:
    """The encoded drawings of one result, and the reason why one is missing."""

    files: dict[Part, bytes] = field(default_factory=dict)
    error: Problem | None = None


@dataclass(frozen=True)
class DrawTask:
    """Draws a result: overlays with the receptive field `field` on them, if there is one, and sheets by `sheets`."""

    field: EffectiveField | None = None
    sheets: SheetBuilder | None = None

    def draw(self, result: Result, parts: Sequence[Part], timer: StageTimer = NO_OP_TIMER) -> Drawings:
        """Return the drawings `parts` of a result with its image, for a sheet also its outputs.

        Raises:
            StoppedEarly: a file that every drawing needs is damaged.
        """
        drawn: dict[Part, bytes] = {}
        try:
            with timer.stage("draw"):
                if "overlay" in parts:
                    overlay = draw_overlay(get_image(result.prepared), result.record, self.field)
                    drawn["overlay"] = encode_jpeg(overlay)
                    if "thumbnail" in parts:
                        photograph = show_photograph(get_image(result.prepared), cast(Answered, result.record))
                        drawn["thumbnail"] = make_thumbnail(photograph, result.record)
                if "picture" in parts:
                    drawn["picture"] = encode_jpeg(to_display(get_image(result.prepared)))
                for part in parts:
                    if part == "sheet" and self.sheets is not None:
                        drawn[part] = self.sheets.build(result).encode()
        except ImageError as error:
            return Drawings(drawn, _problem("drawing_failed", str(error)))
        except MemoryError:
            reason = "drawing it needs more memory than there is; lower --workers"
            return Drawings(drawn, _problem("drawing_failed", reason))
        except ArtifactError as error:
            raise StoppedEarly(str(error)) from None
        return Drawings(drawn)


class DrawingPool:
    """Draws results, in worker processes if there are any; every method may be called from any thread."""

    def __init__(
        self,
        task: DrawTask,
        inference: InferenceOptions,
        processes: WorkerPool | None = None,
        timer: StageTimer = NO_OP_TIMER,
    ) -> None:
        """Start nothing.

        Args:
            task: draws.
            inference: the options of decoding, whose time limit applies to drawing too.
            processes: where to draw, such as the decoder pool's; None: in the calling thread.
            timer: receives the time of the stage `draw`.
        """
        self._task, self._timeout, self._processes, self._timer = task, inference.decode_timeout, processes, timer
        # it may hold an atlas, and is read once per process
        self._pickled = b"" if processes is None else pickle.dumps(task)

    def draw(self, result: Result, parts: Sequence[Part]) -> Drawings:
        """Return the drawings `parts` of an image with a prediction; a thumbnail only with its overlay.

        A process that crashes gets the result a second time: the system may have killed it for lack of memory.

        Raises:
            StoppedEarly: no process can be started, or a file that every drawing needs is damaged.
        """
        # the model's input is not drawn
        result = replace(result, prepared=replace(result.prepared, pixels=None))
        if self._processes is None:
            return self._task.draw(result, parts, self._timer)
        for attempt in range(2):
            try:
                drawings, stages = self._processes.call(
                    _draw_in_process, self._pickled, result, parts, timed=self._timer.enabled
                )
            except WorkerCrashed as crash:
                if attempt:
                    return Drawings(error=_problem("drawing_crashed", f"the process that drew it {crash}"))
            except WorkerTimeout:
                reason = f"it was not drawn within {self._timeout:g} s; raise --decode-timeout"
                return Drawings(error=_problem("drawing_timeout", reason))
            else:
                for stage in stages:
                    self._timer.add(stage.stage, stage.wall, stage.cpu, stage.calls)
                return drawings
        raise AssertionError("unreachable")


def _draw_in_process(
    task: bytes, result: Result, parts: Sequence[Part], *, timed: bool
) -> tuple[Drawings, tuple[StageTime, ...]]:
    timer = StageTimer() if timed else NO_OP_TIMER
    return _load_task(task).draw(result, parts, timer), timer.read().stages


@functools.lru_cache(maxsize=1)
def _load_task(pickled: bytes) -> DrawTask:
    task: DrawTask = pickle.loads(pickled)  # noqa: S301 (the caller wrote it)
    return task


def _problem(code: str, message: str) -> Problem:
    return Problem(code=code, message=message)
