"""The content of a report as plain values: the card of one record, and the tables over all records."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from opal_deploy.artifact.measurements import EffectiveField
from opal_deploy.datasets.samples import describe_never_predicted
from opal_deploy.records.record import STATUSES, Failed, Record, Slot, describe_status
from opal_deploy.visualization.overlay import MEANINGS, build_bars, overlay_width, photograph_size
from opal_deploy.visualization.style import escape_unprintable

# rows of the tables of classes and of confusions
CLASSES_LISTED = 30
PAIRS_LISTED = 60
# largest number of labels and classes in a confusion matrix
MATRIX_LIMIT = 25
# a percentage of fewer images says little
_MIN_IMAGES_FOR_PERCENT = 20
_NO_NAME = "(no name)"
# digits after the point; results.jsonl has full precision
_DIGITS = 6
_MESSAGE_LIMIT = 500
# names that a run gives its drawings; other texts in a record, such as an address, become no link
_OVERLAY_NAME = re.compile(r"overlays/(\d+/)?[A-Za-z0-9._-]+\.jpg")
_SHEET_NAME = re.compile(r"sheets/(\d+/)?[A-Za-z0-9._-]+\.png")


@dataclass(frozen=True)
class Card:
    """One record as the report shows it; texts are not escaped for HTML.

    Attributes:
        predicted: index of the predicted class among the report's labels; None for a failed image.
        label: index of the image's label among the report's labels; None if it is not known.
        value: the cosine of the predicted class, or its logit if `is_cosine` is false.
        top: (index of the label, cosine or logit) of the closest classes.
        fields: (x0, y0, x1, y1, slot) of the effective receptive field of each different cell, in pixels of the
            photograph; empty if it is not known.
        overlay_width: the overlay's width as a multiple of the photograph's.
        drawn: whether the boxes are in the picture, which is an overlay.
    """

    number: int
    name: str
    record: Record
    predicted: int | None = None
    label: int | None = None
    value: float | None = None
    is_cosine: bool = True
    top: tuple[tuple[int, float | None], ...] = ()
    fields: tuple[tuple[int, int, int, int, int], ...] = ()
    overlay: str | None = None
    sheet: str | None = None
    overlay_width: float = 1.0
    drawn: bool = False
    undrawn: str = ""

    @property
    def margin(self) -> float | None:
        """The record's margin, rounded."""
        return None if isinstance(self.record, Failed) else _round(self.record.margin)

    @property
    def is_correct(self) -> bool | None:
        """Whether the predicted class is the image's label; None if one of them is missing."""
        return None if self.label is None or self.predicted is None else self.label == self.predicted

    def index_row(self) -> list[Any]:
        """Return the values by which the page's script filters and sorts, loaded for all images at once."""
        code = _failure(self.record).code if isinstance(self.record, Failed) else ""
        status = STATUSES.index(self.record.status)
        return [self.number, self.name, status, self.predicted, self.label, self.margin, self.value, code]

    def details(self) -> dict[str, Any]:
        """Return the values that the page's script needs only for visible cards."""
        record = self.record
        if isinstance(record, Failed):
            return {"message": _failure(record).message}
        slots = [
            (
                slot.slot, slot.cell, _round(slot.score), _round(slot.contribution),
                [round(side, 1) for side in slot.box],
                None if slot.name is None else escape_unprintable(slot.name),
            )
            for slot in record.evidence
        ]  # fmt: skip
        own = {name: getattr(self, name) for name in ("top", "fields", "overlay", "sheet", "overlay_width", "undrawn")}
        return {
            "rest": record.rest, "bias": record.bias,
            "cosine": self.is_cosine, "size": [record.width, record.height], "drawn": self.drawn, "slots": slots,
            "meaning": MEANINGS.index(build_bars(record)[0]), "flag": describe_status(record),
            "probability": _round(record.prediction.calibrated_probability), **own,
        }  # fmt: skip


def build_card(
    record: Record,
    number: int,
    label_index: Callable[[str], int],
    receptive_field: EffectiveField | None = None,
    *,
    drawn: bool = False,
) -> Card:
    """Return the card of a record of any status.

    Args:
        label_index: returns a label's index among the report's labels, adding it if it is new.
    """
    name = _name(record)
    label = None if record.label is None else label_index(record.label)
    if isinstance(record, Failed):
        return Card(number, name, record, label=label)
    prediction = record.prediction
    is_cosine = prediction.cosine is not None
    overlay, sheet, undrawn = record.overlay, record.sheet, record.drawing_error
    return Card(
        number,
        name,
        record,
        predicted=label_index(prediction.label),
        label=label,
        value=_round(prediction.cosine if is_cosine else prediction.logit),
        is_cosine=is_cosine,
        top=tuple((label_index(a.label), _round(a.cosine if is_cosine else a.logit)) for a in record.top),
        fields=() if receptive_field is None else _place_fields(record.evidence, receptive_field),
        overlay=overlay if overlay is not None and _OVERLAY_NAME.fullmatch(overlay) else None,
        sheet=sheet if sheet is not None and _SHEET_NAME.fullmatch(sheet) else None,
        drawn=drawn,
        undrawn=f"not drawn: {escape_unprintable(_shorten(undrawn.message))}" if undrawn else "",
        overlay_width=round(
            overlay_width(record.width, record.height) / photograph_size(record.width, record.height)[0], 4
        ),
    )


