"""The images of records, found again.

An image with its own file is found by its name, below a root. Members of archives, and records that stand for a whole
folder, list or archive, are found among the images that the same inputs name now. Members of a compressed tar, which
can only be read from beginning to end, are kept in a temporary file.
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
from opal_deploy.predict.prepare import content_sha256
from opal_deploy.records.names import escape_name, unescape_name
from opal_deploy.records.record import Failed, Record
from opal_deploy.remote import RemoteFile, is_url, parse_source
from opal_deploy.sources.archives import is_archive_name
from opal_deploy.sources.image import InputImage


class _SpooledImage(NamedTuple):
    """An image's bytes in the temporary file; a `FileSource` that cannot be pickled."""

    spool: BinaryIO
    offset: int
    size: int

    def open(self) -> BinaryIO:
        """See `FileSource.open`."""
        self.spool.seek(self.offset)
        return io.BytesIO(self.spool.read(self.size))


class RecordSources:
    """The images of the given inputs, found by record.

    A record matches the image with its name. If several have that name, it matches one with its digest, preferably at
    its index, since inputs may be fewer than in the run or in another order. If none has, it matches the image at its
    index, provided that the path within its folder or archive is the same, since inputs may have moved. A record
    without an index is not from a run, and its name may be any label: it matches the image with its digest.
    """

    def __init__(self, items: Iterable[InputImage] = (), records: Iterable[Record] | None = None) -> None:
        """Keep the images that `records` may match (None: all); UsageError without room for a compressed tar's."""
        wanted = None if records is None else [(record.image, record.image_index) for record in records]
        names, indices = (None if wanted is None else {pair[part] for pair in wanted} for part in (0, 1))
        # only the digest can tell images apart whose record has no index
        by_digest = indices is not None and None in indices
        self._by_name: dict[str, list[InputImage]] = {}
        self._by_index: dict[int, InputImage] = {}
        self._by_digest: dict[str | None, InputImage] | None = None
        self._spool: BinaryIO | None = None
        for item in items:
            named = names is None or by_digest or item.name in names
            indexed = item.index is not None and (indices is None or item.index in indices)
            if isinstance(item.source, bytes) and (named or indexed):
                item = replace(item, source=self._write(item.source))
            if named:
                self._by_name.setdefault(item.name or "", []).append(item)
            if item.index is not None and indexed:
                self._by_index[item.index] = item

    def find(self, record: Record) -> InputImage | None:
        """Return the image of a record; None if it was not given."""
        item = self._find(record)
        if item is None or not isinstance(item.source, _SpooledImage):
            return item
        # decode processes cannot open the temporary file
        return replace(item, source=item.source.open().read())

    def _write(self, content: bytes) -> _SpooledImage:
        try:
            if self._spool is None:
                self._spool = cast(BinaryIO, tempfile.TemporaryFile())  # noqa: SIM115  it lives as long as this
                weakref.finalize(self, self._spool.close)
            offset = self._spool.seek(0, io.SEEK_END)
            self._spool.write(content)
        except OSError as error:
            raise UsageError(
                f"{tempfile.gettempdir()}: images of a compressed tar cannot be kept here ({error.strerror or error}); "
                "set TMPDIR to a folder with room, or unpack the tar"
            ) from None
        return _SpooledImage(self._spool, offset, len(content))

    def _find(self, record: Record) -> InputImage | None:
        name, index, digest = record.image or "", record.image_index, record.image_sha256
        if same := sorted(self._by_name.get(name, []), key=lambda item: item.index != index):
            # files with the same name are the same file
            if len(same) == 1 or all(isinstance(item.source, Path | RemoteFile) for item in same):
                return same[0]
            return next((item for item in same if _hash(item) == digest), same[0])
        if index is None:
            if self._by_digest is None:
                self._by_digest = {_hash(item): item for items in self._by_name.values() for item in items}
            return None if digest is None else self._by_digest.get(digest)
        if (moved := self._by_index.get(index)) is None:
            return None
        relative = moved.relative if is_url(moved.relative) else str(Path(moved.relative))
        tail = escape_name(relative).lstrip("/")
        return moved if f"/{name}".endswith(f"/{tail}") else None


def _hash(item: InputImage) -> str | None:
    try:
        return None if item.error else content_sha256(item.source)
    except ImageError:
        return None


def locate(name: str, root: Path) -> Path | RemoteFile:
    """Return the path (below `root`) or remote file of an unescaped image name.

    Raises:
        ImageError: the URL's scheme is not supported, or its package is not installed.
    """
    source = parse_source(name)
    return root / source if isinstance(source, Path) else source


def find_container(record: Record, root: Path) -> str | None:
    """Return the archive, folder or list that a record's image belongs to or stands for, as named in the record.

    None for an image with its own file below `root`, even a missing one.
    """
    name = record.image
    if name is None:
        return None
    plain = unescape_name(name)
    whole = name if isinstance(record, Failed) and record.error.code == "no_images" else None
    if is_url(plain):
        # the first three parts are scheme and bucket
        parts = plain.split("/")
        archive = next(filter(is_archive_name, ("/".join(parts[:end]) for end in range(4, len(parts) + 1))), None)
        return whole if archive is None else escape_name(archive)
    path = Path(plain)
    for part in (*reversed(path.parents), path):
        if is_archive_name(part.name) and not os.path.isdir(root / part):
            return escape_name(str(part))
    return name if os.path.isdir(root / path) else whole
