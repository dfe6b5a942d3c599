"""Shuffle a network's weights from the top, and see whether its evidence loses its hits (`--randomise`).

After Adebayo et al., "Sanity checks for saliency maps" (NeurIPS 2018): an explanation that stays put after the learned
weights are gone shows the image, not the network. Each tensor's values are permuted, first the head's, then those of
one stage of the backbone more at a time; batch normalisation's statistics are measured anew, so that features keep
their scale. The evidence is taken from the label's slots, since answers become wrong.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.optim.swa_utils import update_bn

from opal_deploy.datasets.samples import Sample
from opal_deploy.evaluation.annotations import Annotations
from opal_deploy.evaluation.metrics import Figures, Mean, format_rows, mean_with_interval
from opal_deploy.evaluation.options import EvaluateOptions
from opal_deploy.evaluation.pointing import Share, play_pointing_game
from opal_deploy.evaluation.session import evaluate_session, prepared_batches
from opal_deploy.logs import Progress, no_progress
from opal_deploy.model.checkpoint import Checkpoint
from opal_deploy.preprocess.resize import normalise
from opal_deploy.runtime.torch_session import TorchSession

NOTHING, HEAD = "nothing", "the head"
# first word of the seeds: a stream of its own
_STREAM = 16
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
    seed: int
    stages: list[Stage]


def measure_randomisation(
    loaded: Checkpoint,
    samples: Sequence[Sample],
    annotations: Annotations,
    options: EvaluateOptions,
    *,
    progress: Progress = no_progress,
) -> Randomisation:
    """Measure the evidence of a network on samples while its weights are shuffled; see this module.

    Args:
        loaded: a checkpoint whose evidence is single cells; its network's weights are destroyed.
        annotations: one per sample.
    """
    network = loaded.network.eval()
    metadata = TorchSession(loaded, device=options.device, threads=options.threads).metadata
    batches = prepared_batches(samples, metadata.input_size, boxes=options.boxes, batch=_BATCH)
    pixels = np.concatenate([batch for batch, _ in batches])
    inputs = torch.from_numpy(normalise(pixels, metadata.mean, metadata.std)).to(next(network.parameters()).device)
    rng = np.random.default_rng((_STREAM, options.seed))
    groups: list[tuple[str, list[nn.Module]]] = [(NOTHING, []), (HEAD, [network.head])]
    groups += list_stages(network.backbone.body)
    before, stages = None, []
    for number, (name, modules) in enumerate(groups):
        for module in modules:
            shuffle_weights(module, rng)
        if name not in (NOTHING, HEAD):
            update_bn(torch.split(inputs, _BATCH), network.backbone)
        session = TorchSession(loaded, device=options.device, threads=options.threads)
        result = evaluate_session(session, [*samples], boxes=options.boxes, batch=_BATCH)
        cells, kept = metadata.class_map.take(np.asarray(result.outputs.argmax), result.labels), metadata.class_map.kept
        before = cells if before is None else before
        same = [(row == old)[kept[label]].mean() for row, old, label in zip(cells, before, result.labels, strict=True)]
        game = play_pointing_game(result, annotations, metadata, correct_only=False)
        shares = (None, None) if game is None else (game.object, game.part)
        stages.append(Stage(name, result.evaluation.accuracy, mean_with_interval(same), *shares))
        progress(number + 1, len(groups), "shuffling weights")
    return Randomisation(len(samples), options.seed, stages)


def list_stages(body: nn.Module) -> list[tuple[str, list[nn.Module]]]:
    """Return the stages of a backbone that have weights, by name, the last one first."""
    stages: dict[str, list[nn.Module]] = {}
    for name, module in body.named_children():
        inner = module.named_children() if name in _CONTAINERS else [("", module)]
        for number, stage in inner:
            if next(stage.parameters(), None) is not None:
                stages.setdefault(f"{name}.{number}".removesuffix("."), []).append(stage)
    return list(stages.items())[::-1]


def shuffle_weights(module: nn.Module, rng: np.random.Generator) -> None:
    """Permute the values of each parameter among themselves."""
    with torch.no_grad():
        for parameter in module.parameters():
            order = torch.from_numpy(rng.permutation(parameter.numel())).to(parameter.device)
            parameter.copy_(parameter.flatten()[order].reshape(parameter.shape))


def format_randomisation(randomisation: Randomisation) -> Iterator[str]:
    """Yield a heading and a table with a row per stage."""
    titles = {"object": "in the object", "part": "on a part"}
    shares = {title: getattr(randomisation.stages[0], name) for name, title in titles.items()}
    chance = ", ".join(f"{title} {share.random:.0%}" for title, share in shares.items() if share)
    random = f"; random cells {chance}" if chance else ""
    yield f"weights shuffled from the top, {randomisation.images} images, cells of the label's slots{random}"
    columns = {"shuffled": "shuffled, with those above", "accuracy": "accuracy", "same_cell": "same cells"}
    yield from format_rows(randomisation.stages, columns | titles)
