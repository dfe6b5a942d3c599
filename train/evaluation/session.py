"""The trainer's figures for a deployed model: what a graph or engine makes of a data set, in any session."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from opal_deploy.artifact.outputs import Outputs
from opal_deploy.errors import UsageError
from opal_deploy.pipeline.engine import ahead
from opal_deploy.pipeline.prepare import Pixels, Prepared, Request, prepare
from opal_deploy.preprocess.decode import MAX_PIXELS
from opal_deploy.runtime.session import Session
from opal_deploy.train.data.samples import Sample
from opal_deploy.train.evaluation.metrics import accuracy, cross_entropy, spatial_prototype_collapse
from opal_deploy.train.evaluation.network import Evaluation
from opal_deploy.train.pictures import Report


def evaluate_session(
    session: Session,
    samples: list[Sample],
    *,
    boxes: bool = True,
    batch: int = 16,
    workers: int = 2,
    report: Report | None = None,
) -> Evaluation:
    """Figures over `samples` (at least one).

    Args:
        session: of a model whose classes are those of the samples' labels.
        boxes: crop to the samples' boxes; False shows what leaving them out costs.

    Raises:
        UsageError: names a picture that cannot be used.
    """
    metadata = session.metadata
    requests = (Request(str(s.path), s.path, s.box if boxes else None) for s in samples)
    parts: list[Outputs] = []
    done = 0
    for pixels in _batches(requests, metadata.input_size, batch, workers):
        parts.append(session.run(pixels))
        done += len(pixels)
        if report is not None:
            report(done, len(samples), "evaluating")
    outputs = Outputs.concatenate(parts)
    labels = np.array([sample.label for sample in samples], dtype=np.int64)
    collapse = None
    if outputs.argmax is not None:
        collapse = spatial_prototype_collapse(outputs.argmax, labels, metadata.prototypes_per_class)
    logits = outputs.logits
    return Evaluation(len(labels), cross_entropy(logits, labels), accuracy(logits, labels), collapse)


def _batches(requests: Iterable[Request], size: tuple[int, int], batch: int, workers: int) -> Iterator[Pixels]:
    def prepared(request: Request) -> Prepared:
        return prepare(request, size, MAX_PIXELS, keep_picture=False)

    with ThreadPoolExecutor(workers, "decode") as pool:
        ready = ahead((pool.submit(prepared, request) for request in requests), 2 * batch)
        while group := list(itertools.islice(ready, batch)):
            yield np.stack([_pixels(entry) for entry in group])


def _pixels(entry: Prepared) -> Pixels:
    if entry.pixels is None:
        message = entry.error["error"]["message"] if entry.error else "unusable"
        raise UsageError(f"{entry.request.name}: {message}; take it out of the data set")
    return entry.pixels
