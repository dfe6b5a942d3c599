"""From a file to the image that a viewer shows: RGB, 8 bits, EXIF orientation applied, first frame.

Any fault of a file ends in an ImageError with one of these codes:

    not_found          no such file
    unreadable         the file exists, but reading it was refused or failed
    storage_unavailable  a bucket did not answer, or reported overload
    not_a_file         a folder, a pipe, a device
    empty_file         zero bytes
    not_an_image       no decoder recognises it
    truncated_image    it starts well and ends early
    corrupt_image      a decoder failed inside it
    too_many_pixels    it claims more pixels than the limit
    unsupported_image  values without a defined meaning as 8-bit RGB (floats outside [0, 1]), no pixels, an unsupported
                       format, or one whose decoder runs another program on the file (EPS)
    bad_box            its box has no pixel of the image (see `geometry`)

Colour: CMYK, YCCK, Lab, grey and palette images are converted by Pillow; 16-bit grey is scaled to 8 bits (v / 257,
rounded), and so are grey floats in [0, 1] (v * 255); of 16-bit RGB Pillow keeps the upper 8; transparency is laid over
white, as viewers do; ICC profiles are not applied, here or in training.
"""

from __future__ import annotations

import io
import math
import os
import re
import stat
import struct
from collections.abc import Callable
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import Any, BinaryIO, Protocol, TypeAlias, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image, ImageFile, ImageOps, UnidentifiedImageError

from opal_deploy.errors import ImageError
from opal_deploy.preprocess.geometry import Geometry
from opal_deploy.remote import parse_source

# a truncated file is an error record, whatever another library has switched on in this process
ImageFile.LOAD_TRUNCATED_IMAGES = False

