"""Whether a results.jsonl holds exactly the records of its run: counts, gaps and repeats, compared with run.json."""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from opal_deploy.auditing.results import SUFFIX, read_run_document
from opal_deploy.records.record import Record
from opal_deploy.records.run_files import RESULTS, RUN
from opal_deploy.records.signatures import PublicKeys, SignatureDigest

# ranges of positions named in a message
_LISTED = 10
# a run.json may hold anything
_MOST = 1 << 31
_VALID = f"The signature of {RUN} is valid"


class RunRecords:
    """The positions and signatures of all records in a file; memory holds eight bytes for each."""

    def __init__(self, path: Path) -> None:
        """Expect the records of a file."""
        self.path, self.count = path, 0
        self._positions, self._signatures = array("q"), SignatureDigest()
        self._runs: set[str] = set()

    def add(self, record: Record | None) -> None:
        """Add the next line's record; None for a line without one."""
        if record is None:
            return
        self.count += 1
        if record.image_index is not None:
            self._positions.append(record.image_index)
        self._signatures.add(record.signature)
        if record.signature is not None and record.signature.run is not None and len(self._runs) < 2:
            self._runs.add(record.signature.run)

    def check(self, keys: PublicKeys | None) -> tuple[list[str], list[str]]:
        """Compare the records with run.json, whose signature is checked with `keys`, if given.

        Returns:
            clauses about what is wrong with the run, and sentences about what was found or could not be checked.
        """
        document = read_run_document(self.path)
        if self.path.name != RESULTS or (document is None and not self._runs):
            # an extract, or answers of `serve`
            unknown = f"Not checked: whether records are missing; it needs {RESULTS} with its {RUN}"
            return [], [unknown] if keys is not None and self.path.suffix == SUFFIX else []
        faults: list[str] = []
        notes: list[str] = []
        if keys is not None:
            faults, notes = self._check_signature(document, keys)
        is_trusted = keys is None or notes == [_VALID]
        document = document or {}
        written = document.get("records") if is_trusted else None
        written = written if isinstance(written, dict) else {}
        count = written.get("count")
        count = count if type(count) is int and 0 <= count <= _MOST else None
        options = document.get("run")
        is_shard = isinstance(options, dict) and options.get("shard") is not None
        faults += self._compare_positions(count, is_shard=is_shard)
        if not faults and written.get("signatures_sha256") not in (None, self._signatures.hexdigest()):
            faults.append("the records are not those that the run wrote, or in another order")
        if count is not None and not faults:
            early = "" if written.get("complete") is True else " before the run stopped early"
            notes.append(f"{count:,} images were answered{early}, {self.count:,} records are here")
        return faults, notes

    def _check_signature(self, document: dict[str, Any] | None, keys: PublicKeys) -> tuple[list[str], list[str]]:
        """Return the faults and notes about the signature of run.json."""
        fault = "it is missing or damaged" if document is None else keys.find_fault(document)
        if document is not None and not fault:
            is_other = len(self._runs) > 1 or not self._runs <= {document.get("id")}
            return [f"some records are of another run than {RUN}"] * is_other, [_VALID]
        if self._runs or (document is not None and "signature" in document):
            unfinished = "; the run has not ended, or its signature was removed" if fault == "it is not signed" else ""
            return [f"{RUN}: {fault}{unfinished}"], []
        return [], [
            f"{RUN} is not signed: whether records are missing at the end cannot be checked (earlier versions did not "
            "sign it)"
        ]

    def _compare_positions(self, count: int | None, *, is_shard: bool) -> list[str]:
        details = []
        # records of earlier versions have no positions
        if self.count and len(self._positions) == self.count:
            positions, occurrences = np.unique(np.frombuffer(self._positions, np.int64), return_counts=True)
            # a shard is a contiguous part of the list
            first = positions[0] if is_shard else 0
            edges = np.append(first - 1, positions)
            if count is not None:
                edges = np.append(edges[edges < first + count], first + count)
            before = np.flatnonzero(np.diff(edges) > 1)
            if len(before):
                details.append(f"missing: {_list_ranges(edges[before] + 1, edges[before + 1] - 1)}")
            if len(repeated := positions[occurrences > 1]):
                details.append(f"repeated: {_list_ranges(repeated, repeated)}")
        if count in (None, self.count) and not details:
            return []
        answered = "" if count is None else f"{count:,} images were answered, "
        where = " (image_index)" if details else ""
        return ["; ".join([f"{answered}{self.count:,} records are here", *details]) + where]


def _list_ranges(first: NDArray[np.int64], last: NDArray[np.int64]) -> str:
    ranges = zip(first[:_LISTED].tolist(), last[:_LISTED].tolist(), strict=True)
    listed = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in ranges)
    return listed + (f" and {len(first) - _LISTED:,} more" if len(first) > _LISTED else "")
