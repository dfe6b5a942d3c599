"""The summary of a run: counts over all its records, including those from before it was resumed."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Self

from opal_deploy.errors import StoppedEarly
from opal_deploy.logs import one_line
from opal_deploy.records.names import share_folder
from opal_deploy.records.record import Failed, Record
from opal_deploy.records.signatures import SignatureDigest
from opal_deploy.timing import StageTimer, StageTimes

# names kept as examples
_MAX_EXAMPLES = 3


def _share(count: int, total: int) -> str:
    return f"{count:,} of {total:,} ({count / total:.2%})" if total else "none"


@dataclass
class Accuracy:
    """The accuracy of predictions against the images' labels.

    Attributes:
        class_names: the model's.
        counts: number of images by what became of them, in the words of summary.json. `correct` and `wrong` count
            predictions that were refused (abstained or unknown), too; `answered` and `answered_correct` do not.
        unused_rows: images that the file of labels names and the run lacks, without other shards' images.
    """

    class_names: frozenset[str]
    counts: Counter[str] = field(default_factory=Counter)
    unused_rows: list[str] = field(default_factory=list)

    def count(self, record: Record) -> None:
        """Add one record."""
        if record.label is None:
            self.counts["without_label"] += 1
        elif record.label not in self.class_names:
            self.counts["label_is_no_class"] += 1
        elif isinstance(record, Failed):
            self.counts["failed"] += 1
        else:
            is_correct, is_answered = record.prediction.label == record.label, record.status == "ok"
            self.counts["correct" if is_correct else "wrong"] += 1
            self.counts["answered"] += is_answered
            self.counts["answered_correct"] += is_correct and is_answered

    def describe(self) -> Iterator[str]:
        """Yield lines for a terminal."""
        counts, judged = self.counts, self.counts["correct"] + self.counts["wrong"]
        yield f"Accuracy: {_share(counts['correct'], judged)}"
        if counts["answered"] < judged:
            yield f"  without abstained and unknown: {_share(counts['answered_correct'], counts['answered'])}"
        reasons = {"failed": "failed", "without_label": "have no label", "label_is_no_class": "have no class's label"}
        if left_out := [f"{counts[key]} {reason}" for key, reason in reasons.items() if counts[key]]:
            yield f"  images that are not counted: {', '.join(left_out)}"
        if self.unused_rows:
            rows = f"{len(self.unused_rows)} ({', '.join(self.unused_rows[:_MAX_EXAMPLES])})"
            yield one_line(f"  rows of the labels that match no image: {rows}")

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON value for summary.json."""
        keys = ("correct", "wrong", "answered", "answered_correct", "failed", "label_is_no_class", "without_label")
        judged = self.counts["correct"] + self.counts["wrong"]
        accuracy = {"accuracy": self.counts["correct"] / judged if judged else None}
        return accuracy | {key: self.counts[key] for key in keys} | {"rows_without_image": len(self.unused_rows)}


@dataclass
class Summary:
    """Counts over a run's records, and its times.

    Attributes:
        statuses, errors, drawing_errors: number of records by status, by error code, and by code of a missing drawing.
        error_examples: names of the first few images with an error, by code; not in summary.json, which is shared.
        nearly_black: number of new images that use a sixteenth of their range at most.
        classes: number of predictions by (class id, label).
        accuracy: None without labels.
        folder: common folder of the images, see `share_folder`; not in summary.json, which is shared.
        resumed: records from before the run was resumed; all other counts include them.
        seconds: from the first image to the last record, since the run began or was resumed.
        times: seconds by stage; empty until the end.
        shards: how many there were; None: one process did all.
        signatures: SHA-256 over the records' signatures, in order; not in summary.json but in run.json; None: no record
            is signed.
    """

    statuses: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    error_examples: dict[str, list[str]] = field(default_factory=dict)
    drawing_errors: Counter[str] = field(default_factory=Counter)
    nearly_black: int = 0
    classes: Counter[tuple[int, str]] = field(default_factory=Counter)
    accuracy: Accuracy | None = None
    folder: str | None = None
    resumed: int = 0
    seconds: float = 0.0
    times: StageTimes = field(default_factory=StageTimes)
    shards: int | None = None
    signatures: SignatureDigest | None = None

    @property
    def total(self) -> int:
        """Number of records."""
        return self.statuses.total()

    @property
    def images_per_second(self) -> float | None:
        """Records per second since the run began or was resumed."""
        return (self.total - self.resumed) / self.seconds if self.seconds else None

    def count(self, record: Record) -> None:
        """Add one record."""
        self.statuses[record.status] += 1
        if record.signature is not None:
            self.signatures = self.signatures or SignatureDigest()
            self.signatures.add(record.signature)
        self.folder = share_folder(self.folder, record.image or "")
        if isinstance(record, Failed):
            code = record.error.code
            self.errors[code] += 1
            examples = self.error_examples.setdefault(code, [])
            if len(examples) < _MAX_EXAMPLES and record.image is not None:
                examples.append(record.image)
        else:
            self.classes[record.prediction.class_id, record.prediction.label] += 1
            if record.drawing_error is not None:
                self.drawing_errors[record.drawing_error.code] += 1
        if self.accuracy is not None:
            self.accuracy.count(record)

    def check_errors(self, limit: int | None) -> None:
        """Raise StoppedEarly if more images failed than `limit`; None: no limit."""
        failed = self.statuses["error"]
        if limit is not None and failed > limit:
            code, count = self.errors.most_common(1)[0]
            raise StoppedEarly(
                f"{failed} of {self.total} images failed, more than --max-errors {limit}; most often {code} ({count}); "
                "look at these images, or raise the limit"
            )

    def end(self, timer: StageTimer, started: float) -> Self:
        """Note the times of a run that ended, and began at `started` of `time.perf_counter`; return the summary."""
        self.seconds, self.times = time.perf_counter() - started, timer.read()
        return self

    def describe(self) -> Iterator[str]:
        """Yield lines for a terminal: counts, errors with examples, accuracy."""
        rate = f", {self.images_per_second:.1f} images/s" if self.images_per_second else ""
        counts = ", ".join(f"{count} {status}" for status, count in sorted(self.statuses.items()))
        before = f" ({self.resumed} of them before)" if self.resumed else ""
        yield f"{self.total} images{before} in {self.seconds:.1f} s{rate}: {counts or 'nothing to do'}"
        for code, count in self.errors.most_common():
            yield one_line(f"  {code}: {count} ({', '.join(self.error_examples[code])})")
        for code, count in self.drawing_errors.most_common():
            yield f"  predicted, but not drawn: {code}: {count}"
        if self.nearly_black:
            yield (
                f"  nearly black: {self.nearly_black}, with no value above a sixteenth of the range; "
                "scale 12-bit data in 16-bit files first, for training too"
            )
        if self.accuracy is not None:
            yield from self.accuracy.describe()

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON value for summary.json; classes with the most predictions first."""
        ranked = sorted(self.classes.items(), key=lambda entry: (-entry[1], entry[0]))
        return {
            "images": self.total,
            "statuses": dict(sorted(self.statuses.items())),
            "errors": dict(self.errors.most_common()),
            "drawing_errors": dict(self.drawing_errors.most_common()),
            "nearly_black": self.nearly_black,
            "classes": [{"class_id": number, "label": label, "images": n} for (number, label), n in ranked],
            "accuracy": None if self.accuracy is None else self.accuracy.to_dict(),
            "new_images": self.total - self.resumed,
            "seconds": self.seconds,
            "images_per_second": self.images_per_second,
            "time": self.times.to_dict(),
            **({"shards": self.shards} if self.shards is not None else {}),
        }
