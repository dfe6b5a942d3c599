"""Damaged files: whatever was cut off or flipped, a picture or an ImageError comes out, the same from every path."""

import io

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from opal_deploy.errors import ImageError
from opal_deploy.preprocess.decode import Decoding, decode
from opal_deploy.preprocess.geometry import compute_geometry
from opal_deploy.preprocess.resize import to_input

INPUT = (32, 32)


def encoded(kind, mode="RGB", **options):
    # smooth with a little noise, as photographs are
    rng, stream = np.random.default_rng(5), io.BytesIO()
    coarse = Image.fromarray(rng.integers(0, 256, (5, 7, 3), np.uint8)).resize((61, 47), Image.Resampling.BICUBIC)
    pixels = np.clip(np.asarray(coarse) + rng.integers(-6, 7, (47, 61, 3)), 0, 255).astype(np.uint8)
    Image.fromarray(pixels).convert(mode).save(stream, kind, **options)
    return stream.getvalue()


FILES = {
    "JPEG": encoded("JPEG"),
    "JPEG 4:4:4": encoded("JPEG", subsampling="4:4:4", quality=95),
    "progressive JPEG": encoded("JPEG", progressive=True),
    "JPEG with restarts": encoded("JPEG", restart_marker_rows=1),
    "grey JPEG": encoded("JPEG", "L"),
    "CMYK JPEG": encoded("JPEG", "CMYK"),
    "PNG": encoded("PNG"),
    "palette PNG": encoded("PNG", "P"),
    "WebP": encoded("WEBP", quality=80),
    "lossless WebP": encoded("WEBP", lossless=True),
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


def outcome(data, decoding):
    try:
        # a flipped bit may claim any size; the limit keeps the test small
        return decode(data, max_pixels=1_000_000, decoding=decoding)
    except ImageError as error:
        # Pillow names the stream by its address
        return error.code, str(error).split(" object at ")[0]


def check(data):
    ours, exact = outcome(data, Decoding.default), outcome(data, Decoding.exact)
    if isinstance(exact, tuple):
        assert ours == exact
        return
    assert np.array_equal(np.asarray(ours), np.asarray(exact))
    squashed = to_input(ours, compute_geometry(ours), INPUT)
    expected = to_input(exact, compute_geometry(exact), INPUT, Decoding.exact)
    assert np.abs(squashed.astype(int) - expected).max() <= 1


@settings(
    max_examples=500, derandomize=True, database=None, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
@given(damaged())
def test_a_damaged_file_has_one_fate(data):
    check(data)


@pytest.mark.parametrize("name", FILES)
def test_undamaged_files_are_images_and_cut_off_anywhere_they_have_one_fate(name):
    data = FILES[name]
    assert isinstance(outcome(data, Decoding.default), Image.Image)
    for length in range(0, len(data), 13 if name in ("JPEG", "progressive JPEG", "PNG", "WebP") else 97):
        check(data[:length])
