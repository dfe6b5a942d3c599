"""Run a data set's images through a model: decoded ahead in threads, prepared as in inference."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Protocol

import numpy as np

from opal_deploy.artifact.outputs import Outputs
from opal_deploy.datasets.samples import Sample
from opal_deploy.errors import UsageError
from opal_deploy.inference.decoding.prepare import prepare
from opal_deploy.inference.executor import prefetch
from opal_deploy.inference.types import InferenceOptions, Pixels, Prepared, Request
from opal_deploy.logs import Progress
from opal_deploy.preprocess.geometry import Geometry


class BatchCallback(Protocol):
    """Receives each batch while its attention maps are in memory."""

    def __call__(self, first: int, pixels: Pixels, outputs: Outputs) -> None:
        """Receive images uint8 [N, H0, W0, 3], the number of the first one in the data set, and the model's outputs."""
        ...


def predict_samples(
    run: Callable[[Pixels], Outputs],
    samples: list[Sample],
    input_size: tuple[int, int],
    *,
    boxes: bool = True,
    batch: int = 16,
    workers: int = 2,
    watch: BatchCallback | None = None,
    report: Progress | None = None,
    model: str = "the model",
) -> tuple[Outputs, list[Geometry]]:
    """Return the outputs and geometries of all samples, without attention maps, which are too large to keep.

    Args:
        run: uint8 [N, H0, W0, 3] to outputs.
        samples: at least one.
        input_size: (H0, W0).
        boxes: crop to the samples' boxes.
        batch: images a call of `run`.
        workers: threads that decode.
        watch: called with each batch and its attention maps.
        report: called with images done and in all.
        model: the name in error messages.

    Raises:
        UsageError: names an image that cannot be used, or the first whose logits are not finite.
    """
    requests = (Request(str(s.path), s.path, s.box if boxes else None) for s in samples)
    batches: list[Outputs] = []
    geometries: list[Geometry] = []
    for pixels, batch_geometries in prepared_batches(requests, input_size, batch, workers):
        outputs, done = run(pixels), len(geometries)
        _check_finite(outputs, samples[done : done + len(pixels)], model)
        if watch is not None:
            watch(done, pixels, outputs)
        batches.append(replace(outputs, attention=None))
        geometries += batch_geometries
        if report is not None:
            report(len(geometries), len(samples), "evaluating")
    return Outputs.concatenate(batches), geometries


def _check_finite(outputs: Outputs, samples: list[Sample], model: str) -> None:
    """Raise UsageError if a row of logits is not finite; argmax and means would hide it."""
    finite = np.isfinite(outputs.logits).all(axis=1)
    if not finite.all():
        raise UsageError(
            f"{model}: its logits for {samples[int(finite.argmin())].path} are not finite numbers, so it cannot be "
            "measured; its weights are damaged or its precision is too low, use an earlier checkpoint or export fp32"
        )


def prepared_batches(
    requests: Iterable[Request], size: tuple[int, int], batch: int, workers: int
) -> Iterator[tuple[Pixels, list[Geometry]]]:
    """Yield uint8 [n, H0, W0, 3] for up to `batch` images at a time, with the geometry of each.

    Raises:
        UsageError: names an image that cannot be used.
    """

    def prepared(request: Request) -> Prepared:
        return prepare(request, size, InferenceOptions())

    with ThreadPoolExecutor(workers, "decode") as pool:
        ready = prefetch((pool.submit(prepared, request) for request in requests), 2 * batch)
        while group := list(itertools.islice(ready, batch)):
            images = [_check_usable(entry) for entry in group]
            yield np.stack([pixels for pixels, _ in images]), [geometry for _, geometry in images]


def _check_usable(entry: Prepared) -> tuple[Pixels, Geometry]:
    if entry.pixels is None or entry.geometry is None:
        message = entry.error or "unusable"
        raise UsageError(f"{entry.request.name}: {message}; take it out of the data set")
    return entry.pixels, entry.geometry
