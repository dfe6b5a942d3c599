"""Buckets: list files in the byte order of their names, and write whole objects.

S3 lists a page of a thousand names at a time in that order. Other storages are listed folder by folder through fsspec,
with the names of one folder in memory.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from opal_deploy.errors import ImageError, StoppedEarly, UsageError
from opal_deploy.storage.files import FileFingerprint, RemoteFile
from opal_deploy.storage.filesystem import open_filesystem, response_code, retry
from opal_deploy.storage.urls import is_bucket_url

# S3's maximum per request
_PAGE_NAMES = 1000

_MAGIC = re.compile(r"[*?[]")


def has_magic(url: str) -> bool:
    """Return whether a URL may be a glob; a bucket's name is never one."""
    return _MAGIC.search("/".join(url.split("/")[3:])) is not None


def list_files(folder: RemoteFile, *, recursive: bool) -> Iterator[tuple[str, RemoteFile]]:
    """Yield the files in a folder of a bucket, with their paths from it, in the byte order of these.

    Args:
        folder: nothing is yielded if it does not exist.
        recursive: include subfolders.

    Raises:
        ImageError: `unreadable`: listing was refused; `not_found`: there is no such bucket.
    """
    filesystem = open_filesystem(folder.url)
    if hasattr(filesystem, "call_s3"):
        yield from _list_s3(filesystem, folder, recursive)
    else:
        yield from _list_tree(filesystem, folder, "", recursive)


def _list_s3(filesystem: Any, folder: RemoteFile, recursive: bool) -> Iterator[tuple[str, RemoteFile]]:
    bucket, key, _ = filesystem.split_path(folder.url)
    prefix = f"{key.rstrip('/')}/" if key else ""
    more: dict[str, str | int] = {"MaxKeys": _PAGE_NAMES} if recursive else {"MaxKeys": _PAGE_NAMES, "Delimiter": "/"}
    while True:
        page = retry(lambda: filesystem.call_s3("list_objects_v2", Bucket=bucket, Prefix=prefix, **more))
        for entry in page.get("Contents", ()):
            name = entry["Key"][len(prefix) :]
            # an object that stands for a folder
            if name and not name.endswith("/"):
                yield name, folder.child(name, FileFingerprint.from_info(entry))
        if not page.get("IsTruncated"):
            return
        more["ContinuationToken"] = page["NextContinuationToken"]


def _list_tree(filesystem: Any, root: RemoteFile, below: str, recursive: bool) -> Iterator[tuple[str, RemoteFile]]:
    # an explicit stack: folders may be nested deeper than Python recurses
    stack = [_list_folder(filesystem, root, below)]
    while stack:
        entry = next(stack[-1], None)
        if entry is None:
            stack.pop()
        elif entry[1] is not None:
            yield entry[0], root.child(entry[0], entry[1])
        elif recursive:
            stack.append(_list_folder(filesystem, root, entry[0]))


def _list_folder(filesystem: Any, root: RemoteFile, below: str) -> Iterator[tuple[str, FileFingerprint | None]]:
    """Yield the entries of a folder by path from the root; None instead of a fingerprint for a folder."""
    url = f"{root.url.rstrip('/')}/{below}"

    def ls() -> list[dict[str, Any]]:
        try:
            return list(filesystem.ls(url, detail=True))
        except FileNotFoundError:
            return []

    base = str(filesystem._strip_protocol(url)).rstrip("/") + "/"
    entries = []
    for info in retry(ls):
        name = str(info["name"]).rstrip("/").removeprefix(base)
        # an object that stands for the folder itself
        if name and name.rstrip("/") != base.rstrip("/"):
            is_folder = info.get("type") == "directory"
            entries.append((name + "/" if is_folder else name, info, is_folder))
    for name, info, is_folder in sorted(entries, key=lambda entry: os.fsencode(entry[0])):
        yield below + name, None if is_folder else FileFingerprint.from_info(info)


def expand_glob(pattern: RemoteFile) -> Iterator[tuple[str, RemoteFile]]:
    """Yield the files that a glob matches, with their paths from the folder before its first magic part.

    `*` and `?` match within a part of the path, `**` any number of parts; a final slash means everything below. Raises
    as `list_files`.
    """
    from fsspec.utils import glob_translate

    parts = (pattern.url + "**" if pattern.url.endswith("/") else pattern.url).split("/")
    # the bucket is never part of the pattern
    first = next(i for i, part in enumerate(parts) if i > 2 and _MAGIC.search(part))
    rest = parts[first:]
    matches = re.compile(glob_translate("/".join(rest))).match
    root = RemoteFile("/".join(parts[:first]), "/".join(pattern.shown.split("/")[:first]))
    for name, file in list_files(root, recursive=len(rest) > 1 or "**" in rest):
        if matches(name):
            yield name, file


