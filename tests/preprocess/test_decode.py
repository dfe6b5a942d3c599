"""From a file to the image that a viewer shows: same pixels everywhere, one error code for each kind of failure."""

from __future__ import annotations

import base64
import io
import os
import re
import struct
import sys
import zlib
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from PIL import ExifTags, Image, ImageOps

from opal_deploy.artifact.preprocessing import InputForm
from opal_deploy.errors import ImageError
from opal_deploy.preprocess import decode as decode_module
from opal_deploy.preprocess import resize
from opal_deploy.preprocess.decode import Decoding, decode, decode_scaled
from opal_deploy.preprocess.geometry import compute_geometry
from opal_deploy.preprocess.resize import fit_input

BILINEAR = Image.Resampling.BILINEAR


def encoded(image, kind="PNG", orientation=None, **options):
    stream = io.BytesIO()
    if orientation is not None:
        options["exif"] = Image.Exif()
        options["exif"][ExifTags.Base.Orientation] = orientation
    image.save(stream, kind, **options)
    return stream.getvalue()


def png(width, height, depth, color, rows, **chunks):
    """Return a PNG of a kind that Pillow does not write."""

    def chunk(name, data):
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, 0))
    extra = b"".join(chunk(name.encode(), data) for name, data in chunks.items())
    return b"\x89PNG\r\n\x1a\n" + header + extra + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def grey16(*values):
    return b"\0" + struct.pack(f">{len(values)}H", *values)


def palette(transparent):
    image = Image.new("P", (2, 1))
    image.putpalette([200, 10, 20, 30, 220, 40])
    image.putdata([0, 1])
    return encoded(image, transparency=transparent)


def grey(*rows, mode=None):
    return encoded(Image.fromarray(np.array([rows], np.uint8), mode))


def decoded_pixels(source):
    return np.asarray(decode(source))


# names of Python's and Pillow's objects, and what only Pillow's decoders understand
LEAK = re.compile(r"\w+(Error|Exception|Plugin)\b|object at|0x[0-9a-f]{4}|decoder error|not processed|'str'")


def error_of(source, **options):
    with pytest.raises(ImageError) as caught:
        decode(source, **options)
    assert "\n" not in str(caught.value)
    assert not LEAK.search(str(caught.value))
    return caught.value


def error_code(source, **options):
    return error_of(source, **options).code


def difference(actual, expected):
    return int(np.abs(np.asarray(actual).astype(int) - np.asarray(expected)).max())


def pillow_image(source):
    with Image.open(io.BytesIO(source) if isinstance(source, bytes) else source) as image:
        return ImageOps.exif_transpose(image).convert("RGB")


# no two pixels are alike, so that no transposition looks like another
PIXELS = np.arange(5 * 7 * 3, dtype=np.uint8).reshape(5, 7, 3)
UPRIGHT = Image.fromarray(PIXELS)
NOISE = Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8))
JPEG = encoded(NOISE, "JPEG")


def test_a_side_of_millions_of_pixels_is_averaged_first(monkeypatch):
    # Pillow's weights for it would take 40 megabytes, for 90 million pixels 1.4 gigabytes
    sides, resize = [], Image.Image.resize
    monkeypatch.setattr(Image.Image, "resize", lambda self, *how: (sides.append(max(self.size)), resize(self, *how))[1])
    image = Image.linear_gradient("L").resize((1, 2500)).resize((1, 2_500_000)).convert("RGB")
    averaged = fit_input(image, compute_geometry(image.size), InputForm(8, 8), Decoding.exact)[0]
    assert sides[-1] < 1_000_000
    monkeypatch.undo()
    assert difference(averaged, image.resize((8, 8), BILINEAR)) <= 1


@pytest.mark.parametrize("size", [(1, 1), (1, 900), (900, 1), (64, 64), (500, 2)])
def test_images_of_every_shape_are_resized_as_by_pillow_within_a_count(size):
    slope = np.linspace(0, 255, size[0] * size[1] * 3).reshape(size[1], size[0], 3).astype(np.uint8)
    image = Image.fromarray(slope)
    ours, _ = fit_input(image, compute_geometry(image.size), InputForm(64, 64))
    assert difference(ours, image.resize((64, 64), BILINEAR)) <= 1


