"""Discovery of images: from the inputs of a call to a stream of images.

Images are found lazily and in a fixed order: inputs in the order of the call; files of a folder (depth first, with the
names of one folder at a time in memory), of a folder in a bucket and of a glob sorted by the bytes of their names;
files of an archive or list in its own order. Links to folders are followed as torchvision's ImageFolder does, except to
a folder around the link. Inputs that cannot be listed or read become images with an error.
"""

from __future__ import annotations

import glob
import io
import os
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TextIO, cast

from opal_deploy.artifact.files import find_encoding, model_kind
from opal_deploy.datasets.samples import is_hidden, is_skipped
from opal_deploy.errors import ImageError, StoppedEarly, UsageError
from opal_deploy.remote import RemoteFile, is_url, list_files, parse_source, redact
from opal_deploy.sources.archives import archive_items, is_archive_name
from opal_deploy.sources.image import InputImage, Location, Skipped, is_image_name, is_video_name, no_images_error
from opal_deploy.sources.video import NO_VIDEOS, Sampling, VideoOptions, check_video_input, expand_videos

STDIN, LIST_MARK = "-", "@"

# errors of a folder, list or archive rather than of an image: `discover` refuses a call with nothing else
_CONTAINER_CODES = frozenset(
    ["no_images", "unreadable", "storage_unavailable", "corrupt_archive", "not_a_video",
     "no_frames", "unsupported_video", "truncated_video"]
)  # fmt: skip


def discover(
    inputs: Iterable[str], skipped: Skipped, stdin: TextIO | None = None, *, recursive: bool = True
) -> Iterator[InputImage]:
    """Yield the images of `inputs`, in order and numbered; videos in folders and globs are skipped.

    Args:
        inputs: folders, files, globs, archives (.tar, plain or compressed, and .zip; a glob may match them), `-` for
            one path per line on `stdin`, or `@list.txt` for one path per line in that file; all but globs may be URLs.
            A line names a file or an archive. If a file of the exact name exists, it is that file.
        skipped: counts the other files in folders and archives.
        stdin: the stream for `-`.
        recursive: include subfolders.

    Raises:
        UsageError: no image was found. If only some inputs have no images, each of these is an image with an `error`.
    """
    return expand(list_items(inputs, skipped, stdin, recursive=recursive, videos=False))


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
        if problems is not None and item.error is not None and item.error.code in _CONTAINER_CODES:
            problems.append(item)
            continue
        yield from problems or ()
        problems = None
        yield item
    if problems is not None:
        first_source = cast(Location, problems[0].source) if problems else None
        raise UsageError(f"{first_source}: {problems[0].error}" if problems else "no image was given")


def check_inputs(inputs: Iterable[str], sampling: Sampling | None = None) -> None:
    """Refuse a call with a misspelt input before anything is loaded or written.

    `sampling` says which frames of videos are taken; None: only those that are named.

    Raises:
        UsageError: no input, one that does not exist, a model file, or a video without a choice of frames.
        MissingExtra: the package of a bucket is not installed.
    """
    texts = list(inputs)
    if not texts:
        raise UsageError("no images given; expected folders, files, globs, - for a list on standard input, or @FILE")
    for text in texts:
        check_video_input(text, sampling)
        path = text.removeprefix(LIST_MARK)
        if is_url(path):
            file = RemoteFile.parse(path)
            try:
                if file.is_folder() and path != text:
                    raise ImageError("not_a_file", "it is a folder; expected a text file with one path per line")
            except ImageError as error:
                raise UsageError(f"{file}: {error}") from None
        elif text == STDIN or os.path.lexists(text):
            if model_kind(Path(text)) is not None and os.path.isfile(text):
                raise UsageError(f"{text}: looks like a model, not an image; use --model {shlex.quote(text)}")
        elif path != text:
            if os.path.isdir(path) or not os.path.lexists(path):
                raise UsageError(f"{text}: no such list; expected a text file with one path per line")
        elif not glob.has_magic(text):
            raise UsageError(f"{text}: no such file or folder")


