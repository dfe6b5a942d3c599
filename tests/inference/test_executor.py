"""The loop: one record an image, in order, bounded, whatever single images and devices do."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from opal_deploy.artifact.outputs import Outputs
from opal_deploy.errors import ImageError, OutOfMemory, StoppedEarly, UsageError
from opal_deploy.inference.executor import predict_stream, prefetch
from opal_deploy.inference.types import InferenceOptions, Request
from opal_deploy.records.record import Record
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


def records(requests: Iterator[Request], sessions: list[Session], options: InferenceOptions) -> list[Record]:
    return [result.record for result in predict_stream(requests, sessions, options)]


def lines(found: list[Record]) -> list[str]:
    return [json.dumps(record) for record in found]


def ours() -> set[str]:
    return {t.name for t in threading.enumerate() if t.name.startswith(("decode", "session-"))}


@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 50])
@pytest.mark.parametrize("workers", [1, 4])
def test_there_is_one_record_an_image_in_their_order(bright_session: Callable, count: int, workers: int) -> None:
    found = records(shades(range(count)), [bright_session()], InferenceOptions(batch=8, workers=workers))
    assert [record["image"] for record in found] == [str(number) for number in range(count)]
    assert [record["evidence"][0]["cell"] for record in found] == [list(divmod(n % 16, 4)) for n in range(count)]


def test_order_survives_pictures_that_take_longer_to_decode(
    bright_session: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    from opal_deploy.inference.decoding import prepare

    decode = prepare.decode

    def slow_for_some(source: Image.Image, **options: int) -> Image.Image:
        time.sleep(0.03 if source.getpixel((63, 63))[0] % 5 == 0 else 0)  # type: ignore[index]
        return decode(source, **options)

    monkeypatch.setattr(prepare, "decode", slow_for_some)
    found = records(shades(range(30)), [bright_session()], InferenceOptions(batch=4, workers=4))
    assert [record["image"] for record in found] == [str(number) for number in range(30)]


def test_pictures_go_through_in_batches(bright_session: Callable) -> None:
    session = bright_session()
    records(shades(range(19)), [session], InferenceOptions(batch=8))
    assert session.batches == [8, 8, 3]


def test_one_bad_file_leaves_the_63_others_records_byte_identical(
    exact_session: OnnxSession, make_pictures: Callable, tmp_path: Path
) -> None:
    paths = make_pictures(tmp_path, 64)
    options = InferenceOptions(batch=64)

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
    found = records(requests, [session], InferenceOptions(batch=4))
    assert [record["error"]["code"] for record in found] == ["not_an_image"] * 10
    assert session.batches == []


def test_two_sessions_give_the_records_of_one(
    exact_session: OnnxSession, exact_model: Path, make_pictures: Callable, tmp_path: Path
) -> None:
    paths = make_pictures(tmp_path, 30)
    options = InferenceOptions(batch=4)
    second = OnnxSession(exact_model, device="cpu", threads=1)

    def run(sessions: list[Session]) -> list[str]:
        return lines(records((Request(path.name, path) for path in paths), sessions, options))

    assert run([exact_session, second]) == run([exact_session])


def test_batches_go_to_the_sessions_in_turn(bright_session: Callable) -> None:
    sessions = [bright_session(), bright_session()]
    records(shades(range(20)), sessions, InferenceOptions(batch=4))
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
    assert len(records(shades(range(8)), sessions, InferenceOptions(batch=4))) == 8
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
    results = predict_stream(endless(), [bright_session() for _ in range(count)], InferenceOptions(batch=batch))
    for taken in range(1, 61):
        next(results)
        # being decoded, waiting for or in a session, and the batch whose results are being handed out
        assert begun - taken <= batch * (2 * count + 3)
    results.close()


def test_closing_the_iterator_ends_the_threads_and_drops_what_waits(bright_session: Callable) -> None:
    before = ours()
    session = bright_session()
    results = predict_stream(shades(itertools.count()), [session], InferenceOptions(batch=4, workers=2))
    for _ in range(5):
        next(results)
    assert ours() - before
    results.close()
    assert ours() == before
    assert len(session.batches) <= 4


def test_records_before_a_lost_device_are_whole(bright_session: Callable) -> None:
    results = predict_stream(shades(range(40)), [bright_session(fails_at=3)], InferenceOptions(batch=4))
    found: list[Record] = []
    with pytest.raises(StoppedEarly, match="device was lost"):
        found.extend(result.record for result in results)
    assert [record["image"] for record in found] == [str(number) for number in range(12)]
    assert {record["status"] for record in found} == {"ok"}


def test_one_of_two_devices_lost_keeps_the_order_up_to_its_batch(bright_session: Callable) -> None:
    sessions = [bright_session(), bright_session(fails_at=1)]
    results = predict_stream(shades(range(40)), sessions, InferenceOptions(batch=4))
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
        found.extend(r.record for r in predict_stream(requests(), [bright_session()], InferenceOptions(batch=4)))
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
        found.extend(prefetch(futures(), 3))
    assert found == [0, 1, 2, 3, 4]


def test_an_answer_that_is_no_number_is_an_error_of_its_image_alone(bright_session: Callable) -> None:
    session = bright_session()
    run = session.run

    def overflowing(images: ImageBatch) -> Outputs:
        outputs = run(images)
        outputs.logits[1] = np.nan
        return outputs

    session.run = overflowing
    found = records(shades(range(4)), [session], InferenceOptions(batch=4))
    assert [record["status"] for record in found] == ["ok", "error", "ok", "ok"]
    assert found[1]["error"]["code"] == "not_finite"


def test_a_picture_that_memory_cannot_hold_is_an_error_of_its_own(
    bright_session: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    from opal_deploy.inference.decoding import prepare

    to_input = prepare.to_input

    def out_of_memory(picture: Image.Image, *rest: object) -> np.ndarray:
        if picture.getpixel((63, 63)) == (1, 1, 1):
            raise MemoryError
        return to_input(picture, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(prepare, "to_input", out_of_memory)
    found = records(shades(range(3)), [bright_session()], InferenceOptions(batch=4))
    assert [record["status"] for record in found] == ["ok", "error", "ok"]


def test_a_wanted_box_that_is_missing_is_the_images_error(bright_session: Callable) -> None:
    request = Request("a", shade(1), error=ImageError("no_box", "boxes.csv has no box for it"))
    (record,) = records(iter([request]), [bright_session()], InferenceOptions())
    assert record == {
        "schema": 1,
        "image": "a",
        "status": "error",
        "file_sha256": None,
        "model_sha256": None,
        "error": {"code": "no_box", "message": "boxes.csv has no box for it"},
    }


def test_evidence_inside_a_crop_is_given_in_pixels_of_the_whole_picture(bright_session: Callable) -> None:
    image = Image.new("RGB", (500, 300), (10, 10, 10))
    # the crop is 100 to 300 by 40 to 240: cells of 50 x 50; this is its cell (2, 1)
    image.paste((255, 255, 255), (150, 140, 200, 190))
    (record,) = records(iter([Request("a", image, (100, 40, 300, 240))]), [bright_session()], InferenceOptions())
    assert (record["width"], record["height"]) == (500, 300)
    for slot in record["evidence"]:
        assert slot["cell"] == [2, 1]
        assert slot["box"] == [150, 140, 200, 190]


def padded(session: Session) -> list[tuple[int, int]]:
    """Notes the size of each forward pass and how many of its pictures are blank."""
    seen: list[tuple[int, int]] = []
    run = session.run

    def noting(images: ImageBatch) -> Outputs:
        seen.append((len(images), sum(not image.any() for image in images)))
        return run(images)

    session.run = noting  # type: ignore[method-assign]
    return seen


def test_a_bad_image_keeps_its_place_as_a_blank_picture(bright_session: Callable) -> None:
    session = bright_session()
    seen = padded(session)
    requests = [Request(str(n), b"nothing" if n in (1, 6) else shade(n + 1)) for n in range(10)]
    found = records(iter(requests), [session], InferenceOptions(batch=4))
    assert [record["status"] for record in found] == ["ok", "error", "ok", "ok"] + ["ok", "ok", "error", "ok"] + [
        "ok"
    ] * 2
    assert [record["evidence"][0]["cell"] for record in found if "evidence" in record] == [
        list(divmod((n + 1) % 16, 4)) for n in range(10) if n not in (1, 6)
    ]
    assert seen == [(4, 1), (4, 1), (2, 0)]


@pytest.mark.parametrize("count", [1, 4, 7])
def test_with_a_fixed_batch_every_forward_pass_has_its_size(bright_session: Callable, count: int) -> None:
    session = bright_session()
    seen = padded(session)
    requests = (Request(str(n), shade(n + 1)) for n in range(count))
    found = records(requests, [session], InferenceOptions(batch=4, fixed_batch=True))
    assert len(found) == count
    assert [size for size, _ in seen] == [4] * ((count + 3) // 4)
    assert sum(blank for _, blank in seen) == -count % 4


def test_with_a_fixed_batch_a_session_that_answers_each_alike_is_not_filled_up(bright_session: Callable) -> None:
    session = bright_session()
    session.batch_invariant = True
    records(shades(range(5)), [session], InferenceOptions(batch=4, fixed_batch=True))
    assert session.batches == [4, 1]


@pytest.fixture(scope="module")
def resnet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ResNet-18 with an OPAL head for 200 classes, random weights; its checkpoint lies beside the ONNX file."""
    import torch

    from opal_deploy.bench.targets.networks import update_batch_norms
    from opal_deploy.export.checkpoint_source import CheckpointSource
    from opal_deploy.export.exporter import export
    from opal_deploy.export.options import ExportOptions, plan_targets
    from opal_deploy.model.checkpoint import Checkpoint, load, save
    from opal_deploy.model.config import HeadConfig, NetworkConfig
    from opal_deploy.model.network import OpalNetwork
    from opal_deploy.synthetic import example_images

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = OpalNetwork(NetworkConfig("resnet18", 200, (128, 128), HeadConfig(prototypes_per_class=5)))
        update_batch_norms(network, example_images(8, 128, 128))
    path = tmp_path_factory.mktemp("resnet") / "resnet18.pt"
    save(path, Checkpoint(network, [f"class {number}" for number in range(200)]))
    source = CheckpointSource(load(path), path)
    return export(source, plan_targets(source), ExportOptions(threads=1)).onnx[0].path


