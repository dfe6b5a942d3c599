"""Images in tar and zip archives, found without unpacking them.

Members of a plain tar or a zip become byte ranges, which the decoding process reads. A tar compressed with gzip, bzip2
or xz is read from beginning to end, once to check its checksums and once for its members; memory holds the bytes in
flight. Links are followed inside the archive, never out of it. Archives inside archives are skipped.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import BinaryIO

from opal_deploy.errors import ImageError, StoppedEarly
from opal_deploy.sources.image import InputImage, Location
from opal_deploy.sources.items import Skipped, container_error, no_images_error
from opal_deploy.sources.members import LOCAL_SIGNATURE, ArchiveError, open_archive
from opal_deploy.sources.tar import DECOMPRESSORS, describe_other, is_tar, read_tar
from opal_deploy.sources.zip import is_zip, read_zip

_ZIP_SUFFIX = ".zip"
_SUFFIXES = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz", _ZIP_SUFFIX)
_UNSUPPORTED_SUFFIXES = (".7z", ".rar", ".tar.lz4", ".tar.zst", ".tzst")


def is_archive_name(name: str) -> bool:
    """Return whether a file of this name is read as an archive, or refused as one of an unsupported kind."""
    return name.lower().endswith((*_SUFFIXES, *_UNSUPPORTED_SUFFIXES))


def archive_items(archive: Location, skipped: Skipped) -> Iterator[InputImage]:
    """Yield an archive's images in order, then an image with an error if it is damaged or empty; raise StoppedEarly."""
    if archive.name.lower().endswith(_UNSUPPORTED_SUFFIXES):
        message = "an archive of this kind is not read; expected .tar, .tar.gz, .tar.bz2, .tar.xz or .zip"
        yield container_error(archive, "unsupported_archive", message)
        return
    empty = True
    others = Skipped()
    problem: InputImage | None = None
    try:
        with open_archive(archive) as stream:
            for item in _read_archive(archive, stream, others):
                empty = False
                yield item
    except ImageError as error:
        if error.code == "storage_unavailable":
            # its other members would be lost for good; a run can be resumed
            raise StoppedEarly(f"{archive}: {error}") from None
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


def _read_archive(archive: Location, stream: BinaryIO, skipped: Skipped) -> Iterator[InputImage]:
    """Yield an archive's images, whatever kind its name claims."""
    has_directory = is_zip(stream)
    named_zip = archive.name.lower().endswith(_ZIP_SUFFIX)
    # otherwise tar first: its last member may be a zip
    if not (has_directory and named_zip):
        for decompress in (None, *DECOMPRESSORS.values()):
            if is_tar(stream, decompress):
                yield from read_tar(archive, stream, decompress, skipped)
                return
    if (description := describe_other(stream)) is not None:
        raise ImageError("unsupported_archive", description)
    stream.seek(0)
    if not (has_directory or named_zip or stream.read(4) == LOCAL_SIGNATURE):
        raise ArchiveError("its beginning is neither that of a tar, plain or with gzip, bzip2 or xz, nor of a zip")
    yield from read_zip(archive, stream, skipped)