def list_items(
    inputs: Iterable[str], skipped: Skipped, stdin: TextIO | None, *, recursive: bool, videos: bool
) -> Iterator[InputImage]:
    """Yield the images of `inputs` without numbers, and with `videos` each video as one item; see `discover`."""
    for text in inputs:
        path = text.removeprefix(LIST_MARK)
        # os.path, unlike pathlib, returns False where access is refused
        if text == STDIN:
            yield from _line_items(stdin_lines(stdin), Path("-"), skipped)
        elif is_url(text):
            yield from _url_items(RemoteFile.parse(text), skipped, recursive=recursive)
        elif os.path.isdir(text):
            yield from folder_items(Path(text), skipped, recursive=recursive, videos=videos)
        elif os.path.lexists(text):
            yield from _file_items(Path(text), skipped)
        elif text.startswith(LIST_MARK) and (is_url(path) or os.path.lexists(path)):
            source = RemoteFile.parse(path) if is_url(path) else Path(path)
            yield from _line_items(file_lines(source), source, skipped)
        elif glob.has_magic(text):
            yield from glob_items(text, skipped, recursive=recursive, videos=videos)
        else:
            # it existed when the call was checked; its record will say not_found
            yield InputImage.at(Path(text))


def _file_items(file: Location, skipped: Skipped, relative: str | None = None) -> Iterator[InputImage]:
    """Yield the members of an archive, or the file itself, whatever its name."""
    if is_archive_name(file.name) and (isinstance(file, RemoteFile) or os.path.isfile(file)):
        yield from archive_items(file, skipped)
    else:
        yield InputImage.at(file, relative)


def _line_items(lines: Iterator[str], origin: Location, skipped: Skipped) -> Iterator[InputImage]:
    empty = True
    for line in lines:
        empty = False
        yield from _file_items(parse_source(line), skipped, redact(line))
    if empty:
        yield InputImage.at(origin, error=ImageError("no_images", "it named no image; expected one path a line"))


def _url_items(file: RemoteFile, skipped: Skipped, *, recursive: bool) -> Iterator[InputImage]:
    """Yield the images of a URL: a file, an archive or a folder; raise StoppedEarly without an answer."""
    try:
        if file.is_folder():
            yield from _bucket_items(file, skipped, recursive=recursive)
        else:
            yield from _file_items(file, skipped)
    except ImageError as error:
        if error.code == "storage_unavailable":
            # images not yet listed would be lost for good; a run can be resumed
            raise StoppedEarly(f"{file}: {error}") from None
        yield InputImage.at(file, error=error)


def _bucket_items(folder: RemoteFile, skipped: Skipped, *, recursive: bool) -> Iterator[InputImage]:
    empty, others = True, Skipped()
    for name, file in list_files(folder, recursive=recursive):
        if is_hidden(*name.split("/")) or not is_image_name(name):
            others.add(file.name)
        else:
            empty = False
            yield InputImage.at(file, name)
    skipped.merge(others)
    if empty:
        yield no_images_error(folder, others)


def glob_items(pattern: str, skipped: Skipped, *, recursive: bool, videos: bool) -> Iterator[InputImage]:
    """Yield what a glob matches: images, members of archives, images of folders; with `videos` videos too."""
    # `**` stands for any number of folders
    matches = sorted(set(glob.glob(pattern, recursive=True)), key=os.fsencode)
    # a pattern that names a hidden folder means it
    empty, names_hidden = True, is_hidden(*Path(pattern).parts)
    for match in matches:
        path = Path(match)
        if is_hidden(*path.parts) and not names_hidden:
            skipped.add(path.name)
        elif os.path.isdir(match):
            # the files of a folder match `**`, too
            if "**" not in pattern:
                empty = False
                yield from folder_items(path, skipped, recursive=recursive, videos=videos)
        elif is_archive_name(match) or _is_taken(match, videos):
            empty = False
            yield from _file_items(path, skipped)
        else:
            skipped.add(path.name)
    if empty:
        what = f"none of its {len(matches)} matches is an image by its name" if matches else "nothing matches"
        yield InputImage.at(Path(pattern), error=ImageError("no_images", what))


