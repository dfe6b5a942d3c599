"""The one reader of runs: the folder that `infer` wrote, or a results.jsonl such as `serve --records` writes.

Damaged lines are reported; none is skipped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from PIL import Image

from opal_deploy.api.explanation import load_record_image
from opal_deploy.artifact.files import check_regular
from opal_deploy.errors import ImageError, UsageError
from opal_deploy.options import StrPath
from opal_deploy.records.lines import Line, parse_json, read_lines
from opal_deploy.records.names import unescape_name
from opal_deploy.records.record import RECORD_SCHEMA, Answered, Record
from opal_deploy.records.run_files import RESULTS, RUN
from opal_deploy.records.signatures import PublicKeys, SignatureDigest
from opal_deploy.remote import RemoteFile, parse_source
from opal_deploy.visualization.overlay import show_photograph

# ranges of positions named in a message
_LISTED = 10
# a run.json may hold anything
_MOST = 1 << 31


def is_results(path: Path) -> bool:
    """Return whether a path stands for results rather than a model."""
    return path.suffix == ".jsonl" or path.is_dir()


def find_results(path: StrPath) -> Path:
    """Return the results.jsonl of a path: the file itself, or the one in that folder; raise UsageError without one."""
    results = Path(path) / RESULTS if Path(path).is_dir() else Path(path)
    try:
        check_regular(results)
    except OSError as error:
        problem = "no such file" if isinstance(error, FileNotFoundError) else error.strerror
        raise UsageError(f"{results}: {problem}; expected {RESULTS} of `opal-deploy infer`, or its folder") from None
    return results


def read_run(results: Path) -> dict[str, Any]:
    """Return the document of the run.json next to a results.jsonl; empty if there is none, or a damaged one."""
    try:
        return _as_dict(parse_json((results.parent / RUN).read_bytes()))
    except OSError:
        return {}


def read_run_options(results: Path) -> dict[str, Any]:
    """Return the options in the run.json next to a results.jsonl; empty without one."""
    return _as_dict(read_run(results).get("run"))


def _as_dict(document: Any) -> dict[str, Any]:
    return document if isinstance(document, dict) else {}


def scan_lines(results: Path) -> Iterator[Line]:
    """Yield every line of a results.jsonl, whether it is a record or not; raise UsageError if it cannot be read."""
    try:
        with results.open("rb") as stream:
            yield from read_lines(stream)
    except OSError as error:
        raise UsageError(f"{results}: cannot be read ({error.strerror or error})") from None


def read_records(results: Path) -> Iterator[Record]:
    """Yield all records; raise UsageError if the file cannot be read, or a line is not a whole record."""
    for number, line in enumerate(scan_lines(results), 1):
        if line.record is None:
            schema = line.document.get("schema", RECORD_SCHEMA) if isinstance(line.document, dict) else RECORD_SCHEMA
            reason = " is not a whole record of `opal-deploy infer`; the file is damaged"
            if schema != RECORD_SCHEMA:
                reason = f": record schema {schema!r} found, {RECORD_SCHEMA} expected; use the version that wrote it"
            raise UsageError(f"{results}: line {number}{reason}")
        yield line.record


def locate_image(record: Record, root: Path) -> Path | RemoteFile:
    """Return the path (below `root`) or remote file of a record's image."""
    source = parse_source(unescape_name(record.image or ""))
    return root / source if isinstance(source, Path) else source


def load_photograph(record: Answered, root: Path, side: int) -> Image.Image | None:
    """Return a record's photograph, at most `side` pixels a side; None if its image is gone or has changed."""
    try:
        photograph = show_photograph(load_record_image(record, locate_image(record, root)), record)
    except ImageError:
        return None
    photograph.thumbnail((side, side))
    return photograph


def group_records(results: Path) -> dict[str | None, list[Record]]:
    """Return all records by image name, those with the same name in input order; raise UsageError as `read_records`."""
    groups: dict[str | None, list[Record]] = {}
    for record in read_records(results):
        groups.setdefault(record.image, []).append(record)
    for records in groups.values():
        # concatenated shards may be in another order
        records.sort(key=lambda record: -1 if record.image_index is None else record.image_index)
    return groups


