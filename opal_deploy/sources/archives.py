"""Images in tar and zip archives, found without unpacking them, in the archive's order.

Members of a plain tar or a zip are read by the process that decodes them. Members of a tar compressed with gzip, bzip2
or xz are bytes, read from beginning to end. Links, devices, and archives inside archives are skipped.
"""

from __future__ import annotations

import bz2
import functools
import gzip
import io
import lzma
import os
import re
import stat
import tarfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from opal_deploy.errors import ImageError, StoppedEarly
from opal_deploy.preprocess.decode import Source, open_file
from opal_deploy.records.names import escape_name
from opal_deploy.remote import FileFingerprint, RemoteFile
from opal_deploy.sources.image import InputImage, Location
from opal_deploy.sources.items import Skipped, container_error, is_image_name, no_images_error

_SUFFIXES = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz", ".zip")
_UNSUPPORTED_SUFFIXES = (".7z", ".rar", ".tar.lz4", ".tar.zst", ".tzst")
_DECOMPRESSORS: dict[bytes, Any] = {b"\x1f\x8b": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ\0": lzma.open}
_ZIP_SIGNATURES = (b"PK\x03\x04", b"PK\x05\x06")
# 100 megapixels of 16-bit RGB fit
MAX_MEMBER = 512 << 20
# of a tar's header for a long name or attributes
_MAX_TAR_HEADER = 1 << 20
_ENCRYPTED, _UTF8_NAME, _UNIX = 1 << 0, 1 << 11, 3


def is_archive_name(name: str) -> bool:
    """Return whether a file of this name is read as an archive, or refused as one of an unsupported kind."""
    return name.lower().endswith((*_SUFFIXES, *_UNSUPPORTED_SUFFIXES))


def is_hidden(name: str) -> bool:
    """Return whether a member or one of its folders is hidden, such as `__MACOSX/._x.jpg`."""
    parts = re.split(r"[/\\]", name)
    return "__MACOSX" in parts or any(part.startswith(".") and part not in (".", "..") for part in parts)


@dataclass(frozen=True)
class TarMember:
    """A member of a plain tar, a `FileSource`: `size` bytes of the archive from `offset` on."""

    path: Location
    fingerprint: FileFingerprint
    offset: int
    size: int

    def open(self) -> BinaryIO:
        """Return the bytes; raise ImageError if the archive has changed or is cut."""
        with _open_archive(self.path, self.fingerprint) as stream:
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
        except (OSError, ImageError):
            raise
        except Exception as error:  # zipfile raises nearly anything for a damaged member
            raise ImageError("corrupt_image", f"it cannot be unpacked: {error}") from None
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
        raise ImageError("unreadable", f"{path.name} was changed while its members were read")


def archive_items(archive: Location, skipped: Skipped) -> Iterator[InputImage]:
    """Yield an archive's images in order, then an image with an error if it is damaged or empty; raise StoppedEarly."""
    if archive.name.lower().endswith(_UNSUPPORTED_SUFFIXES):
        message = "an archive of this kind is not read; expected .tar, .tar.gz, .tar.bz2, .tar.xz or .zip"
        yield container_error(archive, "unsupported_archive", message)
        return
    empty, others, last = True, Skipped(), ""
    problem: ImageError | None = None
    try:
        fingerprint = FileFingerprint.read(archive)
        with _open_archive(archive, fingerprint) as stream:
            for last, content in _read_members(archive, stream, fingerprint):
                if is_hidden(last) or (content is not None and not is_image_name(last)):
                    others.add(Path(last))
                    continue
                if content is None:
                    others.add_folder_link(Path(last))
                    continue
                empty, error = False, content if isinstance(content, ImageError) else None
                # the name is only a label: `..`, a leading slash or a NUL have no effect
                path = Path(f"{archive}/{last}") if isinstance(archive, Path) else archive.child(last)
                yield InputImage.at(path, last, error, None if isinstance(content, ImageError) else content)
        _check_unchanged(archive, fingerprint)
    except ImageError as error:
        if error.code == "storage_unavailable":
            # its other members would be lost for good; a run can be resumed
            raise StoppedEarly(f"{archive}: {error}") from None
        problem = error
    except FileNotFoundError:
        problem = ImageError("not_found", "no such file")
    except Exception as error:  # parsers and decompressors raise nearly anything for a damaged file
        if isinstance(error, OSError) and error.errno is not None:
            problem = ImageError("unreadable", f"the archive cannot be read: {error.strerror or error}")
        else:
            where = f"after {escape_name(last)}" if last else "at its beginning"
            reason = str(error).rstrip(".") or type(error).__name__
            problem = ImageError("corrupt_archive", f"the archive is damaged {where}: {reason}")
    skipped.merge(others)
    if problem is not None:
        yield container_error(archive, problem.code, str(problem))
    elif empty:
        yield no_images_error(archive, others, recursive=False)


def _read_members(
    archive: Location, stream: BinaryIO, fingerprint: FileFingerprint
) -> Iterator[tuple[str, Source | ImageError | None]]:
    """Yield names and contents of an archive's members, whatever kind its name claims; None: not a regular file."""
    head = stream.read(8)
    if head.startswith(_ZIP_SIGNATURES) or (archive.name.lower().endswith(".zip") and zipfile.is_zipfile(stream)):
        yield from _read_zip(archive, stream, fingerprint)
        return
    stream.seek(0)
    decompress = next((opener for start, opener in _DECOMPRESSORS.items() if head.startswith(start)), None)
    yield from _read_tar(archive, stream if decompress is None else decompress(stream), fingerprint, decompress is None)


class _Header(tarfile.TarInfo):
    """A header for which any damage, and an end without a mark, is a ReadError; tarfile itself ignores most."""

    @classmethod
    def fromtarfile(cls, tar: Any) -> Any:
        try:
            return super().fromtarfile(tar)
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined]
            tar.ended = True
            raise
        except tarfile.EmptyHeaderError:  # type: ignore[attr-defined]
            if not tar.ended:
                raise tarfile.ReadError("it ends without the mark of its end") from None
            raise
        except tarfile.HeaderError as error:
            raise tarfile.ReadError(f"a header is damaged: {error}") from None


