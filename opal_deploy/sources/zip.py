"""Images in a zip.

`zipfile` reads the directory. If a zip has no readable directory, `zipfile` finds nothing, and this module searches the
members' own headers.
"""

from __future__ import annotations

import stat
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from opal_deploy.errors import ImageError
from opal_deploy.preprocess.decode import Source
from opal_deploy.sources import members
from opal_deploy.sources.image import InputImage, Location
from opal_deploy.sources.items import Skipped, is_image_name
from opal_deploy.sources.members import (
    MAX_PATH,
    ArchiveError,
    ByteRange,
    Link,
    ZipLocalHeader,
    is_hidden,
    member_items,
    normalize_name,
    oversized,
    parents,
    resolve_link,
)
from opal_deploy.storage.files import FileFingerprint

_ENCRYPTED, _SIZE_FOLLOWS, _UTF8_NAME = 1 << 0, 1 << 3, 1 << 11
_UNIX = 3
_METHODS = {9: "deflate64", 12: "bzip2", 14: "LZMA", 93: "Zstandard", 95: "xz", 98: "PPMd", 99: "AES"}


def is_zip(stream: BinaryIO) -> bool:
    """Return whether a stream ends with the directory of a zip in one part."""
    try:
        return zipfile.is_zipfile(stream)
    except zipfile.BadZipFile:  # it claims several parts
        return False


def read_zip(archive: Location, stream: BinaryIO, skipped: Skipped) -> Iterator[InputImage]:
    """Yield a zip's images in its directory's order; `skipped` counts other members.

    Raises:
        ArchiveError: after the members that can be found without a directory.
        OSError: reading was refused.
    """
    fingerprint = FileFingerprint.read(stream)
    damage: ArchiveError | None = None
    try:
        with zipfile.ZipFile(stream) as directory:
            entries = directory.infolist()
    except (OSError, ImageError):
        raise
    except Exception as error:  # parsers raise nearly anything for a damaged file
        damage = ArchiveError(f"the directory of its members cannot be read: {error}")
        entries = list(_search_entries(stream, fingerprint.size))
    targets: _LinkTargets | None = None
    for entry in entries:
        name, kind = _entry_name(entry), _file_type(entry)
        if name.endswith("/"):
            continue
        if is_hidden(name) or not (is_image_name(name) or kind == stat.S_IFLNK):
            skipped.add(Path(name))
            continue
        content: Source | ImageError | None
        if kind == stat.S_IFLNK:
            if targets is None:
                targets = _LinkTargets(archive, entries, fingerprint)
            content = targets.find(entry)
        elif kind in (0, stat.S_IFREG):
            content = _check_entry(archive, entry, fingerprint)
        else:
            content = ImageError("unsupported_member", "it is a device or a pipe, not a file")
        yield from member_items(archive, name, content, skipped)
    if damage is not None:
        raise damage


class _LinkTargets:
    """The targets of a zip's links."""

    def __init__(self, archive: Location, entries: list[zipfile.ZipInfo], fingerprint: FileFingerprint) -> None:
        """Read the links; `find` reports those that cannot be read."""
        self._archive, self._fingerprint = archive, fingerprint
        self._links: dict[str, Link] = {}
        for entry in entries:
            if _file_type(entry) == stat.S_IFLNK:
                with suppress(ImageError):
                    self._links[normalize_name(_entry_name(entry))] = self._read_link(entry)
        paths = set()
        for name, link in self._links.items():
            with suppress(ImageError):
                paths.add(resolve_link(name, link, self._links))
        self._files: dict[str, zipfile.ZipInfo] = {}
        self._folders = {""}
        for entry in entries:
            name, is_folder = normalize_name(_entry_name(entry)), entry.filename.endswith("/")
            if name in paths and not is_folder:
                self._files[name] = entry
            self._folders.update(path for path in parents(name, itself=is_folder) if path in paths)

    def find(self, entry: zipfile.ZipInfo) -> Source | ImageError | None:
        """Return a link's target: an image or its error, b"" for another file, None for a folder."""
        name = _entry_name(entry)
        try:
            link = self._read_link(entry)
            path = resolve_link(normalize_name(name), link, self._links)
        except ImageError as error:
            return error
        if path in self._files:
            return _check_entry(self._archive, self._files[path], self._fingerprint) if is_image_name(name) else b""
        return None if path in self._folders else link.error("which is not in the archive")

    def _read_link(self, entry: zipfile.ZipInfo) -> Link:
        content = _check_entry(self._archive, entry, self._fingerprint)
        if isinstance(content, ImageError):
            raise content
        if content.size > MAX_PATH:
            raise ImageError("unsupported_member", f"it is a link, and its path has {content.size:,} bytes")
        with content.open() as stream:
            return Link(stream.read().decode("utf-8", "surrogateescape"), hard=False)


def _file_type(entry: zipfile.ZipInfo) -> int:
    """Return the type of an entry as in `stat`; 0 if it is unknown, as in zips not made on Unix."""
    return stat.S_IFMT(entry.external_attr >> 16) if entry.create_system == _UNIX else 0


def _search_entries(stream: BinaryIO, file_size: int) -> Iterator[zipfile.ZipInfo]:
    """Yield a zip's members by their own headers, as far as these state their size."""
    offset = 0
    while (header := ZipLocalHeader.read(stream, offset)) is not None:
        end = offset + header.length + header.packed_size
        if header.flags & _SIZE_FOLLOWS or end > file_size:
            return
        entry = zipfile.ZipInfo(stream.read(header.name_length).decode("cp437"))
        entry.flag_bits = header.flags & ~_UTF8_NAME
        entry.compress_type, entry.CRC, entry.header_offset = header.method, header.crc, offset
        entry.compress_size, entry.file_size = header.packed_size, header.size
        yield entry
        offset = end


def _entry_name(entry: zipfile.ZipInfo) -> str:
    """Return a member's name: with a NUL if it has one, as UTF-8 even where the zip does not declare it."""
    name = entry.orig_filename
    return name if entry.flag_bits & _UTF8_NAME else name.encode("cp437").decode("utf-8", "surrogateescape")


def _check_entry(archive: Location, entry: zipfile.ZipInfo, fingerprint: FileFingerprint) -> ByteRange | ImageError:
    method, size, packed_size = entry.compress_type, entry.file_size, entry.compress_size
    if entry.flag_bits & _ENCRYPTED:
        return ImageError("encrypted_member", "it is encrypted; unpack it with its password")
    if method not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        name = _METHODS.get(method, f"method {method}")
        return ImageError("unsupported_member", f"it is compressed with {name}; expected stored or deflated members")
    if max(size, packed_size) > members.MAX_MEMBER:
        return oversized(max(size, packed_size))
    deflated = method == zipfile.ZIP_DEFLATED
    if not deflated and size != packed_size:
        return ImageError("corrupt_image", f"it is stored, and {size} bytes take {packed_size}")
    return ByteRange(
        archive, fingerprint, entry.header_offset, packed_size, size, zipped=True, deflated=deflated, crc=entry.CRC
    )
