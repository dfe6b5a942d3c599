"""Measurements of a model, as checkpoints and metadata keep them: calibration, evaluation and receptive field.

Calibration is temperature scaling after Guo, Pleiss, Sun and Weinberger, "On calibration of modern neural networks"
(ICML 2017): softmax(logits / T) with one temperature T for all classes, fitted on validation images. The prediction
stays as it is.

The document `Metadata.evaluation`; figures that were not measured are left out. `inspect --json` shows all of them,
`list_evaluation` those that say how far to trust a box:

    when, opal_deploy            date (ISO 8601) and version of the measurement
    model, runtime               the file that was measured and what ran it: an export carries its checkpoint's figures
    data, split, images, boxes   the data set's folder, its split, how many images, whether they were cropped to boxes
    accuracy                     0 ... 1
    pointing_game                `object`, `part`, `distinguishing_part`: {mean, low, high, count, random} or null
    faithfulness                 {images, removal: [{fill, changed, changed_random, drop_beyond_random: {mean}}]}
    attack, randomisation, interventions, prototype_consistency, prototype_stability, part_purity
                                 as in `evaluate --json`

`changed` is the share of images whose predicted class changes without the evidence's cells, `changed_random` without as
many random foreground cells; `drop_beyond_random` is by how much more its cosine falls.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta

from opal_deploy.artifact.documents import (
    LARGEST,
    AtLeastOne,
    Count,
    Edit,
    Evaluation,
    Faithfulness,
    Number,
    PointingGame,
    check_document,
)  # fmt: skip

# bins of the expected calibration error, each with as many images
NUM_BINS = 15
# parts of the images, each measured with the temperature fitted on the others
NUM_FOLDS = 5
NOT_FITTED = "no temperature was fitted; `opal-deploy evaluate DATA --model MODEL --split val --record` fits one"
# share of answers below which removal says that there is more than one reason for each
_FEW = 0.05
# share of the gradient's energy in the effective field
ENERGY_SHARE = 0.9
_SHARES = (("object", "in the object"), ("part", "on a part"), ("distinguishing_part", "on a distinguishing part"))


@dataclass(frozen=True)
class Calibration:
    """A model's temperature and its calibration error, or the reason why none was fitted.

    Figures are cross-fitted: each fifth of the images is measured with the temperature fitted on the other four.
    `temperature` is fitted on all. Figures that end in `_uncalibrated` are at temperature 1. Training chose its best
    epoch on the same images, so figures on new ones may be slightly worse.

    Attributes:
        images: validation images of the fit.
        temperature: T, over 0; None where it was not fitted.
        reason: why it was not fitted; empty if it was.
        accuracy: share of correct predictions, 0 ... 1, the same for every temperature.
        nll, nll_uncalibrated: mean of -log(probability of the label), in nats.
        ece, ece_uncalibrated: expected calibration error of the predicted class's probability, 0 ... 1.
        ece_perfect: mean error that the same probabilities would show if they were exactly right.
        bins, folds: number of the calibration error's bins and of the cross-fitting's folds.
        split, method: the data set's split; `temperature`.
    """

    images: Count
    temperature: Annotated[float, Meta(gt=0, le=LARGEST)] | None = None
    reason: str = ""
    accuracy: Number | None = None
    nll: Number | None = None
    nll_uncalibrated: Number | None = None
    ece: Number | None = None
    ece_uncalibrated: Number | None = None
    ece_perfect: Number | None = None
    bins: Count = NUM_BINS
    folds: Count = NUM_FOLDS
    split: str = "val"
    method: Literal["temperature"] = "temperature"

    def __post_init__(self) -> None:
        if (not self.reason) if self.temperature is None else (self.ece is None):
            raise ValueError("expected a temperature with its errors, or a reason")

    def to_dict(self) -> dict[str, Any]:
        """Return the fields that have a value, for JSON; `from_dict` reads them."""
        return {name: value for name, value in asdict(self).items() if value not in (None, "")}

    @staticmethod
    def from_dict(raw: Mapping[str, Any]) -> Calibration | None:
        """Return the calibration that `to_dict` wrote, None for an empty dictionary; ArtifactError for any other."""
        return check_document(raw, Calibration, "calibration") if raw else None

    def describe(self) -> str:
        """Return one line for a person."""
        if self.temperature is None:
            return f"not calibrated: {self.reason}"
        assert self.ece is not None
        perfect = "" if self.ece_perfect is None else f", where exact probabilities would show {self.ece_perfect:.1%}"
        right = "" if self.accuracy is None else f", accuracy {self.accuracy:.1%}"
        return (
            f"temperature {self.temperature:.4g}, fitted on {self.images:,} {self.split} images{right}: expected "
            f"calibration error {self.ece:.1%} on images left out of the fit{perfect}"
        )


def describe_edits(edits: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield one line for a person per edit in the `edits` of metadata or a checkpoint, oldest first."""
    for edit in check_document(edits, tuple[Edit, ...], "edits"):
        changed = {"dropped": edit.dropped, "restored": edit.restored}
        changes = [f"{verb} {', '.join(names)}" for verb, names in changed.items() if names]
        reason = f": {edit.reason}" if edit.reason else ""
        figures = ""
        if (measured := edit.measured) is not None:
            before, after = measured.accuracy
            figures = f"; accuracy {before:.1%} before, {after:.1%} after ({measured.images:,} {measured.split} images)"
        parent = f"{edit.parent.file} {edit.parent.sha256[:12]}"
        yield f"{'; '.join(changes)}{reason}{figures}; from {parent}, {edit.when[:10]}"


