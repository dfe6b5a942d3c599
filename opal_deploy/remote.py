"""Files in object storage, by URL, through fsspec: the only module that uses it.

Credentials are found as the storage's own libraries find them: environment, profiles, roles of the machine, and
fsspec's configuration files (https://filesystem-spec.readthedocs.io/en/latest/features.html#configuration). These
libraries also repeat requests that fail.
"""

from __future__ import annotations

import errno
import functools
import io
import logging
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

from opal_deploy.errors import ImageError, StoppedEarly, UsageError, first_line, require

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_USERINFO = re.compile(r"(?i)\b([a-z][a-z0-9+.-]*://)[^/?#@\s]*@")
_HTTP_QUERY = re.compile(r"(?i)(\bhttps?://[^\s?#'\"]*)\?([^\s#'\"]*)(#[^\s'\"]*)?")
# scheme: fsspec's module, and our extra that installs it
_SCHEMES = {"s3": ("s3fs", "s3"), "gs": ("gcsfs", "gcs"), "az": ("adlfs", "azure")}

# a file up to this size is read at once; of a larger one, ranges of at least the second size
MAX_WHOLE_BYTES, READ_AHEAD_BYTES = 64 << 20, 1 << 20
# storages' names for the version of an object
_VERSIONS = ("ETag", "etag", "generation", "LastModified", "last_modified", "updated")
# classes of aiohttp, botocore, azure-core and fsspec, by name so that these are not imported
_LOST_CONNECTIONS = frozenset(
    ["EndpointConnectionError", "ConnectTimeoutError", "ProxyConnectionError", "HTTPClientError", "ResponseParserError",
     "ConnectionClosedError", "IncompleteReadError", "ClientConnectionError", "ClientPayloadError", "FSTimeoutError",
     "ServiceRequestError", "ServiceResponseError", "ConnectionError", "TimeoutError"]
)  # fmt: skip
_NO_CREDENTIALS = frozenset(["NoCredentialsError", "PartialCredentialsError", "DefaultCredentialsError"])
# a probe shows whether a folder can be written to
_PROBE = ".opal-deploy-can-write"


def is_url(text: str) -> bool:
    """Return whether a text is a URL rather than a path, even one with an unsupported scheme."""
    return _URL.match(text) is not None


def redact(text: str) -> str:
    """Return a text whose URLs show no user names and passwords, and no queries, which may be signatures."""
    return _HTTP_QUERY.sub(r"\1", _USERINFO.sub(r"\1", text)) if "://" in text else text


def _parse_scheme(url: str) -> str:
    """Return the scheme of a URL, in lower case; raise UsageError or MissingExtra if it is not supported."""
    name, _, rest = url.partition("://")
    name = name.lower()
    if name not in _SCHEMES:
        expected = "expected a path, or a URL with s3://, gs:// or az://; download other files first"
        raise UsageError(f"{redact(url)}: {name}:// is not read; {expected}")
    if re.match(r"[^/]*:[^/]*@", rest):
        advice = "set them in the environment, a profile or a role"
        raise UsageError(f"{redact(url)}: credentials inside the URL are not used; {advice}")
    if rest[:1] in ("", "/"):
        raise UsageError(f"{url}: it names no bucket; expected {name}://BUCKET/...")
    package, extra = _SCHEMES[name]
    for needed in (package, "fsspec"):
        require(needed, extra, f"reading {name}://")
    return name


def _open_filesystem(url: str) -> Any:
    """Return fsspec's file system of a URL, for any thread of this process; raise ImageError if it cannot be opened."""
    try:
        scheme = _parse_scheme(url)
    except UsageError as error:
        raise ImageError("unreadable", str(error)) from None
    # without an account or credentials, some cannot be opened
    with storage_errors():
        return _connect(os.getpid(), scheme)


