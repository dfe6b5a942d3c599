"""The report's writer: records in, one page out.

Written as a stream: pictures and details go to temporary files as they come, and the page is put together when the
report is closed. Memory does not grow with the number of images.
"""

from __future__ import annotations

import base64
import bisect
import contextlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, TextIO, cast

from PIL import Image

from opal_deploy.records.record import Record
from opal_deploy.visualization.legend import get_prediction
from opal_deploy.visualization.report.cards import SLOT_COLORS, Card, build_card
from opal_deploy.visualization.report.page import (
    PAGE_SIZE,
    ImageMode,
    Thumbnail,
    json_script,
    make_thumbnail,
    render_card,
    render_head,
    render_tables,
    render_tail,
    to_json,
)
from opal_deploy.visualization.report.tables import CLASSES_LISTED, Tables
from opal_deploy.visualization.text import escape_unprintable

# a report of more images shows the drawings beside it; one of so many carries its pictures, and may be moved alone
EMBED_LIMIT = 200
# so many a browser filters and sorts while one types
REPORT_LIMIT = 10_000
# details are read so many images at a time: a page's cards need few blocks, and a block is read in no time
_BLOCK = 16

Fact = tuple[str, str]
_Place = tuple[int, int]  # of a picture's block in the temporary file: where it starts and ends


def choose_image_mode(count: int) -> ImageMode:
    """Where the pictures of a report of `count` images best are: in the page up to 200, else beside it."""
    return "embed" if count <= EMBED_LIMIT else "files"


