"""The answers of a finished run, in bounded memory: from results.jsonl, a run's folder or bucket, or a table."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta, Struct

from opal_deploy.artifact.baseline import Observations
from opal_deploy.artifact.class_map import ClassMap, infer_block
from opal_deploy.artifact.files import compute_sha256
from opal_deploy.artifact.metadata import Metadata
from opal_deploy.auditing.results import find_results, read_all_records, read_run_document, read_run_options
from opal_deploy.errors import ImageError, UsageError
from opal_deploy.options import StrPath
from opal_deploy.records.lines import read_lines
from opal_deploy.records.observations import observe_records
from opal_deploy.records.record import Answer, Answered, Record, Slot, to_record
from opal_deploy.records.run_files import RESULTS
from opal_deploy.records.tables import TABLES, read_table
from opal_deploy.remote import RemoteFile, is_url, redact

# records that become observations together
_BLOCK = 1_000
# channels of a model that is not given: results of far larger ones are damaged, and would fill the memory
_MAX_CHANNELS = 1_000_000
# records among which a whole image is looked for
_LOOKED_AT = 1_000


class _StoredLayout(Struct):
    """The entry `layout` of a run.json."""

    slots: Annotated[int, Meta(ge=1, le=1_000)]
    grid: tuple[Annotated[int, Meta(ge=1, le=1 << 16)], Annotated[int, Meta(ge=1, le=1 << 16)]]
    classes: Annotated[int, Meta(ge=1, le=100_000)]
    dropped: tuple[Annotated[int, Meta(ge=0)], ...] = ()


@dataclass(frozen=True)
class Layout:
    """The part of a model that observations depend on: m, the grid (H, W), and the classes' names, empty where unknown.

    `classes` is their number at most; `known_map` is the model's, None where only records are known.
    """

    slots: int
    grid: tuple[int, int]
    classes: int
    class_names: list[str] = field(default_factory=list)
    known_map: ClassMap | None = None

    @property
    def class_map(self) -> ClassMap:
        """The model's map, or OPAL's for the classes that records have named so far."""
        return self.known_map or ClassMap.blocks(len(self.class_names), self.slots)

    @staticmethod
    def of_model(metadata: Metadata) -> Layout:
        """Return the layout that a model's metadata states."""
        class_map = metadata.class_map
        return Layout(class_map.max_slots, metadata.grid, metadata.num_classes, list(metadata.class_names), class_map)

    @staticmethod
    def of_run(run: Mapping[str, Any]) -> Layout | None:
        """Return the layout in the document of a run.json; None for a run of an earlier version."""
        try:
            found = msgspec.convert(run.get("layout"), _StoredLayout)
            class_map = ClassMap.blocks(found.classes, found.slots, found.dropped)
        except (msgspec.ValidationError, ValueError, IndexError):
            return None
        return Layout(found.slots, found.grid, found.classes, [""] * found.classes, class_map)

    def add_name(self, answer: Answer) -> None:
        """Remember the name of a class; raise ValueError for one that the model does not have."""
        class_id = answer.class_id
        if class_id >= self.classes:
            raise ValueError(f"a class {class_id}, where at most {self.classes:,} are possible")
        self.class_names.extend([""] * (class_id + 1 - len(self.class_names)))
        self.class_names[class_id] = self.class_names[class_id] or answer.label


