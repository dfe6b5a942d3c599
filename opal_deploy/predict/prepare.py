"""Prepare one image for the model: read, hash, decode, orient, crop and resize it. The forms of an image after that.

    InputImage   an image to classify: name, source, crop, label     `sources.image`
    Prepared     its size and its row of a batch, or its error       `prepare`
    Result       its record, with what drawing it needs              `executor`

Any error of an image goes into its `Prepared` and is never raised. A file of ordinary size is read once, so that the
bytes hashed are the bytes decoded. Of a longer one, its decoder reads only what it needs: a file called .jpg may have
any length. Light to import: decode processes load this module, and no runtime.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from opal_deploy.artifact.preprocessing import InputForm
from opal_deploy.errors import ImageError, UsageError
from opal_deploy.preprocess.decode import MAX_PIXELS, Decoding, FileSource, decode, decode_scaled, open_file
from opal_deploy.preprocess.geometry import Geometry, compute_geometry
from opal_deploy.preprocess.resize import fit_input, is_nearly_black, to_display
from opal_deploy.records.decision import NO_DECISION, Decision
from opal_deploy.remote import RemoteFile
from opal_deploy.sources.image import InputImage
from opal_deploy.timing import NO_OP_TIMER, StageTimer

if TYPE_CHECKING:
    from opal_deploy.artifact.outputs import Outputs
    from opal_deploy.records.names import SlotNames
    from opal_deploy.records.record import Record

Pixels: TypeAlias = NDArray[np.uint8]

# a file up to the first size is read as a whole; a larger one is hashed, up to the second size, and read by its decoder
MAX_READ_BYTES, MAX_HASHED_BYTES = 64 << 20, 1 << 30
# requests over a network at a time
_REQUESTS = 8

# every source but pixels in memory
File: TypeAlias = str | Path | bytes | FileSource


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
        nearly_black: see `is_nearly_black`.
    """

    input: InputImage
    geometry: Geometry | None = None
    pixels: Pixels | None = None
    image: Image.Image | None = None
    error: ImageError | None = None
    image_sha256: str | None = None
    nearly_black: bool = False


@dataclass(frozen=True)
class Result:
    """A classified image: its record, the decoded image, and with `keep_outputs` its row of the outputs, N = 1."""

    record: Record
    prepared: Prepared
    outputs: Outputs | None = None


def raise_pillow_limit(max_pixels: int) -> None:
    """Let Pillow decode images of up to `max_pixels` in this process."""
    # Pillow refuses twice its own limit before `max_pixels` is checked
    if Image.MAX_IMAGE_PIXELS is not None:
        Image.MAX_IMAGE_PIXELS = max(Image.MAX_IMAGE_PIXELS, max_pixels)


def prepare(
    request: InputImage,
    form: InputForm,
    options: InferenceOptions,
    timer: StageTimer = NO_OP_TIMER,
    out: Pixels | None = None,
) -> Prepared:
    """Return the image as the model takes it, or with its error; raise no other exception that an image can cause.

    Args:
        request, form: the image, and the form of the model's input.
        options: `max_pixels`, `decode` and `keep_images` are read.
        timer: receives the times of the stages `read`, `decode` and `resize`.
        out: uint8 [H0, W0, 3] for the pixels, instead of `Prepared.pixels`.
    """
    source = request.source
    digest = None if request.frame is None else request.frame.image_sha256
    try:
        if request.frame is None and not isinstance(source, Image.Image | np.ndarray):
            with timer.stage("read"):
                source, digest = read_file(source)
        if request.error is not None:
            return Prepared(request, error=request.error, image_sha256=digest)
        with timer.stage("decode"):
            if request.crop is None:
                least = form.size if not form.rule.short else (form.rule.short,) * 2
                min_size = least if options.decode is Decoding.fast else None
                image, geometry = decode_scaled(source, min_size, max_pixels=options.max_pixels)
            else:
                # a crop needs the pixels that scaled decoding would leave out
                image = decode(source, max_pixels=options.max_pixels)
                geometry = compute_geometry(image.size, request.crop)
        with timer.stage("resize"):
            whole = image.size == (geometry.width, geometry.height)
            pixels, geometry = fit_input(image, geometry, form, options.decode)
            if out is not None:
                out[:] = pixels
    except ImageError as error:
        # a traceback would keep the file's bytes in memory until the record is written
        error.__context__ = error.__cause__ = None
        return Prepared(request, error=request.error or error.with_traceback(None), image_sha256=digest)
    except MemoryError:
        reason = "it needs more memory than there is; lower --max-pixels or --workers"
        return Prepared(request, error=ImageError("too_many_pixels", reason), image_sha256=digest)
    kept = None
    if options.keep_images:
        with timer.stage("resize"), contextlib.suppress(ImageError, MemoryError):
            if not whole:
                # it was decoded at a fraction of its size, enough for the model but not for a person
                image = decode(source, max_pixels=options.max_pixels)
            kept = to_display(image)
    black = is_nearly_black(pixels)
    return Prepared(request, geometry, pixels if out is None else None, kept, image_sha256=digest, nearly_black=black)


def read_file(source: File) -> tuple[File, str | None]:
    """Return a file's bytes and sha256; of a large one the source and its sha256; raise ImageError.

    There is no digest of a file that is far longer than any image, or that changes while it is read.
    """
    if isinstance(source, bytes):
        return source, hashlib.sha256(source).hexdigest()
    try:
        with open_file(source) as stream:
            size = stream.seek(0, os.SEEK_END)
            stream.seek(0)
            if size > MAX_READ_BYTES:
                if size > MAX_HASHED_BYTES:
                    return source, None
                return source, hashlib.file_digest(cast(io.BufferedReader, stream), "sha256").hexdigest()
            data = stream.read(size + 1)
    except ImageError:
        raise
    except Exception:  # an archive's reader may raise anything; decoding meets it too, and says what it means
        return source, None
    # the file is still being written, or its container states a wrong size
    return (data, hashlib.sha256(data).hexdigest()) if len(data) == size else (source, None)


def read_remote(images: Sequence[InputImage]) -> list[InputImage]:
    """Return the images; those over a network, several at a time, with their bytes or the error of reading them."""
    if not any(map(_is_remote, images)):
        return list(images)

    def read(image: InputImage) -> InputImage:
        if not _is_remote(image) or image.error is not None:
            return image
        try:
            return replace(image, source=read_file(cast(FileSource, image.source))[0])
        except ImageError as error:
            return replace(image, error=error)

    with ThreadPoolExecutor(_REQUESTS) as threads:
        return list(threads.map(read, images))


def _is_remote(image: InputImage) -> bool:
    source = image.source
    return isinstance(source, RemoteFile) or isinstance(getattr(source, "path", None), RemoteFile)
