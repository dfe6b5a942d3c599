"""The main function of a worker process, which answers groups of requests until stdin ends; and shared memory.

It imports numpy, Pillow and what its task needs. A request is a pickle, since it comes from the parent.
A response is JSON and raw bytes: a malicious file may have taken over the decoder, and nothing that it sends may run in
the parent. Shared memory holds the position of the request in flight, which the parent reads after a crash.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import pickle
import select
import signal
import struct
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, BinaryIO, Protocol, TypeAlias

from PIL import Image

from opal_deploy.errors import StoppedEarly
from opal_deploy.timing import NO_OP_TIMER, StageTimer

LENGTH = struct.Struct(">Q")
# the position of the request in flight in its group
POSITION = struct.Struct("<Q")
READY = b"\x01"
# a process that has grown by this much is replaced: an allocator does not always give memory back
_MAX_GROWTH_BYTES = 256 << 20


# bytes, and those that were received
Data: TypeAlias = bytes | memoryview
# JSON, which has no key `sizes`, and the bytes that follow it
Response: TypeAlias = tuple[dict[str, Any], Sequence[Data]]


class Task(Protocol):
    """The work of a worker process; it is pickled once per process.

    If it has a method `prepare_group`, that gets each group of requests and returns the requests to answer. While its
    attribute `in_use` is true, its process is not replaced for having grown.
    """

    def __call__(self, request: Any, timer: StageTimer, claim: Callable[[int], None]) -> Response:
        """Answer a request of `ProcessPool.call`; `claim` waits until the parent grants so many pixels."""
        ...


@dataclass(frozen=True)
class WorkerConfig:
    """The settings of a worker process.

    Attributes:
        task: answers the requests.
        pillow_limit: the parent's `Image.MAX_IMAGE_PIXELS`.
        timed: send the times of the task's stages.
        predicts: the task runs a model rather than decode or draw: its libraries use threads, what they print is shown,
            and SIGTERM, which a service manager sends to all processes, is left to the parent.
    """

    task: Task
    pillow_limit: int | None
    timed: bool = False
    predicts: bool = False


def main(position_descriptor: int) -> None:
    """Run the process; `position_descriptor`: shared memory for the position of the request in flight."""
    position = map_shared_memory(position_descriptor, POSITION.size)
    requests, responses = _take_over_standard_streams()
    end_with_the_parent(requests.fileno())
    config: WorkerConfig = pickle.loads(_read(requests, _read_length(requests)))  # noqa: S301 (the parent wrote it)
    Image.MAX_IMAGE_PIXELS = config.pillow_limit
    memory_at_start = _resident_bytes()
    responses.write(READY)
    responses.flush()
    if config.predicts:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    else:
        # from here on, drop what libraries print about odd files
        warnings.simplefilter("ignore")
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    while size := _read_length(requests):
        group: list[Any] = pickle.loads(_read(requests, size))  # noqa: S301 (the parent wrote it)
        for part in _build_response(group, position, config, partial(_claim, requests, responses), memory_at_start):
            responses.write(part)
        responses.flush()


def _claim(requests: BinaryIO, responses: BinaryIO, pixels: int) -> None:
    encoded = json.dumps({"claim": pixels}).encode()
    responses.write(LENGTH.pack(len(encoded)) + encoded)
    responses.flush()
    # an empty message
    _read_length(requests)


def _build_response(
    group: list[Any], position: mmap.mmap, config: WorkerConfig, claim: Callable[[int], None], memory_at_start: int
) -> list[Data]:
    """Return the header with its length, and the bytes that follow it."""
    timer = StageTimer() if config.timed else NO_OP_TIMER
    headers: list[dict[str, Any]] = []
    all_parts: list[Data] = []
    prepare_group: Callable[[list[Any]], Iterable[Any]] = getattr(config.task, "prepare_group", list)
    for number, request in enumerate(prepare_group(group)):
        POSITION.pack_into(position, 0, number)
        claims: list[int] = []

        def claim_pixels(pixels: int, claims: list[int] = claims) -> None:
            claims.append(pixels)
            claim(pixels)

        try:
            header, parts = config.task(request, timer, claim_pixels)
        except MemoryError:
            # this process ends, and another one retries the request
            raise
        except Exception:
            header, parts = {"traceback": traceback.format_exc()}, []
        if claims and number + 1 < len(group):
            # the next request may need fewer pixels
            claim(0)
        headers.append({**header, "sizes": [len(part) for part in parts]})
        all_parts += parts
    response = {
        "responses": headers,
        "times": [(row.stage, row.wall, row.cpu, row.calls) for row in timer.read().stages],
        "retire": not getattr(config.task, "in_use", False) and _resident_bytes() - memory_at_start > _MAX_GROWTH_BYTES,
    }
    encoded = json.dumps(response).encode()
    return [LENGTH.pack(len(encoded)) + encoded, *all_parts]


def _take_over_standard_streams() -> tuple[BinaryIO, BinaryIO]:
    """Return copies of stdin and stdout, so that libraries' output does not mix with responses."""
    requests, responses = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)

    def leave_pipes() -> None:
        for stream in (requests, responses):
            os.dup2(nothing, stream.fileno(), inheritable=False)

    if hasattr(os, "register_at_fork"):
        # a copy of this process, made by a library, must not answer, nor keep the pipes open after its end
        os.register_at_fork(after_in_child=leave_pipes)
    return requests, responses


def end_with_the_parent(descriptor: int) -> None:
    """Leave Ctrl-C to the parent, and end this process when the parent has ended, for whatever reason.

    `descriptor`: this process's end of a pipe or socket; only the parent has the other one.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if not hasattr(select, "poll"):
        # it still ends when it next reads a request
        return
    hangup = select.poll()
    hangup.register(descriptor, 0)

    def watch() -> None:
        # the parent's end is closed; the request in flight may never end
        hangup.poll()
        # with the processes that it started
        if os.getpgrp() == os.getpid():
            os.killpg(0, signal.SIGKILL)
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()


def _read_length(stream: BinaryIO) -> int:
    """Return the length of the next message; 0 at the end."""
    header = stream.read(LENGTH.size)
    return 0 if len(header) < LENGTH.size else int(LENGTH.unpack(header)[0])


def _read(stream: BinaryIO, size: int) -> bytes:
    data = stream.read(size)
    if len(data) < size:
        sys.exit(0)
    return data


def _resident_bytes() -> int:
    """Return the memory of this process; 0 if the system does not report it."""
    try:
        with open("/proc/self/statm", "rb", buffering=0) as stream:
            return int(stream.read(200).split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return 0


def create_shared_memory(size: int) -> int:
    """Return the descriptor of `size` bytes of zeros; close it once it is mapped and passed on; raise StoppedEarly.

    Memory is allocated on first write. It is not in /dev/shm, which is small in containers.
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
    """Seal the size, if the system can: a process that shrank the memory would kill all others with SIGBUS."""
    if sys.platform == "linux":
        import fcntl

        with contextlib.suppress(OSError):
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)


def map_shared_memory(descriptor: int, size: int) -> mmap.mmap:
    """Return the memory of `create_shared_memory`; raise MemoryError if it does not fit."""
    try:
        return mmap.mmap(descriptor, size)
    except OSError as error:
        raise MemoryError(f"{-(-size >> 20)} MiB cannot be mapped ({error.strerror})") from None
