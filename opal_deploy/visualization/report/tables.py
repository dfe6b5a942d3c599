"""The report's tables over all records, shown or not: outcomes, classes, failures, and labels against predictions."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from opal_deploy.datasets.samples import describe_never_predicted
from opal_deploy.records.record import Failed, Record
from opal_deploy.visualization.report.cards import image_name, shorten
from opal_deploy.visualization.style import escape_unprintable

# rows of the tables of classes and of confusions
CLASSES_LISTED = 30
PAIRS_LISTED = 60
# largest number of labels and classes in a confusion matrix
MATRIX_LIMIT = 25
# a percentage of fewer images says little
_MIN_IMAGES_FOR_PERCENT = 20


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
        labelled: number of answered images whose label the model knows.
        correct: number of these whose predicted class is the label.
        answered, answered_correct: number of labelled images that were not refused (abstained or unknown), and of
            correct ones among them.
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
                self.failures.append((image_name(record), escape_unprintable(code), shorten(message)))
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
        if len({*columns, *per_label}) > MATRIX_LIMIT:
            columns = []
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
