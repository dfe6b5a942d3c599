"""The main function of a decode worker process: requests on stdin, responses on stdout, until stdin ends.

It imports numpy, Pillow and the code that prepares images, and no runtime. A request is a pickle, since it comes from
the parent process; a response is JSON and raw pixels, since a decoder may have been taken over by the file that it
read, and must not be able to run anything in the parent.
"""

from __future__ import annotations

import json
import os
import pickle
import select
import signal
import struct
import sys
import threading
import traceback
import warnings
from dataclasses import dataclass
from typing import Any, BinaryIO

from PIL import Image

from opal_deploy.inference.decoding.prepare import prepare
from opal_deploy.inference.timing import NO_OP_TIMER, StageTimer
from opal_deploy.inference.types import InferenceOptions, Prepared, Request
from opal_deploy.preprocess.decode import Source
from opal_deploy.preprocess.geometry import Box

LENGTH = struct.Struct(">Q")
READY = b"\x01"
# a process that has grown by this much is replaced: an allocator does not always give memory back
_MAX_GROWTH_BYTES = 256 << 20


@dataclass(frozen=True)
class WorkerConfig:
    """The part of a worker's work that is the same for every image.

    Attributes:
        input_size: (H0, W0) of the model.
        options: see `prepare`.
        timed: send the times of the stages.
        pillow_limit: Pillow's own limit of pixels in the parent.
    """

    input_size: tuple[int, int]
    options: InferenceOptions
    timed: bool
    pillow_limit: int | None


def main() -> None:
    """Run the process from its start to its end."""
    requests, responses = _take_over_standard_streams()
    _end_with_the_parent(requests)
    warnings.simplefilter("ignore")
    config: WorkerConfig = pickle.loads(_read(requests, _read_length(requests)))  # noqa: S301 (the parent wrote it)
    Image.MAX_IMAGE_PIXELS = config.pillow_limit
    memory_at_start = _resident_bytes()
    responses.write(READY)
    responses.flush()
    # drop what libraries print about odd files from here on
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    while size := _read_length(requests):
        source, box = pickle.loads(_read(requests, size))  # noqa: S301 (the parent wrote it)
        for part in _build_response(source, box, config, memory_at_start):
            responses.write(part)
        responses.flush()


def _build_response(source: Source, box: Box | None, config: WorkerConfig, memory_at_start: int) -> list[bytes]:
    """Return the header with its length, the pixels, and the whole image where it is kept."""
    timer = StageTimer() if config.timed else NO_OP_TIMER
    try:
        prepared = prepare(Request(None, source, box), config.input_size, config.options, timer)
        header = _build_header(prepared)
        parts = [] if prepared.pixels is None else [prepared.pixels.tobytes()]
        if prepared.image is not None:
            parts.append(prepared.image.tobytes())
        del prepared
    except Exception:
        header, parts = {"traceback": traceback.format_exc()}, []
    header["times"] = [(row.stage, row.wall, row.cpu, row.calls) for row in timer.read().stages]
    header["retire"] = _resident_bytes() - memory_at_start > _MAX_GROWTH_BYTES
    encoded = json.dumps(header).encode()
    return [LENGTH.pack(len(encoded)) + encoded, *parts]


def _build_header(prepared: Prepared) -> dict[str, Any]:
    if prepared.error is not None:
        return {"error": [prepared.error.code, str(prepared.error)], "sha256": prepared.file_sha256}
    geometry = prepared.geometry
    assert geometry is not None  # there is no error
    return {
        "width": geometry.width,
        "height": geometry.height,
        "crop": geometry.crop,
        "image": prepared.image is not None,
        "sha256": prepared.file_sha256,
    }


def _take_over_standard_streams() -> tuple[BinaryIO, BinaryIO]:
    """Return copies of stdin and stdout: what a library prints must not end up between responses."""
    requests, responses = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
    return requests, responses


def _end_with_the_parent(requests: BinaryIO) -> None:
    """Leave Ctrl-C to the parent, and end this process once the parent is gone, however it went."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if not hasattr(select, "poll"):
        # it still ends when it next reads a request
        return
    hangup = select.poll()
    hangup.register(requests.fileno(), 0)

    def watch() -> None:
        # the parent's end is closed; a decoder may be in the middle of an image that takes for ever
        hangup.poll()
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
    """Return the memory that this process occupies; 0 where the system does not tell."""
    try:
        with open("/proc/self/statm", "rb", buffering=0) as stream:
            return int(stream.read(200).split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return 0
