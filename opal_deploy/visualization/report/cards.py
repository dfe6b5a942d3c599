"""The content of a report: values and thumbnails of records, cards for pages without scripts, and tables of all."""

from __future__ import annotations

import io
import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from PIL import Image

from opal_deploy.artifact.measurements import EffectiveField
from opal_deploy.datasets.samples import describe_never_predicted
from opal_deploy.records.record import STATUSES, Answer, Answered, Failed, Record, Slot, describe_status
from opal_deploy.visualization.overlay import MEANINGS, NO_EVIDENCE, build_bars, overlay_width, photograph_size
from opal_deploy.visualization.pages import load_templates
from opal_deploy.visualization.style import LABELS_SHOWN, escape_unprintable

_NO_NAME = "(no name)"
# digits after the point; results.jsonl has full precision
_DIGITS = 6
_MESSAGE_LIMIT = 500
# names that a run gives its drawings; other texts in a record, such as an address, become no link
_OVERLAY_NAME = re.compile(r"overlays/(\d+/)?[A-Za-z0-9._-]+\.jpg")
THUMBNAIL_WIDTH, THUMBNAIL_HEIGHT, THUMBNAIL_QUALITY = 480, 640, 60
# images that would shrink by less are embedded in full size
_SMALL_ENOUGH = 0.75
# rows of the tables of classes and of confusions
CLASSES_LISTED = 30
PAIRS_LISTED = 60
# largest number of labels and classes in a confusion matrix
MATRIX_LIMIT = 25
# a percentage of fewer images says little
_MIN_IMAGES_FOR_PERCENT = 20


def index_row(record: Record, number: int, label_index: Callable[[str], int]) -> list[Any]:
    """Return the values by which the page's script filters and sorts, loaded for all images at once.

    Args:
        number: the image's number in the run.
        label_index: returns a label's index among the report's labels, adding it if it is new.
    """
    label = None if record.label is None else label_index(record.label)
    row = [number, _name(record), STATUSES.index(record.status)]
    if isinstance(record, Failed):
        return [*row, None, label, None, None, escape_unprintable(record.error.code)]
    answer = record.prediction
    return [*row, label_index(answer.label), label, _round(record.margin), _match(answer), ""]


def describe_card(
    record: Record, label_index: Callable[[str], int], effective: EffectiveField | None = None, *, drawn: bool = False
) -> dict[str, Any]:
    """Return the values that the page's script needs only for visible cards.

    Args:
        label_index: see `index_row`.
        effective: the effective receptive field, whose frames are listed per cell; None: it is not known.
        drawn: whether the boxes are in the image, which is an overlay.
    """
    if isinstance(record, Failed):
        return {"message": _shorten(record.error.message)}
    undrawn = record.drawing_error
    width = overlay_width(record.width, record.height) / photograph_size(record.width, record.height)[0]
    return {
        "rest": record.rest, "bias": record.bias, "cosine": record.prediction.cosine is not None,
        "size": [record.width, record.height], "drawn": drawn,
        "slots": _list_slots(record.evidence),
        "meaning": MEANINGS.index(build_bars(record)[0]), "flag": describe_status(record),
        "probability": _round(record.prediction.calibrated_probability),
        "top": [(label_index(answer.label), _match(answer)) for answer in record.top],
        "labels": None if record.labels is None else [
            (
                label_index(label.label), _round(label.logit), _round(label.probability), _round(label.rest),
                _list_slots(label.evidence if number < LABELS_SHOWN else ()),
            )
            for number, label in enumerate(record.labels)
        ],
        "fields": [] if effective is None else _place_fields(record.evidence, effective),
        "overlay": record.overlay if _OVERLAY_NAME.fullmatch(record.overlay or "") else None,
        "overlay_width": round(width, 4), "undrawn": f"not drawn: {_shorten(undrawn.message)}" if undrawn else "",
    }  # fmt: skip