# names of one request that removes them, and of a large file that is sent in pieces: the size of these, and how many
# are in memory
_REMOVED_AT_ONCE = 1000
_PIECE_BYTES, _PIECES = 32 << 20, 2
# whether a folder can be written to is seen by writing to it
_PROBE = ".opal-deploy-can-write"
# a failed upload restarts from the beginning
_UPLOAD_PATIENCE_SECONDS = 900.0


def check_output(url: str) -> RemoteFile:
    """Return the folder of a URL to write to, after writing and removing an empty object there.

    Raises:
        UsageError: the storage is not supported, there is no such bucket, or writing to it is refused.
        MissingExtra: a package for the storage is not installed.
        StoppedEarly: the storage does not answer.
    """
    folder = RemoteFile.parse(url)
    if not is_bucket_url(url):
        raise UsageError(f"{folder}: cannot be written to; expected a folder, or one in a bucket: s3://, gs://, az://")
    probe = folder.child(_PROBE)
    try:
        filesystem = open_filesystem(probe.url)
        retry(lambda: filesystem.pipe_file(probe.url, b""))
    except ImageError as error:
        if error.code == "storage_unavailable":
            raise _failed(folder, error) from None
        raise UsageError(f"--out {folder}: cannot be written to: {error}; or choose another --out") from None
    # who may write need not be allowed to remove
    with suppress(StoppedEarly):
        remove([probe])
    return folder


def write_bytes(file: RemoteFile, data: bytes) -> None:
    """Write an object, or replace it; raise StoppedEarly if the bucket refuses it."""
    filesystem = open_filesystem(file.url)
    _write(file, lambda: filesystem.pipe_file(file.url, data))


def upload(file: RemoteFile, path: Path) -> None:
    """Write an object from a file, in pieces if it is large; raise StoppedEarly if the bucket refuses it."""
    filesystem = open_filesystem(file.url)
    options: dict[str, Any] = {}
    if hasattr(filesystem, "call_s3"):
        options = {"chunksize": _PIECE_BYTES, "max_concurrency": _PIECES}
    _write(file, lambda: filesystem.put_file(str(path), file.url, **options), _UPLOAD_PATIENCE_SECONDS)


def create(file: RemoteFile, data: bytes) -> bool:
    """Write an object unless it exists; return False if one with other bytes exists.

    S3, Google and Azure decide this atomically. Other storages may not support such a request; they replace an existing
    object.

    Raises:
        StoppedEarly: the bucket refuses it.
    """
    filesystem = open_filesystem(file.url)

    def pipe() -> bool:
        try:
            filesystem.pipe_file(file.url, data, mode="create")
        except Exception as error:  # as in `retry`
            status, code = response_code(error)
            if status == 501:
                filesystem.pipe_file(file.url, data)
            elif isinstance(error, FileExistsError) or status == 412 or code == "PreconditionFailed":
                return False
            else:
                raise
        return True

    if _write(file, pipe):
        return True
    # the answer to the first attempt may have been lost
    try:
        with file.open() as stream:
            return stream.read(len(data) + 1) == data
    except ImageError as error:
        raise _failed(file, error) from None


def remove(files: Iterable[RemoteFile]) -> None:
    """Remove objects of one bucket, if they exist; raise StoppedEarly if the bucket refuses it."""
    remaining = iter(files)
    while group := list(islice(remaining, _REMOVED_AT_ONCE)):
        filesystem = open_filesystem(group[0].url)
        if hasattr(filesystem, "call_s3"):
            keys = [filesystem.split_path(file.url) for file in group]
            options = {"Bucket": keys[0][0], "Delete": {"Objects": [{"Key": key[1]} for key in keys], "Quiet": True}}
            _write(group[0], partial(filesystem.call_s3, "delete_objects", **options))
            continue
        for file in group:
            try:
                retry(partial(filesystem.rm_file, file.url))
            except ImageError as error:
                if error.code != "not_found":
                    raise _failed(file, error) from None


def _write(file: RemoteFile, operation: Any, patience: float | None = None) -> Any:
    try:
        return retry(operation, patience)
    except ImageError as error:
        raise _failed(file, error) from None


def _failed(file: RemoteFile, error: ImageError) -> StoppedEarly:
    return StoppedEarly(f"{file}: cannot be written: {error}")