def _place_fields(
    evidence: Sequence[Slot], receptive_field: EffectiveField
) -> tuple[tuple[int, int, int, int, int], ...]:
    by_cell = {slot.cell: slot for slot in reversed(evidence)}
    rectangles = []
    for slot in sorted(by_cell.values(), key=lambda slot: slot.slot):
        x0, y0, x1, y1 = map(round, receptive_field.surround(slot.cell, slot.box))
        rectangles.append((x0, y0, x1, y1, slot.slot))
    return tuple(rectangles)


def _name(record: Record) -> str:
    return escape_unprintable(record.image) if record.image else _NO_NAME


def _shorten(message: str) -> str:
    return message if len(message) <= _MESSAGE_LIMIT else message[:_MESSAGE_LIMIT] + " …"


def _round(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else round(value, _DIGITS)


class ClassRow(NamedTuple):
    """A class and the number of images predicted as it; `share` is in percent of the most frequent class."""

    name: str
    images: int
    share: float


class Failure(NamedTuple):
    """A failed image."""

    name: str
    code: str
    message: str


def _failure(record: Failed) -> Failure:
    error = record.error
    return Failure(_name(record), escape_unprintable(error.code), escape_unprintable(_shorten(error.message)))


class ConfusionCell(NamedTuple):
    """Number of images with a label that were predicted as a class; `share` is in percent of the label's images."""

    label: str
    predicted: str
    images: int
    share: float

    @property
    def agrees(self) -> bool:
        """Whether the predicted class is the label."""
        return self.label == self.predicted


@dataclass(frozen=True)
class Confusion:
    """Labels against predicted classes.

    Attributes:
        labelled: number of answered images whose label the model knows.
        correct: number of these whose predicted class is the label.
        answered, answered_correct: number of labelled images that were not refused (abstained or unknown), and of
            correct ones among them.
        unknown: number of answered images whose label the model does not know.
        never: a line on classes with images that are never predicted; empty if there is none.
        columns: the predicted classes; empty if the matrix would be too large.
        rows: (label, a cell per column); empty if the matrix would be too large.
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
    """Counts over all records, shown or not; memory grows with classes and with `limit`, not with images.

    Attributes:
        limit: largest number of failures listed.
        class_names: the labels that the model knows; None: all.
    """

    limit: int
    class_names: frozenset[str] | None = None
    statuses: Counter[str] = field(default_factory=Counter)
    classes: Counter[tuple[int, str]] = field(default_factory=Counter)
    codes: Counter[str] = field(default_factory=Counter)
    failures: list[Failure] = field(default_factory=list)
    pairs: Counter[tuple[str, str]] = field(default_factory=Counter)
    # of these pairs, the abstained or unknown ones
    refused: Counter[tuple[str, str]] = field(default_factory=Counter)
    labelled: bool = False

    def count(self, record: Record) -> None:
        """Add one record."""
        self.statuses[record.status] += 1
        self.labelled = self.labelled or record.label is not None
        if isinstance(record, Failed):
            self.codes[record.error.code] += 1
            if len(self.failures) < self.limit:
                self.failures.append(_failure(record))
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

    def class_rows(self) -> list[ClassRow]:
        """Return the most frequent classes; equal counts in the order of the classes."""
        ranked = sorted(self.classes.items(), key=lambda item: (-item[1], item[0]))[:CLASSES_LISTED]
        return [ClassRow(escape_unprintable(name), n, round(100 * n / ranked[0][1], 1)) for (_, name), n in ranked]

    def confusion(self) -> Confusion | None:
        """Return labels against classes; None if no answered image has a label."""
        if not self.pairs:
            return None
        known = {pair: n for pair, n in self.pairs.items() if self.class_names is None or pair[0] in self.class_names}
        labelled = sum(known.values())
        per_label: Counter[str] = Counter()
        for (label, _), count in self.pairs.items():
            per_label[label] += count

        def cell(label: str, predicted: str) -> ConfusionCell:
            count = self.pairs[label, predicted]
            share = round(100 * count / per_label[label], 1)
            return ConfusionCell(escape_unprintable(label), escape_unprintable(predicted), count, share)

        predicted_names = {name for _, name in self.classes}
        known_labels = Counter[str]()
        for (label, _), count in sorted(known.items()):
            known_labels[label] += count
        # a class that is never predicted has a column too
        absent = () if self.class_names is None else known_labels
        columns = sorted({*(predicted for _, predicted in self.pairs), *absent})
        if len({*columns, *per_label}) > MATRIX_LIMIT:
            columns = []
        wrong = sorted(((n, pair) for pair, n in self.pairs.items() if pair[0] != pair[1]), key=lambda i: (-i[0], i[1]))
        return Confusion(
            labelled,
            sum(n for (label, predicted), n in known.items() if label == predicted),
            sum(n - self.refused[pair] for pair, n in known.items()),
            sum(n - self.refused[pair] for pair, n in known.items() if pair[0] == pair[1]),
            self.pairs.total() - labelled,
            ""
            if self.class_names is None
            else escape_unprintable(describe_never_predicted(known_labels, predicted_names)),
            tuple(map(escape_unprintable, columns)),
            tuple(
                (escape_unprintable(label), tuple(cell(label, predicted) for predicted in columns))
                for label in sorted(per_label if columns else ())
            ),
            tuple(cell(*pair) for _, pair in wrong[:PAIRS_LISTED]),
            max(0, len(wrong) - PAIRS_LISTED),
        )
