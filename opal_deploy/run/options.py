"""The options of `run_inference` and `opal-deploy infer`, and the request to end a run early, by Ctrl-C or SIGTERM."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Annotated, TypeVar

from opal_deploy.errors import ExitCode
from opal_deploy.logs import Log, ProgressChoice, log_line
from opal_deploy.options import (
    DEFAULT_CONFIDENCE,
    Batch,
    BoxConfidence,
    CropFile,
    Decode,
    Devices,
    ExpectSha256,
    LabelSource,
    MaxPixels,
    Option,
    RuntimeChoice,
    SigningKey,
    SlotNameFile,
    StrPath,
    Threads,
    Top,
    Workers,
)
from opal_deploy.records.decision import Decision

T = TypeVar("T")


class Interrupt:
    """A request to end a run early; `stopped` is true if images were left because of it."""

    def __init__(self) -> None:
        # plain attributes: a signal may come while a lock is held
        self.requested = False
        self.stopped = False
        self._running = False

    def stop_when_requested(self, items: Iterable[T]) -> Iterator[T]:
        """Yield items until the end is requested."""
        for item in items:
            if self.requested:
                self.stopped = True
                return
            yield item

    @contextmanager
    def running(self) -> Iterator[None]:
        """While the block runs, take a first signal as a request; otherwise it is a KeyboardInterrupt."""
        self._running = True
        try:
            yield
        finally:
            self._running = False

    def handle_signal(self, print_message: Callable[[str], None]) -> None:
        """Request the end of the run, or exit at a second signal; raise KeyboardInterrupt if no run is in progress."""
        if not self._running:
            raise KeyboardInterrupt
        if self.requested:
            # each record is written by one call, so the file has only whole lines
            print_message("Interrupted again: ending at once")
            if sys.stderr.isatty():
                sys.stderr.write("\x1b[?25h")  # a progress bar hides the cursor
            os._exit(ExitCode.INTERRUPTED)
        self.requested = True
        print_message("Interrupted: finishing the batches in flight (interrupt again to exit at once)")


@dataclass(frozen=True, kw_only=True)
class InferOptions(Decision):
    """The options of a run.

    Attributes:
        log: receives what the command prints, line by line.
        progress: receives the number of images done, of all images once it is known, and a note.
        interrupt: stops the run gracefully when its `requested` is true.
    """

    explain: Annotated[bool, Option("Draw an overlay per image and write report.html.")] = False
    slot_names: SlotNameFile = None
    out: Annotated[StrPath, Option("Output folder, or the URL in a bucket to which it is uploaded.", cli=str)] = (
        "explanations"
    )
    overwrite: Annotated[bool, Option("Replace the files of an earlier run in --out.")] = False
    boxes: CropFile = None
    box_confidence: BoxConfidence = DEFAULT_CONFIDENCE
    labels: LabelSource = None
    top: Top = 5
    formats: Annotated[
        Sequence[str], Option("Also write a table: parquet or csv; may be repeated.", flag="--format", cli=list[str])
    ] = ()
    sign: SigningKey = None
    max_errors: Annotated[int | None, Option("Stop after more failed images than this.", min=0)] = None
    device: Devices = "auto"
    shards: Annotated[
        int | None,
        Option(
            "Split the images among so many processes, which share --threads and --workers.",
            flag="--shards --processes", min=1, default="one per GPU in --device; with --ray as many as fit",
        ),
    ] = None  # fmt: skip
    runtime: RuntimeChoice = "auto"
    batch: Batch = None
    threads: Threads = None
    workers: Workers = None
    decode: Decode = "default"
    decode_timeout: Annotated[
        float, Option("Seconds that decoding one image may take; 0: no limit; needs --isolate.", min=0)
    ] = 30.0
    isolate: Annotated[
        bool,
        Option("Decode in processes, so that a decoder that crashes costs one image.", flag="--isolate/--no-isolate"),
    ] = True
    cuda_graphs: Annotated[bool, Option("Replay each batch size as a CUDA graph (engines).")] = False
    expect_sha256: ExpectSha256 = None
    max_pixels: MaxPixels = 100_000_000
    ray: Annotated[str | None, Option("Run the shards on a Ray cluster: auto (on one of its nodes), or HOST:PORT.")] = (
        None
    )
    ray_cpus: Annotated[
        int | None, Option("CPU cores per shard on the cluster, without GPUs.", min=1, default="one shard per GPU")
    ] = None
    every: Annotated[
        int | str | None,
        Option("Take frames of videos: 10 is every tenth frame, 0.5s a frame every half second.", cli=str),
    ] = None
    shard: Annotated[
        str | None, Option("i/n: run only the i-th of n shards, in --out/shards. --shards n joins them.")
    ] = None
    recursive: Annotated[bool, Option("Include subfolders.", flag="--recursive/--no-recursive")] = True
    log: Log = log_line
    progress: ProgressChoice | None = None
    interrupt: Interrupt | None = None


@contextmanager
def handle_signals(print_message: Callable[[str], None]) -> Iterator[Interrupt]:
    """Send Ctrl-C and SIGTERM to an Interrupt while the block runs, then restore their handlers.

    Outside the main thread, where Python allows no handlers, nothing is installed.
    """
    interrupt = Interrupt()
    if threading.current_thread() is not threading.main_thread():
        yield interrupt
        return

    def handle(number: int, frame: FrameType | None) -> None:
        interrupt.handle_signal(print_message)

    previous = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield interrupt
    finally:
        for number, handler in previous.items():
            # None: not installed by Python, so it cannot be restored
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