# by process, so that a fork opens its own
@functools.cache
def _connect(process_id: int, scheme: str) -> Any:
    import fsspec

    # the libraries' messages go only to loggers that the caller has set up
    for name in ("fsspec", "s3fs", "gcsfs", "adlfs", "azure", "google", "aiobotocore", "asyncio"):
        logging.getLogger(name).addHandler(logging.NullHandler())
    # a cached listing would hide changes; fsspec caches one file system per thread
    return fsspec.filesystem(scheme, use_listings_cache=False, skip_instance_cache=True)


@contextmanager
def storage_errors() -> Iterator[None]:
    """Turn the exceptions of storages' libraries, which have no common class, into an ImageError."""
    try:
        yield
    except Exception as error:
        raise to_image_error(error) from None


def to_image_error(error: BaseException) -> ImageError:
    """Return the ImageError for a storage library's exception; `storage_unavailable` for a temporary failure."""
    if isinstance(error, ImageError):
        return error
    # fsspec's own exceptions have the library's as their cause
    cause = error.__cause__ or error
    names = {kind.__name__ for kind in (*type(error).__mro__, *type(cause).__mro__)}
    status, reason = _find_status(cause), first_line(Exception(redact(" ".join(f"{cause}".split())) or repr(cause)))
    # a broken connection may have the HTTP status of a response that never arrived
    is_lost = not names.isdisjoint(_LOST_CONNECTIONS) or (status is None and getattr(error, "errno", 0) == errno.EBUSY)
    if is_lost or status in (408, 425, 429, 500, 502, 503, 504):
        return ImageError("storage_unavailable", f"the storage did not answer ({reason})")
    if status in (404, 410) or (status is None and isinstance(error, FileNotFoundError)):
        return ImageError("not_found", f"it does not exist ({reason})")
    if not names.isdisjoint(_NO_CREDENTIALS):
        reason = "no credentials were found; set them as for the storage's own tools"
    elif status in (400, 401, 403):
        # the answer to HEAD has no body that would say more
        reason = f"access is refused ({reason}); perhaps the credentials have expired"
    elif "FileExpired" in names:
        reason = "it was changed while it was read"
    return ImageError("unreadable", f"it cannot be used: {reason}")


def _find_status(error: BaseException) -> int | None:
    """Return the HTTP status of a storage library's error; None if it has none."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):  # botocore
        return cast(int | None, response.get("ResponseMetadata", {}).get("HTTPStatusCode"))
    # Azure, gcsfs
    statuses = [getattr(error, name, None) for name in ("status", "status_code", "code")]
    return next((status for status in statuses if isinstance(status, int)), None)


class FileFingerprint(NamedTuple):
    """Size in bytes, time of a local file's last change, version of an object; if they differ, so may the content."""

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
        """Return the fingerprint from fsspec's info of a file."""
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
        return self.shown.rstrip("/").rpartition("/")[2]

    def child(self, name: str, fingerprint: FileFingerprint | None = None) -> RemoteFile:
        """Return the file `name` in this folder or archive."""
        return RemoteFile(f"{self.url.rstrip('/')}/{name}", f"{self.shown.rstrip('/')}/{name}", fingerprint)

    def open(self) -> BinaryIO:
        """Return a seekable stream of the bytes, in memory if they are few; raise ImageError, even if it changed."""
        size = (self.fingerprint or self.read_fingerprint()).size
        if size > MAX_WHOLE_BYTES:
            return self.open_ranges()
        filesystem = _open_filesystem(self.url)
        with storage_errors():
            # one more byte would show that it has grown; no bytes have no range
            data = filesystem.cat_file(self.url, start=0, end=size + 1) if size else b""
        if len(data) != size:
            raise ImageError("unreadable", "it was changed since it was listed: its length differs")
        return io.BytesIO(data)

    def open_ranges(self) -> BinaryIO:
        """Return a seekable stream that requests ranges as they are read; raise ImageError if the file changed.

        Its reads raise what the storage's library raises, see `storage_errors`.
        """
        filesystem = _open_filesystem(self.url)
        with storage_errors():
            stream = filesystem.open(self.url, "rb", block_size=READ_AHEAD_BYTES, cache_type="readahead")
        if self.fingerprint not in (None, FileFingerprint.from_info(stream.details)):
            raise ImageError("unreadable", "it was changed since it was listed")
        return cast(BinaryIO, stream)

    def read_fingerprint(self) -> FileFingerprint:
        """Ask the storage for size and version; raise ImageError (`not_found`, `not_a_file`, `unreadable`)."""
        info = self._info()
        if info.get("type") == "directory":
            raise ImageError("not_a_file", "it is a folder, not a file")
        return FileFingerprint.from_info(info)

    def is_folder(self) -> bool:
        """Return whether a bucket's URL names a folder rather than an object; raise ImageError (`not_found`)."""
        return self._info().get("type") == "directory" or self.url.endswith("/")

    def _info(self) -> Mapping[str, Any]:
        filesystem = _open_filesystem(self.url)
        with storage_errors():
            return cast(Mapping[str, Any], filesystem.info(self.url))


