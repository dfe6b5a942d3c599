"""The order in which a report opens: typical answers first, right and wrong ones in the proportion of all."""

from __future__ import annotations

import math
from array import array
from statistics import median

from opal_deploy.visualization.legend import format_number

_RIGHT, _WRONG, _UNLABELLED = range(3)
_NAMES = {_RIGHT: "right", _WRONG: "wrong", _UNLABELLED: "without a label"}


class TypicalOrder:
    """Margins and verdicts of a report's images, nine bytes each, and the order that they give.

    Answers are of three kinds: right, wrong, and without a label. Each kind is sorted by the distance of its margins to
    its own median, for a typical wrong answer is not one with the margin of right ones; the kinds are then mixed so
    that every part of the order has them in the same proportion. Images without a margin come last.
    """

    def __init__(self) -> None:
        """Start with no image."""
        self._margins, self._kinds = array("d"), array("B")

    def add(self, margin: float | None, is_right: bool | None) -> None:
        """Add the next image.

        Args:
            margin: the margin; None for an image without one.
            is_right: whether the predicted class is the image's label; None where it has none.
        """
        self._margins.append(math.nan if margin is None else margin)
        self._kinds.append(_UNLABELLED if is_right is None else _RIGHT if is_right else _WRONG)

    def positions(self) -> list[int]:
        """Return the images' positions, 0, 1, ... as they were added, in the typical order."""
        mixed = []
        for kind, group in self._groups().items():
            middle = self._median(group)
            group.sort(key=lambda position: (round(abs(self._margins[position] - middle), 6), position))
            # the k-th of n stands at the share (k + 1/2) / n of the whole order
            mixed += [((k + 0.5) / len(group), kind, position) for k, position in enumerate(group)]
        mixed.sort()
        rest = (position for position, margin in enumerate(self._margins) if math.isnan(margin))
        return [*(position for _, _, position in mixed), *rest]

    def describe(self) -> str:
        """Return the order in a sentence or two; empty where no image has a margin."""
        groups = self._groups()
        middles = {kind: format_number(self._median(group)) for kind, group in groups.items()}
        if not groups:
            return ""
        if len(groups) == 1:
            (middle,) = middles.values()
            return f"Typical answers first, those whose margin is nearest to the median, {middle}."
        kinds = [f"{len(groups[kind]):,} {_NAMES[kind]} (median margin {middle})" for kind, middle in middles.items()]
        listed = f"{', '.join(kinds[:-1])} and {kinds[-1]}"
        return f"Typical answers first: {listed}, mixed in this proportion; of each, the nearest to its median first."

    def _groups(self) -> dict[int, list[int]]:
        groups: dict[int, list[int]] = {_RIGHT: [], _WRONG: [], _UNLABELLED: []}
        for position, (margin, kind) in enumerate(zip(self._margins, self._kinds, strict=True)):
            if not math.isnan(margin):
                groups[kind].append(position)
        return {kind: group for kind, group in groups.items() if group}

    def _median(self, group: list[int]) -> float:
        return median(self._margins[position] for position in group)
