"""One image on its way to the model: read, decode, orient, crop, resize. What can go wrong becomes its error.

Files whose reading is timed apart from their decoding.

A decoder reads as it goes, and what it never asks for is never read: a file of any length may be called .jpg, and a
header that claims too many pixels ends the matter. So reading is timed where it happens, in each call that asks the
system for bytes, and every picture is read exactly as without a clock. (libtiff reads compressed TIFF through the
file's descriptor by itself; that part counts as decoding.)"""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from opal_deploy.errors import ImageError
from opal_deploy.inference.timing import NO_OP_TIMER, NoOpTimer, StageTimer
from opal_deploy.preprocess.decode import (
    Decoding,
    FileSource,
    PathOrSource,
    Source,
    decode,
    decode_for_input,
    open_file,
)
from opal_deploy.preprocess.geometry import Box, Geometry, compute_geometry
from opal_deploy.preprocess.resize import to_input
from opal_deploy.records.record import Record, error_record

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer


Pixels = NDArray[np.uint8]

# pictures up to this size are kept until their overlay is drawn; larger ones are decoded again, to bound memory
KEEP_PIXELS = 2_000_000

# files up to the first size are read once, as a whole, so that what was hashed is what was decoded; of a larger one a
# decoder reads what it needs, and if it is a picture its bytes are hashed in a second pass, up to the second size
READ_WHOLE_BYTES, HASHED_BYTES = 64 << 20, 1 << 30
_CHUNK = 1 << 20
# what has bytes: a source that is not pixels already
File: TypeAlias = str | Path | bytes | FileSource


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
        file_sha256: of the file's bytes, in hex; None without a file, of one that cannot be read, or is too large.
    """

    request: Request
    geometry: Geometry | None = None
    pixels: Pixels | None = None
    picture: Image.Image | None = None
    error: Record | None = None
    file_sha256: str | None = None


def prepare(
    request: Request,
    input_size: tuple[int, int],
    max_pixels: int,
    *,
    keep_picture: bool,
    clock: StageTimer = NO_OP_TIMER,
    decoding: Decoding = Decoding.default,
) -> Prepared:
    """Everything between a file and a batch; never raises for what an image can cause."""
    reading = timed_open(clock)
    source, digest = request.source, None
    if not isinstance(source, Image.Image | np.ndarray):
        with clock.stage("read"):
            source, digest = read_whole(source, reading)
    try:
        if isinstance(request.box, ImageError):
            raise request.box
        with clock.stage("decode"):
            if request.box is None:
                picture, geometry = decode_for_input(
                    source, input_size, max_pixels=max_pixels, open_file=reading, decoding=decoding
                )
            else:
                # a crop needs the pixels that scaled decoding would leave out
                picture = decode(source, max_pixels=max_pixels, open_file=reading, decoding=decoding)
                geometry = compute_geometry(picture, request.box)
        with clock.stage("resize"):
            pixels = to_input(picture, geometry, input_size, decoding)
    except ImageError as error:
        return failed(request, error.code, str(error), digest)
    except MemoryError:
        why = "it needs more memory than there is; lower --max-pixels or --workers"
        return failed(request, "too_many_pixels", why, digest)
    if digest is None and not isinstance(source, Image.Image | np.ndarray | bytes):
        with clock.stage("read"):
            digest = _hash_of_large(source, reading)
    whole = picture.size == (geometry.width, geometry.height)
    keep = keep_picture and whole and picture.width * picture.height <= KEEP_PIXELS
    return Prepared(request, geometry, pixels, picture if keep else None, file_sha256=digest)


def failed(request: Request, code: str, message: str, file_sha256: str | None = None) -> Prepared:
    """An image with its error record."""
    return Prepared(request, error=error_record(request.name, code, message), file_sha256=file_sha256)


def read_whole(source: File, reading: Callable[[PathOrSource], BinaryIO] = open_file) -> tuple[File, str | None]:
    """A file's bytes and their sha256; the source as it was and None where there are too many.

    Whatever keeps them from being read is left to the decoder, which meets it again and has words for it.
    """
    if not isinstance(source, bytes):
        try:
            with _opened(source, reading) as (stream, size):
                if size > READ_WHOLE_BYTES:
                    return source, None
                data = stream.read(size + 1)
        except Exception:  # an archive's reader may raise anything
            return source, None
        # somebody is still writing it, or its container is wrong about it
        if len(data) != size:
            return source, None
        source = data
    return source, hashlib.sha256(source).hexdigest()


def _hash_of_large(source: File, reading: Callable[[PathOrSource], BinaryIO]) -> str | None:
    """The sha256 of a picture's file that was not read as a whole; None for what is far longer than a picture."""
    assert not isinstance(source, bytes)
    digest, left = hashlib.sha256(), HASHED_BYTES
    try:
        with _opened(source, reading) as (stream, size):
            if size > left:
                return None
            while chunk := stream.read(_CHUNK):
                digest.update(chunk)
                left -= len(chunk)
                if left < 0:
                    return None
    except Exception:  # as above: it was decoded, so its record stands
        return None
    return digest.hexdigest()


