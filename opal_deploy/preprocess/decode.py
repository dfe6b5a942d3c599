"""From a file to the image that a viewer shows: RGB, 8 bits, EXIF orientation applied, first frame.

Any fault of a file ends in an ImageError with one of these codes:

    not_found          no such file
    unreadable         the file exists, but reading it was refused or failed
    storage_unavailable  a bucket or server did not answer for a while, or reported overload
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

import importlib
import io
import math
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, Protocol, TypeAlias, cast, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image, ImageFile, ImageOps, UnidentifiedImageError

from opal_deploy.errors import ImageError, UsageError
from opal_deploy.preprocess.decode_errors import decode_error, is_heic
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
# an image of more pixels is claimed before it is decoded, and converted in strips of so many
_LARGE_PIXELS = 4_000_000
# larger ones are left to Pillow, which reads piece by piece and needs no second copy of the pixels
_MAX_PLAIN_PIXELS, _MAX_PLAIN_BYTES = 25_000_000, 32_000_000


@runtime_checkable
class FileSource(Protocol):
    """An encoded image that is not a local file, such as an archive's member; picklable, so that a worker opens it."""

    def open(self) -> BinaryIO:
        """Open a seekable stream of the bytes; raise OSError or ImageError if the container cannot be read."""
        ...


class Decoding(StrEnum):
    """The decode path.

    `default`: the fastest with Pillow's pixels within 1 count. `exact`: Pillow's pixels, bit for bit. `fast`: decodes
    JPEG at a fraction of its size if that is large enough for the model.
    """

    default = "default"
    exact = "exact"
    fast = "fast"


def parse_decoding(text: str) -> Decoding:
    """Parse the value of `--decode`; raise UsageError if there is no such decode path."""
    if text not in list(Decoding):
        raise UsageError(f"--decode {text!r}: expected {', '.join(Decoding)}")
    return Decoding(text)


# whatever can be decoded, and the part of it that has to be opened first; a str is a path or a URL
Source: TypeAlias = str | Path | bytes | FileSource | Image.Image | NDArray[np.uint8]
PathOrSource: TypeAlias = Path | FileSource


@cache
def import_faster(name: str) -> Any:
    """Return simplejpeg, which has Pillow's pixels, or cykooz_resizer, which is within 1 count; None without it."""
    try:
        return importlib.import_module(name)
    except Exception:  # no wheel, or one that does not load on this processor: Pillow can do it
        return None


def missing_libraries() -> list[str]:
    """Return one line for each faster library that cannot be imported here."""
    tasks = {"simplejpeg": "JPEG files are decoded", "cykooz_resizer": "images are resized"}
    return [
        f"{name} cannot be imported, so {work} by Pillow alone: the same results, more slowly"
        for name, work in tasks.items()
        if import_faster(name) is None
    ]


def open_file(source: PathOrSource) -> BinaryIO:
    """Open a regular file or a FileSource, without reading it as a whole; raise ImageError."""
    try:
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


def no_claim(pixels: int) -> None:
    """Grant any number of pixels."""


def decode(
    source: Source,
    *,
    max_pixels: int = MAX_PIXELS,
    open_file: Callable[[PathOrSource], BinaryIO] = open_file,
    decoding: Decoding = Decoding.default,
    claim: Callable[[int], None] = no_claim,
) -> Image.Image:
    """Decode one image at its full size to a loaded PIL image of mode RGB.

    Args:
        source: a path, a file's bytes, a FileSource, a PIL image, or uint8 [H, W, 3] RGB or [H, W] grey.
        max_pixels: width times height above which the image is refused.
        open_file: opens a path or a FileSource; replaced to measure or count what is read.
        decoding: `exact` uses only Pillow; the other paths give the same pixels here.
        claim: is called with the number of pixels of an image of over 4 megapixels before they are decoded, and may
            wait until there is memory for them.

    Raises:
        ImageError: the image cannot be used; the module's docstring lists the codes.
    """
    return _decode(source, _DecodeOptions(max_pixels, open_file, decoding, claim))[0]


def decode_for_input(
    source: Source,
    input_size: tuple[int, int],
    *,
    max_pixels: int = MAX_PIXELS,
    open_file: Callable[[PathOrSource], BinaryIO] = open_file,
    decoding: Decoding = Decoding.default,
    claim: Callable[[int], None] = no_claim,
) -> tuple[Image.Image, Geometry]:
    """Decode one image that will be resized as a whole to `input_size` = (H0, W0); return it and its full geometry.

    With `fast`, the image may have a half, a quarter or an eighth of its size, if that is not smaller than the input.
    Other arguments and errors are those of `decode`.
    """
    image, (width, height) = _decode(source, _DecodeOptions(max_pixels, open_file, decoding, claim, input_size))
    return image, Geometry.whole(width, height)


@dataclass(frozen=True)
class _DecodeOptions:
    """The arguments of `decode`, and the (height, width) that is large enough for the caller."""

    max_pixels: int
    open_file: Callable[[PathOrSource], BinaryIO]
    decoding: Decoding
    claim: Callable[[int], None]
    min_size: tuple[int, int] | None = None


