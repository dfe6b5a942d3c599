"""Images in tar and zip archives, found without unpacking them, in the archive's order.

Members of a plain tar or a zip are read by the process that decodes them. Members of a tar compressed with gzip, bzip2
or xz are bytes, read from beginning to end. Whatever is not a regular file (links, devices) is skipped and counted, as
are hidden members and those whose names are not images'.
"""

from __future__ import annotations

import functools
import io
import os
import re
import stat
import tarfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TypeAlias

from opal_deploy.datasets.samples import is_hidden
from opal_deploy.errors import ImageError, StoppedEarly
from opal_deploy.preprocess.decode import Source, open_file
from opal_deploy.records.names import escape_name
from opal_deploy.remote import FileFingerprint, RemoteFile, storage_errors, to_image_error
from opal_deploy.sources.image import InputImage, Location, Skipped, is_image_name, no_images_error

_SUFFIXES = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz", ".zip")
_ZIP_SIGNATURES = (b"PK\x03\x04", b"PK\x05\x06")
# 100 megapixels of 16-bit RGB fit
MAX_MEMBER = 512 << 20
_UTF8_NAME = 1 << 11
# the error code of members of an archive that is no longer the one that was listed
CHANGED = "archive_changed"

# a member's name, and its image; None: not a regular file, or one larger than any image
_Member: TypeAlias = tuple[str, Source | None]


def is_archive_name(name: str) -> bool:
    """Return whether a file of this name is read as an archive."""
    return name.lower().endswith(_SUFFIXES)


@dataclass(frozen=True)
class TarMember:
    """A member of a plain tar, a `FileSource`: `size` bytes of the archive from `offset` on."""

    path: Location
    fingerprint: FileFingerprint
    offset: int
    size: int

    def open(self) -> BinaryIO:
        """Return the bytes; raise ImageError if the archive has changed or is cut."""
        with storage_errors(), _open_archive(self.path, self.fingerprint) as stream:
            stream.seek(self.offset)
            data = stream.read(self.size)
        if len(data) != self.size:
            raise ImageError("truncated_image", "the archive ends inside it")
        return io.BytesIO(data)


@dataclass(frozen=True)
class ZipMember:
    """A member of a zip, a `FileSource`: the entry at `index` of its directory."""

    path: Location
    fingerprint: FileFingerprint
    index: int
    size: int

    def open(self) -> BinaryIO:
        """Return the bytes, at most `size`; raise ImageError if they are damaged, or the archive has changed."""
        _check_unchanged(self.path, self.fingerprint)
        try:
            archive = _open_zip(self.path, self.fingerprint, os.getpid())
            with archive.open(archive.infolist()[self.index]) as member:
                data = member.read(self.size)
                # at the end, zipfile compares the checksum
                whole = len(data) == self.size and not member.read(1)
        except RuntimeError as error:  # NotImplementedError is one, too
            raise ImageError("unsupported_member", f"{error}; unpack the archive") from None
        except Exception as error:  # zipfile raises nearly anything for a damaged member
            problem = to_image_error(error)
            if not isinstance(error, OSError | ImageError) and problem.code != "storage_unavailable":
                problem = ImageError("corrupt_image", f"it cannot be unpacked: {error}")
            raise problem from None
        if not whole:
            raise ImageError("corrupt_image", "its bytes do not have the size in the archive's directory")
        return io.BytesIO(data)


# by process: a fork would share the position in the open file
@functools.lru_cache(maxsize=4)
def _open_zip(path: Location, fingerprint: FileFingerprint, process_id: int) -> zipfile.ZipFile:
    # of a path, ZipFile closes the file when it leaves the cache
    return zipfile.ZipFile(path if isinstance(path, Path) else _open_archive(path, fingerprint))


def _open_archive(path: Location, fingerprint: FileFingerprint) -> BinaryIO:
    """Open an archive, if it is the one that was listed; raise ImageError."""
    if not isinstance(path, Path):
        return RemoteFile(path.url, path.shown, fingerprint).open_ranges()
    _check_unchanged(path, fingerprint)
    return open_file(path)


