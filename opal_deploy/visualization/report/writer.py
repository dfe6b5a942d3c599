"""The report's writer: records in, one page out.

Images and details are streamed to a temporary file, and the page is assembled when the report is closed, so that memory
hardly grows with the number of images. The page's policy names its script and style sheet by their digests: other
scripts, frames, forms and fetches are impossible, whatever a file's name contains.
"""

from __future__ import annotations

import base64
import contextlib
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TextIO, cast

from msgspec.structs import replace
from PIL import Image

from opal_deploy.artifact.measurements import EffectiveField
from opal_deploy.artifact.patches import Patches
from opal_deploy.records.record import Failed, Record
from opal_deploy.visualization.overlay import MEANINGS, NO_EVIDENCE
from opal_deploy.visualization.pages import json_script, read_asset, read_evidence_script, render_page, to_json
from opal_deploy.visualization.report.cards import Tables, Thumbnail, describe_card, index_row, make_thumbnail
from opal_deploy.visualization.sentences import GLOSSARY
from opal_deploy.visualization.style import escape_unprintable

ImageMode = Literal["embed", "files"]
# largest number of images embedded in the page; larger reports show the overlay files next to it
EMBED_LIMIT = 200
# largest number of images that a browser filters and sorts while one types
REPORT_LIMIT = 10_000
# cards per page of the grid
PAGE_SIZE = 48
# images per block of details: a page of cards needs few blocks, and a block parses fast
_BLOCK = 16
_IMAGE_SOURCES = {"embed": "data:", "files": "'self' file:"}

Fact = tuple[str, str]


@dataclass(frozen=True)
class ReportOptions:
    """The content of report.html.

    Attributes:
        facts, evidence: (name, value) pairs about the run, and of what was measured of the model's evidence.
        patches: the model's patches of training images, shown next to what a slot found; None where there are none.
        noun: what a box shows, `slot` or `region`.
        reach: how far patches reach around a box, in cells.
        field: the model's effective receptive field, shown around cells on demand; None if it is unknown.
        class_names: the labels that the model knows, for the accuracy; None: all.
    """

    facts: tuple[Fact, ...] = ()
    evidence: tuple[Fact, ...] = ()
    field: EffectiveField | None = None
    patches: Patches | None = None
    noun: str = "slot"
    reach: float = 1.0
    title: str = "Explanations"
    class_names: frozenset[str] | None = None


def choose_image_mode(count: int) -> ImageMode:
    """Return where a report of `count` images keeps them: embedded up to 200 images, else as files next to the page."""
    return "embed" if count <= EMBED_LIMIT else "files"


