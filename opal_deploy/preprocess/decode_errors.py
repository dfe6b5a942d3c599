"""The code and the message for a file that could not be decoded, from Pillow's exception and the file's bytes.

Pillow raises nearly anything for a damaged file: `OSError: decoder error -2`, `ValueError: not enough image data`, and
one UnidentifiedImageError for a text file, half a TIFF and a TIFF of a rare kind. A user needs to know which it is:
copy the file again, convert it, or drop it.
"""

from __future__ import annotations

import contextlib
import re
import struct
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, cast

from PIL import Image, TiffImagePlugin, UnidentifiedImageError

from opal_deploy.errors import ImageError, install_command

_IS_CUT = re.compile(r"truncated|not enough|only got|unexpected e(nd|of)|reached eof|end of file", re.IGNORECASE)
_IS_UNSUPPORTED = re.compile(
    r"unsupported|unimplemented|not supported|not implemented|cannot handle"
    r"|unknown (pixel mode|data organization|compression|pixel format|tga|pcx|blp)",
    re.IGNORECASE,
)
# Pillow's words for "it failed", which add nothing to "is damaged"
_SAYS_NOTHING = re.compile(
    r"decoder error|broken data stream|cannot (load|parse) this image|not an? \S+ file|not identified|negative seek"
)
# their texts are about Python objects, not about the file
_TEXTS_OF_PYTHON = (struct.error, LookupError, TypeError, AttributeError, ArithmeticError, AssertionError, UnicodeError)
# two bytes, or a few small numbers: other files begin like that too
_WEAK_SIGNATURES = ("DIB", "GBR", "PCX", "PPM", "XBM")

