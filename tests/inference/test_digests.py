"""Records say which bytes they are about: the file's sha256, taken where it is read."""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from opal_deploy.inference.decoding import prepare
from opal_deploy.inference.executor import predict_stream
from opal_deploy.inference.sources.discovery import discover
from opal_deploy.inference.sources.items import Skipped
from opal_deploy.inference.types import InferenceOptions, Request
from opal_deploy.records.record import Record


def records(requests: list[Request], session: object, **options: object) -> list[Record]:
    made = InferenceOptions(model_sha256="ab" * 32, **options)  # type: ignore[arg-type]
    return [result.record for result in predict_stream(iter(requests), [session], made)]  # type: ignore[list-item]


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    path = tmp_path / "a.png"
    Image.new("RGB", (40, 30), (9, 99, 200)).save(path)
    return path


@pytest.mark.parametrize("isolate", [False, True])
def test_a_file_and_its_bytes_have_the_files_digest(picture: Path, bright_session: Callable, isolate: bool) -> None:
    broken, empty = picture.with_name("broken.png"), picture.with_name("empty.png")
    broken.write_bytes(picture.read_bytes()[:60])
    empty.touch()
    sources = [picture, str(picture), picture.read_bytes(), broken, empty]
    found = records([Request("a", source) for source in sources], bright_session(), isolate=isolate)
    assert [record["status"] for record in found] == ["ok"] * 3 + ["error"] * 2
    assert [record["file_sha256"] for record in found] == [sha256(picture)] * 3 + [sha256(broken), sha256(empty)]
    assert {record["model_sha256"] for record in found} == {"ab" * 32}


@pytest.mark.parametrize("isolate", [False, True])
def test_what_has_no_file_or_none_that_can_be_read_has_no_digest(
    tmp_path: Path, bright_session: Callable, isolate: bool
) -> None:
    sources = [Image.new("RGB", (9, 9)), np.zeros((9, 9, 3), np.uint8), tmp_path / "none.jpg", tmp_path]
    found = records([Request("a", source) for source in sources], bright_session(), isolate=isolate)
    assert [record["file_sha256"] for record in found] == [None] * 4
    assert [record.get("error", {}).get("code") for record in found] == [None, None, "not_found", "not_a_file"]


def test_a_member_of_an_archive_has_the_members_digest(picture: Path, bright_session: Callable) -> None:
    archive = picture.with_name("all.zip")
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as stream:
        stream.write(picture, "dir/a.png")
    (item,) = discover([str(archive)], Skipped())
    (record,) = records([Request(item.name, item.source)], bright_session())
    assert record["file_sha256"] == sha256(picture)


def test_digests_stand_before_what_was_found(picture: Path, bright_session: Callable) -> None:
    (record,) = records([Request("a", picture)], bright_session())
    assert list(record)[:5] == ["schema", "image", "status", "file_sha256", "model_sha256"]


def test_a_large_picture_is_hashed_too_and_what_is_far_too_long_is_not(
    picture: Path, bright_session: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = picture.stat().st_size
    monkeypatch.setattr(prepare, "MAX_READ_BYTES", size - 1)
    monkeypatch.setattr(prepare, "MAX_HASHED_BYTES", size)
    (record,) = records([Request("a", picture)], bright_session())
    assert record["file_sha256"] == sha256(picture)
    with picture.open("ab") as stream:
        stream.write(b"\0")
    (record,) = records([Request("a", picture)], bright_session())
    assert (record["status"], record["file_sha256"]) == ("ok", None)


def test_a_file_of_any_length_that_is_no_picture_is_not_read(tmp_path: Path, bright_session: Callable) -> None:
    path = tmp_path / "huge.jpg"
    with path.open("wb") as stream:
        # sparse: reading it would take hours
        stream.truncate(1 << 42)
    (record,) = records([Request("a", path)], bright_session())
    assert (record["error"]["code"], record["file_sha256"]) == ("not_an_image", None)
