"""The GPU's decode path, on a machine without one: the real codec on the CPU, the real resize, what is refused."""

import io
import re
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import ExifTags, Image, ImageOps

from opal_deploy.errors import MissingExtra, UsageError
from opal_deploy.preprocess.decode import MAX_PIXELS, decode_for_input
from opal_deploy.preprocess.geometry import Geometry
from opal_deploy.preprocess.gpu import GpuDecoder, open_gpu_decoders, resize
from opal_deploy.preprocess.jpeg_header import Jpeg, is_well_formed, read_header
from opal_deploy.preprocess.resize import to_input

pytest.importorskip("nvidia.nvimgcodec")
INPUT = (224, 224)


@pytest.fixture(scope="module")
def codec():
    return GpuDecoder("cpu")


def image(width=61, height=47, mode="RGB"):
    coarse = np.random.default_rng(width).integers(0, 255, (5, 6, 3), np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC).convert(mode)


def jpeg(pixels, orientation=None, kind="JPEG", **options):
    stream, exif = io.BytesIO(), Image.Exif()
    if orientation is not None:
        exif[ExifTags.Base.Orientation] = orientation
    pixels.save(stream, kind, exif=exif, **options)
    return stream.getvalue()


def header(data, box=None):
    return read_header(data, box, MAX_PIXELS)


def upright(data):
    with Image.open(io.BytesIO(data)) as stored:
        return ImageOps.exif_transpose(stored).convert("RGB")


def difference(actual, expected):
    return np.abs(np.asarray(actual).astype(int) - np.asarray(expected))


@pytest.mark.data
def test_photographs_are_within_a_count_of_the_default_path(codec, photographs):
    # a check that is too strict would leave the GPU idle, and nobody would notice
    assert all(is_well_formed(path.read_bytes()) for path in photographs)
    files = [header(path.read_bytes()) for path in photographs[::25]]
    inputs = codec.resize_to_inputs(codec.decode(files), [file.geometry for file in files], INPUT)
    assert (inputs.dtype, inputs.shape) == (np.uint8, (len(files), *INPUT, 3))
    for path, file, ours in zip(photographs[::25], files, inputs, strict=True):
        whole, geometry = decode_for_input(path, INPUT)
        assert file.geometry == geometry
        expected = to_input(whole, geometry, INPUT)
        assert difference(ours, expected).max() <= 1
        # a resize by another filter would be counts away nearly everywhere
        assert (ours == expected).mean() > 0.97


@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation_is_applied_as_pillow_does(codec, orientation):
    data = jpeg(image(), orientation, quality=95)
    file, expected = header(data), upright(data)
    assert (file.geometry.width, file.geometry.height) == expected.size
    np.testing.assert_array_equal(codec.decode([file])[0].numpy(), np.asarray(expected))


@pytest.mark.parametrize("size", [(500, 375), (31, 640), (224, 224), (100, 60), (1, 1), (900, 224), (224, 900)])
@pytest.mark.parametrize("target", [(224, 224), (48, 32), (7, 300)])
def test_resizing_is_pillows_within_a_count(size, target):
    noise = np.random.default_rng(1).integers(0, 256, (size[1], size[0], 3), np.uint8)
    expected = Image.fromarray(noise).resize(target[::-1], Image.Resampling.BILINEAR)
    resized = resize(torch.from_numpy(noise), target).numpy()
    assert resized.dtype == np.uint8
    assert difference(resized, expected).max() <= 1
    # at some ratios, such as these of small whole numbers, many values lie halfway between two counts
    assert difference(resized, expected).mean() < 0.25


def test_a_crop_is_of_the_oriented_image(codec):
    data = jpeg(image(60, 40), 6, quality=95)
    file = header(data, (3.0, 10.0, 30.0, 50.0))
    assert file.geometry == Geometry(40, 60, (3, 10, 30, 50))
    (ours,) = codec.resize_to_inputs(codec.decode([file]), [file.geometry], (16, 24))
    expected = upright(data).crop((3, 10, 30, 50)).resize((24, 16), Image.Resampling.BILINEAR)
    assert difference(ours, expected).max() <= 1


