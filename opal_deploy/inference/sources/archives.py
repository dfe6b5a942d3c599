"""Archives of images: which files are taken for one, and what becomes of one that cannot be read.

Archives inside archives are not opened: they are no images by their names, and are passed over like other files.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from opal_deploy.errors import ImageError
from opal_deploy.inference.sources.items import Item, Skipped, container_error, no_images
from opal_deploy.inference.sources.members import ArchiveError
from opal_deploy.inference.sources.tars import tar_items
from opal_deploy.inference.sources.zips import zip_items
from opal_deploy.preprocess.decode import open_file

_TARS = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz")
_ZIPS = (".zip",)
_OTHERS = (".7z", ".rar", ".tar.lz4", ".tar.zst", ".tzst")


def is_archive_name(name: str) -> bool:
    """Whether a file of this name is taken for an archive of images, also one of a kind that is not read."""
    return name.lower().endswith((*_TARS, *_ZIPS, *_OTHERS))


def archive_items(archive: Path, skipped: Skipped) -> Iterator[Item]:
    """Its images in its order, then one item with a problem if it is damaged, unreadable, or holds none."""
    if archive.name.lower().endswith(_OTHERS):
        message = "an archive of this kind is not read; expected .tar, .tar.gz, .tar.bz2, .tar.xz or .zip"
        yield container_error(archive, "unsupported_archive", message)
        return
    found = False
    others = Skipped()
    problem: Item | None = None
    try:
        with open_file(archive) as stream:
            # by its first bytes too: names are often wrong; by its name too: a zip may begin with a program
            zipped = stream.read(2) == b"PK" or archive.name.lower().endswith(_ZIPS)
            stream.seek(0)
            read = zip_items if zipped else tar_items
            for item in read(archive, stream, others):
                found = True
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
    elif not found:
        yield no_images(archive, others, below=False)