@pytest.mark.parametrize("orientation", range(1, 9))
def test_an_oriented_jpeg_is_turned_even_if_it_is_decoded_at_a_fraction_of_its_size(orientation):
    smooth = NOISE.resize((4, 3)).resize((401, 303), Image.Resampling.BICUBIC)
    data = encoded(smooth, "JPEG", orientation, quality=95)
    expected = pillow_image(data)
    image, geometry = decode_scaled(data, (60, 80))
    assert (geometry.width, geometry.height) == expected.size
    # it keeps all that the input needs
    assert (image.width >= 80, image.height >= 60, image.width < 300) == (True, True, True)
    ours = fit_input(image, geometry, InputForm(60, 80))[0]
    assert difference(ours, expected.resize((80, 60), BILINEAR)) <= 8


def test_without_the_faster_library_pillow_resizes(monkeypatch):
    monkeypatch.setattr(resize, "cykooz_resizer", None)
    image = decode(JPEG)
    resized = fit_input(image, compute_geometry(image.size), InputForm(40, 40))[0]
    assert difference(resized, pillow_image(JPEG).resize((40, 40), BILINEAR)) == 0


def test_an_image_with_damaged_exif_is_shown_as_it_is_stored():
    stored = encoded(UPRIGHT, exif=b"Exif\0\0II*\0\x08\0\0\0\xff\xff not a directory")
    assert np.array_equal(decoded_pixels(stored), PIXELS)


RED, BLUE = Image.new("RGB", (2, 1), (255, 0, 0)), Image.new("RGB", (2, 1), (0, 0, 255))
WHITE = (255, 255, 255)


ONE_TWO_THREE = struct.pack(">3H", 1, 2, 3)
FLOATS = Image.fromarray(np.array([[0, 0.2, 0.499, 1]], np.float32))
COLOURS = {
    "floats in [0, 1]": (encoded(FLOATS, "TIFF"), [(v, v, v) for v in (0, 51, 127, 255)]),
    "grey": (grey(7, 90), [(7, 7, 7), (90, 90, 90)]),
    "one bit": (encoded(Image.fromarray(np.array([[0, 255]], np.uint8)).convert("1")), [(0, 0, 0), WHITE]),
    "CMYK": (encoded(Image.new("CMYK", (2, 1), (0, 255, 255, 0)), "TIFF"), [(255, 0, 0)] * 2),
    "16-bit grey rounds": (
        png(4, 1, 16, 0, grey16(128, 129, 100 * 257, 65535)), [(0, 0, 0), (1, 1, 1), (100, 100, 100), WHITE],
    ),
    "16-bit RGB keeps the upper byte": (
        png(2, 1, 16, 2, grey16(65535, 0, 256, 511, 512, 513)), [(255, 0, 1), (1, 2, 2)],
    ),
    "palette": (palette(b"\xff\xff"), [(200, 10, 20), (30, 220, 40)]),
    "palette, one index transparent": (palette(0), [WHITE, (30, 220, 40)]),
    "palette, one index half transparent": (palette(b"\xff\x80"), [(200, 10, 20), (142, 237, 147)]),
    "grey with alpha": (grey([0, 0], [50, 255], mode="LA"), [WHITE, (50, 50, 50)]),
    "RGBA over white": (grey([0, 0, 0, 51], [9, 8, 7, 255], mode="RGBA"), [(204, 204, 204), (9, 8, 7)]),
    "RGB with a transparent colour": (
        png(2, 1, 8, 2, b"\0\x01\x02\x03\x0a\x0b\x0c", tRNS=ONE_TWO_THREE), [WHITE, (10, 11, 12)],
    ),
    "an animation's first frame": (encoded(RED, "GIF", save_all=True, append_images=[BLUE]), [(255, 0, 0)] * 2),
}  # fmt: skip


