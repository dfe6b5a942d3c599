"""Computes recorded explanations again: is each what this model makes of this file?"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from opal_deploy.auditing.record_diff import Difference, Tied, Tolerance, diff_records
from opal_deploy.auditing.results_reader import numbered_records
from opal_deploy.errors import ImageError
from opal_deploy.inference.decoding.prepare import Request
from opal_deploy.inference.executor import InferenceOptions, Result, predict_stream
from opal_deploy.inference.run.image_files import overlay_name
from opal_deploy.inference.sources.annotations import Boxes, Labels
from opal_deploy.inference.sources.items import Item
from opal_deploy.preprocess.geometry import Box
from opal_deploy.records.names import unescape_name
from opal_deploy.records.record import Record
from opal_deploy.runtime.session import Session

# what depends on how busy the machine was, or which could not be found out again
_NOT_REPEATABLE = ("decode_timeout", "decoder_crashed")
# kept in a report; all are counted
_KEPT = 100


@dataclass(frozen=True)
class Finding:
    """A record that is not what was computed. `line`: of the file, from 1."""

    line: int
    image: str | None
    differences: tuple[Difference, ...]
    why: str = ""

    def __str__(self) -> str:
        """One line for a person."""
        what = self.why or str(self.differences[0])
        more = f" (and {len(self.differences) - 1} more fields)" if len(self.differences) > 1 else ""
        return f"line {self.line}, {self.image}: {what}{more}"

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "line": self.line,
            "image": self.image,
            "why": self.why or None,
            "differences": [
                {"field": d.field, "recorded": _plain(d.recorded), "computed": _plain(d.computed)}
                for d in self.differences
            ],
        }


@dataclass
class Report:
    """What came of it.

    Attributes:
        records: in the file. checked: of them, computed again. identical: of these, equal to the last bit.
        different: records that are not what was computed, and lines that are none. findings: the first of them.
        not_repeatable: records of crashed or overdue decoders, which were answered now; they are no difference.
        truths_unchecked: records with a `truth`, where nobody said what it should be.
    """

    records: int = 0
    checked: int = 0
    identical: int = 0
    different: int = 0
    not_repeatable: int = 0
    truths_unchecked: int = 0
    findings: list[Finding] = field(default_factory=list)

    def add(self, finding: Finding) -> None:
        """Count one; the first are kept."""
        self.different += 1
        if len(self.findings) < _KEPT:
            self.findings.append(finding)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "records": self.records,
            "checked": self.checked,
            "identical": self.identical,
            "different": self.different,
            "not_repeatable": self.not_repeatable,
            "truths_unchecked": self.truths_unchecked,
            "findings": [finding.to_dict() for finding in self.findings],
        }


@dataclass(frozen=True)
class Check:
    """How records are checked.

    Attributes:
        model_sha256: of the model's file.
        top: classes that a record should list; None: what each lists.
        root: what images' names are relative to.
        items: images by their records' names, for those that are no files of their own; others are looked for under
            `root`.
        boxes, labels: as the run had them.
        engine: how the run prepared pictures, with its `min_margin`.
    """

    model_sha256: str
    top: int | None = None
    root: Path = Path()
    items: Mapping[str, Item] = field(default_factory=dict)
    boxes: Boxes | None = None
    labels: Labels | None = None
    engine: InferenceOptions = field(default_factory=InferenceOptions)


def sample_lines(path: Path, count: int | None, seed: int) -> tuple[int, frozenset[int] | None]:
    """How many lines a file has, and which to check: None for all, else `count` of them, chosen by `seed`."""
    total = sum(1 for _ in numbered_records(path))
    if count is None or count >= total:
        return total, None
    return total, frozenset(random.Random(seed).sample(range(1, total + 1), count))


def verify_records(
    path: Path,
    session: Session,
    check: Check,
    chosen: frozenset[int] | None = None,
    progress: Callable[[int], None] = lambda done: None,
) -> Report:
    """Compute records again and compare them; in the file's order, in bounded memory.

    Raises:
        UsageError: the file cannot be read. StoppedEarly: the device was lost.
    """
    report = Report()
    tolerance = Tolerance.of(session.metadata)
    # every class is listed, so that any that a record names can be compared
    options = replace(check.engine, top=session.metadata.num_classes, model_sha256=check.model_sha256)
    waiting: list[tuple[int, Record]] = []

    def requests() -> Iterator[Request]:
        for number, record in _chosen(path, chosen, report):
            waiting.append((number, record))
            yield _request(record, check)

    for result in predict_stream(requests(), [session], options):
        number, record = waiting.pop(0)
        report.checked += 1
        _compare(number, record, result, session, check, tolerance, report)
        progress(report.checked)
    return report


def _chosen(path: Path, chosen: frozenset[int] | None, report: Report) -> Iterator[tuple[int, Record]]:
    """The records to check; lines that are none are found whether they were chosen or not."""
    for number, record in numbered_records(path):
        report.records += 1
        if record is None:
            report.add(Finding(number, None, (), "it is not a whole record"))
        elif chosen is None or number in chosen:
            yield number, record


def _request(record: Record, check: Check) -> Request:
    name = record["image"]
    if not isinstance(name, str):
        return Request(None, b"", ImageError("not_found", "the record names no image"))
    item = check.items.get(name)
    if item is None:
        item = Item(Path(unescape_name(name)), Path(unescape_name(name)).name)
        source: Any = check.root / item.path
    else:
        source = item.source
    box: Box | ImageError | None = item.problem
    if box is None and check.boxes is not None:
        try:
            box = check.boxes.find(item)
        except ImageError as error:
            box = error
    return Request(name, source, box)


def _compare(
    number: int, recorded: Record, result: Result, session: Session, check: Check, tolerance: Tolerance, report: Report
) -> None:
    computed = result.record
    name = recorded["image"] if isinstance(recorded["image"], str) else None

    def found(why: str, *which: Difference) -> None:
        report.add(Finding(number, name, which, why))

    if recorded.get("model_sha256") != check.model_sha256:
        digest = Difference("model_sha256", recorded.get("model_sha256"), check.model_sha256)
        found("it was made by another model, or does not say by which", digest)
        return
    if recorded["status"] == "error" and recorded["error"].get("code") in _NOT_REPEATABLE:
        same_code = "error" in computed and computed["error"]["code"] == recorded["error"]["code"]
        report.not_repeatable += not same_code
        return
    if recorded.get("file_sha256") != computed.get("file_sha256"):
        digest = Difference("file_sha256", recorded.get("file_sha256"), computed.get("file_sha256"))
        gone = "error" in computed and computed["error"]["code"] == "not_found"
        found("the image is not there" if gone else "the image is another one than was explained", digest)
        return
    which = diff_records(recorded, computed, tolerance, _ties(result, session, tolerance))
    which += _of_what_was_given(number, recorded, check, report)
    if which:
        found("", *which)
    elif _identical(recorded, computed):
        report.identical += 1


def _of_what_was_given(number: int, recorded: Record, check: Check, report: Report) -> list[Difference]:
    """Differences in the fields that no model computes."""
    found = []
    overlay, name = recorded.get("overlay"), recorded["image"]
    if overlay is not None and overlay != overlay_name(number - 1, name):
        found.append(Difference("overlay", overlay, overlay_name(number - 1, name)))
    truth = recorded.get("truth")
    if check.labels is not None and name is not None:
        expected = check.labels.find(Path(unescape_name(name)).as_posix())
        if truth != expected:
            found.append(Difference("truth", truth, expected))
    else:
        report.truths_unchecked += truth is not None
    top = recorded.get("top")
    if check.top is not None and isinstance(top, list) and len(top) != check.top:
        found.append(Difference("top", f"{len(top)} classes", f"{check.top} classes"))
    return found


def _identical(recorded: Record, computed: Record) -> bool:
    top = recorded.get("top", [])
    same: dict[str, Any] = {**computed, "top": computed["top"][: len(top)]} if "top" in computed else {**computed}
    slots = [{k: v for k, v in slot.items() if k != "name"} for slot in recorded.get("evidence", [])]
    said = {**recorded, "evidence": slots} if "evidence" in recorded else {**recorded}
    return all(said.get(key) == value for key, value in same.items())


def _ties(result: Result, session: Session, tolerance: Tolerance) -> Tied:
    """Tells ties from attention maps, which are asked for only where a cell differs."""
    maps: list[np.ndarray[Any, Any]] = []

    def tied(channel: int, cell: Sequence[int]) -> bool:
        pixels = result.prepared.pixels
        if "attention" not in session.metadata.outputs or pixels is None:
            return False
        if not maps:
            attention = session.run(pixels[None]).attention
            if attention is None:
                return False
            maps.append(attention[0])
        one = maps[0][channel]
        row, col = cell
        inside = row < one.shape[0] and col < one.shape[1]
        return inside and float(one[row, col]) >= (1 - tolerance.tie) * float(one.max())

    return tied


def wanted_items(found: Iterable[Item], names: frozenset[str] | None) -> dict[str, Item]:
    """Images by their records' names, those of `names` only."""
    return {item.name: item for item in found if names is None or item.name in names}


def _plain(value: Any) -> Any:
    return value if isinstance(value, str | int | float | bool | list | dict) or value is None else repr(value)
