"""The backend of a run on a Ray cluster."""

from __future__ import annotations

import itertools
import os
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from PIL import Image

from opal_deploy.cluster.actor import ActorConfig, compute_digests, read_model_files
from opal_deploy.cluster.driver import Job
from opal_deploy.cluster.process import DriverProcess
from opal_deploy.errors import ArtifactError
from opal_deploy.parallel.chunk import BATCHES_PER_CHUNK, make_chunks
from opal_deploy.parallel.predictor import SessionOptions
from opal_deploy.predict.setup import LoadedModel
from opal_deploy.records.record import Record
from opal_deploy.run.drawing import Thumbnails
from opal_deploy.run.options import InferOptions
from opal_deploy.run.run import Backend, RunOptions
from opal_deploy.sources.image import InputImage
from opal_deploy.timing import StageTimer

_PROBE = ".visible-"


class RayBackend(Backend):
    """Predicts with actors of the cluster that a driver is connected to."""

    def __init__(self, driver: DriverProcess, model: LoadedModel, options: InferOptions) -> None:
        """Start nothing yet; `options` say how the actors open the model."""
        self._driver, self._model, self._options = driver, model, options
        self._plan = driver.cluster.plan

    @property
    def description(self) -> str:
        """See `Backend.description`."""
        return f"Ray {self._driver.cluster.version}, actors of {self._plan}"

    @property
    def default_batch(self) -> int:
        """See `Backend.default_batch`."""
        return self._plan.default_batch

    @contextmanager
    def predict(
        self,
        requests: Iterator[InputImage],
        options: RunOptions,
        *,
        first: int,
        thumbnails: Thumbnails,
        timer: StageTimer,
    ) -> Iterator[Iterator[Sequence[Record]]]:
        """See `Backend.predict`; raise UsageError if a node cannot take part; the report makes the thumbnails."""
        out = Path(os.path.abspath(options.out))
        files = read_model_files(self._model.path)
        digests = compute_digests(files)
        if digests[self._model.path.name] != self._model.fingerprint["sha256"]:
            raise ArtifactError(f"{self._model.path}: it has changed since this run began; run again")
        visible = [] if self._options.atlas is None else [os.path.abspath(self._options.atlas)]
        if (head := next(requests, None)) is not None:
            requests = itertools.chain([head], requests)
            visible += _find_file(head)
        batch = options.inference.batch
        size = BATCHES_PER_CHUNK * batch
        with _probe(out) as probe:
            if options.draws and options.remote is None:
                visible.append(str(probe))
            config = ActorConfig(
                digests,
                None,
                SessionOptions(
                    "cuda" if self._plan.gpus else "cpu",
                    self._options.threads or self._plan.cpus,
                    self._options.runtime,
                    self._options.cuda_graphs,
                    self._options.heatmap,
                ),
                replace(options, out=out, log=_ignore),
                os.getcwd(),
                visible,
                Image.MAX_IMAGE_PIXELS,
            )
            job = Job(config, files, first, size, batch)
            del files
            yield self._driver.compute(job, make_chunks(requests, first, size, batch))

    def describe_progress(self) -> str:
        """Return the nodes' rates in a few words."""
        nodes = self._driver.progress.nodes
        if len(nodes) > 3:
            rates = sorted(node.images_per_second for node in nodes)
            return f"{len(nodes)} nodes, {rates[0]:.0f} to {rates[-1]:.0f} images/s each"
        return ", ".join(f"{node.address} {node.images_per_second:.0f}/s" for node in nodes)

    def summarize(self) -> dict[str, Any]:
        """See `Backend.summarize`."""
        progress = self._driver.progress
        document = {
            "version": self._driver.cluster.version,
            "actor": {"gpus": self._plan.gpus, "cpus": self._plan.cpus},
            "actors_started": progress.actors_started,
            "chunks_retried": progress.chunks_retried,
            "nodes": [
                {
                    "address": node.address,
                    "runtime": node.runtime,
                    "images": node.images,
                    "images_per_second": node.images_per_second,
                    "actors_lost": node.lost,
                }
                for node in progress.nodes
            ],
        }
        return {"ray": document}


@contextmanager
def _probe(out: Path) -> Iterator[Path]:
    """Yield a file in the run directory, by which a node recognises that directory."""
    for left in out.glob(f"{_PROBE}*"):
        left.unlink(missing_ok=True)
    path = out / f"{_PROBE}{uuid.uuid4().hex}"
    path.touch()
    try:
        yield path
    finally:
        with suppress(OSError):
            path.unlink()


def _find_file(request: InputImage) -> list[str]:
    """Return the absolute path of the file that holds an image, if it exists here."""
    source = request.source
    path = source if isinstance(source, str | Path) else getattr(source, "path", None)
    if request.error is not None or not isinstance(path, str | Path) or not os.path.lexists(path):
        return []
    return [os.path.abspath(path)]


def _ignore(_: str) -> None:
    """Print nothing: an actor's messages travel with its results."""