@pytest.mark.parametrize(("data", "expected"), COLOURS.values(), ids=COLOURS)
def test_colours_are_a_viewers(data, expected):
    image = decode(data)
    assert image.mode == "RGB"
    assert [tuple(pixel) for pixel in np.asarray(image)[0]] == expected


@pytest.mark.parametrize("mode", ["RGBA", "I;16"])
def test_a_large_image_converted_in_strips_has_the_same_pixels(monkeypatch, mode):
    noise = Image.effect_noise((30, 23), 90)
    image = noise.convert("I").convert("I;16") if mode == "I;16" else noise.convert(mode)
    if mode == "RGBA":
        image.putalpha(noise.rotate(180))
    expected = decode(image)
    monkeypatch.setattr(decode_module, "_LARGE_PIXELS", 4 * 30)
    assert difference(decode(image), expected) == 0


@pytest.mark.parametrize("mode", ["La", "RGBa", "PA", "RGBX", "HSV", "YCbCr", "I;16B"])
def test_every_mode_that_pillow_returns_becomes_rgb(mode):
    assert decode(Image.new(mode, (3, 2))).mode == "RGB"


def test_strided_and_grey_arrays_give_their_pixels():
    assert np.array_equal(decoded_pixels(PIXELS[:, ::2]), PIXELS[:, ::2])
    assert np.array_equal(decoded_pixels(PIXELS[..., 0]), np.repeat(PIXELS[..., :1], 3, 2))


def test_a_pil_image_is_oriented_like_its_file_and_stays_as_it_was():
    data = encoded(UPRIGHT, orientation=6)
    with Image.open(io.BytesIO(data)) as image:
        assert np.array_equal(decoded_pixels(image), decoded_pixels(data))
    image = Image.new("RGBA", (3, 2), (1, 2, 3, 0))
    decode(image)
    assert (image.mode, image.getpixel((0, 0))) == ("RGBA", (1, 2, 3, 0))


EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n%%EOF\n"


BAD = {
    "zero bytes": (b"", "empty_file"),
    "text": (b"not an image at all", "not_an_image"),
    "zeros": (bytes(4096), "not_an_image"),
    "beyond 16 bits": (encoded(Image.new("I", (4, 4), 70_000), "TIFF"), "unsupported_image"),
    "negative": (encoded(Image.new("I", (4, 4), -1), "TIFF"), "unsupported_image"),
    "EPS, on which Pillow would start Ghostscript": (EPS, "unsupported_image"),
    "float array": (np.zeros((4, 4, 3), np.float32), "unsupported_image"),
    "channels first": (np.zeros((3, 4, 4), np.uint8), "unsupported_image"),
    "no rows": (np.zeros((0, 4, 3), np.uint8), "unsupported_image"),
    "PIL image without pixels": (Image.new("RGB", (0, 3)), "unsupported_image"),
    "a name with a null byte": ("a\0.jpg", "unreadable"),
}


@pytest.mark.parametrize(("source", "code"), BAD.values(), ids=BAD)
def test_a_bad_source_has_its_code(source, code):
    assert error_code(source) == code


def floats(high):
    return encoded(Image.fromarray(np.array([[0.25, high]], np.float32)), "TIFF")


