"""The content of an evidence sheet: figures and sentences, computed from the outputs of one forward pass.

A sheet compares the predicted class with the runner-up. Slots of two classes do not correspond, so both are sorted by
strength.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from opal_deploy.artifact.metadata import Metadata
from opal_deploy.artifact.outputs import Outputs
from opal_deploy.records.build import ImageInfo, build_records, class_evidence
from opal_deploy.records.decision import NO_DECISION, Decision
from opal_deploy.records.names import SlotNames
from opal_deploy.records.record import Answer, Slot, Status, describe_status
from opal_deploy.visualization.overlay import bar_ends, describe_boxes
from opal_deploy.visualization.sentences import describe_answer, headline
from opal_deploy.visualization.style import format_number

Meaning = Literal["cosine", "distance", "score", "logit"]
# distances whose contributions are parts of the distance, or of a power of it
_PART_DISTANCES = ("l1", "l3", "kl")
HEADINGS = {
    "cosine": "contribution of each slot to the cosine",
    "distance": "share of each slot in the distance",
    "score": "score of each slot",
    "logit": "contribution of the strongest slots to the logit",
}
_SUMS = {"l2": "cosine", "l3": "share of the cubed distance"}


@dataclass(frozen=True)
class SlotView:
    """One slot of one class.

    Attributes:
        cell: (row, col) of the feature map.
        box: (x0, y0, x1, y1) of the cell, in pixels of the whole oriented image.
        field: (x0, y0, x1, y1) of the cell's effective receptive field; None if it was not measured.
        value: what the bar shows: the contribution, or the score if there is none.
        start, stop: ends of the bar as shares of the full bar, on one scale for both classes.
        shared: whether another slot of the class chose the same cell.
    """

    slot: int
    channel: int
    cell: tuple[int, int]
    box: tuple[float, float, float, float]
    field: tuple[float, float, float, float] | None
    score: float
    contribution: float | None
    name: str | None
    value: float
    start: float
    stop: float
    shared: bool

    @property
    def place(self) -> str:
        """The slot's name, if it has one, and its cell."""
        return f"{self.name}, {self.cell_text}" if self.name else self.cell_text

    @property
    def cell_text(self) -> str:
        """The slot's cell, and whether other slots share it."""
        return f"cell {self.cell[0]}, {self.cell[1]}{' (shared)' if self.shared else ''}"


@dataclass(frozen=True)
class ClassView:
    """One class and its evidence.

    Attributes:
        logit: minus the distance to the class's anchor.
        cosine: <z, a_c>; None for heads that share prototypes.
        slots: strongest first: by contribution to the cosine, by its distance from 0 for heads that share prototypes,
            else by score.
        total: sum of the slots' contributions; None if the distance has none.
        distinct_cells: number of different cells that the slots chose.
    """

    class_id: int
    label: str
    logit: float
    cosine: float | None
    slots: tuple[SlotView, ...]
    total: float | None
    distinct_cells: int

    @property
    def name(self) -> str:
        """The label; the class's number if the label is blank."""
        return self.label.strip() or f"class {self.class_id}"

    @property
    def match(self) -> str:
        """How well the image matches the class, by its cosine or its logit."""
        return f"logit {format_number(self.logit)}" if self.cosine is None else f"cosine {format_number(self.cosine)}"

    def describe_places(self) -> str:
        """Return a sentence on the number of cells that the slots chose."""
        m, cells = len(self.slots), self.distinct_cells
        if m == 1:
            return "One slot, one cell."
        if cells == 1:
            return f"All {m} slots chose the same cell."
        return f"{m} slots, each in its own cell." if cells == m else f"{m} slots in {cells} different cells."


