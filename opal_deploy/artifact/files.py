"""Model files by suffix, digests, locked folders, and writing that never leaves half a file under its final name.

Packages for atomic writing would not do: they are unmaintained, do not keep the suffix (which ONNX Runtime and Pillow
read), and leave folders that were made for a file that failed.
"""

from __future__ import annotations

import codecs
import errno
import glob
import hashlib
import json
import os
import stat
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, Literal

from opal_deploy.errors import ArtifactError, UsageError
from opal_deploy.options import StrPath

CHECKPOINT_SUFFIXES = (".pt", ".pth")
ONNX_SUFFIX = ".onnx"
ENGINE_SUFFIX = ".engine"
ModelKind = Literal["checkpoint", "onnx", "engine"]
_KINDS: dict[str, ModelKind] = {".pt": "checkpoint", ".pth": "checkpoint", ONNX_SUFFIX: "onnx", ENGINE_SUFFIX: "engine"}

# some file systems of clusters have no locks: work goes on without one there
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL)


def model_kind(path: Path) -> ModelKind | None:
    """Return the kind of a model file by its suffix; None for another suffix."""
    return _KINDS.get(path.suffix)


def check_regular(path: Path) -> None:
    """Raise OSError unless a path leads to a regular file: reading a pipe could block, and some devices never end."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(errno.EINVAL, "it is a folder, a pipe or a device, not a file")


def check_replaceable(path: Path) -> bool:
    """Return whether a path leads to a regular file; raise OSError if it leads to anything else."""
    if path.is_dir():
        raise OSError(errno.EISDIR, "a folder has that name")
    if path.exists():
        check_regular(path)
        return True
    return False


def check_output(
    option: str, path: Path, suffixes: Iterable[str], *, inputs: Iterable[StrPath | None] = (), overwrite: bool
) -> None:
    """Check that a file may be written; the caller then uses `atomic_write(path, replace=overwrite)`.

    Args:
        option: the option that names the file, such as `--html`.
        path: the file.
        suffixes: the suffixes of its kind, such as `.html`.
        inputs: files that the call reads; anything else, such as a URL, is ignored.
        overwrite: whether a file of its kind may be replaced.

    Raises:
        UsageError: the path exists and is not a file of this kind, is a file that the call reads, or is any file
            without `overwrite`.
    """
    advice = "give another name"
    try:
        if not check_replaceable(path):
            return
        if any(is_same_file(path, Path(source)) for source in inputs if source is not None):
            raise UsageError(f"{option} {path}: this call reads that file; {advice}")
    except OSError as error:
        raise UsageError(f"{option} {path}: cannot be written ({error.strerror or error}); {advice}") from None
    if path.suffix.lower() not in suffixes:
        raise UsageError(f"{option} {path}: exists and is not a {' or '.join(suffixes)} file; {advice}")
    if not overwrite:
        raise UsageError(f"{option} {path}: the file exists; choose another name, or pass --overwrite")


def is_same_file(path: Path, other: Path) -> bool:
    """Return whether both paths lead to one existing file."""
    return path.exists() and other.exists() and path.samefile(other)


def read_text(path: Path, errors: str = "strict") -> str:
    """Return the text of a file in UTF-8, or in UTF-16 with a byte-order mark, as PowerShell writes it; line ends stay.

    Raises:
        OSError: it cannot be read, or is no regular file.
        UnicodeDecodeError: it is in another encoding, and `errors` is "strict".
    """
    check_regular(path)
    data = path.read_bytes()
    return data.decode(find_encoding(data[:2]), errors)


def find_encoding(start: bytes) -> str:
    """Return the encoding of a text that starts with these two bytes."""
    return "utf-16" if start in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE) else "utf-8-sig"


def find_delimiter(header: str) -> str:
    """Return what separates the columns of a table with this first line: a comma, or what Excel writes elsewhere."""
    return next((mark for mark in (",", ";", "\t") if mark in header), ",")


def read_json(path: Path) -> Any:
    """Return the document of a JSON file.

    Raises:
        OSError: it cannot be read, or is no regular file.
        ValueError: it is not JSON in UTF-8, or nested too deeply.
    """
    try:
        return json.loads(read_text(path))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_toml(path: Path, errors: str = "strict") -> dict[str, Any]:
    """Return the document of a TOML file.

    Raises:
        OSError: it cannot be read, or is no regular file.
        ValueError: it is not TOML in UTF-8, or nested too deeply.
    """
    try:
        return tomllib.loads(read_text(path, errors))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def is_finite_number(value: Any) -> bool:
    """Return whether a value of JSON is a number that a float can hold: not NaN, infinite, or too large an integer."""
    return type(value) in (int, float) and abs(value) <= sys.float_info.max


def compute_sha256(path: Path) -> str:
    """Return the sha256 of a file's bytes, in hexadecimal."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def check_sha256(path: Path, expected: str) -> str:
    """Return a file's sha256; ArtifactError if it is not the expected one, or the file cannot be read."""
    try:
        digest = compute_sha256(path)
    except OSError as error:
        raise ArtifactError(f"{path}: cannot be read ({error.strerror or error}); give the model's file") from None
    if digest != expected.strip().lower():
        raise ArtifactError(f"{path}: sha256 {digest}, expected {expected.strip().lower()}; this is another file")
    return digest


