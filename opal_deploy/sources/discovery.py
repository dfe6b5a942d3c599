"""Discovery of images: from the inputs of a call to a stream of images.

Images are found lazily and in a fixed order: inputs in the order of the call; files of a folder (depth first, with the
names of one folder at a time in memory) and of a glob sorted by the bytes of their names; files of an archive or list
in its own order. `buckets` finds images by URL. Links to folders are followed as torchvision's ImageFolder does, except
to a folder around the link.
"""

from __future__ import annotations

import glob
import io
import os
import shlex
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TextIO, cast

from opal_deploy.artifact.files import model_kind
from opal_deploy.errors import ImageError, StoppedEarly, UsageError
from opal_deploy.records.run_files import OVERLAYS, RESULTS, SHEETS
from opal_deploy.remote import RemoteFile, is_url
from opal_deploy.sources import buckets
from opal_deploy.sources.archives import archive_items, is_archive_name
from opal_deploy.sources.image import InputImage, Location
from opal_deploy.sources.items import (
    CONTAINER_CODES,
    Skipped,
    container_error,
    is_image_name,
    is_video_name,
    no_images_error,
)
from opal_deploy.sources.video import (
    NO_VIDEOS,
    Sampling,
    VideoOptions,
    check_video_input,
    expand_videos,
    parse_frame_name,
)

# of a line in a list of images: longer than any path or URL
_MOST_CHARACTERS = 1 << 20

STDIN, LIST_MARK = "-", "@"


def discover(
    inputs: Iterable[str],
    skipped: Skipped,
    stdin: TextIO | None = None,
    *,
    recursive: bool = True,
    video: VideoOptions = NO_VIDEOS,
) -> Iterator[InputImage]:
    """Yield the images of `inputs`, in order and numbered, with the chosen frames in place of each video.

    Args:
        inputs: folders, files, globs, archives (.tar, plain or compressed, and .zip; a glob may match them), `-` for
            one path per line on `stdin`, or `@list.txt` for one path per line in that file; all of them may be URLs. A
            line names a file or an archive. If a file of the exact name exists, it is that file.
        skipped: counts the other files in folders and archives.
        stdin: the stream for `-`.
        recursive: include subfolders.
        video: which frames of videos to take, and how; without a choice, videos in folders and globs are skipped.

    Raises:
        UsageError: no image was found. If only some inputs have no images, each of these is an image with an `error`.
    """
    videos = video.sampling is not None
    return expand(list_items(inputs, skipped, stdin, recursive=recursive, videos=videos), video)


def expand(
    items: Iterable[InputImage], video: VideoOptions = NO_VIDEOS, first: int = 0, *, is_part: bool = False
) -> Iterator[InputImage]:
    """Yield listed items, numbered from `first` on, with frames in place of videos.

    Raises UsageError without images, unless the items are only a part of those that are listed.
    """
    # problems before the first image
    problems: list[InputImage] | None = None if is_part else []
    for index, unnumbered in enumerate(expand_videos(items, video), first):
        item = replace(unnumbered, index=index)
        if problems is not None and item.error is not None and item.error.code in CONTAINER_CODES:
            problems.append(item)
            continue
        yield from problems or ()
        problems = None
        yield item
    if problems is not None:
        first_source = cast(Location, problems[0].source) if problems else None
        raise UsageError(f"{first_source}: {problems[0].error}" if problems else "no image was given")


def is_countable(text: str) -> bool:
    """Return whether the images of an input are counted by listing names on a local disk."""
    if text == STDIN or is_url(text.removeprefix(LIST_MARK)):
        return False
    if os.path.isdir(text):
        return True
    if text.startswith(LIST_MARK):
        return not any(map(is_archive_name, file_lines(Path(text.removeprefix(LIST_MARK)))))
    return not any(is_archive_name(name) and not name.lower().endswith(".zip") for name in [text, *expand_glob(text)])


def check_inputs(inputs: Iterable[str], sampling: Sampling | None = None) -> None:
    """Refuse a call with a misspelt input before anything is loaded or written.

    Args:
        inputs: of the call.
        sampling: the frames of videos to take; None: only those that are named.

    Raises:
        UsageError: no input, one that does not exist, a model file, or a video without a choice of frames.
        MissingExtra: a package for an input is not installed.
    """
    texts = list(inputs)
    if not texts:
        raise UsageError("no images given; expected folders, files, globs, - for a list on standard input, or @FILE")
    for text in texts:
        check_video_input(text, sampling)
        if is_url(text.removeprefix(LIST_MARK)):
            file = RemoteFile.parse(text.removeprefix(LIST_MARK))
            buckets.check_input(file, is_list=text.startswith(LIST_MARK))
            continue
        if model_kind(Path(text)) is not None and os.path.isfile(text):
            raise UsageError(f"{text}: looks like a model, not an image; use --model {shlex.quote(text)}")
        if text == STDIN or os.path.lexists(text) or glob.has_magic(text):
            continue
        if (frame := parse_frame_name(text)) is not None and os.path.lexists(frame.video):
            continue
        path = text.removeprefix(LIST_MARK)
        if path == text:
            raise UsageError(f"{text}: no such file or folder")
        if not os.path.lexists(path) or os.path.isdir(path):
            raise UsageError(f"{text}: no such list; expected a text file with one path per line")
    globs = [text for text in texts if glob.has_magic(text) and not is_url(text) and not text.startswith(LIST_MARK)]
    if len(globs) == len(texts) and not any(os.path.lexists(text) or expand_glob(text) for text in texts):
        raise UsageError(f"{texts[0]}: nothing matches")


