"""Images inside tars and zips: every member answered once, nothing unpacked, damage named."""

import bz2
import gzip
import io
import lzma
import os
import pickle
import struct
import tarfile
import tracemalloc
import zipfile
from contextlib import contextmanager
from hashlib import sha256

import pytest
from PIL import Image

from opal_deploy.errors import ImageError, UsageError
from opal_deploy.predict import decoder_pool as pool
from opal_deploy.preprocess.decode import decode
from opal_deploy.records.names import unescape_name
from opal_deploy.sources import members, tar
from opal_deploy.sources.discovery import discover
from opal_deploy.sources.image import SpooledMember
from opal_deploy.sources.items import Skipped
from opal_deploy.sources.members import ByteRange
from tests.bright import BrightSession, predict, read_results

Members = dict[str, bytes]
NASTY = ["../../up.png", "/etc/root.png", "dir\\back.png", "a\nb.png", "same.png", "<script>.png", "C:\\x.png", "ü.png"]
KINDS = {
    "plain.tar": "w",
    "packed.tgz": "w:gz",
    "packed.tar.bz2": "w:bz2",
    "packed.tar.xz": "w:xz",
    "stored.zip": zipfile.ZIP_STORED,
    "deflated.zip": zipfile.ZIP_DEFLATED,
}
ZIPS = ["stored.zip", "deflated.zip"]
every_kind = pytest.mark.parametrize("kind", KINDS)


def png(shade, size=8):
    stream = io.BytesIO()
    Image.new("RGB", (size, size), (shade, shade, shade)).save(stream, "PNG")
    return stream.getvalue()


def numbered(count, behind=b"", size=8):
    return {f"{number}.png": png(number, size) + behind for number in range(count)}


def add_member(tar, name, data, kind=tarfile.REGTYPE, target=""):
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.size = kind, target, len(data)
    tar.addfile(info, io.BytesIO(data))


def pack(path, content, kind=""):
    """Write an archive of the kind that its name says, or of another one."""
    mode = KINDS[kind or path.name]
    if isinstance(mode, str):
        with tarfile.open(path, mode, format=tarfile.PAX_FORMAT) as tar:
            for name, data in content.items():
                add_member(tar, name, data)
    else:
        with zipfile.ZipFile(path, "w", mode) as archive:
            for name, data in content.items():
                archive.writestr(name, data)
    return path


def items(*inputs, skipped=None):
    return list(discover([str(i) for i in inputs], skipped or Skipped()))


def outcomes(found):
    """The grey of each item's image, or the code of its error."""
    result = []
    for item in found:
        try:
            if item.error is not None:
                raise item.error
            result.append(decode(item.source).getpixel((0, 0))[0])
        except ImageError as error:
            result.append(error.code)
    return result


def patch(path, at, new):
    data = path.read_bytes()
    path.write_bytes(data[:at] + new + data[at + len(new) :])


def flip(path, at):
    patch(path, at, bytes([path.read_bytes()[at] ^ 1]))


@contextmanager
def memory_under(limit):
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < limit
    finally:
        tracemalloc.stop()


@every_kind
def test_members_come_in_order_can_be_sent_to_another_process_and_others_are_counted(tmp_path, kind):
    nested = pack(tmp_path / "nested.tar", {"n.png": png(9)}, "plain.tar").read_bytes()
    images = {"b.png": png(1), "a/x.png": png(2), "a/c.PNG": png(3)}
    others = {"b.cls": b"3", "__MACOSX/._b.png": b"x", ".hidden/a.png": b"x", "nested.tar": nested}
    skipped = Skipped()
    found = items(path := pack(tmp_path / kind, images | others), skipped=skipped)
    assert ([item.relative for item in found], skipped.count) == (["b.png", "a/x.png", "a/c.PNG"], 4)
    assert [item.name for item in found] == [f"{path}/b.png", f"{path}/a/x.png", f"{path}/a/c.PNG"]
    assert outcomes(pickle.loads(pickle.dumps(found))) == [1, 2, 3]  # noqa: S301
    # only a compressed tar's bytes are carried along
    assert all(isinstance(item.source, ByteRange) for item in found) == (kind in ("plain.tar", *ZIPS))
    with pytest.raises(UsageError, match=r"no images in it \(1 other files, such as notes.txt\)"):
        items(pack(tmp_path / kind, {"notes.txt": b"x"}))


