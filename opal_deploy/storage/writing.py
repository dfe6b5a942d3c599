"""Writing to buckets: whole objects, which appear at once or not at all."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from opal_deploy.errors import ImageError, StoppedEarly, UsageError
from opal_deploy.storage.files import RemoteFile
from opal_deploy.storage.filesystem import open_filesystem, response_code, retry
from opal_deploy.storage.urls import is_bucket_url

# names of one request that removes them, and of a large file that is sent in pieces: the size of these, and how many
# are in memory
_REMOVED_AT_ONCE = 1000
_PIECE_BYTES, _PIECES = 32 << 20, 2
# a large file that failed is sent again from its beginning
_UPLOAD_PATIENCE_SECONDS = 900.0


def parse_output(url: str) -> RemoteFile:
    """Return the folder of a URL to write to.

    Raises:
        UsageError: it cannot be written to. MissingExtra: what writes to it is not installed.
    """
    folder = RemoteFile.parse(url)
    if not is_bucket_url(url):
        raise UsageError(f"{folder}: cannot be written to; expected a folder, or one in a bucket: s3://, gs://, az://")
    return folder


def write_bytes(file: RemoteFile, data: bytes) -> None:
    """Write an object, in place of what is there.

    Raises:
        StoppedEarly: the bucket does not take it.
    """
    filesystem = open_filesystem(file.url)
    _write(file, lambda: filesystem.pipe_file(file.url, data))


def upload(file: RemoteFile, path: Path) -> None:
    """Write an object of a file's bytes, in place of what is there; of a large file only pieces are in memory.

    Raises:
        StoppedEarly: the bucket does not take it.
    """
    filesystem = open_filesystem(file.url)
    options: dict[str, Any] = {}
    if hasattr(filesystem, "call_s3"):
        options = {"chunksize": _PIECE_BYTES, "max_concurrency": _PIECES}
    _write(file, lambda: filesystem.put_file(str(path), file.url, **options), _UPLOAD_PATIENCE_SECONDS)


def create(file: RemoteFile, data: bytes) -> bool:
    """Write an object unless there is one; return False if there is one of other bytes.

    S3, Google and Azure decide that themselves, whoever else writes at the same moment. Where a storage has no such
    request, as older ones that speak S3's protocol, what is there is replaced.

    Raises:
        StoppedEarly: the bucket does not take it.
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
    """Remove objects of one bucket; those that are not there are no error.

    Raises:
        StoppedEarly: the bucket does not let them be removed.
    """
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
