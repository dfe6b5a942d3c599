"""From a file to the picture that a viewer shows: RGB, 8 bits, EXIF orientation applied, first frame.

Every way in which a file can be wrong ends in an ImageError with one of these codes:

    not_found          no such file
    unreadable         the file exists, but reading it was refused or failed
    not_a_file         a folder, a pipe, a device
    empty_file         zero bytes
    not_an_image       no decoder recognises it
    truncated_image    it starts well and ends early
    corrupt_image      a decoder gave up inside it
    too_many_pixels    it claims more pixels than the limit
    unsupported_image  values without a defined meaning as 8-bit RGB (32-bit floats), no pixels at all, or a format
                       whose decoder runs another program on the file (EPS)
    bad_box            the box given for it has no pixel of the picture (see `resize`)

Colour: CMYK, YCCK, Lab, grey and palette pictures are converted by Pillow; 16-bit grey is scaled to 8 bits (v / 257,
rounded), of 16-bit RGB Pillow keeps the upper 8; transparency is laid over white, as viewers do; ICC profiles are not
applied, here or in training.
"""

from __future__ import annotations

import io
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, TypeAlias

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageFile, ImageOps, UnidentifiedImageError

from opal_deploy.errors import ImageError

Source: TypeAlias = str | Path | bytes | Image.Image | NDArray[np.uint8]

# above this a picture is refused before its pixels are decoded: 100 megapixels are 300 MB of RGB
MAX_PIXELS = 100_000_000

# Pillow has a limit of its own, which is no argument of its functions: it refuses from 178 956 970 pixels on
_16_BIT_MODES = ("I;16", "I;16L", "I;16B", "I;16N")
# round(v / 257) for every 16-bit v; 257 is odd, so there are no halves
_16_TO_8 = ((np.arange(1 << 16) + 128) // 257).astype(np.uint8)
# Pillow hands these to Ghostscript: no file from outside may start a program
_RUNS_A_PROGRAM = ("EPS",)


def open_file(path: Path) -> BinaryIO:
    """A regular file, opened. Not read as a whole: a file of any length may be called .jpg.

    Raises:
        ImageError: not_found, not_a_file or unreadable.
    """
    try:
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode):
            # a named pipe would block for ever
            raise ImageError("not_a_file", "it is a folder, a pipe or a device, not a file")
        return path.open("rb")
    except FileNotFoundError:
        raise ImageError("not_found", "no such file") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ImageError("unreadable", f"cannot be read: {reason}") from None


def decode(
    source: Source, *, max_pixels: int = MAX_PIXELS, open_file: Callable[[Path], BinaryIO] = open_file
) -> Image.Image:
    """Read one picture.

    Args:
        source: a path, a file's bytes, a PIL image, or uint8 [H, W, 3] RGB or [H, W] grey.
        max_pixels: width times height above which it is refused.
        open_file: how a path is opened; for those who watch what is read.

    Returns:
        A loaded PIL image of mode RGB.

    Raises:
        ImageError: see the module's docstring; it is the image's fault, whatever Pillow raised.
    """
    if isinstance(source, np.ndarray):
        return _from_array(source)
    if isinstance(source, Image.Image):
        _check_pixels(source.size, max_pixels)
        return _to_rgb(_guarded(source))
    if isinstance(source, bytes):
        return _from_stream(io.BytesIO(source), len(source), max_pixels)
    with open_file(Path(source)) as stream:
        return _from_stream(stream, os.fstat(stream.fileno()).st_size, max_pixels)


def _from_stream(stream: BinaryIO, size: int, max_pixels: int) -> Image.Image:
    if not size:
        raise ImageError("empty_file", "the file has zero bytes")
    return _to_rgb(_guarded(stream, max_pixels))


