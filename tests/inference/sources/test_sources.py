"""Lists of paths, and files of every nasty kind: one record each, and the run goes on."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from PIL import Image

from opal_deploy.errors import UsageError
from opal_deploy.inference.executor import predict_stream
from opal_deploy.inference.sources.discovery import check_inputs, discover
from opal_deploy.inference.sources.items import Item, Skipped
from opal_deploy.inference.types import InferenceOptions, build_requests


def picture(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (40, 40), (90, 90, 90)).save(path)
    return path


def items(*inputs: str | Path) -> list[Item]:
    return list(discover([str(i) for i in inputs], Skipped()))


def verdicts(found: Iterator[Item] | list[Item], session: object) -> dict[str, str]:
    """What each item's record says: its status, or its error's code."""
    asked = build_requests(found)
    records = [result.record for result in predict_stream(asked, [session], InferenceOptions(batch=4))]  # type: ignore[list-item]
    told = {Path(str(r["image"])).name: r["error"]["code"] if r["status"] == "error" else r["status"] for r in records}
    assert len(told) == len(records)
    return told


def test_a_list_in_a_file_names_one_path_a_line(tmp_path: Path) -> None:
    (tmp_path / "list.txt").write_bytes(b"\xef\xbb\xbfa.jpg\r\n\nb c/\xff.jpg\nlast.png")
    found = items(f"@{tmp_path}/list.txt")
    assert [os.fsencode(item.path) for item in found] == [b"a.jpg", b"b c/\xff.jpg", b"last.png"]


def test_a_file_whose_name_looks_like_a_list_is_that_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    picture(tmp_path / "@a.png")
    check_inputs(["@a.png"])
    assert [item.name for item in items("@a.png")] == ["@a.png"]


def test_a_list_is_read_as_it_is_needed(tmp_path: Path) -> None:
    path = tmp_path / "list"
    os.mkfifo(path)
    found = discover([f"@{path}"], Skipped())
    # for reading too, or opening it would wait for a reader
    writer = os.open(path, os.O_RDWR)
    try:
        os.write(writer, b"first.jpg\n" * 2000)
        assert next(found).name == "first.jpg"
    finally:
        found.close()  # type: ignore[attr-defined]
        os.close(writer)


@pytest.mark.parametrize("content", [None, b"", b"\n\n"])
def test_a_list_without_names_is_a_wrong_call(tmp_path: Path, content: bytes | None) -> None:
    if content is None:
        (tmp_path / "list").mkdir()
        with pytest.raises(UsageError, match="no such list; expected a text file with a path a line"):
            check_inputs([f"@{tmp_path}/list"])
    else:
        (tmp_path / "list").write_bytes(content)
        with pytest.raises(UsageError, match="the list named no image; expected one path a line"):
            items(f"@{tmp_path}/list")


def test_a_list_that_is_not_there_is_refused_before_anything_begins() -> None:
    with pytest.raises(UsageError, match=r"@none.txt: no such list; expected a text file with a path a line"):
        check_inputs(["@none.txt"])


def test_special_files_and_broken_links_get_one_record_each(bright_session: Callable, tmp_path: Path) -> None:
    picture(tmp_path / "in/good.png")
    os.mkfifo(tmp_path / "in/fifo.png")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "in/socket.png"))
        (tmp_path / "in/loop.png").symlink_to("loop.png")
        (tmp_path / "in/nowhere.png").symlink_to("gone.png")
        (tmp_path / "in/null.png").symlink_to("/dev/null")
        (tmp_path / "in/empty.png").touch()
        (tmp_path / "in/to_folder.png").symlink_to(tmp_path)
        told = verdicts(items(tmp_path / "in"), bright_session())
    assert told == {
        "good.png": "ok",
        "fifo.png": "not_a_file",
        "socket.png": "not_a_file",
        "loop.png": "unreadable",
        "nowhere.png": "not_found",
        "null.png": "not_a_file",
        "empty.png": "empty_file",
        "to_folder.png": "not_a_file",
    }


@pytest.mark.parametrize("name", ["a.tar", "a.zip"])
def test_a_special_file_called_an_archive_is_not_waited_for(
    bright_session: Callable, tmp_path: Path, name: str
) -> None:
    os.mkfifo(tmp_path / name)
    assert verdicts(items(tmp_path / name), bright_session()) == {name: "not_a_file"}


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may read everything")
def test_what_may_not_be_read_gets_one_record_each(bright_session: Callable, tmp_path: Path) -> None:
    picture(tmp_path / "in/good.png")
    picture(tmp_path / "in/locked/inside.png")
    picture(tmp_path / "in/secret.png").chmod(0)
    (tmp_path / "in/locked").chmod(0)
    try:
        told = verdicts(items(tmp_path / "in"), bright_session())
    finally:
        (tmp_path / "in/locked").chmod(0o700)
    assert told == {"good.png": "ok", "secret.png": "unreadable", "locked": "unreadable"}


def test_files_that_vanish_or_change_during_the_run_get_one_record_each(
    bright_session: Callable, tmp_path: Path
) -> None:
    for number in range(40):
        picture(tmp_path / f"in/{number:02}.png")

    def meanwhile() -> Iterator[Item]:
        for number, item in enumerate(items(tmp_path / "in")):
            if number == 0:
                (tmp_path / "in/05.png").unlink()
                (tmp_path / "in/06.png").write_bytes(b"something else")
                (tmp_path / "in/07.png").unlink()
                (tmp_path / "in/07.png").mkdir()
            yield item

    told = verdicts(meanwhile(), bright_session())
    assert len(told) == 40
    changed = {"05.png": "not_found", "06.png": "not_an_image", "07.png": "not_a_file"}
    assert told == {**dict.fromkeys(told, "ok"), **changed}


def test_a_folder_that_vanishes_while_it_is_walked_gets_one_record(bright_session: Callable, tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        picture(tmp_path / f"in/{name}/{name}.png")

    def meanwhile() -> Iterator[Item]:
        for item in discover([str(tmp_path / "in")], Skipped()):
            shutil.rmtree(tmp_path / "in/b", ignore_errors=True)
            yield item

    assert verdicts(meanwhile(), bright_session()) == {"a.png": "ok", "b": "unreadable", "c.png": "ok"}
