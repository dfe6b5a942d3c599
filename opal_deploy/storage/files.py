"""A file by its URL: all its bytes, or a range that certainly belongs to the version that was listed."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast
from urllib.parse import urlsplit

from opal_deploy.errors import ImageError, UsageError
from opal_deploy.storage.filesystem import open_filesystem, response_code, retry
from opal_deploy.storage.urls import is_bucket_url, is_url, parse_scheme, redact

# a file up to this size is read at once
MAX_WHOLE_BYTES = 64 << 20
# read ahead in a range, so that the next small read comes from memory
READ_AHEAD_BYTES = 1 << 20
# storages' names for the version of an object: another value, another content
_VERSIONS = ("ETag", "etag", "generation", "LastModified", "Last-Modified", "last_modified", "updated", "mtime")
_CHANGED = "it was changed while it was read"


class FileFingerprint(NamedTuple):
    """Size in bytes, time of the last change, and version of a file; if they differ, the content has changed.

    A local file has no version, an object no time.
    """

    size: int
    mtime_ns: int
    version: str = ""

    @classmethod
    def read(cls, stream: BinaryIO) -> FileFingerprint:
        """Return the fingerprint of an opened file."""
        raw = getattr(stream, "raw", stream)
        if isinstance(raw, RemoteStream):
            return raw.fingerprint
        status = os.fstat(stream.fileno())
        return cls(status.st_size, status.st_mtime_ns)

    @classmethod
    def from_info(cls, info: Mapping[str, Any]) -> FileFingerprint:
        """Return the fingerprint from fsspec's info of a file; raise ImageError if that has no size."""
        size = info.get("size", info.get("Size"))
        if size is None:
            raise ImageError("unreadable", "the server does not say how long it is, so no part of it can be read")
        version = next((str(info[key]) for key in _VERSIONS if info.get(key)), "")
        return cls(int(size), 0, version)


@dataclass(frozen=True)
class RemoteFile:
    """A file by its URL; small and picklable, so that a decode worker reads it.

    Attributes:
        url: with its credentials; only for opening.
        shown: the URL without credentials, for records, messages and look-ups.
        fingerprint: when it was listed; None if it was not.
    """

    url: str
    shown: str
    fingerprint: FileFingerprint | None = None

    @staticmethod
    def parse(url: str) -> RemoteFile:
        """Return the file of a URL, without asking the storage; raise UsageError or MissingExtra."""
        parse_scheme(url)
        return RemoteFile(url, redact(url))

    def __str__(self) -> str:
        return self.shown

    @property
    def name(self) -> str:
        """The last part of its path."""
        path = self.shown if is_bucket_url(self.shown) else urlsplit(self.shown).path
        return path.rstrip("/").rpartition("/")[2]

    def as_posix(self) -> str:
        """Return the URL without credentials, as `Path.as_posix` returns a path."""
        return self.shown

    def child(self, name: str, fingerprint: FileFingerprint | None = None) -> RemoteFile:
        """Return the file `name` in this folder or archive."""
        return RemoteFile(f"{self.url.rstrip('/')}/{name}", f"{self.shown.rstrip('/')}/{name}", fingerprint)

    def open(self) -> BinaryIO:
        """Return a seekable stream of the bytes, in memory if they are few; raises ImageError if the file changed."""
        if self.fingerprint is None or self.fingerprint.size <= MAX_WHOLE_BYTES:
            data = self._read_whole()
            if data is not None:
                if self.fingerprint is not None and len(data) != self.fingerprint.size:
                    raise ImageError("unreadable", "it was changed since it was listed: its length differs")
                return io.BytesIO(data)
        return self.open_ranges()

    def open_ranges(self, read_ahead: int = READ_AHEAD_BYTES) -> BinaryIO:
        """Return a seekable stream that requests ranges as they are read; raises ImageError if the file changed."""
        pinned = self if self.fingerprint is not None else replace(self, fingerprint=self.read_fingerprint())
        return cast(BinaryIO, io.BufferedReader(RemoteStream(pinned), max(1, read_ahead)))

    def read_fingerprint(self) -> FileFingerprint:
        """Ask the storage for size and version; raise ImageError (`not_found`, `not_a_file`, `unreadable`)."""
        filesystem = open_filesystem(self.url)
        info = retry(lambda: filesystem.info(self.url))
        if info.get("type") == "directory":
            raise ImageError("not_a_file", "it is a folder, not a file")
        return FileFingerprint.from_info(info)

    def _read_whole(self) -> bytes | None:
        """Return all bytes in one request; None if there are too many."""
        filesystem = open_filesystem(self.url)
        if not is_bucket_url(self.url):
            data = retry(lambda: _get(filesystem, self.url, MAX_WHOLE_BYTES + 1))
            return None if len(data) > MAX_WHOLE_BYTES else data
        if self.fingerprint is not None:
            # an object without bytes has no range
            return self._read_range(0, self.fingerprint.size + 1) if self.fingerprint.size else b""
        data = self._read_range(0, MAX_WHOLE_BYTES + 1)
        return None if len(data) > MAX_WHOLE_BYTES else data

    def _read_range(self, start: int, end: int) -> bytes:
        """Return the bytes from `start` to before `end` of the current version."""
        filesystem = open_filesystem(self.url)

        def read() -> bytes:
            try:
                if not is_bucket_url(self.url):
                    return _get(filesystem, self.url, end - start, start)
                return bytes(filesystem.cat_file(self.url, start=start, end=end))
            except Exception as error:  # as in `retry`
                # storages refuse any range of an object without bytes
                if start == 0 and response_code(error)[0] == 416:
                    return b""
                raise

        return retry(read)

    def read_range(self, start: int, end: int) -> bytes:
        """Return the bytes from `start` to before `end` of the listed version; raise ImageError if it changed."""
        assert self.fingerprint is not None  # `open_ranges` asked for it
        if start >= end:
            return b""
        filesystem = open_filesystem(self.url)
        if hasattr(filesystem, "call_s3") and self.fingerprint.version:
            version = self.fingerprint.version
            data = retry(lambda: _get_s3_range(filesystem, self.url, start, end, version))
        else:
            data = self._read_range(start, end)
            # the version after the read is the bytes' version, since older versions never return
            if self.read_fingerprint() != self.fingerprint:
                raise ImageError("unreadable", _CHANGED)
        if len(data) != end - start:
            raise ImageError("unreadable", "the server gives no parts of files, or it was changed while it was read")
        return data


