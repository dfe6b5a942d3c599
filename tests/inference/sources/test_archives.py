"""Images inside tars and zips: every member answered once, nothing unpacked, damage named."""

from __future__ import annotations

import io
import json
import os
import pickle
import struct
import tarfile
import tracemalloc
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from opal_deploy.errors import ImageError, UsageError
from opal_deploy.inference.sources import archives
from opal_deploy.inference.sources.byte_ranges import ByteRange
from opal_deploy.inference.sources.discovery import discover
from opal_deploy.inference.sources.items import Item, Skipped
from opal_deploy.preprocess.decode import decode
from opal_deploy.records.names import unescape_name

Members = dict[str, bytes]


def png(shade: int, size: int = 8) -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", (size, size), (shade, shade, shade)).save(stream, "PNG")
    return stream.getvalue()


def make_tar(path: Path, content: Members, mode: str = "w") -> Path:
    with tarfile.open(path, mode, format=tarfile.PAX_FORMAT) as tar:  # type: ignore[call-overload]
        for name, data in content.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def make_zip(path: Path, content: Members, method: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, data in content.items():
            archive.writestr(name, data)
    return path


MAKERS: dict[str, Callable[[Path, Members], Path]] = {
    "plain.tar": make_tar,
    "packed.tar.gz": lambda path, content: make_tar(path, content, "w:gz"),
    "packed.tgz": lambda path, content: make_tar(path, content, "w:gz"),
    "packed.tar.bz2": lambda path, content: make_tar(path, content, "w:bz2"),
    "packed.tar.xz": lambda path, content: make_tar(path, content, "w:xz"),
    "stored.zip": make_zip,
    "deflated.zip": lambda path, content: make_zip(path, content, zipfile.ZIP_DEFLATED),
}
every_kind = pytest.mark.parametrize("kind", MAKERS)


def items(*inputs: str | Path, skipped: Skipped | None = None) -> list[Item]:
    return list(discover([str(i) for i in inputs], skipped or Skipped()))


def codes(found: list[Item]) -> list[str | None]:
    return [None if item.problem is None else item.problem.code for item in found]


def shades(found: list[Item]) -> list[int | str]:
    """What each item's picture shows, or the code of its error."""
    seen: list[int | str] = []
    for item in found:
        try:
            if item.problem is not None:
                raise item.problem
            seen.append(decode(item.source).getpixel((0, 0))[0])  # type: ignore[index]
        except ImageError as error:
            seen.append(error.code)
    return seen


@every_kind
def test_members_come_in_the_archives_order_under_its_name(tmp_path: Path, kind: str) -> None:
    path = MAKERS[kind](tmp_path / kind, {"b.png": png(1), "a/x.png": png(2), "a/c.PNG": png(3)})
    found = items(path)
    assert [item.relative for item in found] == ["b.png", "a/x.png", "a/c.PNG"]
    assert [item.name for item in found] == [f"{path}/b.png", f"{path}/a/x.png", f"{path}/a/c.PNG"]
    assert shades(found) == [1, 2, 3]


@every_kind
def test_a_members_place_can_be_sent_to_another_process(tmp_path: Path, kind: str) -> None:
    found = items(MAKERS[kind](tmp_path / kind, {"a.png": png(7)}))
    assert shades(pickle.loads(pickle.dumps(found))) == [7]  # noqa: S301


def test_members_of_plain_archives_are_read_where_they_lie(tmp_path: Path) -> None:
    (in_tar,) = items(make_tar(tmp_path / "a.tar", {"a.png": png(1)}))
    (in_zip,) = items(make_zip(tmp_path / "a.zip", {"a.png": png(1)}))
    assert isinstance(in_tar.source, ByteRange)
    assert isinstance(in_zip.source, ByteRange)
    assert in_tar.source.size == in_zip.source.size == len(png(1))


@every_kind
def test_what_is_no_picture_by_its_name_is_passed_over_and_counted(tmp_path: Path, kind: str) -> None:
    content = {"0001.png": png(1), "0001.cls": b"3", "__MACOSX/._0001.png": b"x", ".hidden/a.png": b"x"}
    nested = make_tar(tmp_path / "nested.tar", {"n.png": png(9)}).read_bytes()
    skipped = Skipped()
    found = items(MAKERS[kind](tmp_path / kind, {**content, "nested.tar": nested}), skipped=skipped)
    assert [item.relative for item in found] == ["0001.png"]
    assert skipped.count == 4


def make_linked(path: Path, mode: str = "w") -> Path:
    with tarfile.open(path, mode) as tar:  # type: ignore[call-overload]
        for name, kind, target in (
            ("b/later.png", tarfile.SYMTYPE, "../a.png"),
            ("a.png", tarfile.REGTYPE, ""),
            ("hard.png", tarfile.LNKTYPE, "a.png"),
            ("out.png", tarfile.SYMTYPE, "/etc/passwd"),
            ("loop.png", tarfile.SYMTYPE, "loop.png"),
            ("device.png", tarfile.CHRTYPE, ""),
            ("pipe.png", tarfile.FIFOTYPE, ""),
            ("folder.png", tarfile.DIRTYPE, ""),
        ):
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, target
            info.size = len(png(5)) if kind == tarfile.REGTYPE else 0
            tar.addfile(info, io.BytesIO(png(5)))
    return path


def test_links_inside_a_tar_are_followed_and_others_named(tmp_path: Path) -> None:
    skipped = Skipped()
    found = items(make_linked(tmp_path / "a.tar"), skipped=skipped)
    assert [item.relative for item in found] == ["b/later.png", "a.png", "hard.png", "out.png", "loop.png"]
    assert shades(found) == [5, 5, 5, "unsupported_member", "unsupported_member"]
    assert "a link to /etc/passwd, which is no file in the archive" in str(found[3].problem)
    # a device and a pipe
    assert skipped.count == 2


def test_links_in_a_compressed_tar_are_named(tmp_path: Path) -> None:
    found = items(make_linked(tmp_path / "a.tar.gz", "w:gz"))
    assert shades(found) == ["unsupported_member", 5, *["unsupported_member"] * 3]


def test_a_link_in_a_zip_is_named(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("a.png", png(5))
        link = zipfile.ZipInfo("link.png")
        link.create_system, link.external_attr = 3, 0o120777 << 16
        archive.writestr(link, "/etc/passwd")
    assert shades(items(tmp_path / "a.zip")) == [5, "unsupported_member"]


@pytest.mark.parametrize("first", ["PK0001.png", "BZh.png", "PK\3\4.png"])
def test_a_tar_is_told_by_more_than_its_first_members_name(tmp_path: Path, first: str) -> None:
    assert shades(items(make_tar(tmp_path / "a.tar", {first: png(1), "b.png": png(2)}))) == [1, 2]


def test_the_kind_is_told_by_content_whatever_the_name(tmp_path: Path) -> None:
    inner = make_zip(tmp_path / "inner.zip", {"inner.png": png(9)}).read_bytes()
    content = {"a.png": png(1), "inner.zip": inner}
    assert shades(items(make_tar(tmp_path / "a.tar", content))) == [1]
    assert shades(items(make_tar(tmp_path / "b.tar", content, "w:xz"))) == [1]
    assert shades(items(make_tar(tmp_path / "tar.zip", {"a.png": png(1)}))) == [1]
    assert shades(items(make_zip(tmp_path / "zip.tar", {"a.png": png(1)}))) == [1]


NASTY = ["../../up.png", "/etc/root.png", "dir\\back.png", "a\nb.png", "same.png", "<script>.png", "C:\\x.png", "ü.png"]


@every_kind
def test_nasty_names_are_labels_and_nothing_else(tmp_path: Path, kind: str) -> None:
    (tmp_path / "in").mkdir()
    path = MAKERS[kind](tmp_path / "in" / kind, {name: png(number) for number, name in enumerate(NASTY)})
    before = sorted(tmp_path.rglob("*"))
    found = items(path)
    assert shades(found) == list(range(len(NASTY)))
    # one slash where a name begins with another: a label, not a path
    assert [unescape_name(item.name) for item in found] == [f"{path}/{name.lstrip('/')}" for name in NASTY]
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize("suffix", ["tar", "zip"])
def test_members_of_the_same_name_are_answered_each(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a.{suffix}"
    if suffix == "tar":
        with tarfile.open(path, "w") as tar:
            for shade in (1, 2):
                info = tarfile.TarInfo("a.png")
                info.size = len(png(shade))
                tar.addfile(info, io.BytesIO(png(shade)))
    else:
        with zipfile.ZipFile(path, "w") as archive:
            for shade in (1, 2):
                archive.writestr("a.png", png(shade))
    assert shades(items(path)) == [1, 2]


@pytest.mark.parametrize("suffix", ["tar", "zip"])
def test_names_that_are_not_utf8_are_escaped_reversibly(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a.{suffix}"
    if suffix == "tar":
        with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT, encoding="utf-8", errors="surrogateescape") as tar:
            info = tarfile.TarInfo(os.fsdecode(b"\xff.png"))
            info.size = len(png(1))
            tar.addfile(info, io.BytesIO(png(1)))
    else:
        make_zip(path, {"?.png": png(1)})
        path.write_bytes(path.read_bytes().replace(b"?.png", b"\xff.png"))
    (item,) = items(path)
    assert item.name == f"{path}/\\xff.png"
    assert shades([item]) == [1]


def test_a_nul_in_a_zips_name_is_shown_escaped(tmp_path: Path) -> None:
    path = make_zip(tmp_path / "a.zip", {"a?b.png": png(1)})
    path.write_bytes(path.read_bytes().replace(b"a?b.png", b"a\0b.png"))
    (item,) = items(path)
    assert item.name == f"{path}/a\\x00b.png"
    assert unescape_name(item.name) == f"{path}/a\0b.png"
    assert shades([item]) == [1]


@pytest.mark.parametrize("kind", ["plain.tar", "packed.tar.gz", "packed.tar.bz2", "packed.tar.xz"])
@pytest.mark.parametrize("kept", [0.35, 0.5, 0.65])
def test_a_tar_cut_off_gives_what_is_before_the_cut_and_says_so(tmp_path: Path, kind: str, kept: float) -> None:
    noise = {f"{number}.png": png(number) + os.urandom(3000) for number in range(10)}
    path = MAKERS[kind](tmp_path / kind, noise)
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * kept)])
    good = make_tar(tmp_path / "good.tar", {"last.png": png(99)})
    *before, problem, last = items(path, good)
    assert shades(before) == list(range(len(before)))
    assert 0 < len(before) < 10 or kind == "packed.tar.bz2"
    assert problem.problem is not None
    assert problem.problem.code == "corrupt_archive"
    assert problem.path == path
    assert shades([last]) == [99]


