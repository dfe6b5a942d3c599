"""Images inside tars and zips: every member answered once, nothing unpacked, damage named."""

import gzip
import io
import os
import pickle
import stat
import struct
import tarfile
import zipfile

import pytest
from PIL import Image

from opal_deploy.errors import ImageError, UsageError
from opal_deploy.preprocess.decode import decode
from opal_deploy.records.names import unescape_name
from opal_deploy.sources import archives
from opal_deploy.sources.archives import TarMember, ZipMember
from opal_deploy.sources.discovery import discover
from opal_deploy.sources.image import Skipped
from tests.bright import memory_under
from tests.sources.packing import KINDS, add_member, pack

NASTY = ["../../up.png", "/etc/root.png", "dir\\back.png", "a\nb.png", "same.png", "<script>.png", "C:\\x.png", "ü.png"]
every_kind = pytest.mark.parametrize("kind", KINDS)
each_reader = pytest.mark.parametrize("kind", ["plain.tar", "packed.tgz", "deflated.zip"])


def png(shade):
    stream = io.BytesIO()
    Image.new("RGB", (8, 8), (shade, shade, shade)).save(stream, "PNG")
    return stream.getvalue()


def numbered(count, tail=b""):
    return {f"{number}.png": png(number) + tail for number in range(count)}


def items(*inputs, skipped=None):
    return list(discover([str(i) for i in inputs], skipped or Skipped()))


def outcomes(images):
    """The grey of each item's image, or the code of its error."""
    result = []
    for item in images:
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


@every_kind
def test_members_come_in_order_and_other_members_are_counted(tmp_path, kind):
    nested = pack(tmp_path / "nested.tar", {"n.png": png(9)}, "plain.tar").read_bytes()
    images = {"b.png": png(1), "a/x.png": png(2), "a/c.PNG": png(3)}
    others = {"b.cls": b"3", "__MACOSX/b.png": b"x", "@eaDir/a.png": b"x", ".hidden/a.png": b"x", "nested.tar": nested}
    skipped = Skipped()
    path = pack(tmp_path / kind, images | others)
    members = items(path, skipped=skipped)
    assert ([item.relative for item in members], skipped.count) == (["b.png", "a/x.png", "a/c.PNG"], 5)
    assert [item.name for item in members] == [f"{path}/b.png", f"{path}/a/x.png", f"{path}/a/c.PNG"]
    # a decode process reads them; only a compressed tar's bytes are carried along
    assert outcomes(pickle.loads(pickle.dumps(members))) == [1, 2, 3]  # noqa: S301
    expected = {"plain.tar": TarMember, "deflated.zip": ZipMember}.get(kind, bytes)
    assert {type(item.source) for item in members} == {expected}
    with pytest.raises(UsageError, match=r"1 other files, such as notes.txt"):
        items(pack(tmp_path / kind, {"notes.txt": b"x"}))


def test_what_is_not_a_regular_file_is_counted(tmp_path):
    odd = {"link.png": tarfile.SYMTYPE, "hard.png": tarfile.LNKTYPE, "pipe.png": tarfile.FIFOTYPE}
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        add_member(tar, "a.png", png(5))
        for name, member_type in odd.items():
            add_member(tar, name, b"", member_type, "a.png")
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        for name, mode in {"a.png": stat.S_IFREG, "link.png": stat.S_IFLNK, "pipe.png": stat.S_IFIFO}.items():
            info = zipfile.ZipInfo(name)
            info.external_attr = mode << 16
            archive.writestr(info, png(5) if name == "a.png" else "a.png")
    for name, count in (("a.tar", 3), ("a.zip", 2)):
        skipped = Skipped()
        assert outcomes(items(tmp_path / name, skipped=skipped)) == [5]
        assert (skipped.count, skipped.examples[0]) == (count, "link.png")


@pytest.mark.parametrize(("name", "kind"), [("tar.zip", "packed.tar.xz"), ("zip.tar", "deflated.zip")])
def test_the_kind_is_told_by_content(tmp_path, name, kind):
    assert outcomes(items(pack(tmp_path / name, {"a.png": png(1)}, kind))) == [1]


@each_reader
def test_nasty_names_are_only_labels(tmp_path, kind):
    (tmp_path / "in").mkdir()
    path = pack(tmp_path / "in" / kind, {name: png(number) for number, name in enumerate(NASTY)})
    before = sorted(tmp_path.rglob("*"))
    members = items(path)
    assert outcomes(members) == list(range(len(NASTY)))
    # one slash where a name begins with another: a label, not a path
    assert [unescape_name(item.name) for item in members] == [f"{path}/{name.lstrip('/')}" for name in NASTY]
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(("kind", "shown"), [("plain.tar", "\\xff.png"), ("deflated.zip", "a\\x00.png")])
@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_odd_and_equal_names_are_answered_each(tmp_path, kind, shown):
    path = tmp_path / kind
    if kind == "plain.tar":
        with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT, encoding="utf-8", errors="surrogateescape") as tar:
            for shade in (1, 2):
                add_member(tar, os.fsdecode(b"\xff.png"), png(shade))
    else:
        with zipfile.ZipFile(path, "w") as archive:
            for shade in (1, 2):
                archive.writestr("a?.png", png(shade))
        path.write_bytes(path.read_bytes().replace(b"a?.png", b"a\0.png"))
    members = items(path)
    assert ([item.name for item in members], outcomes(members)) == ([f"{path}/{shown}"] * 2, [1, 2])