WHOLE = jpeg(image(200, 150), quality=90)
SCAN, FRAME = WHOLE.index(b"\xff\xda"), WHOLE.index(b"\xff\xc0")
LENGTH = int.from_bytes(WHOLE[FRAME + 2 : FRAME + 4])
LEFT_TO_THE_CPU = {
    "empty": b"",
    "text": b"not an image",
    "PNG": jpeg(image(), kind="PNG"),
    "ends early": jpeg(image())[:-40],
    "something after its end": jpeg(image()) + b"more",
    "CMYK": jpeg(image(mode="CMYK")),
    "only an end": b"\xff\xd9",
    "a header and an end": jpeg(image())[:30] + b"\xff\xd9",
    "components called R, G and B": jpeg(image(), keep_rgb=True),
    # damage that the codec might not notice
    "a marker in the scan": WHOLE[: SCAN + 400] + b"\xff\xc8" + WHOLE[SCAN + 402 :],
    "a shorter segment": WHOLE[: FRAME + 3] + bytes([LENGTH - 3]) + WHOLE[FRAME + 4 :],
    "two frames": WHOLE[:FRAME] + WHOLE[FRAME : FRAME + 2 + LENGTH] + WHOLE[FRAME:],
    "no scan": WHOLE[:SCAN] + b"\xff\xd9",
}


@pytest.mark.parametrize("data", LEFT_TO_THE_CPU.values(), ids=LEFT_TO_THE_CPU)
def test_all_but_plain_whole_jpeg_is_left_to_the_cpu(data):
    assert header(WHOLE) is not None
    assert header(data) is None


def test_pixel_limit_and_bad_boxes_are_left_to_the_cpu():
    data = jpeg(image(40, 30))
    assert read_header(data, None, 1200) is not None
    assert read_header(data, None, 1199) is None
    assert header(data, (50.0, 0.0, 60.0, 10.0)) is None
    assert header(data, (float("nan"), 0.0, 60.0, 10.0)) is None


DECODED = {
    "grey": jpeg(image(mode="L")),
    "progressive": jpeg(image(), progressive=True),
    "subsampled": jpeg(image(), subsampling=2),
    "unknown orientation": jpeg(image(), 99),
    "damaged EXIF": re.sub(rb"Exif\0\0(MM|II)", b"Exif\0\0XX", jpeg(image(), 6)),
}


@pytest.mark.parametrize("data", DECODED.values(), ids=DECODED)
def test_other_kinds_of_jpeg_are_decoded(codec, data):
    np.testing.assert_array_equal(codec.decode([header(data)])[0].numpy(), np.asarray(upright(data)))


