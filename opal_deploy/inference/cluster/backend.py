"""The backend of a run on a Ray cluster."""

from __future__ import annotations

import itertools
import os
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray
from PIL import Image

from opal_deploy.errors import ArtifactError
from opal_deploy.inference.cluster.actor import ActorConfig, compute_digests, read_model_files
from opal_deploy.inference.cluster.connection import ActorPlan
from opal_deploy.inference.cluster.pool import ActorPool, NodeStatistics
from opal_deploy.inference.cluster.scheduler import Scheduler, make_chunks
from opal_deploy.inference.run.drawing import Thumbnails
from opal_deploy.inference.run.run import RunOptions
from opal_deploy.inference.timing import StageTimer
from opal_deploy.inference.types import InputImage
from opal_deploy.options import RuntimeName
from opal_deploy.records.record import Digests, Record, error_record

# an actor that dies costs two chunks at most, and a message to an actor as much as some images
BATCHES_PER_CHUNK = 4
_PROBE = ".visible-"


@dataclass(frozen=True)
class ModelOptions:
    """The model of a run, and how the actors open it.

    Attributes:
        path: its file, on the driver.
        sha256: the file's hex digest.
        runtime: that opens it.
        threads: CPU threads of the runtime; None: the actor's cores.
        cuda_graphs: replay a batch size as a CUDA graph.
        heatmap: sheets show attention maps.
    """

    path: Path
    sha256: str
    runtime: RuntimeName = "auto"
    threads: int | None = None
    cuda_graphs: bool = False
    heatmap: bool = False


class RayBackend:
    """Predicts with actors of the cluster that this process is connected to; see `connection.connect`."""

    def __init__(self, plan: ActorPlan, model: ModelOptions, shared: Sequence[Path] = ()) -> None:
        """Start nothing yet.

        Args:
            plan: the size of the actors.
            model: the model.
            shared: folders that every node has to see, beside those of images and drawings.
        """
        self._plan, self._model, self._shared = plan, model, shared
        self.description = f"Ray {ray.__version__}, actors of {plan}"
        self._pool: ActorPool | None = None
        self._scheduler: Scheduler | None = None

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
        """See `Backend.predict`; thumbnails are left to the report, which makes them of the overlays.

        Raises:
            UsageError: a node has another version, does not see the images or the run directory, or cannot open the
                model.
        """
        out = Path(os.path.abspath(options.out))
        files = read_model_files(self._model.path)
        digests = compute_digests(files)
        if digests[self._model.path.name] != self._model.sha256:
            raise ArtifactError(f"{self._model.path}: it was changed since this run was begun; run again")
        visible = [os.path.abspath(path) for path in self._shared]
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
                ray.put(files),
                "cuda" if self._plan.gpus else "cpu",
                self._model.threads or self._plan.cpus,
                self._model.runtime,
                self._model.cuda_graphs,
                self._model.heatmap,
                replace(options, out=out, log=_ignore),
                os.getcwd(),
                visible,
                Image.MAX_IMAGE_PIXELS,
            )
            del files
            pool = self._pool = ActorPool(self._plan, config, options.log)
            scheduler = self._scheduler = Scheduler(
                pool,
                make_chunks(requests, first, size, batch),
                first=first,
                size=size,
                batch=batch,
                build_error=self._build_error,
            )
            try:
                yield scheduler.run()
            finally:
                pool.close()

    def _build_error(self, request: InputImage) -> Record:
        message = "the actors that predicted it died, the last one with no other image in work"
        digests = Digests(None, self._model.sha256)
        return error_record(
            request.name, "worker_died", message, digests=digests, label=request.label, index=request.index
        )

    @property
    def nodes(self) -> list[NodeStatistics]:
        """The nodes that answered, by their addresses."""
        return [] if self._pool is None else [node for _, node in sorted(self._pool.statistics.items())]

    def describe_progress(self) -> str:
        """Return the nodes' rates in a few words."""
        nodes = self.nodes
        if len(nodes) > 3:
            rates = sorted(node.images_per_second for node in nodes)
            return f"{len(nodes)} nodes, {rates[0]:.0f} to {rates[-1]:.0f} images/s each"
        return ", ".join(f"{node.address} {node.images_per_second:.0f}/s" for node in nodes)

    def summarize(self) -> dict[str, Any]:
        """See `Backend.summarize`."""
        pool, scheduler = self._pool, self._scheduler
        document = {
            "version": ray.__version__,
            "actor": {"gpus": self._plan.gpus, "cpus": self._plan.cpus},
            "actors_started": 0 if pool is None else pool.num_opened,
            "shards_retried": 0 if scheduler is None else scheduler.num_retried,
            "nodes": [
                {
                    "address": node.address,
                    "runtime": node.runtime,
                    "images": node.images,
                    "images_per_second": node.images_per_second,
                    "actors_lost": node.lost,
                }
                for node in self.nodes
            ],
        }
        return {"ray": document}


@contextmanager
def _probe(out: Path) -> Iterator[Path]:
    """Yield a file in the run directory, by which a node sees that it is the same directory there."""
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
    """Return the absolute path of the file that holds an image, if there is one here."""
    source = request.source
    path = source if isinstance(source, str | Path) else getattr(source, "path", None)
    if request.error is not None or not isinstance(path, str | Path) or not os.path.lexists(path):
        return []
    return [os.path.abspath(path)]


def _ignore(_: str) -> None:
    """Print nothing: an actor's messages travel with its results."""