def list_items(
    inputs: Iterable[str],
    skipped: Skipped,
    stdin: TextIO | None = None,
    *,
    recursive: bool = True,
    videos: bool = False,
) -> Iterator[InputImage]:
    """Yield the images of `inputs` without numbers, and with `videos` each video as one item; see `discover`."""
    for text in inputs:
        # os.path, unlike pathlib, returns False where access is refused
        if text == STDIN:
            yield from _line_items(stdin_lines(stdin), Path("-"), "standard input", skipped)
        elif is_url(text):
            yield from buckets.url_items(text, skipped, recursive=recursive)
        elif is_url(text.removeprefix(LIST_MARK)):
            remote = RemoteFile.parse(text.removeprefix(LIST_MARK))
            yield from _line_items(file_lines(remote), remote, "the list", skipped)
        elif os.path.isdir(text):
            yield from folder_items(Path(text), skipped, recursive=recursive, videos=videos)
        elif os.path.lexists(text):
            yield from _file_items(Path(text), skipped)
        elif text.startswith(LIST_MARK) and os.path.lexists(text.removeprefix(LIST_MARK)):
            path = Path(text.removeprefix(LIST_MARK))
            yield from _line_items(file_lines(path), path, "the list", skipped)
        elif glob.has_magic(text):
            yield from glob_items(text, skipped, recursive=recursive, videos=videos)
        else:
            # it existed when the call was checked; its record will say not_found
            yield InputImage.at(Path(text), Path(text).name)


def _file_items(path: Path, skipped: Skipped) -> Iterator[InputImage]:
    """Yield the members of an archive, or the file itself, whatever its name."""
    if is_archive_name(path.name) and os.path.isfile(path):
        yield from archive_items(path, skipped)
    else:
        yield InputImage.at(path)


def _line_items(lines: Iterator[str], origin: Location, called: str, skipped: Skipped) -> Iterator[InputImage]:
    empty = True
    for line in lines:
        empty = False
        if is_url(line):
            yield from buckets.line_items(line, skipped)
        elif is_archive_name(line):
            yield from _file_items(Path(line), skipped)
        else:
            yield InputImage.at(Path(line), line)
    if empty:
        yield container_error(origin, "no_images", f"{called} named no image; expected one path a line")


def glob_items(pattern: str, skipped: Skipped, *, recursive: bool, videos: bool = False) -> Iterator[InputImage]:
    """Yield what a glob matches: images, members of archives, images of folders; with `videos` videos too."""
    matches = sorted(expand_glob(pattern), key=os.fsencode)
    empty = True
    for match in matches:
        path = Path(match)
        is_folder, is_taken = os.path.isdir(match), is_archive_name(match) or _is_taken(match, videos)
        if is_folder and "**" in pattern:
            # its files match, too
            continue
        if not is_folder and not is_taken:
            skipped.add(path)
            continue
        empty = False
        if is_folder:
            yield from folder_items(path, skipped, recursive=recursive, videos=videos)
        else:
            yield from _file_items(path, skipped)
    if empty:
        what = f"none of its {len(matches)} matches is an image by its name" if matches else "nothing matches"
        yield container_error(Path(pattern), "no_images", what)


def expand_glob(pattern: str) -> set[str]:
    """Return what a glob matches; `**` follows links to folders, but never in a circle."""
    parts = pattern.split(os.sep)
    if "**" not in parts:
        return set(glob.glob(pattern))
    index = parts.index("**")
    base, rest = os.path.join(os.sep if parts[0] == "" else "", *parts[:index]), parts[index + 1 :] or ["*"]
    matches = set[str]()
    stack: list[tuple[str, tuple[str, ...]]] = [(start, ()) for start in (glob.glob(base) if base else [""])]
    while stack:
        folder, around = stack.pop()
        matches |= expand_glob(os.path.join(glob.escape(folder), *rest))
        around = (*around, os.path.realpath(folder))
        with suppress(OSError), os.scandir(folder or os.curdir) as entries:
            names = [entry.name for entry in entries if entry.is_dir() and not entry.name.startswith(".")]
            paths = [os.path.join(folder, name) for name in names]
            stack += [(path, around) for path in paths if not _is_circle(path, around)]
    return matches


