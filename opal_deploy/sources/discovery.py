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
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, TextIO, cast

from opal_deploy.artifact.files import model_kind
from opal_deploy.errors import ImageError, StoppedEarly, UsageError
from opal_deploy.preprocess.video import Sampling
from opal_deploy.records.run_files import OVERLAYS, RESULTS, SHEETS
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
from opal_deploy.sources.video import NO_VIDEOS, VideoOptions, check_video_input, expand_videos, parse_frame_name
from opal_deploy.storage.files import RemoteFile
from opal_deploy.storage.urls import is_url

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
    """Yield the images of `inputs`, in order and numbered.

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
    # problems before the first image
    problems: list[InputImage] = []
    found = False
    found_items = _input_items(inputs, skipped, stdin, recursive, videos=video.sampling is not None)
    for index, unnumbered in enumerate(expand_videos(found_items, video)):
        item = replace(unnumbered, index=index)
        if not found and item.error is not None and item.error.code in CONTAINER_CODES:
            problems.append(item)
            continue
        if not found:
            found = True
            yield from problems
        yield item
    if not found:
        raise UsageError(
            f"{cast(Location, problems[0].source)}: {problems[0].error}" if problems else "no image was given"
        )


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
        raise UsageError(
            "no images given; expected folders, files, globs, or - for a list on standard input, @FILE for a list in it"
        )
    for text in texts:
        check_video_input(text, sampling)
        if is_url(text.removeprefix(LIST_MARK)):
            buckets.check_input(text, LIST_MARK)
            continue
        if model_kind(Path(text)) is not None and os.path.isfile(text):
            raise UsageError(f"{text}: looks like a model, not an image; use --model {shlex.quote(text)}")
        if text == STDIN or os.path.lexists(text) or glob.has_magic(text):
            continue
        if (frame := parse_frame_name(text)) is not None and os.path.lexists(frame.video):
            continue
        if not text.startswith(LIST_MARK):
            raise UsageError(f"{text}: no such file or folder")
        if not os.path.lexists(text.removeprefix(LIST_MARK)) or os.path.isdir(text.removeprefix(LIST_MARK)):
            raise UsageError(f"{text}: no such list; expected a text file with one path per line")
    if all(_matches_nothing(text) for text in texts):
        raise UsageError(f"{texts[0]}: nothing matches")


def _matches_nothing(text: str) -> bool:
    """Return whether an input is a glob of local files without a match."""
    is_glob = glob.has_magic(text) and not (is_url(text.removeprefix(LIST_MARK)) or text.startswith(LIST_MARK))
    return is_glob and not os.path.lexists(text) and not expand_glob(text)


def shard(items: Iterable[InputImage], index: int, count: int) -> Iterator[InputImage]:
    """Yield every `count`-th image from the `index`-th on (from 1): shards are disjoint and cover everything."""
    return (item for position, item in enumerate(items) if position % count == index - 1)


def _input_items(
    inputs: Iterable[str], skipped: Skipped, stdin: TextIO | None, recursive: bool, *, videos: bool
) -> Iterator[InputImage]:
    for text in inputs:
        # os.path, unlike pathlib, returns False where access is refused
        if text == STDIN:
            yield from _list_items(stdin_lines(stdin), Path("-"), "standard input", skipped)
        elif is_url(text):
            yield from buckets.url_items(text, skipped, recursive=recursive)
        elif is_url(text.removeprefix(LIST_MARK)):
            remote = RemoteFile.parse(text.removeprefix(LIST_MARK))
            yield from _list_items(remote_lines(remote), remote, "the list", skipped)
        elif os.path.isdir(text):
            yield from folder_items(Path(text), skipped, recursive=recursive, videos=videos)
        elif os.path.lexists(text):
            yield from _file_items(Path(text), skipped)
        elif text.startswith(LIST_MARK) and os.path.lexists(text.removeprefix(LIST_MARK)):
            path = Path(text.removeprefix(LIST_MARK))
            yield from _list_items(file_lines(path), path, "the list", skipped)
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


def _list_items(lines: Iterator[str], origin: Location, called: str, skipped: Skipped) -> Iterator[InputImage]:
    found = False
    for line in lines:
        found = True
        if is_url(line):
            yield from buckets.line_items(line, skipped)
            continue
        path = Path(line)
        if is_archive_name(path.name):
            yield from _file_items(path, skipped)
        else:
            yield InputImage.at(path, line)
    if not found:
        yield container_error(origin, "no_images", f"{called} named no image; expected one path a line")


def glob_items(pattern: str, skipped: Skipped, *, recursive: bool, videos: bool = False) -> Iterator[InputImage]:
    """Yield what a glob matches: images, members of archives, images of folders; with `videos` videos too."""
    matches = sorted(expand_glob(pattern), key=os.fsencode)
    found = False
    for match in matches:
        path = Path(match)
        if os.path.isdir(match):
            if "**" not in pattern:
                found = True
                yield from folder_items(path, skipped, recursive=recursive, videos=videos)
        elif is_archive_name(path.name):
            found = True
            yield from _file_items(path, skipped)
        elif _is_taken(path.name, videos):
            found = True
            yield InputImage.at(path)
        else:
            skipped.add(path)
    if not found:
        what = f"none of its {len(matches)} matches is an image by its name" if matches else "nothing matches"
        yield container_error(Path(pattern), "no_images", what)


def expand_glob(pattern: str) -> set[str]:
    """Return what a glob matches; `**` follows links to folders, but never in a circle."""
    parts = pattern.split(os.sep)
    if "**" not in parts:
        return set(glob.glob(pattern))
    index = parts.index("**")
    base, rest = os.path.join(os.sep if parts[0] == "" else "", *parts[:index]), parts[index + 1 :] or ["*"]
    folders = (folder for start in (glob.glob(base) if base else [""]) for folder in _folders_below(start))
    return {match for folder in folders for match in expand_glob(os.path.join(glob.escape(folder), *rest))}


def _folders_below(start: str) -> Iterator[str]:
    """Yield a folder and its subfolders, without hidden ones and links to a folder around them."""
    stack = [(start, [os.path.realpath(start)])]
    while stack:
        folder, around = stack.pop()
        yield folder
        with suppress(OSError), os.scandir(folder or os.curdir) as entries:
            for entry in entries:
                path = os.path.join(folder, entry.name)
                if entry.name.startswith(".") or not os.path.isdir(path):
                    continue
                real_path = os.path.realpath(path)
                if not (entry.is_symlink() and any(_contains(real_path, outer) for outer in around)):
                    stack.append((path, [*around, real_path]))


def _is_taken(name: str, videos: bool) -> bool:
    return is_image_name(name) or (videos and is_video_name(name))


def folder_items(folder: Path, skipped: Skipped, *, recursive: bool, videos: bool = False) -> Iterator[InputImage]:
    """Yield a folder's images, with `recursive` its subfolders' too, with `videos` videos too.

    A folder without images is one image with an error.
    """
    found = False
    others = Skipped()
    for item in _walk(folder, others, recursive, videos):
        found = True
        yield item
    skipped.merge(others)
    if not found:
        yield no_images_error(folder, others, recursive=recursive)


def _walk(folder: Path, skipped: Skipped, recursive: bool, videos: bool) -> Iterator[InputImage]:
    # an explicit stack: folders may be nested deeper than Python recurses
    stack = [_OpenFolder(os.path.realpath(folder), _scan_folder(folder, skipped, recursive, videos))]
    while stack:
        entry = next(stack[-1].entries, None)
        if entry is None:
            stack.pop()
        elif isinstance(entry, InputImage):
            yield replace(entry, relative=cast(Path, entry.source).relative_to(folder).as_posix())
        else:
            # unlike pathlib's, it is False for a path that is too long
            is_link = os.path.islink(entry)
            real_path = os.path.realpath(entry) if is_link else os.path.join(stack[-1].real_path, entry.name)
            # a link to a folder around it would never end
            if is_link and any(_contains(real_path, around.real_path) for around in stack):
                skipped.add_folder_link(entry)
            else:
                stack.append(_OpenFolder(real_path, _scan_folder(entry, skipped, recursive, videos)))


class _OpenFolder(NamedTuple):
    """A folder that is being walked: its path without links, and its remaining images and subfolders."""

    real_path: str
    entries: Iterator[InputImage | Path]


def _contains(folder: str, path: str) -> bool:
    return os.path.commonpath([folder, path]) == folder


def _scan_folder(folder: Path, skipped: Skipped, recursive: bool, videos: bool) -> Iterator[InputImage | Path]:
    """Yield one folder's images, and its subfolders (linked ones too) as paths."""
    try:
        with os.scandir(folder) as entries:
            sorted_entries = sorted(entries, key=lambda entry: os.fsencode(entry.name))
    except OSError as error:
        yield container_error(folder, "unreadable", f"the folder cannot be listed: {error.strerror or error}")
        return
    is_run_dir = any(entry.name == RESULTS for entry in sorted_entries)
    for entry in sorted_entries:
        path = folder / entry.name
        # overlays of a run are not photographs
        if entry.name.startswith(".") or (is_run_dir and entry.name in (OVERLAYS, SHEETS)):
            skipped.add(path)
        # a folder that has disappeared is listed, too: its record says so
        elif entry.is_dir(follow_symlinks=False) or (entry.is_symlink() and os.path.isdir(path)):
            if recursive:
                yield path
        elif _is_taken(entry.name, videos):
            yield InputImage.at(path, entry.name)
        elif recursive and entry.is_symlink() and not os.path.exists(path):
            # perhaps a folder of images on a disk that is not mounted
            problem = ImageError("not_found", f"it is a link to {os.readlink(path)}, which is not there")
            yield InputImage.at(path, entry.name, problem)
        else:
            skipped.add(path)


