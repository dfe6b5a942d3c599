"""Listing of buckets: the files below a folder, in the byte order of their names, without holding them all.

S3 lists a page of a thousand names at a time in that order. The other storages are listed folder by folder through
fsspec, which holds the names of one folder at a time.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Any

from opal_deploy.storage.files import FileFingerprint, RemoteFile
from opal_deploy.storage.filesystem import open_filesystem, retry

# the most that S3 gives at a time
_PAGE_NAMES = 1000

_MAGIC = re.compile(r"[*?[]")


def has_magic(url: str) -> bool:
    """Return whether a URL may be a glob: the name of a bucket is never one."""
    return _MAGIC.search("/".join(url.split("/")[3:])) is not None


def list_files(folder: RemoteFile, *, recursive: bool) -> Iterator[tuple[str, RemoteFile]]:
    """Yield the files in a folder of a bucket, with their paths from it, in the byte order of these.

    Args:
        folder: it need not exist: then nothing is yielded.
        recursive: those below its subfolders too.

    Raises:
        ImageError: unreadable: listing was refused; not_found: there is no such bucket.
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
    """Yield the entries of a folder by their paths from the root; None instead of a fingerprint for a folder."""
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

    `*` and `?` match within a part of the path, `**` any number of parts; a slash at the end means all below.

    Raises:
        ImageError: as `list_files`.
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