def _is_circle(path: str, around: Sequence[str]) -> bool:
    """Return whether a path is a link to one of the folders around it, or to a folder that contains one."""
    return os.path.islink(path) and any(
        os.path.commonpath([os.path.realpath(path), outer]) == os.path.realpath(path) for outer in around
    )


def _is_taken(name: str, videos: bool) -> bool:
    return is_image_name(name) or (videos and is_video_name(name))


def folder_items(folder: Path, skipped: Skipped, *, recursive: bool, videos: bool = False) -> Iterator[InputImage]:
    """Yield a folder's images, with `recursive` its subfolders' too, with `videos` videos too.

    A folder without images is one image with an error.
    """
    empty, others = True, Skipped()
    # an explicit stack, since folders may be nested deeper than Python recurses: a path and the real paths of the
    # folders around it, for a file None
    stack: list[tuple[Path, tuple[str, ...] | None]] = [(folder, ())]
    while stack:
        path, around = stack.pop()
        item = InputImage.at(path)
        if around is not None:
            if _is_circle(str(path), around):
                others.add_folder_link(path)
                continue
            try:
                entries = _scan_folder(path, others, recursive, videos)
            except OSError as error:
                item = container_error(path, "unreadable", f"the folder cannot be listed: {error.strerror or error}")
            else:
                around = (*around, os.path.realpath(path))
                stack += [(path / name, around if is_folder else None) for name, is_folder in reversed(entries)]
                continue
        elif not _is_taken(path.name, videos):
            # perhaps a folder of images on a disk that is not mounted
            target = f"it is a link to {os.readlink(path)}, which is not there"
            item = InputImage.at(path, error=ImageError("not_found", target))
        empty = False
        yield replace(item, relative=path.relative_to(folder).as_posix())
    skipped.merge(others)
    if empty:
        yield no_images_error(folder, others, recursive=recursive)


def _scan_folder(folder: Path, skipped: Skipped, recursive: bool, videos: bool) -> list[tuple[str, bool]]:
    """Return the names of a folder's images, broken links and subfolders in order, and whether each is a subfolder."""
    with os.scandir(folder) as scanned:
        entries = sorted(scanned, key=lambda entry: os.fsencode(entry.name))
    is_run_dir, taken = any(entry.name == RESULTS for entry in entries), []
    for entry in entries:
        name, is_link = entry.name, entry.is_symlink()
        # a folder that disappears is listed all the same: its record says so
        is_folder = entry.is_dir(follow_symlinks=False) or (is_link and os.path.isdir(entry.path))
        is_broken = recursive and is_link and not os.path.exists(entry.path)
        # overlays of a run are not photographs
        if name.startswith(".") or (is_run_dir and name in (OVERLAYS, SHEETS)):
            skipped.add(folder / name)
        elif is_folder:
            taken += [(name, True)] * recursive
        elif _is_taken(name, videos) or is_broken:
            taken.append((name, False))
        else:
            skipped.add(folder / name)
    return taken


def stdin_lines(stdin: TextIO | None) -> Iterator[str]:
    """Yield the paths on standard input, one per line; raise UsageError if there is none."""
    if stdin is None:
        raise UsageError("-: there is no standard input to read paths from")
    if isinstance(stdin, io.TextIOWrapper):
        # names are bytes; a file name need not be UTF-8
        stdin.reconfigure(errors="surrogateescape", newline="\n")
    yield from _read_names(stdin, "-")


def file_lines(file: Location) -> Iterator[str]:
    """Yield the paths and URLs in a UTF-8 text file, one per line; raise UsageError or StoppedEarly."""
    expected = "expected a text file with one path per line"
    try:
        opened = file.open("rb") if isinstance(file, Path) else file.open()
        with io.TextIOWrapper(opened, encoding="utf-8-sig", errors="surrogateescape", newline="\n") as stream:
            yield from _read_names(stream, f"@{file}")
    except OSError as error:
        raise UsageError(f"@{file}: the list cannot be read ({error.strerror or error}); {expected}") from None
    except ImageError as error:
        if error.code == "storage_unavailable":
            raise StoppedEarly(f"@{file}: {error}") from None
        raise UsageError(f"@{file}: the list cannot be read: {error}; {expected}") from None


def _read_names(stream: TextIO, called: str) -> Iterator[str]:
    # a device that never ends its line would fill the memory
    while line := stream.readline(_MOST_CHARACTERS):
        if len(line) == _MOST_CHARACTERS:
            raise UsageError(f"{called}: a line of {len(line):,} characters or more; expected one path per line")
        name = line.removesuffix("\n")
        # a list written on Windows, unless a file has exactly that name
        if name.endswith("\r") and not os.path.lexists(name):
            name = name.removesuffix("\r")
        if name:
            yield name
