"""Shifts of a model's answers from its baseline: what each comparison found, in numbers and in words.

A shift also has a size from 0, its `effect`, since with enough images any difference is significant: the distance of
the distributions, or half of Cohen's h of two shares, |asin(sqrt(p)) - asin(sqrt(q))|. 0.1 is small by either.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from opal_deploy.artifact.baseline import PLACES, QUANTITIES, Observations

Kind = Literal[
    "label", "cosine", "margin", "norm", "shared_cells", "ood_score", "score", "contribution", "place"
]  # fmt: skip
KINDS: tuple[Kind, ...] = get_args(Kind)
# default limits of a shift: the false discovery rate, and the effect
MAX_Q, MIN_EFFECT = 0.01, 0.1
_WORDS: dict[str, str] = {
    "cosine": "cosine", "margin": "margin", "norm": "norm of the scores", "ood_score": "OOD score",
    "shared_cells": "share of slots that look at the same cell", "score": "score", "contribution": "contribution",
}  # fmt: skip
# families of tests: labels, quantities of images, slots
FAMILIES = 3


def kolmogorov_smirnov(distance: float, first: float, second: float) -> float:
    """Return the two-sided p-value of the largest difference, 0 ... 1, of two samples' distribution functions.

    Asymptotic, with Stephens' correction for samples of small sizes `first` and `second` (1970).
    """
    from scipy.stats import kstwobign

    return float(kstwobign.sf(_scale(first, second) * distance))


def _scale(first: float, second: float) -> float:
    size = math.sqrt(first * second / (first + second))
    return size + 0.12 + 0.11 / size


class Share(NamedTuple):
    """Cases among trials; for pooled slots both may be fractions."""

    cases: float
    trials: float

    @property
    def value(self) -> float:
        """Cases per trial."""
        return self.cases / self.trials


@dataclass(frozen=True)
class Shift:
    """One comparison with the baseline; `Limits` decides whether it is a shift.

    Attributes:
        kind: what was compared.
        class_id, slot: of a label, or of a slot's score, contribution or place; None for quantities of all images.
        pooled: whether the slot stands for all slots of the classes that the baseline pools; its own change is largest.
        p, q: p-value, and the value adjusted for all tests of the comparison.
        effect: size of the difference, as the module's text defines it.
        rose: whether values rose, or the share did.
        place: index into `PLACES`; only of a place.
        value: the value below or above which the samples differ most; only of a distribution.
        before, after: share of the answers with the class or place, or beyond `value` (below it if values fell).
        answers_before, answers_after: the answers that were compared.
    """

    kind: Kind
    p: float
    effect: float
    rose: bool
    before: float
    after: float
    answers_before: int
    answers_after: int
    class_id: int | None = None
    slot: int | None = None
    pooled: bool = False
    place: int | None = None
    value: float | None = None
    q: float = 1.0

    def describe(self, class_names: Sequence[str]) -> str:
        """Return one line for people."""
        name = "" if self.class_id is None else class_names[self.class_id]
        after, before = f"{self.after:.0%} of {self.answers_after:,}", f"{self.before:.0%} of {self.answers_before:,}"
        shares = f"{after} answers, {before} before"
        if self.kind == "label":
            return f"{name} is predicted {'more' if self.rose else 'less'} often: {shares}"
        subject = "" if self.slot is None else f"slot {self.slot} of {name}: "
        if self.pooled:
            subject = f"slots of rarely predicted classes, most of all slot {self.slot} of {name}: "
        if self.place is not None:
            moved = "moved to" if self.rose else "left"
            return f"{subject[:-2]} {moved} the {PLACES[self.place]}: {shares}"
        change, side = ("rose", "above") if self.rose else ("fell", "below")
        return f"{subject}{_WORDS[self.kind]} {change}: {after} answers {side} {self.value:.3g}, {before} before"

    def find_cases(self, observations: Observations) -> NDArray[np.bool_]:
        """Return which of N images show the shift: its class, its place, or a value beyond `value`."""
        attribute = {"score": "scores", "contribution": "contributions", "place": "places"}.get(self.kind, self.kind)
        cases = np.ones(len(observations), np.bool_)
        if self.kind != "label":
            values = getattr(observations, attribute)
            values = values if self.slot is None else values[:, self.slot]
            if self.place is not None:
                cases = values == self.place
            else:
                cases = values > self.value if self.rose else values < self.value
        return cases if self.class_id is None else cases & (observations.class_ids == self.class_id)

    def to_dict(self, class_names: Sequence[str]) -> dict[str, Any]:
        """Return the shift for JSON, with the names of its class and place, and in words."""
        label = None if self.class_id is None else class_names[self.class_id]
        place = None if self.place is None else PLACES[self.place]
        return {**asdict(self), "label": label, "place": place, "text": self.describe(class_names)}


class Suggestion(NamedTuple):
    """The likely cause of a pattern of shifts, and what to do about it; `section` of docs/howto/drift.md says more."""

    text: str
    advice: str
    section: str


def interpret(shifts: Sequence[Shift]) -> list[Suggestion]:
    """Return the likely cause of a pattern of shifts."""
    kinds = {shift.kind for shift in shifts}
    fell, rose = ({shift.kind for shift in shifts if shift.rose is up} for up in (False, True))
    found = []
    if "ood_score" in rose:
        found.append(Suggestion(
            "Pictures are less like the training images: other objects or scenes, or another picture quality.",
            "Look at the images with the highest OOD score; if they keep coming, make them a class of their own.",
            "OpalUnknownImages",
        ))  # fmt: skip
    if "norm" in fell or "shared_cells" in rose:
        found.append(Suggestion(
            "Evidence is weaker in all classes, as with blur, compression, another exposure or another lens.",
            "Compare pictures with earlier ones, and repair the camera or train with such pictures.",
            "OpalEvidenceChanged",
        ))  # fmt: skip
    elif kinds & {"score", "contribution"}:
        found.append(Suggestion(
            "Single slots match more weakly or strongly: what they look at may be covered, missing or look different.",
            "Compare the boxes of these slots with earlier ones.",
            "OpalEvidenceChanged",
        ))  # fmt: skip
    if "place" in kinds:
        found.append(Suggestion(
            "Slots look elsewhere: another framing, or something new at that place.",
            "Remove what is new or crop it away, drop the slot with edit, or train with --keep-off.",
            "OpalSlotsMoved",
        ))  # fmt: skip
    if fell & {"cosine", "margin"}:
        text = "Answers are less certain; expect more wrong ones."
        found.append(Suggestion(text, "Label a hundred images and evaluate.", "OpalConfidenceChanged"))
    elif rose & {"cosine", "margin"}:
        text = "Answers are more certain, as with many similar pictures."
        found.append(Suggestion(text, "Check for many pictures of one object.", "OpalConfidenceChanged"))
    if "label" in kinds:
        rest = "" if kinds - {"label"} else " How the model finds its evidence has not changed."
        found.append(Suggestion(
            f"Class shares have changed.{rest}",
            "If a season explains it, compare with last month (--against); else look at images of the class that grew.",
            "OpalClassShares",
        ))  # fmt: skip
    return found


@dataclass(frozen=True)
class Limits:
    """The limits from which a difference is a shift: q at most `max_q`, and an effect of at least `min_effect`."""

    max_q: float = MAX_Q
    min_effect: float = MIN_EFFECT

    def select(self, tests: Sequence[Shift]) -> list[Shift]:
        """Return the shifts among all tests of a comparison, the smallest p-value first, then the largest effect."""
        found = [test for test in tests if test.q <= self.max_q and test.effect >= self.min_effect]
        return sorted(found, key=lambda shift: (shift.p, -shift.effect))

    def smallest_shift(self, tests: Sequence[Shift], answers: Share) -> float:
        """Return the distance from which the distribution of one quantity of all images would have been a shift.

        `answers` are the images compared (cases) and those of the baseline (trials).
        """
        from scipy.stats import kstwobign

        quantities = sum(test.kind in QUANTITIES for test in tests)
        # the smallest of the p-values of a family of a few tests
        p = self.max_q / (FAMILIES * max(quantities, 1))
        return max(min(float(kstwobign.isf(p)) / _scale(*answers), 1.0), self.min_effect)
