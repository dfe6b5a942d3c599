"""Files in object storage and on web servers, by URL, through fsspec: the only module that uses it.

Credentials are found as the storage's own libraries find them: environment, profiles, roles of the machine, and
fsspec's configuration files (https://filesystem-spec.readthedocs.io/en/latest/features.html#configuration).
"""

from __future__ import annotations

import errno
import io
import logging
import os
import random
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar, cast
from urllib.parse import parse_qsl, urlsplit

from opal_deploy.errors import ImageError, StoppedEarly, UsageError, first_line, require

T = TypeVar("T")

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_USERINFO = re.compile(r"(?i)\b([a-z][a-z0-9+.-]*://)[^/?#@\s]*@")
_HTTP_QUERY = re.compile(r"(?i)(\bhttps?://[^\s?#'\"]*)\?([^\s#'\"]*)(#[^\s'\"]*)?")
# parameters of signed URLs (AWS, Google, Azure, CloudFront) and others that grant access
_SECRET = re.compile(
    r"(?i)x-amz-|x-goog-|sig|token|key|secret|passw|pwd|pass$|auth|cred|session|jwt|policy|awsaccesskeyid|code$"
)
_MAGIC = re.compile(r"[*?[]")
# scheme: fsspec's module, and our extra that installs it
_BUCKET_SCHEMES = {
    **dict.fromkeys(["s3", "s3a"], ("s3fs", "s3")),
    **dict.fromkeys(["gs", "gcs"], ("gcsfs", "gcs")),
    **dict.fromkeys(["az", "abfs", "abfss"], ("adlfs", "azure")),
}
_SCHEMES = {**_BUCKET_SCHEMES, **dict.fromkeys(["http", "https"], ("aiohttp", "http"))}

# a file up to this size is read at once; of a larger one, ranges of at least the second size
MAX_WHOLE_BYTES, READ_AHEAD_BYTES = 64 << 20, 1 << 20
# storages' names for the version of an object
_VERSIONS = ("ETag", "etag", "generation", "LastModified", "Last-Modified", "last_modified", "updated", "mtime")
# how long temporary failures are retried, with waits that double, and how long a server may be silent
PATIENCE_SECONDS = 20.0
_FIRST_WAIT, _LONGEST_WAIT = 0.2, 5.0
_CONNECT_SECONDS, _READ_SECONDS = 5, 15
# classes of aiohttp, botocore, azure-core and fsspec, by name so that these are not imported
_LOST_CONNECTIONS = frozenset(
    ["EndpointConnectionError", "ConnectTimeoutError", "ProxyConnectionError", "HTTPClientError", "ResponseParserError",
     "ConnectionClosedError", "IncompleteReadError", "ClientConnectionError", "ClientPayloadError", "FSTimeoutError",
     "ServiceRequestError", "ServiceResponseError", "ConnectionError", "TimeoutError"]
)  # fmt: skip
_NO_CREDENTIALS = frozenset(["NoCredentialsError", "PartialCredentialsError", "DefaultCredentialsError"])
# a probe shows whether a folder can be written to
_PROBE = ".opal-deploy-can-write"

# by process, so that a fork opens its own, and by scheme
_filesystems: dict[tuple[int, str], Any] = {}
_lock = threading.Lock()


def is_url(text: str) -> bool:
    """Return whether a text is a URL rather than a path, even one with an unsupported scheme."""
    return _URL.match(text) is not None


def is_bucket_url(text: str) -> bool:
    """Return whether a text is the URL of a bucket, a folder or an object in one."""
    match = _URL.match(text)
    return match is not None and match[1].lower() in _BUCKET_SCHEMES


def has_magic(url: str) -> bool:
    """Return whether a URL may be a glob; a bucket's name is never one."""
    return _MAGIC.search("/".join(url.split("/")[3:])) is not None


