"""Intervene where the effect on good evidence is known: shuffle weights, and take parts of drawn creatures away.

`--randomise`, after Adebayo et al., "Sanity checks for saliency maps" (NeurIPS 2018): an explanation that stays put
after the learned weights are gone shows the image, not the network. Each tensor's values are permuted, first the
head's, then those of one stage of the backbone more at a time; batch normalisation's statistics are measured anew, so
that features keep their scale. The evidence is taken from the label's slots, since answers become wrong.

`--interventions` is the protocol of FunnyBirds (Hesse, Schaub-Meyer and Roth, ICCV 2023), with the generated creatures,
of which every part can be left out while all else stays: what a part is worth to the network is known, not estimated.
The importance of a part to an explanation is the sum of its cells whose centre lies in the part's box.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import spearmanr
from torch import nn
from torch.optim.swa_utils import update_bn

from opal_deploy.datasets.samples import Sample
from opal_deploy.evaluation.api import EvaluateOptions
from opal_deploy.evaluation.cells import GradCam, sum_by_cell
from opal_deploy.evaluation.inputs import Annotations
from opal_deploy.evaluation.metrics import Figures, Mean, format_cell, format_rows, mean_with_interval
from opal_deploy.evaluation.pointing import Share, play_pointing_game
from opal_deploy.evaluation.session import evaluate_session, load_pixels
from opal_deploy.logs import as_progress
from opal_deploy.model.checkpoint import Checkpoint
from opal_deploy.predict.prepare import InferenceOptions, Pixels, prepare
from opal_deploy.preprocess.geometry import Geometry
from opal_deploy.preprocess.resize import normalise
from opal_deploy.runtime.session import Session
from opal_deploy.runtime.torch_session import TorchSession
from opal_deploy.sources.image import InputImage
from opal_deploy.synthetic.creatures import MAX_SPECIES, VARIANTS, draw_creature, list_species

NOTHING, HEAD = "nothing", "the head"
EVIDENCE, GRAD_CAM = "evidence", "Grad-CAM"
PARTS = tuple(VARIANTS)
# first words of the seeds: streams of their own
_SHUFFLES, _CREATURES = (16, 0), (17, 0)
# containers that hold a network's stages
_CONTAINERS = ("features", "stages", "blocks", "layers")
_BATCH = 16


@dataclass(frozen=True)
class Stage(Figures):
    """The evidence after some weights were shuffled."""

    shuffled: str  # the stage that was shuffled last; those before it stay shuffled
    accuracy: float  # share of correct answers, 0 ... 1
    same_cell: Mean  # share of the label's slots whose cell is the trained network's
    # object, part: shares of these cells in the object and on a part, next to random cells; None if unknown
    object: Share | None
    part: Share | None


@dataclass(frozen=True)
class Randomisation(Figures):
    """The figures of `--randomise`, the trained network's first."""

    images: int
    stages: list[Stage]

    def describe(self) -> Iterator[str]:
        """Yield a heading and a table with a row per stage."""
        titles = {"object": "in the object", "part": "on a part"}
        shares = {title: getattr(self.stages[0], name) for name, title in titles.items()}
        chance = ", ".join(f"{title} {share.random:.0%}" for title, share in shares.items() if share)
        random = f"; random cells {chance}" if chance else ""
        yield f"weights shuffled from the top, {self.images} images, cells of the label's slots{random}"
        columns = {"shuffled": "shuffled, with those above", "accuracy": "accuracy", "same_cell": "same cells"}
        yield from format_rows(self.stages, columns | titles)


def measure_randomisation(
    loaded: Checkpoint, samples: Sequence[Sample], annotations: Annotations, options: EvaluateOptions
) -> Randomisation:
    """Measure the evidence of a network on samples while its weights are shuffled; see this module.

    Args:
        loaded: a checkpoint whose evidence is single cells; its network's weights are destroyed.
        annotations: one per sample.
    """
    network = loaded.network.eval()
    metadata = TorchSession(loaded, device=options.device, threads=options.threads).metadata
    pixels = load_pixels(samples, metadata.form, boxes=options.boxes)
    inputs = torch.from_numpy(normalise(pixels, metadata.mean, metadata.std)).to(next(network.parameters()).device)
    rng = np.random.default_rng(_SHUFFLES)
    groups: list[tuple[str, list[nn.Module]]] = [(NOTHING, []), (HEAD, [network.head])]
    groups += list_stages(network.backbone.body)
    before, stages = None, []
    for number, (name, modules) in enumerate(groups):
        for parameter in itertools.chain.from_iterable(module.parameters() for module in modules):
            order = torch.from_numpy(rng.permutation(parameter.numel())).to(parameter.device)
            parameter.data = parameter.data.flatten()[order].reshape(parameter.shape)
        if name not in (NOTHING, HEAD):
            update_bn(torch.split(inputs, _BATCH), network.backbone)
        session = TorchSession(loaded, device=options.device, threads=options.threads)
        result = evaluate_session(session, samples, boxes=options.boxes, batch=_BATCH)
        cells, kept = metadata.class_map.take(np.asarray(result.outputs.argmax), result.labels), metadata.class_map.kept
        before = cells if before is None else before
        same = [(row == old)[kept[label]].mean() for row, old, label in zip(cells, before, result.labels, strict=True)]
        game = play_pointing_game(result, annotations, metadata, correct_only=False)
        shares = (None, None) if game is None else (game.object, game.part)
        stages.append(Stage(name, result.metrics.accuracy, mean_with_interval(same), *shares))
        as_progress(options.progress)(number + 1, len(groups), "shuffling weights")
    return Randomisation(len(samples), stages)


