"""One image on its way to the model: read, decode, orient, crop, resize. What can go wrong becomes its error."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from opal_deploy.errors import ImageError
from opal_deploy.explain.records import Record, error_record
from opal_deploy.pipeline.reading import opener
from opal_deploy.pipeline.stages import NO_CLOCK, StageClock
from opal_deploy.preprocess.decode import Decoding, Source, decode, decode_for
from opal_deploy.preprocess.geometry import Geometry
from opal_deploy.preprocess.resize import Box, lay_out, to_input

Pixels = NDArray[np.uint8]

# pictures up to this size are kept until their overlay is drawn; larger ones are decoded again, to bound memory
KEEP_PIXELS = 2_000_000


@dataclass(frozen=True)
class Request:
    """An image to explain.

    Attributes:
        name: as the record shows it; None for pictures that have none.
        source: what `decode` takes.
        box: to crop to first; `no_box` if one was wanted and there is none.
    """

    name: str | None
    source: Source
    box: Box | ImageError | None = None


@dataclass(frozen=True)
class Prepared:
    """An image ready for a batch, or its error record.

    Attributes:
        pixels: uint8 [H0, W0, 3], RGB; None where there is an error.
        picture: the whole oriented picture, where an overlay will be drawn and it is small enough to keep.
    """

    request: Request
    geometry: Geometry | None = None
    pixels: Pixels | None = None
    picture: Image.Image | None = None
    error: Record | None = None


def prepare(
    request: Request,
    input_size: tuple[int, int],
    max_pixels: int,
    *,
    keep_picture: bool,
    clock: StageClock = NO_CLOCK,
    decoding: Decoding = Decoding.default,
) -> Prepared:
    """Everything between a file and a batch; never raises for what an image can cause."""
    try:
        if isinstance(request.box, ImageError):
            raise request.box
        reading = opener(clock)
        with clock.stage("decode"):
            if request.box is None:
                picture, geometry = decode_for(
                    request.source, input_size, max_pixels=max_pixels, open_file=reading, decoding=decoding
                )
            else:
                # a crop needs the pixels that scaled decoding would leave out
                picture = decode(request.source, max_pixels=max_pixels, open_file=reading, decoding=decoding)
                geometry = lay_out(picture, request.box)
        with clock.stage("resize"):
            pixels = to_input(picture, geometry, input_size, decoding)
    except ImageError as error:
        return failed(request, error.code, str(error))
    except MemoryError:
        return failed(request, "too_many_pixels", "it needs more memory than there is; lower --max-pixels or --workers")
    whole = picture.size == (geometry.width, geometry.height)
    keep = keep_picture and whole and picture.width * picture.height <= KEEP_PIXELS
    return Prepared(request, geometry, pixels, picture if keep else None)


def failed(request: Request, code: str, message: str) -> Prepared:
    """An image with its error record."""
    return Prepared(request, error=error_record(request.name, code, message))
