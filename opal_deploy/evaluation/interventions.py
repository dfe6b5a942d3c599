"""Take parts of drawn creatures away, and compare the evidence with what that changes (`--interventions`).

The protocol is FunnyBirds' (Hesse, Schaub-Meyer and Roth, ICCV 2023), with the generated creatures, of which every part
can be left out while all else stays. Each creature is drawn with each of the 32 subsets of its five parts, so what a
part is worth to the network is known, not estimated. The importance that an explanation gives a part is the sum of its
cells whose centre lies in the part's box. Parts with at least half of an even share of the sum over parts count as
named.

Measures, each the mean over creatures:

    single_deletion         Spearman's correlation of importance with the drop of the logit without the part, -1 ... 1
    deletion                the answer changes without the named parts
    preservation            the answer stays with the named parts alone
    sufficient              share of named parts in a smallest set of parts that keeps the answer; of several the best
    target_sensitivity      the evidence of another class lies on the special part that the creature shares with it,
                            rather than on the one that it shares with a third class; None where no classes do
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from opal_deploy.artifact.heads import find_contributions, find_values
from opal_deploy.artifact.metadata import Metadata
from opal_deploy.artifact.outputs import Outputs
from opal_deploy.errors import UsageError
from opal_deploy.evaluation.metrics import figures_to_dict, format_columns, format_percent
from opal_deploy.evaluation.rankings import HeatMap
from opal_deploy.logs import Progress, no_progress
from opal_deploy.predict.prepare import prepare
from opal_deploy.predict.types import InferenceOptions, Pixels
from opal_deploy.preprocess.geometry import Geometry
from opal_deploy.runtime.session import Session
from opal_deploy.sources.image import InputImage
from opal_deploy.statistics import Mean, mean_with_interval
from opal_deploy.synthetic.creatures import VARIANTS, Species, draw_creature, list_species

EVIDENCE, RANDOM_HEAD, GRAD_CAM = "evidence", "random head", "Grad-CAM"
PARTS = tuple(VARIANTS)
# every set of parts that are left, the whole creature first
_SUBSETS = [
    frozenset(parts) for size in range(len(PARTS), -1, -1) for parts in itertools.combinations(range(len(PARTS)), size)
]
# a named part has this share of an even one
_NAMED = 0.5
# first word of the seeds: a stream of its own
_STREAM = 17

# relevances, float64 [H * W], of the first of some images for a class
Explain = Callable[[Pixels, Outputs, int], NDArray[np.float64]]


@dataclass(frozen=True)
class Explained:
    """The measures of one way to explain; see this module."""

    method: str
    single_deletion: Mean
    deletion: Mean
    preservation: Mean
    sufficient: Mean
    target_sensitivity: Mean | None


@dataclass(frozen=True)
class Interventions:
    """The figures of `--interventions`.

    Attributes:
        accuracy: share of correct answers on the whole creatures, 0 ... 1.
        same_answer: share of answers that stay in front of another background.
    """

    images: int
    seed: int
    accuracy: float
    same_answer: Mean
    explained: list[Explained]

    def to_dict(self) -> dict[str, Any]:
        """Return the figures for JSON."""
        return figures_to_dict(self)


def measure_interventions(
    session: Session,
    size: tuple[int, int],
    images: int,
    *,
    random_head: Session | None = None,
    heat_map: HeatMap | None = None,
    seed: int = 0,
    progress: Progress = no_progress,
) -> Interventions:
    """Draw creatures of the model's species with parts left out, and measure explanations; see this module.

    Args:
        session: of a model whose classes are the species of a generated data set.
        size: (H, W) of the drawn images, as in training.
        random_head: the same network with another head, whose evidence is a control.
        heat_map: Grad-CAM, another control, and all there is for a model without prototypes.

    Raises:
        UsageError: the classes are not a generated data set's.
    """
    metadata = session.metadata
    kinds = _list_kinds(metadata)
    methods: dict[str, Explain] = {}
    if metadata.evidence == "exact":
        methods[EVIDENCE] = _explain_by_slots(metadata)
    if random_head is not None:
        methods[RANDOM_HEAD] = _explain_by_session(random_head)
    if heat_map is not None:
        methods[GRAD_CAM] = _explain_by_map(heat_map)
    found: dict[str, list[tuple[float, ...]]] = {name: [] for name in methods}
    correct, same = [], []
    for number in range(images):
        label, stream = number % len(kinds), (_STREAM, seed, number)
        drawn = [
            draw_creature(
                kinds[label],
                np.random.default_rng(stream),
                size,
                hide=[part for index, part in enumerate(PARTS) if index not in left],
            )
            for left in _SUBSETS
        ]
        moved = draw_creature(kinds[label], np.random.default_rng(stream), size, scene=np.random.default_rng(number))
        pixels, geometry = _prepare([creature.image for creature in [*drawn, moved]], metadata)
        outputs = session.run(pixels)
        answers = outputs.logits.argmax(axis=1)
        predicted = int(answers[0])
        correct.append(predicted == label)
        same.append(answers[-1] == predicted)
        on_parts = _find_cells(drawn[0].parts, geometry, metadata)
        rivals = _choose_rivals(kinds, label, np.random.default_rng((*stream, 1)))
        for name, explain in methods.items():
            weigh = partial(_weigh, explain, pixels, outputs, on_parts)
            measures = _compare(weigh(predicted), outputs.logits[:-1, predicted], answers[:-1] == predicted)
            found[name].append((*measures, _compare_rivals(weigh, rivals)))
        progress(number + 1, images, "taking parts away")
    explained = [Explained(name, *map(_mean_of_known, np.array(rows, np.float64).T)) for name, rows in found.items()]
    return Interventions(images, seed, float(np.mean(correct)), mean_with_interval(same), explained)


def _mean_of_known(values: NDArray[np.float64]) -> Any:
    known = values[np.isfinite(values)]
    return mean_with_interval(known) if len(known) else None


def _list_kinds(metadata: Metadata) -> tuple[Species, ...]:
    names = tuple(metadata.class_names)
    try:
        kinds = list_species(len(names))
    except UsageError:
        kinds = ()
    if names != tuple(kind.name for kind in kinds):
        raise UsageError(
            f"--interventions draws the creatures of `opal-deploy demo`; the classes are {', '.join(names[:3])}, ..."
        )
    return kinds


def _prepare(images: Sequence[Pixels], metadata: Metadata) -> tuple[Pixels, Geometry]:
    ready = [prepare(InputImage(None, image), metadata.input_size, InferenceOptions()) for image in images]
    geometry = ready[0].geometry
    assert geometry is not None  # drawn images are readable
    return np.stack([each.pixels for each in ready if each.pixels is not None]), geometry


def _find_cells(parts: Any, geometry: Geometry, metadata: Metadata) -> NDArray[np.float64]:
    """Return whether each part's box holds the centre of each cell, 0 or 1: float64 [parts, H * W]."""
    x, y = geometry.cell_centres(metadata.grid).T
    boxes = [parts[part].box for part in PARTS]
    return np.array([(x >= x0) & (x <= x1) & (y >= y0) & (y <= y1) for x0, y0, x1, y1 in boxes], np.float64)