def _is_taken(name: str, videos: bool) -> bool:
    return is_image_name(name) or (videos and is_video_name(name))


def folder_items(folder: Path, skipped: Skipped, *, recursive: bool, videos: bool) -> Iterator[InputImage]:
    """Yield a folder's images, with `recursive` its subfolders' too, with `videos` videos too.

    A folder without images is one image with an error.
    """
    empty, others = True, Skipped()
    # a stack, since folders may be nested deeper than Python recurses: a path, and the real paths of the folders around
    # a folder, None for a file
    stack: list[tuple[Path, tuple[str, ...] | None]] = [(folder, ())]
    while stack:
        path, around = stack.pop()
        item = InputImage.at(path)
        if around is not None:
            real = os.path.realpath(path)
            if any(os.path.commonpath([real, outer]) == real for outer in around):
                others.add(path.name)
                continue
            try:
                entries = _scan_folder(path, others, recursive, videos)
            except OSError as error:
                reason = f"the folder cannot be listed: {error.strerror or error}"
                item = InputImage.at(path, error=ImageError("unreadable", reason))
            else:
                stack += [(path / name, (*around, real) if is_folder else None) for name, is_folder in entries[::-1]]
                continue
        empty = False
        yield replace(item, relative=path.relative_to(folder).as_posix())
    skipped.merge(others)
    if empty:
        yield no_images_error(folder, others)


def _scan_folder(folder: Path, skipped: Skipped, recursive: bool, videos: bool) -> list[tuple[str, bool]]:
    """Return the names of a folder's images and subfolders in order, and whether each is a subfolder."""
    with os.scandir(folder) as scanned:
        entries = sorted(scanned, key=lambda entry: os.fsencode(entry.name))
    taken = []
    for entry in entries:
        name = entry.name
        # without a question about links first, a folder that disappears would be no folder; its record says so
        is_folder = entry.is_dir(follow_symlinks=False) or (entry.is_symlink() and os.path.isdir(entry.path))
        if is_skipped(folder / name) if is_folder else is_hidden(name) or not _is_taken(name, videos):
            skipped.add(name)
        elif recursive or not is_folder:
            taken.append((name, is_folder))
    return taken


def stdin_lines(stdin: TextIO | None) -> Iterator[str]:
    """Yield the paths on standard input, one per line; raise UsageError if there is none."""
    if stdin is None:
        raise UsageError("-: there is no standard input to read paths from")
    if isinstance(stdin, io.TextIOWrapper):
        # names are bytes; a file name need not be UTF-8
        stdin.reconfigure(errors="surrogateescape", newline="\n")
    yield from _read_names(stdin)


def file_lines(file: Location) -> Iterator[str]:
    """Yield the paths and URLs in a UTF-8 text file, one per line; raise UsageError or StoppedEarly."""
    try:
        opened = file.open("rb") if isinstance(file, Path) else file.open()
        buffered = opened if hasattr(opened, "peek") else io.BufferedReader(cast(io.RawIOBase, opened))
        encoding = find_encoding(buffered.peek(2)[:2])
        errors = "surrogateescape" if encoding == "utf-8-sig" else "replace"
        with io.TextIOWrapper(buffered, encoding=encoding, errors=errors, newline="\n") as stream:
            yield from _read_names(stream)
    except (OSError, ImageError) as error:
        if isinstance(error, ImageError) and error.code == "storage_unavailable":
            raise StoppedEarly(f"@{file}: {error}") from None
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"@{file}: the list cannot be read ({reason}); expected one path per line") from None


def _read_names(stream: TextIO) -> Iterator[str]:
    # a list written on Windows has "\r\n"
    names = (line.removesuffix("\n").removesuffix("\r") for line in stream)
    return (name for name in names if name)
