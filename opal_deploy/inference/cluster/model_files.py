"""The model's files on a node: written once for all actors there, checked, and removed with the last actor.

Actors hold a shared lock on the folder, which ends with them, however they end. Folders of actors that were killed are
removed by the next actor on the node.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from opal_deploy.artifact.engine_file import sidecar_path
from opal_deploy.artifact.files import compute_sha256, model_kind
from opal_deploy.errors import ArtifactError, StoppedEarly


def read_model_files(path: Path) -> dict[str, bytes]:
    """Return the bytes of a model's files by name: the model's own, first, and an engine's sidecar.

    Raises:
        ArtifactError: one cannot be read.
    """
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
    """Yield the path of the model's file on this node, which stays there while the block runs.

    Args:
        digests: hex sha256 of each file by its name, the model's own first.
        fetch: returns the files; called where they are not here yet.

    Raises:
        ArtifactError: what `fetch` returned has another digest.
        StoppedEarly: the node's temporary folder cannot be written to.
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
    """Write the files unless they are there, and return a descriptor with a shared lock on the folder."""
    while True:
        folder.mkdir(mode=0o700, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            # before that, another actor may have taken the folder away
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
    """Remove the folders that no living actor has."""
    for folder in root.iterdir():
        with suppress(OSError):
            _release(folder, os.open(folder, os.O_RDONLY))
