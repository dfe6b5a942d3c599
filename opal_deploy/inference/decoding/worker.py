"""What runs in a decode worker's process: requests on stdin, answers on stdout, until stdin ends.

It imports numpy, Pillow and the two rooms that it needs, and no runtime. A request is a pickle, since it comes from our
own parent; an answer is JSON and raw pixels, since a decoder may have been taken over by the file that it read, and
must not be able to run anything in the parent.
"""

from __future__ import annotations

import importlib
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
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, BinaryIO

from PIL import Image

from opal_deploy.inference.decoding.prepare import Prepared, Request, prepare
from opal_deploy.inference.timing import NO_OP_TIMER, StageTimer
from opal_deploy.preprocess.decode import Decoding, Source
from opal_deploy.preprocess.geometry import Box
from opal_deploy.records.record import Record

LENGTH = struct.Struct(">Q")
READY = b"\x01"
# a process that kept this much more than it began with is replaced: an allocator does not always give memory back
_GROWN = 256 << 20


@dataclass(frozen=True)
class WorkerConfig:
    """What is the same for every picture.

    Attributes:
        before: `module:function`, called with each source before it is decoded; what tests let crash or hang.
        pillow_limit: Pillow's own limit of pixels in the parent.
        timed: send what each stage took.
    """

    input_size: tuple[int, int]
    max_pixels: int
    keep_pictures: bool
    decoding: Decoding
    timed: bool
    pillow_limit: int | None
    before: str | None = None


def main() -> None:
    """The whole life of the process."""
    requests, answers = _take_over_standard_streams()
    _end_with_the_parent(requests)
    warnings.simplefilter("ignore")
    config: WorkerConfig = pickle.loads(_read(requests, _length(requests)))  # noqa: S301 (our parent wrote it)
    Image.MAX_IMAGE_PIXELS = config.pillow_limit
    before = _found(config.before)
    at_start = _resident()
    answers.write(READY)
    answers.flush()
    # from here on only what libraries print about odd files, which is nobody's business
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    while size := _length(requests):
        source, box = pickle.loads(_read(requests, size))  # noqa: S301 (as above)
        for part in _answer(source, box, config, before, at_start):
            answers.write(part)
        answers.flush()


def _answer(
    source: Source, box: Box | None, config: WorkerConfig, before: Callable[[Source], object], at_start: int
) -> list[bytes]:
    clock = StageTimer() if config.timed else NO_OP_TIMER
    try:
        before(source)
        prepared = prepare(
            Request(None, source, box), config.input_size, config.max_pixels,
            keep_picture=config.keep_pictures, clock=clock, decoding=config.decoding,
        )  # fmt: skip
        about = _about(prepared)
        parts = [] if prepared.pixels is None else [prepared.pixels.tobytes()]
        if prepared.picture is not None:
            parts.append(prepared.picture.tobytes())
        del prepared
    except Exception:
        about, parts = {"bug": traceback.format_exc()}, []
    about["times"] = [(row.stage, row.wall, row.cpu, row.calls) for row in clock.read().stages]
    about["retire"] = _resident() - at_start > _GROWN
    header = json.dumps(about).encode()
    return [LENGTH.pack(len(header)) + header, *parts]


def _about(prepared: Prepared) -> dict[str, Any]:
    record: Record | None = prepared.error
    if record is not None:
        return {"error": [record["error"]["code"], record["error"]["message"]], "sha256": prepared.file_sha256}
    geometry, picture = prepared.geometry, prepared.picture
    assert geometry is not None  # there is no error
    return {
        "width": geometry.width,
        "height": geometry.height,
        "crop": geometry.crop,
        "picture": picture is not None,
        "sha256": prepared.file_sha256,
    }


def _take_over_standard_streams() -> tuple[BinaryIO, BinaryIO]:
    """Stdin and stdout as ours alone: what a library prints must not end up between answers."""
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
    return requests, answers


def _end_with_the_parent(requests: BinaryIO) -> None:
    """Ctrl-C is the parent's to decide; when the parent is gone, however it went, so is this process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if not hasattr(select, "poll"):
        # it still ends when it next asks for a request
        return
    hangup = select.poll()
    hangup.register(requests.fileno(), 0)

    def watch() -> None:
        # nobody holds the other end any more; a decoder may be in the middle of a picture that takes for ever
        hangup.poll()
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()


def _found(path: str | None) -> Callable[[Source], object]:
    if path is None:
        return lambda _: None
    module, _, name = path.partition(":")
    function: Callable[[Source], object] = getattr(importlib.import_module(module), name)
    return function


def _length(stream: BinaryIO) -> int:
    """Of the next message; 0 at the end."""
    header = stream.read(LENGTH.size)
    return 0 if len(header) < LENGTH.size else int(LENGTH.unpack(header)[0])


def _read(stream: BinaryIO, size: int) -> bytes:
    data = stream.read(size)
    if len(data) < size:
        sys.exit(0)
    return data


def _resident() -> int:
    """Bytes of memory that this process occupies; 0 where the system does not tell."""
    try:
        with open("/proc/self/statm", "rb", buffering=0) as stream:
            return int(stream.read(200).split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return 0
