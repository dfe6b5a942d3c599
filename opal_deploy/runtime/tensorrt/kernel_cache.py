"""The kernels that TensorRT for RTX compiled for an engine on this machine, kept on disk for the next start.

An engine of TensorRT for RTX is compiled where it runs: at every start, unless its runtime cache was kept. The library
itself refuses a cache of another version, GPU or driver. Never run on hardware when this was written.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from pathlib import Path
from typing import Any

from opal_deploy.artifact.files import atomic_write
from opal_deploy.errors import OpalError

_SHA256_BYTES = 32


class KernelCache:
    """One engine's cache; whatever goes wrong with it costs time, and is never an error."""

    def __init__(self, engine: Path, engine_sha256: str, native: Any) -> None:
        """Read what an earlier start kept.

        Args:
            engine: path of the engine, beside which the file lies; in the user's cache folder where that is read-only.
            engine_sha256: of the engine, to which the file belongs.
            native: the library's `IRuntimeCache`, empty.
        """
        self._engine_sha256, self._native = engine_sha256.encode(), native
        self._paths = (engine.with_name(engine.name + ".kernels"), _cache_folder() / f"{engine_sha256}.kernels")
        self._kept = b""
        for path in self._paths:
            content = path.read_bytes() if _is_readable(path) else b""
            kernels = content[_SHA256_BYTES:]
            # native code sees only what was written whole, for this very engine
            if kernels and content[:_SHA256_BYTES] == self._digest(kernels) and native.deserialize(kernels):
                self._kept = kernels
                return

    def save(self) -> None:
        """Write the kernels where there are other ones than were read or written last."""
        with contextlib.suppress(OpalError, OSError):
            kernels = bytes(self._native.serialize() or b"")
            if not kernels or kernels == self._kept:
                return
            self._kept = kernels
            try:
                self._write(self._paths[0], kernels)
            except (OpalError, OSError):
                self._paths[1].parent.mkdir(parents=True, exist_ok=True)
                self._write(self._paths[1], kernels)

    def _write(self, path: Path, kernels: bytes) -> None:
        with atomic_write(path) as temporary:
            temporary.write_bytes(self._digest(kernels) + kernels)

    def _digest(self, kernels: bytes) -> bytes:
        return hashlib.sha256(self._engine_sha256 + kernels).digest()


def _cache_folder() -> Path:
    """Return the folder of the XDG base directory specification for what can be made again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "opal-deploy"


def _is_readable(path: Path) -> bool:
    try:
        return path.is_file() and os.access(path, os.R_OK)
    except OSError:
        return False
