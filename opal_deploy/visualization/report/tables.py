"""The report's tables: counts over all records, whether their cards are shown or not."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from opal_deploy.records.record import Record
from opal_deploy.visualization.legend import get_prediction
from opal_deploy.visualization.report.cards import NO_NAME, shorten
from opal_deploy.visualization.text import escape_unprintable

# rows listed in the tables of classes and of confusions
CLASSES_LISTED = 30
PAIRS_LISTED = 60
# the confusion matrix is shown for at most so many labels and classes
MATRIX_LIMIT = 25


@dataclass(frozen=True)
class ClassRow:
    """A class and how many images it was predicted for; `share` is in percent of the most frequent class's count."""

    label: str
    count: int
    share: float


@dataclass(frozen=True)
class Failure:
    """A failed image."""

    name: str
    code: str
    message: str


@dataclass(frozen=True)
class ConfusionCell:
    """How many images of one label were predicted as one class; `share` is in percent of the label's images."""

    truth: str
    predicted: str
    count: int
    share: float

    @property
    def agrees(self) -> bool:
        """Whether the predicted class is the label."""
        return self.truth == self.predicted


@dataclass(frozen=True)
class Confusion:
    """Labels against predicted classes.

    Attributes:
        labelled: the number of answered images that have a label.
        agreeing: the number of these whose predicted class is the label.
        columns: the predicted classes; empty where the matrix would be too large.
        rows: (label, a cell for each column); empty where the matrix would be too large.
        pairs: the most frequent confusions.
        more: the number of other confused pairs.
    """

    labelled: int
    agreeing: int
    columns: tuple[str, ...]
    rows: tuple[tuple[str, tuple[ConfusionCell, ...]], ...]
    pairs: tuple[ConfusionCell, ...]
    more: int


@dataclass
class Tables:
    """Counts over all records; memory grows with classes and with `limit`, not with images.

    Attributes:
        limit: the largest number of failures listed.
        statuses: records by status.
        classes: predictions by (class id, label).
        codes: failures by error code.
        failures: the first failures.
        pairs: answered images by (label, predicted class).
        labelled: whether any image has a label.
    """

    limit: int
    statuses: Counter[str] = field(default_factory=Counter)
    classes: Counter[tuple[int, str]] = field(default_factory=Counter)
    codes: Counter[str] = field(default_factory=Counter)
    failures: list[Failure] = field(default_factory=list)
    pairs: Counter[tuple[str, str]] = field(default_factory=Counter)
    labelled: bool = False

    def count(self, record: Record) -> None:
        """Add one record.

        Raises:
            ValueError: the record has neither a prediction nor an error.
        """
        self.statuses[record["status"]] += 1
        self.labelled = self.labelled or "truth" in record
        if record["status"] == "error":
            error = record.get("error", {"code": "unknown", "message": ""})
            self.codes[error["code"]] += 1
            if len(self.failures) < self.limit:
                name = escape_unprintable(record["image"]) if record["image"] else NO_NAME
                self.failures.append(
                    Failure(name, escape_unprintable(error["code"]), escape_unprintable(shorten(error["message"])))
                )
            return
        prediction = get_prediction(record)
        self.classes[prediction["class_id"], prediction["label"]] += 1
        if "truth" in record:
            self.pairs[record["truth"], prediction["label"]] += 1

    @property
    def answered(self) -> int:
        """The number of records with a prediction."""
        return self.statuses["ok"] + self.statuses["abstained"]

    def class_rows(self) -> list[ClassRow]:
        """Return the most frequent classes."""
        # equal counts in the order of the classes, so that the same run gives the same report
        ranked = sorted(self.classes.items(), key=lambda item: (-item[1], item[0]))[:CLASSES_LISTED]
        return [ClassRow(escape_unprintable(label), n, round(100 * n / ranked[0][1], 1)) for (_, label), n in ranked]

    def confusion(self) -> Confusion | None:
        """Return labels against classes; None where no answered image has a label."""
        if not self.pairs:
            return None
        per_truth: Counter[str] = Counter()
        for (truth, _), count in self.pairs.items():
            per_truth[truth] += count

        def cell(truth: str, predicted: str) -> ConfusionCell:
            count = self.pairs[truth, predicted]
            return ConfusionCell(
                escape_unprintable(truth),
                escape_unprintable(predicted),
                count,
                round(100 * count / per_truth[truth], 1),
            )

        names = sorted({name for pair in self.pairs for name in pair})
        predicted = [name for name in names if any(key[1] == name for key in self.pairs)] if _fits(names) else []
        wrong = sorted(((n, pair) for pair, n in self.pairs.items() if pair[0] != pair[1]), key=lambda i: (-i[0], i[1]))
        return Confusion(
            self.pairs.total(),
            sum(n for (truth, label), n in self.pairs.items() if truth == label),
            tuple(escape_unprintable(name) for name in predicted),
            tuple(
                (escape_unprintable(truth), tuple(cell(truth, label) for label in predicted))
                for truth in sorted(per_truth)
            )
            if predicted
            else (),
            tuple(cell(*pair) for _, pair in wrong[:PAIRS_LISTED]),
            max(0, len(wrong) - PAIRS_LISTED),
        )


def _fits(names: list[str]) -> bool:
    return len(names) <= MATRIX_LIMIT
