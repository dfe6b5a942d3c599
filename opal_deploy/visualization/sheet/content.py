"""The content of an evidence sheet as plain data, computed from the outputs of one forward pass alone.

A sheet sets the predicted class beside the runner-up. Slots of two classes do not correspond one to one, so both are
sorted by strength: then the differences rank by rank add up to the difference of the sums, the margin.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import NDArray

from opal_deploy.artifact.measurements import EffectiveField
from opal_deploy.artifact.metadata import Metadata
from opal_deploy.artifact.outputs import Outputs
from opal_deploy.preprocess.geometry import Geometry
from opal_deploy.records.record import Slot, build_record, class_evidence
from opal_deploy.visualization.legend import bar_ends
from opal_deploy.visualization.slot_names import SlotNames

Meaning = Literal["cosine", "distance", "score"]
# distances whose contributions are parts of the distance, or of a power of it
_PART_DISTANCES = ("l1", "l3", "kl")


@dataclass(frozen=True)
class SlotView:
    """One slot of one class.

    Attributes:
        slot: the slot, 0 ... m-1.
        channel: the channel, `class_id * m + slot`.
        cell: (row, col) of the feature map.
        box: (x0, y0, x1, y1) of the cell, in pixels of the whole oriented image.
        field: the same of the cell's effective receptive field; None where it was not measured.
        score: the slot's score, in [0, 1].
        contribution: the slot's contribution; None where the distance has none.
        name: the slot's name; None if it has none.
        value: the value that the bar shows: the contribution, or the score where there is none.
        start: the bar's left end as a share of the full bar, on one scale for both classes.
        stop: the bar's right end.
        shared: whether another slot of the class has its maximum in the same cell.
        attention: float32 [H, W]; None where the outputs have no attention maps.
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
    attention: NDArray[np.float32] | None = None


@dataclass(frozen=True)
class ClassView:
    """One class and its evidence.

    Attributes:
        class_id: the class.
        label: the class's name.
        logit: minus the distance to the class's anchor.
        cosine: <z, a_c>.
        slots: the strongest first: by contribution to the cosine, else by score.
        total: the sum of the slots' contributions; None where the distance has none.
        distinct_cells: the number of different cells that the slots chose.
    """

    class_id: int
    label: str
    logit: float
    cosine: float
    slots: tuple[SlotView, ...]
    total: float | None
    distinct_cells: int


@dataclass(frozen=True)
class MarginDifference:
    """The slots that the margin comes from.

    Attributes:
        by_rank: the contribution of the k-th strongest slot of the predicted class minus that of the runner-up's; the
            differences add up to the margin.
        leading: the fewest slots of the predicted class whose differences reach half of the margin, greatest first.
        given: the sum of the leading slots' differences.
    """

    by_rank: tuple[float, ...]
    leading: tuple[int, ...]
    given: float


@dataclass(frozen=True)
class SheetContent:
    """Everything that a sheet shows except pixels.

    Attributes:
        image: the image's name in its record.
        width: of the whole oriented image, in pixels.
        height: of the whole oriented image, in pixels.
        crop: (x0, y0, x1, y1) that the model was shown, in pixels of the whole image.
        grid: (H, W) of the feature map.
        distance: the head's distance.
        meaning: what the bars show.
        predicted: the class with the largest logit.
        runner_up: the class with the second largest logit; None for a model of one class.
        margin: the cosine of the predicted class minus that of the runner-up; None for a model of one class.
        min_margin: the margin below which the model abstains; None for never.
        difference: None unless contributions add up to cosines and the margin is positive.
        truth: the image's label; None where it is not known.
        correct: whether the predicted class is the label; None where there is no label, or the model has no such class.
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
    min_margin: float | None
    difference: MarginDifference | None
    truth: str | None = None
    correct: bool | None = None

    @property
    def abstained(self) -> bool:
        """Whether the margin is below `min_margin`."""
        return self.margin is not None and self.min_margin is not None and self.margin < self.min_margin

    @property
    def largest(self) -> float | None:
        """The largest contribution to the cosine of either class; None where there is none above 0."""
        views = [view for view in (self.predicted, self.runner_up) if view is not None]
        largest = max(slot.value for view in views for slot in view.slots)
        return largest if self.meaning == "cosine" and largest > 0 else None

    def cautions(self) -> list[str]:
        """Return reasons to doubt the answer, one sentence each, that follow from its numbers alone."""
        cautions = []
        slots, m = self.predicted.slots, len(self.predicted.slots)
        if self.abstained:
            cautions.append(f"Abstained: the margin is below the threshold of {self.min_margin:g}.")
        if m > 1 and self.predicted.distinct_cells == 1:
            cautions.append(f"All {m} slots chose the same cell: the answer rests on one place.")
        elif 2 * self.predicted.distinct_cells < m:
            cautions.append(f"The {m} slots chose only {self.predicted.distinct_cells} different cells.")
        if self.meaning == "cosine" and self.margin is not None and m > 1 and self.margin < slots[0].value:
            cautions.append(f"The margin is smaller than what slot {slots[0].slot} alone adds.")
        if self.runner_up is not None and self.margin is not None and self.margin < 0:
            cautions.append("By the cosine the runner-up would be closer; this head decides by its distance.")
        return cautions

    def count_shared_cells(self) -> int:
        """Return the number of cells that slots of both classes chose."""
        if self.runner_up is None:
            return 0
        return len({s.cell for s in self.predicted.slots} & {s.cell for s in self.runner_up.slots})

    def to_dict(self) -> dict[str, Any]:
        """Return the content for JSON, without attention maps and the bars' ends; `truth` only where it is known."""
        document = asdict(self)
        for view in (document["predicted"], document["runner_up"]):
            for slot in view["slots"] if view else []:
                for key in ("attention", "start", "stop", "value"):
                    del slot[key]
        if self.truth is None:
            del document["truth"], document["correct"]
        return {**document, "abstained": self.abstained, "cautions": self.cautions()}


