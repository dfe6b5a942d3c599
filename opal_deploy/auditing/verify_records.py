"""Recorded explanations, computed again from the model and the images."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, cast

from opal_deploy.auditing.record_diff import FieldDifference, Tolerance, diff_records
from opal_deploy.auditing.results import RunRecords, locate_image, scan_lines
from opal_deploy.errors import ImageError
from opal_deploy.predict.executor import predict_stream
from opal_deploy.predict.prepare import File, InferenceOptions, read_file
from opal_deploy.records.lines import to_document
from opal_deploy.records.record import Answered, Failed, Record
from opal_deploy.records.run_files import overlay_name
from opal_deploy.records.signatures import PublicKeys
from opal_deploy.runtime.session import Session
from opal_deploy.sources.annotations import Crops, annotate
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
    """A record that differs from what was computed, or has no valid signature."""

    line: int  # in the file, from 1
    image: str | None  # None for a line that is not a record
    differences: Sequence[FieldDifference] = ()
    why: str | None = None  # the reason if fields were not compared
    signature: str | None = None  # what is wrong with the signature
    checked: bool = True  # False if the image could not be read

    def __str__(self) -> str:
        """Return the finding in one line."""
        why = self.why or "".join(map(str, self.differences[:1]))
        more = f" (and {len(self.differences) - 1} more fields)" if len(self.differences) > 1 else ""
        return f"line {self.line}, {self.image}: {'; '.join(filter(None, (self.signature, why)))}{more}"


@dataclass
class RecordsReport:
    """The outcome of `verify_records`, in numbers of records."""

    records: int = 0  # all lines of the file
    checked: int = 0  # computed again
    different: int = 0  # records that differ, and lines that are not records
    not_checked: int = 0  # records whose image cannot be read, so that nothing is known of them
    # of all records, if public keys were given
    signatures_valid: int = 0
    signatures_bad: int = 0
    signatures_unchecked: int = 0  # signed records, if no public key was given
    # see `RunRecords.check`
    run_faults: list[str] = field(default_factory=list)
    run_notes: list[str] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)  # the first differences

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
        return asdict(self)


class GivenImages:
    """The images that the call lists, found by record: by name, or else by digest, as for answers of `serve`."""

    def __init__(self, items: Iterable[InputImage] = (), names: Collection[str | None] | None = None) -> None:
        """Keep the images; of a compressed tar, which are in memory, only those of these names (None: all)."""
        self._by_name: dict[str, list[InputImage]] = {}
        for item in items:
            if names is None or item.name in names or not isinstance(item.source, bytes):
                self._by_name.setdefault(item.name or "", []).append(item)

    def find(self, record: Record) -> InputImage | None:
        """Return the image of a record; None if it was not given."""
        same = self._by_name.get(record.image or "", [])
        if len(same) == 1:
            return same[0]
        # members of an archive may share their name
        return self._by_digest.get(record.image_sha256) or next(iter(same), None)

    @cached_property
    def _by_digest(self) -> dict[str | None, InputImage]:
        return {digest: item for items in self._by_name.values() for item in items if (digest := _hash(item))}


def _hash(item: InputImage) -> str | None:
    try:
        return None if item.error else read_file(cast(File, item.source))[1]
    except ImageError:
        return None


@dataclass(frozen=True)
class CheckOptions:
    """The run whose records are checked: its model file and crops, and how it prepared images."""

    model_sha256: str
    root: Path = Path()  # the folder that image names are relative to
    images: GivenImages = field(default_factory=GivenImages)  # others are looked up below `root`
    boxes: Crops | None = None
    public_keys: PublicKeys | None = None  # None: signatures are not checked
    inference: InferenceOptions = field(default_factory=InferenceOptions)


def sample_lines(path: Path, count: int | None, seed: int) -> tuple[int, frozenset[int] | None]:
    """Return the number of lines, and the `count` line numbers to check, chosen by `seed`; None: all."""
    total = sum(1 for _ in scan_lines(path))
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

    The signatures of all records are checked, and all records with run.json. `progress` gets the records checked.

    Raises:
        UsageError: the file cannot be read.
        StoppedEarly: the device was lost.
    """
    report = RecordsReport()
    # all classes that the model lists, so that any class in a record can be compared
    options = replace(check.inference, top=session.metadata.max_top, model_sha256=check.model_sha256)
    pending: deque[_Recorded] = deque()

    def requests() -> Iterator[InputImage]:
        for recorded in _select_records(path, lines, check.public_keys, report):
            pending.append(recorded)
            yield _build_request(recorded.record, check)

    for result in predict_stream(requests(), [session], options):
        recorded = pending.popleft()
        report.checked += 1
        finding = _compare(recorded, result.record, session, check)
        if finding.signature or finding.why or finding.differences:
            report.add(finding)
        progress(report.checked)
    report.findings.sort(key=lambda finding: finding.line)
    return report