def test_a_tar_cut_off_between_two_members_is_not_taken_for_a_whole_one(tmp_path: Path) -> None:
    path = make_tar(tmp_path / "a.tar", {"0.png": png(0), "1.png": png(1)})
    path.write_bytes(path.read_bytes()[: 2 * 1024])
    with tarfile.open(path) as tar:
        names = tar.getnames()
    found = items(path)
    assert [item.relative for item in found[:-1]] == names
    assert codes(found)[-1] == "corrupt_archive"
    assert "without the mark of its end" in str(found[-1].problem)


def test_a_damaged_header_in_a_tar_is_not_taken_for_its_end(tmp_path: Path) -> None:
    path = make_tar(tmp_path / "a.tar", {f"{number}.png": png(number) for number in range(4)})
    data = bytearray(path.read_bytes())
    at = data.index(b"2.png")
    data[at : at + 20] = b"\xa5" * 20
    path.write_bytes(data)
    found = items(path)
    assert shades(found) == [0, 1, "corrupt_archive"]


def test_a_tar_whose_size_leads_back_does_not_go_round_for_ever(tmp_path: Path) -> None:
    path = make_tar(tmp_path / "a.tar", {"0.png": png(0), "1.png": png(1)})
    data = bytearray(path.read_bytes())
    at = data.index(b"1.png")
    header = data[at : at + 512]
    # minus 1024 in the base-256 form of sizes
    header[124:136] = b"\xff" * 10 + struct.pack(">h", -1024)
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    data[at : at + 512] = header
    path.write_bytes(data)
    assert shades(items(path)) == [0, "corrupt_archive"]


