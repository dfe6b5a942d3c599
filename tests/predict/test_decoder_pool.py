"""The decoder pool: the same images from threads and processes, and a decoder that fails costs its image only."""

import os
from concurrent.futures import CancelledError
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from opal_deploy.artifact.preprocessing import InputForm
from opal_deploy.errors import ImageError
from opal_deploy.predict.decoder_pool import DecoderPool
from opal_deploy.predict.prepare import InferenceOptions
from opal_deploy.preprocess.decode import Decoding
from opal_deploy.sources.image import FrameInfo, InputImage
from opal_deploy.timing import NO_OP_TIMER

INPUT_SIZE = (32, 48)

# a Pillow plugin in the worker processes: a file's own text says how its decoder misbehaves
PLUGIN = """
import os, pathlib, signal, sys, time
from PIL import Image

def misbehave(file, name):
    _, action, path = file.read().decode().split(" ", 2)
    path = pathlib.Path(path)
    if action == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if action == "crash-once" and not path.exists():
        path.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if action == "hang":
        time.sleep(600)
    if action == "modules":
        path.write_text(" ".join(sys.modules))
    return Image.new("RGB", (90, 70))

Image.register_open("MISBEHAVING", misbehave, lambda prefix: prefix.startswith(b"MISBEHAVING "))
"""


@pytest.fixture
def misbehaving(tmp_path, monkeypatch):
    """Writes a file whose decoder crashes, hangs, ..., in worker processes."""
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules/sitecustomize.py").write_text(PLUGIN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "modules"), prepend=os.pathsep)

    def write(action):
        path = tmp_path / f"{action}.jpg"
        path.write_text(f"MISBEHAVING {action} {path.with_suffix('.txt')}")
        return path

    return write


def photograph(path, size=(90, 70)):
    coarse = np.random.default_rng(size[0]).integers(0, 255, (5, 6, 3), np.uint8)
    Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC).save(path, "JPEG", quality=95)
    return path


@pytest.fixture
def image(tmp_path):
    return photograph(tmp_path / "a.jpg")


def open_pool(rows=1, **options):
    options = {"workers": 1, "isolate": True, **options}
    return DecoderPool(InferenceOptions(**options), InputForm(*INPUT_SIZE), NO_OP_TIMER, slots=160, rows=rows)


def prepare_all(pool, images):
    """Prepare images in one batch after the other, and return them with their pixels."""
    requests = [image if isinstance(image, InputImage) else InputImage(str(image), image) for image in images]
    rows, prepared = pool.pixels.shape[1], []
    with pool:
        for batch in [pool.submit(requests[start : start + rows]) for start in range(0, len(requests), rows)]:
            done = batch.result()
            prepared += [
                replace(image, pixels=pixels.copy()) for image, pixels in zip(done.images, done.pixels, strict=False)
            ]
            done.release()
    return prepared


def code(prepared):
    return None if prepared.error is None else prepared.error.code


@pytest.mark.parametrize(
    ("decoding", "keep"), [(Decoding.default, False), (Decoding.exact, True), (Decoding.fast, True)]
)
def test_processes_give_what_threads_give(tmp_path, image, decoding, keep):
    (tmp_path / "broken.jpg").write_bytes(b"no image")
    with Image.open(image) as opened:
        opened.load()
    requests = [
        *(InputImage("kind", source) for source in (image, str(image), image.read_bytes(), opened, np.asarray(opened))),
        *(InputImage("size", photograph(tmp_path / f"{n}.jpg", (60 + 40 * n, 50 + 31 * n))) for n in range(4)),
        InputImage("reduced", photograph(tmp_path / "large.jpg", (5000, 50))),
        InputImage("crop", image, (10, 5, 60, 50)),
        InputImage("frame", np.asarray(opened), frame=FrameInfo(Path("a.mp4"), 3, 0.1, "0" * 64)),
        InputImage("no box", image, error=ImageError("no_box", "none is listed")),
        InputImage("broken", tmp_path / "broken.jpg"),
        InputImage("gone", tmp_path / "gone.jpg"),
        InputImage("too large", photograph(tmp_path / "huge.jpg", (1800, 1400))),
    ]
    options = {"workers": 2, "keep_images": keep, "decode": decoding, "max_pixels": 2_400_000}
    prepared = prepare_all(open_pool(**options, rows=9), requests)
    for one, other in zip(prepared, prepare_all(open_pool(**options, isolate=False), requests), strict=True):
        assert (one.input, one.geometry, one.image_sha256, repr(one.error)) == (
            other.input, other.geometry, other.image_sha256, repr(other.error),
        )  # fmt: skip
        assert np.array_equal(one.pixels, other.pixels), one.input.name
        assert (one.image is None) == (other.image is None)
        assert one.image is None or np.array_equal(one.image, other.image)
    assert [code(one) for one in prepared] == [None] * 12 + ["no_box", "not_an_image", "not_found", "too_many_pixels"]
    sizes = [image.image and image.image.size for image in (prepared[0], prepared[9])]
    assert sizes == ([(90, 70), (4096, 40)] if keep else [None, None])
    assert prepared[10].geometry.crop == (10, 5, 60, 50)
    assert prepared[11].image_sha256 == "0" * 64
    for entry in prepared[:5]:
        assert np.abs(entry.pixels.astype(int) - prepared[0].pixels).max() <= 1


@pytest.mark.parametrize("rows", [1, 8])
def test_a_decoder_that_crashes_costs_its_image_only(image, misbehaving, rows):
    crash, once = misbehaving("crash"), misbehaving("crash-once")
    paths = [image, crash, image, image, once, image, crash, image]
    prepared = prepare_all(open_pool(workers=2, rows=rows), paths)
    assert [code(one) for one in prepared] == ["decoder_crashed" if path == crash else None for path in paths]
    assert prepared[1].input.source == crash
    assert "SIGSEGV" in str(prepared[1].error)


@pytest.mark.parametrize("rows", [1, 3])
def test_a_decoder_that_hangs_costs_its_image_only(image, misbehaving, rows):
    prepared = prepare_all(open_pool(decode_timeout=1.5, rows=rows), [image, misbehaving("hang"), image])
    assert [code(one) for one in prepared] == [None, "decode_timeout", None]
    assert "1.5 s" in str(prepared[1].error)


def test_processes_import_no_runtime(misbehaving):
    assert code(prepare_all(open_pool(), [misbehaving("modules")])[0]) is None
    modules = misbehaving("modules").with_suffix(".txt").read_text().split()
    assert "opal_deploy.worker_pool" in modules
    assert {"torch", "onnxruntime", "typer", "rich"}.isdisjoint(modules)


@pytest.mark.timeout(60)
def test_closing_drops_queued_images(misbehaving):
    with open_pool(decode_timeout=1) as pool:
        batches = [pool.submit([InputImage("a", misbehaving("hang"))]) for _ in range(50)]
    with pytest.raises(CancelledError):
        batches[-1].result()