@pytest.mark.parametrize(("runtime", "threads"), [("onnx", 1), ("onnx", 2), ("torch", 1)])
def test_in_a_batch_of_64_of_a_resnet_one_bad_file_changes_not_a_byte_of_the_others(
    resnet: Path, make_pictures: Callable, tmp_path: Path, runtime: str, threads: int
) -> None:
    from opal_deploy.runtime.select import open_sessions

    path = resnet if runtime == "onnx" else resnet.with_suffix(".pt")
    sessions = open_sessions(path, device="cpu", threads=threads)
    paths = make_pictures(tmp_path, 64)
    bad = paths[20].with_name("bad.png")
    bad.write_bytes(paths[20].read_bytes()[:300])

    def run(listed: list[Path]) -> dict[str, str]:
        asked = (Request(path.name, path) for path in listed)
        found = records(asked, sessions, InferenceOptions(batch=64, fixed_batch=True))
        return {str(record["image"]): json.dumps(record) for record in found}

    with_bad = run([*paths[:20], bad, *paths[21:]])
    assert json.loads(with_bad.pop("bad.png"))["error"]["code"] == "truncated_image"
    assert len(with_bad) == 63
    where_it_is_good = run(paths)
    del where_it_is_good[paths[20].name]
    assert with_bad == where_it_is_good
    # everything after it moves up, and the batch is one short
    assert with_bad == run(paths[:20] + paths[21:])