def describe_calibration(raw: Mapping[str, Any]) -> str:
    """Return one line for a person on the `calibration` of metadata or of a checkpoint, {} where there is none."""
    calibration = Calibration.from_dict(raw)
    return f"not calibrated: {NOT_FITTED}" if calibration is None else calibration.describe()


def describe_risk(raw: Mapping[str, Any]) -> str:
    """Return one line for a person on a risk-coverage curve, the `risk` of metadata or a checkpoint."""
    shares = ", ".join(f"{share:.1%} at {100 * float(rate):g} %" for rate, share in raw["coverage_at_error"].items())
    answered = f"error {raw['error']:.2%} of {raw['images']:,} {raw.get('split', 'val')} images without abstaining"
    return f"{answered}, AURC {raw['aurc']:.4f}; coverage by error rate: {shares}"


@dataclass(frozen=True)
class ReceptiveField:
    """The receptive fields of a model's cells, in pixels of its input.

    Attributes:
        stride: pixels from one cell to the next: the side of a cell's box.
        size: side of the square of pixels that a cell can depend on, parts outside the image included; None where
            attention between cells leaves no bound.
        offset: coordinate of the centre of cell 0's theoretical field along both axes (pixel i reaches from i to
            i + 1); None where `size` is None.
        global_context: whether a pooling inside the network (squeeze-and-excitation), which `size` leaves out, lets
            cells depend on the whole image.
        effective_offset: coordinate of the centre of cell 0's effective field, the centroid of the energy of scores'
            gradients (`evaluation.cells`); None where that was not measured.
        effective: side of the square around that centre that holds 90 % of the energy; None where it was not measured.
        images: images that the effective field was measured on.
        box_offset: by how much boxes lie right of and below their cells' places in the grid, in cells, so that their
            middle is the effective field's; 0 where that is at most 0.1 cells away.
    """

    stride: AtLeastOne
    size: Count | None = None
    offset: Number | None = None
    global_context: bool = False
    effective: Count | None = None
    effective_offset: Number | None = None
    images: Count = 0
    box_offset: Number = 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain values; `from_dict` reads them."""
        return asdict(self)

    @staticmethod
    def from_dict(raw: Mapping[str, Any]) -> ReceptiveField | None:
        """Return the fields that `to_dict` wrote, None for an empty dictionary; ArtifactError for any other."""
        return check_document(raw, ReceptiveField, "receptive_field") if raw else None

    def describe(self, input_size: tuple[int, int]) -> list[str]:
        """Return lines on a cell's view of an input of (H0, W0); the last may be a warning."""
        of = f"of {max(input_size)} pixels"
        theoretical = f"the whole image {of}"
        if self.size is not None:
            pooled = ", and the whole image through a pooling inside the network" if self.global_context else ""
            theoretical = f"{self.size} {of}{pooled}"
        effective = "not measured"
        if self.effective is not None:
            effective = (
                f"{self.effective} {of} hold {ENERGY_SHARE:.0%} of the gradient's energy ({self.images} images), "
                f"centred at {self.effective_offset or 0:.1f} of the cell's {self.stride}"
            )
            if self.box_offset:
                effective += f"; boxes are moved there, by {self.box_offset:+.2f} of a cell to the right and down"
        lines = [f"a cell's box has {self.stride} {of}; it can see {theoretical}", f"effective: {effective}"]
        if self.sees_whole(input_size):
            lines.append(
                "warning: a cell sees the whole image: its box is where a score was read, not all that it depends on; "
                "cells of a finer `train --stride` see less"
            )
        return lines

    def in_cells(self, grid: tuple[int, int]) -> EffectiveField | None:
        """Return the effective field in units of the cells of a grid (H, W); None where it was not measured."""
        if self.effective is None or self.effective_offset is None:
            return None
        return EffectiveField(self.effective / self.stride, self.effective_offset / self.stride, grid, self.box_offset)

    def sees_whole(self, input_size: tuple[int, int]) -> bool:
        """Return whether the field of a middle cell, the effective one if known, covers an input of (H0, W0)."""
        side = self.size if self.effective is None else self.effective
        return side is None or side >= min(input_size)


