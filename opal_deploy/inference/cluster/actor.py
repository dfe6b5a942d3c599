"""The actor: the executor of one machine, on one GPU or some CPUs, which answers shards.

It keeps its sessions, decode processes and drawing processes from one shard to the next. Two shards are in work at a
time, each in a thread of its own, so that the images of one are decoded while the other's last batches are predicted.
Errors that a user can cause are returned, not raised: Ray would wrap them in tracebacks.
"""

from __future__ import annotations

import os
import pickle
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import ray

from opal_deploy._version import __version__
from opal_deploy.errors import OpalError, UsageError
from opal_deploy.inference.cluster.model_files import local_model
from opal_deploy.inference.cluster.shards import Shard
from opal_deploy.inference.decoding.pool import DecoderPool, Decoders
from opal_deploy.inference.executor import predict_batches, release_each
from opal_deploy.inference.run.backend import RunOptions
from opal_deploy.inference.run.drawing import Drawer
from opal_deploy.inference.sheets import with_attention
from opal_deploy.inference.timing import NO_OP_TIMER
from opal_deploy.inference.types import InferenceOptions, Pixels
from opal_deploy.options import RuntimeName
from opal_deploy.records.record import Record
from opal_deploy.runtime.select import open_sessions
from opal_deploy.runtime.session import PaddingSession, pinned

# shards in work at a time
IN_FLIGHT = 2


@dataclass(frozen=True)
class ActorConfig:
    """The part of a run that every actor needs.

    Attributes:
        digests: hex sha256 of the model's files by name, the model's own first.
        files: reference to their bytes by name.
        device: `cpu` or `cuda`.
        threads: CPU threads of the runtime.
        runtime: that opens the model.
        cuda_graphs: replay a batch size as a CUDA graph.
        heatmap: sheets show attention maps.
        options: of the run; `out` is absolute.
        folder: the driver's working directory, from which images and the run directory may be named.
        visible: paths that the driver sees, and every node has to.
        pillow_limit: Pillow's own limit of pixels in the driver.
    """

    digests: Mapping[str, str]
    files: ray.ObjectRef[dict[str, bytes]]
    device: str
    threads: int
    runtime: RuntimeName
    cuda_graphs: bool
    heatmap: bool
    options: RunOptions
    folder: str
    visible: Sequence[str]
    pillow_limit: int | None


@dataclass(frozen=True)
class ShardResult:
    """The answer to a shard.

    Attributes:
        records: pickled list, one record a request. As bytes they take a fifth of the memory while they wait.
        messages: what a person should know.
    """

    records: bytes
    messages: tuple[str, ...]

    def load(self) -> list[Record]:
        """Return the records."""
        records: list[Record] = pickle.loads(self.records)  # noqa: S301 (an actor of this run wrote it)
        return records


class ShardActor:
    """Answers shards; `open` comes first, and at most `IN_FLIGHT` calls of `predict` go on at a time."""

    def __init__(self) -> None:
        """Open nothing yet: an error of the constructor would reach the driver as text."""
        self._stack = ExitStack()
        self._messages: list[str] = []
        self._lock = threading.Lock()
        self._decoders: _SharedDecoders | None = None
        self._drawer: Drawer | None = None

    def get_version(self) -> str:
        """Return the version of opal-deploy on this node."""
        return __version__

    def open(self, config: ActorConfig) -> str | OpalError:
        """Open the model, and return its runtime and device in one line."""
        try:
            return self._open(config)
        except OpalError as error:
            return error

    def _open(self, config: ActorConfig) -> str:
        from PIL import Image

        with suppress(OSError):  # where all paths are absolute, it need not be there
            os.chdir(config.folder)
        for path in config.visible:
            if not os.path.lexists(path):
                raise UsageError(f"{path}: not there; expected images, --out and --atlas on storage that all nodes see")
        Image.MAX_IMAGE_PIXELS = config.pillow_limit
        self._options = config.options
        self._inference: InferenceOptions = config.options.inference_for_drawing
        files = local_model(config.digests, lambda: ray.get(config.files))
        model = self._stack.enter_context(files)
        self._sessions = open_sessions(
            model, device=config.device, threads=config.threads, cuda_graphs=config.cuda_graphs, runtime=config.runtime
        )
        if config.heatmap:
            self._sessions = with_attention(self._sessions, model.name)
        for session in self._sessions:
            if isinstance(session, PaddingSession):
                session.add_batch_size(self._inference.batch)
        if config.options.draws:
            options = config.options
            drawer = Drawer(
                options.drawings_out, options.report, options.sheets, self._inference, thumbnails={}, timer=NO_OP_TIMER
            )
            self._drawer = self._stack.enter_context(drawer)
        return self._sessions[0].description

    def predict(self, shard: bytes) -> ShardResult | OpalError:
        """Return one record a request of the shard; after an error, nothing more can be asked of this actor."""
        try:
            records = self._predict(Shard.from_bytes(shard))
        except OpalError as error:
            return error
        with self._lock:
            messages, self._messages = tuple(self._messages), []
        return ShardResult(pickle.dumps(records, pickle.HIGHEST_PROTOCOL), messages)

    def _predict(self, shard: Shard) -> list[Record]:
        batches = predict_batches(
            shard.requests,
            self._sessions,
            self._inference,
            print_message=self._messages.append,
            open_decoders=self._share_decoders,
            first=shard.first,
        )
        with closing(batches):
            results = release_each(batches)
            if self._drawer is not None:
                return list(self._drawer.draw_all(results, shard.first))
            return [result.record for result in results]

    def _share_decoders(self, *arguments: Any, slots: int, rows: int) -> Decoders:
        with self._lock:
            if self._decoders is None:
                pool = self._stack.enter_context(DecoderPool(*arguments, slots=IN_FLIGHT * slots, rows=rows))
                for session in self._sessions:
                    # for all shards: memory that one of them locked must not be unlocked beside another
                    self._stack.enter_context(pinned(session, pool.pixels))
                self._decoders = _SharedDecoders(pool)
            return self._decoders

    def close(self) -> None:
        """End the processes, and remove the model from the node unless others there use it."""
        self._stack.close()


class _SharedDecoders:
    """A decoder pool that stays open when the block of one of its users is left."""

    def __init__(self, pool: DecoderPool) -> None:
        self._pool = pool
        self.submit = pool.submit

    @property
    def pixels(self) -> Pixels:
        """See `Decoders.pixels`."""
        return self._pool.pixels

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave the pool open."""
