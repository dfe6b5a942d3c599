"""Batches through sessions while the next pictures decode: the loop that `infer` and `Model.explain` share.

Pictures are prepared by decoders, gathered into batches in input order, and answered by one worker a session. Every
queue is bounded, so memory does not grow with the number of images: while nobody takes results, no batch is computed,
no picture decoded, and no request asked for, beyond a fixed number of each.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TypeVar

from opal_deploy.errors import OpalError
from opal_deploy.inference.decoding.gpu import open_decoders
from opal_deploy.inference.decoding.prepare import Prepared, Request
from opal_deploy.inference.prediction import BatchPredictor, Result
from opal_deploy.inference.timing import NO_OP_TIMER, StageTimer, ThreadRole
from opal_deploy.preprocess.decode import MAX_PIXELS, Decoding
from opal_deploy.preprocess.gpu import GpuDecoder
from opal_deploy.runtime.session import Session

__all__ = ["InferenceOptions", "Result", "predict_stream", "prefetch", "thread_pool"]

T = TypeVar("T")


@dataclass(frozen=True)
class InferenceOptions:
    """How the loop works.

    Attributes:
        batch: pictures a forward pass.
        fixed_batch: fill every forward pass up to `batch` with blank pictures. Runtimes choose their kernels by the
            batch's size, and those may differ in the last bit: with one size a record depends on its image alone, not
            on how many others there are, or where a run was resumed.
        workers: threads or processes that decode.
        max_pixels: of one picture.
        top: classes listed in a record.
        min_margin: answers below it are marked `abstained`.
        keep_pictures: hand small pictures on, for overlays.
        time_transfers: ask a session that can tell for its copies to and from the device, which makes it wait for each.
        decode: which decode path on the CPU.
        gpus: decode plain JPEG files, and the CPU the rest; `open_gpus` opens them.
        decode_timeout: seconds for one picture, where `isolate` allows to end its decoder; None: no limit.
        isolate: decode in processes, so that a decoder that crashes or hangs costs one image.
        model_sha256: of the model's file, for the records.
        keep_outputs: hand each picture's row of the outputs on, for evidence sheets.
    """

    batch: int = 16
    fixed_batch: bool = False
    workers: int = 2
    max_pixels: int = MAX_PIXELS
    top: int = 5
    min_margin: float | None = None
    keep_pictures: bool = False
    time_transfers: bool = False
    decode: Decoding = Decoding.default
    gpus: tuple[GpuDecoder, ...] = ()
    decode_timeout: float | None = 30.0
    isolate: bool = False
    model_sha256: str | None = None
    keep_outputs: bool = False


def predict_stream(
    requests: Iterable[Request],
    sessions: Sequence[Session],
    options: InferenceOptions,
    clock: StageTimer = NO_OP_TIMER,
    say: Callable[[str], None] = lambda _: None,
) -> Iterator[Result]:
    """Results in the order of the requests.

    Args:
        requests: may be endless; it is read a bounded distance ahead. Where it ends, everything that was taken from it
            is answered, so that ending it is how to stop without losing anything.
        sessions: of one model; batches go to them in turn.
        clock: is told what every stage takes.
        say: is told, from any thread, what a person should know: that memory was short and the batch is smaller now, or
            that a GPU cannot decode.

    Raises:
        StoppedEarly: a device was lost; everything before its batch was yielded.
        OpalError: `requests` raised it; everything before it was yielded.
    """
    input_size = sessions[0].metadata.input_size
    ended: list[OpalError] = []
    with ExitStack() as stack:
        decoders = stack.enter_context(open_decoders(options, input_size, clock, say))
        # one thread a session: a session answers one batch at a time
        runners = [
            (
                BatchPredictor(session, options, clock, say),
                stack.enter_context(thread_pool(1, f"session-{index}", clock, "session")),
            )
            for index, session in enumerate(sessions)
        ]
        # each session has a batch in work and the next one ready
        decoding = prefetch(
            (decoders.submit(request) for request in _until_error(requests, ended)),
            options.batch * (len(sessions) + 1),
            lambda: clock.waiting("pictures"),
        )
        running = prefetch(
            (
                pool.submit(answerer.answer, batch)
                for batch, (answerer, pool) in zip(
                    _batches(decoding, options.batch), itertools.cycle(runners), strict=False
                )
            ),
            len(sessions),
            lambda: clock.waiting("session"),
        )
        for results in running:
            yield from results
    if ended:
        raise ended[0]


@contextmanager
def thread_pool(workers: int, name: str, clock: StageTimer, station: ThreadRole) -> Iterator[ThreadPoolExecutor]:
    """A pool that drops what waits when its block is left, so that an interrupted run ends at once.

    The clock counts its threads to `station`.
    """
    pool = ThreadPoolExecutor(workers, name, initializer=clock.join, initargs=(station,))
    try:
        yield pool
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def prefetch(
    futures: Iterator[Future[T]], distance: int, waiting: Callable[[], AbstractContextManager[None]] = nullcontext
) -> Iterator[T]:
    """Results in order, with at most `distance` futures begun beyond the one that is awaited.

    Where `futures` itself raises an OpalError, the results of those before come first. `waiting` makes what is entered
    while a result is awaited.
    """

    def first() -> T:
        with waiting():
            return pending.popleft().result()

    pending: deque[Future[T]] = deque()
    ended: list[OpalError] = []
    try:
        for future in _until_error(futures, ended):
            pending.append(future)
            if len(pending) > distance:
                yield first()
        while pending:
            yield first()
        if ended:
            raise ended[0]
    finally:
        for future in pending:
            future.cancel()


def _until_error(items: Iterable[T], ended: list[OpalError]) -> Iterator[T]:
    """`items` up to the OpalError that ends them, which is put into `ended`: read-ahead must not outrun its results."""
    try:
        yield from items
    except OpalError as error:
        ended.append(error)


def _batches(prepared: Iterator[Prepared], size: int) -> Iterator[list[Prepared]]:
    while batch := list(itertools.islice(prepared, size)):
        yield batch
