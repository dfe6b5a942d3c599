"""The service: images that come one by one, from many threads, as a server would use it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import queue
import threading
import time
from concurrent.futures import CancelledError

import numpy as np
import pytest

import opal_deploy
from opal_deploy.api.explanation import Explanation
from opal_deploy.api.service import Service
from opal_deploy.errors import ArtifactError, StoppedEarly
from opal_deploy.predict.prepare import InferenceOptions
from opal_deploy.sources.image import InputImage
from tests.bright import BrightSession, QueuedSession, own_threads, wait_until


def array(shade):
    image = np.full((40, 40, 3), 10, np.uint8)
    row, col = divmod(shade % 16, 4)
    image[row * 10 : row * 10 + 10, col * 10 : col * 10 + 10] = 100 + shade % 100
    return image


def cell(record):
    row, col = record["evidence"][0]["cell"]
    return row * 4 + col


def test_an_asyncio_program_gets_200_records_as_explain_returns_them(model, make_pictures, tmp_path):
    paths = make_pictures(tmp_path, 40)
    paths[17].write_bytes(paths[17].read_bytes()[:200])
    expected = model.predict(paths)
    assert expected[17]["status"] == "error"

    async def client(service, first):
        """One caller's requests, all in flight together; its records in the order of its requests."""
        futures = [service.submit(paths[(first + step) % 40], wait=False) for step in range(40)]
        return await asyncio.gather(*map(asyncio.wrap_future, futures))

    async def program(service):
        return await asyncio.gather(*(client(service, first) for first in range(5)))

    with model.serve(batch=8) as service:
        boxed = service.submit(paths[0], (10, 20, 70, 80)).result(30)
        assert isinstance(boxed, Explanation)
        assert boxed == model.predict(paths[0], boxes=(10, 20, 70, 80))
        assert service.submit(paths[0].read_bytes()).result(30) == {**expected[0], "image": None}
        found = asyncio.run(program(service))
    assert found == [[expected[(first + step) % 40] for step in range(40)] for first in range(5)]


def test_busy_cores_have_a_batch_each_with_the_same_outputs(exact_model, tmp_path):
    path = tmp_path / "model.onnx"
    path.write_bytes(exact_model.read_bytes())
    model = opal_deploy.load(path, device="cpu", threads=2)
    pixels = np.random.default_rng(0).integers(0, 256, (24, *model.metadata.input_size, 3), np.uint8)
    expected = model.sessions[0].run(pixels)
    with model.serve(batch=1) as service:
        rows = [future.result(30) for future in service.submit_pixels(pixels)]
    assert np.array_equal(np.concatenate([row.scores for row in rows]), expected.scores)
    path.write_bytes(b"another file")
    with pytest.raises(ArtifactError, match="digest"):
        model.serve()


@pytest.mark.parametrize(
    ("kind", "batch", "batches"), [(BrightSession, 4, [1, 4, 4, 1]), (QueuedSession, 2, [1, 2, 2, 2, 2, 1])]
)
def test_waiting_images_go_in_full_batches_and_one_alone_by_itself(kind, batch, batches):
    session = kind()
    session.hold = hold = threading.Event()
    with Service([session], InferenceOptions(batch=batch), max_wait=0.0) as service:
        first = service.submit(array(0))
        wait_until(first.running)
        rest = [service.submit(array(shade)) for shade in range(1, 10)]
        time.sleep(0.3)
        hold.set()
        assert [cell(future.result(30)) for future in [first, *rest]] == list(range(10))
    assert session.batches == batches
    # several are in flight together
    assert kind is BrightSession or session.longest == session.depth


def test_a_full_service_raises_or_waits():
    hold = threading.Event()
    with Service([BrightSession(hold=hold)], InferenceOptions(batch=2), capacity=5) as service:
        taken = [service.submit(array(shade)) for shade in range(5)]
        with pytest.raises(queue.Full, match="5 images are in flight"):
            service.submit(array(5), wait=False)
        late = []
        waiting = threading.Thread(target=lambda: late.append(service.submit(array(5))))
        waiting.start()
        waiting.join(0.2)
        assert waiting.is_alive()
        hold.set()
        waiting.join(30)
        assert [cell(future.result(30)) for future in [*taken, *late]] == list(range(6))


def test_a_cancelled_image_is_never_predicted():
    hold = threading.Event()
    session = BrightSession(hold=hold)
    with Service([session], InferenceOptions(batch=1, workers=1), max_wait=0.0, capacity=4) as service:
        first, second, third, fourth = (service.submit(array(shade)) for shade in range(4))
        wait_until(first.running)
        assert not first.cancel()
        assert second.cancel()
        assert fourth.cancel()
        hold.set()
        assert [cell(future.result(30)) for future in (first, third)] == [0, 2]
        with pytest.raises(CancelledError):
            second.result()
        # their places are free again
        again = [service.submit(array(shade)) for shade in range(4)]
        assert [cell(future.result(30)) for future in again] == [0, 1, 2, 3]
    assert session.batches == [1] * 6


def test_pixels_share_batches_with_images_enter_all_or_none_and_wait_only_for_others_in_flight():
    hold = threading.Event()
    session = BrightSession(hold=hold)
    pixels = np.stack([array(shade)[4:36, 4:36] for shade in range(3)])
    with Service([session], InferenceOptions(batch=4), max_wait=600, capacity=5) as service:
        (alone,) = service.submit_pixels(pixels[:1])
        wait_until(alone.running)
        outputs = service.submit_pixels(pixels)
        with pytest.raises(queue.Full, match="4 images are in flight"):
            service.submit_pixels(pixels[:2], wait=False)
        with pytest.raises(ValueError, match="6 images found; expected at most 5"):
            service.submit_requests([InputImage(None, array(0))] * 6, list)
        with pytest.raises(ValueError, match=r"expected uint8 \[N, 32, 32, 3\]"):
            service.submit_pixels(pixels[..., :2])
        record = service.submit(array(3), wait=False)
        hold.set()
        found = np.concatenate([future.result(30).logits for future in outputs])
        assert cell(record.result(30)) == 3
        assert service.in_flight == 0
    np.testing.assert_array_equal(found, session.run(pixels).logits)
    assert session.batches == [1, 4, 3]


def test_closing_under_load_finishes_what_was_taken_and_refuses_more():
    before = own_threads()
    sessions = [BrightSession(), BrightSession()]
    service = Service(sessions, InferenceOptions(batch=4), capacity=64)
    taken = []

    def caller():
        with contextlib.suppress(RuntimeError):
            for shade in itertools.count():
                taken.append((shade, service.submit(array(shade))))

    threads = [threading.Thread(target=caller) for _ in range(3)]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(taken) >= 100)
    service.close()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    assert all(future.done() for _, future in taken)
    assert all(cell(future.result()) == shade % 16 for shade, future in taken)
    assert sum(sum(session.batches) for session in sessions) == len(taken)
    assert own_threads() == before
    service.close()
    with pytest.raises(RuntimeError, match="the service is closed"):
        service.submit(array(0))


def test_a_lost_device_is_raised_to_its_callers_and_the_next_batch_may_succeed():
    session = BrightSession(fails_at=0)
    with Service([session], InferenceOptions(batch=1)) as service:
        with pytest.raises(StoppedEarly, match="device was lost"):
            service.submit(array(0)).result(30)
        session.fails_at = None
        assert cell(service.submit(array(3)).result(30)) == 3
