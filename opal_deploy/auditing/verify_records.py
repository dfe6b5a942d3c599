"""Recorded explanations, computed again from the model and the images."""

from __future__ import annotations

import functools
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from opal_deploy.auditing.images import RecordSources, locate
from opal_deploy.auditing.record_diff import FieldDifference, IsTied, Tolerance, diff_records
from opal_deploy.auditing.results import Results
from opal_deploy.auditing.run_records import RunRecords
from opal_deploy.errors import ImageError
from opal_deploy.predict.executor import predict_stream
from opal_deploy.predict.types import InferenceOptions, Result
from opal_deploy.records.lines import to_document
from opal_deploy.records.names import unescape_name
from opal_deploy.records.record import Answered, Failed, Record
from opal_deploy.records.run_files import overlay_name
from opal_deploy.records.signatures import PublicKeys
from opal_deploy.remote import is_url
from opal_deploy.runtime.session import Session
from opal_deploy.sources.annotations import Crops, Labels, annotate
from opal_deploy.sources.image import InputImage, is_video_name
from opal_deploy.sources.video import VIDEO_CODES, undivided_error

# errors that depend on the load of the machine, or occur only in a cluster
_NOT_REPEATABLE = ("decode_timeout", "decoder_crashed", "worker_died", "storage_unavailable", *VIDEO_CODES)
# depends on installed packages: HEIC needs its own
_UNSUPPORTED = "unsupported_image"
# findings kept; all are counted
_MAX_FINDINGS = 100


@dataclass(frozen=True)
class Finding:
    """A record that differs from what was computed, or has no valid signature, by its line in the file, from 1.

    `image` is None for a line that is not a record; `why` is the reason if fields were not compared; `signature` says
    what is wrong with the signature; `checked` is False if the image could not be read.
    """

    line: int
    image: str | None
    differences: Sequence[FieldDifference] = ()
    why: str = ""
    signature: str = ""
    checked: bool = True

    def __str__(self) -> str:
        """Return the finding in one line."""
        why = self.why or "".join(map(str, self.differences[:1]))
        more = f" (and {len(self.differences) - 1} more fields)" if len(self.differences) > 1 else ""
        return f"line {self.line}, {self.image}: {'; '.join(filter(None, (self.signature, why)))}{more}"

    def to_dict(self) -> dict[str, Any]:
        """Return the finding for JSON."""
        differences = [vars(difference) for difference in self.differences]
        return {**vars(self), "why": self.why or None, "signature": self.signature or None, "differences": differences}


@dataclass
class RecordsReport:
    """The outcome of `verify_records`, in numbers of records.

    Attributes:
        records: all lines of the file.
        checked, identical: computed again, and equal to the last bit.
        different: records that differ, and lines that are not records.
        not_checked: records whose image cannot be read, so that nothing is known of them.
        signatures_valid, signatures_bad: of all records, if public keys were given.
        signatures_unchecked: signed records, if no public key was given.
        not_repeatable: errors of crashed, slow or missing decoders that did not occur again, which is no difference.
        labels_unchecked: records whose `label` was not checked, as no labels were given.
        run_faults, run_notes: see `RunRecords.check`.
        findings: the first differences.
    """

    records: int = 0
    checked: int = 0
    identical: int = 0
    different: int = 0
    not_checked: int = 0
    signatures_valid: int = 0
    signatures_bad: int = 0
    signatures_unchecked: int = 0
    not_repeatable: int = 0
    labels_unchecked: int = 0
    run_faults: list[str] = field(default_factory=list)
    run_notes: list[str] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)

    def add(self, finding: Finding) -> None:
        """Count a finding, and keep it if it is one of the first."""
        if finding.checked:
            self.different += bool(finding.why or finding.differences)
        else:
            self.not_checked += 1
        if len(self.findings) < _MAX_FINDINGS:
            self.findings.append(finding)

    def to_dict(self) -> dict[str, Any]:
        """Return the report for JSON."""
        return {**vars(self), "findings": [finding.to_dict() for finding in self.findings]}


