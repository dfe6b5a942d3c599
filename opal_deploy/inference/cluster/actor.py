"""The actor: the executor of one machine, on one GPU or some CPUs, which computes chunks of a run.

It keeps its sessions, decode processes and drawing processes from one chunk to the next. Two chunks are in flight at a
time, each in its own thread, so that the images of one are decoded while the last batches of the other are predicted.
Errors that a user can cause are returned, not raised: Ray would wrap them in tracebacks.

Each node has one copy of the model's files for all its actors. They hold a shared lock on its folder, which ends with
them, however they end. The next actor on the node removes the folders of actors that were killed.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import pickle
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opal_deploy._version import __version__
from opal_deploy.artifact.engine_file import sidecar_path
from opal_deploy.artifact.files import compute_sha256, model_kind
from opal_deploy.errors import ArtifactError, OpalError, StoppedEarly, UsageError
from opal_deploy.inference.decoding.pool import DecoderPool
from opal_deploy.inference.executor import predict_batches, release_each
from opal_deploy.inference.run.drawing import Drawer
from opal_deploy.inference.run.run import RunOptions
from opal_deploy.inference.sheets import with_attention
from opal_deploy.inference.timing import NO_OP_TIMER
from opal_deploy.inference.types import InferenceOptions, InputImage
from opal_deploy.options import RuntimeName
from opal_deploy.records.record import Record
from opal_deploy.runtime.select import open_sessions
from opal_deploy.runtime.session import PaddingSession, pinned

if TYPE_CHECKING:
    import ray

# chunks in flight per actor
IN_FLIGHT = 2


@dataclass(frozen=True)
class ActorConfig:
    """The part of a run that every actor needs.

    Attributes:
        digests: hex sha256 of the model's files by name, the model's own first.
        files: reference to their bytes by name; None until the driver has put them into the object store.
        device: `cpu` or `cuda`.
        threads: CPU threads of the runtime.
        runtime, cuda_graphs: how the model is opened.
        heatmap: sheets show attention maps.
        options: of the run; `out` is absolute.
        folder: the driver's working directory, to which paths are relative.
        visible: paths that exist on the driver and must exist on every node.
        pillow_limit: Pillow's own limit of pixels in the driver.
    """

    digests: Mapping[str, str]
    files: ray.ObjectRef[dict[str, bytes]] | None
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
class Chunk:
    """Contiguous images of a run.

    Attributes:
        first: number of the first image in the run, from 0.
        requests: the images.
        deaths: number of actors that died while they had this chunk.
        node: id of the node of the last of these; empty for none.
    """

    first: int
    requests: tuple[InputImage, ...]
    deaths: int = 0
    node: str = ""

    def __len__(self) -> int:
        return len(self.requests)

    def to_bytes(self) -> bytes:
        """Return the chunk as it is sent: its pickle would be several times larger and slower."""
        requests = [
            # a path is pickled in a fraction of the time as text
            (
                r.name,
                os.fspath(r.source) if isinstance(r.source, Path) else r.source,
                r.crop,
                r.label,
                r.error,
                r.index,
                r.drawn,
                r.frame,
            )
            for r in self.requests
        ]
        return pickle.dumps((self.first, requests), pickle.HIGHEST_PROTOCOL)

    @staticmethod
    def from_bytes(data: bytes) -> Chunk:
        """Return the chunk of `to_bytes`."""
        first, requests = pickle.loads(data)  # noqa: S301 (the driver of this run wrote it)
        return Chunk(first, tuple(InputImage(*fields) for fields in requests))

    def count_death(self, node: str) -> Chunk:
        """Return the chunk after one more actor, on the node with this id, died with it."""
        return replace(self, deaths=self.deaths + 1, node=node)

    def halve(self, batch: int) -> tuple[Chunk, Chunk]:
        """Return two chunks of about half the size, cut between two batches if there are several.

        Each counts one death, since either half may have caused it.
        """
        middle = self.first + len(self) // 2
        aligned = middle - middle % batch
        if self.first < aligned:
            middle = aligned
        cut = middle - self.first
        return (
            Chunk(self.first, self.requests[:cut], 1, self.node),
            Chunk(middle, self.requests[cut:], 1, self.node),
        )


@dataclass(frozen=True)
class ChunkResult:
    """The results of a chunk: its pickled records, a fifth of the memory of the list, and messages for the user."""

    records: bytes
    messages: tuple[str, ...]

    @staticmethod
    def build(records: list[Record], messages: tuple[str, ...] = ()) -> ChunkResult:
        """Return the result that holds these records."""
        return ChunkResult(pickle.dumps(records, pickle.HIGHEST_PROTOCOL), messages)

    def load(self) -> list[Record]:
        """Return the records."""
        records: list[Record] = pickle.loads(self.records)  # noqa: S301 (an actor of this run wrote it)
        return records


class ChunkActor:
    """Computes chunks. `open` comes first; at most `IN_FLIGHT` calls of `predict` run at a time."""

    def __init__(self) -> None:
        """Open nothing yet: Ray would turn an error of the constructor into text."""
        self._stack = ExitStack()
        self._messages: list[str] = []
        self._lock = threading.Lock()
        self._decoders: DecoderPool | None = None
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
        import ray
        from PIL import Image

        with suppress(OSError):  # where all paths are absolute, it need not be there
            os.chdir(config.folder)
        for path in config.visible:
            if not os.path.lexists(path):
                raise UsageError(f"{path}: not there; expected images, --out and --atlas on storage that all nodes see")
        Image.MAX_IMAGE_PIXELS = config.pillow_limit
        self._options = config.options
        self._inference: InferenceOptions = config.options.inference_for_drawing
        reference = config.files
        assert reference is not None  # the driver set it
        files = local_model(config.digests, lambda: ray.get(reference))
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

    def predict(self, chunk: bytes) -> ChunkResult | OpalError:
        """Return one record per image of the chunk; after an error the actor must not be used again."""
        try:
            records = self._predict(Chunk.from_bytes(chunk))
        except OpalError as error:
            return error
        with self._lock:
            messages, self._messages = tuple(self._messages), []
        return ChunkResult.build(records, messages)

    def _predict(self, chunk: Chunk) -> list[Record]:
        batches = predict_batches(
            chunk.requests,
            self._sessions,
            self._inference,
            print_message=self._messages.append,
            open_decoders=self._share_decoders,
            first=chunk.first,
        )
        with closing(batches):
            results = release_each(batches)
            if self._drawer is not None:
                return list(self._drawer.draw_all(results, chunk.first))
            return [result.record for result in results]

    def _share_decoders(self, *arguments: Any, slots: int, rows: int) -> AbstractContextManager[DecoderPool]:
        with self._lock:
            if self._decoders is None:
                pool = self._stack.enter_context(DecoderPool(*arguments, slots=IN_FLIGHT * slots, rows=rows))
                for session in self._sessions:
                    # for all chunks: one must not unlock memory that another still uses
                    self._stack.enter_context(pinned(session, pool.pixels))
                self._decoders = pool
            # it stays open after a chunk
            return nullcontext(self._decoders)

    def close(self) -> None:
        """End the processes, and remove the model from the node unless other actors use it."""
        self._stack.close()


def read_model_files(path: Path) -> dict[str, bytes]:
    """Return the bytes of a model's files by name, an engine's sidecar included; raise ArtifactError if unreadable."""
    paths = [path, sidecar_path(path)] if model_kind(path) == "engine" else [path]
    try:
        return {each.name: each.read_bytes() for each in paths}
    except OSError as error:
        raise ArtifactError(f"{path}: cannot be read ({error.strerror or error}); give the model's file") from None


def compute_digests(files: Mapping[str, bytes]) -> dict[str, str]:
    """Return the hex sha256 of each file by its name."""
    return {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}


@contextmanager
def local_model(digests: Mapping[str, str], fetch: Callable[[], Mapping[str, bytes]]) -> Iterator[Path]:
    """Yield the path of the model's file on this node, which exists while the block runs.

    Args:
        digests: hex sha256 of each file by its name, the model's own first.
        fetch: returns the files; called if they are not here yet.

    Raises:
        ArtifactError: a file has another digest. StoppedEarly: the temporary folder cannot be written to.
    """
    root = Path(tempfile.gettempdir()) / f"opal-deploy-{os.getuid()}"
    key = hashlib.sha256("".join(digests.values()).encode()).hexdigest()[:32]
    try:
        root.mkdir(mode=0o700, exist_ok=True)
        if root.stat().st_uid != os.getuid() or root.is_symlink():
            raise PermissionError(errno.EPERM, "it belongs to somebody else")
        _remove_unused(root)
        descriptor = _acquire(root / key, digests, fetch)
    except OSError as error:
        raise StoppedEarly(
            f"{root}: the model cannot be written there ({error.strerror or error}); make room, or set TMPDIR"
        ) from None
    try:
        yield root / key / next(iter(digests))
    finally:
        _release(root / key, descriptor)


def _acquire(folder: Path, digests: Mapping[str, str], fetch: Callable[[], Mapping[str, bytes]]) -> int:
    """Write the files if they are missing, and return a descriptor with a shared lock on the folder."""
    while True:
        folder.mkdir(mode=0o700, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            # another actor may have removed the folder meanwhile
            if _is_same(folder, descriptor):
                with (folder / ".lock").open("wb") as lock:
                    fcntl.flock(lock, fcntl.LOCK_EX)
                    _write_missing(folder, digests, fetch)
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _write_missing(folder: Path, digests: Mapping[str, str], fetch: Callable[[], Mapping[str, bytes]]) -> None:
    if all((folder / name).is_file() and compute_sha256(folder / name) == digest for name, digest in digests.items()):
        return
    for name, data in fetch().items():
        path = folder / name
        path.write_bytes(data)
        if (found := compute_sha256(path)) != digests[name]:
            raise ArtifactError(f"{name}: sha256 {found} on this node, expected {digests[name]}; it was changed")


def _is_same(folder: Path, descriptor: int) -> bool:
    with suppress(FileNotFoundError):
        return folder.stat().st_ino == os.fstat(descriptor).st_ino
    return False


def _release(folder: Path, descriptor: int) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        pass  # others use it
    else:
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(descriptor)


def _remove_unused(root: Path) -> None:
    """Remove the folders that no living actor uses."""
    for folder in root.iterdir():
        with suppress(OSError):
            _release(folder, os.open(folder, os.O_RDONLY))
