"""Memory that several processes map, without a name in any file system."""

from __future__ import annotations

import mmap
import os
import tempfile

from opal_deploy.errors import StoppedEarly


def create_shared_memory(size: int) -> int:
    """Return the file descriptor of `size` bytes of zeros; close it once it is mapped and handed on.

    Memory is taken as it is written to. It is no part of /dev/shm, which containers keep small.

    Raises:
        StoppedEarly: the system refuses it, as under a limit on the size of files (ulimit -f).
    """
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("opal-deploy")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    try:
        os.ftruncate(descriptor, size)
    except OSError as error:
        os.close(descriptor)
        raise StoppedEarly(
            f"{size >> 20} MiB of memory to share with worker processes cannot be had ({error.strerror}); "
            "see ulimit -f, use a smaller --batch, or --no-isolate"
        ) from None
    return descriptor


def map_shared_memory(descriptor: int, size: int) -> mmap.mmap:
    """Return the memory of `create_shared_memory`, as this process sees it.

    Raises:
        MemoryError: there is no room for it.
    """
    try:
        return mmap.mmap(descriptor, size)
    except OSError as error:
        raise MemoryError(f"{size >> 20} MiB cannot be mapped ({error.strerror})") from None
