"""Prepare one image for the model: read, hash, decode, orient, crop and resize it.

Any error of an image goes into its `Prepared` and is never raised. A file of ordinary size is read once, so that the
bytes hashed are the bytes decoded. Of a longer one, its decoder reads only what it needs: a file called .jpg may have
any length, and a header that claims too many pixels ends its decoding.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO, TypeAlias

import numpy as np
from PIL import Image

from opal_deploy.errors import ImageError
from opal_deploy.predict.types import InferenceOptions, Pixels, Prepared
from opal_deploy.preprocess.decode import FileSource, Source, decode, decode_for_input, no_claim, open_file
from opal_deploy.preprocess.geometry import compute_geometry
from opal_deploy.preprocess.resize import to_display, to_input
from opal_deploy.remote import RemoteFile, parse_source
from opal_deploy.sources.image import InputImage
from opal_deploy.timing import NO_OP_TIMER, StageTimer

# a file up to the first size is read as a whole; a larger one is hashed in a second pass, up to the second size
MAX_READ_BYTES, MAX_HASHED_BYTES = 64 << 20, 1 << 30
_CHUNK = 1 << 20
# larger images are decoded one at a time; a pixel takes four bytes, eight during conversion
LARGE_PIXELS = 25_000_000
# requests over a network at a time
_REQUESTS = 8

# every source but pixels in memory
File: TypeAlias = str | Path | bytes | FileSource


class LargeImage(ImageError):
    """The image has more than LARGE_PIXELS pixels, and was not decoded."""


def refuse_large(pixels: int) -> None:
    """Raise LargeImage for too many pixels; a `claim` of `prepare`."""
    if pixels > LARGE_PIXELS:
        raise LargeImage("too_many_pixels", f"{pixels:,} pixels are decoded later")


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
    claim: Callable[[int], None] = no_claim,
    out: Pixels | None = None,
) -> Prepared:
    """Return the image as the model takes it, or with its error; raise no other exception that an image can cause.

    Args:
        request: the image.
        input_size: (H0, W0) of the model.
        options: `max_pixels`, `decode` and `keep_images` are read.
        timer: receives the times of the stages `read`, `decode` and `resize`.
        claim: see `decode`; `refuse_large` makes this raise LargeImage.
        out: uint8 [H0, W0, 3] for the pixels, instead of `Prepared.pixels`.
    """
    source, unreadable = request.source, None
    digest = None if request.frame is None else request.frame.image_sha256
    if request.frame is None and not isinstance(source, Image.Image | np.ndarray):
        try:
            with timer.stage("read"):
                source, digest = read_small_file(source)
        except ImageError as error:
            unreadable = _without_frames(error)
    if request.error is not None or unreadable is not None:
        return Prepared(request, error=request.error or unreadable, image_sha256=digest)
    try:
        with timer.stage("decode"):
            if request.crop is None:
                image, geometry = decode_for_input(
                    source, input_size, max_pixels=options.max_pixels, decoding=options.decode, claim=claim
                )
            else:
                # a crop needs the pixels that scaled decoding would leave out
                image = decode(source, max_pixels=options.max_pixels, claim=claim)
                geometry = compute_geometry(image, request.crop)
        with timer.stage("resize"):
            pixels = to_input(image, geometry, input_size, options.decode)
            if out is not None:
                out[:] = pixels
    except LargeImage:
        raise
    except ImageError as error:
        return Prepared(request, error=_without_frames(error), image_sha256=digest)
    except MemoryError:
        reason = "it needs more memory than there is; lower --max-pixels or --workers"
        return Prepared(request, error=ImageError("too_many_pixels", reason), image_sha256=digest)
    if digest is None and not isinstance(source, Image.Image | np.ndarray | bytes):
        with timer.stage("read"):
            digest = _hash_large_file(source)
    kept = None
    if options.keep_images or request.drawn:
        with timer.stage("resize"), contextlib.suppress(ImageError, MemoryError):
            if image.size != (geometry.width, geometry.height):
                # it was decoded at a fraction of its size, enough for the model but not for a person
                image = decode(source, max_pixels=options.max_pixels, claim=claim)
            kept = to_display(image)
    return Prepared(request, geometry, pixels if out is None else None, kept, image_sha256=digest)


def _without_frames(error: ImageError) -> ImageError:
    # a traceback would keep the file's bytes in memory until the record is written
    error.__context__ = error.__cause__ = None
    return error.with_traceback(None)


def read_small_file(source: File) -> tuple[File, str | None]:
    """Return a file's bytes and sha256; the source and None if it is large or changes; raise ImageError."""
    if not isinstance(source, bytes):
        try:
            with _open_sized(source) as (stream, size):
                if size > MAX_READ_BYTES:
                    return source, None
                data = stream.read(size + 1)
        except ImageError:
            raise
        except Exception:  # an archive's reader may raise anything; decoding meets it too, and says what it means
            return source, None
        # the file is still being written, or its container states a wrong size
        if len(data) != size:
            return source, None
        source = data
    return source, hashlib.sha256(source).hexdigest()


def _hash_large_file(source: File) -> str | None:
    """Return the sha256 of an image file that was not read as a whole; None if it is far longer than any image."""
    assert not isinstance(source, bytes)
    digest, remaining = hashlib.sha256(), MAX_HASHED_BYTES
    try:
        with _open_sized(source) as (stream, size):
            if size > remaining:
                return None
            while chunk := stream.read(_CHUNK):
                digest.update(chunk)
                remaining -= len(chunk)
                if remaining < 0:
                    return None
    except Exception:  # an archive's reader may raise anything; the image was decoded, so its record stands
        return None
    return digest.hexdigest()


def content_sha256(source: Source) -> str:
    """Return the hex sha256 of an image's file or member, or of an image in memory as PPM; raise ImageError."""
    if isinstance(source, bytes):
        return hashlib.sha256(source).hexdigest()
    if isinstance(source, str | Path | FileSource):
        digest = hashlib.sha256()
        with open_file(parse_source(source) if isinstance(source, str) else source) as stream:
            try:
                while chunk := stream.read(_CHUNK):
                    digest.update(chunk)
            except OSError as error:
                raise ImageError("unreadable", f"cannot be read: {error.strerror or error}") from None
        return digest.hexdigest()
    buffer = io.BytesIO()
    (source if isinstance(source, Image.Image) else Image.fromarray(source)).convert("RGB").save(buffer, "PPM")
    return hashlib.sha256(buffer.getvalue()).hexdigest()


@contextmanager
def _open_sized(source: str | Path | FileSource) -> Iterator[tuple[BinaryIO, int]]:
    """Yield the stream and the number of bytes that its file system or container states."""
    with open_file(parse_source(source) if isinstance(source, str | os.PathLike) else source) as stream:
        size = stream.seek(0, os.SEEK_END)
        stream.seek(0)
        yield stream, size


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
        return replace(image, source=read_small_file(image.source)[0])
    except ImageError as error:
        return replace(image, error=error)