@dataclass(frozen=True)
class EffectiveField:
    """The effective receptive field, to be drawn around a cell's box; lengths in cells.

    Attributes:
        side: length of its side.
        center: coordinate of its centre, from the upper left corner of the cell's place in the grid.
        grid: (H, W) of the feature map.
        offset: of the boxes from their cells' places, see `CellGrid`.
    """

    side: float
    center: float
    grid: tuple[int, int]
    offset: float = 0.0

    def surround(self, cell: Sequence[int], box: Sequence[float]) -> tuple[float, float, float, float]:
        """Return the field (x0, y0, x1, y1) of a cell (row, col), with its box, within the model's view."""
        x0, x1 = self._extend(cell[1], self.grid[1], box[0], box[2])
        y0, y1 = self._extend(cell[0], self.grid[0], box[1], box[3])
        return x0, y0, x1, y1

    def _extend(self, index: int, count: int, start: float, stop: float) -> tuple[float, float]:
        shift = min(max(index + self.offset, 0.0), count - 1.0) - index
        first = max(min(self.center - self.side / 2, shift), -index)
        last = min(max(self.center + self.side / 2, shift + 1.0), count - index)
        return start + (first - shift) * (stop - start), start + (last - shift) * (stop - start)


def list_evaluation(
    evaluation: Mapping[str, Any],
    model: Path,
    receptive_field: Mapping[str, Any] | None = None,
    *,
    export_of: str | None = None,
) -> list[tuple[str, str]]:
    """Return (name, value) pairs on a model's evidence: what was measured, and how to measure the rest.

    Args:
        evaluation: the document; empty for a model that was never measured.
        model: the model's file.
        receptive_field: `Metadata.receptive_field`, to tell what a cell sees; None leaves that out.
        export_of: the checkpoint to measure instead, see `Metadata.find_checkpoint`; None measures the file itself.
    """
    target = export_of or str(model)
    command = shlex.join(["opal-deploy", "evaluate", "DATA", "--model", target, "--faithfulness", "--record"])
    if export_of is not None:
        command += f", and export {export_of} again"
    if not evaluation:
        text = (
            f"not yet, so it is unknown whether the boxes show what drives the prediction; measure it with: {command}"
        )
        return [("measured", text)]
    measured = check_document(evaluation, Evaluation, "evaluation")
    shares = _describe_pointing(measured.pointing_game or PointingGame())
    if measured.pointing_game is None:
        shares = "not measured (no boxes, masks or parts)"
    removal = f"not measured; measure it with: {command}"
    if measured.faithfulness is not None:
        removal = _describe_faithfulness(measured.faithfulness)
    rows = [("where it lies", shares), ("if removed", removal)]
    field = ReceptiveField.from_dict(receptive_field or {})
    if field is not None and field.effective is not None:
        rows.append(("what a cell sees", f"{field.effective} pixels around its own {field.stride}"))
    other = "" if measured.model == model.name else f" with {measured.model}"
    cropped = " cropped to boxes" if measured.boxes else ""
    source = (
        f"accuracy {100 * measured.accuracy:.1f} %{other} on {measured.images:,} {measured.split} images of "
        f"{measured.data}{cropped}, {measured.when[:10]}, opal-deploy {measured.opal_deploy}"
    )
    return [(name, value) for name, value in (*rows, ("measured", source)) if value]


def _describe_pointing(game: PointingGame) -> str:
    shares = ((getattr(game, key), title) for key, title in _SHARES)
    return ", ".join(
        f"{100 * share.mean:.0f} % {title} (random cells {100 * share.random:.0f} %)"
        for share, title in shares
        if share is not None
    )


def _describe_faithfulness(measured: Faithfulness) -> str:
    removal = measured.removal[0]
    random = removal.changed_random
    beside = "" if random is None else f", without as many random cells {100 * random:.0f} %"
    # two parts that each tell a class: without one of them the other is enough
    enough = "; the rest of the image is mostly enough" if removal.changed < _FEW else ""
    return (
        f"without its cells {100 * removal.changed:.0f} % of {measured.images} answers change{beside} "
        f"({removal.fill}){enough}"
    )
