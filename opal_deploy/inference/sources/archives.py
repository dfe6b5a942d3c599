"""Images in tar and zip archives, found without unpacking them.

Members of a plain tar or a zip become byte ranges, which are read where they lie by whoever decodes them. A tar
compressed with gzip, bzip2 or xz is read once, from beginning to end, and its members' bytes are handed on; memory then
holds as many as are in work. Archives inside archives are passed over like other files that are no images.

`tarfile` and `zipfile` read the archives. Only a zip without a readable directory is searched here for the headers in
front of its members, because `zipfile` gives nothing of it.
"""

from __future__ import annotations

import bz2
import gzip
import lzma
import posixpath
import re
import stat
import tarfile
import zipfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, cast

from opal_deploy.errors import ImageError
from opal_deploy.inference.sources.byte_ranges import LOCAL_SIGNATURE, ByteRange, FileFingerprint, ZipLocalHeader
from opal_deploy.inference.sources.items import Item, Skipped, container_error, is_image_name, no_images_error
from opal_deploy.preprocess.decode import Source, open_file
from opal_deploy.records.names import escape_name

# 100 megapixels of 16-bit RGB fit; no photograph takes more
MAX_MEMBER = 512 << 20

_ZIP_SUFFIX = ".zip"
_SUFFIXES = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz", _ZIP_SUFFIX)
_UNSUPPORTED_SUFFIXES = (".7z", ".rar", ".tar.lz4", ".tar.zst", ".tzst")

_Decompressor = Callable[[BinaryIO], object]
_DECOMPRESSORS: tuple[_Decompressor, ...] = (gzip.open, bz2.open, lzma.open)
# bytes of a header's long name or attributes
_MAX_TAR_HEADER = 1 << 20

_ENCRYPTED, _SIZE_FOLLOWS, _UTF8_NAME = 1 << 0, 1 << 3, 1 << 11
_UNIX = 3
_METHODS = {9: "deflate64", 12: "bzip2", 14: "LZMA", 93: "Zstandard", 95: "xz", 98: "PPMd", 99: "AES"}

_CHUNK = 1 << 20


class ArchiveError(Exception):
    """An archive cannot be read on from here; the message says where and why."""


def is_archive_name(name: str) -> bool:
    """Return whether a file of this name is taken for an archive of images, also one of an unsupported kind."""
    return name.lower().endswith((*_SUFFIXES, *_UNSUPPORTED_SUFFIXES))


def archive_items(archive: Path, skipped: Skipped) -> Iterator[Item]:
    """Yield an archive's images in its order, then an item with a problem if it is damaged or holds none."""
    if archive.name.lower().endswith(_UNSUPPORTED_SUFFIXES):
        message = "an archive of this kind is not read; expected .tar, .tar.gz, .tar.bz2, .tar.xz or .zip"
        yield container_error(archive, "unsupported_archive", message)
        return
    empty = True
    others = Skipped()
    problem: Item | None = None
    try:
        with open_file(archive) as stream:
            for item in _read_archive(archive, stream, others):
                empty = False
                yield item
    except ImageError as error:
        problem = container_error(archive, error.code, str(error))
    except ArchiveError as error:
        problem = container_error(archive, "corrupt_archive", f"the archive is damaged: {error}")
    except OSError as error:
        problem = container_error(archive, "unreadable", f"the archive cannot be read: {error.strerror or error}")
    skipped.merge(others)
    if problem is not None:
        yield problem
    elif empty:
        yield no_images_error(archive, others, recursive=False)


def _read_archive(archive: Path, stream: BinaryIO, skipped: Skipped) -> Iterator[Item]:
    """Yield an archive's images, whatever kind its name claims.

    Raises:
        ArchiveError: after the members before the damage.
        OSError: reading was refused.
    """
    has_directory = zipfile.is_zipfile(stream)
    named_zip = archive.name.lower().endswith(_ZIP_SUFFIX)
    # tar first otherwise: a tar may end with a member that is a zip
    if not (has_directory and named_zip):
        for decompress in (None, *_DECOMPRESSORS):
            if _is_tar(stream, decompress):
                yield from _read_tar(archive, stream, decompress, skipped)
                return
    stream.seek(0)
    if not (has_directory or named_zip or stream.read(4) == LOCAL_SIGNATURE):
        raise ArchiveError("its beginning is neither that of a tar, plain or with gzip, bzip2 or xz, nor of a zip")
    yield from _read_zip(archive, stream, skipped)


def _is_image_member(name: str) -> bool:
    """Return whether a member is an image by its suffix and not hidden, as `__MACOSX/._x.jpg` is."""
    hidden = any(part.startswith(".") and part not in (".", "..") for part in re.split(r"[/\\]", name))
    return not hidden and is_image_name(name)


