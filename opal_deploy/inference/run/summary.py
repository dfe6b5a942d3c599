"""What a run comes to: counts over all its records, also over those of the times before it was resumed."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from opal_deploy.errors import StoppedEarly, UsageError
from opal_deploy.inference.timing import StageTimes
from opal_deploy.records.record import Record

# a share of fewer images says little
_SHARE_FROM = 100


@dataclass
class Accuracy:
    """How often answers agree with the labels that images were given with.

    Attributes:
        class_names: the model's; a label that is none of them cannot be right or wrong.
        correct, wrong: answers, those that were marked as abstained among them.
        failed: images with a label of the model's and no answer.
        unknown: images whose label is no class of the model's. unlabelled: images without a label.
        unknown_examples: the first few such labels.
    """

    class_names: frozenset[str]
    correct: int = 0
    wrong: int = 0
    failed: int = 0
    unknown: int = 0
    unlabelled: int = 0
    unknown_examples: list[str] = field(default_factory=list)

    @property
    def value(self) -> float | None:
        """Correct answers over answers to images with a label of the model's, 0 ... 1."""
        judged = self.correct + self.wrong
        return self.correct / judged if judged else None

    def count(self, record: Record) -> None:
        """Add one record."""
        truth = record.get("truth")
        if truth is None:
            self.unlabelled += 1
        elif truth not in self.class_names:
            self.unknown += 1
            if len(self.unknown_examples) < 3 and truth not in self.unknown_examples:
                self.unknown_examples.append(truth)
        elif "prediction" not in record:
            self.failed += 1
        elif record["prediction"]["label"] == truth:
            self.correct += 1
        else:
            self.wrong += 1

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "accuracy": self.value,
            "correct": self.correct,
            "wrong": self.wrong,
            "failed": self.failed,
            "label_is_no_class": self.unknown,
            "without_label": self.unlabelled,
        }


@dataclass
class Summary:
    """What happened.

    Attributes:
        statuses: records by status. errors: error records by code. classes: answers by class id and label.
        accuracy: where images have labels.
        kept: records that were there already when this run was resumed; all other counts include them.
        seconds: from the first image to the last record, of this time. to_first: until its first record was written.
        times: where the time went; empty until the end.
    """

    statuses: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    classes: Counter[tuple[int, str]] = field(default_factory=Counter)
    accuracy: Accuracy | None = None
    kept: int = 0
    seconds: float = 0.0
    to_first: float | None = None
    times: StageTimes = field(default_factory=StageTimes)

    @property
    def total(self) -> int:
        """Records in all."""
        return self.statuses.total()

    @property
    def new(self) -> int:
        """Records written this time."""
        return self.total - self.kept

    @property
    def rate(self) -> float | None:
        """Records a second, of this time."""
        return self.new / self.seconds if self.seconds else None

    def count(self, record: Record) -> None:
        """Add one record."""
        self.statuses[record["status"]] += 1
        if record["status"] == "error":
            self.errors[record["error"]["code"]] += 1
        else:
            answer = record["prediction"]
            self.classes[answer["class_id"], answer["label"]] += 1
        if self.accuracy is not None:
            self.accuracy.count(record)

    def to_dict(self) -> dict[str, Any]:
        """For JSON; classes by their number of answers, the most first."""
        ranked = sorted(self.classes.items(), key=lambda entry: (-entry[1], entry[0]))
        return {
            "images": self.total,
            "statuses": dict(sorted(self.statuses.items())),
            "errors": dict(self.errors.most_common()),
            "classes": [{"class_id": number, "label": label, "images": n} for (number, label), n in ranked],
            "accuracy": None if self.accuracy is None else self.accuracy.to_dict(),
            "new_images": self.new,
            "seconds": self.seconds,
            "seconds_to_first_record": self.to_first,
            "images_per_second": self.rate,
            "time": self.times.to_dict(),
        }


@dataclass(frozen=True)
class ErrorLimit:
    """When so many images failed that a run is not worth going on with.

    Attributes:
        number: of images, or percent of all.
        percent: which of the two; judged from a hundred images on.
    """

    number: float
    percent: bool = False

    @staticmethod
    def parse(text: str) -> ErrorLimit:
        """`20`, or `2.5%`.

        Raises:
            UsageError: something else.
        """
        percent = text.endswith("%")
        try:
            number = float(text[:-1]) if percent else int(text)
        except ValueError:
            number = -1.0
        if not 0 <= number <= (100 if percent else float("inf")):
            raise UsageError(f"--max-errors {text!r}: expected a number of images, or a share such as 5%")
        return ErrorLimit(number, percent)

    def check(self, summary: Summary) -> None:
        """Raise StoppedEarly once there are more."""
        failed, total = summary.statuses["error"], summary.total
        most = self.number * total / 100 if self.percent else self.number
        over = failed > most and (total >= _SHARE_FROM or not self.percent)
        if not over:
            return
        code, count = summary.errors.most_common(1)[0]
        raise StoppedEarly(
            f"{failed} of {total} images failed, more than --max-errors {self}; most often {code} ({count}); "
            "look at these images, or raise the limit"
        )

    def __str__(self) -> str:
        return f"{self.number:g}%" if self.percent else f"{self.number:g}"