def redact(text: str) -> str:
    """Return a text whose URLs show no user names, passwords or signatures.

    For `https://` the whole query is removed if one of its parameters grants access, so that a URL that was signed
    again looks the same; other queries stay, since they may be all that distinguishes two images.
    """

    def without_query(match: re.Match[str]) -> str:
        names = [name for name, _ in parse_qsl(match[2], keep_blank_values=True)]
        return match[1] if any(_SECRET.search(name) for name in names) else match[0]

    def without_user(match: re.Match[str]) -> str:
        # abfs://container@account.dfs.core.windows.net has no user
        keeps = match[1].lower().startswith(("abfs", "az")) and ":" not in match[0][len(match[1]) :]
        return match[0] if keeps else match[1]

    return _HTTP_QUERY.sub(without_query, _USERINFO.sub(without_user, text)) if "://" in text else text


def _parse_scheme(url: str) -> str:
    """Return the scheme of a URL, in lower case; raise UsageError or MissingExtra if it is not supported."""
    name, _, rest = url.partition("://")
    name = name.lower()
    if name not in _SCHEMES:
        expected = "expected a path without file://, or a URL with s3://, gs://, az://, abfs:// or https://"
        raise UsageError(f"{redact(url)}: {name}:// is not read; {expected}")
    if name in _BUCKET_SCHEMES and re.match(r"[^/]*:[^/]*@", rest):
        advice = "set them in the environment, a profile or a role"
        raise UsageError(f"{redact(url)}: credentials inside the URL are not used; {advice}")
    if name in _BUCKET_SCHEMES and rest[:1] in ("", "/"):
        raise UsageError(f"{url}: it names no bucket; expected {name}://BUCKET/...")
    package, extra = _SCHEMES[name]
    for needed in (package, "fsspec"):
        require(needed, extra, f"reading {name}://")
    return name


def _open_filesystem(url: str) -> Any:
    """Return fsspec's file system of a URL, for any thread of this process; raise ImageError if it cannot be opened."""
    scheme = _parse_scheme(url)
    # the account of abfs://container@account.dfs.core.windows.net is an option of its file system
    account = url.partition("://")[2].partition("/")[0] if "@" in url and scheme.startswith(("abfs", "az")) else ""
    key = (os.getpid(), f"{scheme}://{account}")
    with _lock:
        if key not in _filesystems:
            import fsspec

            # the libraries' messages go only to loggers that the caller has set up
            for name in ("fsspec", "s3fs", "gcsfs", "adlfs", "azure", "google", "aiobotocore", "asyncio"):
                logging.getLogger(name).addHandler(logging.NullHandler())
            try:
                filesystem, _ = fsspec.url_to_fs(url, **_options(scheme))
                # of s3fs, whose own loop would multiply the time
                filesystem.retries = 1
                _filesystems[key] = filesystem
            except Exception as error:  # no account, no credentials
                raise to_image_error(error) from None
        return _filesystems[key]


def _options(scheme: str) -> dict[str, Any]:
    # a cached listing would hide changes; fsspec caches one file system per thread
    options: dict[str, Any] = {"use_listings_cache": False, "skip_instance_cache": True}
    if scheme in ("s3", "s3a"):
        from fsspec.config import conf

        # `retry` repeats requests, here and for every other storage
        retries = {"mode": "standard", "total_max_attempts": 1}
        config = {"retries": retries, "connect_timeout": _CONNECT_SECONDS, "read_timeout": _READ_SECONDS}
        options["config_kwargs"] = {**config, **conf.get("s3", {}).get("config_kwargs", {})}
    elif scheme in ("http", "https"):
        import aiohttp

        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS, sock_read=_READ_SECONDS)
        # trust_env: proxies from the environment. URLs stay as given: a signature covers the exact characters. A range
        # of a compressed transfer would be another range
        options |= {"client_kwargs": {"timeout": timeout, "trust_env": True}, "encoded": True}
        options["headers"] = {"Accept-Encoding": "identity"}
    return options


def retry(operation: Callable[[], T]) -> T:
    """Return the result of a repeatable operation; retry it for `PATIENCE_SECONDS` during temporary failures.

    Raises:
        ImageError: `not_found`, `unreadable`, or `storage_unavailable` if all retries failed; the message has no URL.
    """
    began, wait = time.monotonic(), _FIRST_WAIT
    while True:
        try:
            return operation()
        except Exception as error:  # the libraries of the storages have no common class of errors
            problem = to_image_error(error)
            if problem.code != "storage_unavailable" or time.monotonic() - began + wait > PATIENCE_SECONDS:
                raise problem from None
        time.sleep(wait * random.uniform(0.5, 1))
        wait = min(2 * wait, _LONGEST_WAIT)


