"""Preparing one image: the digest of its file, and reading that is timed apart from decoding."""

from __future__ import annotations

import hashlib
import os
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from opal_deploy.errors import ImageError
from opal_deploy.inference.decoding import prepare
from opal_deploy.inference.decoding.prepare import timed_open
from opal_deploy.inference.executor import predict_stream
from opal_deploy.inference.sources.discovery import discover
from opal_deploy.inference.sources.items import Skipped
from opal_deploy.inference.timing import StageTimer
from opal_deploy.inference.types import InferenceOptions, Request
from opal_deploy.preprocess.decode import decode
from opal_deploy.records.record import Record


def predict(requests: list[Request], session: object, **options: object) -> list[Record]:
    inference = InferenceOptions(model_sha256="ab" * 32, **options)  # type: ignore[arg-type]
    return [result.record for result in predict_stream(iter(requests), [session], inference)]  # type: ignore[list-item]


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def image(tmp_path: Path) -> Path:
    path = tmp_path / "a.png"
    Image.new("RGB", (40, 30), (9, 99, 200)).save(path)
    return path


@pytest.mark.parametrize("isolate", [False, True])
def test_records_hold_the_digest_of_the_file_where_there_is_one(
    image: Path, bright_session: Callable, isolate: bool
) -> None:
    folder = image.parent
    broken, empty = folder / "broken.png", folder / "empty.png"
    broken.write_bytes(image.read_bytes()[:60])
    empty.touch()
    with zipfile.ZipFile(folder / "all.zip", "w", zipfile.ZIP_DEFLATED) as stream:
        stream.write(image, "dir/a.png")
    (member,) = discover([str(folder / "all.zip")], Skipped())
    hashed = [image, str(image), image.read_bytes(), member.source, broken, empty]
    sources = [*hashed, Image.new("RGB", (9, 9)), np.zeros((9, 9, 3), np.uint8), folder / "none.jpg", folder]
    found = predict([Request("a", source) for source in sources], bright_session(), isolate=isolate)
    digest = sha256(image)
    assert [record["file_sha256"] for record in found] == [digest] * 4 + [sha256(broken), sha256(empty)] + [None] * 4
    assert [record.get("error", {}).get("code") for record in found] == [
        None, None, None, None, "truncated_image", "empty_file", None, None, "not_found", "not_a_file",
    ]  # fmt: skip
    for record in found:
        assert list(record)[:5] == ["schema", "image", "status", "file_sha256", "model_sha256"]
        assert record["model_sha256"] == "ab" * 32


def test_a_large_image_is_hashed_too_and_what_is_far_too_long_is_not(
    image: Path, bright_session: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = image.stat().st_size
    monkeypatch.setattr(prepare, "MAX_READ_BYTES", size - 1)
    monkeypatch.setattr(prepare, "MAX_HASHED_BYTES", size)
    (record,) = predict([Request("a", image)], bright_session())
    assert record["file_sha256"] == sha256(image)
    with image.open("ab") as stream:
        stream.write(b"\0")
    (record,) = predict([Request("a", image)], bright_session())
    assert (record["status"], record["file_sha256"]) == ("ok", None)


def test_a_file_of_any_length_that_is_no_image_is_not_read(tmp_path: Path, bright_session: Callable) -> None:
    path = tmp_path / "huge.jpg"
    with path.open("wb") as stream:
        # sparse: reading it would take hours
        stream.truncate(1 << 42)
    (record,) = predict([Request("a", path)], bright_session())
    assert (record["error"]["code"], record["file_sha256"]) == ("not_an_image", None)


# ---- timed files


@pytest.mark.parametrize("name", ["a.jpg", "a.png", "a.tif", "a.gif", "a.webp", "a.bmp"])
def test_a_timed_file_has_the_pixels_of_an_untimed_one(tmp_path: Path, name: str) -> None:
    noise = np.random.default_rng(0).integers(0, 255, (300, 400, 3), np.uint8)
    compression = {"compression": "tiff_lzw"} if name.endswith("tif") else {}
    Image.fromarray(noise).save(tmp_path / name, **compression)
    timer = StageTimer()

    timed = decode(tmp_path / name, open_file=timed_open(timer))

    assert timed.tobytes() == decode(tmp_path / name).tobytes()
    assert timer.read().stages[0].stage == "read"


@pytest.mark.timeout(20)
def test_a_timed_file_is_not_read_as_a_whole(tmp_path: Path) -> None:
    with (tmp_path / "huge.jpg").open("wb") as stream:
        # sparse: more than any memory, and no disk
        stream.truncate(1 << 40)
    with pytest.raises(ImageError) as caught:
        decode(tmp_path / "huge.jpg", open_file=timed_open(StageTimer()))
    assert caught.value.code == "not_an_image"


def test_a_timed_file_is_closed(image: Path) -> None:
    stream = timed_open(StageTimer())(image)
    number = stream.fileno()
    stream.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(number)
