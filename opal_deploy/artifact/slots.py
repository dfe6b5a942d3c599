"""The slots of a model's classes, and the constants of the head that follow from them.

Every class has m slots; the channels of class c are c*m ... c*m+m-1. A slot that `opal-deploy edit` dropped keeps its
channel and its part in the softmax (paper, Eq. 2), but its score (Eq. 3) is set to 0, and its class's anchor (Eq. 1)
is 1/sqrt(m_c) on the m_c slots that are left. The contributions of these still add up to the cosine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    # the command line reads metadata without numpy, which is imported where it is used
    import numpy as np
    from numpy.typing import NDArray

# inside both logarithms of the kl distance, as the authors do
KL_EPSILON = 1e-8


@dataclass(frozen=True)
class Slots:
    """The slots of C classes.

    Attributes:
        num_classes: C.
        per_class: m, dropped slots included.
        dropped: channels of dropped slots, ascending; at least one slot of every class is left.
    """

    num_classes: int
    per_class: int
    dropped: tuple[int, ...] = ()

    @cached_property
    def kept(self) -> NDArray[np.bool_]:
        """Whether a slot is left: bool [C, m]."""
        import numpy as np

        kept = np.ones(self.num_classes * self.per_class, np.bool_)
        kept[list(self.dropped)] = False
        return kept.reshape(self.num_classes, self.per_class)

    @cached_property
    def counts(self) -> NDArray[np.int64]:
        """m_c, the number of slots that each class has left: int64 [C]."""

        counts: NDArray[np.int64] = self.kept.sum(axis=1)
        return counts

    @cached_property
    def anchors(self) -> NDArray[np.float64]:
        """The entries of each class's anchor in its own block: float64 [C, m], 1/sqrt(m_c), 0 for dropped slots."""
        import numpy as np

        anchors: NDArray[np.float64] = self.kept / np.sqrt(self.counts)[:, None]
        return anchors

    def of_class(self, class_id: int) -> list[int]:
        """Return the slots that a class has left, ascending."""
        import numpy as np

        return [int(slot) for slot in np.flatnonzero(self.kept[class_id])]

    def channels(self, class_id: int) -> NDArray[np.int64]:
        """Return the channels of the slots that a class has left: int64 [m_c]."""
        import numpy as np

        return np.flatnonzero(self.kept[class_id]) + class_id * self.per_class

    def drop(self, channels: Sequence[int]) -> Slots:
        """Return the slots without these channels, too."""
        return Slots(self.num_classes, self.per_class, tuple(sorted({*self.dropped, *channels})))

    def head_constant(self, distance: str) -> NDArray[np.float64]:
        """Return what the head multiplies with or subtracts from the embedding to get a distance.

        For `l2` the anchors' entries, and for `kl` their logarithms: float64 [C], as the sum over a block comes first.
        For the other distances the anchors, float64 [C, m].
        """
        import numpy as np

        if distance not in ("l2", "kl"):
            return self.anchors
        entries: NDArray[np.float64] = 1.0 / np.sqrt(self.counts)
        return np.log(entries + KL_EPSILON) if distance == "kl" else entries