class ReportWriter:
    """Collects records in order and writes `path` when closed; before that, and after an error, `path` is untouched.

    Usable as a context manager: leaving the block closes the report, leaving it by an exception discards it and its
    temporary files (a report of an earlier run stays as it was). Not for use from several threads at once.

    Args:
        path: the report; its folder must exist. A hidden file beside it, `.<name>.*.part`, is used while it is closed.
        title: the report's heading.
        facts: what is told of the run, in order: model, runtime, versions, ...
        limit: at most so many images, and so many failures, are shown; all are counted.
        pictures: `embed`: in the page, as thumbnails. `files`: the page shows the drawings that records name, from the
            folder that it lies in.

    Raises:
        OSError: the folder is missing or cannot be written; from `add` and `close`, the disk is full.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        title: str,
        facts: Sequence[Fact],
        limit: int = REPORT_LIMIT,
        pictures: ImageMode = "embed",
    ) -> None:
        self._path = Path(path)
        self._title, self._facts, self._limit, self._pictures = title, list(facts), limit, pictures
        self._tables = Tables(limit)
        self._labels: dict[str, int] = {}
        self._seen = self._cards = self._failed_cards = 0
        # the least certain of those shown, which a browser sees first: (sort key, card, its picture's place)
        self._first: list[tuple[tuple[bool, float, int], Card, _Place | None]] = []
        self._block: list[object] = []
        self._blocks = 0
        self._whole_path = self._path.with_name(f".{self._path.name}.{os.getpid()}.part")
        with ExitStack() as stack:
            # without names: nothing of them is left, however this process ends
            self._blobs = cast(BinaryIO, stack.enter_context(tempfile.TemporaryFile(dir=self._path.parent)))
            self._index = stack.enter_context(_unnamed(self._path.parent))
            self._details = stack.enter_context(_unnamed(self._path.parent))
            self._files = stack.pop_all()
        self._open = True

    def __enter__(self) -> ReportWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.discard()
        elif self._open:
            self.close()

    @property
    def full(self) -> bool:
        """Whether the images to come are only counted, so that no overlay needs to be made for this report."""
        return self._cards >= self._limit

    @property
    def wants_pictures(self) -> bool:
        """Whether `add` has a use for the next image's overlay."""
        return self._pictures == "embed" and not self.full

    def add(self, record: Record, overlay: Thumbnail | bytes | Image.Image | None) -> None:
        """Count a record and, up to the limit, show it.

        Args:
            record: of any status.
            overlay: what `encode_overlay` or `draw_overlay` made of it, or its `thumbnail`, ready made; None for a
                card without a picture. Not looked at where pictures are files.

        Raises:
            ValueError: the report is closed already, or the record is none.
        """
        if not self._open:
            raise ValueError(f"{self._path} is closed already")
        if record["status"] != "error":
            get_prediction(record)
        number = self._seen
        self._seen += 1
        self._tables.count(record)
        failed = record["status"] == "error"
        if (self._failed_cards if failed else self._cards) >= self._limit:
            return
        position = self._cards + self._failed_cards
        card = build_card(record, number, self._label)
        self._index.write(("," if position else "") + to_json(card.index_row()) + "\n")
        self._block.append(card.details())
        if len(self._block) == _BLOCK:
            self._write_block()
        place = None
        if failed:
            self._failed_cards += 1
        else:
            self._cards += 1
            if overlay is not None and self._pictures == "embed":
                small = overlay if isinstance(overlay, Thumbnail) else make_thumbnail(overlay, record)
                place = self._store(number, small)
        bisect.insort(self._first, (card.order(position), card, place), key=lambda entry: entry[0])
        del self._first[PAGE_SIZE:]

    def close(self, summary: Sequence[Fact] = ()) -> None:
        """Write the report; `summary`: facts known only now, listed after `facts`. On an error nothing is left."""
        if not self._open:
            raise ValueError(f"{self._path} is closed already")
        try:
            if self._block:
                self._write_block()
            with open(self._whole_path, "w", encoding="utf-8", errors="backslashreplace", newline="\n") as whole:
                for part in self._parts([*self._facts, *summary]):
                    whole.write(part)
            os.replace(self._whole_path, self._path)
        finally:
            self.discard()

    def discard(self) -> None:
        """Give up: remove the temporary files. Does nothing to a report that was closed."""
        if self._open:
            self._open = False
            # on a full disk the last flush fails too, and the file must go all the same
            with contextlib.suppress(OSError):
                self._files.close()
            self._whole_path.unlink(missing_ok=True)

    def _label(self, label: str) -> int:
        return self._labels.setdefault(label, len(self._labels))

    def _store(self, number: int, picture: bytes) -> _Place:
        """Keep a picture as the block of data that the page will hold."""
        start = self._blobs.tell()
        self._blobs.write(b'<script type="text/plain" id="p%d">%s</script>\n' % (number, base64.b64encode(picture)))
        return start, self._blobs.tell()

    def _write_block(self) -> None:
        self._details.write(json_script(f"d{self._blocks}", self._block))
        self._blocks += 1
        self._block.clear()

    def _parts(self, facts: Sequence[Fact]) -> Iterator[str]:
        """The page, piece by piece."""
        labels = [escape_unprintable(label) for label in self._labels]
        yield self._head(facts)
        for _, card, place in self._first:
            yield render_card(card, labels, self._source(card, place))
        yield render_tables(
            tables=self._tables,
            confusion=self._tables.confusion(),
            listed=CLASSES_LISTED,
            pages=-(-(self._cards + self._failed_cards) // PAGE_SIZE),
        )
        yield json_script(
            "config",
            {
                "labels": labels,
                "colors": SLOT_COLORS,
                "pictures": self._pictures,
                "block": _BLOCK,
                "page": PAGE_SIZE,
                "first": [card.number for _, card, _ in self._first],
            },
        )
        yield '<script type="application/json" id="index">['
        yield from _chunks(self._index)
        yield "]</script>\n"
        yield from _chunks(self._details)
        yield from self._other_pictures()
        yield render_tail()

    def _head(self, facts: Sequence[Fact]) -> str:
        return render_head(
            self._pictures,
            [card for _, card, _ in self._first],
            title=escape_unprintable(self._title),
            facts=[(escape_unprintable(name), escape_unprintable(value)) for name, value in facts],
            tables=self._tables,
            cards=self._cards,
            failed_cards=self._failed_cards,
            confusion=bool(self._tables.pairs),
            page_size=PAGE_SIZE,
        )

    def _source(self, card: Card, place: _Place | None) -> str | None:
        if self._pictures == "files":
            return card.overlay
        if place is None:
            return None
        self._blobs.seek(place[0])
        block = self._blobs.read(place[1] - place[0])
        return "data:image/jpeg;base64," + block[block.index(b">") + 1 : block.rindex(b"</script>")].decode("ascii")

    def _other_pictures(self) -> Iterator[str]:
        """The blocks of all pictures but those that the first page's cards have."""
        self._blobs.seek(0, os.SEEK_END)
        end, start = self._blobs.tell(), 0
        for begin, stop in [*sorted(place for _, _, place in self._first if place is not None), (end, end)]:
            self._blobs.seek(start)
            while start < begin:
                part = self._blobs.read(min(1 << 20, begin - start))
                start += len(part)
                yield part.decode("ascii")
            start = stop


def _unnamed(folder: Path) -> TextIO:
    return cast(TextIO, tempfile.TemporaryFile("w+", dir=folder, encoding="ascii", newline="\n"))


def _chunks(stream: TextIO) -> Iterator[str]:
    stream.seek(0)
    while part := stream.read(1 << 20):
        yield part
