"""Which images a call means, in which order; and files of every nasty kind: one record each, and the run goes on."""

import io
import os
import shutil
import socket
from pathlib import Path

import pytest

from opal_deploy.errors import UsageError
from opal_deploy.sources.discovery import check_inputs, discover
from opal_deploy.sources.image import Skipped
from tests.bright import BrightSession, code, predict, save


def touch(*paths):
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")


def names(*inputs, skipped=None, recursive=True):
    found = discover([str(i) for i in inputs], skipped or Skipped(), recursive=recursive)
    return [item.relative if item.error is None else f"{item.relative}: {item.error.code}" for item in found]


def test_a_folders_images_come_sorted_with_those_of_its_subfolders(tmp_path):
    # a suffix that no decoder may know is not passed over in silence
    found = ("b.jpg", "a/2.PNG", "a/10.png", "c/d/e.webp", "B.jpg", "z.heic", "z.svg", "overlays/a.jpg")
    not_images = (".b.jpg", ".cache/c.jpg", "notes.txt", "jpg")
    # what systems and our own runs leave
    ours = ("@eaDir/a.jpg", "a/@eaDir/a.jpg", "__MACOSX/a.jpg", "run/run.json", "run/overlays/000000-a.jpg")
    touch(*(tmp_path / name for name in (*found, *not_images, *ours)))
    skipped = Skipped()
    assert names(tmp_path, skipped=skipped) == sorted(found)
    assert (skipped.count, skipped.examples) == (8, [".b.jpg", ".cache", "@eaDir"])
    # a run whose folder is that of its images
    touch(tmp_path / "run.json")
    assert names(tmp_path) == sorted({*found} - {"overlays/a.jpg"})
    assert names(tmp_path, recursive=False) == ["B.jpg", "b.jpg", "z.heic", "z.svg"]


def test_inputs_keep_the_order_of_the_call_whatever_their_names(tmp_path):
    touch(tmp_path / "z.jpg", tmp_path / "a.jpg", tmp_path / "image", tmp_path / ".hidden.jpg", tmp_path / "[a].jpg")
    # a name like a glob's is that file; one that vanished after the check is an item all the same
    inputs = ["z.jpg", "a.jpg", "image", ".hidden.jpg", "[a].jpg", "gone.jpg"]
    assert names(*(tmp_path / name for name in inputs)) == inputs


def test_linked_folders_are_followed_but_never_in_a_circle(tmp_path):
    touch(tmp_path / "data/cats/a.jpg", tmp_path / "in/real/b.jpg")
    for link, target in {
        "link": "in",
        "in/c.jpg": "data/cats/a.jpg",
        "in/cats": "data/cats",
        "in/more.png": "data/cats",
        "in/alias": "in/real",
        # to a folder around the link, by its own path or by that of a link on the way
        "in/loop": "in",
        "in/above": ".",
        "data/cats/back": "in",
        "data/cats/self": "data/cats",
    }.items():
        (tmp_path / link).symlink_to(tmp_path / target)
    expected = ["alias/b.jpg", "c.jpg", "cats/a.jpg", "more.png/a.jpg", "real/b.jpg"]
    skipped = Skipped()
    assert names(tmp_path / "in", skipped=skipped) == names(tmp_path / "link") == expected
    # cats/back and cats/self twice
    assert skipped.count == 6
    assert names(tmp_path / "in", recursive=False) == ["c.jpg"]


def test_a_folder_without_images_costs_other_inputs_nothing(tmp_path):
    touch(tmp_path / "one/a.jpg", tmp_path / "one/notes.txt", tmp_path / "two/b.jpg")
    for empty in ("0", "1", "2"):
        (tmp_path / empty).mkdir()
    inputs = [str(tmp_path / name) for name in ("0", "one", "1", "two", "2")]
    assert names(*inputs) == ["0: no_images", "a.jpg", "1: no_images", "b.jpg", "2: no_images"]
    # other folders' files are not its own
    assert all("notes.txt" not in str(item.error) for item in discover(inputs, Skipped()))


