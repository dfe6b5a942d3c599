"""The files of a run's sheets: their names, which go, and which records go with one that was lost."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from opal_deploy.errors import UsageError
from opal_deploy.inference.run.results import ResumePoint, load_resume_point
from opal_deploy.inference.run_files import SHEETS, remove_image_files, sheet_name
from opal_deploy.inference.types import Request
from opal_deploy.records.record import error_record

NAMES = ["a", "b", "c", "d"]


@pytest.mark.parametrize(
    ("index", "image", "name"),
    [
        (123, "x/name.jpg", "sheets/000123-name.jpg.png"),
        (20_001, "a b\n.png", "sheets/0002/020001-a_b_.png.png"),
        (0, None, "sheets/000000-image.png"),
        (1, "../..", "sheets/000001-image.png"),
    ],
)
def test_a_sheet_has_a_safe_name_of_its_own(index: int, image: str | None, name: str) -> None:
    assert sheet_name(index, image) == name


def test_sheets_from_a_number_on_go_and_nothing_else_does(tmp_path: Path) -> None:
    stays = [sheet_name(3, "x.jpg"), "sheets/mine.png", "sheets/0001/mine.png", sheet_name(10_000, "x.jpg")]
    goes = [sheet_name(10_001, "x.jpg"), sheet_name(20_000, "x.jpg"), "sheets/.000001-x.jpg.png.part"]
    for name in (*stays, *goes):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    remove_image_files(tmp_path, SHEETS, 10_001)
    assert {p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*") if p.is_file()} == set(stays)
    assert not (tmp_path / "sheets/0002").exists()


def test_where_there_are_no_sheets_none_go(tmp_path: Path) -> None:
    remove_image_files(tmp_path, SHEETS)
    assert list(tmp_path.iterdir()) == []


def left(out: Path, sheets: str) -> list[bytes]:
    """Records of a, b, c, d, a sheet each; only those of `sheets` are on the disk."""
    (out / "sheets").mkdir()
    lines = []
    for index, name in enumerate(NAMES):
        record = {**error_record(name, "x", "y"), "sheet": sheet_name(index, name)}
        lines.append(json.dumps(record).encode() + b"\n")
        if name in sheets:
            (out / sheet_name(index, name)).write_bytes(b"png")
    (out / "results.jsonl").write_bytes(b"".join(lines))
    return lines


def asked(*names: str) -> Iterator[Request]:
    return (Request(name, name) for name in names)


@pytest.mark.parametrize("sheets", ["abcd", "abc", "abd", "acd", "bcd", "ad", ""])
def test_records_end_before_the_first_whose_sheet_is_missing(tmp_path: Path, sheets: str) -> None:
    lines = left(tmp_path, sheets)
    stay = next((n for n, name in enumerate(NAMES) if name not in sheets), len(NAMES))
    counted: list[str | None] = []
    rest = asked(*NAMES, "e")
    kept = load_resume_point(tmp_path, rest, lambda record: counted.append(record["image"]))
    size = len(b"".join(lines[:stay]))
    assert kept == ResumePoint(stay, size, len(b"".join(lines)) - size)
    assert counted == NAMES[:stay]
    assert [request.name for request in rest] == [*NAMES[stay:], "e"]


def test_a_damaged_record_before_the_missing_sheet_ends_them_already(tmp_path: Path) -> None:
    lines = left(tmp_path, "abc")
    (tmp_path / "results.jsonl").write_bytes(lines[0] + b"\0\n" + b"".join(lines[1:]))
    rest = asked(*NAMES)
    kept = load_resume_point(tmp_path, rest, lambda _: None)
    assert kept.count == 1
    assert [request.name for request in rest] == NAMES[1:]


def test_other_images_are_refused_though_a_later_sheet_is_missing(tmp_path: Path) -> None:
    lines = left(tmp_path, "abc")
    with pytest.raises(UsageError, match="number 2 was b, now it is x"):
        load_resume_point(tmp_path, asked("a", "x", "c", "d"), lambda _: None)
    assert (tmp_path / "results.jsonl").read_bytes() == b"".join(lines)


def test_no_records_leave_everything_to_do(tmp_path: Path) -> None:
    rest = asked("a")
    kept = load_resume_point(tmp_path, rest, lambda _: None)
    assert kept == ResumePoint()
    assert [request.name for request in rest] == ["a"]