def content_sha256(source: Source) -> str:
    """Digest of a picture's file, or of what an archive holds; of pixels for a picture in memory.

    Raises:
        ImageError: it cannot be read.
    """
    if isinstance(source, bytes):
        return hashlib.sha256(source).hexdigest()
    if isinstance(source, str | Path | FileSource):
        digest = hashlib.sha256()
        with open_file(Path(source) if isinstance(source, str) else source) as stream:
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
def _opened(
    source: str | Path | FileSource, reading: Callable[[PathOrSource], BinaryIO]
) -> Iterator[tuple[BinaryIO, int]]:
    """The stream, and how many bytes it is said to have."""
    if isinstance(source, str | os.PathLike):
        with reading(Path(source)) as stream:
            yield stream, os.fstat(stream.fileno()).st_size
    else:
        with reading(source) as stream:
            yield stream, source.size


# Pillow asks for 64 KiB at a time
_BLOCK = 1 << 16


def timed_open(clock: StageTimer) -> Callable[[PathOrSource], BinaryIO]:
    """`open_file` whose time, and that of every read of what it returns, counts as the clock's stage `read`."""
    if isinstance(clock, NoOpTimer):
        return open_file

    def opened(place: PathOrSource) -> BinaryIO:
        with clock.stage("read"):
            stream = open_file(place)
            if not isinstance(place, Path):
                return cast(BinaryIO, io.BufferedReader(_TimedStream(stream, clock), _BLOCK))
            # a second descriptor of the same open file, which outlives the first
            with stream:
                file = _TimedFile(os.dup(stream.fileno()), clock)
        return cast(BinaryIO, io.BufferedReader(file, _BLOCK))

    return opened


class _TimedFile(io.FileIO):
    def __init__(self, descriptor: int, clock: StageTimer) -> None:
        super().__init__(descriptor, "rb")
        self._clock = clock

    def readinto(self, buffer: WriteableBuffer, /) -> int | None:
        with self._clock.stage("read"):
            return super().readinto(buffer)

    def readall(self) -> bytes:
        with self._clock.stage("read"):
            return super().readall()


class _TimedStream(io.RawIOBase):
    """What an Openable opened, which may have no descriptor."""

    def __init__(self, stream: BinaryIO, clock: StageTimer) -> None:
        self._stream, self._clock = stream, clock

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        target = memoryview(buffer).cast("B")
        with self._clock.stage("read"):
            found = self._stream.read(len(target))
        target[: len(found)] = found
        return len(found)

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        with self._clock.stage("read"):
            return self._stream.seek(offset, whence)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def close(self) -> None:
        self._stream.close()
        super().close()