def parse_source(source: str | os.PathLike[str]) -> Path | RemoteFile:
    """Return a path, or the file of a URL; opening it raises ImageError (`unreadable`) if the URL is not supported."""
    text = os.fspath(source)
    return RemoteFile(text, redact(text)) if is_url(text) else Path(text)


def list_files(folder: RemoteFile, *, recursive: bool = True) -> Iterator[tuple[str, RemoteFile]]:
    """Yield the files in a folder of a bucket, with their paths from it, in the byte order of these.

    Nothing is yielded if it does not exist. Raises ImageError (`unreadable`, or `not_found` for a bucket).
    """
    filesystem = _open_filesystem(folder.url)
    base = f"{filesystem._strip_protocol(folder.url)}".rstrip("/") + "/"
    with storage_errors():
        infos = filesystem.find(folder.url, maxdepth=None if recursive else 1, detail=True)
    for path in sorted(infos, key=os.fsencode):
        name, info = path.removeprefix(base), infos[path]
        # an object may stand for a folder
        if path.startswith(base) and name and not name.endswith("/") and info.get("type") == "file":
            yield name, folder.child(name, FileFingerprint.from_info(info))


def check_output(url: str) -> RemoteFile:
    """Return the folder of a URL, after a trial write; raise UsageError or StoppedEarly."""
    folder = RemoteFile.parse(url)
    probe = folder.child(_PROBE)
    try:
        filesystem = _open_filesystem(probe.url)
        with storage_errors():
            filesystem.pipe_file(probe.url, b"")
    except ImageError as error:
        if error.code == "storage_unavailable":
            raise StoppedEarly(f"{folder}: cannot be written: {error}") from None
        raise UsageError(f"--out {folder}: cannot be written to: {error}; or choose another --out") from None
    # permission to write need not include permission to remove
    with suppress(Exception):
        filesystem.rm_file(probe.url)
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
            with storage_errors():
                _open_filesystem(url).put_file(str(path), file.url)
        except ImageError as error:
            raise StoppedEarly(f"{file}: cannot be written: {error}; everything is in {local}") from None


def download_folder(url: str, local: Path) -> None:
    """Download the files in a folder of a bucket, none if it does not exist; raise StoppedEarly if that fails."""
    try:
        for name, file in list_files(RemoteFile.parse(url)):
            path = local / name
            path.parent.mkdir(parents=True, exist_ok=True)
            with storage_errors(), file.open() as stream, path.open("wb") as target:
                shutil.copyfileobj(stream, target)
    except (ImageError, OSError) as error:
        raise StoppedEarly(f"{redact(url)}: cannot be read: {error}") from None


def remove_folder(url: str) -> None:
    """Remove a folder of a bucket; it stays where permission to write does not include that."""
    with suppress(ImageError, FileNotFoundError), storage_errors():
        _open_filesystem(url).rm(url, recursive=True)