# type, target, and the expected grey or error
FILE, SYMBOLIC, HARD = tarfile.REGTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE
LINKED = {
    "b/later.png": (SYMBOLIC, "../a.png", 5),
    "a.png": (FILE, "", 5),
    "b/blob": (FILE, "", 0),
    "hard.png": (HARD, "./a.png", 5),
    "to_hard.png": (SYMBOLIC, "hard.png", 5),
    "blob.png": (SYMBOLIC, "b/blob", 5),
    "through.png": (SYMBOLIC, "alias/later.png", 5),
    "alias": (SYMBOLIC, "b", 0),
    "root": (SYMBOLIC, ".", 0),
    "cover": (SYMBOLIC, "a.png", 0),
    "out.png": (SYMBOLIC, "/a.png", "outside the archive"),
    "up.png": (SYMBOLIC, "b/../../a.png", "outside the archive"),
    "001.Lost_Folder": (SYMBOLIC, "../data/001", "outside the archive"),
    "gone.png": (SYMBOLIC, "c/a.png", "not in the archive"),
    "loop.png": (SYMBOLIC, "loop.png", "in a circle"),
    "pipe.png": (tarfile.FIFOTYPE, "", "a device"),
}


@pytest.mark.parametrize("kind", ["w", "w:gz", "zip"])
def test_links_are_followed_inside_an_archive_and_named_where_they_leave_it(tmp_path, kind):
    if kind == "zip":
        modes = {FILE: 0o100644, tarfile.FIFOTYPE: 0o010644}
        with zipfile.ZipFile(tmp_path / "a.tar", "w") as archive:
            for name, (of_type, target, _) in LINKED.items():
                info = zipfile.ZipInfo(name)
                info.create_system, info.external_attr = 3, modes.get(of_type, 0o120777) << 16
                archive.writestr(info, png(5) if of_type == FILE else target)
    else:
        with tarfile.open(tmp_path / "a.tar", kind) as tar:
            for name, (of_type, target, _) in LINKED.items():
                add_member(tar, name, png(5) if of_type == FILE else b"", of_type, target)
    skipped = Skipped()
    found = items(tmp_path / "a.tar", skipped=skipped)
    expected = {name: outcome for name, (*_, outcome) in LINKED.items() if outcome}
    assert [item.relative for item in found] == list(expected)
    for item, outcome in zip(found, expected.values(), strict=True):
        if isinstance(outcome, int):
            assert outcomes([item]) == [outcome], item.name
        else:
            assert (item.error.code, outcome in str(item.error)) == ("unsupported_member", True), item.error
    # a file, and a link to one, that are no images by name; two links to folders in the archive
    assert (skipped.examples, skipped.folder_link_examples) == (["blob", "cover"], ["alias", "root"])


@pytest.mark.parametrize("kind", ["plain.tar", "packed.tgz"])
def test_a_hard_link_keeps_the_image_that_a_later_member_of_its_name_replaces(tmp_path, kind):
    with tarfile.open(tmp_path / kind, KINDS[kind]) as tar:
        add_member(tar, "a.png", png(1))
        add_member(tar, "hard.png", b"", HARD, "a.png")
        add_member(tar, "a.png", png(2))
        add_member(tar, "new.png", b"", SYMBOLIC, "a.png")
    assert outcomes(items(tmp_path / kind)) == [1, 1, 2, 2]


