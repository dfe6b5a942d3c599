"""Prepare one image for the model: read, hash, decode, orient, crop and resize it.

Any error of an image goes into its `Prepared` and is never raised.

A decoder reads as it goes, and only what it needs: a file called .jpg may have any length, and a header that claims too
many pixels ends its decoding. Reading is therefore timed inside each call that asks the system for bytes. (libtiff
reads compressed TIFF through the file's descriptor itself; that part counts as decoding.)

Images over a network are read ahead of their decoding.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, TypeAlias, cast

import numpy as np
from PIL import Image

from opal_deploy.errors import ImageError
from opal_deploy.predict.types import InferenceOptions, Pixels, Prepared
from opal_deploy.preprocess.decode import (
    FileSource,
    PathOrSource,
    Source,
    decode,
    decode_for_input,
    no_claim,
    open_file,
)
from opal_deploy.preprocess.geometry import compute_geometry
from opal_deploy.preprocess.resize import to_display, to_input
from opal_deploy.sources.image import InputImage
from opal_deploy.storage.files import RemoteFile, parse_source
from opal_deploy.timing import NO_OP_TIMER, StageTimer

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer


# a file up to the first size is read once, as a whole, so that the bytes hashed are the bytes decoded; a larger one is
# read by its decoder and hashed in a second pass, up to the second size
MAX_READ_BYTES, MAX_HASHED_BYTES = 64 << 20, 1 << 30
_CHUNK = 1 << 20
# Pillow asks for 64 KiB at a time
_BUFFER_BYTES = 1 << 16

# every source but pixels in memory
File: TypeAlias = str | Path | bytes | FileSource
OpenFile: TypeAlias = Callable[[PathOrSource], BinaryIO]


def prepare(
    request: InputImage,
    input_size: tuple[int, int],
    options: InferenceOptions,
    timer: StageTimer = NO_OP_TIMER,
    claim: Callable[[int], None] = no_claim,
    out: Pixels | None = None,
) -> Prepared:
    """Return the image as the model takes it, or with its error; raise nothing that an image can cause.

    Args:
        request: the image.
        input_size: (H0, W0) of the model.
        options: `max_pixels`, `decode` and `keep_images` are read.
        timer: receives the times of the stages `read`, `decode` and `resize`.
        claim: see `decode`.
        out: uint8 [H0, W0, 3] for the pixels, instead of `Prepared.pixels`.
    """
    open_timed = timed_open(timer)
    source, unreadable = request.source, None
    digest = None if request.frame is None else request.frame.image_sha256
    if request.frame is None and not isinstance(source, Image.Image | np.ndarray):
        try:
            with timer.stage("read"):
                source, digest = read_small_file(source, open_timed)
        except ImageError as error:
            unreadable = _without_frames(error)
    if request.error is not None or unreadable is not None:
        return Prepared(request, error=request.error or unreadable, image_sha256=digest)
    try:
        with timer.stage("decode"):
            if request.crop is None:
                image, geometry = decode_for_input(
                    source, input_size, max_pixels=options.max_pixels, open_file=open_timed, decoding=options.decode,
                    claim=claim,
                )  # fmt: skip
            else:
                # a crop needs the pixels that scaled decoding would leave out
                image = decode(
                    source, max_pixels=options.max_pixels, open_file=open_timed, decoding=options.decode, claim=claim
                )
                geometry = compute_geometry(image, request.crop)
        with timer.stage("resize"):
            pixels = to_input(image, geometry, input_size, options.decode)
            if out is not None:
                out[:] = pixels
    except ImageError as error:
        return Prepared(request, error=_without_frames(error), image_sha256=digest)
    except MemoryError:
        reason = "it needs more memory than there is; lower --max-pixels or --workers"
        return Prepared(request, error=ImageError("too_many_pixels", reason), image_sha256=digest)
    if digest is None and not isinstance(source, Image.Image | np.ndarray | bytes):
        with timer.stage("read"):
            digest = _hash_large_file(source, open_timed)
    kept = None
    if options.keep_images or request.drawn:
        with timer.stage("resize"), contextlib.suppress(ImageError, MemoryError):
            if image.size != (geometry.width, geometry.height):
                # it was decoded at a fraction of its size, enough for the model but not for a person
                image = decode(source, max_pixels=options.max_pixels, open_file=open_timed, claim=claim)
            kept = to_display(image)
    return Prepared(request, geometry, pixels if out is None else None, kept, image_sha256=digest)


def _without_frames(error: ImageError) -> ImageError:
    # a traceback would keep the file's bytes in memory until the record is written
    error.__context__ = error.__cause__ = None
    return error.with_traceback(None)


def read_small_file(source: File, open_file: OpenFile = open_file) -> tuple[File, str | None]:
    """Return a file's bytes and sha256; the source and None if it is large or changes; raise ImageError."""
    if not isinstance(source, bytes):
        try:
            with _open_sized(source, open_file) as (stream, size):
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