def _weigh(
    explain: Explain, pixels: Pixels, outputs: Outputs, on_parts: NDArray[np.float64], class_id: int
) -> NDArray[np.float64]:
    """Return the importance of each part for a class, [parts], on the first of the images: the whole creature."""
    importance: NDArray[np.float64] = on_parts @ explain(pixels, outputs, class_id)
    return importance


def _explain_by_slots(metadata: Metadata) -> Explain:
    """Return relevances: the contributions of a class's slots, at their cells."""

    def explain(_: Pixels, outputs: Outputs, class_id: int) -> NDArray[np.float64]:
        class_map, ids = metadata.class_map, np.array([class_id])
        if outputs.scores is None or outputs.argmax is None:
            raise ValueError("a model without slots has no cells")
        values = class_map.take(find_values(outputs.scores[:1], metadata), ids)
        # distances other than l2 have no contributions that add up: the values themselves
        parts = find_contributions(values, ids, metadata) if metadata.distance in ("", "l2") else values
        cells = class_map.take(outputs.argmax[:1], ids)[0]
        relevance = np.zeros(metadata.grid[0] * metadata.grid[1])
        np.add.at(relevance, cells[class_map.kept[class_id]], np.asarray(parts)[0][class_map.kept[class_id]])
        return relevance

    return explain


def _explain_by_session(session: Session) -> Explain:
    explain = _explain_by_slots(session.metadata)

    def by_session(pixels: Pixels, _: Outputs, class_id: int) -> NDArray[np.float64]:
        return explain(pixels, session.run(pixels[:1]), class_id)

    return by_session


