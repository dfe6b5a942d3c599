"""Whether a results.jsonl holds exactly the records of its run: counts, gaps and repeats, compared with run.json."""

from __future__ import annotations

import re
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
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
_SHARD = re.compile(r"([1-9]\d{0,8})/([1-9]\d{0,8})", re.ASCII)


@dataclass
class RunRecords:
    """The positions and signatures of all records in a file; memory holds eight bytes for each.

    Attributes:
        path: the file.
        count: records in it.
        faults: what is wrong with the run, in clauses, from `check`.
        notes: what was found, or could not be checked, in sentences, from `check`.
    """

    path: Path
    count: int = 0
    faults: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    _positions: array[int] = field(default_factory=lambda: array("q"))
    _signatures: SignatureDigest = field(default_factory=SignatureDigest)
    # the run that the first signature names, and whether others name another
    _run: str | None = None
    _mixed: bool = False

    def add(self, record: Record | None) -> None:
        """Add the next line's record; None for a line without one."""
        if record is None:
            return
        self.count += 1
        if record.image_index is not None:
            self._positions.append(record.image_index)
        self._signatures.add(record.signature)
        run = None if record.signature is None else record.signature.run
        self._mixed |= None not in (run, self._run) and run != self._run
        self._run = self._run or run

    def check(self, keys: PublicKeys | None) -> None:
        """Compare the records with run.json, whose signature is checked with `keys`, if given."""
        document = read_run_document(self.path)
        if self.path.name != RESULTS or (document is None and self._run is None):
            # an extract, or answers of `serve`
            if keys is not None and self.path.suffix == SUFFIX:
                self.notes.append(f"Not checked: whether records are missing; it needs {RESULTS} with its {RUN}")
            return
        written = _Written.read(document or {})
        if keys is not None and not self._check_signature(document, keys):
            written = _Written.read({})
        self._compare_positions(written, _read_shard(document or {}))
        other_order = written.signatures not in (None, self._signatures.hexdigest())
        if other_order and not self.faults:
            self.faults.append("the records are not those that the run wrote, or in another order")
        if written.count is None or self.faults:
            return
        early = "" if written.complete else " before the run stopped early"
        self.notes.append(f"{written.count:,} images were answered{early}, {self.count:,} records are here")

    def _check_signature(self, document: dict[str, Any] | None, keys: PublicKeys) -> bool:
        """Return whether run.json is signed, by one of the keys."""
        fault = "it is missing or damaged" if document is None else keys.find_fault(document)
        if not fault:
            assert document is not None
            if self._mixed or self._run not in (None, document.get("id")):
                self.faults.append(f"some records are of another run than {RUN}")
            self.notes.append(f"The signature of {RUN} is valid")
            return True
        if self._run is not None or (document is not None and "signature" in document):
            unfinished = "; the run has not ended, or its signature was removed" if fault == "it is not signed" else ""
            self.faults.append(f"{RUN}: {fault}{unfinished}")
        else:
            self.notes.append(
                f"{RUN} is not signed: whether records are missing at the end cannot be checked (earlier versions "
                "did not sign it)"
            )
        return False

    def _compare_positions(self, written: _Written, shard: tuple[int, int]) -> None:
        details = []
        # records of earlier versions have no positions
        if self.count and len(self._positions) == self.count:
            first, step = shard[0] - 1, shard[1]
            found = np.sort(np.frombuffer(self._positions, np.int64))
            repeated = np.unique(found[1:][found[1:] == found[:-1]])
            edges = np.append(first - step, np.unique(found))
            if written.count is not None:
                end = first + step * written.count
                edges = np.append(edges[edges < end], end)
            before = np.flatnonzero(np.diff(edges) > step)
            if len(before):
                details.append(f"missing: {_list_ranges(edges[before] + step, edges[before + 1] - step)}")
            if len(repeated):
                details.append(f"repeated: {_list_ranges(repeated, repeated)}")
        if written.count not in (None, self.count) or details:
            answered = "" if written.count is None else f"{written.count:,} images were answered, "
            where = " (image_index)" if details else ""
            self.faults.append("; ".join([f"{answered}{self.count:,} records are here", *details]) + where)


@dataclass(frozen=True)
class _Written:
    """The records that a run has written, according to run.json; None where it does not state them."""

    count: int | None = None
    complete: bool = False
    signatures: str | None = None

    @staticmethod
    def read(document: Mapping[str, Any]) -> _Written:
        records = document.get("records")
        if not isinstance(records, dict):
            return _Written()
        count, signatures = records.get("count"), records.get("signatures_sha256")
        known = type(count) is int and 0 <= count <= _MOST
        return _Written(count if known else None, records.get("complete") is True, signatures)


def _read_shard(document: Mapping[str, Any]) -> tuple[int, int]:
    options = document.get("run")
    shard = _SHARD.fullmatch(str(options.get("shard") if isinstance(options, dict) else ""))
    return (1, 1) if shard is None else (int(shard[1]), int(shard[2]))


def _list_ranges(first: NDArray[np.int64], last: NDArray[np.int64]) -> str:
    ranges = zip(first[:_LISTED].tolist(), last[:_LISTED].tolist(), strict=True)
    listed = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in ranges)
    return listed + (f" and {len(first) - _LISTED:,} more" if len(first) > _LISTED else "")
