"""The loop: one record an image, in order, bounded, whatever single images and devices do."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from opal_deploy.artifact.outputs import Outputs
from opal_deploy.errors import ImageError, OutOfMemory, StoppedEarly, UsageError
from opal_deploy.inference.decoding import prepare
from opal_deploy.inference.executor import predict_batches, predict_stream
from opal_deploy.inference.types import InferenceOptions, InputImage
from opal_deploy.records.record import Record
from opal_deploy.runtime.onnx_session import OnnxSession
from opal_deploy.runtime.select import open_sessions
from opal_deploy.runtime.session import ImageBatch, Session
from tests.inference.bright import BrightSession, QueuedSession, code, own_threads, predict


def shade(number: int) -> Image.Image:
    """Return an image whose brightest cell is `number` modulo 16."""
    image = Image.new("RGB", (64, 64), (number % 50,) * 3)
    row, col = divmod(number % 16, 4)
    image.paste((200, 200, 200), (col * 16, row * 16, col * 16 + 16, row * 16 + 16))
    return image


def shades(numbers: Iterable[int]) -> Iterator[InputImage]:
    return (InputImage(str(number), shade(number)) for number in numbers)


def names(records: list[Record]) -> list[int]:
    return [int(str(record["image"])) for record in records]


def wrap(session: Session, before: Callable[[ImageBatch], object], after: Callable[[Outputs], object] = id) -> Session:
    """Call functions before and after each of a session's forward passes."""
    run = session.run

    def wrapped(images: ImageBatch) -> Outputs:
        before(images)
        outputs = run(images)
        after(outputs)
        return outputs

    session.run = wrapped  # type: ignore[method-assign]
    return session


def count_blanks(session: Session) -> list[tuple[int, int]]:
    """Return a list that gets the size of each forward pass, and how many of its images are blank."""
    seen: list[tuple[int, int]] = []
    wrap(session, lambda images: seen.append((len(images), sum(not image.any() for image in images))))
    return seen


