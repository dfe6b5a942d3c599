"""The task of a decode worker process: prepare one image, and write its pixels into their row."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from opal_deploy.inference.decoding.prepare import prepare
from opal_deploy.inference.decoding.read_ahead import ReadAhead, is_remote
from opal_deploy.inference.decoding.slots import SlotLayout
from opal_deploy.inference.isolation.worker import Response
from opal_deploy.inference.timing import StageTimer
from opal_deploy.inference.types import InferenceOptions, Pixels, Prepared, Request
from opal_deploy.preprocess.decode import Source
from opal_deploy.preprocess.geometry import Box


class PrepareRequest(NamedTuple):
    """An image to prepare, and the slot and row that its pixels belong into; `drawn` as in `Request`."""

    source: Source
    box: Box | None
    slot: int
    row: int
    drawn: bool = False


@dataclass(frozen=True)
class PrepareTask:
    """Prepares images.

    Attributes:
        layout: of the slots.
        options: see `prepare`.
    """

    layout: SlotLayout
    options: InferenceOptions

    @cached_property
    def _slots(self) -> Pixels:
        return self.layout.open()

    @cached_property
    def _read_ahead(self) -> ReadAhead:
        return ReadAhead()

    def prepare_group(self, group: list[PrepareRequest]) -> Iterable[PrepareRequest]:
        """Return the requests; images over a network are read while those before them are decoded."""
        if not any(is_remote(request.source) for request in group):
            return group
        sources = self._read_ahead.read([request.source for request in group])
        return (request._replace(source=source) for request, source in zip(group, sources, strict=True))

    def __call__(self, request: PrepareRequest, timer: StageTimer, claim: Callable[[int], None]) -> Response:
        """Return what is known of the image, and the reduced image where it is kept; claim its pixels."""
        _, _, *input_size, _ = self.layout.shape
        image = Request(None, request.source, request.box, drawn=request.drawn)
        row = self._slots[request.slot, request.row]
        prepared = prepare(image, (input_size[0], input_size[1]), self.options, timer, claim, out=row)
        return _build_header(prepared), [] if prepared.image is None else [prepared.image.tobytes()]


def _build_header(prepared: Prepared) -> dict[str, Any]:
    if prepared.error is not None:
        return {"error": [prepared.error.code, str(prepared.error)], "sha256": prepared.image_sha256}
    geometry = prepared.geometry
    assert geometry is not None  # there is no error
    return {
        "width": geometry.width,
        "height": geometry.height,
        "crop": geometry.crop,
        "image": prepared.image is not None,
        "sha256": prepared.image_sha256,
    }
