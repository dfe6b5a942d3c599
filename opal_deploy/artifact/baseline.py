"""A model's baseline: its answers to validation images, with which `drift` and `--unknown` compare new ones.

Distributions are kept as quantiles, and places as the share of answers in each ninth of the image, so that the whole
takes tens of bytes per slot. A class that was predicted for fewer than `MIN_IMAGES` images has no slots of its own: the
slots of all such classes are pooled, since quantiles of a handful of values say nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Annotated, Any

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from opal_deploy.artifact.class_map import ClassMap
from opal_deploy.artifact.documents import AtLeastOne, Count, Number, check_document
from opal_deploy.errors import ArtifactError

# answers with a class from which its slots have quantiles of their own
MIN_IMAGES = 5
# levels of the quantiles of a slot, and of those of all images
SLOT_LEVELS = (0.05, 0.25, 0.5, 0.75, 0.95)
LEVELS = tuple(step / 20 for step in range(21))
# side of the coarse grid of places
_SIDE = 3
PLACES = (
    "upper left corner", "upper edge", "upper right corner",
    "left edge", "centre", "right edge",
    "lower left corner", "lower edge", "lower right corner",
)  # fmt: skip
# quantities of an image, by their names in `Observations`
QUANTITIES = ("cosine", "margin", "norm", "shared_cells", "ood_score")
# significant digits of a stored number
DIGITS = 4
_MAX_STORED = 1_000

_Quantiles = Annotated[tuple[Number, ...], Meta(min_length=len(LEVELS), max_length=len(LEVELS))]
_SlotQuantiles = Annotated[tuple[Number, ...], Meta(min_length=len(SLOT_LEVELS), max_length=len(SLOT_LEVELS))]
_Share = Annotated[float, Meta(ge=0, le=1)]


@dataclass(frozen=True)
class Observations:
    """The part of a model's answers for N images that is compared with a baseline.

    Attributes:
        class_ids: int64 [N], the predicted classes.
        cosine, margin, norm: float64 [N]; NaN where not known. `norm` is |s| over all K channels.
        shared_cells: float64 [N], share of the predicted class's slots that share their cell with another, 0 ... 1.
        ood_score: float64 [N]; NaN where not known.
        scores: float64 [N, m], of the predicted class's slots; NaN for dropped ones.
        contributions: float64 [N, m]; NaN for dropped slots, and where the distance is not a sum over slots.
        places: int64 [N, m], index into `PLACES`; -1 for dropped slots.
    """

    class_ids: NDArray[np.int64]
    cosine: NDArray[np.float64]
    margin: NDArray[np.float64]
    norm: NDArray[np.float64]
    shared_cells: NDArray[np.float64]
    ood_score: NDArray[np.float64]
    scores: NDArray[np.float64]
    contributions: NDArray[np.float64]
    places: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.class_ids)

    def select(self, rows: NDArray[Any]) -> Observations:
        """Return the observations of some images, by indices or by bool [N]."""
        return Observations(**{field.name: getattr(self, field.name)[rows] for field in fields(self)})

    @staticmethod
    def concatenate(parts: Sequence[Observations]) -> Observations:
        """Return the observations of consecutive batches of one model as one."""
        names = [field.name for field in fields(Observations)]
        return Observations(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in names})


def find_places(cells: NDArray[np.int64], grid: tuple[int, int]) -> NDArray[np.int64]:
    """Return the places, indices into `PLACES`, of cells [..., 2] (row, col) of a feature map (H, W)."""
    ninths = [cells[..., axis] * _SIDE // grid[axis] for axis in range(2)]
    places: NDArray[np.int64] = ninths[0] * _SIDE + ninths[1]
    return places


def share_cells(cells: NDArray[np.int64], kept: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Return the share of slots that share their cell with another: float64 [N].

    Args:
        cells: [N, m], flat cells.
        kept: [N, m], False for dropped slots, which do not count.
    """
    # dropped slots get cells of their own
    numbered = np.where(kept, cells, -1 - np.arange(cells.shape[1]))
    same = (numbered[:, :, None] == numbered[:, None, :]).sum(axis=2) > 1
    shares: NDArray[np.float64] = same.sum(axis=1) / kept.sum(axis=1)
    return shares


