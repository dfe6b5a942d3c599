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
    unsupported_image  it decodes, but to values without a defined meaning as 8-bit RGB (32-bit floats)
    bad_box            the box given for it has no pixel of the picture (see `resize`)

Colour: CMYK, YCCK, Lab, grey and palette pictures are converted by Pillow; 16 bits are scaled to 8 (v / 257);
transparency is laid over white, as viewers do; ICC profiles are not applied, here or in training.
"""

from __future__ import annotations

import io
import stat
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageFile, ImageOps, UnidentifiedImageError

from opal_deploy.errors import ImageError

Source: TypeAlias = str | Path | bytes | Image.Image | NDArray[np.uint8]

# above this a picture is refused before its pixels are decoded: 100 megapixels are 300 MB of RGB
MAX_PIXELS = 100_000_000

# Pillow has a limit of its own that it cannot be told per call; ours comes first for all but headers of absurd size
_16_BIT_MODES = ("I;16", "I;16L", "I;16B", "I;16N")
_16_TO_8 = 257.0


def decode(source: Source, *, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """Read one picture.

    Args:
        source: a path, a file's bytes, a PIL image, or uint8 [H, W, 3] RGB or [H, W] grey.
        max_pixels: width times height above which it is refused.

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
    data = source if isinstance(source, bytes) else read_file(Path(source))
    if not data:
        raise ImageError("empty_file", "the file has zero bytes")
    return _to_rgb(_guarded(io.BytesIO(data), max_pixels))


def read_file(path: Path) -> bytes:
    """A regular file's bytes.

    Raises:
        ImageError: not_found, not_a_file or unreadable.
    """
    try:
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode):
            # a named pipe would block for ever
            raise ImageError("not_a_file", "it is a folder, a pipe or a device, not a file")
        return path.read_bytes()
    except FileNotFoundError:
        raise ImageError("not_found", "no such file") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ImageError("unreadable", f"cannot be read: {reason}") from None


def _guarded(source: io.BytesIO | Image.Image, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """Open, check, load and orient; whatever Pillow raises becomes an ImageError."""
    try:
        image = source if isinstance(source, Image.Image) else Image.open(source)
        _check_pixels(image.size, max_pixels)
        image.load()
        return _oriented(image)
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
    if width * height > max_pixels:
        raise ImageError(
            "too_many_pixels", f"{width}x{height} is {width * height:,} pixels, over the limit of {max_pixels:,}"
        )


def _oriented(image: Image.Image) -> Image.Image:
    """EXIF orientation applied; a picture whose EXIF cannot be parsed has none, as in a viewer."""
    try:
        return ImageOps.exif_transpose(image)
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
        values = np.asarray(image, dtype=np.float64)
        if values.size and (values.min() < 0 or values.max() > 65535):
            raise ImageError("unsupported_image", "its pixels are 32-bit integers beyond 16 bits; save it as 8-bit")
        grey = np.rint(values / _16_TO_8).astype(np.uint8)
        return Image.fromarray(grey).convert("RGB")
    if "transparency" in image.info or image.mode in ("RGBA", "LA", "PA", "RGBa", "La"):
        rgba = image.convert("RGBA")
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
