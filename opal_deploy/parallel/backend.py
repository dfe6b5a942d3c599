"""The backend of a run with several processes on this machine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from PIL import Image

from opal_deploy.artifact.files import check_sha256
from opal_deploy.errors import UsageError
from opal_deploy.parallel.chunk import BATCHES_PER_CHUNK, make_chunks
from opal_deploy.parallel.pool import ProcessWorkerPool
from opal_deploy.parallel.predictor import SessionOptions
from opal_deploy.parallel.scheduler import Scheduler
from opal_deploy.parallel.worker import ChunkTask
from opal_deploy.predict.setup import LoadedModel
from opal_deploy.records.record import Record
from opal_deploy.run.drawing import Thumbnails
from opal_deploy.run.options import InferOptions
from opal_deploy.run.run import Backend, RunOptions
from opal_deploy.runtime.devices import available_cpus, default_workers, split_devices
from opal_deploy.runtime.session import Session
from opal_deploy.sources.image import InputImage
from opal_deploy.timing import StageTimer
from opal_deploy.workers.worker import WorkerConfig


class ProcessBackend(Backend):
    """Predicts with worker processes, which have opened the model."""

    def __init__(self, pool: ProcessWorkerPool, model_sha256: str) -> None:
        """Open the model in all processes of the pool; raises as `ProcessWorkerPool.open`."""
        self._pool, self._model_sha256 = pool, model_sha256
        self._opened = pool.open()
        self._num_retried = 0

    @property
    def description(self) -> str:
        """See `Backend.description`."""
        # processes without a device of their own are alike
        sessions = dict.fromkeys(description for description, _ in self._opened)
        return f"{len(self._opened)} processes: {'; '.join(sessions)}"

    @property
    def default_batch(self) -> int:
        """See `Backend.default_batch`."""
        return self._opened[0][1]

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
        """See `Backend.predict`; the report makes the thumbnails."""
        batch = options.inference.batch
        size = BATCHES_PER_CHUNK * batch
        self._pool.begin(replace(options, log=_ignore))
        scheduler = Scheduler(
            self._pool,
            make_chunks(requests, first, size, batch),
            first=first,
            size=size,
            batch=batch,
            model_sha256=self._model_sha256,
        )
        try:
            yield (result.load() for result in scheduler.run())
        finally:
            self._num_retried = scheduler.num_retried
            for times in self._pool.close():
                timer.add_times(times)

    def summarize(self) -> dict[str, Any]:
        """See `Backend.summarize`."""
        counts = {"count": len(self._opened), "lost": self._pool.num_lost, "chunks_retried": self._num_retried}
        return {"processes": counts}


@dataclass(frozen=True)
class ProcessPlan:
    """The processes of a run on this machine: the device of each, and the CPUs that each may keep busy."""

    devices: tuple[str, ...]
    cpus: int

    def count_workers(self, workers: int | None) -> int:
        """Return the number of decode workers per process; `workers`: the number of all, None for the default."""
        return max(1, workers // len(self.devices)) if workers else default_workers(self.cpus)


def plan_processes(options: InferOptions, *, model_is_open: bool) -> ProcessPlan | None:
    """Return the processes that a run starts; None if it predicts in the calling process.

    Raises:
        UsageError: `processes` contradicts another option, or an open model.
    """
    reason = ""
    if options.ray is not None:
        reason = "with --ray: its actors are processes already"
    elif options.every is not None:
        reason = "with --every: videos are decoded in one process"
    elif model_is_open:
        reason = "with an open model: give the path of the model file"
    if reason and (options.processes or 1) > 1:
        raise UsageError(f"--processes {options.processes} {reason}; leave out --processes")
    devices = split_devices(options.device)
    count = 1 if reason else options.processes or len(devices)
    if count == 1:
        return None
    # GPUs in turn: of more processes than GPUs, several share one
    shares = [devices[number::count] or [devices[number % len(devices)]] for number in range(count)]
    names = [_join_devices(share) for share in shares]
    return ProcessPlan(tuple(names), max(1, available_cpus() // count))


def _join_devices(devices: Sequence[str]) -> str:
    """Return the devices of one process in the form of `split_devices`."""
    return devices[0] if len(devices) == 1 else ",".join(device.partition(":")[2] for device in devices)


@contextmanager
def open_processes(model: LoadedModel, plan: ProcessPlan, options: InferOptions) -> Iterator[ProcessBackend]:
    """Start the processes of a run, which end with the block; raises as `load_model`, and StoppedEarly."""
    sha256 = model.fingerprint["sha256"]
    threads = max(1, options.threads // len(plan.devices)) if options.threads else plan.cpus
    configs = []
    for device in plan.devices:
        how = SessionOptions(device, threads, options.runtime, options.cuda_graphs, options.heatmap)
        open_model = partial(_open_model, model.path, sha256, how)
        configs.append(
            (device, WorkerConfig(ChunkTask(open_model, options.batch), Image.MAX_IMAGE_PIXELS, predicts=True))
        )
    with closing(ProcessWorkerPool(configs, options.log)) as pool:
        yield ProcessBackend(pool, sha256)


def _open_model(path: Path, sha256: str, options: SessionOptions) -> list[Session]:
    # a process that is replaced must not continue with another model
    check_sha256(path, sha256)
    return options.open(path)


def _ignore(_: str) -> None:
    """Print nothing: a worker's messages travel with its results."""