# larger images are refused before their pixels are decoded: 100 megapixels are 300 MB of RGB
MAX_PIXELS = 100_000_000
_16_BIT_MODES = ("I;16", "I;16L", "I;16B", "I;16N")
# round(v / 257) for every 16-bit v; 257 is odd, so there are no halves
_16_TO_8 = ((np.arange(1 << 16) + 128) // 257).astype(np.uint8)
# Pillow hands these to Ghostscript: no file from outside may start a program
_RUNS_A_PROGRAM = ("EPS",)
# an image of more pixels is converted in strips of so many
_LARGE_PIXELS = 4_000_000

_IS_CUT = re.compile(r"truncated|not enough|only got|unexpected e(nd|of)|reached eof|end of file", re.IGNORECASE)
_IS_UNSUPPORTED = re.compile(
    r"unsupported|unimplemented|not supported|not implemented|cannot handle"
    r"|unknown (pixel mode|data organization|compression|pixel format|tga|pcx|blp)",
    re.IGNORECASE,
)
# two bytes, or a few small numbers: other files begin like that too
_WEAK_SIGNATURES = ("DIB", "GBR", "PCX", "PPM", "XBM")
# a pattern of a file's beginning, its code, and a description
_OTHER_FORMATS = [
    (
        rb"\xff\x0a|\0\0\0\x0cJXL |v/1\x01|#\?(RADIANCE|RGBE)|PF\s+\d|.{128}DICM|%!PS|\xc5\xd0\xd3\xc6",
        "unsupported_image",
        "in a format that is not read, such as JPEG XL, HDR, DICOM or EPS; save it as PNG",
    ),
    (
        rb".{4}ftyp.{,60}(hei[cxms]|hev[cx])",
        "unsupported_image",
        "a HEIC image, which needs pi-heif: pip install 'opal-deploy[heif]', or save it as JPEG",
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


@runtime_checkable
class FileSource(Protocol):
    """An encoded image that is not a local file, such as an archive's member; picklable, so that a worker opens it."""

    def open(self) -> BinaryIO:
        """Open a seekable stream of the bytes; raise OSError or ImageError if the container cannot be read."""
        ...


class Decoding(StrEnum):
    """The path from a file to the model's input.

    `default`: the fastest within 1 count of Pillow's. `exact`: Pillow's pixels, bit for bit. `fast`: decodes JPEG at a
    fraction of its size if that is large enough for the model.
    """

    default = "default"
    exact = "exact"
    fast = "fast"


# whatever can be decoded; a str is a path or a URL
Source: TypeAlias = str | Path | bytes | FileSource | Image.Image | NDArray[np.uint8]


def open_file(source: str | Path | FileSource) -> BinaryIO:
    """Open a regular file, a URL or a FileSource, without reading it as a whole; raise ImageError."""
    try:
        if isinstance(source, str | os.PathLike):
            source = parse_source(source)
        if not isinstance(source, Path):
            return source.open()
        mode = source.stat().st_mode
        if not stat.S_ISREG(mode):
            # a named pipe would block forever
            raise ImageError("not_a_file", "it is a folder, a pipe or a device, not a file")
        return source.open("rb")
    except FileNotFoundError:
        raise ImageError("not_found", "no such file") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ImageError("unreadable", f"cannot be read: {reason}") from None


def decode(source: Source, *, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """Decode one image at its full size to a loaded PIL image of mode RGB.

    Args:
        source: a path, a file's bytes, a FileSource, a PIL image, or uint8 [H, W, 3] RGB or [H, W] grey.
        max_pixels: width times height above which the image is refused.

    Raises:
        ImageError: the image cannot be used; the module's docstring lists the codes.
    """
    return decode_scaled(source, None, max_pixels=max_pixels)[0]


def decode_scaled(
    source: Source, min_size: tuple[int, int] | None, *, max_pixels: int = MAX_PIXELS
) -> tuple[Image.Image, Geometry]:
    """Decode one image that will be resized as a whole; return it, and the geometry of its full size.

    A JPEG has a half, a quarter or an eighth of its size, if that is not smaller than `min_size` = (height, width).
    None: the full size. Other arguments and errors are those of `decode`.
    """
    if isinstance(source, np.ndarray):
        check_array(source)
        image = Image.fromarray(np.ascontiguousarray(source)).convert("RGB")
        return image, Geometry.whole(*image.size)
    if isinstance(source, Image.Image):
        return _load(source, max_pixels)
    with io.BytesIO(source) if isinstance(source, bytes) else open_file(source) as stream:
        try:
            size = stream.seek(0, os.SEEK_END)
            stream.seek(0)
        except OSError as error:
            raise ImageError("unreadable", f"cannot be read: {error.strerror or error}") from None
        if not size:
            raise ImageError("empty_file", "the file has zero bytes")
        return _load(stream, max_pixels, min_size)


def _load(
    source: BinaryIO | Image.Image, max_pixels: int, min_size: tuple[int, int] | None = None
) -> tuple[Image.Image, Geometry]:
    """Open, check, load and orient; turn any error of Pillow's into an ImageError."""
    stream = None if isinstance(source, Image.Image) else source
    image = None
    try:
        image = source if isinstance(source, Image.Image) else _open_image(source)
        _check_kind(image, max_pixels)
        size, is_turned = image.size, False
        if min_size is not None and image.format == "JPEG":
            is_turned = is_transposed(image)
            image.draft(None, min_size if is_turned else min_size[::-1])
        image.load()
        is_scaled = image.size != size
        rgb = _convert(_apply_orientation(image, ours=stream is not None))
        whole = (size[::-1] if is_turned else size) if is_scaled else rgb.size
        return rgb, Geometry.whole(*whole)
    except ImageError:
        raise
    except Exception as error:  # Pillow's decoders raise nearly anything for a damaged file; none of it is ours
        raise decode_error(error, stream, image, max_pixels) from None


def _open_image(stream: BinaryIO) -> Image.Image:
    try:
        return Image.open(stream)
    except UnidentifiedImageError:
        try:
            import pi_heif
        except ImportError:
            pi_heif = None
        if pi_heif is None or "HEIF" in Image.OPEN:
            raise
        pi_heif.register_heif_opener()
        return _open_image(stream)


def is_transposed(image: Image.Image) -> bool:
    """Return whether applying the EXIF orientation swaps width and height."""
    try:
        return image.getexif().get(ExifTags.Base.Orientation) in (5, 6, 7, 8)
    except Exception:  # damaged EXIF raises what its parser stumbles over
        return False


def _check_kind(image: Image.Image, max_pixels: int) -> None:
    """Refuse, before decoding, an image without pixels or with too many."""
    if image.format in _RUNS_A_PROGRAM:
        raise ImageError("unsupported_image", f"it is {image.format}, a program to be run, not pixels; save it as PNG")
    if isinstance(image, ImageFile.StubImageFile) or image.format == "MPEG":
        raise ImageError("unsupported_image", f"{image.format} files are not read; save the image as PNG")
    width, height = image.size
    if not width * height:
        raise ImageError("unsupported_image", f"{width}x{height} has no pixels")
    if width * height > max_pixels:
        size = f"{width}x{height} is {width * height:,} pixels"
        raise ImageError("too_many_pixels", f"{size}, over the limit of {max_pixels:,} (--max-pixels)")


def _apply_orientation(image: Image.Image, *, ours: bool) -> Image.Image:
    """Apply the EXIF orientation; ignore EXIF that cannot be parsed, as viewers do.

    An image that this module opened is turned in place: Pillow copies even if there is nothing to turn, and a copy of a
    large image is hundreds of megabytes. A caller's own image stays as it is.
    """
    try:
        if not ours:
            return ImageOps.exif_transpose(image)
        ImageOps.exif_transpose(image, in_place=True)
        return image
    except Exception:  # damaged EXIF raises what its parser stumbles over; the pixels are fine
        return image


def _convert(image: Image.Image) -> Image.Image:
    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    if image.mode == "F":
        return _from_floats(np.asarray(image))
    if image.mode in _16_BIT_MODES or image.mode == "I":
        return _convert_in_strips(image, _scale_16_bits)
    if image.has_transparency_data:
        return _convert_in_strips(image, _lay_over_white)
    return image.convert("RGB")


def _convert_in_strips(image: Image.Image, convert: Callable[[Image.Image], Image.Image]) -> Image.Image:
    """Convert a few rows at a time: the intermediate copies of a large image would be gigabytes."""
    rows = max(1, _LARGE_PIXELS // image.width)
    if image.height <= rows:
        return convert(image)
    rgb = Image.new("RGB", image.size)
    for top in range(0, image.height, rows):
        box = (0, top, image.width, min(top + rows, image.height))
        rgb.paste(convert(image.crop(box)), box)
    return rgb


def _scale_16_bits(image: Image.Image) -> Image.Image:
    values = np.asarray(image)
    if values.min() < 0 or values.max() > 65535:
        raise ImageError("unsupported_image", "its pixels are 32-bit integers beyond 16 bits; save it as 8-bit")
    grey = _16_TO_8[values]
    if isinstance(image.info.get("transparency"), int):
        grey[values == image.info["transparency"]] = 255
    return Image.fromarray(grey).convert("RGB")


def _lay_over_white(image: Image.Image) -> Image.Image:
    rgba = (image.convert("LA") if image.mode == "La" else image).convert("RGBA")
    white = Image.new("RGBA", rgba.size, (255, 255, 255, 255))
    return Image.alpha_composite(white, rgba).convert("RGB")


def _from_floats(values: NDArray[np.float32]) -> Image.Image:
    """Scale grey floats [H, W] in [0, 1] to 8 bits.

    A range stated by the file is not used: PFM files with a scale of 1 hold values up to 255, and the values of a TIFF
    that states 77 to 837 run from 106 to 285.
    """
    low, high = float(values.min()), float(values.max())
    if not (low >= 0 and high <= 1):
        values_range = f"from {low:g} to {high:g}" if math.isfinite(high - low) else "that include NaN or infinity"
        raise ImageError(
            "unsupported_image",
            f"its pixels are floats {values_range}; expected 0 to 1: scale them, or save it as 8-bit",
        )
    return Image.fromarray(np.rint(values * 255).astype(np.uint8)).convert("RGB")


def check_array(array: NDArray[Any]) -> None:
    """Raise ImageError unless an array has the type and shape of an image."""
    grey_or_rgb = array.ndim == 2 or (array.ndim == 3 and array.shape[2] == 3)
    if array.dtype != np.uint8 or not grey_or_rgb or 0 in array.shape:
        raise ImageError(
            "unsupported_image",
            f"an array of {array.dtype} {list(array.shape)}; expected uint8 [H, W, 3] RGB or [H, W]",
        )


def decode_error(error: Exception, stream: BinaryIO | None, image: Image.Image | None, max_pixels: int) -> ImageError:
    """Return the ImageError for an exception of Pillow's, which raises nearly anything for a damaged file.

    `stream` is the file, still open, None for a PIL image; `image` is what Pillow opened, None if it did not.
    """
    if isinstance(error, Image.DecompressionBombError):
        limits = f"{max_pixels:,} (--max-pixels) or Pillow's limit (PIL.Image.MAX_IMAGE_PIXELS)"
        return ImageError("too_many_pixels", f"it claims more pixels than {limits}")
    if isinstance(error, MemoryError):
        return ImageError("too_many_pixels", "it needs more memory than there is; lower --max-pixels")
    name = None if image is None else image.format
    # reading again may fail
    with suppress(Exception):
        if stream is not None and image is None:
            stream.seek(0)
            head = stream.read(2048)
            name, error = _ask_decoder(stream, head, error)
            for pattern, code, kind in _OTHER_FORMATS if name is None else ():
                if re.match(pattern, head.lstrip(b"\xef\xbb\xbf \t\r\n"), re.DOTALL | re.IGNORECASE):
                    return ImageError(code, f"it is {kind}")
    if isinstance(error, UnidentifiedImageError):
        return ImageError("not_an_image", "no decoder recognises it as an image")
    name = name or "image"
    # decoders look for what is behind the end of a file that was cut in its header
    if isinstance(error, EOFError | struct.error | IndexError) or _IS_CUT.search(str(error)):
        return ImageError("truncated_image", f"its {name} data ends early; copy or download the file again")
    if isinstance(error, NotImplementedError) or _IS_UNSUPPORTED.search(str(error)):
        return ImageError("unsupported_image", f"its kind of {name} is not read; save it anew as PNG")
    return ImageError("corrupt_image", f"its {name} data is damaged; copy or download the file again")


def _ask_decoder(stream: BinaryIO, head: bytes, error: Exception) -> tuple[str | None, Exception]:
    """Return the format with a file's signature, and why its decoder refused the file; None and `error` without."""
    for name, (factory, accept) in Image.OPEN.items():
        if accept is not None and name not in _WEAK_SIGNATURES and accept(head[:16]):
            stream.seek(0)
            try:
                factory(stream, "")
            except Exception as reason:
                return name, reason
            return name, error
    return None, error