def _list_slots(evidence: Sequence[Slot]) -> list[tuple[Any, ...]]:
    return [
        (
            slot.slot, slot.cell, _round(slot.score), _round(slot.contribution), [round(side, 1) for side in slot.box],
            None if slot.name is None else escape_unprintable(slot.name),
        )
        for slot in evidence
    ]  # fmt: skip


def render_card(record: Record, number: int, source: str | None) -> str:
    """Return a record's card as HTML; `source` is the address of its image, None without one."""
    template = load_templates(__package__).get_template("card.html.jinja")
    content = {"name": _name(record), "flag": describe_status(record), "no_evidence": NO_EVIDENCE}
    return template.render(record=record, number=number, source=source, **content)


def _name(record: Record) -> str:
    """Return the image's printable name."""
    return escape_unprintable(record.image) if record.image else _NO_NAME


def _shorten(message: str) -> str:
    """Return a printable message of at most 500 characters."""
    return escape_unprintable(message if len(message) <= _MESSAGE_LIMIT else message[:_MESSAGE_LIMIT] + " …")


def _match(answer: Answer) -> float | None:
    return _round(answer.logit if answer.cosine is None else answer.cosine)


def _place_fields(evidence: Sequence[Slot], effective: EffectiveField) -> list[tuple[int, ...]]:
    """Return (x0, y0, x1, y1, slot) of the effective receptive field of each different cell."""
    by_cell = {slot.cell: slot for slot in reversed(evidence)}
    slots = sorted(by_cell.values(), key=lambda slot: slot.slot)
    return [(*map(round, effective.surround(slot.cell, slot.box)), slot.slot) for slot in slots]


