"""Prepare one image for the model: read, hash, decode, orient, crop and resize it.

Any error of an image goes into its `Prepared` and is never raised. A file of ordinary size is read once, so that the
bytes hashed are the bytes decoded. Of a longer one, its decoder reads only what it needs: a file called .jpg may have
any length.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO, TypeAlias

import numpy as np
from PIL import Image

from opal_deploy.errors import ImageError
from opal_deploy.predict.types import InferenceOptions, Pixels, Prepared
from opal_deploy.preprocess.decode import FileSource, Source, decode, decode_for_input, open_file
from opal_deploy.preprocess.geometry import compute_geometry
from opal_deploy.preprocess.resize import to_display, to_input
from opal_deploy.remote import RemoteFile, parse_source
from opal_deploy.sources.image import InputImage
from opal_deploy.timing import NO_OP_TIMER, StageTimer

# a file up to the first size is read as a whole; a larger one is hashed, up to the second size, and read by its decoder
MAX_READ_BYTES, MAX_HASHED_BYTES = 64 << 20, 1 << 30
_CHUNK = 1 << 20
# requests over a network at a time
_REQUESTS = 8

# every source but pixels in memory
File: TypeAlias = str | Path | bytes | FileSource


def raise_pillow_limit(max_pixels: int) -> None:
    """Let Pillow decode images of up to `max_pixels` in this process."""
    # Pillow refuses twice its own limit before `max_pixels` is checked
    if Image.MAX_IMAGE_PIXELS is not None:
        Image.MAX_IMAGE_PIXELS = max(Image.MAX_IMAGE_PIXELS, max_pixels)


def prepare(
    request: InputImage,
    input_size: tuple[int, int],
    options: InferenceOptions,
    timer: StageTimer = NO_OP_TIMER,
    out: Pixels | None = None,
) -> Prepared:
    """Return the image as the model takes it, or with its error; raise no other exception that an image can cause.

    Args:
        request: the image.
        input_size: (H0, W0) of the model.
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
                image, geometry = decode_for_input(
                    source, input_size, max_pixels=options.max_pixels, decoding=options.decode
                )
            else:
                # a crop needs the pixels that scaled decoding would leave out
                image = decode(source, max_pixels=options.max_pixels)
                geometry = compute_geometry(image, request.crop)
        with timer.stage("resize"):
            pixels = to_input(image, geometry, input_size, options.decode)
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
    if options.keep_images or request.drawn:
        with timer.stage("resize"), contextlib.suppress(ImageError, MemoryError):
            if image.size != (geometry.width, geometry.height):
                # it was decoded at a fraction of its size, enough for the model but not for a person
                image = decode(source, max_pixels=options.max_pixels)
            kept = to_display(image)
    return Prepared(request, geometry, pixels if out is None else None, kept, image_sha256=digest)


def read_file(source: File) -> tuple[File, str | None]:
    """Return a file's bytes and sha256; of a large one the source and its sha256; raise ImageError.

    There is no digest of a file that is far longer than any image, or that changes while it is read.
    """
    if isinstance(source, bytes):
        return source, hashlib.sha256(source).hexdigest()
    try:
        with open_file(parse_source(source) if isinstance(source, str | os.PathLike) else source) as stream:
            size = stream.seek(0, os.SEEK_END)
            stream.seek(0)
            if size > MAX_READ_BYTES:
                return source, _hash(stream) if size <= MAX_HASHED_BYTES else None
            data = stream.read(size + 1)
    except ImageError:
        raise
    except Exception:  # an archive's reader may raise anything; decoding meets it too, and says what it means
        return source, None
    # the file is still being written, or its container states a wrong size
    return (data, hashlib.sha256(data).hexdigest()) if len(data) == size else (source, None)


def _hash(stream: BinaryIO) -> str:
    digest = hashlib.sha256()
    while chunk := stream.read(_CHUNK):
        digest.update(chunk)
    return digest.hexdigest()


def content_sha256(source: Source) -> str:
    """Return the hex sha256 of an image's file or member, or of an image in memory as PPM; raise ImageError."""
    if isinstance(source, bytes):
        return hashlib.sha256(source).hexdigest()
    if isinstance(source, str | Path | FileSource):
        with open_file(parse_source(source) if isinstance(source, str) else source) as stream:
            try:
                return _hash(stream)
            except OSError as error:
                raise ImageError("unreadable", f"cannot be read: {error.strerror or error}") from None
    buffer = io.BytesIO()
    (source if isinstance(source, Image.Image) else Image.fromarray(source)).convert("RGB").save(buffer, "PPM")
    return hashlib.sha256(buffer.getvalue()).hexdigest()


def read_remote(images: Sequence[InputImage]) -> list[InputImage]:
    """Return the images; those over a network, several at a time, with their bytes or the error of reading them."""
    if not any(map(_is_remote, images)):
        return list(images)
    with ThreadPoolExecutor(_REQUESTS) as threads:
        return list(threads.map(_read_if_remote, images))


def _is_remote(image: InputImage) -> bool:
    source = image.source
    return isinstance(source, RemoteFile) or isinstance(getattr(source, "path", None), RemoteFile)


def _read_if_remote(image: InputImage) -> InputImage:
    if not _is_remote(image) or image.error is not None:
        return image
    assert isinstance(image.source, FileSource)
    try:
        return replace(image, source=read_file(image.source)[0])
    except ImageError as error:
        return replace(image, error=error)