@pytest.mark.parametrize(
    ("name", "message"),
    [("in", "no images in it"), ("in/*.jpg", "nothing matches"), ("in/*", "none of its 1"), ("@empty", "no image")],
)
def test_an_input_without_images_alone_is_a_wrong_call(tmp_path, monkeypatch, name, message):
    touch(tmp_path / "in/readme.txt")
    (tmp_path / "empty").write_text("\n\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=message):
        names(name)


def test_standard_input_without_names_is_a_wrong_call():
    for content in (io.StringIO("\n\n"), None):
        with pytest.raises(UsageError, match="-: "):
            list(discover(["-"], Skipped(), content))


def test_a_glob_takes_files_and_the_folders_it_matches(tmp_path):
    touch(*(tmp_path / name for name in ("x1.jpg", "x2/a.jpg", "y.jpg", "x3.txt", "x2/d/e.jpg")))
    skipped = Skipped()
    assert names(tmp_path / "x*", skipped=skipped) == ["x1.jpg", "a.jpg", "d/e.jpg"]
    assert skipped.count == 1
    assert names(tmp_path / "**") == ["x1.jpg", "a.jpg", "e.jpg", "y.jpg"]
    assert names(tmp_path / "**/d/*.jpg") == ["e.jpg"]
    touch(tmp_path / "x2/@eaDir/a.jpg")
    assert names(tmp_path / "x*/**/*.jpg") == ["a.jpg", "e.jpg"]
    assert names(tmp_path / "x2/@eaDir/*.jpg") == ["a.jpg"]


def test_a_list_names_one_path_a_line(tmp_path, monkeypatch):
    content = b"a.jpg\r\n\nb c/\xff.jpg\nlast.png"
    expected = [b"a.jpg", b"b c/\xff.jpg", b"last.png"]
    stdin = io.TextIOWrapper(io.BytesIO(content), encoding="utf-8")
    assert [os.fsencode(item.source) for item in discover(["-"], Skipped(), stdin)] == expected
    (tmp_path / "list.txt").write_bytes(b"\xef\xbb\xbf" + content)
    assert [os.fsencode(item.source) for item in discover([f"@{tmp_path}/list.txt"], Skipped())] == expected
    (tmp_path / "list.txt").write_bytes("ä.jpg\r\n".encode("utf-16"))
    assert names(f"@{tmp_path / 'list.txt'}") == ["ä.jpg"]
    # a file whose name looks like a list's is that file
    monkeypatch.chdir(tmp_path)
    touch(tmp_path / "@a.png")
    check_inputs(["@a.png"])
    assert names("@a.png") == ["@a.png"]


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ([], "no images given"),
        (["here.jpg", "misspelt.jpg"], "misspelt.jpg: no such file"),
        (["x" * 5000], "no such file"),
        (["@none.txt"], "@none.txt: no such list"),
        (["@folder"], "@folder: no such list"),
    ],
)
def test_a_misspelt_input_is_refused_before_anything_begins(tmp_path, monkeypatch, inputs, message):
    monkeypatch.chdir(tmp_path)
    touch(tmp_path / "here.jpg", tmp_path / "folder/a.jpg")
    with pytest.raises(UsageError, match=message):
        check_inputs(inputs)


def statuses(items):
    """The status of each item's record, or the code of its error."""
    records = predict(items, BrightSession(), batch=4)
    by_name = {Path(str(r["image"])).name: code(r) or r["status"] for r in records}
    assert len(by_name) == len(records)
    return by_name


def test_special_files_and_broken_links_get_one_record_each(tmp_path):
    save(tmp_path / "in/good.png")
    os.mkfifo(tmp_path / "in/fifo.png")
    # a special file called an archive is not waited for
    os.mkfifo(tmp_path / "a.tar")
    # a name that is not UTF-8
    save(tmp_path / os.fsdecode(b"in/\xff.png"))
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "in/socket.png"))
        (tmp_path / "in/loop.png").symlink_to("loop.png")
        (tmp_path / "in/nowhere.png").symlink_to("gone.png")
        (tmp_path / "in/null.png").symlink_to("/dev/null")
        (tmp_path / "in/empty.png").touch()
        assert statuses(discover([str(tmp_path / "in"), str(tmp_path / "a.tar")], Skipped())) == {
            "good.png": "ok",
            "\\xff.png": "ok",
            "fifo.png": "not_a_file",
            "socket.png": "not_a_file",
            "loop.png": "unreadable",
            "nowhere.png": "not_found",
            "null.png": "not_a_file",
            "empty.png": "empty_file",
            "a.tar": "not_a_file",
        }


def test_a_folder_that_vanishes_during_the_run_is_one_error(tmp_path):
    for name in ("0", "vanishing/a", "z/z"):
        save(tmp_path / f"in/{name}.png")
    images = discover([str(tmp_path / "in")], Skipped())
    first = next(images)
    shutil.rmtree(tmp_path / "in/vanishing")
    assert statuses([first, *images]) == {"0.png": "ok", "vanishing": "unreadable", "z.png": "ok"}