def stdin_lines(stdin: TextIO | None) -> Iterator[str]:
    """Yield the paths on standard input, one per line; raise UsageError if there is none."""
    if stdin is None:
        raise UsageError("-: there is no standard input to read paths from")
    if isinstance(stdin, io.TextIOWrapper):
        # names are bytes; a file name need not be UTF-8
        stdin.reconfigure(errors="surrogateescape", newline="\n")
    yield from _read_names(stdin, "-")


def file_lines(path: Path) -> Iterator[str]:
    """Yield the paths in a UTF-8 text file, one per line, relative to the working directory; raise UsageError."""
    try:
        with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="\n") as stream:
            yield from _read_names(stream, f"@{path}")
    except OSError as error:
        raise UsageError(
            f"@{path}: the list cannot be read ({error.strerror or error}); expected a text file with one path per line"
        ) from None


def remote_lines(file: RemoteFile) -> Iterator[str]:
    """Yield the paths and URLs in a remote text file, as `file_lines` does; raise UsageError or StoppedEarly."""
    try:
        with io.TextIOWrapper(file.open(), encoding="utf-8-sig", errors="surrogateescape", newline="\n") as stream:
            yield from _read_names(stream, f"@{file}")
    except ImageError as error:
        if error.code == "storage_unavailable":
            raise StoppedEarly(f"@{file}: {error}") from None
        raise UsageError(
            f"@{file}: the list cannot be read: {error}; expected a text file with one path per line"
        ) from None


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