class _Tar(tarfile.TarFile):
    tarinfo = _Header
    ended = False


class _HeaderReader:
    """A tar's stream that refuses to read a header of any size that it claims."""

    def __init__(self, stream: BinaryIO) -> None:
        self._read, self.seek, self.tell = stream.read, stream.seek, stream.tell

    def read(self, size: int) -> bytes:
        if size > _MAX_TAR_HEADER:
            raise tarfile.ReadError(f"a header claims {size:,} bytes for a name or attributes")
        return self._read(size)


def _read_tar(
    archive: Location, stream: BinaryIO, fingerprint: FileFingerprint, plain: bool
) -> Iterator[tuple[str, Source | ImageError | None]]:
    reader = cast(BinaryIO, _HeaderReader(stream))
    # zeros mark the end; on a damaged disk they may stand for a header, with members after them
    try:
        tar = _Tar(fileobj=reader, ignore_zeros=True, encoding="utf-8", errors="surrogateescape")
    except tarfile.TarError as error:
        if plain:
            expected = "expected a tar, plain or with gzip, bzip2 or xz, or a zip"
            raise tarfile.ReadError(f"{error}; {expected}") from None
        reason = "it is compressed, but what is inside is not a tar; decompress it and give the result"
        raise ImageError("unsupported_archive", reason) from None
    last_offset = -1
    while (member := tar.next()) is not None:
        # TarFile keeps every header that it has read
        tar.members.clear()  # type: ignore[attr-defined]
        name, size, offset = member.name, member.size, member.offset_data
        # a negative size would lead back to earlier members in an endless loop
        if size < 0 or offset <= last_offset:
            raise tarfile.ReadError(f"the header of {escape_name(name)} is damaged")
        last_offset = offset
        if member.isdir():
            continue
        content: Source | ImageError | None = None
        if member.isreg() and not is_image_name(name):
            content = b""
        elif member.issparse():
            content = ImageError("unsupported_member", "it is a sparse file; pack it again without -S")
        elif member.isreg() and size > MAX_MEMBER:
            content = _oversized(size)
        elif member.isreg():
            if plain and offset + size > fingerprint.size:
                raise tarfile.ReadError(f"it ends inside {escape_name(name)}")
            content = TarMember(archive, fingerprint, offset, size)
            if not plain:
                stream.seek(offset)
                content = stream.read(size)
                if len(content) != size:
                    raise tarfile.ReadError(f"it ends inside {escape_name(name)}")
        yield name, content


def _read_zip(
    archive: Location, stream: BinaryIO, fingerprint: FileFingerprint
) -> Iterator[tuple[str, Source | ImageError | None]]:
    for index, entry in enumerate(zipfile.ZipFile(stream).infolist()):
        name = entry.orig_filename
        if not entry.flag_bits & _UTF8_NAME:
            # UTF-8, even where the zip does not declare it
            name = name.encode("cp437").decode("utf-8", "surrogateescape")
        kind = stat.S_IFMT(entry.external_attr >> 16) if entry.create_system == _UNIX else 0
        size = max(entry.file_size, entry.compress_size)
        if name.endswith("/"):
            continue
        if kind not in (0, stat.S_IFREG):
            yield name, None
        elif entry.flag_bits & _ENCRYPTED:
            yield name, ImageError("encrypted_member", "it is encrypted; unpack it with its password")
        elif entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            reason = f"it is compressed by method {entry.compress_type}; expected stored or deflated members"
            yield name, ImageError("unsupported_member", reason)
        elif size > MAX_MEMBER:
            yield name, _oversized(size)
        else:
            yield name, ZipMember(archive, fingerprint, index, entry.file_size)


def _oversized(size: int) -> ImageError:
    return ImageError(
        "oversized_member", f"it claims {size:,} bytes, over the limit of {MAX_MEMBER:,} for an image in an archive"
    )
