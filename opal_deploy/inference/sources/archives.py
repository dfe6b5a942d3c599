"""Images in tar and zip archives, found without unpacking them.

Members of a plain tar or a zip become byte ranges, which are read where they lie by whoever decodes them. A tar
compressed with gzip, bzip2 or xz is read from beginning to end, once to compare its checksums and once for its members,
whose bytes are handed on; memory then holds as many as are in work. Links are followed inside the archive, never out of
it. Archives inside archives are passed over like other files that are no images.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from typing import BinaryIO

from opal_deploy.errors import ImageError, StoppedEarly
from opal_deploy.inference.sources.items import Skipped, container_error, no_images_error
from opal_deploy.inference.sources.members import LOCAL_SIGNATURE, ArchiveError, open_archive
from opal_deploy.inference.sources.tar import DECOMPRESSORS, is_tar, read_tar
from opal_deploy.inference.sources.zip import read_zip
from opal_deploy.inference.types import InputImage, Location

_ZIP_SUFFIX = ".zip"
_SUFFIXES = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz", _ZIP_SUFFIX)
_UNSUPPORTED_SUFFIXES = (".7z", ".rar", ".tar.lz4", ".tar.zst", ".tzst")


def is_archive_name(name: str) -> bool:
    """Return whether a file of this name is taken for an archive of images, also one of an unsupported kind."""
    return name.lower().endswith((*_SUFFIXES, *_UNSUPPORTED_SUFFIXES))


def archive_items(archive: Location, skipped: Skipped) -> Iterator[InputImage]:
    """Yield an archive's images in its order, then an item with a problem if it is damaged or holds none.

    Raises:
        StoppedEarly: the bucket that it lies in does not answer.
    """
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
            # its other members would be passed over for good; a run can be resumed
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
    """Yield an archive's images, whatever kind its name claims.

    Raises:
        ArchiveError: after the members before the damage.
        OSError: reading was refused.
    """
    has_directory = zipfile.is_zipfile(stream)
    named_zip = archive.name.lower().endswith(_ZIP_SUFFIX)
    # tar first otherwise: a tar may end with a member that is a zip
    if not (has_directory and named_zip):
        for decompress in (None, *DECOMPRESSORS):
            if is_tar(stream, decompress):
                yield from read_tar(archive, stream, decompress, skipped)
                return
    stream.seek(0)
    if not (has_directory or named_zip or stream.read(4) == LOCAL_SIGNATURE):
        raise ArchiveError("its beginning is neither that of a tar, plain or with gzip, bzip2 or xz, nor of a zip")
    yield from read_zip(archive, stream, skipped)
