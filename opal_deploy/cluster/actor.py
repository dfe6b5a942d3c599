"""The actor: a predictor of chunks on one GPU or some CPUs, and the model's files on its node.

Errors that a user can cause are returned, not raised: Ray would wrap them in tracebacks.

Each node has one copy of the model's files for all its actors. They hold a shared lock on its folder, which ends with
them, however they end. The next actor on the node removes the folders of actors that were killed.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from opal_deploy._version import __version__
from opal_deploy.artifact.engine_file import sidecar_path
from opal_deploy.artifact.files import compute_sha256, model_kind
from opal_deploy.errors import ArtifactError, OpalError, StoppedEarly, UsageError
from opal_deploy.parallel.chunk import Chunk, ChunkResult
from opal_deploy.parallel.predictor import ChunkPredictor, SessionOptions
from opal_deploy.run.run import RunOptions

if TYPE_CHECKING:
    import ray


@dataclass(frozen=True)
class ActorConfig:
    """The part of a run that every actor needs.

    Attributes:
        digests: hex sha256 of the model's files by name, the model's own first.
        files: reference to their bytes by name; None until the driver has put them into the object store.
        sessions: how the model is opened.
        options: of the run; `out` is absolute.
        folder: the driver's working directory, to which paths are relative.
        visible: paths that exist on the driver and must exist on every node.
        pillow_limit: Pillow's own limit of pixels in the driver.
    """

    digests: Mapping[str, str]
    files: ray.ObjectRef[dict[str, bytes]] | None
    sessions: SessionOptions
    options: RunOptions
    folder: str
    visible: Sequence[str]
    pillow_limit: int | None


class ChunkActor:
    """Computes chunks. `open` comes first; at most `IN_FLIGHT` calls of `predict` run at a time."""

    def __init__(self) -> None:
        """Open nothing yet: Ray would turn an error of the constructor into text."""
        self._stack = ExitStack()

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
        reference = config.files
        assert reference is not None  # the driver set it
        files = local_model(config.digests, lambda: ray.get(reference))
        model = self._stack.enter_context(files)
        sessions = config.sessions.open(model)
        self._predictor = self._stack.enter_context(ChunkPredictor(sessions, config.options))
        return sessions[0].description

    def predict(self, chunk: bytes) -> ChunkResult | OpalError:
        """See `ChunkPredictor.predict`."""
        return self._predictor.predict(Chunk.from_bytes(chunk))

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
            raise PermissionError(errno.EPERM, "it belongs to another user")
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
