"""The loop: one record per image, in order, bounded, whatever single images and devices do."""

import itertools
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import numpy as np
import pytest
from PIL import Image

from opal_deploy.errors import ImageError, OutOfMemory, StoppedEarly, UsageError
from opal_deploy.predict import prepare
from opal_deploy.predict.executor import open_decoders, predict_batches, predict_stream
from opal_deploy.predict.prepare import InferenceOptions
from opal_deploy.preprocess.resize import fit_input
from opal_deploy.records.lines import to_document
from opal_deploy.runtime.onnx_session import OnnxSession
from opal_deploy.runtime.select import open_sessions
from opal_deploy.sources.image import InputImage
from tests.bright import BrightSession, QueuedSession, code, own_threads, predict


def shade(number):
    """Return an image whose brightest cell is `number` modulo 16."""
    image = Image.new("RGB", (64, 64), (number % 50,) * 3)
    row, col = divmod(number % 16, 4)
    image.paste((200, 200, 200), (col * 16, row * 16, col * 16 + 16, row * 16 + 16))
    return image


def shades(numbers):
    return (InputImage(str(number), shade(number)) for number in numbers)


def noted(numbers, taken):
    """Yield numbers, and append each to a list when it is taken."""
    for number in numbers:
        taken.append(number)
        yield number


def names(records):
    return [int(str(record["image"])) for record in records]


def watch(session, before=id, after=id):
    """Return a list that gets the size of each forward pass, and how many of its images are blank."""
    run, seen = session.run, []

    def watched(images):
        seen.append((len(images), sum(not image.any() for image in images)))
        before(images)
        outputs = run(images)
        after(outputs)
        return outputs

    session.run = watched
    return seen


# ---- order and bounds