_HEIC_BRANDS = {b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx"}
# a pattern of a file's beginning, its code, and what such a file is
_OTHER_FORMATS = [
    (rb"\xff\x0a|\0\0\0\x0cJXL ", "unsupported_image", "a JPEG XL image, which is not read; save it as PNG"),
    (rb"v/1\x01", "unsupported_image", "an OpenEXR image, whose range is open; save it as 8-bit"),
    (rb"#\?(RADIANCE|RGBE)", "unsupported_image", "a Radiance HDR image, whose range is open; save it as 8-bit"),
    (rb"PF\s+\d", "unsupported_image", "a colour PFM image, whose range is open; save it as 8-bit"),
    (rb".{128}DICM", "unsupported_image", "a DICOM file; save its image as PNG"),
    (rb"%!PS|\xc5\xd0\xd3\xc6", "unsupported_image", "EPS, a program to be run, not pixels; save it as PNG"),
    (rb"%PDF-", "not_an_image", "a PDF document; save its page as PNG"),
    (rb"<svg|<\?xml.{,999}<(svg|!DOCTYPE svg)", "not_an_image", "an SVG drawing, not pixels; save it as PNG"),
    (rb"<!doctype html|<html", "not_an_image", "a web page, perhaps an error message; give the image itself"),
    (rb"version https://git-lfs", "not_an_image", "a Git LFS pointer, not the image itself; run git lfs pull"),
    (rb"PK\x03\x04", "not_an_image", "a zip archive by its content; give it the suffix .zip"),
    (rb"\x1f\x8b\x08|BZh\d|\xfd7zXZ\0", "not_an_image", "a compressed file; decompress it and give the result"),
    (
        rb".{4}ftyp(isom|iso\d|mp4|avc1|qt|M4V|3gp)|\x1aE\xdf\xa3|RIFF.{4}AVI ",
        "not_an_image",
        "a video; `infer --every 1s` takes frames of it",
    ),
]


def decode_error(error: Exception, stream: BinaryIO | None, image: Image.Image | None, max_pixels: int) -> ImageError:
    """Return the ImageError for an exception of Pillow's.

    Args:
        error: the exception.
        stream: the file, still open; None if the source was a PIL image.
        image: the file as Pillow opened it; None if that failed.
        max_pixels: the limit that the caller set.
    """
    if isinstance(error, Image.DecompressionBombError):
        return _too_many_pixels(error, max_pixels)
    if isinstance(error, MemoryError):
        return ImageError("too_many_pixels", "it needs more memory than there is; lower --max-pixels")
    # a source that cannot be read again gives no further explanation
    with contextlib.suppress(Exception):
        if stream is not None and image is None:
            return _unopened(stream, error)
        if stream is not None and image is not None and _ends_early(stream, image):
            return _truncated(image.format or "image")
    return _classify(error, image.format if image is not None else None)


def is_heic(stream: BinaryIO) -> bool:
    """Return whether a file is a HEIC image, by the brands that it declares; rewind the stream."""
    stream.seek(0)
    head = stream.read(256)
    stream.seek(0)
    if head[4:8] != b"ftyp":
        return False
    end = min(len(head), int.from_bytes(head[:4], "big"))
    # the minor version stands between the major brand and those that are compatible
    return not _HEIC_BRANDS.isdisjoint(head[at : at + 4] for at in (8, *range(16, end, 4)))


def _classify(error: Exception, name: str | None) -> ImageError:
    # Pillow re-raises some as a SyntaxError
    cause = error.__cause__ if str(error.__cause__) == str(error) else error
    of_python = isinstance(cause, _TEXTS_OF_PYTHON)
    text = "" if of_python else str(error).removesuffix(" when reading image file").strip(" .")
    if isinstance(error, EOFError) or _IS_CUT.search(text):
        return _truncated(name or "image")
    text = text.replace("PngImagePlugin.MAX_TEXT_CHUNK", "a text chunk")
    reason = "" if not text or _SAYS_NOTHING.search(text) else f": {text[:200]}"
    if isinstance(error, NotImplementedError) or _IS_UNSUPPORTED.search(text):
        return ImageError(
            "unsupported_image", f"its kind of {name or 'image'} is not read{reason}; save it anew as PNG"
        )
    return ImageError("corrupt_image", f"its {name or 'image'} data is damaged{reason}")


def _truncated(name: str) -> ImageError:
    return ImageError("truncated_image", f"its {name} data ends early; copy or download the file again")


def _too_many_pixels(error: Exception, max_pixels: int) -> ImageError:
    found = re.search(r"\d+", str(error))
    pixels = int(found[0]) if found else None
    claim = f"{pixels:,}" if pixels is not None else "too many"
    if pixels is not None and pixels <= max_pixels and Image.MAX_IMAGE_PIXELS is not None:
        limit = f"Pillow's limit of {2 * Image.MAX_IMAGE_PIXELS:,}; raise PIL.Image.MAX_IMAGE_PIXELS"
    else:
        limit = f"the limit of {max_pixels:,} (--max-pixels)"
    return ImageError("too_many_pixels", f"it claims {claim} pixels, over {limit}")


def _unopened(stream: BinaryIO, error: Exception) -> ImageError:
    """Return the error of a file that Pillow did not open: its kind, and why the matching decoder refused it."""
    unidentified = isinstance(error, UnidentifiedImageError)
    if is_heic(stream):
        if _ends_early(stream, None):
            return _truncated("HEIC")
        if not unidentified:
            return _classify(error, "HEIC")
        needed = f"pi-heif: {install_command('heif')}, or save it as JPEG"
        return ImageError("unsupported_image", f"it is a HEIC image, which needs {needed}")
    stream.seek(0)
    head = stream.read(2048).lstrip(b"\xef\xbb\xbf \t\r\n")
    for pattern, code, kind in _OTHER_FORMATS:
        if re.match(pattern, head, re.DOTALL | re.IGNORECASE):
            return ImageError(code, f"it is {kind}")
    for name, factory, accepted in _signed(stream):
        if isinstance(accepted, str):
            # this Pillow was built without the decoder
            return ImageError("unsupported_image", f"this Pillow cannot read {name}: pip install -U pillow")
        stream.seek(0)
        watched = _EndWatcher(stream)
        if unidentified:
            try:
                factory(cast(BinaryIO, watched), "")
            except Exception as reason:
                error = reason
        return _truncated(name) if watched.passed_end or _ends_early(stream, None) else _classify(error, name)
    if not unidentified:
        return _classify(error, None)
    return ImageError("not_an_image", "no decoder recognises it as an image")


def _signed(stream: BinaryIO) -> Iterator[tuple[str, Callable[..., Image.Image], bool | str]]:
    """Yield name, class and verdict of Pillow's decoders that know the file's signature."""
    stream.seek(0)
    head = stream.read(16)
    for name, (factory, accept) in Image.OPEN.items():
        if accept is not None and name not in _WEAK_SIGNATURES and (accepted := accept(head)):
            yield name, factory, accepted


class _EndWatcher:
    """A binary stream that records whether a read went past its end."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream, self.passed_end = stream, False

    def read(self, size: int = -1) -> bytes:
        data = self._stream.read(size)
        self.passed_end |= len(data) < size
        return data

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _ends_early(stream: BinaryIO, image: Image.Image | None) -> bool:
    """Return whether a file is shorter than its own structure says; some decoders report that as damage."""
    size = stream.seek(0, 2)
    stream.seek(0)
    head = stream.read(12)
    if head.startswith(b"RIFF"):
        return 8 + int.from_bytes(head[4:8], "little") > size
    if head.startswith(b"\xff\x4f\xff\x51"):
        return not _has_jpeg2000_end(stream)
    if head[4:8] in (b"ftyp", b"jP  "):
        return is_box_cut(stream, size)
    if isinstance(image, TiffImagePlugin.TiffImageFile):
        # its directory and the values there
        watched = _EndWatcher(stream)
        stream.seek(0)
        with contextlib.suppress(Exception):
            TiffImagePlugin.TiffImageFile(cast(BinaryIO, watched))
        if watched.passed_end:
            return True
        # strips, tiles
        for offsets, counts in ((273, 279), (324, 325)):
            pieces = zip(image.tag_v2.get(offsets, ()), image.tag_v2.get(counts, ()), strict=False)
            if any(offset + count > size for offset, count in pieces):
                return True
    return False


def is_box_cut(stream: BinaryIO, size: int) -> bool:
    """Return whether an ISO base media file (AVIF, HEIC, JPEG 2000) ends inside one of its outermost boxes."""
    at = 0
    while at + 8 <= size:
        stream.seek(at)
        length, kind = struct.unpack(">I4s", stream.read(8))
        if length == 1:
            length = int.from_bytes(stream.read(8), "big")
        if length == 0:
            # to the end of the file, however far that is
            return kind == b"jp2c" and not _has_jpeg2000_end(stream)
        if length < 8:
            return False
        at += length
    return at != size


def _has_jpeg2000_end(stream: BinaryIO) -> bool:
    stream.seek(-2, 2)
    return stream.read(2) == b"\xff\xd9"