@pytest.mark.parametrize(
    ("name", "kind", "member"),
    [
        ("inner.tar", "plain.tar", "a.png"),
        ("inner.tar.xz", "packed.tar.xz", "a.png"),
        ("tar.zip", "plain.tar", "a.png"),
        ("zip.tar", "stored.zip", "a.png"),
        ("zip_magic.tar", "plain.tar", "PK0001.png"),
        ("bzip2_magic.tar", "plain.tar", "BZh.png"),
        ("member_magic.tar", "plain.tar", "PK\3\4.png"),
    ],
)
def test_the_kind_is_told_by_content(tmp_path, name, kind, member):
    content = {member: png(1)}
    if name.startswith("inner"):
        # a tar that ends in a zip
        content["inner.zip"] = pack(tmp_path / "inner.zip", {"inner.png": png(9)}, "stored.zip").read_bytes()
    assert outcomes(items(pack(tmp_path / name, content, kind))) == [1]


@every_kind
def test_nasty_names_are_only_labels(tmp_path, kind):
    (tmp_path / "in").mkdir()
    path = pack(tmp_path / "in" / kind, {name: png(number) for number, name in enumerate(NASTY)})
    before = sorted(tmp_path.rglob("*"))
    found = items(path)
    assert outcomes(found) == list(range(len(NASTY)))
    # one slash where a name begins with another: a label, not a path
    assert [unescape_name(item.name) for item in found] == [f"{path}/{name.lstrip('/')}" for name in NASTY]
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("kind", "raw", "shown"),
    [
        ("plain.tar", b"\xff.png", "\\xff.png"),
        ("stored.zip", b"\xff.png", "\\xff.png"),
        ("stored.zip", b"a\0.png", "a\\x00.png"),
    ],
)
@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_odd_and_equal_names_are_answered_each(tmp_path, kind, raw, shown):
    path, plain = tmp_path / kind, "?" * (len(raw) - 4) + ".png"
    if kind == "plain.tar":
        with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT, encoding="utf-8", errors="surrogateescape") as tar:
            for shade in (1, 2):
                add_member(tar, os.fsdecode(raw), png(shade))
    else:
        with zipfile.ZipFile(path, "w") as archive:
            for shade in (1, 2):
                archive.writestr(plain, png(shade))
        path.write_bytes(path.read_bytes().replace(plain.encode(), raw))
    found = items(path)
    assert ([item.name for item in found], outcomes(found)) == ([f"{path}/{shown}"] * 2, [1, 2])
    assert os.fsencode(unescape_name(found[0].name)) == os.fsencode(path) + b"/" + raw


@every_kind
@pytest.mark.parametrize("kept", [0.35, 0.65])
def test_a_cut_archive_gives_its_whole_members_unless_a_missing_checksum_was_to_cover_them(tmp_path, kind, kept):
    path = pack(tmp_path / kind, {f"{number}.png": png(number) + os.urandom(3000) for number in range(10)})
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * kept)])
    *before, problem, last = items(path, pack(tmp_path / "good.tar", {"last.png": png(99)}, "plain.tar"))
    assert outcomes(before) == list(range(len(before)))
    assert (0 < len(before) < 10) is (kind in ("plain.tar", *ZIPS))
    assert (problem.source, outcomes([problem, last])) == (path, ["corrupt_archive", 99])


def lead_back(data, at):
    """Give the member at `at` a size of minus 1024, in the base-256 form of sizes."""
    header = bytearray(data[at : at + 512])
    header[124:136] = b"\xff" * 10 + struct.pack(">h", -1024)
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return data[:at] + header + data[at + 512 :]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        # between two members, in a header, and one that would be read for ever
        (lambda data, at: data[:at], "without the mark of its end"),
        (lambda data, at: data[:at] + b"\xa5" * 20 + data[at + 20 :], "damaged"),
        (lead_back, "the header of 2.png is damaged"),
    ],
    ids=["cut", "damaged", "leading back"],
)
def test_a_tar_without_its_end_is_not_whole(tmp_path, damage, message):
    path = pack(tmp_path / "plain.tar", numbered(4))
    path.write_bytes(damage(path.read_bytes(), path.read_bytes().index(b"2.png")))
    found = items(path)
    assert outcomes(found) == [0, 1, "corrupt_archive"]
    assert message in str(found[-1].error)