@pytest.mark.parametrize(("count", "workers"), [(0, 4), (8, 1), (9, 4), (50, 4)])
def test_one_record_per_image_in_order(count, workers):
    session = BrightSession()
    records = predict(shades(range(count)), session, batch=8, workers=workers)
    assert names(records) == list(range(count))
    assert [record["evidence"][0]["cell"] for record in records] == [list(divmod(n % 16, 4)) for n in range(count)]
    assert session.batches == [8] * (count // 8) + [count % 8] * (count % 8 > 0)


def test_two_sessions_take_turns_at_the_same_time():
    # neither goes on before both are in a batch
    both = threading.Barrier(2)
    sessions = [BrightSession() for _ in range(2)]
    for session in sessions:
        watch(session, lambda _: both.wait(30))
    records = predict(shades(range(16)), *sessions, batch=4)
    assert names(records) == list(range(16))
    assert [session.batches for session in sessions] == [[4, 4], [4, 4]]


@pytest.mark.parametrize("count", [1, 2])
def test_an_endless_stream_is_read_a_bounded_distance_ahead(count):
    batch, before, begun = 4, own_threads(), []
    images = shades(noted(itertools.count(), begun))
    options = InferenceOptions(batch=batch, workers=4)
    results = predict_stream(images, [BrightSession() for _ in range(count)], options)
    for taken in range(1, 41):
        next(results)
        # being decoded, waiting for or in a session, and the batch whose results are being handed out
        assert len(begun) - taken <= batch * (2 * count + 3)
    # closing the iterator ends the threads and drops what waits
    results.close()
    assert own_threads() == before


@pytest.mark.parametrize(
    ("options", "ahead"), [({"one_at_a_time": True}, 0), ({"batch": 8, "workers": 2, "keep_images": True}, 15)]
)
def test_images_that_kill_or_are_drawn_are_read_less_far_ahead(options, ahead):
    begun = []
    images = shades(noted(range(64), begun))
    sessions = [BrightSession(), BrightSession()]
    taken = 0
    for taken, _ in enumerate(predict_stream(images, sessions, InferenceOptions(**options)), 1):
        assert len(begun) - taken <= ahead
    assert taken == 64


def test_an_image_gets_the_place_in_its_batch_that_it_has_in_the_whole_run():
    session, options = BrightSession(), InferenceOptions(batch=4)
    seen = watch(session)
    with open_decoders([session], options) as decoders:
        batches = predict_batches(shades(range(6, 15)), [session], options, decoders, first=6)
        found = [[int(result.record.image) for result in results] for results in batches]
    assert found == [[6, 7], [8, 9, 10, 11], [12, 13, 14]]
    assert seen == [(4, 2), (4, 0), (3, 0)]


# ---- errors that end the loop


def raising(good):
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
def test_records_before_an_error_are_whole(requests, fails_at, message, count):
    sessions = [BrightSession(fails_at=batch) for batch in fails_at]
    records = []
    with pytest.raises((StoppedEarly, UsageError), match=message):
        records.extend(to_document(r.record) for r in predict_stream(requests, sessions, InferenceOptions(batch=4)))
    assert names(records) == list(range(count))
    assert [code(record) for record in records] == [None] * count


# ---- errors of single images


def test_an_error_of_one_image_is_its_record(monkeypatch):
    def overflow(outputs):
        outputs.logits[1] = np.nan

    def run_out_of_memory(image, *rest):
        if image.getpixel((63, 63))[0] == 2:
            raise MemoryError
        return fit_input(image, *rest)

    monkeypatch.setattr(prepare, "fit_input", run_out_of_memory)
    no_box = InputImage("a", shade(1), label="oak", error=ImageError("no_box", "boxes.csv has no box for it"))
    session = BrightSession()
    watch(session, after=overflow)
    records = predict([*shades(range(4)), no_box], session, batch=5)
    assert [code(record) for record in records] == [None, "not_finite", "too_many_pixels", None, "no_box"]
    assert (records[4]["error"]["message"], records[4]["label"]) == ("boxes.csv has no box for it", "oak")


@pytest.mark.parametrize(
    ("bad", "passes"), [({1, 6}, [(4, 1), (4, 1), (2, 0)]), (set(range(10)), [])], ids=["two", "all of them"]
)
def test_bad_images_keep_their_places_as_blank_ones(bad, passes):
    session = BrightSession()
    seen = watch(session)
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
def test_a_fixed_batch_fills_every_forward_pass_of_a_session_that_needs_it(count, invariant, passes):
    session = BrightSession()
    session.batch_invariant = invariant
    seen = watch(session)
    assert len(predict(shades(range(1, count + 1)), session, batch=4, fixed_batch=True)) == count
    assert seen == passes


@pytest.mark.parametrize(("runtime", "threads"), [("onnx", 2), ("torch", 1)])
def test_one_bad_file_in_a_batch_of_64_changes_not_a_byte_of_the_others(
    exact_model, make_pictures, tmp_path, runtime, threads
):
    images = make_pictures(tmp_path, 64)
    path = exact_model if runtime == "onnx" else exact_model.with_suffix(".pt")
    sessions = open_sessions(path, device="cpu", threads=threads)
    bad = InputImage("bad.png", images[20].read_bytes()[:300])

    def run(listed, batch=64):
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


# ---- memory and queues


@pytest.mark.parametrize("error", [OutOfMemory("full"), MemoryError("full")], ids=["the device's", "the host's"])
@pytest.mark.parametrize("queued", [False, True])
def test_a_lack_of_memory_ends_the_run_after_the_records_before(error, queued):
    session = QueuedSession(error, full_at=2) if queued else BrightSession()
    if not queued:
        watch(session, Mock(side_effect=[None, None, error]))
    records = []
    with pytest.raises(OutOfMemory, match=r"batch of 4 .*smaller --batch"):
        records.extend(r.record for r in predict_stream(shades(range(20)), [session], InferenceOptions(batch=4)))
    assert len(records) == 8


def test_a_session_with_a_queue_changes_nothing():
    session = QueuedSession()
    images = [*shades(range(30)), InputImage("none", shade(3), error=ImageError("no_box", "none"))]
    assert predict(images, session, batch=2) == predict(images, BrightSession(), batch=2)
    assert session.longest


def alone():
    """Return a session that fails if two threads use it at a time."""
    session, busy = BrightSession(), threading.Lock()

    def begin(_):
        assert busy.acquire(blocking=False)
        time.sleep(0.002)

    watch(session, begin, lambda _: busy.release())
    return session


@pytest.mark.parametrize("open_session", [QueuedSession, alone])
def test_streams_that_share_a_session_take_turns(open_session):
    session = open_session()
    expected = predict(shades(range(60)), BrightSession(), batch=2)
    with ThreadPoolExecutor(3) as threads:
        streams = [threads.submit(predict, shades(range(60)), session, batch=2) for _ in range(3)]
        assert [stream.result(60) for stream in streams] == [expected] * 3
