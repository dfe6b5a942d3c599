"""Strict reading of results (damaged lines are reported, none is skipped), and finding the images of records.

An image with its own file is found by its name, below a root. Members of archives, and records that stand for a whole
folder, list or archive, are found among the images that the same inputs name now. Members of a compressed tar, which
can only be read from beginning to end, are kept in a temporary file.
"""

from __future__ import annotations

import io
import os
import tempfile
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

from opal_deploy.artifact.files import check_regular
from opal_deploy.errors import ImageError, UsageError
from opal_deploy.predict.prepare import content_sha256
from opal_deploy.records.lines import MAX_LINE_BYTES, Line, parse_json, parse_record, read_lines
from opal_deploy.records.names import escape_name, unescape_name
from opal_deploy.records.record import RECORD_SCHEMA, Failed, Record
from opal_deploy.records.run_files import RESULTS, RUN
from opal_deploy.remote import RemoteFile, is_url, parse_source
from opal_deploy.sources.archives import is_archive_name
from opal_deploy.sources.image import InputImage

SUFFIX, SINGLE_SUFFIX = ".jsonl", ".json"


def is_results(path: Path) -> bool:
    """Return whether a path stands for results rather than a model."""
    return path.suffix in (SUFFIX, SINGLE_SUFFIX) or (path / RESULTS).is_file()


def find_results(path: Path) -> Path:
    """Return the results.jsonl of a path: the file itself, or the one in that folder; raise UsageError without one."""
    results = path / RESULTS if path.is_dir() else path
    try:
        check_regular(results)
    except OSError as error:
        found = "no such file" if isinstance(error, FileNotFoundError) else error.strerror
        raise UsageError(f"{results}: {found}; expected results.jsonl of `opal-deploy infer`, or its folder") from None
    return results


def read_run_document(results: Path) -> dict[str, Any] | None:
    """Return the run.json next to a results.jsonl; None if there is none, or a damaged one."""
    path = results.parent / RUN
    try:
        document = parse_json(path.read_bytes()) if path.is_file() else None
    except OSError:
        return None
    return document if isinstance(document, dict) else None


def read_run_options(results: Path) -> dict[str, Any]:
    """Return the options in the run.json next to a results.jsonl; empty without one."""
    options = (read_run_document(results) or {}).get("run")
    return options if isinstance(options, dict) else {}


def read_all_records(path: Path) -> Iterator[Record]:
    """Yield every record of a file.

    Raises:
        UsageError: the file cannot be read, or a line is not a record.
    """
    for number, line in enumerate(read_all_lines(path), 1):
        if line.record is None:
            raise _damaged(path, number, line)
        yield line.record


def read_all_lines(path: Path) -> Iterator[Line]:
    """Yield every line of a file, whether it is a record or not.

    A .json file is one record, on any number of lines: the answer that `serve` gave for an image.

    Raises:
        UsageError: the file cannot be read.
    """
    if path.suffix != SINGLE_SUFFIX:
        yield from _read_jsonl(path)
        return
    try:
        with path.open("rb") as stream:
            document = parse_json(data := stream.read(MAX_LINE_BYTES))
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror or error})") from None
    if isinstance(document, dict) and isinstance(document.get("record"), dict):
        # the answer for an image with an error
        document = document["record"]
    yield Line(len(data), document, parse_record(document))


def _read_jsonl(path: Path) -> Iterator[Line]:
    try:
        with path.open("rb") as stream:
            yield from read_lines(stream)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror or error})") from None


def _damaged(path: Path, number: int, line: Line) -> UsageError:
    """Return the error for a line, or for the only document, that is not a record of this schema."""
    schema = line.document.get("schema", RECORD_SCHEMA) if isinstance(line.document, dict) else RECORD_SCHEMA
    if schema != RECORD_SCHEMA:
        return UsageError(
            f"{path}: line {number}: record schema {schema!r} found, {RECORD_SCHEMA} expected; use the opal-deploy "
            "version that wrote it"
        )
    return UsageError(f"{path}: line {number} is not a whole record of `opal-deploy infer`; the file is damaged")


class RecordIndex:
    """Records of a file by image name; memory holds a name and an offset for each.

    Attributes:
        unnamed: number of records without a name.
    """

    def __init__(self, path: Path) -> None:
        """Read the file once.

        Raises:
            UsageError: the file cannot be read, or a line is not a record.
        """
        self._path = path
        # offsets of each name's first record, and of further records with the same name
        self._offsets: dict[str, int] = {}
        self._later_offsets: dict[str, list[int]] = {}
        self.unnamed = 0
        offset = 0
        for number, line in enumerate(_read_jsonl(path), 1):
            if line.record is None:
                raise _damaged(path, number, line)
            name = line.record.image
            if name is None:
                self.unnamed += 1
            elif self._offsets.setdefault(name, offset) != offset:
                self._later_offsets.setdefault(name, []).append(offset)
            offset += line.size
        self._stream = path.open("rb")

    def count(self, name: str) -> int:
        """Return the number of records with a name."""
        return (name in self._offsets) + len(self._later_offsets.get(name, ()))

    def __iter__(self) -> Iterator[str]:
        """Yield each name once, in the order of the file."""
        return iter(self._offsets)

    def __getitem__(self, name: str) -> list[Record]:
        """Return the records with a name, in input order; empty for an unknown name."""
        offsets = [self._offsets[name], *self._later_offsets.get(name, ())] if name in self._offsets else []
        # concatenated shards may be in another order
        return sorted(
            map(self._read, offsets), key=lambda record: -1 if record.image_index is None else record.image_index
        )

    def _read(self, offset: int) -> Record:
        self._stream.seek(offset)
        line = next(read_lines(self._stream), None)
        if line is None or line.record is None:
            raise UsageError(f"{self._path}: changed while it was read; try again")
        return line.record

    def close(self) -> None:
        """Close the file."""
        self._stream.close()


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
        wanted = None if records is None else list(records)
        names = None if wanted is None else {record.image for record in wanted}
        indices = None if wanted is None else {record.image_index for record in wanted}
        # only the digest can tell these images apart
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
        name, index = record.image or "", record.image_index
        if same := sorted(self._by_name.get(name, []), key=lambda item: item.index != index):
            # files with the same name are the same file
            if len(same) == 1 or all(isinstance(item.source, Path | RemoteFile) for item in same):
                return same[0]
            digest = record.image_sha256
            return next((item for item in same if _hash(item) == digest), same[0])
        if index is None:
            return self._find_by_digest(record.image_sha256)
        moved = self._by_index.get(index)
        if moved is None:
            return None
        relative = moved.relative if is_url(moved.relative) else str(Path(moved.relative))
        tail = escape_name(relative).lstrip("/")
        return moved if f"/{name}".endswith(f"/{tail}") else None

    def _find_by_digest(self, digest: str | None) -> InputImage | None:
        if self._by_digest is None:
            self._by_digest = {_hash(item): item for items in self._by_name.values() for item in items}
        return None if digest is None else self._by_digest.get(digest)


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
    stands_for_all = isinstance(record, Failed) and record.error.code == "no_images"
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
