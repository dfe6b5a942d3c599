"""Images by URL: files on a web server or in a bucket, folders and globs in a bucket, archives in either.

As with folders and files on a disk, inputs that cannot be listed or read become images with an error.
"""

from __future__ import annotations

from collections.abc import Iterator

from opal_deploy.errors import ImageError, StoppedEarly, UsageError
from opal_deploy.records.run_files import OVERLAYS, RESULTS, SHEETS
from opal_deploy.remote import RemoteFile, expand_glob, has_magic, is_bucket_url, list_files, redact
from opal_deploy.sources.archives import archive_items, is_archive_name, is_hidden
from opal_deploy.sources.image import InputImage
from opal_deploy.sources.items import Skipped, container_error, is_image_name, no_images_error


def check_input(file: RemoteFile, *, is_list: bool) -> None:
    """Refuse a misspelt URL in a bucket; raise UsageError if nothing exists there, or it cannot be read."""
    if not is_bucket_url(file.url) or (has_magic(file.url) and not is_list):
        # a web server need not list its files; a glob without a match is found later
        return
    try:
        if is_list:
            file.read_fingerprint()
        elif _is_folder(file) and next(list_files(file, recursive=True), None) is None:
            raise UsageError(f"{file}: no such object or folder in the bucket")
    except ImageError as error:
        raise UsageError(f"{file}: {'the list cannot be read: ' if is_list else ''}{error}") from None


def url_items(url: str, skipped: Skipped, *, recursive: bool) -> Iterator[InputImage]:
    """Yield the images of a URL: a file, an archive, a folder or a glob; raise StoppedEarly if it does not answer."""
    file = RemoteFile.parse(url)
    try:
        if is_bucket_url(url) and has_magic(url) and not _exists(file):
            yield from _glob_items(file, skipped)
        elif is_bucket_url(url) and _is_folder(file):
            yield from _folder_items(file, skipped, recursive=recursive)
        else:
            yield from _file_items(file, skipped, file.name)
    except ImageError as error:
        if error.code == "storage_unavailable":
            # images not yet listed would be lost for good; a run can be resumed
            raise StoppedEarly(f"{file}: {error}") from None
        yield container_error(file, error.code, str(error))


def line_items(url: str, skipped: Skipped) -> Iterator[InputImage]:
    """Yield the images of a URL in a list: itself, or an archive's."""
    try:
        file = RemoteFile.parse(url)
    except UsageError as error:
        file = RemoteFile(url, redact(url))
        yield InputImage.at(file, file.shown, ImageError("unreadable", str(error)))
        return
    yield from _file_items(file, skipped, file.shown)


def _file_items(file: RemoteFile, skipped: Skipped, relative: str) -> Iterator[InputImage]:
    if is_archive_name(file.name):
        yield from archive_items(file, skipped)
    else:
        yield InputImage.at(file, relative)


def _is_folder(file: RemoteFile) -> bool:
    """Return whether a URL in a bucket names a folder rather than an object."""
    path = file.url.partition("://")[2]
    if path.endswith("/") or "/" not in path:
        return True
    try:
        file.read_fingerprint()
    except ImageError as error:
        if error.code == "not_a_file":
            return True
        raise
    return False


def _exists(file: RemoteFile) -> bool:
    try:
        file.read_fingerprint()
    except ImageError as error:
        if error.code not in ("not_found", "not_a_file"):
            raise
        return False
    return True


def _folder_items(folder: RemoteFile, skipped: Skipped, *, recursive: bool) -> Iterator[InputImage]:
    empty, others = True, Skipped()
    files = list(list_files(folder, recursive=recursive))
    run_folders = [name.removesuffix(RESULTS) for name, file in files if file.name == RESULTS]
    # overlays of a run are not photographs
    drawings = tuple(f"{run}{kind}/" for run in run_folders for kind in (OVERLAYS, SHEETS))
    for name, file in files:
        if is_hidden(name) or not is_image_name(name) or name.startswith(drawings):
            others.add(file)
        else:
            empty = False
            yield InputImage.at(file, name)
    skipped.merge(others)
    if empty:
        yield no_images_error(folder, others, recursive=recursive)


def _glob_items(pattern: RemoteFile, skipped: Skipped) -> Iterator[InputImage]:
    empty, matches = True, 0
    for name, file in expand_glob(pattern):
        matches += 1
        if is_hidden(name) or not (is_archive_name(name) or is_image_name(name)):
            skipped.add(file)
        else:
            empty = False
            yield from _file_items(file, skipped, file.name)
    if empty:
        what = f"none of its {matches} matches is an image by its name" if matches else "nothing matches"
        yield container_error(pattern, "no_images", what)
