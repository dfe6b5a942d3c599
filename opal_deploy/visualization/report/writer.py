"""The report's writer: records in, one page out.

Images, details and records are streamed to temporary files as they come, and the page is put together when the report
is closed, so memory hardly grows with the number of images: by 17 bytes each, for the order in which they are shown.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import tempfile
from array import array
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, TextIO, cast

from PIL import Image

from opal_deploy.artifact.measurements import EffectiveField
from opal_deploy.records.record import Record
from opal_deploy.visualization.legend import get_prediction
from opal_deploy.visualization.report.cards import SLOT_COLORS, Card, build_card
from opal_deploy.visualization.report.order import TypicalOrder
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

# a report of at most this many images embeds them and may be moved alone; a larger one shows the overlays beside it
EMBED_LIMIT = 200
# a browser filters and sorts this many images while one types
REPORT_LIMIT = 10_000
# details of this many images are one block of data: a page of cards needs few blocks, and a block parses fast
_BLOCK = 16

Fact = tuple[str, str]
_Span = tuple[int, int]  # start and end of an image's block in the temporary file


def choose_image_mode(count: int) -> ImageMode:
    """Return where a report of `count` images has them: embedded up to 200 images, else as files beside the page."""
    return "embed" if count <= EMBED_LIMIT else "files"


class ReportWriter:
    """Collects records in order and writes `path` when closed; until then, and after an error, `path` is untouched.

    As a context manager it closes the report at the end of the block, and discards it and its temporary files after an
    exception (a report of an earlier run stays as it was). It must not be used from several threads at once.

    Args:
        path: the report's file; its folder must exist. A hidden file beside it, `.<name>.*.part`, is used to write it.
        title: the report's heading.
        facts: (name, value) pairs about the run: model, runtime, versions, ...
        limit: the largest number of images, and of failures, that are shown; all are counted.
        field: the effective receptive field, which the page shows around cells on demand; None for none.
        image_mode: `embed` puts thumbnails into the page; `files` shows the overlays that records name, from the folder
            of the report.
        evidence: what was measured of the model's evidence, shown at the head; empty shows nothing.
        folder: left out at the beginning of images' names, see `find_common_folder`.

    Raises:
        OSError: the folder is missing or cannot be written; from `add` and `close` also where the disk is full.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        title: str,
        facts: Sequence[Fact],
        limit: int = REPORT_LIMIT,
        image_mode: ImageMode = "embed",
        field: EffectiveField | None = None,
        evidence: str = "",
        folder: str = "",
    ) -> None:
        self._path = Path(path)
        self._title, self._facts, self._limit, self._image_mode = title, list(facts), limit, image_mode
        self._evidence, self._folder = evidence, folder
        if folder:
            self._facts.append(("Names", "of images are paths from their common folder; results.jsonl has them whole"))
        self._field = field
        self._tables = Tables(limit)
        self._labels: dict[str, int] = {}
        self._records = self._cards = self._failed_cards = 0
        self._order = TypicalOrder()
        # where each image's line begins in the file of records, from which the first page's cards are built again
        self._line_starts = array("Q")
        self._block: list[object] = []
        self._blocks = 0
        self._part_path = self._path.with_name(f".{self._path.name}.{os.getpid()}.part")
        with ExitStack() as stack:
            # files without names: nothing of them is left, however this process ends
            self._blobs = cast(BinaryIO, stack.enter_context(tempfile.TemporaryFile(dir=self._path.parent)))
            self._lines = cast(BinaryIO, stack.enter_context(tempfile.TemporaryFile(dir=self._path.parent)))
            self._index = stack.enter_context(_open_unnamed(self._path.parent))
            self._details = stack.enter_context(_open_unnamed(self._path.parent))
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
        """Whether images to come are only counted, so that this report needs no overlays of them."""
        return self._cards >= self._limit

    @property
    def embeds_images(self) -> bool:
        """Whether `add` uses the next image's overlay."""
        return self._image_mode == "embed" and not self.full

    def add(self, record: Record, overlay: Thumbnail | bytes | Image.Image | None) -> None:
        """Count a record and, up to the limit, show it.

        Args:
            record: of any status.
            overlay: what `draw_overlay` returned for the record, as an image or as JPEG, or its thumbnail; None for a
                card without an image. Not used where images are files.

        Raises:
            ValueError: the report is closed already, or the record has neither a prediction nor an error.
        """
        if not self._open:
            raise ValueError(f"{self._path} is closed already")
        if record["status"] != "error":
            get_prediction(record)
        if self._folder and record["image"] is not None:
            record = {**record, "image": record["image"].removeprefix(self._folder)}
        number = self._records
        self._records += 1
        self._tables.count(record)
        failed = record["status"] == "error"
        if (self._failed_cards if failed else self._cards) >= self._limit:
            return
        position = self._cards + self._failed_cards
        card = build_card(record, number, self._label_index, self._field)
        self._index.write(("," if position else "") + to_json(card.index_row()) + "\n")
        self._block.append(card.details())
        if len(self._block) == _BLOCK:
            self._write_block()
        span = None
        if failed:
            self._failed_cards += 1
        else:
            self._cards += 1
            if overlay is not None and self._image_mode == "embed":
                small = overlay if isinstance(overlay, Thumbnail) else make_thumbnail(overlay, record)
                span = self._store(number, small)
        self._order.add(card.margin, card.is_right)
        self._line_starts.append(self._lines.tell())
        self._lines.write(json.dumps([number, span, record], separators=(",", ":")).encode("ascii") + b"\n")

    def close(self, summary: Sequence[Fact] = ()) -> None:
        """Write the report, leaving nothing behind on an error.

        Args:
            summary: facts known only now, listed after `facts`.
        """
        if not self._open:
            raise ValueError(f"{self._path} is closed already")
        try:
            if self._block:
                self._write_block()
            with open(self._part_path, "w", encoding="utf-8", errors="backslashreplace", newline="\n") as page:
                for part in self._render([*self._facts, *summary]):
                    page.write(part)
            os.replace(self._part_path, self._path)
        finally:
            self.discard()

    def discard(self) -> None:
        """Remove the temporary files without writing the report; a closed report stays as it is."""
        if self._open:
            self._open = False
            # on a full disk the last flush fails too, and the file must go all the same
            with contextlib.suppress(OSError):
                self._files.close()
            self._part_path.unlink(missing_ok=True)

    def _label_index(self, label: str) -> int:
        return self._labels.setdefault(label, len(self._labels))

    def _store(self, number: int, thumbnail: bytes) -> _Span:
        """Store a thumbnail as the block of data that the page will hold."""
        start = self._blobs.tell()
        self._blobs.write(b'<script type="text/plain" id="p%d">%s</script>\n' % (number, base64.b64encode(thumbnail)))
        return start, self._blobs.tell()

    def _write_block(self) -> None:
        self._details.write(json_script(f"d{self._blocks}", self._block))
        self._blocks += 1
        self._block.clear()

    def _render(self, facts: Sequence[Fact]) -> Iterator[str]:
        """Yield the page piece by piece."""
        labels = [escape_unprintable(label) for label in self._labels]
        typical = self._order.positions()
        first = [self._read_card(position) for position in typical[:PAGE_SIZE]]
        yield self._head(facts, [card for card, _ in first])
        for card, span in first:
            yield render_card(card, labels, self._image_source(card, span))
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
                "image_mode": self._image_mode,
                "block": _BLOCK,
                "page": PAGE_SIZE,
                "typical": typical,
            },
        )
        yield '<script type="application/json" id="index">['
        yield from _read_chunks(self._index)
        yield "]</script>\n"
        yield from _read_chunks(self._details)
        yield from self._images_without([span for _, span in first if span is not None])
        yield render_tail()

    def _read_card(self, position: int) -> tuple[Card, _Span | None]:
        """Build the card at a position again, and return it with the span of its image."""
        self._lines.seek(self._line_starts[position])
        number, span, record = json.loads(self._lines.readline())
        return build_card(record, number, self._label_index, self._field), span and (span[0], span[1])

    def _head(self, facts: Sequence[Fact], first: Sequence[Card]) -> str:
        return render_head(
            self._image_mode,
            first,
            title=escape_unprintable(self._title),
            evidence=escape_unprintable(self._evidence),
            facts=[(escape_unprintable(name), escape_unprintable(value)) for name, value in facts],
            tables=self._tables,
            cards=self._cards,
            failed_cards=self._failed_cards,
            confusion=bool(self._tables.pairs),
            fields=self._field is not None,
            page_size=PAGE_SIZE,
            order=self._order.describe(),
        )

    def _image_source(self, card: Card, span: _Span | None) -> str | None:
        if self._image_mode == "files":
            return card.overlay
        if span is None:
            return None
        self._blobs.seek(span[0])
        block = self._blobs.read(span[1] - span[0])
        return "data:image/jpeg;base64," + block[block.index(b">") + 1 : block.rindex(b"</script>")].decode("ascii")

    def _images_without(self, spans: list[_Span]) -> Iterator[str]:
        """Yield the blocks of all images except those at `spans`: these are in the first page's cards."""
        self._blobs.seek(0, os.SEEK_END)
        end, start = self._blobs.tell(), 0
        for begin, stop in [*sorted(spans), (end, end)]:
            self._blobs.seek(start)
            while start < begin:
                part = self._blobs.read(min(1 << 20, begin - start))
                start += len(part)
                yield part.decode("ascii")
            start = stop


def _open_unnamed(folder: Path) -> TextIO:
    return cast(TextIO, tempfile.TemporaryFile("w+", dir=folder, encoding="ascii", newline="\n"))


def _read_chunks(stream: TextIO) -> Iterator[str]:
    stream.seek(0)
    while part := stream.read(1 << 20):
        yield part
