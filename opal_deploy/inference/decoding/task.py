"""The task of a decode worker process: prepare one image, and send it to the parent."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from opal_deploy.inference.decoding.prepare import prepare
from opal_deploy.inference.isolation.worker import Response
from opal_deploy.inference.timing import StageTimer
from opal_deploy.inference.types import InferenceOptions, Prepared, Request
from opal_deploy.preprocess.decode import Source
from opal_deploy.preprocess.geometry import Box


@dataclass(frozen=True)
class PrepareTask:
    """Prepares images.

    Attributes:
        input_size: (H0, W0) of the model.
        options: see `prepare`.
    """

    input_size: tuple[int, int]
    options: InferenceOptions

    def __call__(self, request: tuple[Source, Box | None], timer: StageTimer, claim: Callable[[int], None]) -> Response:
        """Return what is known of the image, its pixels, and the reduced image where it is kept; claim its pixels."""
        source, box = request
        prepared = prepare(Request(None, source, box), self.input_size, self.options, timer, claim)
        parts = [] if prepared.pixels is None else [prepared.pixels.tobytes()]
        if prepared.image is not None:
            parts.append(prepared.image.tobytes())
        return _build_header(prepared), parts


def _build_header(prepared: Prepared) -> dict[str, Any]:
    if prepared.error is not None:
        return {"error": [prepared.error.code, str(prepared.error)], "sha256": prepared.file_sha256}
    geometry = prepared.geometry
    assert geometry is not None  # there is no error
    return {
        "width": geometry.width,
        "height": geometry.height,
        "crop": geometry.crop,
        "image": prepared.image is not None,
        "sha256": prepared.file_sha256,
    }