@dataclass(frozen=True)
class CheckOptions:
    """The run whose records are checked: its model file, crops and true labels, and how it prepared images.

    Attributes:
        top: number of classes that a record should list; None: not checked.
        root: the folder that image names are relative to.
        sources: the given images; others are looked up below `root`.
        public_keys: keys whose signatures are accepted; None: signatures are not checked.
    """

    model_sha256: str
    top: int | None = None
    root: Path = Path()
    sources: RecordSources = field(default_factory=RecordSources)
    boxes: Crops | None = None
    labels: Labels | None = None
    public_keys: PublicKeys | None = None
    inference: InferenceOptions = field(default_factory=InferenceOptions)


def sample_lines(path: Path, count: int | None, seed: int) -> tuple[int, frozenset[int] | None]:
    """Return the number of lines, and the `count` line numbers to check, chosen by `seed`; None: all."""
    total = sum(1 for _ in Results(path).lines())
    if count is None or count >= total:
        return total, None
    return total, frozenset(random.Random(seed).sample(range(1, total + 1), count))


def verify_records(
    path: Path,
    session: Session,
    check: CheckOptions,
    lines: frozenset[int] | None = None,
    progress: Callable[[int], None] = lambda done: None,
) -> RecordsReport:
    """Compute the records of some lines (None: all) again and compare them, in order.

    The signatures of all records are checked, and all records with run.json; see `RunRecords` for the memory.

    `progress` is called with the number of records checked.

    Raises:
        UsageError: the file cannot be read.
        StoppedEarly: the device was lost.
    """
    inference, report, run = check.inference, RecordsReport(), RunRecords(path)
    # all classes that the model lists, so that any class in a record can be compared
    options = replace(inference, top=session.metadata.max_top, model_sha256=check.model_sha256, keep_pixels=True)
    pending: deque[_Recorded] = deque()

    def requests() -> Iterator[InputImage]:
        for recorded in _select_records(run, lines, check.public_keys, report):
            pending.append(recorded)
            yield _build_request(recorded.record, check)

    for result in predict_stream(requests(), [session], options):
        recorded = pending.popleft()
        report.checked += 1
        finding = _compare(recorded, result, session, check, report)
        if finding.signature or finding.why or finding.differences:
            report.add(finding)
        progress(report.checked)
    return _finish(report, run, check.public_keys)


def verify_signatures(path: Path, public_keys: PublicKeys) -> RecordsReport:
    """Check the signatures of all records, and the records with run.json, without the model and the images.

    Raises:
        UsageError: the file cannot be read.
    """
    report, run = RecordsReport(), RunRecords(path)
    for _ in _select_records(run, frozenset(), public_keys, report):
        pass
    return _finish(report, run, public_keys)


def _finish(report: RecordsReport, run: RunRecords, public_keys: PublicKeys | None) -> RecordsReport:
    report.run_faults, report.run_notes = run.check(public_keys)
    report.findings.sort(key=lambda finding: finding.line)
    return report


class _Recorded(NamedTuple):
    """A record in a file, also as a document, with its line, from 1, and the fault of its signature."""

    number: int
    document: dict[str, Any]
    record: Record
    fault: str


def _select_records(
    run: RunRecords, lines: frozenset[int] | None, public_keys: PublicKeys | None, report: RecordsReport
) -> Iterator[_Recorded]:
    """Yield the records to compute again; add all to `run`, and report lines that are not records."""
    for number, (_, document, record) in enumerate(Results(run.path).lines(), 1):
        report.records += 1
        run.add(record)
        if record is None:
            report.add(Finding(number, None, why="not a complete record"))
            continue
        fault = ""
        if public_keys is None:
            report.signatures_unchecked += record.signature is not None
        else:
            fault = public_keys.find_fault(document)
            report.signatures_bad += bool(fault)
            report.signatures_valid += not fault
        if lines is None or number in lines:
            yield _Recorded(number, document, record, fault)
        elif fault:
            report.add(Finding(number, record.image, signature=fault))


def _build_request(record: Record, check: CheckOptions) -> InputImage:
    name, item = record.image, check.sources.find(record)
    if name is None and item is None:
        return InputImage(None, b"", error=ImageError("not_found", "the record has no image name"))
    source: Any = None if item is None else item.source
    if item is None:
        plain = unescape_name(name or "")
        try:
            path = locate(plain, Path())
        except ImageError as error:
            return InputImage(name, b"", error=error)
        item = InputImage.at(path)
        source = check.root / path if isinstance(path, Path) else path
        if isinstance(source, Path) and is_video_name(source.name):
            # frames of videos are not computed again
            item = replace(item, error=undivided_error())
    crops = annotate([item], check.boxes)
    missing = replace(item, error=ImageError("no_box", "the file of boxes has no such detection"))
    request = next((crop for crop in crops if crop.detection == record.detection), missing)
    return replace(request, name=name, source=source, index=None)