def to_image_error(error: BaseException) -> ImageError:
    """Return the ImageError for a storage library's exception; `storage_unavailable` for a temporary failure."""
    if isinstance(error, ImageError):
        return error
    # fsspec's own exceptions have the library's as their cause
    names = {kind.__name__ for kind in (*type(error).__mro__, *type(error.__cause__).__mro__)}
    if "FileExpired" in names:
        return ImageError("unreadable", "it was changed while it was read")
    status, code = _response_code(error)
    # first: a broken connection may have the HTTP status of a response that never arrived
    lost = not names.isdisjoint(_LOST_CONNECTIONS)
    answer = "" if lost else code or (f"status {status}" if status is not None else "")
    is_busy = isinstance(error, OSError) and error.errno in (errno.EBUSY, getattr(errno, "EREMOTEIO", errno.EIO))
    if not lost and (isinstance(error, PermissionError) or status in (401, 403)):
        return ImageError("unreadable", f"access is refused ({answer or 'permission denied'})")
    is_busy = is_busy if status is None else status in (408, 425, 429) or (status >= 500 and status != 501)
    if lost or is_busy or code in ("SlowDown", "RequestTimeout"):
        what = answer or type(error.__cause__ or error).__name__
        return ImageError("storage_unavailable", f"the storage did not answer within {PATIENCE_SECONDS:g} s ({what})")
    if not names.isdisjoint(_NO_CREDENTIALS):
        return ImageError("unreadable", "no credentials were found; set them as for the storage's own tools")
    if answer in ("400", "status 400"):
        # the answer to HEAD has no body that would say more
        return ImageError("unreadable", "the request is refused (status 400), as where credentials have expired")
    if status in (404, 410) or (isinstance(error, FileNotFoundError) and status is None):
        return ImageError("not_found", f"no such {'bucket' if code == 'NoSuchBucket' else 'object'}")
    # botocore describes an invalid name after the first line
    text = first_line(Exception(" ".join(str(error).split()) or type(error).__name__))
    return ImageError("unreadable", f"it cannot be used: {answer or redact(text)}")


def _response_code(error: BaseException) -> tuple[int | None, str]:
    """Return the HTTP status and the storage's own code of an error; None and "" where it has none."""
    for cause in (error, error.__cause__):
        response = getattr(cause, "response", None)
        if isinstance(response, dict):  # botocore
            status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
            return (int(status) if status else None), str(response.get("Error", {}).get("Code", ""))
        for name in ("status", "status_code", "code"):  # aiohttp, Azure, gcsfs
            if isinstance(value := getattr(cause, name, None), int):
                return value, ""
    return None, ""


def _unknown_length() -> ImageError:
    return ImageError("unreadable", "the server does not say how long it is; download it first")