# an earlier state of a signed run has valid signatures: this tells it from a run that was finished
STOPPED_EARLY = "before the run stopped early"


class RunRecords:
    """The positions and signatures of all records in a file, to be compared with the run.json next to it."""

    def __init__(self, path: Path) -> None:
        """Expect the records of a file."""
        self.path, self.count = path, 0
        self._positions: list[int] = []
        self._signatures, self._runs = SignatureDigest(), set[str]()

    def add(self, record: Record) -> None:
        """Add the next record."""
        self.count += 1
        if record.image_index is not None:
            self._positions.append(record.image_index)
        self._signatures.add(record.signature)
        # two runs are enough to tell that not all records are of one
        if record.signature is not None and record.signature.run is not None and len(self._runs) < 2:
            self._runs.add(record.signature.run)

    def check(self, keys: PublicKeys | None) -> tuple[list[str], list[str]]:
        """Compare the records with run.json, whose signature is checked with `keys`, if given.

        Returns:
            clauses about what is wrong with the run, and sentences about what was checked or could not be.
        """
        document = read_run(self.path)
        if self.path.name != RESULTS or not (document or self._runs):
            # an extract, or answers of `serve`
            unknown = f"Not checked: whether records are missing; it needs {RESULTS} with its {RUN}"
            return [], [] if keys is None else [unknown]
        is_shard = _as_dict(document.get("run")).get("shard") is not None
        if keys is not None and (fault := self._find_fault(document, keys)):
            return [f"{RUN}: {fault}", *self._compare_positions(None, is_shard=is_shard)], []
        written = _as_dict(document.get("records"))
        count = written.get("count")
        count = count if type(count) is int and 0 <= count <= _MOST else None
        faults = self._compare_positions(count, is_shard=is_shard)
        if not faults and written.get("signatures_sha256") not in (None, self._signatures.hexdigest()):
            faults.append("the records are not those that the run wrote, or in another order")
        notes = [] if keys is None else [f"The signature of {RUN} is valid"]
        if count is not None and not faults:
            early = "" if written.get("complete") is True else f" {STOPPED_EARLY}"
            notes.append(f"{count:,} images were answered{early}, {self.count:,} records are here")
        return faults, notes

    def _find_fault(self, document: dict[str, Any], keys: PublicKeys) -> str:
        """Return what is wrong with the signature of run.json; empty if nothing is."""
        if not document:
            return "it is missing or damaged"
        if fault := keys.find_fault(document):
            return fault
        return "" if self._runs <= {document.get("id")} else "some records are of another run"

    def _compare_positions(self, count: int | None, *, is_shard: bool) -> list[str]:
        details = []
        if self.count and len(self._positions) == self.count:
            occurrences = Counter(self._positions)
            # a shard is a contiguous part of the list
            first = min(occurrences) if is_shard else 0
            last = max(occurrences) + 1 if count is None else first + count
            edges = [first - 1, *sorted(position for position in occurrences if position < last), last]
            if gaps := [(low + 1, high - 1) for low, high in pairwise(edges) if high - low > 1]:
                details.append(f"missing: {_list_ranges(gaps)}")
            if repeated := sorted(position for position, number in occurrences.items() if number > 1):
                details.append(f"repeated: {_list_ranges([(position, position) for position in repeated])}")
        if count in (None, self.count) and not details:
            return []
        answered = "" if count is None else f"{count:,} images were answered, "
        where = " (image_index)" if details else ""
        return ["; ".join([f"{answered}{self.count:,} records are here", *details]) + where]


def _list_ranges(ranges: list[tuple[int, int]]) -> str:
    listed = ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in ranges[:_LISTED])
    return listed + (f" and {len(ranges) - _LISTED:,} more" if len(ranges) > _LISTED else "")