def test_a_refused_file_costs_its_neighbours_nothing(codec):
    good = header(jpeg(image(), quality=90))
    # such a file is kept from the codec by its end; here it stands for whatever the codec does not take
    short = replace(good, data=good.data[: len(good.data) // 2])
    (alone,) = codec.decode([good])
    first, second, third = codec.decode([good, short, good])
    assert second is None
    assert torch.equal(first, alone)
    assert torch.equal(third, alone)


def test_an_image_of_another_size_than_its_header_is_refused(codec):
    assert codec.decode([Jpeg(jpeg(image(60, 40)), (61, 40), 1, Geometry.whole(61, 40))]) == [None]


@pytest.mark.timeout(20)
@pytest.mark.parametrize("filling", [b"\xff", b"\xff\xe0\0\x02", b"\xff\xe0\0\0", b"\xff\0", b"\xff\xff\0"])
def test_no_file_takes_long_to_look_at(filling):
    data = jpeg(image(), progressive=True)
    for place in (2, data.index(b"\xff\xda"), len(data) - 2):
        is_well_formed(data[:place] + filling * (20_000_000 // len(filling)) + data[place:])


def test_hundreds_of_scans_are_the_cpus_which_has_a_time_limit():
    data = jpeg(image(), progressive=True)
    last = data.rindex(b"\xff\xda")
    assert is_well_formed(data[:-2] + data[last:-2] * 50 + data[-2:])
    assert not is_well_formed(data[:-2] + data[last:-2] * 100 + data[-2:])


@pytest.mark.parametrize("options", [{"progressive": True}, {"restart_marker_blocks": 2}, {"optimize": True}])
def test_kinds_of_jpeg_that_are_well_formed(options):
    for mode in ("RGB", "L"):
        data = jpeg(image(120, 90, mode), **options)
        assert is_well_formed(data)
        assert is_well_formed(data.replace(b"\xff\xda", b"\xff\xfe\0\x05abc\xff\xda", 1)), "a comment"


def test_an_image_hundreds_of_inputs_long_is_left_to_the_cpu():
    data = jpeg(image(4000, 8))
    assert header(data).can_resize_to((32, 32))
    assert not header(data).can_resize_to((32, 31))
    assert header(data, (0.0, 0.0, 1000.0, 8.0)).can_resize_to((32, 31))


def test_rows_are_squashed_piece_by_piece_to_the_same_pixels(monkeypatch):
    noise = torch.from_numpy(np.random.default_rng(1).integers(0, 256, (90, 70, 3), np.uint8))
    whole = resize(noise, (32, 48))
    monkeypatch.setattr("opal_deploy.preprocess.gpu._MAX_FLOATS", 70 * 3 * 7)
    assert torch.equal(resize(noise, (32, 48)), whole)


@pytest.mark.parametrize(
    ("devices", "cuda", "message"),
    [
        pytest.param(["cuda:0"], "13.0", r"^there is no decoding on cuda:0: .*PyTorch.*; leave --decode out$",
                     marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")),
        (["cuda:0"], None, r"this PyTorch was built without CUDA; leave --decode out"),
        ([], "13.0", r"no GPU to decode on: the model runs on the CPU; leave --decode out"),
    ],
)  # fmt: skip
def test_without_a_usable_gpu_one_line_says_what_else_to_do(devices, cuda, message, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", cuda)
    with pytest.raises(UsageError, match=message):
        open_gpu_decoders(devices, 2, "leave --decode out")


@pytest.mark.parametrize("package", ["torch", "nvidia.nvimgcodec"])
def test_a_missing_package_names_its_extra(package, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtra, match=r"opal-deploy\[gpu-decode\]"):
        GpuDecoder("cpu")


@pytest.mark.parametrize("wrong", ["inverted", "BGR", "not turned", "not cropped"])
def test_a_device_that_decodes_wrongly_is_found_out_at_once(wrong, monkeypatch):
    decode, resize_to_inputs = GpuDecoder.decode, GpuDecoder.resize_to_inputs
    change = {
        "inverted": lambda t: 255 - t,
        "BGR": lambda t: t.flip(2),
        "not turned": lambda t: t.rot90().contiguous(),
        "not cropped": lambda t: t,
    }[wrong]
    monkeypatch.setattr(GpuDecoder, "decode", lambda self, files: [change(t) for t in decode(self, files)])
    if wrong == "not cropped":
        whole = [Geometry.whole(48, 64)]
        monkeypatch.setattr(GpuDecoder, "resize_to_inputs", lambda self, p, g, s: resize_to_inputs(self, p, whole, s))
    with pytest.raises(UsageError, match=r"no decoding on cpu: a test image is \d+ counts from Pillow's"):
        GpuDecoder("cpu")


@pytest.mark.parametrize("where", ["decode", "resize_to_inputs"])
def test_a_driver_that_fails_and_a_codec_that_decodes_nothing_are_one_line(where, monkeypatch):
    def fail(*_):
        raise RuntimeError("CUDA error: no kernel image is available\nlong story")

    monkeypatch.setattr(GpuDecoder, where, fail)
    with pytest.raises(UsageError, match=r"\Athere is no decoding on cpu: CUDA error: no kernel image is available\Z"):
        GpuDecoder("cpu")
    monkeypatch.setattr(GpuDecoder, "decode", lambda self, files: [None] * len(files))
    with pytest.raises(UsageError, match=r"nvImageCodec decodes nothing there; expected a GPU, its driver and nvJPEG"):
        GpuDecoder("cpu")


def test_nothing_is_printed_by_libraries_that_are_not_there():
    program = "from opal_deploy.preprocess.gpu import GpuDecoder; GpuDecoder('cpu')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_real_gpu_is_near_the_default_path():
    gpu = GpuDecoder("cuda:0")
    datas = [
        jpeg(image(500 + step, 375), orientation, quality=92, subsampling=subsampling)
        for step, orientation in enumerate(range(1, 9))
        for subsampling in (0, 2)
    ]
    files = [header(data) for data in datas]
    images = gpu.decode(files)
    assert all(decoded is not None and decoded.is_cuda for decoded in images)
    inputs = gpu.resize_to_inputs(images, [file.geometry for file in files], INPUT)
    for data, ours in zip(datas, inputs, strict=True):
        whole, geometry = decode_for_input(data, INPUT)
        expected = to_input(whole, geometry, INPUT)
        assert np.abs(ours.astype(int) - expected).max() <= 4
