"""The forms that one image takes on its way through inference, in order, and the options that every step reads.

    Request    an image to classify: name, source, box, label            built once, by `build_requests`
    Prepared   its pixels as the model takes them, or its ImageError     `decoding`
    Result     its record, with what drawing it needs                    `prediction`

Light to import: decode processes load it, and no runtime.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from opal_deploy.errors import ImageError
from opal_deploy.preprocess.decode import MAX_PIXELS, Decoding, Source
from opal_deploy.preprocess.geometry import Box, Geometry

if TYPE_CHECKING:
    from PIL import Image

    from opal_deploy.artifact.outputs import Outputs
    from opal_deploy.inference.sources.annotations import Boxes, Labels
    from opal_deploy.inference.sources.items import FrameInfo, Item
    from opal_deploy.records.names import SlotNames
    from opal_deploy.records.record import Record

Pixels: TypeAlias = NDArray[np.uint8]


@dataclass(frozen=True)
class InferenceOptions:
    """The options of decoding, batching, prediction and records.

    Attributes:
        batch: images a forward pass.
        fixed_batch: fill every forward pass up to `batch` with blank images. Runtimes choose their kernels by the
            batch's size, and those may differ in the last bit: with one size a record does not depend on how many
            others there are. An image's place in its batch may still change the last bit of a logit (1e-7), where a
            runtime computes several logits in one instruction: a resumed run keeps it, see `predict_batches`.
        workers: images that are decoded at a time, in threads or processes.
        max_pixels: width times height above which an image is refused.
        decode: the decode path.
        isolate: decode in processes, so that a decoder that crashes or hangs costs one image.
        decode_timeout: seconds that one image may take to be read, decoded and resized; None: no limit. Only with
            `isolate`: a thread cannot be stopped.

        top: classes listed in a record; all that the model lists if there are fewer.
        min_margin: predictions with a smaller margin have the status `abstained`; None: none has.
        model_sha256: digest of the model's file, for the records.
        slot_names: names of slots, for the records.

        keep_pixels: give each result a copy of its pixels.
        keep_images: keep decoded images, reduced by `to_display`, until they are drawn.
        keep_outputs: keep each image's row of the outputs, for evidence sheets.
    """

    batch: int = 16
    fixed_batch: bool = False

    workers: int = 2
    max_pixels: int = MAX_PIXELS
    decode: Decoding = Decoding.default
    isolate: bool = False
    decode_timeout: float | None = 30.0

    top: int = 5
    min_margin: float | None = None
    model_sha256: str | None = None
    slot_names: SlotNames | None = None

    keep_pixels: bool = False
    keep_images: bool = False
    keep_outputs: bool = False


@dataclass(frozen=True)
class Request:
    """An image to classify, with everything that is known of it beforehand.

    Attributes:
        name: as the record shows it; None for an image without a name.
        source: a path, bytes, a file in an archive, a PIL image, or uint8 [H, W, 3] RGB.
        box: (x0, y0, x1, y1) to crop to first, in pixels of the whole oriented image.
        label: its label, where it has one.
        error: the reason why it cannot be classified, where that is known already: a folder without images, an image
            without a box.
        index: its position among all that the inputs name, from 0; None where there are no such inputs.
        drawn: it will be drawn: keep its image and its row of the outputs, whatever the options say.
        frame: its place in a video; None where it is no frame of one.
    """

    name: str | None
    source: Source
    box: Box | None = None
    label: str | None = None
    error: ImageError | None = None
    index: int | None = None
    drawn: bool = False
    frame: FrameInfo | None = None


def build_requests(
    items: Iterable[Item], boxes: Boxes | None = None, labels: Labels | None = None
) -> Iterator[Request]:
    """Yield a request for each image, with its box and its label: the one place where these are looked up."""
    for item in items:
        box, error = None, item.problem
        if error is None and boxes is not None:
            try:
                box = boxes.find(item)
            except ImageError as no_box:
                error = no_box
        label = None if labels is None else labels.find(item.path.as_posix())
        yield Request(item.name, item.source, box, label, error, item.index, frame=item.frame)


@dataclass(frozen=True)
class Prepared:
    """A decoded image, ready for a batch, or the error that its decoding ended in.

    Attributes:
        request: the request that it answers.
        geometry: size of the whole image and the crop in it; None where there is an error.
        pixels: uint8 [H0, W0, 3] RGB; None where there is an error, and where they are in a row of a batch.
        image: the whole oriented image, RGB, reduced by `to_display`; None without `keep_images`, and where memory did
            not suffice for it.
        error: the reason why it cannot be classified; None where it can.
        image_sha256: hex digest of the file's bytes; None for an image without a file, and for a file that cannot be
            read or is too large.
    """

    request: Request
    geometry: Geometry | None = None
    pixels: Pixels | None = None
    image: Image.Image | None = None
    error: ImageError | None = None
    image_sha256: str | None = None


@dataclass(frozen=True)
class Result:
    """A classified image: its record, with what drawings of it need.

    Attributes:
        record: the record as it is written; drawing adds the names of the files drawn.
        prepared: the decoded image.
        outputs: its own row of the forward pass, N = 1; None without `keep_outputs`, and where there is an error.
    """

    record: Record
    prepared: Prepared
    outputs: Outputs | None = None