@pytest.mark.parametrize("kind", ["plain.tar", "packed.tgz"])
def test_what_follows_the_end_of_a_tar_is_read_or_named(tmp_path, kind):
    first, second = (
        pack(tmp_path / kind, {f"{number}.png": png(number) for number in numbers}).read_bytes()
        for numbers in ((0, 1), (2, 3))
    )
    (tmp_path / kind).write_bytes(first + second)
    assert outcomes(items(tmp_path / kind)) == [0, 1, 2, 3]
    if kind == "plain.tar":
        # zeros of a damaged disk in place of a header: the image's bytes follow an apparent end
        patch(tmp_path / kind, first.index(b"1.png"), bytes(512))
        found = items(tmp_path / kind)
        assert (outcomes(found), "follow its end" in str(found[-1].error)) == ([0, "corrupt_archive"], True)


def test_a_tar_header_cannot_claim_an_endless_name(tmp_path):
    path = tmp_path / "a.tar.gz"
    with tarfile.open(path, "w:gz", compresslevel=1) as tar:
        add_member(tar, "notes.txt", b"")
        add_member(tar, "././@LongLink", bytes(50_000_000), tarfile.GNUTYPE_LONGNAME)
    with memory_under(10_000_000), pytest.raises(UsageError, match="a header claims 50,000,384 bytes"):
        items(path)


@pytest.mark.parametrize(
    ("kind", "from_end"), [("packed.tgz", 8), ("packed.tgz", 40), ("packed.tar.bz2", 3), ("packed.tar.xz", 20)]
)
def test_no_image_of_a_compressed_tar_with_a_wrong_checksum_is_answered(tmp_path, kind, from_end):
    path = pack(tmp_path / kind, numbered(3))
    flip(path, path.stat().st_size - from_end)
    good = pack(tmp_path / "plain.tar", {"a.png": png(9)})
    assert outcomes(items(path, good)) == ["corrupt_archive", 9]


@pytest.mark.parametrize("kind", ZIPS)
def test_a_flipped_bit_in_a_zips_member_is_its_error(tmp_path, kind):
    path = pack(tmp_path / kind, numbered(3, bytes(100), 64))
    (_, second, _) = items(path)
    assert isinstance(second.source, ByteRange)
    # behind the pixels: a decoder would not notice
    flip(path, second.source.offset + 30 + len("1.png") + second.source.length - 5)
    assert outcomes(items(path)) == [0, "corrupt_image", 2]


def test_a_zips_damaged_directory_costs_no_member(tmp_path):
    path = pack(tmp_path / "stored.zip", numbered(4))
    flip(path, path.read_bytes().rindex(b"PK\1\2"))
    found = items(path)
    assert outcomes(found) == [0, 1, 2, 3, "corrupt_archive"]
    assert "the directory of its members cannot be read" in str(found[-1].error)


class Pipe(io.BytesIO):
    def seek(self, *_):
        raise OSError


@pytest.mark.parametrize("unusual", ["after a program", "piped", "zip64"])
def test_unusual_zips_are_read(tmp_path, monkeypatch, unusual):
    stream = Pipe() if unusual == "piped" else io.BytesIO()
    if unusual == "zip64":
        monkeypatch.setattr(zipfile, "ZIP64_LIMIT", 10)
        monkeypatch.setattr(zipfile, "ZIP_FILECOUNT_LIMIT", 1)
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in numbered(3).items():
            archive.writestr(name, data)
    assert (b"PK\6\6" in stream.getvalue()) is (unusual == "zip64")
    (tmp_path / "a.zip").write_bytes(b"#!/bin/sh\n" * (unusual == "after a program") + stream.getvalue())
    assert outcomes(items(tmp_path / "a.zip")) == [0, 1, 2]


# of an entry in a zip's directory
FIELDS = {"flags": (8, "<H"), "method": (10, "<H"), "size": (24, "<L")}


def make_claim(path, name, field, value):
    offset, form = FIELDS[field]
    patch(path, path.read_bytes().rindex(name) - 46 + offset, struct.pack(form, value))
    return path