def test_a_tars_header_cannot_claim_a_name_without_end(tmp_path: Path) -> None:
    path = tmp_path / "a.tar.gz"
    with tarfile.open(path, "w:gz") as tar:
        tar.addfile(tarfile.TarInfo("notes.txt"))
        long_name = tarfile.TarInfo("././@LongLink")
        long_name.type, long_name.size = tarfile.GNUTYPE_LONGNAME, 50_000_000
        tar.addfile(long_name, io.BytesIO(bytes(long_name.size)))
    tracemalloc.start()
    try:
        with pytest.raises(UsageError, match="a header claims 50,000,000 bytes"):
            items(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 10_000_000


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_a_zip_cut_off_gives_its_whole_members_and_says_so(tmp_path: Path, method: int) -> None:
    path = make_zip(tmp_path / "a.zip", {f"{n}.png": png(n) + os.urandom(2000) for n in range(10)}, method)
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    good = make_zip(tmp_path / "good.zip", {"last.png": png(99)})
    *before, problem, last = items(path, good)
    assert shades(before) == [0, 1, 2, 3, 4]
    assert codes([problem]) == ["corrupt_archive"]
    assert "directory" in str(problem.problem)
    assert shades([last]) == [99]


def test_a_zips_damaged_directory_costs_no_member(tmp_path: Path) -> None:
    path = make_zip(tmp_path / "a.zip", {f"{number}.png": png(number) for number in range(4)})
    data = bytearray(path.read_bytes())
    entries = [at for at in range(len(data)) if data.startswith(b"PK\1\2", at)]
    data[entries[2]] = 0
    path.write_bytes(data)
    found = items(path)
    assert shades(found) == [0, 1, 2, 3, "corrupt_archive"]
    assert "the directory of its members cannot be read" in str(found[-1].problem)


def test_a_zip_with_a_program_before_it_is_read(tmp_path: Path) -> None:
    path = make_zip(tmp_path / "a.zip", {"a.png": png(4)}, zipfile.ZIP_DEFLATED)
    path.write_bytes(b"#!/bin/sh\n" + path.read_bytes())
    assert shades(items(path)) == [4]


def test_a_zip_written_to_a_pipe_is_read(tmp_path: Path) -> None:
    class Pipe(io.RawIOBase):
        def __init__(self) -> None:
            self.data = b""

        def writable(self) -> bool:
            return True

        def write(self, data: object) -> int:
            self.data += bytes(data)  # type: ignore[call-overload]
            return len(bytes(data))  # type: ignore[call-overload]

    pipe = Pipe()
    with zipfile.ZipFile(pipe, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.png", png(4))
    (tmp_path / "a.zip").write_bytes(pipe.data)
    assert shades(items(tmp_path / "a.zip")) == [4]


def test_a_zip_of_the_64_bit_kind_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zipfile, "ZIP64_LIMIT", 10)
    monkeypatch.setattr(zipfile, "ZIP_FILECOUNT_LIMIT", 1)
    path = make_zip(tmp_path / "a.zip", {f"{number}.png": png(number) for number in range(3)}, zipfile.ZIP_DEFLATED)
    assert b"PK\6\6" in path.read_bytes()
    assert shades(items(path)) == [0, 1, 2]


@pytest.mark.parametrize("kind", ["stored.zip", "deflated.zip"])
def test_a_bit_flipped_in_a_zips_member_is_that_members_error(tmp_path: Path, kind: str) -> None:
    path = MAKERS[kind](tmp_path / kind, {f"{n}.png": png(n, 64) + bytes(100) for n in range(3)})
    (_, second, _) = items(path)
    assert isinstance(second.source, ByteRange)
    # behind the pixels: a decoder would not notice
    flip(path, second.source.offset + 30 + len("1.png") + second.source.length - 5)
    assert shades(items(path)) == [0, "corrupt_image", 2]


@pytest.mark.parametrize(("kind", "from_end"), [("a.tar.gz", 8), ("a.tar.gz", 40), ("a.tar.bz2", 3), ("a.tar.xz", 20)])
def test_a_wrong_checksum_of_a_compressed_tar_is_named(tmp_path: Path, kind: str, from_end: int) -> None:
    path = make_tar(tmp_path / kind, {f"{n}.png": png(n) for n in range(3)}, "w:" + kind.rpartition(".")[2])
    flip(path, path.stat().st_size - from_end)
    assert codes(items(path, make_tar(tmp_path / "good.tar", {"a.png": png(9)})))[-2:] == ["corrupt_archive", None]


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def with_claims(
    path: Path, name: bytes, *, flags: int | None = None, size: int | None = None, method: int | None = None
) -> None:
    """Change what a zip's directory says of a member."""
    data = bytearray(path.read_bytes())
    entry = data.rindex(name) - 46
    for offset, form, value in ((8, "<H", flags), (10, "<H", method), (24, "<L", size)):
        if value is not None:
            struct.pack_into(form, data, entry + offset, value)
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("claims", "code"),
    [
        ({"flags": 1}, "encrypted_member"),
        ({"size": 4_000_000_000}, "oversized_member"),
        ({"method": 12}, "unsupported_member"),
        ({"size": 5}, "corrupt_image"),
    ],
)
def test_a_zips_member_that_cannot_be_read_costs_the_others_nothing(
    tmp_path: Path, claims: dict[str, int], code: str
) -> None:
    path = make_zip(tmp_path / "a.zip", {f"{n}.png": png(n) for n in range(3)}, zipfile.ZIP_DEFLATED)
    with_claims(path, b"1.png", **claims)
    assert shades(items(path)) == [0, code, 2]


