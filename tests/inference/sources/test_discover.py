"""Which images a call means."""

from __future__ import annotations

import inspect
import io
import os
import sys
from pathlib import Path

import pytest

from opal_deploy.errors import UsageError
from opal_deploy.inference.sources.discovery import check_inputs, discover, shard
from opal_deploy.inference.sources.items import Item, Skipped


def touch(*paths: Path) -> None:
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")


def names(*inputs: str | Path, skipped: Skipped | None = None, recursive: bool = True) -> list[str]:
    found = discover([str(i) for i in inputs], skipped or Skipped(), recursive=recursive)
    return [item.relative if item.problem is None else f"{item.relative}: {item.problem.code}" for item in found]


def test_a_folders_images_come_sorted_with_those_of_its_subfolders(tmp_path: Path) -> None:
    touch(tmp_path / "b.jpg", tmp_path / "a/2.PNG", tmp_path / "a/10.png", tmp_path / "c/d/e.webp", tmp_path / "B.jpg")
    assert names(tmp_path) == ["B.jpg", "a/10.png", "a/2.PNG", "b.jpg", "c/d/e.webp"]


def test_without_recursion_subfolders_are_left_out(tmp_path: Path) -> None:
    touch(tmp_path / "b.jpg", tmp_path / "a/2.png")
    assert names(tmp_path, recursive=False) == ["b.jpg"]


def test_inputs_keep_the_order_of_the_call(tmp_path: Path) -> None:
    touch(tmp_path / "z.jpg", tmp_path / "a.jpg")
    assert names(tmp_path / "z.jpg", tmp_path / "a.jpg") == ["z.jpg", "a.jpg"]


def test_hidden_files_folders_and_other_files_are_counted_not_explained(tmp_path: Path) -> None:
    touch(tmp_path / "a.jpg", tmp_path / ".b.jpg", tmp_path / ".cache/c.jpg", tmp_path / "notes.txt", tmp_path / "jpg")
    skipped = Skipped()
    assert names(tmp_path, skipped=skipped) == ["a.jpg"]
    assert skipped.count == 4
    assert skipped.examples == [".b.jpg", ".cache", "jpg"]


def test_a_file_named_in_the_call_is_explained_whatever_it_is_called(tmp_path: Path) -> None:
    touch(tmp_path / "picture", tmp_path / ".hidden.jpg")
    assert names(tmp_path / "picture", tmp_path / ".hidden.jpg") == ["picture", ".hidden.jpg"]


@pytest.mark.parametrize("suffix", [".heic", ".svg", ".jxl"])
def test_images_that_cannot_be_decoded_are_not_passed_over_in_silence(tmp_path: Path, suffix: str) -> None:
    touch(tmp_path / f"a{suffix}")
    assert names(tmp_path) == [f"a{suffix}"]


def test_a_folder_reached_by_a_link_loop_is_not_entered_again(tmp_path: Path) -> None:
    touch(tmp_path / "in/a.jpg")
    (tmp_path / "in/loop").symlink_to(tmp_path / "in")
    assert names(tmp_path / "in") == ["a.jpg"]


def test_a_link_to_a_folder_elsewhere_is_followed_once(tmp_path: Path) -> None:
    touch(tmp_path / "data/cats/a.jpg", tmp_path / "in/real/b.jpg")
    (tmp_path / "in/cats").symlink_to(tmp_path / "data/cats")
    (tmp_path / "in/more").symlink_to(tmp_path / "data/cats")
    # their images come under their own names, or would never end
    (tmp_path / "in/alias").symlink_to(tmp_path / "in/real")
    (tmp_path / "data/cats/back").symlink_to(tmp_path / "in")
    (tmp_path / "data/cats/self").symlink_to(tmp_path / "data/cats")
    assert names(tmp_path / "in") == ["cats/a.jpg", "real/b.jpg"]


def test_a_link_given_as_input_is_followed(tmp_path: Path) -> None:
    touch(tmp_path / "in/a.jpg")
    (tmp_path / "link").symlink_to(tmp_path / "in")
    assert names(tmp_path / "link") == ["a.jpg"]


def test_links_to_files_are_images_like_others(tmp_path: Path) -> None:
    touch(tmp_path / "elsewhere/a.jpg", tmp_path / "in/b.jpg")
    (tmp_path / "in/c.jpg").symlink_to(tmp_path / "elsewhere/a.jpg")
    assert names(tmp_path / "in") == ["b.jpg", "c.jpg"]


def test_folders_may_be_nested_deeper_than_python_recurses(tmp_path: Path) -> None:
    deepest = tmp_path / Path(*["d"] * 150)
    touch(deepest / "a.jpg")
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack(0)) + 100)
    try:
        (item,) = discover([str(tmp_path)], Skipped())
    finally:
        sys.setrecursionlimit(limit)
    assert item.path == deepest / "a.jpg"


def test_our_own_overlays_are_not_explained(tmp_path: Path) -> None:
    touch(tmp_path / "a.jpg", tmp_path / "explanations/results.jsonl", tmp_path / "explanations/overlays/000000-a.jpg")
    assert names(tmp_path) == ["a.jpg"]


def test_anothers_folder_of_overlays_is_explained(tmp_path: Path) -> None:
    touch(tmp_path / "overlays/a.jpg")
    assert names(tmp_path) == ["overlays/a.jpg"]


def test_names_that_are_not_utf8_are_found(tmp_path: Path) -> None:
    (Path(os.fsdecode(os.fsencode(tmp_path) + b"/a\xff.jpg"))).write_bytes(b"")
    (item,) = discover([str(tmp_path)], Skipped())
    assert os.fsencode(item.path).endswith(b"/a\xff.jpg")
    assert item.path.exists()