@every_kind
def test_a_cut_archive_is_one_error_after_its_whole_members(tmp_path, kind):
    path = pack(tmp_path / kind, {f"{number}.png": png(number) + os.urandom(3000) for number in range(10)})
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * 0.65)])
    *before, problem, last = items(path, pack(tmp_path / "good.tar", {"last.png": png(99)}, "plain.tar"))
    if kind == "plain.tar":
        # it is read by the process that decodes it
        assert outcomes([before.pop()]) == ["truncated_image"]
    assert outcomes(before) == list(range(len(before)))
    # a zip's directory is at its end; bzip2 has large blocks
    assert (0 < len(before) < 10) is (kind in ("plain.tar", "packed.tgz", "packed.tar.xz"))
    assert (problem.source, outcomes([problem, last])) == (path, ["corrupt_archive", 99])


def lead_back(data, at):
    """Give the member at `at` a size of minus 1024, in the base-256 form of sizes."""
    header = bytearray(data[at : at + 512])
    header[124:136] = b"\xff" * 10 + struct.pack(">h", -1024)
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return data[:at] + header + data[at + 512 :]


@pytest.mark.parametrize(
    "damage", [lambda data, at: data[:at] + b"\xa5" * 20 + data[at + 20 :], lead_back], ids=["damaged", "endless"]
)
@pytest.mark.parametrize("kind", ["plain.tar", "packed.tgz"])
def test_a_damaged_tar_is_one_error_after_the_members_before(tmp_path, damage, kind):
    path = pack(tmp_path / "plain.tar", numbered(4))
    data = damage(path.read_bytes(), path.read_bytes().index(b"2.png"))
    path.write_bytes(gzip.compress(data, mtime=0) if kind == "packed.tgz" else data)
    assert outcomes(items(path)) == [0, 1, "corrupt_archive"]


def make_claim(path, name, field, value):
    """Change a field of a member's entry in a zip's directory."""
    offset, form = {"flags": (8, "<H"), "method": (10, "<H"), "size": (24, "<L")}[field]
    patch(path, path.read_bytes().rindex(name) - 46 + offset, struct.pack(form, value))
    return path


@pytest.mark.parametrize(
    ("field", "value", "code"),
    [("flags", 1, "unsupported_member"), ("method", 97, "unsupported_member"), ("size", 5, "corrupt_image")],
)
def test_a_zips_unreadable_member_costs_the_others_nothing(tmp_path, field, value, code):
    path = pack(tmp_path / "deflated.zip", numbered(3))
    assert outcomes(items(make_claim(path, b"1.png", field, value))) == [0, code, 2]


def test_a_flipped_bit_in_a_zips_member_is_its_error(tmp_path):
    path = pack(tmp_path / "deflated.zip", numbered(3, b"\0" * 100))
    # after the pixels, where a decoder would not notice
    at = path.read_bytes().index(b"2.png") - 40
    patch(path, at, bytes([path.read_bytes()[at] ^ 1]))
    assert outcomes(items(path)) == [0, "corrupt_image", 2]


def test_a_zip_bomb_is_inflated_no_further_than_it_claims(tmp_path):
    path = make_claim(pack(tmp_path / "deflated.zip", {"a.png": bytes(50_000_000)}), b"a.png", "size", 1000)
    with memory_under(2_000_000):
        assert outcomes(items(path)) == ["corrupt_image"]


@each_reader
def test_a_member_over_the_limit_is_never_read(tmp_path, kind, monkeypatch):
    path, skipped = pack(tmp_path / kind, {**numbered(3), "1.png": png(1) + bytes(5000)}), Skipped()
    monkeypatch.setattr(archives, "MAX_MEMBER", 4000)
    assert (outcomes(items(path, skipped=skipped)), skipped.examples) == ([0, 2], ["1.png"])


@pytest.mark.parametrize(
    ("name", "data"), [("a.tar", b""), ("a.zip", b"PK\3\4" + b"no zip at all" * 50), ("a.tar.gz", b"\x1f\x8bnothing")]
)
def test_a_file_that_is_no_archive_alone_is_a_wrong_call(tmp_path, name, data):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(UsageError, match="damaged"):
        items(tmp_path / name)


@pytest.mark.parametrize("kind", ["plain.tar", "deflated.zip"])
@pytest.mark.parametrize(("change", "code"), [("gone", "not_found"), ("rewritten", "archive_changed")])
def test_a_changed_archive_gives_no_wrong_image(tmp_path, kind, change, code):
    path = pack(tmp_path / kind, {"a.png": png(1), "b.png": png(2)})
    members = items(path)
    path.unlink()
    if change == "rewritten":
        pack(path, {"b.png": png(2), "a.png": png(1), "c.png": png(3)})
    assert outcomes(members) == [code, code]


@each_reader
def test_an_archive_that_changes_while_it_is_listed_is_not_complete(tmp_path, kind):
    path = pack(tmp_path / kind, numbered(3))
    images = discover([str(path)], Skipped())
    first = next(images)
    assert outcomes([first]) == [0]
    pack(path, numbered(5))
    errors = [item.error.code for item in images if item.error is not None]
    assert errors[-1] in ("archive_changed", "corrupt_archive")


@each_reader
def test_an_archive_is_read_as_it_is_needed(tmp_path, kind):
    path = pack(tmp_path / kind, {f"{number:05}.png": b"x" * 200_000 for number in range(300)})
    images = discover([str(path)], Skipped())
    next(images)
    # all of them are 60 MB; Python's table of the parts of paths grows by megabytes now and then
    with memory_under(16_000_000):
        assert sum(1 for _ in images) == 299