def test_a_zip_bomb_that_claims_little_is_inflated_no_further_than_it_claims(tmp_path: Path) -> None:
    path = make_zip(tmp_path / "a.zip", {"a.png": bytes(200_000_000)}, zipfile.ZIP_DEFLATED)
    with_claims(path, b"a.png", size=1000)
    (item,) = items(path)
    tracemalloc.start()
    try:
        assert shades([item]) == ["corrupt_image"]
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2_000_000


@pytest.mark.parametrize("kind", ["plain.tar", "packed.tar.gz", "deflated.zip"])
def test_a_member_over_the_limit_is_never_read(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = MAKERS[kind](tmp_path / kind, {"0.png": png(0), "1.png": png(1) + bytes(5000), "2.png": png(2)})
    monkeypatch.setattr(archives, "MAX_MEMBER", 4000)
    assert shades(items(path)) == [0, "oversized_member", 2]


def test_an_archive_of_nothing_but_bad_members_is_answered_not_refused(tmp_path: Path) -> None:
    path = make_zip(tmp_path / "a.zip", {"a.png": png(1)})
    with_claims(path, b"a.png", flags=1)
    assert shades(items(path)) == ["encrypted_member"]


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.tar", b"", "neither that of a tar"),
        ("a.zip", b"", "directory of its members"),
        ("a.zip", b"no zip at all" * 50, "directory of its members"),
        ("a.tar", b"no tar at all" * 50, "damaged"),
        ("a.tar.gz", b"\x1f\x8bnothing", "damaged"),
        ("a.rar", b"Rar!", "an archive of this kind is not read; expected .tar"),
        ("a.tar.zst", b"", "an archive of this kind is not read"),
    ],
)
def test_a_file_that_is_no_archive_alone_is_a_wrong_call(tmp_path: Path, name: str, data: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(UsageError, match=message):
        items(tmp_path / name)


@every_kind
def test_an_archive_without_images_says_what_it_holds(tmp_path: Path, kind: str) -> None:
    path = MAKERS[kind](tmp_path / kind, {"notes.txt": b"x"})
    with pytest.raises(UsageError, match=r"no images in it \(1 other files, such as notes.txt\)"):
        items(path)


def test_shards_given_as_a_glob_come_sorted(tmp_path: Path) -> None:
    for number in (1, 0):
        make_tar(tmp_path / f"{number}.tar", {"a.png": png(number), "b.png": png(10 + number)})
    assert shades(items(tmp_path / "*.tar")) == [0, 10, 1, 11]


def test_archives_beside_folders_files_and_lists_keep_the_calls_order(tmp_path: Path) -> None:
    make_tar(tmp_path / "a.tar", {"a.png": png(1)})
    make_zip(tmp_path / "b.zip", {"b.png": png(2)})
    (tmp_path / "c.png").write_bytes(png(3))
    (tmp_path / "list.txt").write_text(f"{tmp_path}/b.zip\n{tmp_path}/c.png\n")
    assert shades(items(tmp_path / "c.png", f"@{tmp_path}/list.txt", tmp_path / "a.tar")) == [3, 2, 3, 1]


@pytest.mark.parametrize("kind", ["plain.tar", "stored.zip", "deflated.zip"])
@pytest.mark.parametrize(("change", "code"), [("gone", "not_found"), ("rewritten", "unreadable")])
def test_an_archive_that_changes_after_it_was_listed_gives_no_wrong_picture(
    tmp_path: Path, kind: str, change: str, code: str
) -> None:
    path = MAKERS[kind](tmp_path / kind, {"a.png": png(1), "b.png": png(2)})
    found = items(path)
    path.unlink()
    if change == "rewritten":
        MAKERS[kind](path, {"b.png": png(2), "a.png": png(1), "c.png": png(3)})
    assert shades(found) == [code, code]


def test_an_archive_is_read_as_it_is_needed(tmp_path: Path) -> None:
    for name, make in (("a.tar", make_tar), ("a.tar.gz", MAKERS["packed.tar.gz"]), ("a.zip", make_zip)):
        path = make(tmp_path / name, {f"{number:05}.png": b"x" * 20_000 for number in range(5000)})
        found = discover([str(path)], Skipped())
        next(found)
        tracemalloc.start()
        try:
            assert sum(1 for _ in found) == 4999
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        # all of them are 100 MB; Python's table of the parts of paths grows by megabytes now and then
        assert peak < 20_000_000, name


def test_a_zips_checksum_is_that_of_the_bytes_a_reader_gets(tmp_path: Path) -> None:
    data = png(3)
    (item,) = items(make_zip(tmp_path / "a.zip", {"a.png": data}, zipfile.ZIP_DEFLATED))
    assert isinstance(item.source, ByteRange)
    assert item.source.crc == zlib.crc32(data)
    assert item.source.open().read() == data


def test_infer_writes_nothing_outside_its_folder_whatever_members_are_called(
    opal: Callable, exact_model: Path, tmp_path: Path
) -> None:
    (tmp_path / "in").mkdir()
    make_tar(tmp_path / "in/a.tar", {name: png(50 + number, 96) for number, name in enumerate(NASTY)})
    make_zip(tmp_path / "in/b.zip", {"../../b.png": png(9, 96), "broken.png": b"x"})
    inside = set((tmp_path / "in").iterdir())
    out = tmp_path / "work/here/out"
    arguments = [tmp_path / "in/a.tar", tmp_path / "in/b.zip", "--model", exact_model, "--out", out, "--explain"]
    done = opal("infer", *arguments, "--device", "cpu", "--threads", "1")
    assert done.returncode == 3, done.stderr
    found = [json.loads(line) for line in (out / "results.jsonl").read_text("utf-8").splitlines()]
    assert [unescape_name(record["image"]) for record in found] == [
        *(f"{tmp_path}/in/a.tar/{name.lstrip('/')}" for name in NASTY),
        f"{tmp_path}/in/b.zip/../../b.png",
        f"{tmp_path}/in/b.zip/broken.png",
    ]
    assert [record["status"] for record in found] == ["ok"] * 9 + ["error"]
    overlays = {(out / record["overlay"]).resolve() for record in found[:-1]}
    assert len(overlays) == 9
    assert all(path.is_file() and path.parent == out / "overlays" for path in overlays)
    assert set(tmp_path.iterdir()) == {tmp_path / "in", tmp_path / "work"}
    assert list((tmp_path / "work").iterdir()) == [tmp_path / "work/here"]
    assert list((tmp_path / "work/here").iterdir()) == [out]
    assert set((tmp_path / "in").iterdir()) == inside