def test_a_folder_alone_without_images_is_a_wrong_call_that_says_what_it_holds(tmp_path: Path) -> None:
    touch(tmp_path / "notes.txt")
    with pytest.raises(UsageError, match=r"no images in it or below \(1 other files, such as notes.txt\); expected"):
        names(tmp_path)


def test_a_folder_without_images_costs_other_inputs_nothing(tmp_path: Path) -> None:
    touch(tmp_path / "one/a.jpg", tmp_path / "two/b.jpg")
    for empty in ("0", "1", "2"):
        (tmp_path / empty).mkdir()
    found = names(*(tmp_path / name for name in ("0", "one", "1", "two", "2")))
    assert found == ["0: no_images", "a.jpg", "1: no_images", "b.jpg", "2: no_images"]


def test_what_other_folders_hold_is_not_said_of_an_empty_one(tmp_path: Path) -> None:
    touch(tmp_path / "one/a.jpg", tmp_path / "one/notes.txt")
    (tmp_path / "two").mkdir()
    _, problem = discover([str(tmp_path / "one"), str(tmp_path / "two")], Skipped())
    assert "notes.txt" not in str(problem.problem)


def test_a_folder_that_cannot_be_listed_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    touch(tmp_path / "a.jpg", tmp_path / "locked/b.jpg")
    scandir = os.scandir

    # the superuser may list everything, so the refusal is put in by hand
    def refusing(path: Path) -> object:
        if Path(path).name == "locked":
            raise PermissionError(13, "Permission denied")
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refusing)
    good, locked = discover([str(tmp_path)], Skipped())
    assert good.problem is None
    assert locked.path == tmp_path / "locked"
    assert locked.problem is not None
    assert locked.problem.code == "unreadable"
    assert "Permission denied" in str(locked.problem)


def test_a_glob_takes_files_and_the_folders_it_matches(tmp_path: Path) -> None:
    touch(tmp_path / "x1.jpg", tmp_path / "x2/a.jpg", tmp_path / "y.jpg", tmp_path / "x3.txt")
    skipped = Skipped()
    assert names(tmp_path / "x*", skipped=skipped) == ["x1.jpg", "a.jpg"]
    assert skipped.count == 1


def test_a_recursive_glob_names_each_image_once(tmp_path: Path) -> None:
    touch(tmp_path / "a.jpg", tmp_path / "b/c.jpg", tmp_path / "b/d/e.jpg")
    assert names(tmp_path / "**") == ["a.jpg", "c.jpg", "e.jpg"]


def test_a_file_whose_name_looks_like_a_glob_is_that_file(tmp_path: Path) -> None:
    touch(tmp_path / "[a].jpg", tmp_path / "a.jpg")
    assert names(tmp_path / "[a].jpg") == ["[a].jpg"]


@pytest.mark.parametrize(
    ("pattern", "message"), [("*.jpg", "nothing matches"), ("*", "none of its 1 matches is an image by its name")]
)
def test_a_glob_without_images_says_so(tmp_path: Path, pattern: str, message: str) -> None:
    touch(tmp_path / "notes.txt")
    with pytest.raises(UsageError, match=message):
        names(tmp_path / pattern)


def test_a_list_on_stdin_names_one_path_a_line() -> None:
    stdin = io.StringIO("a.jpg\n\nb c/d.jpg\nlast.png")
    assert [str(item.path) for item in discover(["-"], Skipped(), stdin)] == ["a.jpg", "b c/d.jpg", "last.png"]


def test_a_list_on_stdin_may_hold_names_that_are_not_utf8() -> None:
    stdin = io.TextIOWrapper(io.BytesIO(b"a\xff.jpg\r\n"), encoding="utf-8")
    (item,) = discover(["-"], Skipped(), stdin)
    assert os.fsencode(item.path) == b"a\xff.jpg"


@pytest.mark.parametrize("stdin", [io.StringIO(""), io.StringIO("\n\n"), None], ids=["empty", "blank lines", "closed"])
def test_a_list_without_names_is_a_wrong_call(stdin: io.StringIO | None) -> None:
    with pytest.raises(UsageError, match="standard input"):
        list(discover(["-"], Skipped(), stdin))


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ([], "no images given; expected folders, files, globs, or -"),
        (["here.jpg", "misspelt.jpg"], "misspelt.jpg: no such file or folder"),
        (["x" * 5000], "no such file or folder"),
    ],
)
def test_a_misspelt_input_is_refused_before_anything_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inputs: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    touch(tmp_path / "here.jpg")
    with pytest.raises(UsageError, match=message):
        check_inputs(inputs)


def test_a_file_that_vanishes_after_the_check_is_an_item_all_the_same(tmp_path: Path) -> None:
    touch(tmp_path / "a.jpg")
    assert names(tmp_path / "a.jpg", tmp_path / "gone.jpg") == ["a.jpg", "gone.jpg"]


@pytest.mark.parametrize("count", [1, 2, 3, 7, 20])
def test_shards_are_disjoint_and_cover_everything(count: int) -> None:
    items = [Item(Path(f"{number}.jpg"), f"{number}.jpg") for number in range(16)]
    shards = [list(shard(items, index, count)) for index in range(1, count + 1)]
    together = [item for part in shards for item in part]
    assert len(together) == len(items)
    assert set(together) == set(items)
    assert max(map(len, shards)) - min(map(len, shards)) <= 1


def test_a_folder_is_read_as_it_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    touch(tmp_path / "a/1.jpg", tmp_path / "b/2.jpg")
    listed: list[str] = []
    scandir = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: listed.append(Path(path).name) or scandir(path))
    next(discover([str(tmp_path)], Skipped()))
    assert "b" not in listed