@dataclass(frozen=True)
class SlotBaseline:
    """The distribution of one slot, or of pooled ones, over the answers with its class.

    Attributes:
        images: number of answers; for pooled slots, summed over slots.
        score, contribution: quantiles at `SLOT_LEVELS`; contribution is empty where the distance is not a sum.
        places: share of the answers with the slot's cell in each of `PLACES`; adds up to 1.
        share: mean share of the cosine that the slot contributes, 0 ... 1.
    """

    images: AtLeastOne
    score: _SlotQuantiles
    contribution: Annotated[tuple[Number, ...], Meta(max_length=len(SLOT_LEVELS))]
    places: Annotated[tuple[_Share, ...], Meta(min_length=len(PLACES), max_length=len(PLACES))]
    share: Number | None

    def __post_init__(self) -> None:
        if len(self.contribution) not in (0, len(SLOT_LEVELS)):
            raise ValueError(f"expected {len(SLOT_LEVELS)} quantiles of contributions, or none")


@dataclass(frozen=True)
class Baseline:
    """How a model answered N validation images.

    Attributes:
        images: N.
        split: the data set's split: `val`, or another that was not trained on.
        stride: input pixels per cell.
        classes: number of images with each predicted class, [C].
        quantiles: of each of `QUANTITIES` that is known, at `LEVELS`.
        slots: by `ClassMap.entries` (OPAL's channels), of the classes predicted for at least `MIN_IMAGES` images.
        pooled: of the slots of all other classes; None if there are none.
        ood_score: the images' values in ascending order, or 1,000 of them at even ranks, from which a threshold is
            chosen; empty where not known.
        background: out-of-distribution images that the OOD score was computed with.
    """

    images: AtLeastOne
    split: str
    stride: AtLeastOne
    classes: tuple[Count, ...]
    quantiles: Mapping[str, _Quantiles]
    slots: Mapping[Count, SlotBaseline] = field(default_factory=dict)
    pooled: SlotBaseline | None = None
    ood_score: tuple[Number, ...] = ()
    background: Count = 0

    def __post_init__(self) -> None:
        if sum(self.classes) != self.images:
            raise ValueError(f"{self.images} images, but {sum(self.classes)} of its classes")
        if len(self.ood_score) not in (0, len(_stored_ranks(self.images))):
            raise ValueError(f"{len(self.ood_score)} OOD scores do not fit {self.images} images")

    @staticmethod
    def measure(
        observations: Observations, split: str, stride: int, class_map: ClassMap, background: int = 0
    ) -> Baseline:
        """Return the baseline of the answers to N validation images, N at least 1."""
        counts = np.bincount(observations.class_ids, minlength=class_map.num_classes)
        quantiles = {}
        for name in QUANTITIES:
            values = getattr(observations, name)
            if not np.isnan(values).any():
                quantiles[name] = _round(np.quantile(values, LEVELS))
        slots: dict[int, SlotBaseline] = {}
        for class_id in np.flatnonzero(counts >= MIN_IMAGES).tolist():
            own = observations.select(observations.class_ids == class_id)
            for slot in class_map.slots(class_id):
                if (measured := _measure_slots(own, slice(slot, slot + 1))) is not None:
                    slots[int(class_map.entries[class_id, slot])] = measured
        few = observations.select((counts < MIN_IMAGES)[observations.class_ids])
        pooled = _measure_slots(few, slice(None)) if len(few) else None
        ood_score: tuple[float, ...] = ()
        if "ood_score" in quantiles:
            ranks = _stored_ranks(len(observations))
            ood_score = tuple(round(value, 6) for value in np.sort(observations.ood_score)[ranks - 1].tolist())
        images = len(observations)
        classes = tuple(counts.tolist())
        return Baseline(images, split, stride, classes, quantiles, slots, pooled, ood_score, background)

    def find_slot(self, entry: int) -> SlotBaseline | None:
        """Return the distribution of a slot by its `ClassMap.entries`, or the pooled one; None if there is neither."""
        return self.slots.get(entry, self.pooled)

    def describe(self) -> list[str]:
        """Return lines for a person: the number of images, usual values, and the pooled slots."""
        low, middle, high = (LEVELS.index(level) for level in (0.05, 0.5, 0.95))
        usual = [
            f"{name.replace('_', ' ')} {values[middle]:.3g} ({values[low]:.3g} to {values[high]:.3g})"
            for name, values in self.quantiles.items()
        ]
        few = sum(count < MIN_IMAGES for count in self.classes)
        pooled = f"; the slots of {few} classes with fewer than {MIN_IMAGES} images are pooled" if few else ""
        counts = f"{min(self.classes):,} to {max(self.classes):,} per predicted class"
        background = f"; OOD score knows {self.background:,} background images" if self.background else ""
        return [
            f"{self.images:,} {self.split} images, {counts}{pooled}{background}",
            f"median (and 90 % of images) of {', '.join(usual)}",
        ]

    def choose_threshold(self, rate: float) -> float | None:
        """Return the OOD score that an image exceeds with a probability of at most `rate`; None for too few images.

        Split conformal prediction: with n + 1 exchangeable images, the new one's score is at most the k-th smallest of
        the others with probability k / (n + 1) (Vovk, Gammerman and Shafer, "Algorithmic learning in a random world",
        2005).
        """
        rank = math.ceil((self.images + 1) * (1 - rate) - 1e-9)
        place = int(np.searchsorted(_stored_ranks(self.images), rank))
        return self.ood_score[place] if place < len(self.ood_score) else None

    @property
    def smallest_rate(self) -> float:
        """The smallest rate, in tenths of a percent, for which `choose_threshold` returns an OOD score."""
        return math.ceil(1000 / (self.images + 1)) / 1000

    def to_dict(self) -> dict[str, Any]:
        """Return the baseline for JSON, which `from_dict` reads.

        The slots are lists by attribute, with their channels first, so that the keys are not repeated for each.
        """
        document = asdict(self)
        slots = document["slots"]
        columns = {name: [slot[name] for slot in slots.values()] for name in _SLOT_FIELDS}
        return {**document, "slots": {"channel": list(slots), **columns}}

    @staticmethod
    def from_dict(raw: Mapping[str, Any]) -> Baseline | None:
        """Return the baseline that `to_dict` wrote, None for an empty dictionary; ArtifactError for any other."""
        if not raw:
            return None
        try:
            columns = check_document(raw.get("slots"), dict[str, tuple[Any, ...]], "baseline.slots")
            rows = zip(*(columns[name] for name in ("channel", *_SLOT_FIELDS)), strict=True)
            slots = {channel: dict(zip(_SLOT_FIELDS, values, strict=True)) for channel, *values in rows}
            return check_document({**raw, "slots": slots}, Baseline, "baseline")
        except (ArtifactError, KeyError, ValueError, TypeError) as error:
            text = error if isinstance(error, ArtifactError) else f"baseline.slots: {error}"
            raise ArtifactError(f"{text}; measure it again with `opal-deploy evaluate --record`") from None


