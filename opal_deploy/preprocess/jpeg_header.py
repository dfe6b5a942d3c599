"""The header of a JPEG file, read before a GPU decodes it: which files a GPU may decode, their size and orientation.

nvJPEG may take a file that ends early, or is damaged between its markers, for a whole one. Only plain, whole files of
three components or one are given to it; everything else, and everything that is wrong with a file, is left to the CPU,
so that every decode path reports the same errors. Pillow reads sizes and EXIF; the walk over the markers is our own,
since no library reports whether a JPEG is whole without decoding it.
"""

from __future__ import annotations

import io
import re
from dataclasses import dataclass

from PIL import ExifTags, Image

from opal_deploy.preprocess.decode import is_plain_jpeg
from opal_deploy.preprocess.geometry import Box, Geometry, compute_geometry_from_size

# CUDA's antialiased resize cannot hold filters of far more taps
_MAX_REDUCTION = 128
# markers: start and end of the image; frames of baseline, extended and progressive JPEG; a scan; what may come
# between two scans (tables, restart interval, comments, application data)
_START, _END = b"\xff\xd8", b"\xff\xd9"
_FRAMES, _SCAN = (0xC0, 0xC1, 0xC2), 0xDA
_BETWEEN = frozenset({0xC4, 0xDA, 0xDB, 0xDD, 0xFE, *range(0xE0, 0xF0)})
_MARKER_HERE = re.compile(rb"\xff++([^\x00\xd0-\xd7])")  # possessive: fill bytes may be many
_MARKER_AFTER = re.compile(rb"\xff([^\x00\xff\xd0-\xd7])")
# cameras and encoders write a dozen; each scan is another pass over the image, and a GPU has no time limit
_MAX_SEGMENTS, _MAX_SCANS = 1000, 100
# component ids of a file that holds RGB, not YCbCr, without saying so
_RGB_IDS = b"RGB"


@dataclass(frozen=True)
class Jpeg:
    """A file that a GPU may decode, and its header.

    Attributes:
        data: the file's bytes.
        stored: (width, height) in pixels, before the EXIF orientation is applied.
        orientation: EXIF's, 1 to 8.
        geometry: of the oriented image, with the requested crop.
    """

    data: bytes
    stored: tuple[int, int]
    orientation: int
    geometry: Geometry

    @property
    def pixels(self) -> int:
        """The number of pixels."""
        return self.stored[0] * self.stored[1]

    def can_resize_to(self, input_size: tuple[int, int]) -> bool:
        """Return whether the GPU can resize the crop to (H0, W0): not if it is more than 128 times as long."""
        x0, y0, x1, y1 = self.geometry.crop
        height, width = input_size
        return x1 - x0 <= _MAX_REDUCTION * width and y1 - y0 <= _MAX_REDUCTION * height


def read_header(data: bytes, box: Box | None, max_pixels: int) -> Jpeg | None:
    """Read a file's header.

    Args:
        data: the bytes of any file.
        box: to crop to, in pixels of the oriented image.
        max_pixels: a larger image is left to the CPU, which refuses it.

    Returns:
        None where the CPU has to decode the file, or to refuse it.
    """
    if not is_well_formed(data):
        return None
    try:
        # no other format: their decoders may crash this process
        with Image.open(io.BytesIO(data), formats=("JPEG",)) as image:
            if not is_plain_jpeg(image, len(data)) or image.width * image.height > max_pixels:
                return None
            width, height = stored = image.size
            orientation = _orientation(image)
        geometry = compute_geometry_from_size((height, width) if orientation >= 5 else stored, box)
    except Exception:  # the CPU meets the error again and reports it
        return None
    return Jpeg(data, stored, orientation, geometry)


def is_well_formed(data: bytes) -> bool:
    """Return whether a file is an 8-bit JPEG whose markers follow each other from the first byte to the last.

    Lossless, arithmetic and 12-bit JPEG are not for the GPU, nor is one whose components are called R, G and B.
    """
    if not data.startswith(_START) or not data.endswith(_END):
        return False
    frame: bytes | None = None
    progressive = False
    scans = 0
    position = len(_START)
    for _ in range(_MAX_SEGMENTS):
        match = _MARKER_HERE.match(data, position)
        if match is None:
            return False
        marker, position = match[1][0], match.end()
        if marker == _END[1]:
            return bool(scans) and position == len(data)
        segment = data[position + 2 : position + int.from_bytes(data[position : position + 2])]
        if marker in _FRAMES and frame is None:
            frame, progressive = segment, marker == _FRAMES[2]
            if not _is_supported_frame(frame):
                return False
        elif marker not in _BETWEEN:
            return False
        position += 2 + len(segment)
        if marker == _SCAN:
            scans += 1
            if frame is None or not segment or scans > _MAX_SCANS:
                return False
            following = _MARKER_AFTER.search(data, position)
            # one scan of all components is the whole image, unless it comes in stages
            if following is None or (following[1] != _END[1:] and segment[0] == frame[5] and not progressive):
                return False
            position = following.start()
    return False


def _is_supported_frame(frame: bytes) -> bool:
    """Check a frame header: bits, height and width (2 bytes each), components, then 3 bytes each, the id first."""
    return len(frame) > 5 and frame[0] == 8 and frame[6::3] != _RGB_IDS


def _orientation(image: Image.Image) -> int:
    try:
        value = image.getexif().get(ExifTags.Base.Orientation, 1)
    except Exception:  # damaged EXIF counts as none, as on the CPU
        return 1
    return value if value in range(1, 9) else 1