def _hash_large_file(source: File, open_file: OpenFile) -> str | None:
    """Return the sha256 of an image file that was not read as a whole; None if it is far longer than any image."""
    assert not isinstance(source, bytes)
    digest, remaining = hashlib.sha256(), MAX_HASHED_BYTES
    try:
        with _open_sized(source, open_file) as (stream, size):
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
def _open_sized(source: str | Path | FileSource, open_file: OpenFile) -> Iterator[tuple[BinaryIO, int]]:
    """Yield the stream and the number of bytes that its file system or container states."""
    with open_file(parse_source(source) if isinstance(source, str | os.PathLike) else source) as stream:
        size = stream.seek(0, os.SEEK_END)
        stream.seek(0)
        yield stream, size


def timed_open(timer: StageTimer) -> OpenFile:
    """Return an `open_file` whose time, with every read of its stream, counts as the stage `read`."""
    if not timer.enabled:
        return open_file

    def open_timed(source: PathOrSource) -> BinaryIO:
        with timer.stage("read"):
            stream = open_file(source)
            if not isinstance(source, Path):
                return cast(BinaryIO, io.BufferedReader(_TimedStream(stream, timer), _BUFFER_BYTES))
            # a second descriptor of the same open file, which outlives the first
            with stream:
                file = _TimedFile(os.dup(stream.fileno()), timer)
        return cast(BinaryIO, io.BufferedReader(file, _BUFFER_BYTES))

    return open_timed


class _TimedFile(io.FileIO):
    """A file by its descriptor, which libtiff needs."""

    def __init__(self, descriptor: int, timer: StageTimer) -> None:
        super().__init__(descriptor, "rb")
        self._timer = timer

    def readinto(self, buffer: WriteableBuffer, /) -> int | None:
        with self._timer.stage("read"):
            return super().readinto(buffer)

    def readall(self) -> bytes:
        with self._timer.stage("read"):
            return super().readall()


class _TimedStream(io.RawIOBase):
    """The stream of a FileSource, which may have no descriptor."""

    def __init__(self, stream: BinaryIO, timer: StageTimer) -> None:
        self._stream, self._timer = stream, timer

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        target = memoryview(buffer).cast("B")
        with self._timer.stage("read"):
            data = self._stream.read(len(target))
        target[: len(data)] = data
        return len(data)

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        with self._timer.stage("read"):
            return self._stream.seek(offset, whence)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def close(self) -> None:
        self._stream.close()
        super().close()


# per worker: requests in flight, and bytes of images that are not decoded yet
_REQUESTS = 8
_MAX_BYTES = 64 << 20
# assumed size of an image that was not listed
_ASSUMED_BYTES = 4 << 20


def is_remote(source: Source) -> bool:
    """Return whether an image is read over a network."""
    return isinstance(source, RemoteFile) or isinstance(getattr(source, "path", None), RemoteFile)


class ReadAhead:
    """Reads images over a network ahead of their decoding, in its own threads; used by one thread."""

    def __init__(self) -> None:
        """Start no thread yet."""
        self._threads = ThreadPoolExecutor(_REQUESTS, "read-ahead")

    def read(self, sources: Sequence[Source]) -> Iterator[Source]:
        """Yield the sources; the next remote ones, up to 64 MiB or one larger image, are read meanwhile."""
        futures: dict[int, Future[BinaryIO]] = {}
        sizes = [_size(source) if is_remote(source) else 0 for source in sources]
        begun = held = 0
        for index, source in enumerate(sources):
            while begun < len(sources) and (
                begun <= index or (len(futures) < _REQUESTS and held + sizes[begun] <= _MAX_BYTES)
            ):
                upcoming = sources[begun]
                if isinstance(upcoming, FileSource) and sizes[begun]:
                    futures[begun] = self._threads.submit(upcoming.open)
                    held += sizes[begun]
                begun += 1
            future = futures.pop(index, None)
            held -= sizes[index]
            yield source if future is None or not isinstance(source, FileSource) else _ReadFile(source, future)


class _ReadFile:
    """An image that is being read; opened a second time, it is read again."""

    def __init__(self, source: FileSource, future: Future[BinaryIO]) -> None:
        self._source = source
        self._future: Future[BinaryIO] | None = future

    def open(self) -> BinaryIO:
        future, self._future = self._future, None
        return self._source.open() if future is None else future.result()


def _size(source: Source) -> int:
    size = getattr(source, "size", None)
    if isinstance(source, RemoteFile):
        size = None if source.fingerprint is None else source.fingerprint.size
    return max(1, size) if isinstance(size, int) else _ASSUMED_BYTES
