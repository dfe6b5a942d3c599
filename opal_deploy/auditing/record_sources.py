"""The images that records were made of, found again.

An image of its own is found by its name, below a root. A member of an archive is found among the images that the same
inputs name now, and so is what stands for a whole folder, list or archive. Members of a compressed tar, which can only
be read from beginning to end, wait in a temporary file.
"""

from __future__ import annotations

import io
import os
import tempfile
import weakref
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO, NamedTuple, cast

from opal_deploy.errors import ImageError, UsageError
from opal_deploy.inference.decoding.prepare import content_sha256
from opal_deploy.inference.sources.archives import is_archive_name
from opal_deploy.inference.sources.items import Item
from opal_deploy.records.names import escape_name, unescape_name
from opal_deploy.records.record import Record
from opal_deploy.storage.files import RemoteFile, parse_source
from opal_deploy.storage.urls import is_url


class _SpooledImage(NamedTuple):
    """The bytes of an image in the temporary file; a `FileSource` that cannot be pickled."""

    spool: BinaryIO
    offset: int
    size: int

    def open(self) -> BinaryIO:
        """See `FileSource.open`."""
        self.spool.seek(self.offset)
        return io.BytesIO(self.spool.read(self.size))


class RecordSources:
    """The images that inputs name, found by the records that were made of them.

    A name that one image has means that image. Of several images of one name, a record means one with its digest, first
    of all the one at its index: inputs may be fewer, or in another order, than they were. A record whose name no image
    has means the image at its index, if that has the same path from its folder or archive: inputs may lie elsewhere.
    """

    def __init__(self, items: Iterable[Item] = (), records: Iterable[Record] | None = None) -> None:
        """Keep the images that `records` may mean; None: all.

        Raises:
            UsageError: there is no room for the images of a compressed tar.
        """
        wanted = None if records is None else list(records)
        names = None if wanted is None else {record["image"] for record in wanted}
        indices = None if wanted is None else {record.get("image_index") for record in wanted}
        self._by_name: dict[str, list[Item]] = {}
        self._by_index: dict[int, Item] = {}
        self._spool: BinaryIO | None = None
        for item in items:
            named = names is None or item.name in names
            indexed = item.index is not None and (indices is None or item.index in indices)
            if isinstance(item.content, bytes) and (named or indexed):
                item = replace(item, content=self._write(item.content))
            if named:
                self._by_name.setdefault(item.name, []).append(item)
            if item.index is not None and indexed:
                self._by_index[item.index] = item

    def find(self, record: Record) -> Item | None:
        """Return the image of a record, in which may be anything that JSON can hold; None if it is not among them."""
        item = self._find(record)
        if item is None or not isinstance(item.content, _SpooledImage):
            return item
        # whoever decodes it cannot open the temporary file
        return replace(item, content=item.content.open().read())

    def _write(self, content: bytes) -> _SpooledImage:
        try:
            if self._spool is None:
                self._spool = cast(BinaryIO, tempfile.TemporaryFile())  # noqa: SIM115  it lives as long as this
                weakref.finalize(self, self._spool.close)
            offset = self._spool.seek(0, io.SEEK_END)
            self._spool.write(content)
        except OSError as error:
            reason = (
                f"{tempfile.gettempdir()}: images of a compressed tar cannot be kept here ({error.strerror or error})"
            )
            raise UsageError(f"{reason}; give a folder with room by TMPDIR, or unpack the tar") from None
        return _SpooledImage(self._spool, offset, len(content))

    def _find(self, record: Record) -> Item | None:
        name, index = record["image"], record.get("image_index")
        if not isinstance(name, str):
            return None
        if same := sorted(self._by_name.get(name, []), key=lambda item: item.index != index):
            # files of one name are one file
            if len(same) == 1 or all(item.content is None for item in same):
                return same[0]
            digest = record.get("image_sha256")
            return next((item for item in same if _hash(item) == digest), same[0])
        moved = self._by_index.get(index) if isinstance(index, int) else None
        if moved is None:
            return None
        relative = moved.relative if is_url(moved.relative) else str(Path(moved.relative))
        tail = escape_name(relative).lstrip("/")
        return moved if f"/{name}".endswith(f"/{tail}") else None


def _hash(item: Item) -> str | None:
    try:
        return None if item.problem else content_sha256(item.source)
    except ImageError:
        return None


def locate(name: str, root: Path) -> Path | RemoteFile:
    """Return where an image of this name, unescaped, lies by itself: below `root`, or where its URL says.

    Raises:
        ImageError: unreadable: a URL of a scheme that is not read, or what reads it is not installed.
    """
    source = parse_source(name)
    return root / source if isinstance(source, Path) else source


def find_container(record: Record, root: Path) -> str | None:
    """Return what a record's image is part of, or stands for, as its name in the record: an archive, folder or list.

    Args:
        record: the record.
        root: the folder that its name is relative to.

    Returns:
        None for an image that is a file of its own, also for one that is not there.
    """
    name = record["image"]
    if not isinstance(name, str):
        return None
    plain = unescape_name(name)
    stands_for_all = "error" in record and record["error"].get("code") == "no_images"
    if is_url(plain):
        # the first three parts are scheme and bucket
        parts = plain.split("/")
        outer = ("/".join(parts[:end]) for end in range(4, len(parts) + 1))
        archive = next(filter(is_archive_name, outer), None)
        return escape_name(archive) if archive is not None else name if stands_for_all else None
    path = Path(plain)
    for part in (*reversed(path.parents), path):
        if is_archive_name(part.name) and not os.path.isdir(root / part):
            return escape_name(str(part))
    return name if stands_for_all or os.path.isdir(root / path) else None