def too_large(session: Session, most: int, error: Exception) -> list[int]:
    """A session whose memory takes `most` pictures at a time; the sizes that it was asked for."""
    asked: list[int] = []
    run = session.run

    def limited(images: ImageBatch) -> Outputs:
        asked.append(len(images))
        if len(images) > most:
            raise error
        return run(images)

    session.run = limited  # type: ignore[method-assign]
    return asked


@pytest.mark.parametrize("error", [OutOfMemory("full"), MemoryError()], ids=["the device's", "the host's"])
@pytest.mark.parametrize("fixed", [False, True])
def test_out_of_memory_halves_the_batch_once_and_for_all_and_says_so(
    bright_session: Callable, error: Exception, fixed: bool
) -> None:
    session = bright_session()
    asked = too_large(session, 4, error)
    said: list[str] = []
    options = InferenceOptions(batch=16, fixed_batch=fixed)
    found = [r.record for r in predict_stream(shades(range(38)), [session], options, print_message=said.append)]
    clean = records(shades(range(38)), [bright_session()], InferenceOptions(batch=16))
    assert lines(found) == lines(clean)
    assert asked == [16, 8, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4 if fixed else 2]
    assert said == [
        "brightness on CPU: out of memory with a batch of 16; going on with 8",
        "brightness on CPU: out of memory with a batch of 8; going on with 4",
    ]


def test_memory_that_is_too_small_for_one_picture_stops_the_run(bright_session: Callable) -> None:
    session = bright_session()
    asked = too_large(session, 0, OutOfMemory("CUDA is full"))
    with pytest.raises(StoppedEarly, match=r"out of memory with a single image \(CUDA is full\); free memory there"):
        records(shades(range(8)), [session], InferenceOptions(batch=8))
    assert asked == [8, 4, 2, 1]