def parse_source(source: str | os.PathLike[str]) -> Path | RemoteFile:
    """Return a path, or the file of a URL; raise ImageError (`unreadable`) if the URL is not supported."""
    text = os.fspath(source)
    if not is_url(text):
        return Path(text)
    try:
        return RemoteFile.parse(text)
    except UsageError as error:
        raise ImageError("unreadable", str(error)) from None


class RemoteStream(io.RawIOBase):
    """A stream of the bytes of one version of a file; every read is a request."""

    def __init__(self, file: RemoteFile) -> None:
        assert file.fingerprint is not None
        self._file, self._position, self.fingerprint = file, 0, file.fingerprint

    def readinto(self, buffer: Any, /) -> int:
        target = memoryview(buffer).cast("B")
        end = min(self._position + len(target), self.fingerprint.size)
        data = self._file.read_range(self._position, end) if end > self._position else b""
        target[: len(data)] = data
        self._position += len(data)
        return len(data)

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self.fingerprint.size}[whence]
        if base + offset < 0:
            raise OSError(f"negative seek position {base + offset}")
        self._position = base + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True


def _get(filesystem: Any, url: str, limit: int, start: int | None = None) -> bytes:
    """Return the body of a web page from `start` on, and request at most `limit` bytes; raise ImageError."""
    from fsspec.asyn import sync

    options = dict(filesystem.kwargs)
    if start is not None:
        # a range of a compressed transfer would be another range
        part = {"Range": f"bytes={start}-{start + limit - 1}", "Accept-Encoding": "identity"}
        options["headers"] = {**options.get("headers", {}), **part}

    async def get() -> bytes:
        session = await filesystem.set_session()
        async with session.get(filesystem.encode_url(url), **options) as response:
            response.raise_for_status()
            if start and response.status != 206:
                # it sends the file from its beginning
                raise ImageError("unreadable", "the server gives no parts of files; download it first")
            pieces, size = [], 0
            async for piece in response.content.iter_any():
                pieces.append(piece)
                size += len(piece)
                if size >= limit:
                    break
            return b"".join(pieces)[:limit]

    return cast(bytes, sync(filesystem.loop, get))


def _get_s3_range(filesystem: Any, url: str, start: int, end: int, version: str) -> bytes:
    """Return a range of an object, which S3 refuses if its ETag has changed; then raise ImageError."""
    from fsspec.asyn import sync

    bucket, key, version_id = filesystem.split_path(url)
    named = {"VersionId": version_id} if version_id else {}

    async def get() -> bytes:
        response = await filesystem._call_s3(
            "get_object", Bucket=bucket, Key=key, Range=f"bytes={start}-{end - 1}", IfMatch=version, **named
        )
        async with response["Body"] as body:
            return cast(bytes, await body.read())

    try:
        return cast(bytes, sync(filesystem.loop, get))
    except Exception as error:
        response = getattr(error, "response", None) or getattr(error.__cause__, "response", None)
        if isinstance(response, dict) and response.get("Error", {}).get("Code") in ("PreconditionFailed", "412"):
            raise ImageError("unreadable", _CHANGED) from None
        raise