def _member_item(archive: Path, name: str, content: Source | ImageError) -> Item:
    """Return a member as an item. Its name is only a label: `..`, a leading slash or a NUL lead nowhere."""
    path = Path(f"{archive}/{name}")
    return Item(path, name, content) if isinstance(content, ImageError) else Item(path, name, content=content)


def _oversized(size: int) -> ImageError:
    return ImageError(
        "oversized_member", f"it claims {size:,} bytes, over the limit of {MAX_MEMBER:,} for an image in an archive"
    )


class _HeaderReader:
    """The stream from which `TarFile` reads headers.

    `TarFile.next` returns None at the end and for a damaged header; the last block that it read tells which.
    """

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self.seek, self.tell = stream.seek, stream.tell
        self.last_block = b""

    def read(self, size: int) -> bytes:
        """Read a block, or the data of a header that holds a long name or attributes of the next member."""
        if size > _MAX_TAR_HEADER:
            raise ArchiveError(f"a header claims {size:,} bytes for a name or attributes")
        self.last_block = self._stream.read(size)
        return self.last_block


def _open_tar(reader: _HeaderReader) -> tarfile.TarFile:
    """Open a tar, which reads its first header."""
    return tarfile.TarFile(fileobj=cast(BinaryIO, reader), encoding="utf-8", errors="surrogateescape")


def _is_tar(stream: BinaryIO, decompress: _Decompressor | None) -> bool:
    try:
        _open_tar(_HeaderReader(_decompressed(stream, decompress)))
    except Exception:  # parsers and decompressors raise nearly anything for another kind of file
        return False
    return True


def _decompressed(stream: BinaryIO, decompress: _Decompressor | None) -> BinaryIO:
    stream.seek(0)
    return stream if decompress is None else cast(BinaryIO, decompress(stream))


def _tar_members(stream: BinaryIO) -> Iterator[tarfile.TarInfo]:
    """Yield the header of every member.

    Raises:
        ArchiveError: a header is damaged or missing.
    """
    last_offset = -1
    stream.seek(0)
    reader = _HeaderReader(stream)
    try:
        tar = _open_tar(reader)
        while (member := tar.next()) is not None:
            # a negative size would lead back to earlier members, for ever
            if member.size < 0 or member.offset_data <= last_offset:
                raise ArchiveError(f"the header of {escape_name(member.name)} is damaged")
            last_offset = member.offset_data
            # TarFile keeps every header that it has read
            tar.members.clear()  # type: ignore[attr-defined]
            yield member
    except ArchiveError:
        raise
    except Exception as error:  # as in `_is_tar`
        raise ArchiveError(str(error) or type(error).__name__) from None
    if not reader.last_block:
        raise ArchiveError("it ends without the mark of its end")
    if reader.last_block != bytes(tarfile.BLOCKSIZE):
        raise ArchiveError("a header is damaged")


def _read_tar(archive: Path, file: BinaryIO, decompress: _Decompressor | None, skipped: Skipped) -> Iterator[Item]:
    """Yield a tar's images in its order; devices and what is no image by its name are counted in `skipped`.

    Raises:
        ArchiveError: after the members before the damage; also for a wrong checksum of a compressed tar, which comes
            after the data.
    """
    stream = _decompressed(file, decompress)
    fingerprint = FileFingerprint.read(file)
    link_targets: dict[str, ByteRange | ImageError] | None = None
    for member in _tar_members(stream):
        if decompress is None and member.offset_data + member.size > fingerprint.size:
            raise ArchiveError(f"it ends inside {escape_name(member.name)}")
        if member.isdir():
            continue
        is_link = member.islnk() or member.issym()
        if not _is_image_member(member.name) or not (is_link or member.isreg()):
            skipped.add(Path(member.name))
            continue
        content: Source | ImageError
        if not is_link:
            content = _locate(archive, member, fingerprint)
            if decompress is not None and isinstance(content, ByteRange):
                content = _read_member(stream, member)
        elif decompress is not None:
            content = _unsupported_link(member, "and a compressed tar is read only once; unpack it")
        else:
            if link_targets is None:
                link_targets = _index_files(archive, stream, fingerprint)
            missing = _unsupported_link(member, "which is no file in the archive")
            content = link_targets.get(_target_name(member), missing)
        yield _member_item(archive, member.name, content)
    if decompress is not None:
        _check_end(stream)


def _locate(archive: Path, member: tarfile.TarInfo, fingerprint: FileFingerprint) -> ByteRange | ImageError:
    if member.issparse():
        return ImageError("unsupported_member", "it is stored as a sparse file; pack it again without -S")
    if member.size > MAX_MEMBER:
        return _oversized(member.size)
    return ByteRange(archive, fingerprint, member.offset_data, member.size, member.size)


