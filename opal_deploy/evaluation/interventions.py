"""Take parts of drawn creatures away, and compare the evidence with what that changes (`--interventions`).

The protocol is FunnyBirds' (Hesse, Schaub-Meyer and Roth, ICCV 2023), with the generated creatures, of which every part
can be left out while all else stays: so what a part is worth to the network is known, not estimated. The importance of
a part to an explanation is the sum of its cells whose centre lies in the part's box. Parts with at least half of an
even share of the sum over parts count as named.

Measures, each the mean over creatures:

    single_deletion         Spearman's correlation of importance with the drop of the logit without the part, -1 ... 1
    deletion                the answer changes without the named parts
    preservation            the answer stays with the named parts alone
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from opal_deploy.artifact.heads import find_contributions, find_values
from opal_deploy.artifact.metadata import Metadata
from opal_deploy.artifact.outputs import Outputs
from opal_deploy.errors import UsageError
from opal_deploy.evaluation.cells import GradCam
from opal_deploy.evaluation.metrics import Figures, Mean, format_cell, format_columns, mean_with_interval
from opal_deploy.logs import Progress, no_progress
from opal_deploy.predict.prepare import InferenceOptions, Pixels, prepare
from opal_deploy.preprocess.geometry import Geometry
from opal_deploy.runtime.session import Session
from opal_deploy.sources.image import InputImage
from opal_deploy.synthetic.creatures import VARIANTS, Creature, Species, draw_creature, list_species

EVIDENCE, RANDOM_HEAD, GRAD_CAM = "evidence", "random head", "Grad-CAM"
PARTS = tuple(VARIANTS)
_ALL_PARTS = frozenset(range(len(PARTS)))
# a named part has this share of an even one
_NAMED = 0.5
# first word of the seeds: a stream of its own
_STREAM = 17

Explain = Callable[[Pixels, Outputs, int], NDArray[np.float64]]
"""Returns relevances, float64 [H * W], of the first of some images for a class."""


@dataclass(frozen=True)
class Explained(Figures):
    """The measures of one way to explain; see this module."""

    method: str
    single_deletion: Mean
    deletion: Mean
    preservation: Mean


@dataclass(frozen=True)
class Interventions(Figures):
    """The figures of `--interventions`."""

    images: int
    seed: int
    accuracy: float  # share of correct answers on the whole creatures, 0 ... 1
    same_answer: Mean  # share of answers that stay in front of another background
    explained: list[Explained]


def measure_interventions(
    session: Session,
    size: tuple[int, int],
    images: int,
    *,
    random_head: Session | None = None,
    heat_map: GradCam | None = None,
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
        methods[EVIDENCE] = partial(_explain_by_slots, metadata)
    if random_head is not None:
        methods[RANDOM_HEAD] = lambda pixels, _, label: _explain_by_slots(
            metadata, pixels, random_head.run(pixels[:1]), label
        )
    if heat_map is not None:
        # rectified, as is usual: negative relevance speaks against the class
        methods[GRAD_CAM] = lambda pixels, _, label: np.maximum(
            heat_map(pixels[:1], np.array([label]))[0], 0, dtype=np.float64
        )
    measured: dict[str, list[tuple[float, ...]]] = {name: [] for name in methods}
    correct, same = [], []
    for number in range(images):
        label, stream = number % len(kinds), (_STREAM, seed, number)
        draw = partial(_draw_without, kinds[label], stream, size)
        drawn = [draw(()), *(draw([part]) for part in range(len(PARTS)))]
        scene = np.random.default_rng(number)
        moved = draw_creature(kinds[label], np.random.default_rng(stream), size, scene=scene)
        pixels, geometry = _prepare([*drawn, moved], metadata)
        outputs = session.run(pixels)
        answers = outputs.logits.argmax(axis=1)
        predicted = int(answers[0])
        drops = outputs.logits[0, predicted] - outputs.logits[1:-1, predicted]
        correct.append(predicted == label)
        same.append(answers[-1] == predicted)
        # whether each part's box holds the centre of each cell, 0 or 1: float64 [parts, H * W]
        x, y = geometry.cell_centres(metadata.grid).T
        boxes = [drawn[0].parts[part].box for part in PARTS]
        on_parts = np.array([(x >= x0) & (x <= x1) & (y >= y0) & (y <= y1) for x0, y0, x1, y1 in boxes], np.float64)
        for name, explain in methods.items():
            importance = on_parts @ explain(pixels, outputs, predicted)
            named = name_parts(importance)
            changed, _ = _prepare([draw(named), draw(_ALL_PARTS - named)], metadata)
            without, alone = session.run(changed).logits.argmax(axis=1) == predicted
            measured[name].append((rank_correlation(importance, drops), float(not without), float(alone)))
        progress(number + 1, images, "taking parts away")
    explained = [Explained(name, *map(mean_with_interval, zip(*rows, strict=True))) for name, rows in measured.items()]
    return Interventions(images, seed, float(np.mean(correct)), mean_with_interval(same), explained)


def _draw_without(species: Species, stream: Sequence[int], size: tuple[int, int], parts: Iterable[int]) -> Creature:
    """Draw the creature of a stream of random numbers without some of its parts; all else stays."""
    return draw_creature(species, np.random.default_rng(stream), size, hide=[PARTS[part] for part in parts])


def _prepare(creatures: Sequence[Creature], metadata: Metadata) -> tuple[Pixels, Geometry]:
    """Return drawn images as the model sees them, uint8 [n, H0, W0, 3], and how all of them got there."""
    images = [InputImage(None, creature.image) for creature in creatures]
    ready = [prepare(image, metadata.input_size, InferenceOptions()) for image in images]
    geometry = ready[0].geometry
    assert geometry is not None  # drawn images are readable
    return np.stack([image.pixels for image in ready if image.pixels is not None]), geometry


def _list_kinds(metadata: Metadata) -> tuple[Species, ...]:
    names = tuple(metadata.class_names)
    with contextlib.suppress(UsageError):
        kinds = list_species(len(names))
        if names == tuple(kind.name for kind in kinds):
            return kinds
    raise UsageError(
        f"--interventions draws the creatures of `opal-deploy demo`; the classes are {', '.join(names[:3])}, ..."
    )


def _explain_by_slots(metadata: Metadata, _: Pixels, outputs: Outputs, class_id: int) -> NDArray[np.float64]:
    """Return the contributions of a class's slots, at their cells; see `Explain`."""
    class_map, ids = metadata.class_map, np.array([class_id])
    if outputs.scores is None or outputs.argmax is None:
        raise ValueError("a model without slots has no cells")
    values = class_map.take(find_values(outputs.scores[:1], metadata), ids)
    # distances other than l2 have no contributions that add up: the values themselves
    parts = find_contributions(values, ids, metadata) if metadata.distance in ("", "l2") else values
    cells, kept = class_map.take(outputs.argmax[:1], ids)[0], class_map.kept[class_id]
    relevance = np.zeros(metadata.grid[0] * metadata.grid[1])
    np.add.at(relevance, cells[kept], np.asarray(parts)[0][kept])
    return relevance