_SLOT_FIELDS = tuple(SlotBaseline.__dataclass_fields__)


def _stored_ranks(images: int) -> NDArray[np.int64]:
    """Return the ranks, from 1, of the values of OOD score that a baseline of so many images keeps."""
    kept = min(images, _MAX_STORED)
    return -(-np.arange(1, kept + 1) * images // kept)


def _measure_slots(observations: Observations, slots: slice) -> SlotBaseline | None:
    """Return the distribution of some slots over all observations; None if they are dropped."""
    scores = observations.scores[:, slots]
    kept = ~np.isnan(scores)
    if not kept.any():
        return None
    contributions, places = observations.contributions[:, slots][kept], observations.places[:, slots][kept]
    share = None
    if not (known := ~np.isnan(contributions)).all():
        contributions = contributions[known]
    else:
        cosines = np.broadcast_to(observations.cosine[:, None], kept.shape)[kept]
        share = _round(np.array([np.mean(contributions / cosines)]))[0] if (cosines > 0).all() else None
    return SlotBaseline(
        int(kept.sum()),
        _round(np.quantile(scores[kept], SLOT_LEVELS)),
        _round(np.quantile(contributions, SLOT_LEVELS)) if len(contributions) else (),
        _round(np.bincount(places, minlength=len(PLACES)) / len(places)),
        share,
    )


def _round(values: NDArray[Any]) -> tuple[float, ...]:
    """Return numbers with few digits: more would only take room."""
    return tuple(float(f"{value:.{DIGITS}g}") for value in values)
