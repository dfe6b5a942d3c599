"""A model's baseline on validation images, and the neighbours among its training images.

Both are measured on a bounded number of images, evenly over the classes, so that they cost minutes at most.
"""

from __future__ import annotations

import torch

from opal_deploy.artifact.baseline import Baseline
from opal_deploy.artifact.metadata import Metadata
from opal_deploy.artifact.outputs import Outputs
from opal_deploy.datasets.samples import Sample
from opal_deploy.evaluation.session import choose_samples, photographs
from opal_deploy.logs import Progress, no_progress
from opal_deploy.model.neighbours import MAX_IMAGES, Neighbours, max_images
from opal_deploy.model.network import OpalNetwork
from opal_deploy.preprocess.resize import normalise
from opal_deploy.records.evidence import observe_outputs
from opal_deploy.runtime.session import ImageBatch, Session

# validation images of a baseline
_MAX_VALIDATION = 5_000


def fit_neighbours(
    network: OpalNetwork,
    samples: list[Sample],
    background: list[Sample],
    *,
    boxes: bool = True,
    progress: Progress = no_progress,
) -> Neighbours | None:
    """Return the neighbours of a trained network: features of training images, not augmented.

    Up to 2,000 images are taken, or five per class, and up to 2,000 of `background`. None for a network without single
    cells as evidence, and for too few images.

    Args:
        network: left in evaluation mode; computes on its device.
        samples: the training images.
        background: out-of-distribution images; none, or at least five.
        boxes: crop images to their boxes, as in training.
    """
    if network.config.head.evidence != "exact":
        return None
    network.eval()
    config, device = network.config, next(network.parameters()).device
    known = [samples[index] for index in choose_samples(samples, max_images(config.num_classes))]
    others = [background[index] for index in choose_samples(background, MAX_IMAGES)]

    def pool(pixels: ImageBatch) -> torch.Tensor:
        inputs = torch.from_numpy(normalise(pixels, config.mean, config.std)).to(device)
        with torch.inference_mode():
            features: torch.Tensor = network.backbone(inputs)
        return features.float().mean((2, 3)).cpu()

    batches = photographs(
        pool, known + others, config.input_size, boxes=boxes, progress=progress, note="keeping features of images"
    )
    # of inference mode, whose tensors a module cannot keep
    features = torch.cat([images.outputs for images in batches]).clone()
    labels = torch.tensor([sample.label for sample in known])
    neighbours = Neighbours.fit(features[: len(known)], labels, features[len(known) :])
    return None if neighbours is None else neighbours.to(device)


def measure_baseline(
    session: Session,
    samples: list[Sample],
    neighbours: Neighbours | None,
    *,
    boxes: bool = True,
    progress: Progress = no_progress,
) -> Baseline | None:
    """Return the baseline of a model on up to 5,000 validation images; None unless single cells are its evidence.

    The model's OOD score is computed with `neighbours`.
    """
    metadata = session.metadata
    if metadata.evidence != "exact":
        return None
    chosen = choose_samples(samples, _MAX_VALIDATION)
    batches = photographs(
        session.run, samples, metadata.input_size, chosen=chosen, boxes=boxes, progress=progress,
        note="measuring the baseline",
    )  # fmt: skip
    outputs = Outputs.concatenate([images.outputs for images in batches])
    background = 0 if neighbours is None else neighbours.num_background
    return baseline_of(outputs, metadata, background)


def baseline_of(outputs: Outputs, metadata: Metadata, background: int) -> Baseline:
    """Return the baseline of a model with `exact` evidence from its outputs for validation images."""
    observed = observe_outputs(outputs, metadata)
    return Baseline.measure(observed, "val", metadata.stride, metadata.class_map, background)
