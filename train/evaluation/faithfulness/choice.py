"""A few pictures for what is too slow to do with all: as evenly over the classes as they allow, the same every time."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from opal_deploy.train.data.samples import Sample


def choose(samples: list[Sample], limit: int) -> list[int]:
    """Indices into `samples`, rising: `limit` of them, or all if there are no more.

    No class has two pictures more than another that has some left; within a class they lie evenly over its pictures in
    their order.
    """
    of_class: dict[int, list[int]] = defaultdict(list)
    for index, sample in enumerate(samples):
        of_class[sample.label].append(index)
    shares = dict.fromkeys(sorted(of_class), 0)
    left = min(limit, len(samples))
    while left:
        open_classes = [label for label in shares if shares[label] < len(of_class[label])]
        # fewer pictures than classes: classes that lie evenly over all of them
        if left < len(open_classes):
            open_classes = [open_classes[i] for i in _evenly(len(open_classes), left)]
        for label in open_classes:
            shares[label] += 1
        left -= len(open_classes)
    chosen = [of_class[label][i] for label, share in shares.items() for i in _evenly(len(of_class[label]), share)]
    return sorted(chosen)


def _evenly(number: int, share: int) -> list[int]:
    """`share` different places of `number`."""
    return [int(place) for place in (np.arange(share) * number) // max(share, 1)]