def verify_signatures(path: Path, public_keys: PublicKeys | None) -> RecordsReport:
    """Check the signatures of all records, and the records with run.json; raise UsageError if they cannot be read."""
    report = RecordsReport()
    # none is to be computed again
    deque(_select_records(path, frozenset(), public_keys, report), maxlen=0)
    return report


class _Recorded(NamedTuple):
    """A record in a file, also as a document, with its line, from 1, and the fault of its signature."""

    number: int
    document: dict[str, Any]
    record: Record
    fault: str


def _select_records(
    path: Path, lines: frozenset[int] | None, public_keys: PublicKeys | None, report: RecordsReport
) -> Iterator[_Recorded]:
    """Yield the records to compute again; report lines that are not records, and how all records fit run.json."""
    run = RunRecords(path)
    for number, (_, document, record) in enumerate(scan_lines(path), 1):
        report.records += 1
        if record is None:
            report.add(Finding(number, None, why="not a complete record"))
            continue
        run.add(record)
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
    report.run_faults, report.run_notes = run.check(public_keys)


def _build_request(record: Record, check: CheckOptions) -> InputImage:
    item = check.images.find(record)
    if item is None and record.image is None:
        return InputImage(None, b"", error=ImageError("not_found", "the record has no image name"))
    item = item or _locate(record, check.root)
    missing = replace(item, error=ImageError("no_box", "the file of boxes has no such detection"))
    request = next((crop for crop in annotate([item], check.boxes) if crop.detection == record.detection), missing)
    return replace(request, name=record.image, index=None)


def _locate(record: Record, root: Path) -> InputImage:
    """Return the image that a record names. Frames are not computed again."""
    path = locate_image(record, Path())
    item = InputImage.at(path)
    if not isinstance(path, Path):
        return item
    item = replace(item, source=root / path)
    return replace(item, error=undivided_error()) if is_video_name(path.name) else item


def _compare(line: _Recorded, computed: Record, session: Session, check: CheckOptions) -> Finding:
    """Return the comparison of a record, which may have found nothing."""
    recorded = line.record
    code, recorded_code = (record.error.code if isinstance(record, Failed) else "" for record in (computed, recorded))
    finding = Finding(line.number, recorded.image, signature=line.fault or None)
    if code not in ("", recorded_code) and (code == "not_found" or computed.image_sha256 is None):
        why = "image not found" if code == "not_found" else f"the image cannot be read now ({code})"
        if recorded.image is None:
            why = "the record names no image: list the image after the results"
        return replace(finding, why=why, checked=False)
    if recorded.model_sha256 != check.model_sha256:
        digest = FieldDifference("model_sha256", recorded.model_sha256, check.model_sha256)
        return replace(finding, why="made by another model, or without a model digest", differences=(digest,))
    # such an error need not occur again
    if recorded_code in _NOT_REPEATABLE or (recorded_code == _UNSUPPORTED and not code):
        return finding
    if recorded.image_sha256 != computed.image_sha256:
        digest = FieldDifference("image_sha256", recorded.image_sha256, computed.image_sha256)
        return replace(finding, why="the image differs from the one that was explained", differences=(digest,))
    differences = diff_records(line.document, to_document(computed), Tolerance.for_model(session.metadata))
    if isinstance(recorded, Answered) and recorded.overlay is not None:
        # somebody else's overlay would be shown next to it
        own = overlay_name(line.number - 1, recorded.image)
        differences += [FieldDifference("overlay", recorded.overlay, own)] * (recorded.overlay != own)
    return replace(finding, differences=differences)