@pytest.mark.parametrize(
    ("field", "value", "code"),
    [
        ("flags", 1, "encrypted_member"),
        ("size", 4_000_000_000, "oversized_member"),
        ("method", 12, "unsupported_member"),
        ("size", 5, "corrupt_image"),
    ],
)
def test_a_zips_unreadable_member_costs_the_others_nothing(tmp_path, field, value, code):
    path = pack(tmp_path / "deflated.zip", numbered(3))
    assert outcomes(items(make_claim(path, b"1.png", field, value))) == [0, code, 2]
    # nothing but a bad member is answered too, not refused
    path = pack(tmp_path / "deflated.zip", numbered(1))
    assert outcomes(items(make_claim(path, b"0.png", field, value))) == [code]


def test_a_zip_bomb_is_inflated_no_further_than_it_claims(tmp_path):
    path = make_claim(pack(tmp_path / "deflated.zip", {"a.png": bytes(50_000_000)}), b"a.png", "size", 1000)
    with memory_under(2_000_000):
        assert outcomes(items(path)) == ["corrupt_image"]


@pytest.mark.parametrize("isolate", [True, False])
@pytest.mark.parametrize("kind", ["packed.tgz", "packed.tar.bz2", "packed.tar.xz"])
def test_large_images_of_a_compressed_tar_wait_on_the_disk_and_are_the_same(tmp_path, monkeypatch, kind, isolate):
    content = {"a.png": png(50, 300) + bytes(70_000), "b.png": png(90, 300), "c.png": bytes(90_000)}
    pack(tmp_path / kind, content)
    expected = [record["status"] for record in predict(items(pack(tmp_path / "plain.tar", content)), BrightSession())]
    monkeypatch.setattr(tar, "MAX_HELD", 60_000)
    monkeypatch.setattr(pool, "_LARGE_FILE", 60_000)
    found = items(tmp_path / kind)
    assert [isinstance(item.source, SpooledMember) for item in found] == [True, False, True]
    # another machine gets the bytes
    assert pickle.loads(pickle.dumps(found[0].source)) == content["a.png"]  # noqa: S301 (ours)
    records = predict(found, BrightSession(), isolate=isolate)
    assert [record["status"] for record in records] == expected == ["ok", "ok", "error"]
    assert [record["image_sha256"] for record in records] == [sha256(data).hexdigest() for data in content.values()]


@pytest.mark.parametrize("held", [1 << 20, 1000])
def test_a_compressed_tar_that_is_damaged_after_its_check_is_named(tmp_path, monkeypatch, held):
    path = pack(tmp_path / "packed.tar.xz", {"a.png": png(50, 300) + os.urandom(90_000)})
    flip(path, path.stat().st_size // 2)
    monkeypatch.setattr(tar, "_check_checksums", lambda stream: None)
    monkeypatch.setattr(tar, "MAX_HELD", held)
    good = pack(tmp_path / "plain.tar", {"a.png": png(9)})
    assert outcomes(items(path, good))[-2:] == ["corrupt_archive", 9]


def test_a_huge_dictionary_is_refused_and_two_streams_are_read(tmp_path):
    data = pack(tmp_path / "a.tar", numbered(3), "plain.tar").read_bytes()
    huge = [{"id": lzma.FILTER_LZMA2, "preset": 0, "dict_size": 1400 << 20}]
    (tmp_path / "huge.tar.xz").write_bytes(lzma.compress(data, filters=huge))
    with pytest.raises(UsageError, match=r"more than 256 MiB of memory; pack it again with xz -9 or less"):
        items(tmp_path / "huge.tar.xz")
    (tmp_path / "two.tar.xz").write_bytes(lzma.compress(data[:900]) + bytes(8) + lzma.compress(data[900:]))
    assert outcomes(items(tmp_path / "two.tar.xz")) == [0, 1, 2]


@pytest.mark.parametrize("kind", ["plain.tar", "packed.tgz", "deflated.zip"])
def test_a_member_over_the_limit_is_never_read(tmp_path, kind, monkeypatch):
    path = pack(tmp_path / kind, {**numbered(3), "1.png": png(1) + bytes(5000)})
    monkeypatch.setattr(members, "MAX_MEMBER", 4000)
    assert outcomes(items(path)) == [0, "oversized_member", 2]


# GNU's header for a name that does not fit into the next one
long_name = tarfile.TarInfo("././@LongLink")
long_name.type, long_name.size = tarfile.GNUTYPE_LONGNAME, 512
LONG_NAME = long_name.tobuf(tarfile.GNU_FORMAT) + b"x" * 511 + b"\0"


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.tar", b"", "neither that of a tar"),
        ("a.zip", b"", "directory of its members"),
        ("a.zip", b"no zip at all" * 50, "directory of its members"),
        ("a.zip", b"PK\6\7" + bytes(12) + b"\2\0\0\0PK\5\6" + bytes(18), "span multiple disks"),
        ("a.tar", b"PK\6\7" + bytes(12) + b"\2\0\0\0PK\5\6" + bytes(18), "neither that of a tar"),
        ("a.tar", b"no tar at all" * 50, "damaged"),
        ("a.tar.gz", b"\x1f\x8bnothing", "damaged"),
        (
            "a.tar.gz",
            gzip.compress(bz2.compress(b""), mtime=0),
            "compressed twice, with gzip on the outside; decompress it once",
        ),
        ("a.tar.xz", lzma.compress(png(1)), "compressed with xz, but what is inside is not a tar; decompress it"),
        ("a.tar", b"".join(LONG_NAME for _ in range(3000)), "its first member has thousands of names"),
        ("a.rar", b"Rar!", "an archive of this kind is not read; expected .tar"),
        ("a.tar.zst", b"", "an archive of this kind is not read"),
    ],
)
def test_a_file_that_is_no_archive_alone_is_a_wrong_call(tmp_path, name, data, message):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(UsageError, match=message):
        items(tmp_path / name)


