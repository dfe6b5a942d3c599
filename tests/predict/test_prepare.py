"""Preparing images: the digest of a file, long files, and files over a network."""

import hashlib
import io
import threading
import zipfile

import numpy as np
import pytest
from PIL import Image

from opal_deploy.errors import ImageError
from opal_deploy.predict import prepare
from opal_deploy.predict.prepare import read_remote
from opal_deploy.remote import FileFingerprint, RemoteFile
from opal_deploy.sources.discovery import discover
from opal_deploy.sources.image import InputImage, Skipped
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


def test_images_over_a_network_are_requested_several_at_a_time(monkeypatch):
    # none is answered before two are requested
    together = threading.Barrier(2)

    def open_file(file):
        together.wait(30)
        if file.name == "1":
            raise ImageError("not_found", "no such object")
        return io.BytesIO(file.name.encode())

    monkeypatch.setattr(RemoteFile, "open", open_file)
    remote = [RemoteFile(f"s3://b/{n}", f"s3://b/{n}", FileFingerprint(1, 0)) for n in range(4)]
    images = [InputImage(None, source) for source in (*remote, b"in memory")]
    found = [image.error.code if image.error else image.source for image in read_remote(images)]
    assert found == [b"0", "not_found", b"2", b"3", b"in memory"]