def test_memory_that_fills_up_later_keeps_what_was_done(bright_session: Callable) -> None:
    session = bright_session()
    asked = too_large(session, 99, OutOfMemory("full"))
    run = session.run

    def shrinking(images: ImageBatch) -> Outputs:
        if len(asked) > 3 and len(images) > 2:
            raise OutOfMemory("full")
        return run(images)

    session.run = shrinking
    assert lines(records(shades(range(40)), [session], InferenceOptions(batch=4))) == lines(
        records(shades(range(40)), [bright_session()], InferenceOptions(batch=4))
    )


def test_only_the_session_that_is_short_of_memory_takes_smaller_batches(bright_session: Callable) -> None:
    small, large = bright_session(), bright_session()
    asked = too_large(small, 2, OutOfMemory("full"))
    found = records(shades(range(16)), [small, large], InferenceOptions(batch=4))
    assert [record["image"] for record in found] == [str(number) for number in range(16)]
    assert asked == [4, 2, 2, 2, 2]
    assert large.batches == [4, 4]


@pytest.mark.parametrize("end", [0, 1, 7, 8, 30])
def test_ending_the_requests_answers_all_that_were_taken(bright_session: Callable, end: int) -> None:
    stop = threading.Event()
    taken: list[str] = []

    def until_stopped() -> Iterator[Request]:
        for request in shades(itertools.count()):
            if stop.is_set():
                return
            taken.append(str(request.name))
            yield request

    found: list[str] = []
    if end == 0:
        stop.set()
    for result in predict_stream(until_stopped(), [bright_session()], InferenceOptions(batch=4)):
        found.append(str(result.record["image"]))
        if len(found) == end:
            stop.set()
    assert found == taken
    assert len(found) >= end


def test_a_slow_consumer_lets_no_pictures_pile_up(bright_session: Callable) -> None:
    begun: list[weakref.ref[Image.Image]] = []

    def endless() -> Iterator[Request]:
        for number in itertools.count():
            picture = shade(number)
            begun.append(weakref.ref(picture))
            yield Request(str(number), picture)

    batch = 4
    results = predict_stream(endless(), [bright_session()], InferenceOptions(batch=batch, workers=4, keep_images=True))
    most = 0
    for _ in range(40):
        next(results)
        time.sleep(0.01)
        most = max(most, sum(picture() is not None for picture in begun))
    results.close()
    # being decoded or waiting, in the session, ready for it, and the batch that is being handed out
    assert most <= 5 * batch + 1


@pytest.mark.parametrize("threads", [1, 2])
def test_on_the_cpu_onnx_runtime_answers_a_picture_alike_in_batches_of_any_size(
    resnet: Path, make_pictures: Callable, tmp_path: Path, threads: int
) -> None:
    session = OnnxSession(resnet, device="cpu", threads=threads)
    assert session.batch_invariant
    paths = make_pictures(tmp_path, 24)

    def run(batch: int) -> list[str]:
        return lines(records((Request(path.name, path) for path in paths), [session], InferenceOptions(batch=batch)))

    assert run(1) == run(5) == run(24)


# a real limit, in a process of its own: the runtime's allocation fails where it fails on a small machine
_SHORT_OF_MEMORY = """
import json, resource, sys
from pathlib import Path
from opal_deploy.synthetic import example_images
from opal_deploy.inference.executor import predict_stream
from opal_deploy.inference.types import InferenceOptions, Request
from opal_deploy.runtime.select import open_sessions

sessions = open_sessions(Path(sys.argv[1]), device="cpu", threads=1)
pictures = list(example_images(64, 128, 128))
said = []

def run(batch):
    asked = (Request(str(number), picture) for number, picture in enumerate(pictures))
    options = InferenceOptions(batch=batch)
    return [json.dumps(r.record) for r in predict_stream(asked, sessions, options, print_message=said.append)]

clean = run(4)
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (40 << 20), resource.RLIM_INFINITY))
found = run(64)
print(json.dumps({"same": found == clean, "said": said}))
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="limits a process's memory as Linux does")
def test_onnx_runtime_without_memory_for_a_batch_goes_on_with_half(resnet: Path) -> None:
    arguments = [sys.executable, "-c", _SHORT_OF_MEMORY, str(resnet)]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["same"]
    assert "out of memory with a batch of 64; going on with 32" in told["said"][0]