class FileFingerprint(NamedTuple):
    """Size in bytes, time of the last change, and version of a file; if they differ, the content has changed.

    A local file has no version, an object no time.
    """

    size: int
    mtime_ns: int
    version: str = ""

    @classmethod
    def read(cls, file: Path | RemoteFile) -> FileFingerprint:
        """Return the fingerprint of a file as it is now; raise ImageError or OSError."""
        if isinstance(file, RemoteFile):
            return file.read_fingerprint()
        status = os.stat(file)
        return cls(status.st_size, status.st_mtime_ns)

    @classmethod
    def from_info(cls, info: Mapping[str, Any]) -> FileFingerprint:
        """Return the fingerprint from fsspec's info of a file; raise ImageError if that has no size."""
        if info.get("size") is None:
            raise _unknown_length()
        return cls(int(info["size"]), 0, next((str(info[key]) for key in _VERSIONS if info.get(key)), ""))


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
        _parse_scheme(url)
        return RemoteFile(url, redact(url))

    def __str__(self) -> str:
        return self.shown

    @property
    def name(self) -> str:
        """The last part of its path."""
        path = self.shown if is_bucket_url(self.shown) else urlsplit(self.shown).path
        return path.rstrip("/").rpartition("/")[2]

    def child(self, name: str, fingerprint: FileFingerprint | None = None) -> RemoteFile:
        """Return the file `name` in this folder or archive."""
        return RemoteFile(f"{self.url.rstrip('/')}/{name}", f"{self.shown.rstrip('/')}/{name}", fingerprint)

    def open(self) -> BinaryIO:
        """Return a seekable stream of the bytes, in memory if they are few; raise ImageError, even if it changed."""
        size = self._info().get("size") if self.fingerprint is None else self.fingerprint.size
        if size is not None and size > MAX_WHOLE_BYTES:
            return self.open_ranges()
        filesystem = _open_filesystem(self.url)

        def read() -> bytes:
            if size is not None:
                # one more byte would show that it has grown; no bytes have no range
                return bytes(filesystem.cat_file(self.url, start=0, end=size + 1)) if size else b""
            # a server that does not say how long a file is may send bytes without end
            with filesystem.open(self.url, "rb") as stream:
                data = bytearray()
                while len(data) <= MAX_WHOLE_BYTES and (piece := stream.read(READ_AHEAD_BYTES)):
                    data += piece
                return bytes(data)

        data = retry(read)
        if len(data) > MAX_WHOLE_BYTES:
            raise _unknown_length()
        if size is not None and len(data) != size:
            raise ImageError("unreadable", "it was changed since it was listed: its length differs")
        return io.BytesIO(data)

    def open_ranges(self) -> BinaryIO:
        """Return a seekable stream that requests ranges as they are read; raise ImageError if the file changed."""
        filesystem = _open_filesystem(self.url)
        stream = retry(lambda: filesystem.open(self.url, "rb", cache_type="none"))
        # fsspec's details of a web page lack its version
        fingerprint = FileFingerprint.from_info(stream.details if is_bucket_url(self.url) else self._info())
        if self.fingerprint not in (None, fingerprint):
            raise ImageError("unreadable", "it was changed since it was listed")
        return cast(BinaryIO, io.BufferedReader(_RetryingStream(stream, fingerprint.size), READ_AHEAD_BYTES))

    def read_fingerprint(self) -> FileFingerprint:
        """Ask the storage for size and version; raise ImageError (`not_found`, `not_a_file`, `unreadable`)."""
        return FileFingerprint.from_info(self._info())

    def _info(self) -> Mapping[str, Any]:
        filesystem = _open_filesystem(self.url)
        info = retry(lambda: filesystem.info(self.url))
        if info.get("type") == "directory":
            raise ImageError("not_a_file", "it is a folder, not a file")
        return cast(Mapping[str, Any], info)


class _RetryingStream(io.RawIOBase):
    """One of fsspec's streams, whose reads are repeated during temporary failures, and raise ImageError."""

    def __init__(self, stream: Any, size: int) -> None:
        self._stream, self._size, self._position = stream, size, 0

    def readinto(self, buffer: Any, /) -> int:
        target = memoryview(buffer).cast("B")
        count = max(0, min(len(target), self._size - self._position))

        def read() -> bytes:
            self._stream.seek(self._position)
            return bytes(self._stream.read(count))

        data = retry(read) if count else b""
        if len(data) != count:
            raise ImageError("unreadable", "it was changed while it was read")
        target[:count] = data
        self._position += count
        return count

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        if base + offset < 0:
            raise OSError(f"negative seek position {base + offset}")
        self._position = base + offset
        return self._position

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True


def parse_source(source: str | os.PathLike[str]) -> Path | RemoteFile:
    """Return a path, or the file of a URL; raise ImageError (`unreadable`) if the URL is not supported."""
    text = os.fspath(source)
    if not is_url(text):
        return Path(text)
    try:
        return RemoteFile.parse(text)
    except UsageError as error:
        raise ImageError("unreadable", str(error)) from None