def _guarded(source: BinaryIO | Image.Image, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """Open, check, load and orient; whatever Pillow raises becomes an ImageError."""
    try:
        image = source if isinstance(source, Image.Image) else Image.open(source)
        _check_pixels(image.size, max_pixels)
        if image.format in _RUNS_A_PROGRAM:
            raise ImageError("unsupported_image", f"{image.format} is a program to be run, not pixels; save it as PNG")
        image.load()
        return _oriented(image, ours=image is not source)
    except ImageError:
        raise
    except Image.DecompressionBombError as error:
        raise ImageError("too_many_pixels", f"refused as a decompression bomb: {error}") from None
    except UnidentifiedImageError:
        raise ImageError("not_an_image", "no decoder recognises it as an image") from None
    except MemoryError:
        raise ImageError("too_many_pixels", "it needs more memory than there is") from None
    except Exception as error:  # Pillow's decoders raise nearly anything for a damaged file; none of it is ours
        code = "truncated_image" if _is_truncation(error) else "corrupt_image"
        raise ImageError(code, f"{type(error).__name__}: {error}") from None


def _is_truncation(error: Exception) -> bool:
    text = str(error).lower()
    return isinstance(error, EOFError) or "truncated" in text


def _check_pixels(size: tuple[int, int], max_pixels: int) -> None:
    width, height = size
    if not width * height:
        raise ImageError("unsupported_image", f"{width}x{height} has no pixels")
    if width * height > max_pixels:
        raise ImageError(
            "too_many_pixels", f"{width}x{height} is {width * height:,} pixels, over the limit of {max_pixels:,}"
        )


def _oriented(image: Image.Image, *, ours: bool) -> Image.Image:
    """EXIF orientation applied; a picture whose EXIF cannot be parsed has none, as in a viewer.

    A picture that we opened is turned in place: Pillow copies even where there is nothing to turn, and a copy of a
    large picture is hundreds of megabytes. A caller's own picture stays as it is.
    """
    try:
        if not ours:
            return ImageOps.exif_transpose(image)
        ImageOps.exif_transpose(image, in_place=True)
        return image
    except Exception:  # damaged EXIF raises what its parser stumbles over; the pixels are fine
        return image


def _to_rgb(image: Image.Image) -> Image.Image:
    try:
        return _convert(image)
    except ImageError:
        raise
    except Exception as error:  # as above: a conversion that Pillow cannot do is the image's fault
        raise ImageError("corrupt_image", f"{type(error).__name__}: {error}") from None


def _convert(image: Image.Image) -> Image.Image:
    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    if image.mode == "F":
        raise ImageError(
            "unsupported_image", "its pixels are 32-bit floats, whose range is not defined; save it as 8-bit"
        )
    if image.mode in _16_BIT_MODES or image.mode == "I":
        values = np.asarray(image)
        if values.min() < 0 or values.max() > 65535:
            raise ImageError("unsupported_image", "its pixels are 32-bit integers beyond 16 bits; save it as 8-bit")
        grey = _16_TO_8[values]
        if isinstance(image.info.get("transparency"), int):
            grey[values == image.info["transparency"]] = 255
        return Image.fromarray(grey).convert("RGB")
    if image.has_transparency_data:
        rgba = (image.convert("LA") if image.mode == "La" else image).convert("RGBA")
        white = Image.new("RGBA", rgba.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, rgba).convert("RGB")
    return image.convert("RGB")


def _from_array(array: NDArray[np.uint8]) -> Image.Image:
    grey_or_rgb = array.ndim == 2 or (array.ndim == 3 and array.shape[2] == 3)
    if array.dtype != np.uint8 or not grey_or_rgb or 0 in array.shape:
        raise ImageError(
            "unsupported_image",
            f"an array of {array.dtype} {list(array.shape)}; expected uint8 [H, W, 3] RGB or [H, W]",
        )
    return Image.fromarray(np.ascontiguousarray(array)).convert("RGB")


# a truncated file is an error record, whatever another library has switched on in this process
ImageFile.LOAD_TRUNCATED_IMAGES = False