@pytest.mark.parametrize("kind", ["plain.tar", *ZIPS])
@pytest.mark.parametrize(("change", "code"), [("gone", "not_found"), ("rewritten", "unreadable")])
def test_a_changed_archive_gives_no_wrong_image(tmp_path, kind, change, code):
    path = pack(tmp_path / kind, {"a.png": png(1), "b.png": png(2)})
    found = items(path)
    path.unlink()
    if change == "rewritten":
        pack(path, {"b.png": png(2), "a.png": png(1), "c.png": png(3)})
    assert outcomes(found) == [code, code]


@pytest.mark.parametrize("kind", ["plain.tar", "packed.tgz", "stored.zip"])
def test_an_archive_is_read_as_it_is_needed(tmp_path, kind):
    path = pack(tmp_path / kind, {f"{number:05}.png": b"x" * 200_000 for number in range(300)})
    found = discover([str(path)], Skipped())
    next(found)
    # all of them are 60 MB; Python's table of the parts of paths grows by megabytes now and then
    with memory_under(16_000_000):
        assert sum(1 for _ in found) == 299


def test_infer_writes_nothing_outside_its_folder(opal, exact_model, tmp_path):
    (tmp_path / "in").mkdir()
    tar_path = pack(tmp_path / "in/plain.tar", {name: png(50 + number, 96) for number, name in enumerate(NASTY)})
    archive = pack(tmp_path / "in/stored.zip", {"../../b.png": png(9, 96), "broken.png": b"x"})
    out = tmp_path / "work/here/out"
    options = ["--model", exact_model, "--out", out, "--explain", "--device", "cpu", "--threads", "1"]
    done = opal("infer", tar_path, archive, *options)
    assert done.returncode == 3, done.stderr
    records = read_results(out)
    assert [unescape_name(record["image"]) for record in records] == [
        *(f"{tar_path}/{name.lstrip('/')}" for name in NASTY), f"{archive}/../../b.png", f"{archive}/broken.png",
    ]  # fmt: skip
    overlays = {(out / record["overlay"]).resolve() for record in records[:-1]}
    assert all(path.is_file() and path.parent == out / "overlays" for path in overlays)
    outside = {path for path in tmp_path.rglob("*") if out not in path.parents}
    assert outside == {tmp_path / "in", tar_path, archive, tmp_path / "work", tmp_path / "work/here", out}