def _compare(line: _Recorded, result: Result, session: Session, check: CheckOptions, report: RecordsReport) -> Finding:
    """Return the comparison of a record, which may have found nothing; count the record in the report."""
    recorded, computed = line.record, result.record
    code = computed.error.code if isinstance(computed, Failed) else ""
    finding = Finding(line.number, recorded.image, signature=line.fault)
    was_read = recorded.image_sha256 is not None or isinstance(recorded, Answered)
    if was_read and code and (computed.image_sha256 is None or (code == "not_found" and recorded.image is None)):
        why = "image not found" if code == "not_found" else f"the image cannot be read now ({code})"
        if code == "not_found" and recorded.image is None:
            why = "the record names no image: list the image after the results"
        return replace(finding, why=why, checked=False)
    if recorded.model_sha256 != check.model_sha256:
        digest = FieldDifference("model_sha256", recorded.model_sha256, check.model_sha256)
        return replace(finding, why="made by another model, or without a model digest", differences=(digest,))
    recorded_code = recorded.error.code if isinstance(recorded, Failed) else ""
    if recorded_code in _NOT_REPEATABLE or (recorded_code == _UNSUPPORTED and not code):
        report.not_repeatable += recorded_code != code
        return finding
    if recorded.image_sha256 != computed.image_sha256:
        digest = FieldDifference("image_sha256", recorded.image_sha256, computed.image_sha256)
        return replace(finding, why="the image differs from the one that was explained", differences=(digest,))
    written, document, tolerance = line.document, to_document(computed), Tolerance.for_model(session.metadata)
    differences = diff_records(written, document, tolerance, _build_tie_test(result, session, tolerance))
    differences += _compare_not_computed(line.number, recorded, check, report)
    report.identical += not differences and _is_identical(written, document)
    return replace(finding, differences=differences)


def _compare_not_computed(
    number: int, recorded: Record, check: CheckOptions, report: RecordsReport
) -> list[FieldDifference]:
    """Return differences in the fields that no model computes."""
    differences = []
    overlay, name = recorded.overlay if isinstance(recorded, Answered) else None, recorded.image
    if overlay not in (None, overlay_name(number - 1, name)):
        differences.append(FieldDifference("overlay", overlay, overlay_name(number - 1, name)))
    if check.labels is None or name is None:
        report.labels_unchecked += recorded.label is not None
    else:
        plain = unescape_name(name)
        label = check.labels.find(plain if is_url(plain) else Path(plain).as_posix())
        if recorded.label != label:
            differences.append(FieldDifference("label", recorded.label, label))
    if check.top is not None and isinstance(recorded, Answered) and len(recorded.top) != check.top:
        differences.append(FieldDifference("top", f"{len(recorded.top)} classes", f"{check.top} classes"))
    return differences


def _is_identical(recorded: dict[str, Any], computed: dict[str, Any]) -> bool:
    """Return whether a document has every computed value; it may list fewer classes, and name its slots."""
    expected, unnamed = {**computed}, {**recorded}
    if "top" in computed:
        expected["top"] = computed["top"][: len(recorded.get("top", []))]
    if "evidence" in recorded:
        unnamed["evidence"] = [{k: v for k, v in slot.items() if k != "name"} for slot in recorded["evidence"]]
    return all(unnamed.get(key) == value for key, value in expected.items())


def _build_tie_test(result: Result, session: Session, tolerance: Tolerance) -> IsTied:
    """Return a function that finds ties in the attention maps, which are computed only where a cell differs."""

    @functools.cache
    def find_attention() -> Any:
        pixels = result.prepared.pixels
        if "attention" not in session.metadata.outputs or pixels is None:
            return None
        return session.run(pixels[None]).attention

    def is_tied(channel: int, cell: Sequence[int]) -> bool:
        attention = find_attention()
        if attention is None or cell[0] >= attention.shape[2] or cell[1] >= attention.shape[3]:
            return False
        attention_map = attention[0, channel]
        return float(attention_map[*cell]) >= (1 - tolerance.tie) * float(attention_map.max())

    return is_tied
