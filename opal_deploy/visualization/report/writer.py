"""The report's writer: records in, one page out.

Images, details and records are streamed to temporary files, and the page is assembled when the report is closed, so
that memory hardly grows with the number of images: by 17 bytes each, for the order in which they are shown.
"""

from __future__ import annotations

import base64
import contextlib
import json
import math
import os
import tempfile
from array import array
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import BinaryIO, TextIO, cast

from msgspec.structs import replace
from PIL import Image

from opal_deploy.artifact.measurements import EffectiveField
from opal_deploy.records.lines import to_json_line
from opal_deploy.records.record import Failed, Record, to_record
from opal_deploy.visualization.overlay import NO_EVIDENCE
from opal_deploy.visualization.pages import json_script, to_json
from opal_deploy.visualization.report.cards import CLASSES_LISTED, Card, Confusion, Tables, build_card
from opal_deploy.visualization.report.page import (
    PAGE_SIZE,
    ImageMode,
    Thumbnail,
    make_thumbnail,
    render_card,
    render_head,
    render_tables,
    render_tail,
)
from opal_deploy.visualization.style import escape_unprintable, format_number

# largest number of images embedded in the page; larger reports show the overlay files next to it
EMBED_LIMIT = 200
# largest number of images that a browser filters and sorts while one types
REPORT_LIMIT = 10_000
# images per block of details: a page of cards needs few blocks, and a block parses fast
_BLOCK = 16

Fact = tuple[str, str]
_Span = tuple[int, int]  # start and end of an image's block in the temporary file
_CORRECT, _WRONG, _UNLABELLED = range(3)
_KIND_NAMES = {_CORRECT: "correct", _WRONG: "wrong", _UNLABELLED: "without a label"}


def choose_image_mode(count: int) -> ImageMode:
    """Return where a report of `count` images keeps them: embedded up to 200 images, else as files next to the page."""
    return "embed" if count <= EMBED_LIMIT else "files"