@contextmanager
def lock_directory(folder: Path) -> Iterator[None]:
    """Keep other processes from working in `folder`, which is created if missing, while the block runs.

    The operating system locks a hidden file and frees it when the process ends. File systems without locks are not
    locked.

    Raises:
        UsageError: another process works there, or the folder cannot be written.
    """
    made = [parent for parent in (folder, *folder.parents) if not parent.exists()]
    path = folder / ".lock"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = _open_locked(path)
    except OSError as error:
        raise UsageError(f"{folder}: cannot be written ({error.strerror or error}); give another --out") from None
    if handle is None:
        raise UsageError(f"{folder}: another process is working there; wait for it, or give another --out")
    try:
        yield
    finally:
        with suppress(OSError):  # the folder may have become read-only; only a lock that is held counts
            path.unlink()
        os.close(handle)
        _remove_empty(made)


def _open_locked(path: Path) -> int | None:
    """Return the handle of a file that is locked, and created if missing; None if another process has locked it."""
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        if _try_lock(handle) is False:
            os.close(handle)
            return None
        # its previous owner may have removed the file in between
        with suppress(FileNotFoundError):
            if os.fstat(handle).st_ino == path.stat().st_ino:
                return handle
        os.close(handle)


def _try_lock(handle: int) -> bool | None:
    """Lock an open file until it is closed; False if another process has, None if the file system has no locks."""
    if sys.platform == "win32":  # it has no such locks
        return None
    import fcntl

    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return None
        raise
    return True


def remove_temporary_files(path: Path) -> None:
    """Remove the temporary files that killed writers of `path` left; a writer that runs has locked its own."""
    for part in path.parent.glob(f".{glob.escape(path.name)}.*.part*"):
        with suppress(OSError), part.open("r+b") as stream:
            if _try_lock(stream.fileno()):
                part.unlink()


@contextmanager
def atomic_write(path: Path, *, keep: bool = True, replace: bool = True) -> Iterator[Path]:
    """Yield a temporary path next to `path`, renamed to it when the block ends and removed when the block raises.

    Args:
        path: the final path; missing folders are created, and removed again if the block raises.
        keep: False removes the temporary file in either case.
        replace: whether a file that has the name by then is replaced.

    Raises:
        UsageError: the folder cannot be written, the disk is full, or something other than a file has the name.
    """
    made: list[Path] = []
    try:
        check_replaceable(path)
        made = [folder for folder in (path.parent, *path.parent.parents) if not folder.exists()]
        path.parent.mkdir(parents=True, exist_ok=True)
        lock, temporary = _create_temporary(path)
    except OSError as error:
        _remove_empty(made)
        raise _not_writable(path, error) from None
    try:
        yield temporary
        if not keep:
            temporary.unlink()
            return
        with temporary.open("rb") as stream:
            os.fsync(stream.fileno())
        if not replace and path.exists():
            raise UsageError(f"{path}: another process has made it in the meantime; give another name")
        temporary.replace(path)
    except BaseException as error:
        with suppress(OSError):
            temporary.unlink()
        _remove_empty(made)
        if isinstance(error, OSError):
            raise _not_writable(path, error) from None
        raise
    finally:
        lock.close()


def _create_temporary(path: Path) -> tuple[IO[bytes], Path]:
    """Create a file next to `path` with the user's default permissions; return a stream that locks it, and its path."""
    umask = os.umask(0)
    os.umask(umask)
    while True:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=f".part{path.suffix}")
        stream = os.fdopen(handle, "wb")
        locked = _try_lock(handle)
        if locked is None:
            # an open file cannot be renamed on Windows
            stream.close()
        # `remove_temporary_files` may have found it before it was locked
        if locked is None or (locked and os.fstat(handle).st_nlink):
            os.chmod(name, 0o666 & ~umask)
            return stream, Path(name)
        stream.close()


def _not_writable(path: Path, error: OSError) -> UsageError:
    return UsageError(f"{path}: cannot be written ({error.strerror or error}); choose another place")


def without_folders(value: Any) -> Any:
    """Return plain values with absolute paths cut to their last part, since the file may be passed on."""
    if isinstance(value, str):
        return Path(value).name or value if os.path.isabs(value) else value
    if isinstance(value, dict):
        return {key: without_folders(entry) for key, entry in value.items()}
    return type(value)(map(without_folders, value)) if isinstance(value, list | tuple) else value


def write_json(path: Path, document: Any) -> None:
    """Write a document as indented ASCII JSON, whole or not at all."""
    with atomic_write(path) as temporary:
        temporary.write_text(json.dumps(document, indent=2, ensure_ascii=True) + "\n", encoding="utf-8")


def _remove_empty(folders: list[Path]) -> None:
    """Remove folders that were created for a file that was not written, innermost first."""
    with suppress(OSError):
        for folder in folders:
            folder.rmdir()