GIF_BOMB = (gif := encoded(NOISE, "GIF"))[:6] + b"\xff\xff\xff\xff" + gif[10:]
# 16 x 16 pixels of one colour, from libheif and x265
HEIC = base64.b85decode(
    "0000SW^{RQXk}?*00000ZE0pPXk}?*ZE0a<0004eZDn*}000000000XXk=`10000000000aA{+700000000000000000000B57=I"
    "V*mgE07O6l0RRC200001pa1~?00000001%o001LtX>Mi!000000RR916=`l}WdZ;I000310BCk&F#rGn01j|zbZr0t000010002|"
    "X>f9I0002oX>en20001WXm(>m0RwOV0058x000009`FGC{rLC*01pFT0096PKmiN^|NjGU00093kN^M!000939=ZZRVE_RDDMA4O"
    "18@KU0|1Z!00RI30{|YNAb|yz>aLpR;31&EfB*mtfB*mk0EA)y0RRR>0l{;@i2wiq6Ju{|a&BX6cmM$a4FCp!0000KX>)L800000"
    "0000$0000$0000eV{Bn?0000G000010000G00001|NsBc00002|NsBc000020000GaA|mH000000|*ER0000OX>e^}0000000001"
    "009Mo0s{qv0000wZDe6|0000kC;_h%A!1`d^(P|#{|4HB^CTzzHQ8Zja=O7=^7_E`WShYAs*#?6hiRuU6?g"
)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "GIF", "TIFF", "BMP", "DDS", "TGA", "QOI"])
def test_a_file_that_was_cut_is_truncated(kind):
    data = encoded(NOISE, kind)
    assert error_code(data[: len(data) // 2]) == "truncated_image"


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_a_file_with_flipped_bytes_is_an_image_or_an_error(kind):
    data = encoded(NOISE, kind)
    for at in range(0, len(data), max(1, len(data) // 60)):
        with suppress(ImageError):
            # a flipped byte may claim any size
            assert decode(data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :], max_pixels=10**6).mode == "RGB"


@pytest.mark.parametrize(
    ("source", "code", "word"),
    [
        (JPEG[:300], "truncated_image", "JPEG"),
        (GIF_BOMB, "too_many_pixels", "--max-pixels"),
        (b"\xff\x0a" + bytes(99), "unsupported_image", "JPEG XL"),
        (b"\n<!DOCTYPE html><title>404", "not_an_image", "web page"),
        (b"version https://git-lfs.github.com/spec/v1", "not_an_image", "Git LFS"),
        (b"%PDF-1.7", "not_an_image", "PDF"),
        (b"\0\0\0\x18ftypmp42", "not_an_image", "video"),
        (floats(1.5), "unsupported_image", "from 0.25 to 1.5"),
        (floats(np.nan), "unsupported_image", "NaN"),
    ],
)
def test_an_unreadable_file_is_told_what_it_is(source, code, word):
    error = error_of(source)
    assert (error.code, word in str(error)) == (code, True), str(error)


def test_heic_is_decoded_where_its_package_is_installed_and_else_names_it(monkeypatch):
    pytest.importorskip("pi_heif")
    pixels = decoded_pixels(HEIC)
    assert pixels.shape == (16, 16, 3)
    assert np.abs(pixels.astype(int) - (200, 60, 20)).max() <= 8
    monkeypatch.setitem(sys.modules, "pi_heif", None)
    monkeypatch.delitem(Image.OPEN, "HEIF")
    monkeypatch.setattr(Image, "ID", [name for name in Image.ID if name != "HEIF"])
    error = error_of(HEIC)
    assert (error.code, "opal-deploy[heif]" in str(error)) == ("unsupported_image", True)


def test_a_path_that_is_no_image_file_has_its_code(tmp_path, monkeypatch):
    path = tmp_path / "a.jpg"
    assert error_code(path) == "not_found"
    path.symlink_to(path)
    assert error_code(path) == "unreadable"
    path.unlink()
    os.mkfifo(path)
    # it is not waited for
    assert (error_code(path), error_code(tmp_path)) == ("not_a_file", "not_a_file")
    path.unlink()
    path.touch()
    os.truncate(path, 1 << 40)  # more than any memory, and no disk
    assert error_code(path) == "not_an_image"

    # the superuser may read everything, so the refusal is put in by hand
    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    assert error_code(path) == "unreadable"


def test_an_image_over_the_limit_is_refused_before_its_pixels_are_decoded(monkeypatch):
    assert decode(encoded(Image.new("RGB", (10, 10))), max_pixels=100).size == (10, 10)
    assert error_code(Image.new("RGB", (10, 11)), max_pixels=109) == "too_many_pixels"
    data = encoded(Image.new("RGB", (10, 11)))
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", lambda _: pytest.fail("decoded"))
    assert error_code(data, max_pixels=109) == "too_many_pixels"
