"""The observations of a run that `drift` compares, in bounded memory, and the model's layout that they depend on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta, Struct

from opal_deploy.artifact.baseline import Baseline, Observations
from opal_deploy.artifact.class_map import ClassMap, infer_block
from opal_deploy.artifact.files import compute_sha256
from opal_deploy.artifact.metadata import Metadata
from opal_deploy.auditing.results import Results, read_run_document, read_run_options
from opal_deploy.errors import UsageError
from opal_deploy.records.drift import MIN_SAMPLE
from opal_deploy.records.observations import observe_records
from opal_deploy.records.record import Answer, Answered, Slot

# records that become observations together
_BLOCK = 1_000
# channels of a model that is not given: results of far larger ones are damaged, and would fill the memory
_MAX_CHANNELS = 1_000_000
# records among which a whole image is looked for
_SEARCHED = 1_000
# images that a run is reduced to, at random, when others are compared with it
_RESERVOIR = 50_000


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
    def of_results(results: Results) -> Layout:
        """Return the layout that run.json states, or that the first records show.

        An image that was not cropped has a whole number of cells.

        Raises:
            UsageError: there is no such image.
        """
        document = None if results.path is None else read_run_document(results.path)
        try:
            stored = msgspec.convert((document or {}).get("layout"), _StoredLayout)
            class_map = ClassMap.blocks(stored.classes, stored.slots, stored.dropped)
            return Layout(stored.slots, stored.grid, stored.classes, [""] * stored.classes, class_map)
        except (msgspec.ValidationError, ValueError, IndexError):
            # a run of an earlier version
            pass
        slots, grid = 0, None
        for record in islice(results.records(), _SEARCHED):
            if not isinstance(record, Answered):
                continue
            for slot in record.evidence:
                if (class_id := record.prediction.class_id) > 0:
                    slots = infer_block(class_id, slot.slot, slot.channel)
                grid = grid or _find_grid(record.width, record.height, slot)
            if 0 < slots <= _MAX_CHANNELS and grid:
                return Layout(slots, grid, _MAX_CHANNELS // slots)
        raise UsageError(
            f"{results.shown}: the number of slots per class and cells per image is not known: no evidence, only "
            "cropped images, or only answers of the first class; also give --baseline MODEL"
        )

    def add_name(self, answer: Answer) -> None:
        """Remember the name of a class; raise ValueError for one that the model does not have."""
        class_id = answer.class_id
        if class_id >= self.classes:
            raise ValueError(f"a class {class_id}, where at most {self.classes:,} are possible")
        self.class_names.extend([""] * (class_id + 1 - len(self.class_names)))
        self.class_names[class_id] = self.class_names[class_id] or answer.label


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


class Observed:
    """The records of all images with an answer, in blocks, with their observations.

    Attributes:
        failed: number of images without an answer, of the last complete reading.
        model_sha256: digest of the model that made the records read so far; None where they do not name it.
    """

    def __init__(self, results: Results, layout: Layout, model_sha256: str | None = None) -> None:
        """Read the results of the model with this layout, whose names it completes, and digest, if it is known."""
        self.results, self._layout, self._expected = results, layout, model_sha256
        self.failed = 0
        self.model_sha256: str | None = None

    def __iter__(self) -> Iterator[tuple[Sequence[Answered], Observations]]:
        """Yield the blocks; raise UsageError for records of another model, of several, or without evidence."""
        self.failed, self.model_sha256 = 0, None
        records = iter(self.results.records())
        while block := list(islice(records, _BLOCK)):
            answered = [record for record in block if isinstance(record, Answered)]
            self.failed += len(block) - len(answered)
            if not answered:
                continue
            try:
                for record in answered:
                    self._check_model(record.model_sha256)
                    self._layout.add_name(record.prediction)
                observations = observe_records(answered, self._layout.slots, self._layout.grid)
            except (ValueError, OverflowError) as error:
                raise UsageError(
                    f"{self.results.shown}: its records have {error}; expected results of one OPAL model with single "
                    "cells as evidence"
                ) from None
            yield answered, observations

    def _check_model(self, digest: str | None) -> None:
        self.model_sha256 = self.model_sha256 or digest
        for other, what in ((self.model_sha256, "records of two models"), (self._expected, "records of another model")):
            if digest is not None and other is not None and digest != other:
                raise UsageError(
                    f"{self.results.shown}: {what} (sha256 {digest[:12]}..., expected {other[:12]}...); give results "
                    "of one model, and compare them with the same file"
                )

    def check_enough(self, images: int) -> None:
        """Raise UsageError for fewer images than can be compared."""
        if images < MIN_SAMPLE:
            raise UsageError(
                f"{self.results.shown}: images with an answer: {images}; expected at least {MIN_SAMPLE} to compare"
            )

    def sample_baseline(self) -> Baseline:
        """Return the baseline of the results, from a random sample of bounded size."""
        random, seen = np.random.default_rng(0), 0
        keys, kept = np.empty(0), list[Observations]()
        for _, observations in self:
            # the images with the smallest of random keys are a sample without replacement
            keys = np.concatenate([keys, random.random(len(observations))])
            joined = Observations.concatenate([*kept, observations])
            seen += len(observations)
            if len(keys) > 2 * _RESERVOIR:
                smallest = np.sort(np.argpartition(keys, _RESERVOIR)[:_RESERVOIR])
                keys, joined = keys[smallest], joined.select(smallest)
            kept = [joined]
        self.check_enough(seen)
        return Baseline.measure(kept[0], "earlier", 1, self._layout.class_map)


def find_model(results: Results) -> Path | None:
    """Return the model of a run: next to its results, in the working directory or in a run below `runs`, or None.

    Only the file with the digest that run.json names is taken.
    """
    model = None if results.path is None else read_run_options(results.path).get("model")
    if results.path is None or not isinstance(model, dict):
        return None
    name, folder = Path(str(model.get("file"))).name, results.path.parent
    for path in (parent / name for parent in (folder, folder.parent, Path(), *sorted(Path("runs").glob("*")))):
        if path.is_file() and compute_sha256(path) == model.get("sha256"):
            return path
    return None