def list_files(folder: RemoteFile, *, recursive: bool) -> Iterator[tuple[str, RemoteFile]]:
    """Yield the files in a folder of a bucket, with their paths from it, in the byte order of these.

    Nothing is yielded if it does not exist. Raises ImageError (`unreadable`, or `not_found` for a bucket).
    """
    return _listed(folder, lambda storage: storage.find(folder.url, maxdepth=None if recursive else 1, detail=True))


def expand_glob(pattern: RemoteFile) -> Iterator[tuple[str, RemoteFile]]:
    """Yield the files that a glob matches, with their paths from the folder before its first magic part.

    `*` and `?` match within a part of the path, `**` any number of parts; a final slash means everything below. Raises
    as `list_files`.
    """
    url = pattern.url + "**" if pattern.url.endswith("/") else pattern.url
    parts = url.split("/")
    # the bucket is never part of the pattern
    first = next(i for i, part in enumerate(parts) if i > 2 and _MAGIC.search(part))
    root = RemoteFile("/".join(parts[:first]), "/".join(pattern.shown.split("/")[:first]))
    return _listed(root, lambda storage: storage.glob(url, detail=True))


def _listed(root: RemoteFile, listing: Callable[[Any], dict[str, Any]]) -> Iterator[tuple[str, RemoteFile]]:
    filesystem = _open_filesystem(root.url)
    base = f"{filesystem._strip_protocol(root.url)}".rstrip("/") + "/"
    infos = retry(lambda: listing(filesystem))
    for path in sorted(infos, key=os.fsencode):
        name, info = path.removeprefix(base), infos[path]
        # an object may stand for a folder
        if path.startswith(base) and name and not name.endswith("/") and info.get("type") == "file":
            yield name, root.child(name, FileFingerprint.from_info(info))


def check_output(url: str) -> RemoteFile:
    """Return the folder of a URL, after a trial write; raise UsageError or StoppedEarly."""
    folder = RemoteFile.parse(url)
    if not is_bucket_url(url):
        raise UsageError(f"{folder}: cannot be written to; expected a folder, or one in a bucket: s3://, gs://, az://")
    probe = folder.child(_PROBE)
    try:
        filesystem = _open_filesystem(probe.url)
        retry(lambda: filesystem.pipe_file(probe.url, b""))
    except ImageError as error:
        if error.code == "storage_unavailable":
            raise StoppedEarly(f"{folder}: cannot be written: {error}") from None
        raise UsageError(f"--out {folder}: cannot be written to: {error}; or choose another --out") from None
    # permission to write need not include permission to remove
    with suppress(ImageError):
        retry(lambda: filesystem.rm_file(probe.url))
    return folder


def upload_folder(local: Path, url: str) -> None:
    """Upload a finished run folder, without hidden files, summary.json last; raise StoppedEarly if that fails."""
    folder = RemoteFile.parse(url)
    paths = [path for path in local.rglob("*") if path.is_file()]
    for path in sorted(paths, key=lambda path: (path.name == "summary.json", path)):
        name = path.relative_to(local).as_posix()
        if name.startswith(".") or "/." in name:
            continue
        file = folder.child(name)
        try:
            retry(partial(_open_filesystem(url).put_file, str(path), file.url))
        except ImageError as error:
            raise StoppedEarly(f"{file}: cannot be written: {error}; everything is in {local}") from None


def download_folder(url: str, local: Path) -> None:
    """Download the files in a folder of a bucket, none if it does not exist; raise StoppedEarly if that fails."""
    try:
        for name, file in list_files(RemoteFile.parse(url), recursive=True):
            path = local / name
            path.parent.mkdir(parents=True, exist_ok=True)
            with file.open() as stream, path.open("wb") as target:
                shutil.copyfileobj(stream, target)
    except (ImageError, OSError) as error:
        raise StoppedEarly(f"{redact(url)}: cannot be read: {error}") from None


def remove_folder(url: str) -> None:
    """Remove a folder of a bucket; it stays where permission to write does not include that."""
    with suppress(ImageError, FileNotFoundError):
        retry(lambda: _open_filesystem(url).rm(url, recursive=True))