def _index_files(archive: Path, stream: BinaryIO, fingerprint: FileFingerprint) -> dict[str, ByteRange | ImageError]:
    """Return the files of a plain tar by their normalised names, which a link may name before they come."""
    files = {}
    # whoever reads the members in their order comes to the damage too
    with suppress(ArchiveError):
        for member in _tar_members(stream):
            if member.isreg():
                files[posixpath.normpath(member.name)] = _locate(archive, member, fingerprint)
    return files


def _target_name(link: tarfile.TarInfo) -> str:
    """Return the normalised name that a link leads to; a hard link names a path in the archive."""
    folder = "" if link.islnk() else posixpath.dirname(link.name)
    return posixpath.normpath(posixpath.join(folder, link.linkname))


def _unsupported_link(link: tarfile.TarInfo, why: str) -> ImageError:
    return ImageError("unsupported_member", f"it is a link to {escape_name(link.linkname)}, {why}")


def _read_member(stream: BinaryIO, member: tarfile.TarInfo) -> bytes:
    try:
        stream.seek(member.offset_data)
        data = stream.read(member.size)
    except Exception as error:  # as in `_is_tar`
        raise ArchiveError(f"inside {escape_name(member.name)}: {error}") from None
    if len(data) < member.size:
        raise ArchiveError(f"it ends inside {escape_name(member.name)}")
    return data


def _check_end(stream: BinaryIO) -> None:
    """Read a compressed tar to its end, where the checksum of its bytes is."""
    try:
        while stream.read(_CHUNK):
            pass
    except Exception as error:  # as in `_is_tar`
        raise ArchiveError(f"{error or type(error).__name__}; images before may not be what was packed") from None


def _read_zip(archive: Path, stream: BinaryIO, skipped: Skipped) -> Iterator[Item]:
    """Yield a zip's images in its directory's order; what is no image by its name is counted in `skipped`.

    Raises:
        ArchiveError: after the members that can be found without a directory.
        OSError: reading was refused.
    """
    fingerprint = FileFingerprint.read(stream)
    damage: ArchiveError | None = None
    entries: Iterable[zipfile.ZipInfo]
    try:
        with zipfile.ZipFile(stream) as directory:
            entries = directory.infolist()
    except OSError:
        raise
    except Exception as error:  # as in `_is_tar`
        damage = ArchiveError(f"the directory of its members cannot be read: {error}")
        entries = _search_entries(stream, fingerprint.size)
    for entry in entries:
        name = _entry_name(entry)
        if name.endswith("/"):
            continue
        # the type is known of archives made on Unix
        mode = entry.external_attr >> 16 if entry.create_system == _UNIX else 0
        if not _is_image_member(name) or stat.S_IFMT(mode) not in (0, stat.S_IFREG, stat.S_IFLNK):
            skipped.add(Path(name))
        elif stat.S_ISLNK(mode):
            link = ImageError("unsupported_member", "it is a symbolic link; pack the file itself")
            yield _member_item(archive, name, link)
        else:
            yield _member_item(archive, name, _check_entry(archive, entry, fingerprint))
    if damage is not None:
        raise damage


def _search_entries(stream: BinaryIO, file_size: int) -> Iterator[zipfile.ZipInfo]:
    """Yield a zip's members by their own headers, one after another, as far as these say how long they are."""
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
    """Return a member's name, with a NUL in it and as UTF-8, which zips that do not say so mostly are all the same."""
    name = entry.orig_filename
    return name if entry.flag_bits & _UTF8_NAME else name.encode("cp437").decode("utf-8", "surrogateescape")


def _check_entry(archive: Path, entry: zipfile.ZipInfo, fingerprint: FileFingerprint) -> ByteRange | ImageError:
    method, size, packed_size = entry.compress_type, entry.file_size, entry.compress_size
    if entry.flag_bits & _ENCRYPTED:
        return ImageError("encrypted_member", "it is encrypted; unpack it with its password")
    if method not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        name = _METHODS.get(method, f"method {method}")
        return ImageError("unsupported_member", f"it is compressed with {name}; expected stored or deflated members")
    if max(size, packed_size) > MAX_MEMBER:
        return _oversized(max(size, packed_size))
    deflated = method == zipfile.ZIP_DEFLATED
    if not deflated and size != packed_size:
        return ImageError("corrupt_image", f"it is stored, and {size} bytes take {packed_size}")
    return ByteRange(
        archive, fingerprint, entry.header_offset, packed_size, size, zipped=True, deflated=deflated, crc=entry.CRC
    )