class ReportWriter:
    """Collects records in order and writes `path` when closed; until then, and after an error, `path` is untouched.

    As a context manager it closes the report at the end of the block, and discards it after an exception. It must not
    be used from several threads at once.

    Args:
        path: the report's file; its folder must exist. A hidden file next to it, `.<name>.*.part`, is used to write it.
        facts: (name, value) pairs about the run: model, runtime, versions, ...
        limit: largest number of images, and of failures, that are shown; all are counted.
        field: the effective receptive field, which the page shows around cells on demand; None: not shown.
        image_mode: `embed` puts thumbnails into the page; `files` shows the overlays that records name.
        evidence: (name, value) pairs of what was measured of the model's evidence.
        folder: prefix to leave out of images' names, see `find_common_folder`.
        class_names: the labels that the model knows, for the accuracy; None: all.

    Raises:
        OSError: the folder is missing or cannot be written; from `add` and `close`, the disk may be full.
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
        evidence: Sequence[Fact] = (),
        folder: str = "",
        class_names: frozenset[str] | None = None,
    ) -> None:
        self._path = Path(path)
        self._title, self._facts, self._limit, self._image_mode = title, list(facts), limit, image_mode
        self._evidence, self._folder = evidence, folder
        if folder:
            self._facts.append(("Image names", "relative to their common folder; results.jsonl has full paths"))
        self._field = field
        self._tables = Tables(limit, class_names)
        self._labels: dict[str, int] = {}
        self._records = self._cards = self._failed_cards = 0
        self._order = _TypicalOrder()
        # offset of each record in the file of records, from which the first page's cards are built again
        self._line_starts = array("Q")
        self._block: list[object] = []
        self._blocks = 0
        self._part_path = self._path.with_name(f".{self._path.name}.{os.getpid()}.part")
        with ExitStack() as stack:
            # files without names: nothing remains, however this process ends
            self._blobs = cast(BinaryIO, stack.enter_context(tempfile.TemporaryFile(dir=self._path.parent)))
            self._lines = cast(BinaryIO, stack.enter_context(tempfile.TemporaryFile(dir=self._path.parent)))
            self._index = stack.enter_context(_open_unnamed(self._path.parent))
            self._details = stack.enter_context(_open_unnamed(self._path.parent))
            self._files = stack.pop_all()
        self._open = True

    def __enter__(self) -> ReportWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.discard()
        elif self._open:
            self.close()

    @property
    def full(self) -> bool:
        """Whether further images are only counted, so that they need no overlays."""
        return self._cards >= self._limit

    @property
    def embeds_images(self) -> bool:
        """Whether `add` uses the next image's overlay."""
        return self._image_mode == "embed" and not self.full

    def add(self, record: Record, overlay: Thumbnail | bytes | Image.Image | None) -> None:
        """Count a record and, up to the limit, show it.

        Args:
            overlay: a thumbnail, over which the page draws the boxes, or the record's overlay as an image or JPEG; None
                for a card without an image. Not used if images are files.

        Raises:
            ValueError: the report is closed.
        """
        self._check_open()
        if self._folder and record.image is not None:
            record = replace(record, image=record.image.removeprefix(self._folder))
        number = self._records
        self._records += 1
        self._tables.count(record)
        failed = isinstance(record, Failed)
        if (self._failed_cards if failed else self._cards) >= self._limit:
            return
        position = self._cards + self._failed_cards
        drawn = not isinstance(overlay, Thumbnail) or self._image_mode == "files"
        card = build_card(record, number, self._label_index, self._field, drawn=drawn)
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
        self._order.add(card.margin, card.is_correct)
        self._line_starts.append(self._lines.tell())
        self._lines.write(to_json_line([number, span, drawn, record]))

    def close(self, summary: Sequence[Fact] = ()) -> None:
        """Write the report; after an error nothing remains of it. Raise ValueError if the report is closed."""
        self._check_open()
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
            # on a full disk the last flush fails too
            with contextlib.suppress(OSError):
                self._files.close()
            self._part_path.unlink(missing_ok=True)

    def _check_open(self) -> None:
        if not self._open:
            raise ValueError(f"{self._path}: the report is closed")

    def _label_index(self, label: str) -> int:
        return self._labels.setdefault(label, len(self._labels))

    def _store(self, number: int, thumbnail: bytes) -> _Span:
        """Store a thumbnail as the data block for the page."""
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
        confusion = self._tables.confusion()
        yield self._head(facts, [card for card, _ in first], confusion)
        for card, span in first:
            yield render_card(card, labels, self._image_source(card, span))
        yield render_tables(
            tables=self._tables,
            confusion=confusion,
            listed=CLASSES_LISTED,
            evidence=_escape_facts(self._evidence),
            pages=-(-(self._cards + self._failed_cards) // PAGE_SIZE),
        )
        config = {
            "labels": labels, "no_evidence": NO_EVIDENCE,
            "image_mode": self._image_mode, "block": _BLOCK, "page": PAGE_SIZE, "typical": typical,
        }  # fmt: skip
        yield json_script("config", config)
        yield '<script type="application/json" id="index">['
        yield from _read_chunks(self._index)
        yield "]</script>\n"
        yield from _read_chunks(self._details)
        yield from self._images_without([span for _, span in first if span is not None])
        yield render_tail()

    def _read_card(self, position: int) -> tuple[Card, _Span | None]:
        """Return the card at a position, with the span of its image."""
        self._lines.seek(self._line_starts[position])
        number, span, drawn, record = json.loads(self._lines.readline())
        card = build_card(to_record(record), number, self._label_index, self._field, drawn=drawn)
        return card, span and (span[0], span[1])

    def _head(self, facts: Sequence[Fact], first: Sequence[Card], confusion: Confusion | None) -> str:
        return render_head(
            self._image_mode,
            first,
            title=escape_unprintable(self._title),
            facts=_escape_facts(facts),
            evidence=self._evidence,
            tables=self._tables,
            cards=self._cards,
            failed_cards=self._failed_cards,
            confusion=confusion,
            fields=self._field is not None,
            modes=("boxes", "patches only") if self._image_mode == "files" else ("boxes", "no boxes", "patches only"),
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
        """Yield the blocks of all images except those at `spans`, which are in the first page's cards."""
        self._blobs.seek(0, os.SEEK_END)
        end, start = self._blobs.tell(), 0
        for begin, stop in [*sorted(spans), (end, end)]:
            self._blobs.seek(start)
            while start < begin:
                part = self._blobs.read(min(1 << 20, begin - start))
                start += len(part)
                yield part.decode("ascii")
            start = stop


def _escape_facts(facts: Sequence[Fact]) -> list[Fact]:
    return [(escape_unprintable(name), escape_unprintable(value)) for name, value in facts]


def _open_unnamed(folder: Path) -> TextIO:
    return cast(TextIO, tempfile.TemporaryFile("w+", dir=folder, encoding="ascii", newline="\n"))


def _read_chunks(stream: TextIO) -> Iterator[str]:
    stream.seek(0)
    while part := stream.read(1 << 20):
        yield part


class _TypicalOrder:
    """The order in which a report opens: typical answers first; nine bytes per image.

    Correct, wrong and unlabelled answers are each sorted by the distance of their margins to their own median, then
    mixed so that every part of the order has them in the same proportion. Images without a margin come last.
    """

    def __init__(self) -> None:
        self._margins, self._kinds = array("d"), array("B")

    def add(self, margin: float | None, is_correct: bool | None) -> None:
        """Add the next image; None for an image without a margin or label."""
        self._margins.append(math.nan if margin is None else margin)
        self._kinds.append(_UNLABELLED if is_correct is None else _CORRECT if is_correct else _WRONG)

    def positions(self) -> list[int]:
        """Return the images' positions, 0, 1, ... as they were added, in the typical order."""
        mixed = []
        for kind, group in self._groups().items():
            middle = self._median(group)
            group.sort(key=lambda position: (round(abs(self._margins[position] - middle), 6), position))
            # the k-th of n belongs at the share (k + 1/2) / n of the whole order
            mixed += [((k + 0.5) / len(group), kind, position) for k, position in enumerate(group)]
        mixed.sort()
        rest = (position for position, margin in enumerate(self._margins) if math.isnan(margin))
        return [*(position for _, _, position in mixed), *rest]

    def describe(self) -> str:
        """Return the order in words; empty if no image has a margin."""
        groups = self._groups()
        middles = {kind: format_number(self._median(group)) for kind, group in groups.items()}
        if not groups:
            return ""
        if len(groups) == 1:
            (middle,) = middles.values()
            return f"Typical answers first: margins closest to the median, {middle}."
        kinds = [
            f"{len(groups[kind]):,} {_KIND_NAMES[kind]} (median margin {middle})" for kind, middle in middles.items()
        ]
        listed = f"{', '.join(kinds[:-1])} and {kinds[-1]}"
        return f"Typical answers first: {listed} in equal proportion, each from its median outwards."

    def _groups(self) -> dict[int, list[int]]:
        groups: dict[int, list[int]] = {_CORRECT: [], _WRONG: [], _UNLABELLED: []}
        for position, (margin, kind) in enumerate(zip(self._margins, self._kinds, strict=True)):
            if not math.isnan(margin):
                groups[kind].append(position)
        return {kind: group for kind, group in groups.items() if group}

    def _median(self, group: list[int]) -> float:
        return median(self._margins[position] for position in group)
