"""The loop over labelled images: decode, run the model, and hand each batch with its annotations to a measurement."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from opal_deploy.artifact.class_map import find_margins
from opal_deploy.artifact.outputs import Outputs
from opal_deploy.artifact.preprocessing import PRESETS, InputForm, ResizeRule
from opal_deploy.datasets.cub import PartLocations
from opal_deploy.datasets.samples import Sample
from opal_deploy.errors import UsageError
from opal_deploy.evaluation.inputs import Annotations, ImageAnnotation
from opal_deploy.evaluation.metrics import Evaluation, collapse_of_cells, compute_metrics
from opal_deploy.evaluation.parts import PartFigures, PartProtocol
from opal_deploy.logs import Progress, no_progress
from opal_deploy.predict.executor import prefetch
from opal_deploy.predict.prepare import InferenceOptions, Pixels, prepare
from opal_deploy.preprocess.geometry import Geometry
from opal_deploy.preprocess.resize import normalise
from opal_deploy.records.evidence import find_top_classes
from opal_deploy.runtime.session import ImageBatch, Session
from opal_deploy.sources.image import InputImage

# accuracy below which presets of preprocessing are compared, on how many images, and by how much one is clearly better:
# of a ResNet-18's 87 % on ten species of birds, presets that are clearly worse left 12 to 64 %
_SUSPICIOUS, _PRESET_IMAGES, _CLEARLY = 0.7, 64, 0.1
# threads that decode images
_WORKERS = 2

T = TypeVar("T")


class UnusableImage(UsageError):
    """An image of a data set that cannot be decoded or cropped."""


@dataclass(frozen=True)
class Photographs(Generic[T]):
    """A batch of n labelled images as the model sees them."""

    indices: list[int]  # of the images among the samples; random numbers depend on them, not on the batch
    pixels: ImageBatch  # uint8 [n, H0, W0, 3]
    geometries: list[Geometry]
    annotations: list[ImageAnnotation]  # n; empty if none were given
    outputs: T  # of the function that ran on the pixels


def photographs(
    run: Callable[[ImageBatch], T],
    samples: Sequence[Sample],
    form: InputForm, *, chosen: Sequence[int] | None = None, annotations: Annotations | None = None,
    boxes: bool = True, batch: int = 16, progress: Progress = no_progress, note: str = "evaluating",
) -> Iterator[Photographs[T]]:  # fmt: skip
    """Yield samples in batches, prepared as in inference, with their annotations and the outputs of `run`.

    Args:
        run: a function of pixels, uint8 [n, H0, W0, 3].
        form: of the model's input.
        chosen: indices of the samples to take; None takes all.
        annotations: of all samples.
        boxes: crop images to the samples' boxes.
        progress: called with `note` when the caller is done with a batch.

    Raises:
        UnusableImage: an image cannot be decoded or cropped.
    """

    def load(index: int) -> tuple[Pixels, Geometry]:
        sample = samples[index]
        image = InputImage(str(sample.path), sample.path, sample.box if boxes else None)
        ready = prepare(image, form, InferenceOptions())
        if ready.pixels is None or ready.geometry is None:
            raise UnusableImage(f"{image.name}: {ready.error or 'unusable'}; remove it from the data set")
        return ready.pixels, ready.geometry

    indices = list(range(len(samples)) if chosen is None else chosen)
    with ThreadPoolExecutor(_WORKERS, "decode") as pool:
        ready = prefetch((pool.submit(load, index) for index in indices), 2 * batch)
        for start in range(0, len(indices), batch):
            current = indices[start : start + batch]
            images, geometries = zip(*itertools.islice(ready, batch), strict=True)
            pixels = np.stack(images)
            known = [] if annotations is None else [annotations.images[index] for index in current]
            yield Photographs(current, pixels, [*geometries], known, run(pixels))
            progress(start + len(current), len(indices), note)


def load_pixels(
    samples: Sequence[Sample], form: InputForm, *, chosen: Sequence[int] | None = None, boxes: bool = True
) -> Pixels:
    """Return all or the chosen samples as the model sees them, uint8 [n, H0, W0, 3]; raises as `photographs`."""
    batches = photographs(lambda pixels: pixels, samples, form, chosen=chosen, boxes=boxes)
    return np.concatenate([images.outputs for images in batches])


@dataclass(frozen=True)
class EvaluationResult:
    """Metrics and outputs of a model on N images."""

    metrics: Evaluation
    parts: PartFigures | None
    labels: NDArray[np.int64]  # [N], class indices
    outputs: Outputs
    geometries: list[Geometry]

    def to_dict(self, prefix: str) -> dict[str, Any]:
        """Return all metrics for JSON."""
        return {**self.metrics.to_dict(prefix), **(self.parts.to_dict() if self.parts else {})}


def evaluate_session(
    session: Session, samples: Sequence[Sample], *, boxes: bool = True, batch: int = 16,
    parts: PartLocations | None = None, progress: Progress = no_progress, note: str = "evaluating",
    model: str = "the model",
) -> EvaluationResult:  # fmt: skip
    """Evaluate a session on `samples` (at least one); without `parts`, consistency, stability and purity are left out.

    `boxes`, `progress` and `note` are those of `photographs`.

    Raises:
        UsageError: an image cannot be used, or the logits for an image are not finite.
    """
    metadata = session.metadata
    labels = np.array([sample.label for sample in samples], dtype=np.int64)
    protocol = None if parts is None else PartProtocol(session, parts, labels, cropped=boxes)
    run = session.run if protocol is None else protocol.run
    collected, geometries = list[Outputs](), list[Geometry]()
    for images in photographs(run, samples, metadata.form, boxes=boxes, batch=batch, progress=progress, note=note):
        finite = np.isfinite(images.outputs.logits).all(axis=1)
        if not finite.all():
            # argmax and means would hide it
            raise UsageError(
                f"{model}: its logits for {samples[images.indices[int(finite.argmin())]].path} are not finite numbers; "
                "its weights are damaged or its precision is too low: use an earlier checkpoint, or export fp32"
            )
        if protocol is not None:
            protocol.add(images.indices, images.pixels, images.outputs)
        # attention maps are too large to keep
        collected.append(replace(images.outputs, attention=None))
        geometries += images.geometries
    outputs, class_map = Outputs.concatenate(collected), metadata.class_map
    collapse, totals = None, find_top_classes(outputs, metadata, 2).totals
    if outputs.argmax is not None:
        collapse = collapse_of_cells(class_map.take(outputs.argmax, labels), labels, class_map)
    margins = None if totals is None or metadata.num_classes < 2 else find_margins(totals)
    metrics = compute_metrics(outputs.logits, labels, collapse, margins)
    figures = None if protocol is None else protocol.summarize(outputs, geometries)
    return EvaluationResult(metrics, figures, labels, outputs, geometries)


def choose_samples(samples: Sequence[Sample], limit: int) -> list[int]:
    """Return ascending indices of `limit` samples, or of all if there are fewer; deterministic.

    The counts of classes differ by at most one, except where a class has no images left; within a class the choice is
    spread evenly over its images.
    """
    by_class: dict[int, list[int]] = defaultdict(list)
    for index, sample in enumerate(samples):
        by_class[sample.label].append(index)
    shares = dict.fromkeys(sorted(by_class), 0)
    remaining = min(limit, len(samples))
    while remaining:
        open_classes = [label for label in shares if shares[label] < len(by_class[label])]
        for i in _spread(len(open_classes), min(remaining, len(open_classes))):
            shares[open_classes[i]] += 1
            remaining -= 1
    return sorted(by_class[label][i] for label, share in shares.items() for i in _spread(len(by_class[label]), share))


def _spread(number: int, share: int) -> list[int]:
    """Return `share` different indices spread evenly over `number`."""
    return [int(index) for index in (np.arange(share) * number) // max(share, 1)]


def compare_presets(session: Session, samples: Sequence[Sample], result: EvaluationResult) -> Iterator[str]:
    """Yield a warning if a classifier is clearly more accurate with another preset of preprocessing than in `result`.

    Only a suspiciously low accuracy is worth the forward passes. The session is of somebody's classifier, whose file
    may state the wrong preprocessing.
    """
    if result.metrics.accuracy >= _SUSPICIOUS:
        return
    metadata = session.metadata
    chosen = choose_samples(samples, _PRESET_IMAGES)
    own = float((result.outputs.logits[chosen].argmax(1) == result.labels[chosen]).mean())
    best, fitting = own, ""
    for name, preset in PRESETS.items():
        if preset.is_bgr:
            # the order of channels is in the graph
            continue
        rule = preset.rule or ResizeRule("shortest_edge", "bilinear", min(metadata.input_size))
        pixels = load_pixels(samples, InputForm(*metadata.input_size, rule), chosen=chosen)
        outputs = cast(Any, session).run_normalised(normalise(pixels, preset.mean, preset.std))
        accuracy = float((outputs.logits.argmax(1) == result.labels[chosen]).mean())
        if accuracy > best + _CLEARLY:
            best, fitting = accuracy, name
    if fitting:
        yield (
            f"warning: accuracy {own:.0%} of {len(chosen)} images, with preset {fitting} {best:.0%}: wrong "
            f"preprocessing? Export it again with --preprocess {fitting}"
        )