def build_sheet_content(
    image: str | None,
    geometry: Geometry,
    outputs: Outputs,
    row: int,
    metadata: Metadata,
    *,
    min_margin: float | None = None,
    names: SlotNames | None = None,
    truth: str | None = None,
) -> SheetContent:
    """Return the content of a sheet.

    Args:
        image: the image's name.
        geometry: the image's size and the crop that the model was shown.
        outputs: the outputs of a forward pass; with `attention` the sheet has attention maps.
        row: the image's row in the outputs.
        metadata: the model's metadata.
        min_margin: the margin below which the answer is marked as abstained; None for never.
        names: names of slots.
        truth: the image's label; None where it is not known.

    Raises:
        ValueError: the model's evidence is not `exact`.
    """
    record = build_record(image, geometry, outputs, row, metadata, top=2, min_margin=min_margin)
    answers = record["top"]
    evidence = [class_evidence(answer["class_id"], geometry, outputs, row, metadata) for answer in answers]
    meaning: Meaning = "cosine" if metadata.distance == "l2" else "score"
    if metadata.distance in _PART_DISTANCES:
        meaning = "distance"
    # where every bar of a class reaches 1/m its cosine is 1; scores lie in [0, 1]
    m = metadata.prototypes_per_class
    full = {"cosine": 1.0 / m, "distance": 0.0, "score": 1.0}[meaning]
    ends = bar_ends([_value(slot, meaning) for slots in evidence for slot in slots], full)
    names = names or SlotNames()
    views = [
        ClassView(
            answer["class_id"],
            answer["label"],
            answer["logit"],
            # evidence comes from anchors, which give every class a cosine
            cast(float, answer["cosine"]),
            _build_slots(
                answer["class_id"], slots, ends[rank * m :][:m], meaning, outputs, row, names, metadata.effective_field
            ),
            None if meaning == "score" else math.fsum(_value(slot, meaning) for slot in slots),
            len({tuple(slot["cell"]) for slot in slots}),
        )
        for rank, (answer, slots) in enumerate(zip(answers, evidence, strict=True))
    ]
    runner_up = views[1] if len(views) > 1 else None
    return SheetContent(
        image,
        geometry.width,
        geometry.height,
        geometry.crop,
        metadata.grid,
        metadata.distance,
        meaning,
        views[0],
        runner_up,
        record.get("margin"),
        min_margin,
        None if runner_up is None or meaning != "cosine" else _compute_difference(views[0], runner_up),
        truth,
        views[0].label == truth if truth in metadata.class_names else None,
    )


def _value(slot: Slot, meaning: Meaning) -> float:
    contribution = slot["contribution"]
    return slot["score"] if meaning == "score" or contribution is None else contribution


def _build_slots(
    class_id: int,
    slots: list[Slot],
    ends: list[tuple[float, float]],
    meaning: Meaning,
    outputs: Outputs,
    row: int,
    names: SlotNames,
    field: EffectiveField | None,
) -> tuple[SlotView, ...]:
    cells = [tuple(slot["cell"]) for slot in slots]
    maps = outputs.attention
    views = []
    for slot, (start, stop) in zip(slots, ends, strict=True):
        x0, y0, x1, y1 = slot["box"]
        views.append(
            SlotView(
                slot["slot"],
                slot["channel"],
                (slot["cell"][0], slot["cell"][1]),
                (x0, y0, x1, y1),
                None if field is None else field.surround(slot["cell"], slot["box"]),
                slot["score"],
                slot["contribution"],
                names.name(class_id, slot["slot"]),
                _value(slot, meaning),
                start,
                stop,
                cells.count(tuple(slot["cell"])) > 1,
                None if maps is None else maps[row, slot["channel"]],
            )
        )
    # parts of a distance do not separate strong from weak slots: that of kl is not even monotone in the score
    by_value = meaning == "cosine"
    return tuple(sorted(views, key=lambda view: (-(view.value if by_value else view.score), view.slot)))


def _compute_difference(predicted: ClassView, runner_up: ClassView) -> MarginDifference | None:
    by_rank = tuple(a.value - b.value for a, b in zip(predicted.slots, runner_up.slots, strict=True))
    margin = math.fsum(by_rank)
    if margin <= 0:
        return None
    order = sorted(range(len(by_rank)), key=lambda rank: (-by_rank[rank], rank))
    leading: list[int] = []
    given = 0.0
    for rank in order:
        leading.append(predicted.slots[rank].slot)
        given += by_rank[rank]
        if 2 * given >= margin:
            break
    return MarginDifference(by_rank, tuple(leading), given)