def _round(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else round(value, _DIGITS)


class Thumbnail(bytes):
    """A JPEG made by `make_thumbnail` of a photograph without boxes, ready to be embedded in a card."""


def make_thumbnail(overlay: bytes | Image.Image, record: Answered) -> Thumbnail:
    """Return a photograph, or an overlay without its caption, as JPEG of about 480 x 640 pixels at most."""
    image = Image.open(io.BytesIO(overlay)) if isinstance(overlay, bytes) else overlay
    whole, (width, height) = image.size, photograph_size(record.width, record.height)
    share = min(THUMBNAIL_WIDTH / width, THUMBNAIL_HEIGHT / height)
    share = 1.0 if share > _SMALL_ENOUGH else share
    if isinstance(overlay, bytes):
        # the decoder halves large images by itself, which is fast
        image.draft("RGB", (round(whole[0] * share), round(whole[1] * share)))
    # crop first: resizing a part would blend the caption into its last rows
    part = (max(1, width * image.size[0] // whole[0]), max(1, height * image.size[1] // whole[1]))
    size = (max(1, round(width * share)), max(1, round(height * share)))
    cut = image.convert("RGB").crop((0, 0, *part))
    small = cut if cut.size == size else cut.resize(size, Image.Resampling.BILINEAR, reducing_gap=2.0)
    buffer = io.BytesIO()
    small.save(buffer, "JPEG", quality=THUMBNAIL_QUALITY)
    return Thumbnail(buffer.getvalue())


class ConfusionCell(NamedTuple):
    """Number of images with a label that were predicted as a class; `share` is in percent of the label's images."""

    label: str
    predicted: str
    images: int
    share: float


@dataclass(frozen=True)
class Confusion:
    """Labels against predicted classes.

    Attributes:
        labelled, correct: number of answered images whose label the model knows, and of correct ones among them.
        answered, answered_correct: the same of images that were not refused (abstained or unknown).
        unknown: number of answered images whose label the model does not know.
        never: a line on classes with images that are never predicted; empty if there is none.
        columns: the predicted classes; empty if the matrix would be too large.
        rows: (label, a cell per column); empty if the matrix would be too large.
        pairs: the most frequent confusions.
        more: number of confused pairs that are not listed.
    """

    labelled: int
    correct: int
    answered: int
    answered_correct: int
    unknown: int
    never: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, tuple[ConfusionCell, ...]], ...]
    pairs: tuple[ConfusionCell, ...]
    more: int

    @property
    def percentage(self) -> float | None:
        """The accuracy in percent; None for fewer than 20 images."""
        return 100 * self.correct / self.labelled if self.labelled >= _MIN_IMAGES_FOR_PERCENT else None


@dataclass
class Tables:
    """Counts over all records; memory grows with classes and with `limit`, not with images.

    Attributes:
        limit: largest number of failures listed, as (name, code, message).
        class_names: the labels that the model knows; None: all.
        refused: of `pairs`, the abstained or unknown ones.
    """

    limit: int
    class_names: frozenset[str] | None = None
    statuses: Counter[str] = field(default_factory=Counter)
    classes: Counter[tuple[int, str]] = field(default_factory=Counter)
    codes: Counter[str] = field(default_factory=Counter)
    failures: list[tuple[str, str, str]] = field(default_factory=list)
    pairs: Counter[tuple[str, str]] = field(default_factory=Counter)
    refused: Counter[tuple[str, str]] = field(default_factory=Counter)
    labelled: bool = False

    def count(self, record: Record) -> None:
        """Add one record."""
        self.statuses[record.status] += 1
        self.labelled = self.labelled or record.label is not None
        if isinstance(record, Failed):
            code, message = record.error.code, record.error.message
            self.codes[code] += 1
            if len(self.failures) < self.limit:
                self.failures.append((_name(record), escape_unprintable(code), _shorten(message)))
            return
        self.classes[record.prediction.class_id, record.prediction.label] += 1
        if record.label is not None:
            pair = record.label, record.prediction.label
            self.pairs[pair] += 1
            self.refused[pair] += record.status != "ok"

    @property
    def answered(self) -> int:
        """The number of records with a prediction."""
        return self.statuses.total() - self.statuses["error"]

    def class_rows(self) -> list[tuple[str, int, float]]:
        """Return the most frequent classes with their number of images, and its percentage of the largest number.

        Equal counts are in the order of the classes.
        """
        ranked = sorted(self.classes.items(), key=lambda item: (-item[1], item[0]))[:CLASSES_LISTED]
        return [(escape_unprintable(name), n, round(100 * n / ranked[0][1], 1)) for (_, name), n in ranked]

    def confusion(self) -> Confusion | None:
        """Return labels against classes; None if no answered image has a label."""
        if not self.pairs:
            return None
        per_label = Counter[str]()
        for (label, _), count in sorted(self.pairs.items()):
            per_label[label] += count
        names = self.class_names
        known_labels = {label: n for label, n in per_label.items() if names is None or label in names}
        correct = {pair: n for pair, n in self.pairs.items() if pair[0] == pair[1] and pair[0] in known_labels}
        refused = {pair: n for pair, n in self.refused.items() if pair[0] in known_labels}

        def cell(label: str, predicted: str) -> ConfusionCell:
            count = self.pairs[label, predicted]
            share = round(100 * count / per_label[label], 1)
            return ConfusionCell(escape_unprintable(label), escape_unprintable(predicted), count, share)

        # a class that is never predicted has a column too
        absent = () if names is None else known_labels
        columns = sorted({*(predicted for _, predicted in self.pairs), *absent})
        columns = columns if len({*columns, *per_label}) <= MATRIX_LIMIT else []
        wrong = sorted(((n, pair) for pair, n in self.pairs.items() if pair[0] != pair[1]), key=lambda i: (-i[0], i[1]))
        labelled, predicted_names = sum(known_labels.values()), {name for _, name in self.classes}
        never = "" if names is None else describe_never_predicted(Counter(known_labels), predicted_names)
        return Confusion(
            labelled,
            sum(correct.values()),
            labelled - sum(refused.values()),
            sum(n - refused[pair] for pair, n in correct.items()),
            self.pairs.total() - labelled,
            escape_unprintable(never),
            tuple(map(escape_unprintable, columns)),
            tuple(
                (escape_unprintable(label), tuple(cell(label, predicted) for predicted in columns))
                for label in (per_label if columns else ())
            ),
            tuple(cell(*pair) for _, pair in wrong[:PAIRS_LISTED]),
            max(0, len(wrong) - PAIRS_LISTED),
        )
