"""From a file to the image that a viewer shows: same pixels everywhere, one error code for each kind of failure."""

from __future__ import annotations

import io
import os
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pytest
from PIL import ExifTags, Image, ImageOps

from opal_deploy.errors import ImageError
from opal_deploy.inference.decoding.prepare import timed_open
from opal_deploy.inference.timing import NO_OP_TIMER, StageTimer
from opal_deploy.preprocess import accelerated
from opal_deploy.preprocess.decode import Decoding, decode, decode_for_input
from opal_deploy.preprocess.geometry import Box, compute_geometry
from opal_deploy.preprocess.resize import to_input


def encoded(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def png(width: int, height: int, depth: int, color: int, rows: bytes, **chunks: bytes) -> bytes:
    """A PNG written by hand, for what Pillow does not write."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, 0))
    extra = b"".join(chunk(name.encode(), data) for name, data in chunks.items())
    return b"\x89PNG\r\n\x1a\n" + header + extra + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def pixels(source: object) -> np.ndarray:
    return np.asarray(decode(source))  # type: ignore[arg-type]


def code_of(source: object, **options: int) -> str:
    with pytest.raises(ImageError) as caught:
        decode(source, **options)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)
    return caught.value.code


# a picture in which no two pixels are alike, so that no transposition of it looks like another
PIXELS = np.arange(5 * 7 * 3, dtype=np.uint8).reshape(5, 7, 3)


def difference(found: np.ndarray, expected: np.ndarray) -> int:
    return int(np.abs(found.astype(int) - expected.astype(int)).max())


def by_pillow(source: Path | bytes) -> Image.Image:
    with Image.open(io.BytesIO(source) if isinstance(source, bytes) else source) as image:
        return ImageOps.exif_transpose(image).convert("RGB")


@pytest.mark.data
@pytest.mark.parametrize(("decoding", "most"), [("exact", 0), ("default", 1)])
def test_photographs_have_plain_pillows_pixels(photographs: list[Path], decoding: str, most: int) -> None:
    chosen = photographs[::4]
    assert len(chosen) >= 60
    for path in chosen:
        expected = by_pillow(path)
        found = decode(path, decoding=Decoding(decoding))
        assert np.array_equal(np.asarray(found), np.asarray(expected)), path
        # smaller, larger, and one side each
        for height, width in ((160, 224), (448, 448), (700, 96)):
            squashed = np.asarray(expected.resize((width, height), Image.Resampling.BILINEAR))
            ours = to_input(found, compute_geometry(found), (height, width), Decoding(decoding))
            assert difference(ours, squashed) <= most, (path, height, width)


@pytest.mark.data
@pytest.mark.parametrize("box", [(3, 5, 23, 9), (10, 10, 11, 200), (100, 40, 101, 41), (50.5, 20, 180, 150)])
def test_crops_of_photographs_are_plain_pillows_within_a_count(photographs: list[Path], box: Box) -> None:
    for path in photographs[::16]:
        picture = decode(path)
        geometry = compute_geometry(picture, box)
        expected = by_pillow(path).crop(geometry.crop).resize((96, 64), Image.Resampling.BILINEAR)
        assert difference(to_input(picture, geometry, (64, 96)), np.asarray(expected)) <= 1, path


@pytest.mark.parametrize("size", [(1, 1), (1, 900), (900, 1), (2, 3), (64, 64), (500, 2)])
@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_pictures_of_every_shape_are_plain_pillows_within_a_count(size: tuple[int, int], mode: str) -> None:
    slope = np.linspace(0, 255, size[0] * size[1] * 3).reshape(size[1], size[0], 3).astype(np.uint8)
    data = encoded(Image.fromarray(slope).convert(mode), "JPEG", quality=90)
    expected = by_pillow(data)
    found = decode(data)
    assert np.array_equal(np.asarray(found), np.asarray(expected))
    squashed = np.asarray(expected.resize((64, 64), Image.Resampling.BILINEAR))
    assert difference(to_input(found, compute_geometry(found), (64, 64)), squashed) <= 1


@pytest.mark.parametrize("subsampling", ["4:4:4", "4:2:2", "4:2:0"])
@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"restart_marker_rows": 1}, {"quality": 5}])
def test_jpeg_of_every_kind_has_pillows_pixels(subsampling: str, options: dict[str, int]) -> None:
    data = encoded(NOISE.resize((75, 53)), "JPEG", subsampling=subsampling, **options)
    assert np.array_equal(pixels(data), np.asarray(by_pillow(data)))


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("decoding", list(Decoding))
def test_an_oriented_jpeg_is_turned_whatever_decodes_it(orientation: int, decoding: Decoding) -> None:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    smooth = NOISE.resize((4, 3)).resize((401, 303), Image.Resampling.BICUBIC)
    data = encoded(smooth, "JPEG", exif=exif, quality=95)
    expected = by_pillow(data)

    picture, geometry = decode_for_input(data, (60, 80), decoding=decoding)

    assert (geometry.width, geometry.height) == expected.size
    # scaled decoding keeps all that the input needs
    assert picture.width >= 80
    assert picture.height >= 60
    squashed = np.asarray(expected.resize((80, 60), Image.Resampling.BILINEAR))
    assert difference(to_input(picture, geometry, (60, 80), decoding), squashed) <= (8 if decoding == "fast" else 1)


def test_fast_decodes_a_large_jpeg_to_a_part_of_its_size() -> None:
    data = encoded(NOISE.resize((1001, 701)), "JPEG")
    picture, geometry = decode_for_input(data, (100, 100), decoding=Decoding.fast)
    assert (geometry.width, geometry.height) == (1001, 701)
    assert 100 <= picture.width <= 251
    # the whole picture is what other callers get
    assert decode(data, decoding=Decoding.fast).size == (1001, 701)


@pytest.mark.parametrize("library", ["simplejpeg", "cykooz_resizer"])
def test_without_a_library_pillow_does_its_work(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert accelerated.missing_libraries() == []
    monkeypatch.setitem(sys.modules, library, None)
    accelerated._library.cache_clear()
    try:
        picture = decode(PHOTO)
        found = to_input(picture, compute_geometry(picture), (40, 40))
        (line,) = accelerated.missing_libraries()
    finally:
        accelerated._library.cache_clear()
    assert library in line
    expected = by_pillow(PHOTO)
    assert np.array_equal(np.asarray(picture), np.asarray(expected))
    assert difference(found, np.asarray(expected.resize((40, 40), Image.Resampling.BILINEAR))) <= 1


@dataclass(frozen=True)
class Member:
    """A part of a file, as an archive's member is."""

    path: Path
    offset: int
    size: int

    def open(self) -> BinaryIO:
        return io.BytesIO(self.path.read_bytes()[self.offset : self.offset + self.size])


@pytest.mark.parametrize("timed", [False, True])
@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_what_opens_itself_is_read_like_a_file(tmp_path: Path, timed: bool, kind: str) -> None:
    data = encoded(NOISE, kind)
    (tmp_path / "archive").write_bytes(b"x" * 100 + data + b"y" * 50)
    member = Member(tmp_path / "archive", 100, len(data))
    clock = StageTimer() if timed else NO_OP_TIMER
    assert np.array_equal(np.asarray(decode(member, open_file=timed_open(clock))), pixels(data))
    assert code_of(Member(tmp_path / "gone", 0, 9)) == "not_found"
    assert code_of(Member(tmp_path / "archive", 0, 0)) == "empty_file"


TRANSPOSITIONS = {
    1: None,
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    # stored as the camera was held: the inverse of what the viewer has to do
    6: Image.Transpose.ROTATE_90,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_270,
}


@pytest.mark.parametrize("orientation", TRANSPOSITIONS)
@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_every_exif_orientation_shows_the_same_picture(orientation: int, kind: str) -> None:
    upright = Image.fromarray(PIXELS)
    transposition = TRANSPOSITIONS[orientation]
    stored = upright if transposition is None else upright.transpose(transposition)
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    assert np.array_equal(pixels(encoded(stored, kind, exif=exif)), PIXELS)


@pytest.mark.data
@pytest.mark.parametrize(
    ("reference", "others", "size"),
    [
        ("python-pillow-pillow__hopper.jpg", "python-pillow-pillow__hopper_orientation_*.jpg", (128, 128)),
        ("recurser-exif-orientation-examples__Portrait_1.jpg", "recurser-*__Portrait_[368].jpg", (1200, 1800)),
    ],
)
def test_real_oriented_files_render_alike(odd_images: Path, reference: str, others: str, size: tuple[int, int]) -> None:
    upright = pixels(odd_images / f"exif__{reference}").astype(int)
    found = sorted(odd_images.glob(f"exif__{others}"))
    assert len(found) >= 3
    for path in found:
        image = decode(path)
        assert image.size == size
        # each was compressed for itself
        assert np.abs(np.asarray(image) - upright).mean() < 8, path


def test_a_picture_with_damaged_exif_is_shown_as_it_is_stored() -> None:
    stored = encoded(Image.fromarray(PIXELS), exif=b"Exif\0\0II*\0\x08\0\0\0\xff\xff not a directory")
    assert np.array_equal(pixels(stored), PIXELS)


def _palette(transparent: int | bytes) -> bytes:
    image = Image.new("P", (2, 1))
    image.putpalette([200, 10, 20, 30, 220, 40])
    image.putdata([0, 1])
    return encoded(image, transparency=transparent)


def _frames() -> bytes:
    red, blue = Image.new("RGB", (2, 1), (255, 0, 0)), Image.new("RGB", (2, 1), (0, 0, 255))
    return encoded(red, "GIF", save_all=True, append_images=[blue])


def _grey16(*values: int) -> bytes:
    return b"\0" + struct.pack(f">{len(values)}H", *values)


# what is stored, and the two pixels that a viewer shows
COLOURS: dict[str, tuple[Callable[[], bytes], list[tuple[int, int, int]]]] = {
    "grey": (lambda: encoded(Image.fromarray(np.array([[7, 90]], np.uint8))), [(7, 7, 7), (90, 90, 90)]),
    "one bit": (
        lambda: encoded(Image.fromarray(np.array([[0, 255]], np.uint8)).convert("1")),
        [(0, 0, 0), (255, 255, 255)],
    ),
    "CMYK": (lambda: encoded(Image.new("CMYK", (2, 1), (0, 255, 255, 0)), "TIFF"), [(255, 0, 0)] * 2),
    "16-bit grey rounds": (
        lambda: png(4, 1, 16, 0, _grey16(128, 129, 100 * 257, 65535)),
        [(0, 0, 0), (1, 1, 1), (100, 100, 100), (255, 255, 255)],
    ),
    "16-bit grey, one value transparent": (
        lambda: png(2, 1, 16, 0, _grey16(1000, 2570), tRNS=struct.pack(">H", 1000)),
        [(255, 255, 255), (10, 10, 10)],
    ),
    "16-bit RGB keeps the upper byte": (
        lambda: png(2, 1, 16, 2, _grey16(65535, 0, 256, 511, 512, 513)),
        [(255, 0, 1), (1, 2, 2)],
    ),
    "palette": (lambda: _palette(b"\xff\xff"), [(200, 10, 20), (30, 220, 40)]),
    "palette, one index transparent": (lambda: _palette(0), [(255, 255, 255), (30, 220, 40)]),
    "palette, one index half transparent": (lambda: _palette(b"\xff\x80"), [(200, 10, 20), (142, 237, 147)]),
    "grey with alpha": (
        lambda: encoded(Image.fromarray(np.array([[[0, 0], [50, 255]]], np.uint8), "LA")),
        [(255, 255, 255), (50, 50, 50)],
    ),
    "RGBA over white": (
        lambda: encoded(Image.fromarray(np.array([[[0, 0, 0, 51], [9, 8, 7, 255]]], np.uint8), "RGBA")),
        [(204, 204, 204), (9, 8, 7)],
    ),
    "RGB with a transparent colour": (
        lambda: png(2, 1, 8, 2, b"\0\x01\x02\x03\x0a\x0b\x0c", tRNS=struct.pack(">3H", 1, 2, 3)),
        [(255, 255, 255), (10, 11, 12)],
    ),
    "first frame of an animation": (_frames, [(255, 0, 0)] * 2),
}


@pytest.mark.parametrize("name", COLOURS)
def test_colours_are_a_viewers(name: str) -> None:
    build, expected = COLOURS[name]
    image = decode(build())
    assert image.mode == "RGB"
    assert [tuple(pixel) for pixel in np.asarray(image)[0]] == expected


@pytest.mark.parametrize("mode", ["La", "RGBa", "PA", "RGBX", "HSV", "YCbCr", "I;16B"])
def test_every_mode_that_pillow_hands_out_becomes_rgb(mode: str) -> None:
    assert decode(Image.new(mode, (3, 2))).mode == "RGB"


@pytest.mark.data
def test_lab_looks_like_the_same_picture_in_rgb(odd_images: Path) -> None:
    lab = pixels(odd_images / "colour__python-pillow-pillow__hopper.Lab.tif").astype(int)
    rgb = pixels(odd_images / "exif__python-pillow-pillow__hopper.jpg").astype(int)
    assert np.abs(lab - rgb).mean() < 8


@pytest.mark.parametrize(
    ("source", "shape"),
    [
        (PIXELS, (5, 7, 3)),
        (PIXELS[:, ::2], (5, 4, 3)),
        (PIXELS[..., 0], (5, 7, 3)),
        (Image.fromarray(PIXELS), (5, 7, 3)),
        (encoded(Image.fromarray(PIXELS)), (5, 7, 3)),
    ],
    ids=["array", "strided array", "grey array", "PIL image", "bytes"],
)
def test_sources_other_than_paths_give_their_pixels(source: object, shape: tuple[int, ...]) -> None:
    found = pixels(source)
    assert found.shape == shape
    assert found[0, 0, 0] == PIXELS[0, 0, 0]
    assert found[-1, 0, 0] == PIXELS[-1, 0, 0]


def test_a_pil_image_is_oriented_like_its_file_and_stays_as_it_was(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    path = tmp_path / "a.png"
    Image.fromarray(PIXELS).save(path, exif=exif)
    with Image.open(path) as image:
        assert np.array_equal(pixels(image), pixels(path))
    image = Image.new("RGBA", (3, 2), (1, 2, 3, 0))
    decode(image)
    assert (image.mode, image.getpixel((0, 0))) == ("RGBA", (1, 2, 3, 0))


NOISE = Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8))
PHOTO = encoded(NOISE, "JPEG")
BAD_BYTES = {
    "zero bytes": (b"", "empty_file"),
    "text": (b"not an image at all", "not_an_image"),
    "zeros": (bytes(4096), "not_an_image"),
    "a JPEG cut in half": (PHOTO[: len(PHOTO) // 2], "truncated_image"),
    "a PNG cut in half": (encoded(NOISE)[:6000], "truncated_image"),
    "floats": (encoded(Image.new("F", (4, 4), 0.5), "TIFF"), "unsupported_image"),
    "beyond 16 bits": (encoded(Image.new("I", (4, 4), 70_000), "TIFF"), "unsupported_image"),
    "negative": (encoded(Image.new("I", (4, 4), -1), "TIFF"), "unsupported_image"),
    # Pillow would start Ghostscript on it
    "EPS": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n%%EOF\n", "unsupported_image"),
}


@pytest.mark.parametrize("name", BAD_BYTES)
def test_bad_bytes_have_their_code(name: str) -> None:
    data, expected = BAD_BYTES[name]
    assert code_of(data) == expected


@pytest.mark.parametrize(
    "array",
    [
        np.zeros((4, 4, 3), np.float32),
        np.zeros((4, 4, 4), np.uint8),
        np.zeros((3, 4, 4), np.uint8),
        np.zeros((0, 4, 3), np.uint8),
        np.zeros(4, np.uint8),
        Image.new("RGB", (0, 3)),
    ],
    ids=["float", "four channels", "channels first", "no rows", "one dimension", "PIL image without pixels"],
)
def test_arrays_that_are_no_images_are_refused(array: np.ndarray) -> None:
    assert code_of(array) == "unsupported_image"


def huge_file(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 40)  # sparse: more than any memory, and no disk


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    ("create", "code"),
    [
        (lambda path: None, "not_found"),
        (lambda path: path.mkdir(), "not_a_file"),
        (lambda path: path.symlink_to(path.with_name("gone.jpg")), "not_found"),
        (lambda path: path.symlink_to(path), "unreadable"),
        (os.mkfifo, "not_a_file"),
        (huge_file, "not_an_image"),
    ],
    ids=["missing", "folder", "dangling link", "link to itself", "named pipe", "huge file"],
)
def test_what_is_no_image_file_has_its_code(tmp_path: Path, create: Callable[[Path], object], code: str) -> None:
    create(tmp_path / "a.jpg")

    assert code_of(tmp_path / "a.jpg") == code


def test_a_name_with_a_null_byte_has_its_code() -> None:
    assert code_of("a\0.jpg") == "unreadable"


def test_a_file_without_permission_has_its_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.jpg"
    path.write_bytes(PHOTO)

    # the superuser may read everything, so the refusal is put in by hand
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    assert code_of(path) == "unreadable"


def test_an_image_over_the_limit_is_refused_before_its_pixels_are_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    assert decode(encoded(Image.new("RGB", (10, 10))), max_pixels=100).size == (10, 10)
    assert code_of(Image.new("RGB", (10, 11)), max_pixels=109) == "too_many_pixels"
    data = encoded(Image.new("RGB", (10, 11)))

    def load(_: Image.Image) -> None:
        raise AssertionError("decoded")

    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", load)
    assert code_of(data, max_pixels=109) == "too_many_pixels"


def test_truncated_images_are_refused_even_if_another_library_wanted_them() -> None:
    from PIL import ImageFile

    assert not ImageFile.LOAD_TRUNCATED_IMAGES


# these claim more than 100 megapixels
BOMBS = {
    "max_size.jpg": "too_many_pixels",
    "Bad_reallybig.bmp": "too_many_pixels",
    "decompression_bomb.gif": "too_many_pixels",
    "decompression_bomb.ico": "too_many_pixels",
    "png_decompression_dos.png": "corrupt_image",
}
MEASURE = """
import re, sys
from opal_deploy.errors import ImageError
from opal_deploy.preprocess.decode import decode

def peak():
    # not getrusage: what it tells of a child includes the process that started it
    return int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])

before = peak()
for path in sys.argv[1:]:
    try:
        decode(path)
    except ImageError as error:
        print(error.code)
print(peak() - before)
"""


@pytest.mark.data
def test_bombs_cost_no_memory(odd_images: Path) -> None:
    paths = [str(*odd_images.glob(f"size__*__{name}")) for name in BOMBS]
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", MEASURE, *paths], capture_output=True, text=True)
    *codes, kilobytes = done.stdout.split()
    assert codes == list(BOMBS.values())
    assert int(kilobytes) < 100_000


KNOWN_CODES = {
    "not_found", "unreadable", "not_a_file", "empty_file", "not_an_image", "truncated_image", "corrupt_image",
    "too_many_pixels", "unsupported_image",
}  # fmt: skip


@pytest.mark.data
def test_every_odd_file_decodes_or_has_a_known_code_whatever_decodes_it(odd_images: Path) -> None:
    def outcome(path: Path, decoding: Decoding) -> tuple[str, object]:
        try:
            image = decode(path, decoding=decoding)
        except ImageError as error:
            return error.code, str(error).split(" object at ")[0]
        return image.mode, image.tobytes()

    paths = [path for path in sorted(odd_images.iterdir()) if path.name != "manifest.tsv"]
    assert len(paths) == 149
    found = {path: outcome(path, Decoding.exact) for path in paths}
    codes = [code for code, _ in found.values()]
    assert set(codes) <= KNOWN_CODES | {"RGB"}
    assert codes.count("RGB") > 90, "Pillow itself decodes about a hundred of them"
    for decoding in (Decoding.default, Decoding.fast):
        assert [path.name for path in paths if outcome(path, decoding) != found[path]] == []


@pytest.mark.data
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("broken__image-rs-jpeg-decoder__empty.jpg", "empty_file"),
        ("broken__libvips-libvips__truncated.jpg", "truncated_image"),
        ("broken__libvips-libvips__truncated.gif", "truncated_image"),
        ("broken__python-pillow-pillow__broken.png", "not_an_image"),
        ("broken__python-pillow-pillow__broken_data_stream.png", "corrupt_image"),
        ("broken__python-pillow-pillow__badbitcount.bmp", "corrupt_image"),
        ("broken__python-pillow-pillow__seek_too_large.tif", "corrupt_image"),
        ("frames__python-pillow-pillow__chunk_no_fctl.png", "corrupt_image"),
        ("mislabelled__libvips-libvips__blankpage.svg", "not_an_image"),
        ("colour__python-pillow-pillow__10ct_32bit_128.tiff", "unsupported_image"),
    ],
)
def test_real_broken_files_have_their_code(odd_images: Path, name: str, expected: str) -> None:
    assert code_of(odd_images / name) == expected
