"""Overlays and evidence sheets as encoded files, drawn from results in worker processes.

A drawing that crashes, takes too long or runs out of memory does not affect any other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias, cast

from opal_deploy.artifact.measurements import EffectiveField
from opal_deploy.errors import ArtifactError, ImageError, StoppedEarly
from opal_deploy.predict.types import InferenceOptions, Result
from opal_deploy.preprocess.decode import no_claim
from opal_deploy.preprocess.resize import to_display
from opal_deploy.records.record import Answered, Problem
from opal_deploy.run.sheets import SheetBuilder, get_image
from opal_deploy.timing import NO_OP_TIMER, StageTimer
from opal_deploy.visualization.overlay import draw_overlay, encode_jpeg, show_photograph
from opal_deploy.visualization.report import make_thumbnail
from opal_deploy.workers.pool import ProcessPool
from opal_deploy.workers.process import WorkerCrashed, WorkerTimeout
from opal_deploy.workers.worker import Data, Response

# JPEGs of the overlay, of its small form for the report, and of the image alone; PNGs of the sheet
Part: TypeAlias = Literal["overlay", "thumbnail", "picture", "sheet", "narrow-sheet"]


@dataclass(frozen=True)
class DrawTask:
    """Draws a result: overlays with the receptive field `field` on them, if there is one, and sheets by `sheets`."""

    field: EffectiveField | None = None
    sheets: SheetBuilder | None = None

    def __call__(
        self, request: tuple[Result, Sequence[Part]], timer: StageTimer, claim: Callable[[int], None] = no_claim
    ) -> Response:
        """Return the drawings of a result, whose names the header lists under `drawn`.

        If a drawing is missing, the header has `error`, a code and a message, or `stop`, the reason why no other image
        can be drawn either. No pixels are claimed, since images to draw on are small.

        Args:
            request: the result with its image, for a sheet also its outputs; and what to draw.
            timer: receives the time of the stage `draw`.
            claim: not used.
        """
        drawn: list[Part] = []
        header: dict[str, Any] = {"drawn": drawn}
        files: list[bytes] = []

        def add(part: Part, data: bytes) -> None:
            drawn.append(part)
            files.append(data)

        result, parts = request
        try:
            with timer.stage("draw"):
                if "overlay" in parts:
                    overlay = draw_overlay(get_image(result.prepared), result.record, self.field)
                    add("overlay", encode_jpeg(overlay))
                    if "thumbnail" in parts:
                        photograph = show_photograph(get_image(result.prepared), cast(Answered, result.record))
                        add("thumbnail", make_thumbnail(photograph, result.record))
                if "picture" in parts:
                    add("picture", encode_jpeg(to_display(get_image(result.prepared))))
                for part in parts:
                    if part in ("sheet", "narrow-sheet") and self.sheets is not None:
                        add(part, self.sheets.build(result, narrow=part == "narrow-sheet").encode())
        except ImageError as error:
            header["error"] = ["drawing_failed", str(error)]
        except MemoryError:
            header["error"] = ["drawing_failed", "drawing it needs more memory than there is; lower --workers"]
        except ArtifactError as error:
            header["stop"] = str(error)
        return header, files


@dataclass(frozen=True)
class Drawings:
    """The encoded drawings of one result, and the reason why one is missing."""

    files: dict[Part, bytes] = field(default_factory=dict)
    error: Problem | None = None


class DrawingPool:
    """Draws results, with `isolate` in worker processes; every method but `close` may be called from any thread."""

    def __init__(self, task: DrawTask, inference: InferenceOptions, timer: StageTimer = NO_OP_TIMER) -> None:
        """Start nothing yet; drawing uses `workers`, `isolate` and `decode_timeout` of `inference`."""
        self._task, self._timeout, self._timer = task, inference.decode_timeout, timer
        self._processes = None
        if inference.isolate:
            self._processes = ProcessPool(inference.workers, task, self._timeout, timer)

    def draw(self, result: Result, parts: Sequence[Part]) -> Drawings:
        """Return the drawings `parts` of an image with a prediction; a thumbnail only with its overlay.

        Raises:
            StoppedEarly: no process can be started, or a file that every drawing needs is damaged.
        """
        # the model's input is not drawn
        request = (replace(result, prepared=replace(result.prepared, pixels=None)), tuple(parts))
        try:
            if self._processes is not None:
                return self._processes.call(request, _build_drawings)
            return _build_drawings(*self._task(request, self._timer))
        except WorkerCrashed as crash:
            error = Problem(code="drawing_crashed", message=f"the process that drew it {crash}")
        except WorkerTimeout:
            reason = f"it was not drawn within {self._timeout:g} s; raise --decode-timeout"
            error = Problem(code="drawing_timeout", message=reason)
        except MemoryError:
            error = Problem(code="drawing_failed", message="its image needs more memory than there is; lower --workers")
        return Drawings(error=error)

    def close(self) -> None:
        """End the processes; no drawing may be in flight."""
        if self._processes is not None:
            self._processes.close()


def _build_drawings(header: dict[str, Any], files: Sequence[Data]) -> Drawings:
    if "stop" in header:
        raise StoppedEarly(header["stop"])
    error = None
    if "error" in header:
        code, message = header["error"]
        error = Problem(code=code, message=message)
    return Drawings({name: bytes(data) for name, data in zip(header["drawn"], files, strict=True)}, error)
