"""Memory that several processes map, without a name in any file system."""

from __future__ import annotations

import contextlib
import mmap
import os
import sys
import tempfile

from opal_deploy.errors import StoppedEarly


def create_shared_memory(size: int) -> int:
    """Return the file descriptor of `size` bytes of zeros; close it once it is mapped and handed on.

    Memory is taken as it is written to. It is no part of /dev/shm, which containers keep small.

    Raises:
        StoppedEarly: the system refuses it, as under a limit on the size of files (ulimit -f).
    """
    try:
        descriptor = _create_unnamed_file()
        try:
            os.ftruncate(descriptor, size)
            _fix_size(descriptor)
        except BaseException:
            os.close(descriptor)
            raise
    except OSError as error:
        raise StoppedEarly(
            f"{-(-size >> 20)} MiB of memory to share with worker processes cannot be had ({error.strerror or error}); "
            "see ulimit -f and ulimit -n, use a smaller --batch, or --no-isolate"
        ) from None
    return descriptor


def _create_unnamed_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("opal-deploy", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _fix_size(descriptor: int) -> None:
    """Let no process cut the memory, where the system can do that: all others would end with SIGBUS as they read it."""
    if sys.platform == "linux":
        import fcntl

        with contextlib.suppress(OSError):
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)


def map_shared_memory(descriptor: int, size: int) -> mmap.mmap:
    """Return the memory of `create_shared_memory`, as this process sees it.

    Raises:
        MemoryError: there is no room for it.
    """
    try:
        return mmap.mmap(descriptor, size)
    except OSError as error:
        raise MemoryError(f"{-(-size >> 20)} MiB cannot be mapped ({error.strerror})") from None