def _decode(source: Source, options: _DecodeOptions) -> tuple[Image.Image, tuple[int, int]]:
    """Return the image, and its (width, height) at full size."""
    if isinstance(source, np.ndarray):
        check_array(source)
        image = Image.fromarray(np.ascontiguousarray(source)).convert("RGB")
        return image, image.size
    if isinstance(source, Image.Image):
        return _load(source, options)
    if isinstance(source, bytes):
        opened: BinaryIO = io.BytesIO(source)
    else:
        opened = options.open_file(parse_source(source) if isinstance(source, str | os.PathLike) else source)
    with opened as stream:
        try:
            size = stream.seek(0, os.SEEK_END)
            stream.seek(0)
        except OSError as error:
            raise ImageError("unreadable", f"cannot be read: {error.strerror or error}") from None
        if not size:
            raise ImageError("empty_file", "the file has zero bytes")
        return _load(stream, options, size)


def _load(
    source: BinaryIO | Image.Image, options: _DecodeOptions, size: int = 0
) -> tuple[Image.Image, tuple[int, int]]:
    """Open, check, load and orient; turn any error of Pillow's into an ImageError."""
    stream = None if isinstance(source, Image.Image) else source
    image = None
    try:
        image = source if isinstance(source, Image.Image) else _open_image(source)
        _check_kind(image, options.max_pixels)
        if image.width * image.height > _LARGE_PIXELS:
            options.claim(image.width * image.height)
        loaded = None if stream is None else _decode_plain_jpeg(stream, size, image, options)
        if loaded is None:
            image.load()
            loaded = image
        scaled = loaded.size != image.size
        full = image.size[::-1] if scaled and _is_transposed(image) else image.size
        oriented = _apply_orientation(loaded, ours=loaded is not source)
        rgb = _convert(oriented)
        return rgb, full if scaled else rgb.size
    except ImageError:
        raise
    except Exception as error:  # Pillow's decoders raise nearly anything for a damaged file; none of it is ours
        raise decode_error(error, stream, image, options.max_pixels) from None


def _open_image(stream: BinaryIO) -> Image.Image:
    try:
        return Image.open(stream)
    except UnidentifiedImageError:
        if not is_heic(stream):
            raise
        try:
            import pi_heif
        except ImportError:
            # the error will say what to install
            raise UnidentifiedImageError from None
        return cast(Image.Image, pi_heif.HeifImageFile(stream))


def _decode_plain_jpeg(stream: BinaryIO, size: int, header: Image.Image, options: _DecodeOptions) -> Image.Image | None:
    """Decode an ordinary JPEG with simplejpeg; None leaves it to Pillow, so that every path has the same errors."""
    simplejpeg = import_faster("simplejpeg")
    if simplejpeg is None or options.decoding is Decoding.exact or not is_plain_jpeg(header, size):
        return None
    height, width = (options.decoding is Decoding.fast and options.min_size) or (0, 0)
    if height and _is_transposed(header):
        height, width = width, height
    stream.seek(0)
    # between half and full size, scaled decoding takes longer than decoding everything
    limits = {"min_height": height, "min_width": width, "min_factor": 2.0 if height else 1.0}
    try:
        # strict: a warning of the decoder is an error, which Pillow may judge in its own way
        pixels = simplejpeg.decode_jpeg(stream.read(_MAX_PLAIN_BYTES), "RGB", strict=True, **limits)
    except Exception:
        return None
    image = Image.frombuffer("RGB", (pixels.shape[1], pixels.shape[0]), pixels, "raw", "RGB", 0, 1)
    if not height and image.size != header.size:
        return None
    # holds the orientation, in EXIF or XMP
    image.info = dict(header.info)
    return image


def is_plain_jpeg(header: Image.Image, size: int) -> bool:
    """Return whether a file of `size` bytes, opened as `header`, is an ordinary JPEG, on which decoders agree."""
    return (
        header.format == "JPEG"
        and header.mode in ("RGB", "L")
        # the colour space in Adobe's marker; 1 is YCbCr, as in files without the marker
        and header.info.get("adobe_transform", 1) == 1
        and header.width * header.height <= _MAX_PLAIN_PIXELS
        and size <= _MAX_PLAIN_BYTES
    )


def _is_transposed(image: Image.Image) -> bool:
    """Return whether applying the EXIF orientation swaps width and height."""
    try:
        return image.getexif().get(ExifTags.Base.Orientation) in (5, 6, 7, 8)
    except Exception:  # as in `_apply_orientation`
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
        raise ImageError(
            "too_many_pixels",
            f"{width}x{height} is {width * height:,} pixels, over the limit of {max_pixels:,} (--max-pixels)",
        )


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
        found = f"from {low:g} to {high:g}" if math.isfinite(high - low) else "that include NaN or infinity"
        raise ImageError(
            "unsupported_image", f"its pixels are floats {found}; expected 0 to 1: scale them, or save it as 8-bit"
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
