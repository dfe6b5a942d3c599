"""The report's tables: what is counted of every record, whether its card is shown or not."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from opal_deploy.records.record import Record
from opal_deploy.visualization.legend import get_prediction
from opal_deploy.visualization.report.cards import NO_NAME, shorten
from opal_deploy.visualization.text import escape_unprintable

CLASSES_LISTED = 30
MATRIX_LIMIT = 25
PAIRS_LISTED = 60


@dataclass(frozen=True)
class ClassRow:
    """A class, how many images it was predicted for, and that as a share (0-100) of the most frequent class's."""

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
class Cell:
    """Images of one label for which one class was predicted; `share` (0-100) of the label's images."""

    truth: str
    predicted: str
    count: int
    share: float

    @property
    def agrees(self) -> bool:
        """Whether the class is the label."""
        return self.truth == self.predicted


@dataclass(frozen=True)
class Confusion:
    """Labels against predicted classes.

    Attributes:
        labelled, agreeing: answers whose image has a label; those whose class is that label.
        columns: predicted classes; rows: (label, a cell for each column). Empty where the matrix would be too large.
        pairs: the most frequent confusions; more: how many others there are.
    """

    labelled: int
    agreeing: int
    columns: tuple[str, ...]
    rows: tuple[tuple[str, tuple[Cell, ...]], ...]
    pairs: tuple[Cell, ...]
    more: int


@dataclass
class Tables:
    """Counts of all records; memory grows with classes and with `limit` failures, not with images.

    Attributes:
        limit: so many failures are listed. labelled: whether any image has a label.
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
            ValueError: it says that it was answered, and has no prediction.
        """
        self.statuses[record["status"]] += 1
        self.labelled = self.labelled or "truth" in record
        if record["status"] == "error":
            problem = record.get("error", {"code": "unknown", "message": ""})
            self.codes[problem["code"]] += 1
            if len(self.failures) < self.limit:
                name = escape_unprintable(record["image"]) if record["image"] else NO_NAME
                self.failures.append(
                    Failure(name, escape_unprintable(problem["code"]), escape_unprintable(shorten(problem["message"])))
                )
            return
        answer = get_prediction(record)
        self.classes[answer["class_id"], answer["label"]] += 1
        if "truth" in record:
            self.pairs[record["truth"], answer["label"]] += 1

    @property
    def answered(self) -> int:
        """Records with a prediction."""
        return self.statuses["ok"] + self.statuses["abstained"]

    def class_rows(self) -> list[ClassRow]:
        """The most frequent classes."""
        # equal counts in the order of the classes, so that the same run gives the same report
        ranked = sorted(self.classes.items(), key=lambda item: (-item[1], item[0]))[:CLASSES_LISTED]
        return [ClassRow(escape_unprintable(label), n, round(100 * n / ranked[0][1], 1)) for (_, label), n in ranked]

    def confusion(self) -> Confusion | None:
        """Labels against classes; None where no answered image has a label."""
        if not self.pairs:
            return None
        per_truth: Counter[str] = Counter()
        for (truth, _), count in self.pairs.items():
            per_truth[truth] += count

        def cell(truth: str, predicted: str) -> Cell:
            count = self.pairs[truth, predicted]
            return Cell(
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
