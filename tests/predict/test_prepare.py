"""Preparing one image: the digest of its file, and reading that is timed apart from decoding."""

import hashlib
import os
import zipfile

import numpy as np
import pytest
from PIL import Image

from opal_deploy.errors import ImageError
from opal_deploy.predict import prepare
from opal_deploy.predict.prepare import content_sha256, timed_open
from opal_deploy.preprocess.decode import decode
from opal_deploy.sources.discovery import discover
from opal_deploy.sources.image import InputImage
from opal_deploy.sources.items import Skipped
from opal_deploy.timing import StageTimer
from tests.bright import BrightSession, code, predict, save


def sha256(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def image(tmp_path):
    return save(tmp_path / "a.png", (40, 30))


@pytest.mark.parametrize("isolate", [False, True])
def test_records_hold_the_digest_of_the_file_where_there_is_one(image, isolate):
    folder = image.parent
    broken, empty = folder / "broken.png", folder / "empty.png"
    broken.write_bytes(image.read_bytes()[:60])
    empty.touch()
    with zipfile.ZipFile(folder / "all.zip", "w", zipfile.ZIP_DEFLATED) as stream:
        stream.write(image, "dir/a.png")
    (member,) = discover([str(folder / "all.zip")], Skipped())
    hashed = [image, str(image), image.read_bytes(), member.source, broken, empty]
    sources = [*hashed, Image.new("RGB", (9, 9)), np.zeros((9, 9, 3), np.uint8), folder / "none.jpg", folder]
    requests = [InputImage("a", source) for source in sources]
    found = predict(requests, BrightSession(), isolate=isolate, model_sha256="ab" * 32)
    digest = sha256(image)
    assert [record["image_sha256"] for record in found] == [digest] * 4 + [sha256(broken), sha256(empty)] + [None] * 4
    codes = [None] * 4 + ["truncated_image", "empty_file", None, None, "not_found", "not_a_file"]
    assert [code(record) for record in found] == codes
    for record in found:
        assert list(record)[:5] == ["schema", "image", "status", "image_sha256", "model_sha256"]
        assert record["model_sha256"] == "ab" * 32
    assert content_sha256(image) == content_sha256(str(image)) == content_sha256(image.read_bytes()) == digest
    with pytest.raises(ImageError, match="no such file"):
        content_sha256(folder / "none.jpg")


def test_a_large_image_is_hashed_too_and_what_is_far_too_long_is_not(image, monkeypatch):
    size = image.stat().st_size
    monkeypatch.setattr(prepare, "MAX_READ_BYTES", size - 1)
    monkeypatch.setattr(prepare, "MAX_HASHED_BYTES", size)
    (record,) = predict([image], BrightSession())
    assert record["image_sha256"] == sha256(image)
    with image.open("ab") as stream:
        stream.write(b"\0")
    (record,) = predict([image], BrightSession())
    assert (record["status"], record["image_sha256"]) == ("ok", None)


@pytest.mark.timeout(20)
def test_a_file_of_any_length_that_is_no_image_is_not_read_timed_or_not(tmp_path):
    path = tmp_path / "huge.jpg"
    with path.open("wb") as stream:
        # sparse: reading it would take hours
        stream.truncate(1 << 42)
    (record,) = predict([path], BrightSession())
    assert (code(record), record["image_sha256"]) == ("not_an_image", None)
    with pytest.raises(ImageError) as caught:
        decode(path, open_file=timed_open(StageTimer()))
    assert caught.value.code == "not_an_image"


@pytest.mark.parametrize("name", ["a.jpg", "a.png", "a.tif", "a.gif", "a.webp", "a.bmp"])
def test_a_timed_file_has_the_pixels_of_an_untimed_one_and_is_closed(tmp_path, name):
    noise = np.random.default_rng(0).integers(0, 255, (300, 400, 3), np.uint8)
    compression = {"compression": "tiff_lzw"} if name.endswith("tif") else {}
    Image.fromarray(noise).save(tmp_path / name, **compression)
    timer = StageTimer()
    timed = decode(tmp_path / name, open_file=timed_open(timer))
    assert timed.tobytes() == decode(tmp_path / name).tobytes()
    assert timer.read().stages[0].stage == "read"
    stream = timed_open(timer)(tmp_path / name)
    number = stream.fileno()
    stream.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(number)