def name_parts(importance: NDArray[np.float64]) -> frozenset[int]:
    """Return the parts with at least half of an even share of the importance over parts."""
    total = np.maximum(importance, 0).sum()
    if total <= 0:
        return frozenset()
    return frozenset(np.flatnonzero(importance * len(importance) >= _NAMED * total).tolist())


def rank_correlation(first: NDArray[Any], second: NDArray[Any]) -> float:
    """Return Spearman's correlation, equal values sharing their mean rank; 0 where either is constant."""
    from scipy.stats import spearmanr

    return 0.0 if min(np.ptp(first), np.ptp(second)) == 0 else float(spearmanr(first, second).statistic)


def format_interventions(measured: Interventions) -> Iterator[str]:
    """Yield a heading and a table with a row per way to explain."""
    same = measured.same_answer
    yield (
        f"parts taken away, {measured.images} creatures, accuracy {measured.accuracy:.1%}; another background keeps "
        f"{100 * same.mean:.0f} % ({100 * same.low:.0f} to {100 * same.high:.0f}) of the answers"
    )
    rows = [["explained by", "correlation", "without named", "named alone"]]
    for row in measured.explained:
        mean = row.single_deletion
        correlation = f"{mean.mean:.2f} ({mean.low:.2f} to {mean.high:.2f})"
        shares = (row.deletion, row.preservation)
        rows.append([row.method, correlation, *(format_cell(share, digits=0) for share in shares)])
    yield from format_columns(rows)
