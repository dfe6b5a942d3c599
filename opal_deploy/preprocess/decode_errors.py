"""The code and the message for a file that could not be decoded, from Pillow's exception and the file's bytes.

Pillow raises nearly anything for a damaged file. A user needs to know whether to copy the file again, convert it, or
drop it.
"""

from __future__ import annotations

import contextlib
import re
import struct
from typing import Any, BinaryIO, cast

from PIL import Image, TiffImagePlugin, UnidentifiedImageError

from opal_deploy.errors import ImageError, install_command

_IS_CUT = re.compile(r"truncated|not enough|only got|unexpected e(nd|of)|reached eof|end of file", re.IGNORECASE)
_IS_UNSUPPORTED = re.compile(
    r"unsupported|unimplemented|not supported|not implemented|cannot handle"
    r"|unknown (pixel mode|data organization|compression|pixel format|tga|pcx|blp)",
    re.IGNORECASE,
)
# two bytes, or a few small numbers: other files begin like that too
_WEAK_SIGNATURES = ("DIB", "GBR", "PCX", "PPM", "XBM")
_HEIC_BRANDS = {b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx"}
# a pattern of a file's beginning, its code, and a description
_OTHER_FORMATS = [
    (
        rb"\xff\x0a|\0\0\0\x0cJXL |v/1\x01|#\?(RADIANCE|RGBE)|PF\s+\d|.{128}DICM|%!PS|\xc5\xd0\xd3\xc6",
        "unsupported_image",
        "in a format that is not read, such as JPEG XL, HDR, DICOM or EPS; save it as PNG",
    ),
    (rb"version https://git-lfs", "not_an_image", "a Git LFS pointer, not the image itself; run git lfs pull"),
    (rb"<!doctype html|<html", "not_an_image", "a web page, perhaps an error message; give the image itself"),
    (rb"%PDF-|<svg|<\?xml.{,999}<(svg|!DOCTYPE svg)", "not_an_image", "a PDF or SVG drawing; save it as PNG"),
    (
        rb".{4}ftyp(isom|iso\d|mp4|avc1|qt|M4V|3gp)|\x1aE\xdf\xa3|RIFF.{4}AVI ",
        "not_an_image",
        "a video; `infer --every 1s` takes frames of it",
    ),
]


def decode_error(error: Exception, stream: BinaryIO | None, image: Image.Image | None, max_pixels: int) -> ImageError:
    """Return the ImageError for an exception of Pillow's.

    `stream` is the file, still open, None for a PIL image; `image` is what Pillow opened, None if it did not.
    """
    if isinstance(error, Image.DecompressionBombError):
        limits = f"{max_pixels:,} (--max-pixels) or Pillow's limit (PIL.Image.MAX_IMAGE_PIXELS)"
        return ImageError("too_many_pixels", f"it claims more pixels than {limits}")
    if isinstance(error, MemoryError):
        return ImageError("too_many_pixels", "it needs more memory than there is; lower --max-pixels")
    # reading again may fail
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
    end = min(len(head), int.from_bytes(head[:4], "big"))
    # the minor version stands between the major brand and those that are compatible
    brands = {head[at : at + 4] for at in (8, *range(16, end, 4))}
    return head[4:8] == b"ftyp" and not _HEIC_BRANDS.isdisjoint(brands)


def _classify(error: Exception, name: str | None) -> ImageError:
    name = name or "image"
    if isinstance(error, EOFError) or _IS_CUT.search(str(error)):
        return _truncated(name)
    if isinstance(error, NotImplementedError) or _IS_UNSUPPORTED.search(str(error)):
        return ImageError("unsupported_image", f"its kind of {name} is not read; save it anew as PNG")
    return ImageError("corrupt_image", f"its {name} data is damaged")


def _truncated(name: str) -> ImageError:
    return ImageError("truncated_image", f"its {name} data ends early; copy or download the file again")


def _unopened(stream: BinaryIO, error: Exception) -> ImageError:
    """Return the error of a file that Pillow did not open: its kind, and why the matching decoder refused it."""
    unidentified = isinstance(error, UnidentifiedImageError)
    if is_heic(stream):
        if _ends_early(stream, None):
            return _truncated("HEIC")
        needed = f"it is a HEIC image, which needs pi-heif: {install_command('heif')}, or save it as JPEG"
        return ImageError("unsupported_image", needed) if unidentified else _classify(error, "HEIC")
    head = stream.read(2048)
    for pattern, code, kind in _OTHER_FORMATS:
        if re.match(pattern, head.lstrip(b"\xef\xbb\xbf \t\r\n"), re.DOTALL | re.IGNORECASE):
            return ImageError(code, f"it is {kind}")
    for name, (factory, accept) in Image.OPEN.items():
        if accept is not None and name not in _WEAK_SIGNATURES and accept(head[:16]):
            watched = _EndWatcher(stream)
            if unidentified:
                try:
                    factory(cast(BinaryIO, watched), "")
                except Exception as reason:
                    error = reason
            return _truncated(name) if watched.passed_end or _ends_early(stream, None) else _classify(error, name)
    unknown = ImageError("not_an_image", "no decoder recognises it as an image")
    return unknown if unidentified else _classify(error, None)


class _EndWatcher:
    """A binary stream that records whether a read went past its end."""

    def __init__(self, stream: BinaryIO) -> None:
        stream.seek(0)
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
    if head[4:8] in (b"ftyp", b"jP  "):
        return is_box_cut(stream, size)
    if not isinstance(image, TiffImagePlugin.TiffImageFile):
        return False
    watched = _EndWatcher(stream)
    with contextlib.suppress(Exception):
        TiffImagePlugin.TiffImageFile(cast(BinaryIO, watched))
    # strips, tiles
    tags = image.tag_v2
    pieces = [zip(tags.get(at, ()), tags.get(count, ()), strict=False) for at, count in ((273, 279), (324, 325))]
    return watched.passed_end or any(offset + length > size for ends in pieces for offset, length in ends)


def is_box_cut(stream: BinaryIO, size: int) -> bool:
    """Return whether an ISO base media file (AVIF, HEIC, JPEG 2000, MP4) ends inside one of its outermost boxes."""
    at = 0
    while at + 8 <= size:
        stream.seek(at)
        length, _ = struct.unpack(">I4s", stream.read(8))
        if length == 1:
            length = int.from_bytes(stream.read(8), "big")
        # 0: to the end of the file, however far that is
        if length < 8:
            return False
        at += length
    return at != size
