"""The loop: one record an image, in order, bounded, whatever single images and devices do."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from opal_deploy.artifact.outputs import Outputs
from opal_deploy.errors import ImageError, StoppedEarly, UsageError
from opal_deploy.explain.records import Record
from opal_deploy.pipeline.engine import EngineOptions, ahead, explain_all
from opal_deploy.pipeline.prepare import Request
from opal_deploy.runtime.onnx_session import OnnxSession
from opal_deploy.runtime.session import ImageBatch, Session


def shade(number: int) -> Image.Image:
    """A picture whose brightest cell is `number` modulo 16."""
    image = Image.new("RGB", (64, 64), (number % 50,) * 3)
    row, col = divmod(number % 16, 4)
    image.paste((200, 200, 200), (col * 16, row * 16, col * 16 + 16, row * 16 + 16))
    return image


def shades(numbers: Iterator[int] | range) -> Iterator[Request]:
    return (Request(str(number), shade(number)) for number in numbers)


def records(requests: Iterator[Request], sessions: list[Session], options: EngineOptions) -> list[Record]:
    return [result.record for result in explain_all(requests, sessions, options)]


def lines(found: list[Record]) -> list[str]:
    return [json.dumps(record) for record in found]


def ours() -> set[str]:
    return {t.name for t in threading.enumerate() if t.name.startswith(("decode", "session-"))}


@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 50])
@pytest.mark.parametrize("workers", [1, 4])
def test_there_is_one_record_an_image_in_their_order(bright_session: Callable, count: int, workers: int) -> None:
    found = records(shades(range(count)), [bright_session()], EngineOptions(batch=8, workers=workers))
    assert [record["image"] for record in found] == [str(number) for number in range(count)]
    assert [record["evidence"][0]["cell"] for record in found] == [list(divmod(n % 16, 4)) for n in range(count)]


def test_order_survives_pictures_that_take_longer_to_decode(
    bright_session: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    from opal_deploy.pipeline import prepare

    decode = prepare.decode

    def slow_for_some(source: Image.Image, **options: int) -> Image.Image:
        time.sleep(0.03 if source.getpixel((63, 63))[0] % 5 == 0 else 0)  # type: ignore[index]
        return decode(source, **options)

    monkeypatch.setattr(prepare, "decode", slow_for_some)
    found = records(shades(range(30)), [bright_session()], EngineOptions(batch=4, workers=4))
    assert [record["image"] for record in found] == [str(number) for number in range(30)]


def test_pictures_go_through_in_batches(bright_session: Callable) -> None:
    session = bright_session()
    records(shades(range(19)), [session], EngineOptions(batch=8))
    assert session.batches == [8, 8, 3]


def test_one_bad_file_leaves_the_63_others_records_byte_identical(
    exact_session: OnnxSession, make_pictures: Callable, tmp_path: Path
) -> None:
    paths = make_pictures(tmp_path, 64)
    options = EngineOptions(batch=64)

    def run() -> list[str]:
        return lines(records((Request(path.name, path) for path in paths), [exact_session], options))

    clean = run()
    paths[20].write_bytes(paths[20].read_bytes()[:300])
    found = run()
    assert json.loads(found[20])["error"]["code"] == "truncated_image"
    assert found[:20] + found[21:] == clean[:20] + clean[21:]


def test_a_batch_of_bad_files_only_never_reaches_the_session(bright_session: Callable) -> None:
    session = bright_session()
    requests = (Request(str(number), b"nothing") for number in range(10))
    found = records(requests, [session], EngineOptions(batch=4))
    assert [record["error"]["code"] for record in found] == ["not_an_image"] * 10
    assert session.batches == []


def test_two_sessions_give_the_records_of_one(
    exact_session: OnnxSession, exact_model: Path, make_pictures: Callable, tmp_path: Path
) -> None:
    paths = make_pictures(tmp_path, 30)
    options = EngineOptions(batch=4)
    second = OnnxSession(exact_model, device="cpu", threads=1)

    def run(sessions: list[Session]) -> list[str]:
        return lines(records((Request(path.name, path) for path in paths), sessions, options))

    assert run([exact_session, second]) == run([exact_session])


def test_batches_go_to_the_sessions_in_turn(bright_session: Callable) -> None:
    sessions = [bright_session(), bright_session()]
    records(shades(range(20)), sessions, EngineOptions(batch=4))
    assert [session.batches for session in sessions] == [[4, 4, 4], [4, 4]]


def test_two_sessions_work_at_the_same_time(bright_session: Callable) -> None:
    hold = threading.Event()
    sessions = [bright_session(hold=hold), bright_session(hold=hold)]
    entered: list[int] = []
    for number, session in enumerate(sessions):
        run = session.run

        def noting(images: ImageBatch, run: Callable = run, number: int = number) -> Outputs:
            entered.append(number)
            if len(set(entered)) == 2:
                # the first is still in its batch
                hold.set()
            return run(images)

        session.run = noting
    started = time.monotonic()
    assert len(records(shades(range(8)), sessions, EngineOptions(batch=4))) == 8
    assert time.monotonic() - started < 10


@pytest.mark.parametrize("count", [1, 2])
def test_an_endless_stream_is_read_a_bounded_distance_ahead(bright_session: Callable, count: int) -> None:
    begun = 0

    def endless() -> Iterator[Request]:
        nonlocal begun
        for number in itertools.count():
            begun += 1
            yield Request(str(number), shade(number))

    batch = 4
    results = explain_all(endless(), [bright_session() for _ in range(count)], EngineOptions(batch=batch))
    for taken in range(1, 61):
        next(results)
        # being decoded, waiting for or in a session, and the batch whose results are being handed out
        assert begun - taken <= batch * (2 * count + 3)
    results.close()


def test_closing_the_iterator_ends_the_threads_and_drops_what_waits(bright_session: Callable) -> None:
    before = ours()
    session = bright_session()
    results = explain_all(shades(itertools.count()), [session], EngineOptions(batch=4, workers=2))
    for _ in range(5):
        next(results)
    assert ours() - before
    results.close()
    assert ours() == before
    assert len(session.batches) <= 4


def test_records_before_a_lost_device_are_whole(bright_session: Callable) -> None:
    results = explain_all(shades(range(40)), [bright_session(fails_at=3)], EngineOptions(batch=4))
    found: list[Record] = []
    with pytest.raises(StoppedEarly, match="device was lost"):
        found.extend(result.record for result in results)
    assert [record["image"] for record in found] == [str(number) for number in range(12)]
    assert {record["status"] for record in found} == {"ok"}


def test_one_of_two_devices_lost_keeps_the_order_up_to_its_batch(bright_session: Callable) -> None:
    sessions = [bright_session(), bright_session(fails_at=1)]
    results = explain_all(shades(range(40)), sessions, EngineOptions(batch=4))
    found: list[Record] = []
    with pytest.raises(StoppedEarly):
        found.extend(result.record for result in results)
    assert [record["image"] for record in found] == [str(number) for number in range(12)]


@pytest.mark.parametrize("good", [0, 1, 9, 17])
def test_an_error_in_the_list_of_images_loses_none_before_it(bright_session: Callable, good: int) -> None:
    def requests() -> Iterator[Request]:
        yield from shades(range(good))
        raise UsageError("no such file")

    found: list[Record] = []
    with pytest.raises(UsageError, match="no such file"):
        found.extend(r.record for r in explain_all(requests(), [bright_session()], EngineOptions(batch=4)))
    assert [record["image"] for record in found] == [str(number) for number in range(good)]


def test_read_ahead_hands_out_what_was_begun_before_the_device_was_lost() -> None:
    from concurrent.futures import Future

    def futures() -> Iterator[Future[int]]:
        for number in range(5):
            future: Future[int] = Future()
            future.set_result(number)
            yield future
        raise StoppedEarly("the device was lost")

    found: list[int] = []
    with pytest.raises(StoppedEarly):
        found.extend(ahead(futures(), 3))
    assert found == [0, 1, 2, 3, 4]


def test_an_answer_that_is_no_number_is_an_error_of_its_image_alone(bright_session: Callable) -> None:
    session = bright_session()
    run = session.run

    def overflowing(images: ImageBatch) -> Outputs:
        outputs = run(images)
        outputs.logits[1] = np.nan
        return outputs

    session.run = overflowing
    found = records(shades(range(4)), [session], EngineOptions(batch=4))
    assert [record["status"] for record in found] == ["ok", "error", "ok", "ok"]
    assert found[1]["error"]["code"] == "not_finite"


def test_a_picture_that_memory_cannot_hold_is_an_error_of_its_own(
    bright_session: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    from opal_deploy.pipeline import prepare

    to_input = prepare.to_input

    def out_of_memory(picture: Image.Image, *rest: object) -> np.ndarray:
        if picture.getpixel((63, 63)) == (1, 1, 1):
            raise MemoryError
        return to_input(picture, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(prepare, "to_input", out_of_memory)
    found = records(shades(range(3)), [bright_session()], EngineOptions(batch=4))
    assert [record["status"] for record in found] == ["ok", "error", "ok"]


def test_a_wanted_box_that_is_missing_is_the_images_error(bright_session: Callable) -> None:
    request = Request("a", shade(1), ImageError("no_box", "boxes.csv has no box for it"))
    (record,) = records(iter([request]), [bright_session()], EngineOptions())
    assert record == {
        "schema": 1,
        "image": "a",
        "status": "error",
        "error": {"code": "no_box", "message": "boxes.csv has no box for it"},
    }


def test_evidence_inside_a_crop_is_given_in_pixels_of_the_whole_picture(bright_session: Callable) -> None:
    image = Image.new("RGB", (500, 300), (10, 10, 10))
    # the crop is 100 to 300 by 40 to 240: cells of 50 x 50; this is its cell (2, 1)
    image.paste((255, 255, 255), (150, 140, 200, 190))
    (record,) = records(iter([Request("a", image, (100, 40, 300, 240))]), [bright_session()], EngineOptions())
    assert (record["width"], record["height"]) == (500, 300)
    for slot in record["evidence"]:
        assert slot["cell"] == [2, 1]
        assert slot["box"] == [150, 140, 200, 190]
