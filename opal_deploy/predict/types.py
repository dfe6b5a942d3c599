"""The forms that an image takes after `sources` has found it, in order, and the options that every step reads.

    InputImage   an image to classify: name, source, crop, label     `sources.image`
    Prepared     its size and its row of a batch, or its error       `prepare`
    Result       its record, with what drawing it needs              `prediction`

Light to import: decode processes load this module, and no runtime.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from opal_deploy.errors import ImageError, UsageError
from opal_deploy.preprocess.decode import MAX_PIXELS, Decoding
from opal_deploy.preprocess.geometry import Geometry
from opal_deploy.records.decision import NO_DECISION, Decision
from opal_deploy.sources.image import InputImage

if TYPE_CHECKING:
    from PIL import Image

    from opal_deploy.artifact.outputs import Outputs
    from opal_deploy.records.names import SlotNames
    from opal_deploy.records.record import Record

Pixels: TypeAlias = NDArray[np.uint8]


@dataclass(frozen=True)
class InferenceOptions:
    """The options of decoding, batching, prediction and records.

    Attributes:
        batch: images per forward pass.
        fixed_batch: fill every forward pass up to `batch` with blank images. Runtimes choose their kernels by batch
            size, and these may differ in the last bit: with one size a record does not depend on the number of images.
            An image's place in its batch may still change the last bit of a logit (1e-7): a resumed run keeps it, see
            `predict_batches`.
        one_at_a_time: begin an image only after the result of the one before it was taken, so that the image that
            ends the process is known.
        workers: images decoded in parallel, in threads or processes.
        max_pixels: width times height above which an image is refused.
        decode: the decode path.
        isolate: decode in processes, so that a decoder that crashes or hangs costs one image.
        decode_timeout: seconds per image to read, decode and resize it, with `isolate`; None: no limit.

        top: maximum number of classes in a record.
        decision: thresholds that give records their status, resolved.
        model_sha256: digest of the model's file, for the records.
        slot_names: names of slots, for the records.

        keep_pixels: give each result a copy of its pixels.
        keep_images: keep decoded images, reduced by `to_display`, until they are drawn.
        keep_outputs: keep each image's row of the outputs, for evidence sheets.
    """

    batch: int = 16
    fixed_batch: bool = False
    one_at_a_time: bool = False

    workers: int = 2
    max_pixels: int = MAX_PIXELS
    decode: Decoding = Decoding.default
    isolate: bool = False
    decode_timeout: float | None = 30.0

    top: int = 5
    decision: Decision = NO_DECISION
    model_sha256: str | None = None
    slot_names: SlotNames | None = None

    keep_pixels: bool = False
    keep_images: bool = False
    keep_outputs: bool = False

    def __post_init__(self) -> None:
        """Raise UsageError for numbers that no run can have."""
        for name in ("batch", "workers", "max_pixels", "top"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} {getattr(self, name)}: expected at least 1")


@dataclass(frozen=True)
class Prepared:
    """A decoded image, ready for a batch, or its error.

    Attributes:
        input: the image as it was given.
        geometry: size of the whole image and the crop in it; None if there is an error.
        pixels: uint8 [H0, W0, 3] RGB; None if there is an error, and if they are in a row of a batch.
        image: the whole oriented image, RGB, reduced by `to_display`; None without `keep_images`, or if memory was too
            short for it.
        error: why the image cannot be classified; None if it can.
        image_sha256: hex digest of the file's bytes; None without a file, or if it is unreadable or too large.
    """

    input: InputImage
    geometry: Geometry | None = None
    pixels: Pixels | None = None
    image: Image.Image | None = None
    error: ImageError | None = None
    image_sha256: str | None = None


@dataclass(frozen=True)
class Result:
    """A classified image: its record, the decoded image, and with `keep_outputs` its row of the outputs, N = 1."""

    record: Record
    prepared: Prepared
    outputs: Outputs | None = None