class ReportWriter:
    """Collects records in order and writes `path` when closed; until then, and after an error, `path` is untouched.

    As a context manager it closes the report at the end of the block, and discards it after an exception. It must not
    be used from several threads at once.

    Args:
        path: the report's file; its folder must exist. A hidden file next to it, `.<name>.*.part`, is used to write it.
        options: the content.
        image_mode: `embed` puts thumbnails into the page; `files` shows the overlays that records name.
        folder: prefix to leave out of images' names, see `find_common_folder`.

    Raises:
        OSError: the folder is missing or cannot be written; from `add` and `close`, the disk may be full.
    """

    def __init__(
        self, path: str | os.PathLike[str], options: ReportOptions, *, image_mode: ImageMode = "embed", folder: str = ""
    ) -> None:
        self._path, self._options, self._image_mode, self._folder = Path(path), options, image_mode, folder
        self._tables = Tables(REPORT_LIMIT, options.class_names)
        self._labels: dict[str, int] = {}
        self._cards = self._failed_cards = 0
        self._meanings: set[str] = set()
        # of answers, by their labels' indices
        self._classes: dict[int, int] = {}
        self._index: list[str] = []
        self._block: list[object] = []
        self._part_path = self._path.with_name(f".{self._path.name}.{os.getpid()}.part")
        # a file without a name: nothing remains, however this process ends
        data = tempfile.TemporaryFile("w+", dir=self._path.parent, encoding="ascii", newline="\n")  # noqa: SIM115
        self._data = cast(TextIO, data)

    def __enter__(self) -> ReportWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.discard()
        elif not self._data.closed:
            self.close()

    @property
    def embeds_images(self) -> bool:
        """Whether `add` uses the next image's overlay: beyond the limit, images are only counted."""
        return self._image_mode == "embed" and self._cards < self._tables.limit

    def add(self, record: Record, overlay: Thumbnail | bytes | Image.Image | None) -> None:
        """Count a record and, up to the limit, show it.

        Args:
            overlay: a thumbnail, over which the page draws the boxes, or the record's overlay as an image or JPEG; None
                for a card without an image. Not used if images are files.
        """
        if self._folder and record.image is not None:
            record = replace(record, image=record.image.removeprefix(self._folder))
        number = self._tables.statuses.total()
        self._tables.count(record)
        if (self._failed_cards if isinstance(record, Failed) else self._cards) >= self._tables.limit:
            return
        drawn = not isinstance(overlay, Thumbnail) or self._image_mode == "files"
        details = describe_card(record, self._label_index, self._options.field, drawn=drawn)
        self._index.append(to_json(index_row(record, number, self._label_index)))
        self._block.append(details)
        if len(self._block) == _BLOCK:
            self._write_block()
        if isinstance(record, Failed):
            self._failed_cards += 1
            return
        self._cards += 1
        answer = record.prediction
        self._classes[self._label_index(answer.label)] = answer.class_id
        if details["slots"]:
            self._meanings.add(MEANINGS[details["meaning"]])
        if overlay is not None and self._image_mode == "embed":
            small = overlay if isinstance(overlay, Thumbnail) else make_thumbnail(overlay, record)
            encoded = base64.b64encode(small).decode()
            self._data.write(f'<script type="text/plain" id="p{number}">{encoded}</script>\n')

    def close(self, summary: Sequence[Fact] = ()) -> None:
        """Write the report, with more facts; after an error nothing remains of it."""
        try:
            if self._block:
                self._write_block()
            script = read_evidence_script() + read_asset(__package__, "script.js")
            page = self._render([*self._options.facts, *summary], script)
            config = {
                "labels": [escape_unprintable(label) for label in self._labels], "no_evidence": NO_EVIDENCE,
                "image_mode": self._image_mode, "block": _BLOCK, "page": PAGE_SIZE,
                "noun": self._options.noun, "reach": self._options.reach, "patches": self._list_patches(),
            }  # fmt: skip
            with open(self._part_path, "w", encoding="utf-8", errors="backslashreplace", newline="\n") as file:
                file.write(page + json_script("config", config))
                index = ",\n".join(self._index)
                file.write(f'<script type="application/json" id="index">[{index}]</script>\n')
                self._data.seek(0)
                while part := self._data.read(1 << 20):
                    file.write(part)
                file.write(f"<script>{script}</script>\n</body>\n</html>\n")
            os.replace(self._part_path, self._path)
        finally:
            self.discard()

    def discard(self) -> None:
        """Remove the temporary files without writing the report; a closed report stays as it is."""
        # on a full disk the last flush fails too
        with contextlib.suppress(OSError):
            self._data.close()
        self._part_path.unlink(missing_ok=True)

    def _list_patches(self) -> dict[int, Any]:
        patches = self._options.patches
        return {} if patches is None else {label: patches.to_page(number) for label, number in self._classes.items()}

    def _label_index(self, label: str) -> int:
        return self._labels.setdefault(label, len(self._labels))

    def _write_block(self) -> None:
        self._data.write(json_script(f"d{(len(self._index) - 1) // _BLOCK}", self._block))
        self._block.clear()

    def _render(self, facts: Sequence[Fact], script: str) -> str:
        """Return the page but for its data and its script."""
        if self._folder:
            facts = [*facts, ("Image names", "relative to their common folder; results.jsonl has full paths")]
        return render_page(
            __package__,
            "report",
            script=script,
            images=_IMAGE_SOURCES[self._image_mode],
            title=self._options.title,
            facts=facts,
            evidence=self._options.evidence,
            tables=self._tables,
            confusion=self._tables.confusion(),
            cards=self._cards,
            failed_cards=self._failed_cards,
            meanings_shown=self._meanings,
            glossary=GLOSSARY,
            noun=self._options.noun,
            fields=self._options.field is not None,
            modes=("boxes", "patches only") if self._image_mode == "files" else ("boxes", "no boxes", "patches only"),
        )