class Answers:
    """The records of a run, which can be read more than once.

    Attributes:
        shown: the results as messages name them.
        folder: the folder of local results; None in a bucket.
        statuses: number of records by status, of the last complete reading.
        model_sha256: digest of the model that made the records, from `observe`; None where they do not name it.
        in_memory: whether a program passed the records, instead of naming a file.
    """

    in_memory = False

    def __init__(self, source: str) -> None:
        """Open results by path or URL; raise UsageError if there are none."""
        self.shown, self.folder = redact(source), None
        self.statuses: Counter[str] = Counter()
        self.model_sha256: str | None = None
        self._remote: RemoteFile | None = None
        if is_url(source):
            remote = RemoteFile.parse(source)
            self._remote = remote if remote.name.endswith(".jsonl") else remote.child(RESULTS)
        else:
            path = Path(source)
            is_table = path.suffix.lstrip(".") in TABLES and path.is_file()
            self._path = path if is_table else find_results(path)
            self.folder = self._path.parent

    @staticmethod
    def open(results: StrPath | Sequence[Record | Mapping[str, Any]]) -> Answers:
        """Open results by path or URL, or take records in memory, including `Model.predict`'s."""
        return Answers(os.fspath(results)) if isinstance(results, str | os.PathLike) else _AnswersInMemory(results)

    def records(self) -> Iterator[Record]:
        """Yield all records.

        Raises:
            UsageError: the results cannot be read, or are damaged.
        """
        if self._remote is not None:
            yield from self._read_bucket(self._remote)
        elif self._path.suffix.lstrip(".") in TABLES:
            yield from read_table(self._path)
        else:
            yield from read_all_records(self._path)

    def _read_bucket(self, remote: RemoteFile) -> Iterator[Record]:
        try:
            with remote.open() as stream:
                for number, line in enumerate(read_lines(stream), 1):
                    if line.record is None:
                        raise UsageError(f"{remote}: line {number} is not a whole record; the file is damaged")
                    yield line.record
        except ImageError as error:
            expected = f"; expected a finished run of `infer` with {RESULTS}" if error.code == "not_found" else ""
            raise UsageError(f"{self.shown}: cannot be read: {error}{expected}") from None

    def observe(
        self, layout: Layout, model_sha256: str | None = None
    ) -> Iterator[tuple[Sequence[Answered], Observations]]:
        """Yield the records of all images with an answer, in blocks, with their observations.

        Args:
            layout: the model's; names of classes that it lacks are added.
            model_sha256: digest of the model that must have made the records; None: any, but the same for all.

        Raises:
            UsageError: the records are of another model, or of several, or have no evidence.
        """
        self.statuses.clear()
        self.model_sha256 = None
        records = iter(self.records())
        while block := list(islice(records, _BLOCK)):
            self.statuses.update(record.status for record in block)
            answered = [record for record in block if isinstance(record, Answered)]
            if not answered:
                continue
            try:
                for record in answered:
                    self._check_model(record.model_sha256, model_sha256)
                    layout.add_name(record.prediction)
                observations = observe_records(answered, layout.slots, layout.grid)
            except (ValueError, OverflowError) as error:
                raise UsageError(
                    f"{self.shown}: its records have {error}; expected results of one OPAL model with single cells as "
                    "evidence"
                ) from None
            yield answered, observations

    def _check_model(self, digest: str | None, expected: str | None) -> None:
        self.model_sha256 = self.model_sha256 or digest
        for other, what in ((self.model_sha256, "records of two models"), (expected, "records of another model")):
            if digest is not None and other is not None and digest != other:
                raise UsageError(
                    f"{self.shown}: {what} (sha256 {digest[:12]}..., expected {other[:12]}...); give results of one "
                    "model, and compare them with the same file"
                )

    def find_model(self) -> Path | None:
        """Return the model of the run: next to its results, in the working directory or in a run below `runs`, or None.

        Only the file with the digest that run.json names is taken.
        """
        run = {} if self.folder is None else read_run_options(self.folder / RESULTS)
        model = run.get("model")
        if not isinstance(model, dict) or self.folder is None:
            return None
        name = Path(str(model.get("file"))).name
        folders = [self.folder, self.folder.parent, Path(), *sorted(Path("runs").glob("*"))]
        for folder in folders:
            path = folder / name
            if path.is_file() and compute_sha256(path) == model.get("sha256"):
                return path
        return None

    def find_layout(self) -> Layout:
        """Return the layout that run.json states, or that the first records show.

        An image that was not cropped has a whole number of cells.

        Raises:
            UsageError: there is no such image.
        """
        stated = Layout.of_run(read_run_document(self.folder / RESULTS) or {}) if self.folder is not None else None
        if stated is not None:
            return stated
        slots, grid = 0, None
        for record in islice(self.records(), _LOOKED_AT):
            if not isinstance(record, Answered):
                continue
            for slot in record.evidence:
                if (class_id := record.prediction.class_id) > 0:
                    slots = infer_block(class_id, slot.slot, slot.channel)
                grid = grid or _find_grid(record.width, record.height, slot)
            if 0 < slots <= _MAX_CHANNELS and grid:
                return Layout(slots, grid, _MAX_CHANNELS // slots)
        raise UsageError(
            f"{self.shown}: the number of slots per class and cells per image is not known: no evidence, only cropped "
            "images, or only answers of the first class; also give --baseline MODEL"
        )


class _AnswersInMemory(Answers):
    """Records that a program passed, with the model given."""

    in_memory = True

    def __init__(self, records: Sequence[Record | Mapping[str, Any]]) -> None:
        self.shown, self.folder, self.statuses, self.model_sha256 = "the records", None, Counter(), None
        self._records = records

    def records(self) -> Iterator[Record]:
        """Yield all records; raise UsageError for anything that is not a record."""
        try:
            yield from map(to_record, self._records)
        except ValueError as error:
            raise UsageError(f"{self.shown}: {error}; expected records of `Model.predict` or results.jsonl") from None


def _find_grid(width: int, height: int, slot: Slot) -> tuple[int, int] | None:
    """Return the grid of an image from the box of one cell; None if the image was cropped."""
    (row, col), (x0, y0, x1, y1) = slot.cell, slot.box
    if x1 <= x0 or y1 <= y0:
        return None
    sides = np.array([height / (y1 - y0), width / (x1 - x0)])
    first = np.array([y0 - row * (y1 - y0), x0 - col * (x1 - x0)])
    if (np.abs(sides - sides.round()) > 1e-3).any() or (np.abs(first) > 1e-3 * max(width, height)).any():
        return None
    return int(sides[0].round()), int(sides[1].round())