def list_stages(body: nn.Module) -> list[tuple[str, list[nn.Module]]]:
    """Return the stages of a backbone that have weights, by name, the last one first."""
    stages: dict[str, list[nn.Module]] = {}
    for name, module in body.named_children():
        inner = module.named_children() if name in _CONTAINERS else [("", module)]
        for number, stage in inner:
            if next(stage.parameters(), None) is not None:
                stages.setdefault(f"{name}.{number}".removesuffix("."), []).append(stage)
    return list(stages.items())[::-1]


@dataclass(frozen=True)
class Explained(Figures):
    """How well one way to explain tells which parts matter: means over creatures."""

    method: str
    single_deletion: Mean  # Spearman's correlation of importance with the drop of the logit without the part, -1 ... 1


@dataclass(frozen=True)
class Interventions(Figures):
    """The figures of `--interventions`."""

    images: int
    accuracy: float  # share of correct answers on the whole creatures, 0 ... 1
    same_answer: Mean  # share of answers that stay in front of another background
    explained: list[Explained]

    def describe(self) -> Iterator[str]:
        """Yield a heading and a line per way to explain."""
        yield (
            f"parts taken away, {self.images} creatures, accuracy {self.accuracy:.1%}; another background keeps "
            f"{format_cell(self.same_answer, digits=0)} of the answers"
        )
        for row in self.explained:
            mean = row.single_deletion
            yield f"  correlation of {row.method} with the effect: {mean.mean:.2f} ({mean.low:.2f} to {mean.high:.2f})"


def measure_interventions(
    session: Session, size: tuple[int, int], options: EvaluateOptions, heat_map: GradCam | None = None
) -> Interventions:
    """Draw creatures of the model's species with parts left out, and measure its evidence; see this module.

    Args:
        session: of a model whose classes are species of `list_species`, and whose evidence is single cells.
        size: (H, W) of the drawn images, as in training.
        heat_map: Grad-CAM, measured as a control.
    """
    metadata, images = session.metadata, options.limit
    by_name = {kind.name: kind for kind in list_species(MAX_SPECIES)}
    kinds = [by_name[name] for name in metadata.class_names]
    measured: dict[str, list[float]] = {}
    correct, same = [], []
    changes: list[dict[str, Any]]
    for number in range(images):
        label, stream = number % len(kinds), (*_CREATURES, number)
        kind = kinds[label]
        changes = [{}, *({"hide": [part]} for part in PARTS), {"scene": np.random.default_rng(number)}]
        # the same stream of random numbers: all but the change stays
        drawn = [draw_creature(kind, np.random.default_rng(stream), size, **change) for change in changes]
        ready = [prepare(InputImage(None, creature.image), metadata.form, InferenceOptions()) for creature in drawn]
        crop = cast(Geometry, ready[0].geometry).crop
        pixels = np.stack([cast(Pixels, image.pixels) for image in ready])
        outputs = session.run(pixels)
        answers = outputs.logits.argmax(axis=1)
        predicted = int(answers[0])
        drops = outputs.logits[0, predicted] - outputs.logits[1:-1, predicted]
        correct.append(predicted == label)
        same.append(answers[-1] == predicted)
        # whether each part's box holds the centre of each cell, 0 or 1: float64 [parts, H * W]
        x, y = metadata.cells.centres(crop).T
        boxes = [drawn[0].parts[part].box for part in PARTS]
        on_parts = np.array([(x >= x0) & (x <= x1) & (y >= y0) & (y <= y1) for x0, y0, x1, y1 in boxes], np.float64)
        evidence = sum_by_cell(predicted, outputs, 0, metadata)
        relevances = {EVIDENCE: np.zeros(len(x))}
        relevances[EVIDENCE][list(evidence)] = list(evidence.values())
        if heat_map is not None:
            # rectified, as is usual: negative relevance speaks against the class
            relevances[GRAD_CAM] = np.maximum(heat_map(pixels[:1], answers[:1])[0], 0, dtype=np.float64)
        for name, relevance in relevances.items():
            measured.setdefault(name, []).append(rank_correlation(on_parts @ relevance, drops))
        as_progress(options.progress)(number + 1, images, "taking parts away")
    explained = [Explained(name, mean_with_interval(values)) for name, values in measured.items()]
    return Interventions(images, float(np.mean(correct)), mean_with_interval(same), explained)


def rank_correlation(first: NDArray[Any], second: NDArray[Any]) -> float:
    """Return Spearman's correlation, equal values sharing their mean rank; 0 where either is constant."""
    return 0.0 if min(np.ptp(first), np.ptp(second)) == 0 else float(spearmanr(first, second).statistic)
