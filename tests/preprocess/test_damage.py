"""Damaged files: whatever was cut off or flipped, an image or an ImageError comes out."""

import io

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from opal_deploy.errors import ImageError
from opal_deploy.preprocess.decode import decode


def encoded(kind, mode="RGB", **options):
    # smooth with a little noise, as photographs are
    rng, stream = np.random.default_rng(5), io.BytesIO()
    coarse = Image.fromarray(rng.integers(0, 256, (5, 7, 3), np.uint8)).resize((61, 47), Image.Resampling.BICUBIC)
    pixels = np.clip(np.asarray(coarse) + rng.integers(-6, 7, (47, 61, 3)), 0, 255).astype(np.uint8)
    Image.fromarray(pixels).convert(mode).save(stream, kind, **options)
    return stream.getvalue()


FILES = {
    "JPEG": encoded("JPEG"),
    "progressive JPEG": encoded("JPEG", progressive=True),
    "CMYK JPEG": encoded("JPEG", "CMYK"),
    "PNG": encoded("PNG"),
    "palette PNG": encoded("PNG", "P"),
    "WebP": encoded("WEBP", quality=80),
    "TIFF": encoded("TIFF", compression="tiff_lzw"),
}


@st.composite
def damaged(draw):
    """One of the files with up to eight bits flipped, and perhaps its end cut off."""
    data = bytearray(FILES[draw(st.sampled_from(sorted(FILES)))])
    for position in draw(st.lists(st.integers(0, 8 * len(data) - 1), max_size=8)):
        data[position // 8] ^= 1 << position % 8
    if draw(st.booleans()):
        del data[draw(st.integers(0, len(data))) :]
    return bytes(data)


@settings(
    max_examples=300, derandomize=True, database=None, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
@given(damaged())
def test_a_damaged_file_is_an_image_or_an_error(data):
    try:
        # a flipped bit may claim any size; the limit keeps the test small
        image = decode(data, max_pixels=1_000_000)
    except ImageError:
        return
    assert image.mode == "RGB"
    assert image.width * image.height <= 1_000_000
