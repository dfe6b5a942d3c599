"""The task of a drawing process: the overlay and the evidence sheet of one result, as encoded files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from opal_deploy.artifact.receptive_field import EffectiveField
from opal_deploy.errors import ArtifactError, ImageError
from opal_deploy.inference.isolation.worker import Response
from opal_deploy.inference.sheets import SheetBuilder, get_image
from opal_deploy.inference.timing import StageTimer
from opal_deploy.inference.types import Result
from opal_deploy.preprocess.decode import no_claim
from opal_deploy.visualization.overlay import draw_overlay, encode_jpeg
from opal_deploy.visualization.report import make_thumbnail

# in the order in which they are drawn
PARTS = ("overlay", "thumbnail", "sheet")


class DrawRequest(NamedTuple):
    """A result to draw.

    Attributes:
        result: with its image, and with outputs where there are sheets; its pixels are not needed.
        thumbnail: make the report's thumbnail too.
    """

    result: Result
    thumbnail: bool


@dataclass(frozen=True)
class DrawTask:
    """Draws results.

    Attributes:
        overlays: draw overlays.
        field: the effective receptive field to draw on overlays; None for none.
        sheets: draws evidence sheets; None for none.
    """

    overlays: bool
    field: EffectiveField | None
    sheets: SheetBuilder | None

    def __call__(self, request: DrawRequest, timer: StageTimer, claim: Callable[[int], None] = no_claim) -> Response:
        """Return the encoded drawings, their sizes in the header by the names in `PARTS`.

        What could not be drawn is absent; then the header has `error`, a code and a message, or `stop`, the reason why
        no other image can be drawn either. Nothing is claimed: images to draw on are small.
        """
        header: dict[str, Any] = {}
        parts: list[bytes] = []

        def add(name: str, data: bytes) -> None:
            header[name] = len(data)
            parts.append(data)

        result = request.result
        try:
            with timer.stage("draw"):
                if self.overlays:
                    overlay = draw_overlay(get_image(result.prepared), result.record, self.field)
                    add("overlay", encode_jpeg(overlay))
                    if request.thumbnail:
                        add("thumbnail", make_thumbnail(overlay, result.record))
                if self.sheets is not None:
                    add("sheet", self.sheets.build(result).encode())
        except ImageError as error:
            header["error"] = ["drawing_failed", str(error)]
        except MemoryError:
            header["error"] = ["drawing_failed", "drawing it needs more memory than there is; lower --workers"]
        except ArtifactError as error:
            header["stop"] = str(error)
        return header, parts