def before_resize(monkeypatch: pytest.MonkeyPatch, function: Callable[[int], object]) -> None:
    """Call a function with the lower right value of each image before it is resized."""
    to_input = prepare.to_input

    def wrapped(image: Image.Image, *rest: object) -> np.ndarray:
        function(image.getpixel((63, 63))[0])  # type: ignore[index]
        return to_input(image, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(prepare, "to_input", wrapped)


# ---- order and bounds


@pytest.mark.parametrize(("count", "workers"), [(0, 4), (8, 1), (9, 4), (50, 4)])
def test_one_record_an_image_in_their_order(monkeypatch: pytest.MonkeyPatch, count: int, workers: int) -> None:
    before_resize(monkeypatch, lambda value: time.sleep(0.02 * (value % 5 == 0)))
    session = BrightSession()
    records = predict(shades(range(count)), session, batch=8, workers=workers)
    assert names(records) == list(range(count))
    assert [record["evidence"][0]["cell"] for record in records] == [list(divmod(n % 16, 4)) for n in range(count)]
    assert session.batches == [8] * (count // 8) + [count % 8] * (count % 8 > 0)


def test_two_sessions_take_turns_at_the_same_time() -> None:
    # neither goes on before both are in a batch
    both = threading.Barrier(2)
    sessions = [BrightSession() for _ in range(2)]
    records = predict(shades(range(16)), *(wrap(session, lambda _: both.wait(30)) for session in sessions), batch=4)
    assert names(records) == list(range(16))
    assert [session.batches for session in sessions] == [[4, 4], [4, 4]]


@pytest.mark.parametrize("count", [1, 2])
def test_an_endless_stream_is_read_a_bounded_distance_ahead(count: int) -> None:
    batch, before = 4, own_threads()
    begun: list[weakref.ref[Image.Image]] = []

    def endless() -> Iterator[InputImage]:
        for number in itertools.count():
            image = shade(number)
            begun.append(weakref.ref(image))
            yield InputImage(str(number), image)

    options = InferenceOptions(batch=batch, workers=4, keep_images=True)
    results = predict_stream(endless(), [BrightSession() for _ in range(count)], options)
    for taken in range(1, 41):
        next(results)
        # a consumer that is slow lets nothing pile up
        time.sleep(0.005)
        # being decoded, waiting for or in a session, and the batch whose results are being handed out
        assert len(begun) - taken <= batch * (2 * count + 3)
        assert sum(image() is not None for image in begun) <= batch * (2 * count + 3) + 1
    assert own_threads() - before
    # closing the iterator ends the threads and drops what waits
    results.close()
    assert own_threads() == before


def test_of_images_that_are_drawn_one_batch_is_there_while_the_next_is_decoded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batch, kept = 8, list[weakref.ref[Image.Image]]()

    def keep(image: Image.Image) -> Image.Image:
        image = image.copy()
        kept.append(weakref.ref(image))
        return image

    monkeypatch.setattr(prepare, "to_display", keep)
    options, most = InferenceOptions(batch=batch, workers=2, keep_images=True), 0
    stream = predict_batches(shades(range(20 * batch)), [BrightSession() for _ in range(3)], options)
    for results in stream:
        while results:
            # a slow consumer, which keeps no image that it has drawn
            time.sleep(0.002)
            results.pop()
            most = max(most, sum(image() is not None for image in kept))
    assert len(kept) == 20 * batch
    assert most <= 2 * batch


@pytest.mark.parametrize("end", [0, 1, 8, 30])
def test_ending_the_requests_predicts_all_that_were_taken(end: int) -> None:
    taken: list[int] = []
    found: list[int] = []

    def until_end() -> Iterator[InputImage]:
        for number, request in enumerate(shades(itertools.count())):
            if len(found) >= end:
                return
            taken.append(number)
            yield request

    for result in predict_stream(until_end(), [BrightSession()], InferenceOptions(batch=4)):
        found += names([result.record])
    assert found == taken
    assert len(found) >= end


# ---- errors that end the loop


def raising(good: int) -> Iterator[InputImage]:
    yield from shades(range(good))
    raise UsageError("no such file")


@pytest.mark.parametrize(
    ("requests", "fails_at", "message", "count"),
    [
        pytest.param(shades(range(40)), [3], "device was lost", 12, id="the only device"),
        pytest.param(shades(range(40)), [None, 1], "device was lost", 12, id="one of two devices"),
        *(pytest.param(raising(n), [None], "no such file", n, id=f"the list after {n}") for n in (0, 9)),
    ],
)
def test_records_before_an_error_are_whole(
    requests: Iterator[InputImage], fails_at: list[int | None], message: str, count: int
) -> None:
    sessions = [BrightSession(fails_at=batch) for batch in fails_at]
    records: list[Record] = []
    with pytest.raises((StoppedEarly, UsageError), match=message):
        records.extend(r.record for r in predict_stream(requests, sessions, InferenceOptions(batch=4)))
    assert names(records) == list(range(count))
    assert [code(record) for record in records] == [None] * count


# ---- errors of single images


def test_an_error_of_one_image_is_its_record_and_costs_the_others_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def overflow(outputs: Outputs) -> None:
        outputs.logits[1] = np.nan

    def run_out_of_memory(value: int) -> None:
        if value == 2:
            raise MemoryError

    before_resize(monkeypatch, run_out_of_memory)
    no_box = InputImage("a", shade(1), label="oak", error=ImageError("no_box", "boxes.csv has no box for it"))
    records = predict([*shades(range(4)), no_box], wrap(BrightSession(), id, overflow), batch=5)
    assert [code(record) for record in records] == [None, "not_finite", "too_many_pixels", None, "no_box"]
    assert json.dumps(records[4]) == (
        '{"schema": 1, "image": "a", "status": "error", "image_sha256": null, "model_sha256": null,'
        ' "error": {"code": "no_box", "message": "boxes.csv has no box for it"}, "label": "oak"}'
    )


def test_evidence_inside_a_crop_is_in_pixels_of_the_whole_image() -> None:
    image = Image.new("RGB", (500, 300), (10, 10, 10))
    # the crop is 100 to 300 by 40 to 240: cells of 50 x 50; this is its cell (2, 1)
    image.paste((255, 255, 255), (150, 140, 200, 190))
    (record,) = predict([InputImage("a", image, (100, 40, 300, 240))], BrightSession())
    assert (record["width"], record["height"]) == (500, 300)
    assert [(slot["cell"], slot["box"]) for slot in record["evidence"]] == [([2, 1], [150, 140, 200, 190])] * 2


@pytest.mark.parametrize(
    ("bad", "passes"), [({1, 6}, [(4, 1), (4, 1), (2, 0)]), (set(range(10)), [])], ids=["two", "all of them"]
)
def test_bad_images_keep_their_places_as_blank_ones(bad: set[int], passes: list[tuple[int, int]]) -> None:
    session = BrightSession()
    seen = count_blanks(session)
    records = predict(
        [InputImage(str(n), b"nothing" if n in bad else shade(n + 1)) for n in range(10)], session, batch=4
    )
    assert [code(record) for record in records] == ["not_an_image" if n in bad else None for n in range(10)]
    cells = [record["evidence"][0]["cell"] for record in records if "evidence" in record]
    assert cells == [list(divmod((n + 1) % 16, 4)) for n in range(10) if n not in bad]
    assert seen == passes


# ---- batches of one size


@pytest.mark.parametrize(
    ("count", "invariant", "passes"),
    [(1, False, [(4, 3)]), (4, False, [(4, 0)]), (7, False, [(4, 0), (4, 1)]), (5, True, [(4, 0), (1, 0)])],
)
def test_a_fixed_batch_fills_every_forward_pass_of_a_session_that_needs_it(
    count: int, invariant: bool, passes: list[tuple[int, int]]
) -> None:
    session = BrightSession()
    session.batch_invariant = invariant
    seen = count_blanks(session)
    assert len(predict(shades(range(1, count + 1)), session, batch=4, fixed_batch=True)) == count
    assert seen == passes


@pytest.mark.parametrize(("runtime", "threads"), [("onnx", 1), ("onnx", 2), ("torch", 1)])
def test_one_bad_file_in_a_batch_of_64_changes_not_a_byte_of_the_others(
    exact_model: Path, make_pictures: Callable, tmp_path: Path, runtime: str, threads: int
) -> None:
    images: list[Path] = make_pictures(tmp_path, 64)
    path = exact_model if runtime == "onnx" else exact_model.with_suffix(".pt")
    sessions = open_sessions(path, device="cpu", threads=threads)
    bad = InputImage("bad.png", images[20].read_bytes()[:300])

    def run(listed: list[Path | InputImage], batch: int = 64) -> dict[str, str]:
        records = predict(listed, *sessions, batch=batch, fixed_batch=True)
        return {str(record["image"]): json.dumps(record) for record in records}

    with_bad = run([*images[:20], bad, *images[21:]])
    assert json.loads(with_bad.pop("bad.png"))["error"]["code"] == "truncated_image"
    with_good = run([*images])
    del with_good[images[20].name]
    assert with_bad == with_good
    # everything after it moves up, and the batch is one short, or nearly empty
    assert with_bad == run([*images[:20], *images[21:]])
    first = dict(itertools.islice(with_bad.items(), 6))
    assert first == run([*images[:6]])
    if runtime == "onnx":
        assert isinstance(sessions[0], OnnxSession)
        assert sessions[0].batch_invariant
        assert first == run([*images[:6]], 1) == run([*images[:6]], 5)


# ---- memory


def limit_memory(session: Session, most: int, error: Exception) -> list[int]:
    """Let a session's memory take `most` images at a time; return a list that gets the sizes of its batches."""
    sizes: list[int] = []

    def check(images: ImageBatch) -> None:
        sizes.append(len(images))
        if len(images) > most:
            raise error

    wrap(session, check)
    return sizes


@pytest.mark.parametrize("error", [OutOfMemory("full"), MemoryError()], ids=["the device's", "the host's"])
@pytest.mark.parametrize("fixed", [False, True])
def test_out_of_memory_halves_the_batch_for_good_and_is_reported(error: Exception, fixed: bool) -> None:
    session, messages = BrightSession(), []
    sizes = limit_memory(session, 4, error)
    options = InferenceOptions(batch=16, fixed_batch=fixed)
    results = predict_stream(shades(range(38)), [session], options, print_message=messages.append)
    assert [r.record for r in results] == predict(shades(range(38)), BrightSession(), batch=16)
    assert sizes == [16, 8, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4 if fixed else 2]
    assert messages == [
        "brightness on CPU: out of memory with a batch of 16; going on with 8",
        "brightness on CPU: out of memory with a batch of 8; going on with 4",
    ]


def test_memory_that_is_too_small_for_one_image_stops_the_run() -> None:
    session = BrightSession()
    sizes = limit_memory(session, 0, OutOfMemory("CUDA is full"))
    with pytest.raises(StoppedEarly, match=r"out of memory with a single image \(CUDA is full\); free memory there"):
        predict(shades(range(8)), session, batch=8)
    assert sizes == [8, 4, 2, 1]


def test_memory_that_fills_up_later_keeps_what_was_done() -> None:
    session = BrightSession()

    def shrink(images: ImageBatch) -> None:
        if len(session.batches) > 3 and len(images) > 2:
            raise OutOfMemory("full")

    wrap(session, shrink)
    assert predict(shades(range(40)), session, batch=4) == predict(shades(range(40)), BrightSession(), batch=4)
    assert session.batches[-1] == 2


def test_only_the_session_that_is_short_of_memory_takes_smaller_batches() -> None:
    small, large = BrightSession(), BrightSession()
    sizes = limit_memory(small, 2, OutOfMemory("full"))
    assert names(predict(shades(range(16)), small, large, batch=4)) == list(range(16))
    assert sizes == [4, 2, 2, 2, 2]
    assert large.batches == [4, 4]


@pytest.mark.parametrize("full_at", [None, 0, 4])
def test_a_session_with_a_queue_changes_nothing(full_at: int | None) -> None:
    session = QueuedSession(full_at)
    images = [*shades(range(30)), InputImage("none", shade(3), error=ImageError("no_box", "none"))]
    assert predict(images, session, batch=2) == predict(images, BrightSession(), batch=2)
    assert session.longest


def test_streams_that_share_a_session_with_a_queue_take_turns() -> None:
    session = QueuedSession()
    expected = predict(shades(range(60)), BrightSession(), batch=2)
    with ThreadPoolExecutor(3) as threads:
        streams = [threads.submit(predict, shades(range(60)), session, batch=2) for _ in range(3)]
        assert [stream.result(60) for stream in streams] == [expected] * 3


# a real limit, in a process of its own: the runtime's allocation fails where it fails on a small machine
_SHORT_OF_MEMORY = """
import json, resource, sys
from pathlib import Path
from opal_deploy.synthetic import example_images
from opal_deploy.inference.executor import predict_stream
from opal_deploy.inference.types import InferenceOptions, InputImage
from opal_deploy.runtime.select import open_sessions

sessions = open_sessions(Path(sys.argv[1]), device="cpu", threads=1)
images = list(example_images(64, 96, 96)) * 4
messages = []

def run(batch):
    requests = (InputImage(str(number), image) for number, image in enumerate(images))
    options = InferenceOptions(batch=batch)
    return [json.dumps(r.record) for r in predict_stream(requests, sessions, options, print_message=messages.append)]

clean = run(4)
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (40 << 20), resource.RLIM_INFINITY))
found = run(256)
print(json.dumps([found == clean, messages]))
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="limits a process's memory as Linux does")
def test_onnx_runtime_without_memory_for_a_batch_goes_on_with_half(exact_model: Path) -> None:
    arguments = [sys.executable, "-c", _SHORT_OF_MEMORY, str(exact_model)]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    same, messages = json.loads(done.stdout)
    assert same
    assert "out of memory with a batch of 256; going on with 128" in messages[0]