def _check_unchanged(path: Location, fingerprint: FileFingerprint) -> None:
    """Raise ImageError unless an archive is the one that was listed."""
    try:
        current = FileFingerprint.read(path)
    except FileNotFoundError:
        raise ImageError("not_found", "no such file") from None
    if current != fingerprint:
        raise ImageError(CHANGED, f"{path.name} was changed while its members were read")


def archive_items(archive: Location, skipped: Skipped) -> Iterator[InputImage]:
    """Yield an archive's images in order, then an image with an error if it is damaged, changed or empty.

    Raises StoppedEarly if a bucket or server does not answer.
    """
    empty, others, last = True, Skipped(), ""
    problem: ImageError | None = None
    try:
        fingerprint = FileFingerprint.read(archive)
        with _open_archive(archive, fingerprint) as stream:
            # whatever kind its name claims
            read_members = _read_zip if stream.read(4) in _ZIP_SIGNATURES else _read_tar
            stream.seek(0)
            for last, content in read_members(archive, stream, fingerprint):
                if content is None or is_hidden(*re.split(r"[/\\]", last)) or not is_image_name(last):
                    others.add(last.rpartition("/")[2])
                else:
                    empty = False
                    # the name is only a label: `..`, a leading slash or a NUL have no effect
                    path = Path(f"{archive}/{last}") if isinstance(archive, Path) else archive.child(last)
                    yield InputImage.at(path, last, source=content)
        _check_unchanged(archive, fingerprint)
    except Exception as error:  # parsers and decompressors raise nearly anything for a damaged file
        if isinstance(error, ImageError | FileNotFoundError):
            problem = to_image_error(error)
        elif to_image_error(error).code == "storage_unavailable":
            # its other members would be lost for good; a run can be resumed
            raise StoppedEarly(f"{archive}: {to_image_error(error)}") from None
        elif isinstance(error, OSError) and error.errno is not None:
            problem = ImageError("unreadable", f"the archive cannot be read: {error.strerror or error}")
        else:
            where = f"after {escape_name(last)}" if last else "at its beginning"
            reason = str(error).rstrip(".") or type(error).__name__
            problem = ImageError("corrupt_archive", f"the archive is damaged {where}: {reason}")
    skipped.merge(others)
    if problem is not None:
        yield InputImage.at(archive, error=problem)
    elif empty:
        yield no_images_error(archive, others)


def _read_tar(archive: Location, stream: BinaryIO, fingerprint: FileFingerprint) -> Iterator[_Member]:
    try:
        tar = tarfile.open(fileobj=stream, encoding="utf-8", errors="surrogateescape")  # noqa: SIM115  not its file
    except tarfile.ReadError:
        raise tarfile.ReadError("expected a tar, plain or with gzip, bzip2 or xz, or a zip") from None
    is_plain, end = tar.fileobj is stream, -1
    while (member := tar.next()) is not None:
        # TarFile keeps every header that it has read
        tar.members.clear()  # type: ignore[attr-defined]
        # a negative size would lead back to earlier members in an endless loop
        if tar.offset <= end:
            raise tarfile.ReadError(f"the header of {escape_name(member.name)} is damaged")
        end = tar.offset
        if member.isdir():
            continue
        content: Source | None = None
        if member.isreg() and not member.issparse() and member.size <= MAX_MEMBER:
            content = TarMember(archive, fingerprint, member.offset_data, member.size)
            if not is_plain and is_image_name(member.name):
                content = tar.extractfile(member).read()  # type: ignore[union-attr]
        yield member.name, content
    # tarfile takes a damaged header for the end, which is a block of zeros
    tar.fileobj.seek(tar.offset)
    if tar.fileobj.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
        raise tarfile.ReadError("a header is damaged, or the end is missing")


def _read_zip(archive: Location, stream: BinaryIO, fingerprint: FileFingerprint) -> Iterator[_Member]:
    for index, entry in enumerate(zipfile.ZipFile(stream).infolist()):
        name, size = entry.orig_filename, entry.file_size
        if not entry.flag_bits & _UTF8_NAME:
            # UTF-8, even where the zip does not declare it
            name = name.encode("cp437").decode("utf-8", "surrogateescape")
        is_file = stat.S_IFMT(entry.external_attr >> 16) in (0, stat.S_IFREG)
        if not name.endswith("/"):
            yield name, ZipMember(archive, fingerprint, index, size) if is_file and size <= MAX_MEMBER else None