@dataclass(frozen=True)
class SheetContent:
    """Everything on a sheet except pixels.

    Attributes:
        crop: (x0, y0, x1, y1) that the model saw, in pixels of the whole image.
        grid: (H, W) of the feature map.
        meaning: what the bars show.
        runner_up: the class with the second largest logit; None for a model with one class.
        margin: cosine of the predicted class minus that of the runner-up; None without a runner-up.
        status, flag, sentences: the record's status, and the texts of `describe_status` and `describe_answer`.
        correct: whether the predicted class is the label; None without a label, or if the model has no such class.
    """

    image: str | None
    width: int
    height: int
    crop: tuple[int, int, int, int]
    grid: tuple[int, int]
    distance: str
    meaning: Meaning
    predicted: ClassView
    runner_up: ClassView | None
    margin: float | None
    status: Status
    flag: str
    sentences: tuple[str, ...]
    label: str | None = None
    correct: bool | None = None

    @property
    def views(self) -> list[ClassView]:
        """The classes on the sheet: the predicted class, and the runner-up if there is one."""
        return [view for view in (self.predicted, self.runner_up) if view is not None]

    @property
    def headline(self) -> tuple[str, str]:
        """The largest words, and the line below; see `sentences.headline`."""
        return headline(self.status, self.predicted.name)

    @property
    def verdict(self) -> tuple[str, str]:
        """`correct`, `wrong` or nothing, and a few words on the image's label; both empty without a label."""
        if self.label is None:
            return "", ""
        if self.correct is None:
            return "", f"label {self.label}, not a class of the model"
        return "correct" if self.correct else "wrong", "" if self.correct else f"label {self.label}"

    def describe_answer(self) -> str:
        """Return the predicted label, and whether it is correct if that is known."""
        verdict = ", ".join(filter(None, self.verdict))
        return self.predicted.label + (f" ({verdict})" if verdict else "")

    def cautions(self) -> list[str]:
        """Return reasons to doubt the answer, one sentence each."""
        cautions = []
        m, cells = len(self.predicted.slots), self.predicted.distinct_cells
        if self.flag:
            cautions.append(f"{self.flag}.")
        if m > 1 and cells == 1:
            cautions.append(f"All {m} slots chose the same cell: the answer rests on one place.")
        elif 2 * cells < m:
            cautions.append(f"The {m} slots chose only {cells} different cells.")
        if self.margin is not None and self.margin < 0:
            cautions.append("The runner-up has the higher cosine; this head decides by its distance.")
        return cautions

    def label_sum(self, view: ClassView) -> str:
        """Return a label for the sum of a class's bars; empty if they have none."""
        if self.meaning == "logit":
            return "sum of these"
        return "" if view.total is None else f"sum = {_SUMS.get(self.distance, 'share of the distance')}"

    def explain_figures(self) -> list[str]:
        """Return sentences on how to read boxes and bars."""
        measure = "The cosine says how well the image matches a class: 1 is a perfect match."
        if self.meaning == "logit":
            measure = "The logit says how well the image matches a class, compared with the other classes."
        sentences = [
            measure + (" The margin is the lead over the runner-up." if self.runner_up is not None else ""),
            "A cell is named by its row and column, from 0, 0 at the upper left.",
        ]
        if self.crop != (0, 0, self.width, self.height):
            sentences.append("The white frame marks the crop that the model saw.")
        if self.predicted.slots[0].field is not None:
            sentences.append(
                "A box is the cell where a slot's score was read. Patches show the cell's effective receptive field, "
                "which the score mostly depends on, with the cell outlined."
            )
        if self.meaning == "cosine":
            slots = self.predicted.slots
            sentences += filter(None, [describe_boxes([each.slot for each in slots], [each.value for each in slots])])
        return sentences

    def to_dict(self) -> dict[str, Any]:
        """Return the content for JSON, without bars; `label` and `correct` only with a label."""
        document = asdict(self)
        for view in (document["predicted"], document["runner_up"]):
            for slot in view["slots"] if view else []:
                for key in ("start", "stop", "value"):
                    del slot[key]
        if self.label is None:
            del document["label"], document["correct"]
        return {**document, "abstained": self.status == "abstained", "cautions": self.cautions()}


def build_sheet_content(
    image: ImageInfo,
    outputs: Outputs,
    metadata: Metadata,
    *,
    decision: Decision = NO_DECISION,
    names: SlotNames | None = None,
) -> SheetContent:
    """Return the content of a sheet.

    Args:
        decision: thresholds that mark the image, resolved.

    Raises:
        ValueError: the model's evidence is not `exact`.
    """
    (record,) = build_records([image], outputs, metadata, top=2, decision=decision)
    answers = record.top
    evidence = [class_evidence(answer.class_id, image.geometry, outputs, metadata) for answer in answers]
    meaning: Meaning = "cosine" if metadata.distance == "l2" else "score"
    if metadata.distance in _PART_DISTANCES:
        meaning = "distance"
    if not metadata.is_opal:
        meaning = "logit"
    # a class whose bars all reach 1/m has cosine 1; scores lie in [0, 1]
    full = {"cosine": 1.0 / min(map(len, evidence)), "score": 1.0}.get(meaning, 0.0)
    ends = iter(bar_ends([_value(slot, meaning) for slots in evidence for slot in slots], full))
    predicted, *others = (
        _build_view(answer, slots, list(itertools.islice(ends, len(slots))), meaning, names or {}, metadata)
        for answer, slots in zip(answers, evidence, strict=True)
    )
    runner_up = others[0] if others else None
    return SheetContent(
        image.name, image.geometry.width, image.geometry.height, image.geometry.crop, metadata.grid, metadata.distance,
        meaning, predicted, runner_up, record.margin, record.status,
        describe_status(record), tuple(describe_answer(record)),
        image.label, predicted.label == image.label if image.label in metadata.class_names else None,
    )  # fmt: skip


def _value(slot: Slot, meaning: Meaning) -> float:
    return slot.score if meaning == "score" or slot.contribution is None else slot.contribution


def _strength(view: SlotView, meaning: Meaning) -> float:
    return {"cosine": view.value, "logit": abs(view.value)}.get(meaning, view.score)


def _build_view(
    answer: Answer,
    slots: Sequence[Slot],
    ends: list[tuple[float, float]],
    meaning: Meaning,
    names: SlotNames,
    metadata: Metadata,
) -> ClassView:
    cells = [slot.cell for slot in slots]
    field = metadata.effective_field
    views = [
        SlotView(
            slot.slot, slot.channel, cell, slot.box, None if field is None else field.surround(cell, slot.box),
            slot.score, slot.contribution, names.get((answer.class_id, slot.slot)), _value(slot, meaning), *end,
            cells.count(cell) > 1,
        )
        for slot, cell, end in zip(slots, cells, ends, strict=True)
    ]  # fmt: skip
    # parts of a distance do not separate strong from weak slots: that of kl is not even monotone in the score
    views.sort(key=lambda view: (-_strength(view, meaning), view.slot))
    total = None if meaning == "score" else math.fsum(view.value for view in views)
    return ClassView(
        answer.class_id, answer.label, answer.logit, answer.cosine, tuple(views), total, len(set(cells))
    )  # fmt: skip
