"""Images by URL: files on a web server or in a bucket, folders and globs in a bucket, archives in either.

As with folders and files on a disk, inputs that cannot be listed or read become images with an error.
"""

from __future__ import annotations

from collections.abc import Iterator

from opal_deploy.errors import ImageError, StoppedEarly, UsageError
from opal_deploy.records.run_files import OVERLAYS, RUN, SHEETS
from opal_deploy.sources.archives import archive_items, is_archive_name
from opal_deploy.sources.image import InputImage
from opal_deploy.sources.items import Skipped, container_error, is_image_name, no_images_error
from opal_deploy.sources.members import is_hidden
from opal_deploy.storage.buckets import expand_glob, has_magic, list_files
from opal_deploy.storage.files import RemoteFile
from opal_deploy.storage.urls import is_bucket_url, redact


def check_input(text: str, list_mark: str) -> None:
    """Refuse a URL that cannot be read, and a misspelt one in a bucket.

    Args:
        text: the URL, for a list with `list_mark` before it.
        list_mark: the mark of a list.

    Raises:
        UsageError: nothing exists there, or it cannot be read. MissingExtra: its package is not installed.
    """
    file = RemoteFile.parse(text.removeprefix(list_mark))
    is_list = text.startswith(list_mark)
    if not is_bucket_url(file.url) or (has_magic(file.url) and not is_list):
        # a web server need not list its files; a glob without a match is found later
        return
    try:
        if is_list:
            file.read_fingerprint()
        elif _is_folder(file) and next(list_files(file, recursive=True), None) is None:
            raise UsageError(f"{file}: no such object or folder in the bucket")
    except ImageError as error:
        what = "the list cannot be read: " if is_list else ""
        raise UsageError(f"{file}: {what}{error}") from None


def url_items(url: str, skipped: Skipped, *, recursive: bool) -> Iterator[InputImage]:
    """Yield the images of a URL: a file, an archive, a folder or a glob; raise StoppedEarly if it does not answer."""
    file = RemoteFile.parse(url)
    try:
        if is_bucket_url(url) and has_magic(url) and not _is_there(file):
            yield from _glob_items(file, skipped)
        elif is_bucket_url(url) and _is_folder(file):
            yield from _folder_items(file, skipped, recursive=recursive)
        else:
            yield from _file_items(file, skipped)
    except ImageError as error:
        if error.code == "storage_unavailable":
            # images not yet listed would be lost for good; a run can be resumed
            raise StoppedEarly(f"{file}: {error}") from None
            # it existed when the call was checked
        yield (
            InputImage.at(file, error=error)
            if error.code == "not_found"
            else container_error(file, error.code, str(error))
        )


def line_items(url: str, skipped: Skipped) -> Iterator[InputImage]:
    """Yield the images of a URL in a list: itself, or an archive's."""
    try:
        file = RemoteFile.parse(url)
    except UsageError as error:
        file = RemoteFile(url, redact(url))
        yield InputImage.at(file, file.shown, ImageError("unreadable", str(error)))
        return
    yield from _file_items(file, skipped, relative=file.shown)


def _file_items(file: RemoteFile, skipped: Skipped, relative: str | None = None) -> Iterator[InputImage]:
    if is_archive_name(file.name):
        yield from archive_items(file, skipped)
    else:
        yield InputImage.at(file, relative or file.name)


def _is_folder(file: RemoteFile) -> bool:
    """Return whether a URL in a bucket names a folder rather than an object."""
    _, _, path = file.url.partition("://")
    if path.endswith("/") or "/" not in path:
        return True
    try:
        file.read_fingerprint()
    except ImageError as error:
        if error.code == "not_a_file":
            return True
        raise
    return False


def _is_there(file: RemoteFile) -> bool:
    try:
        file.read_fingerprint()
    except ImageError as error:
        if error.code != "not_found":
            raise
        return False
    return True


def _folder_items(folder: RemoteFile, skipped: Skipped, *, recursive: bool) -> Iterator[InputImage]:
    found, others = False, Skipped()
    run_dirs: dict[str, bool] = {}
    for name, file in list_files(folder, recursive=recursive):
        if is_hidden(name) or not is_image_name(name) or _is_drawing(folder, name, run_dirs):
            others.add(file)
        else:
            found = True
            yield InputImage.at(file, name)
    skipped.merge(others)
    if not found:
        yield no_images_error(folder, others, recursive=recursive)


def _is_drawing(folder: RemoteFile, name: str, run_dirs: dict[str, bool]) -> bool:
    """Return whether an image is an overlay or a sheet of a run."""
    parts = name.split("/")[:-1]
    for number, part in enumerate(parts):
        if part in (OVERLAYS, SHEETS):
            run = "/".join([*parts[:number], RUN])
            if run not in run_dirs:
                run_dirs[run] = _is_there(folder.child(run))
            if run_dirs[run]:
                return True
    return False


def _glob_items(pattern: RemoteFile, skipped: Skipped) -> Iterator[InputImage]:
    found, matches = False, 0
    for name, file in expand_glob(pattern):
        matches += 1
        if is_hidden(name) or not (is_archive_name(name) or is_image_name(name)):
            skipped.add(file)
        else:
            found = True
            yield from _file_items(file, skipped)
    if not found:
        what = f"none of its {matches} matches is an image by its name" if matches else "nothing matches"
        yield container_error(pattern, "no_images", what)