def _explain_by_map(heat_map: HeatMap) -> Explain:
    def by_map(pixels: Pixels, _: Outputs, class_id: int) -> NDArray[np.float64]:
        # rectified, as is usual: negative relevance speaks against the class
        relevance: NDArray[np.float64] = np.maximum(heat_map(pixels[:1], np.array([class_id]))[0], 0).astype(np.float64)
        return relevance

    return by_map


def _compare(
    importance: NDArray[np.float64], logits: NDArray[np.float32], kept: NDArray[np.bool_]
) -> tuple[float, float, float, float]:
    """Return one image's measures, except the last.

    Args:
        importance: [parts].
        logits: [subsets], of the class predicted for the whole creature.
        kept: bool [subsets], whether that class is predicted.
    """
    every = _SUBSETS[0]
    places = {left: number for number, left in enumerate(_SUBSETS)}
    drops = np.array([logits[0] - logits[places[every - {part}]] for part in range(len(PARTS))])
    named = name_parts(importance)
    smallest = min(len(left) for left in _SUBSETS if kept[places[left]])
    sufficient = [left for left in _SUBSETS if kept[places[left]] and len(left) == smallest]
    shares = [len(left & named) / len(left) if left else 1.0 for left in sufficient]
    return (
        rank_correlation(importance, drops),
        float(not kept[places[every - named]]),
        float(kept[places[named]]),
        max(shares),
    )


def name_parts(importance: NDArray[np.float64]) -> frozenset[int]:
    """Return the parts with at least half of an even share of the importance over parts."""
    total = np.maximum(importance, 0).sum()
    if total <= 0:
        return frozenset()
    return frozenset(np.flatnonzero(importance * len(importance) >= _NAMED * total).tolist())


def rank_correlation(first: NDArray[Any], second: NDArray[Any]) -> float:
    """Return Spearman's correlation, equal values sharing their mean rank; 0 where either is constant."""
    if min(np.ptp(first), np.ptp(second)) == 0:
        return 0.0
    from scipy.stats import spearmanr

    return float(spearmanr(first, second).statistic)


def _choose_rivals(
    kinds: Sequence[Species], label: int, rng: np.random.Generator
) -> tuple[tuple[int, list[int]], tuple[int, list[int]]] | None:
    """Return two other classes, each with the special parts of `label` that only it shares."""
    special = {index for index, part in enumerate(PARTS) if kinds[label].variants[part] != VARIANTS[part][0]}
    shared = {
        class_id: {index for index in special if kind.variants[PARTS[index]] == kinds[label].variants[PARTS[index]]}
        for class_id, kind in enumerate(kinds)
        if class_id != label
    }
    pairs = [
        (first, second)
        for first, second in itertools.combinations(shared, 2)
        if shared[first] - shared[second] and shared[second] - shared[first]
    ]
    if not pairs:
        return None
    first, second = pairs[int(rng.integers(len(pairs)))]
    return (first, sorted(shared[first] - shared[second])), (second, sorted(shared[second] - shared[first]))


def _compare_rivals(weigh: Callable[[int], NDArray[np.float64]], rivals: Any) -> float:
    """Return the share of the two classes whose evidence lies more on the parts that only they share."""
    if rivals is None:
        return np.nan
    right = []
    for (class_id, own), (_, other) in (rivals, rivals[::-1]):
        importance = weigh(class_id)
        ahead = importance[own].mean() - importance[other].mean()
        right.append(0.5 if ahead == 0 else float(ahead > 0))
    return float(np.mean(right))


def format_interventions(found: Interventions) -> Iterator[str]:
    """Yield a heading and a table with a row per way to explain."""
    low, high = found.same_answer.interval
    yield (
        f"parts taken away, {found.images} creatures, accuracy {found.accuracy:.1%}; another background keeps "
        f"{100 * found.same_answer.value:.0f} % of the answers ({100 * low:.0f} to {100 * high:.0f})"
    )
    rows = [["explained by", "correlation", "without named", "named alone", "of a sufficient set", "by class"]]
    for each in found.explained:
        shares = [each.deletion, each.preservation, each.sufficient, each.target_sensitivity]
        low, high = each.single_deletion.interval
        rows.append(
            [each.method, f"{each.single_deletion.value:.2f} ({low:.2f} to {high:.2f})", *map(format_percent, shares)]
        )
    yield from format_columns(rows)
