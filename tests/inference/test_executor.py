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
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from opal_deploy.artifact.outputs import Outputs
from opal_deploy.errors import ImageError, OutOfMemory, StoppedEarly, UsageError
from opal_deploy.inference.decoding import prepare
from opal_deploy.inference.executor import predict_stream, prefetch
from opal_deploy.inference.types import InferenceOptions, Request
from opal_deploy.records.record import Record
from opal_deploy.runtime.onnx_session import OnnxSession
from opal_deploy.runtime.select import open_sessions
from opal_deploy.runtime.session import ImageBatch, Session


def shade(number: int) -> Image.Image:
    """Return an image whose brightest cell is `number` modulo 16."""
    image = Image.new("RGB", (64, 64), (number % 50,) * 3)
    row, col = divmod(number % 16, 4)
    image.paste((200, 200, 200), (col * 16, row * 16, col * 16 + 16, row * 16 + 16))
    return image


def shades(numbers: Iterable[int]) -> Iterator[Request]:
    return (Request(str(number), shade(number)) for number in numbers)


def predict(requests: Iterable[Request | Path], *sessions: Session, **options: object) -> list[Record]:
    listed = (Request(one.name, one) if isinstance(one, Path) else one for one in requests)
    results = predict_stream(listed, sessions, InferenceOptions(**options))  # type: ignore[arg-type]
    return [result.record for result in results]


def lines(records: list[Record]) -> list[str]:
    return [json.dumps(record) for record in records]


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


def own_threads() -> set[str]:
    return {t.name for t in threading.enumerate() if t.name.startswith(("decode", "session-"))}


# ---- order


@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 50])
@pytest.mark.parametrize("workers", [1, 4])
def test_one_record_an_image_in_their_order(bright_session: Callable, count: int, workers: int) -> None:
    session = bright_session()
    records = predict(shades(range(count)), session, batch=8, workers=workers)
    assert names(records) == list(range(count))
    assert [record["evidence"][0]["cell"] for record in records] == [list(divmod(n % 16, 4)) for n in range(count)]
    assert session.batches == [8] * (count // 8) + [count % 8] * (count % 8 > 0)


def test_images_that_take_longer_to_decode_keep_their_place(
    bright_session: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    to_input = prepare.to_input

    def slow_for_some(image: Image.Image, *rest: object) -> np.ndarray:
        time.sleep(0.03 if image.getpixel((63, 63))[0] % 5 == 0 else 0)  # type: ignore[index]
        return to_input(image, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(prepare, "to_input", slow_for_some)
    assert names(predict(shades(range(30)), bright_session(), batch=4, workers=4)) == list(range(30))


def test_two_sessions_take_turns_at_the_same_time(bright_session: Callable) -> None:
    hold = threading.Event()
    entered: set[int] = set()

    def enter(number: int) -> None:
        entered.add(number)
        if len(entered) == 2:
            # the first is still in its batch
            hold.set()

    sessions = [bright_session(hold=hold) for _ in range(2)]
    wrapped = [wrap(session, lambda _, n=n: enter(n)) for n, session in enumerate(sessions)]  # type: ignore[misc]
    started = time.monotonic()
    assert len(predict(shades(range(20)), *wrapped, batch=4)) == 20
    assert time.monotonic() - started < 10
    assert [session.batches for session in sessions] == [[4, 4, 4], [4, 4]]


def test_two_sessions_give_the_records_of_one(
    exact_session: OnnxSession, exact_model: Path, make_pictures: Callable, tmp_path: Path
) -> None:
    paths = make_pictures(tmp_path, 30)
    second = OnnxSession(exact_model, device="cpu", threads=1)
    assert predict(paths, exact_session, second, batch=4) == predict(paths, exact_session, batch=4)


# ---- bounds


@pytest.mark.parametrize("count", [1, 2])
def test_an_endless_stream_is_read_a_bounded_distance_ahead(bright_session: Callable, count: int) -> None:
    batch, before = 4, own_threads()
    begun: list[weakref.ref[Image.Image]] = []

    def endless() -> Iterator[Request]:
        for number in itertools.count():
            image = shade(number)
            begun.append(weakref.ref(image))
            yield Request(str(number), image)

    options = InferenceOptions(batch=batch, workers=4, keep_images=True)
    results = predict_stream(endless(), [bright_session() for _ in range(count)], options)
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


@pytest.mark.parametrize("end", [0, 1, 7, 8, 30])
def test_ending_the_requests_predicts_all_that_were_taken(bright_session: Callable, end: int) -> None:
    taken: list[int] = []
    found: list[int] = []

    def until_end() -> Iterator[Request]:
        for number, request in enumerate(shades(itertools.count())):
            if len(found) >= end:
                return
            taken.append(number)
            yield request

    for result in predict_stream(until_end(), [bright_session()], InferenceOptions(batch=4)):
        found += names([result.record])
    assert found == taken
    assert len(found) >= end


# ---- errors that end the loop


@pytest.mark.parametrize(("fails_at", "count"), [((3,), 12), ((None, 1), 12)], ids=["the only device", "one of two"])
def test_records_before_a_lost_device_are_whole(
    bright_session: Callable, fails_at: tuple[int | None, ...], count: int
) -> None:
    sessions = [bright_session(fails_at=batch) for batch in fails_at]
    records: list[Record] = []
    with pytest.raises(StoppedEarly, match="device was lost"):
        records.extend(r.record for r in predict_stream(shades(range(40)), sessions, InferenceOptions(batch=4)))
    assert names(records) == list(range(count))
    assert {record["status"] for record in records} == {"ok"}


@pytest.mark.parametrize("good", [0, 1, 9, 17])
def test_an_error_in_the_list_of_images_loses_none_before_it(bright_session: Callable, good: int) -> None:
    def requests() -> Iterator[Request]:
        yield from shades(range(good))
        raise UsageError("no such file")

    records: list[Record] = []
    with pytest.raises(UsageError, match="no such file"):
        records.extend(r.record for r in predict_stream(requests(), [bright_session()], InferenceOptions(batch=4)))
    assert names(records) == list(range(good))


def test_prefetch_yields_what_was_begun_before_an_error() -> None:
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


# ---- errors of single images


def test_logits_that_are_nan_are_an_error_of_their_image_alone(bright_session: Callable) -> None:
    def overflow(outputs: Outputs) -> None:
        outputs.logits[1] = np.nan

    records = predict(shades(range(4)), wrap(bright_session(), id, overflow), batch=4)
    assert [record["status"] for record in records] == ["ok", "error", "ok", "ok"]
    assert records[1]["error"]["code"] == "not_finite"


def test_an_image_that_memory_cannot_hold_is_an_error_of_its_own(
    bright_session: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    to_input = prepare.to_input

    def out_of_memory(image: Image.Image, *rest: object) -> np.ndarray:
        if image.getpixel((63, 63)) == (1, 1, 1):
            raise MemoryError
        return to_input(image, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(prepare, "to_input", out_of_memory)
    assert [r["status"] for r in predict(shades(range(3)), bright_session(), batch=4)] == ["ok", "error", "ok"]


def test_an_error_of_the_request_is_the_records(bright_session: Callable) -> None:
    error = ImageError("no_box", "boxes.csv has no box for it")
    (record,) = predict([Request("a", shade(1), truth="oak", error=error)], bright_session())
    expected = {
        "schema": 1,
        "image": "a",
        "status": "error",
        "file_sha256": None,
        "model_sha256": None,
        "error": {"code": "no_box", "message": "boxes.csv has no box for it"},
        "truth": "oak",
    }
    assert list(record.items()) == list(expected.items())


def test_evidence_inside_a_crop_is_in_pixels_of_the_whole_image(bright_session: Callable) -> None:
    image = Image.new("RGB", (500, 300), (10, 10, 10))
    # the crop is 100 to 300 by 40 to 240: cells of 50 x 50; this is its cell (2, 1)
    image.paste((255, 255, 255), (150, 140, 200, 190))
    (record,) = predict([Request("a", image, (100, 40, 300, 240))], bright_session())
    assert (record["width"], record["height"]) == (500, 300)
    assert [(slot["cell"], slot["box"]) for slot in record["evidence"]] == [([2, 1], [150, 140, 200, 190])] * 2


def count_blanks(session: Session) -> list[tuple[int, int]]:
    """Return a list that gets the size of each forward pass, and how many of its images are blank."""
    seen: list[tuple[int, int]] = []
    wrap(session, lambda images: seen.append((len(images), sum(not image.any() for image in images))))
    return seen


def test_a_bad_image_keeps_its_place_as_a_blank_one(bright_session: Callable) -> None:
    session, bad = bright_session(), (1, 6)
    seen = count_blanks(session)
    records = predict([Request(str(n), b"nothing" if n in bad else shade(n + 1)) for n in range(10)], session, batch=4)
    assert [n for n, record in enumerate(records) if record["status"] == "error"] == list(bad)
    cells = [record["evidence"][0]["cell"] for record in records if "evidence" in record]
    assert cells == [list(divmod((n + 1) % 16, 4)) for n in range(10) if n not in bad]
    assert seen == [(4, 1), (4, 1), (2, 0)]


def test_a_batch_of_bad_files_only_never_reaches_the_session(bright_session: Callable) -> None:
    session = bright_session()
    records = predict((Request(str(number), b"nothing") for number in range(10)), session, batch=4)
    assert [record["error"]["code"] for record in records] == ["not_an_image"] * 10
    assert session.batches == []


def test_one_bad_file_leaves_the_63_others_records_byte_identical(
    exact_session: OnnxSession, make_pictures: Callable, tmp_path: Path
) -> None:
    paths = make_pictures(tmp_path, 64)
    clean = lines(predict(paths, exact_session, batch=64))
    paths[20].write_bytes(paths[20].read_bytes()[:300])
    found = lines(predict(paths, exact_session, batch=64))
    assert json.loads(found[20])["error"]["code"] == "truncated_image"
    assert found[:20] + found[21:] == clean[:20] + clean[21:]


# ---- batches of one size


@pytest.mark.parametrize("count", [1, 4, 7])
def test_a_fixed_batch_fills_every_forward_pass(bright_session: Callable, count: int) -> None:
    session = bright_session()
    seen = count_blanks(session)
    assert len(predict(shades(range(1, count + 1)), session, batch=4, fixed_batch=True)) == count
    assert [size for size, _ in seen] == [4] * ((count + 3) // 4)
    assert sum(blank for _, blank in seen) == -count % 4


def test_a_fixed_batch_leaves_a_batch_invariant_session_as_it_is(bright_session: Callable) -> None:
    session = bright_session()
    session.batch_invariant = True
    predict(shades(range(5)), session, batch=4, fixed_batch=True)
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
    path = resnet if runtime == "onnx" else resnet.with_suffix(".pt")
    sessions = open_sessions(path, device="cpu", threads=threads)
    paths = make_pictures(tmp_path, 64)
    bad = paths[20].with_name("bad.png")
    bad.write_bytes(paths[20].read_bytes()[:300])

    def run(listed: list[Path]) -> dict[str, str]:
        records = predict(listed, *sessions, batch=64, fixed_batch=True)
        return {str(record["image"]): json.dumps(record) for record in records}

    with_bad = run([*paths[:20], bad, *paths[21:]])
    assert json.loads(with_bad.pop("bad.png"))["error"]["code"] == "truncated_image"
    assert len(with_bad) == 63
    with_good = run(paths)
    del with_good[paths[20].name]
    assert with_bad == with_good
    # everything after it moves up, and the batch is one short
    assert with_bad == run(paths[:20] + paths[21:])


@pytest.mark.parametrize("threads", [1, 2])
def test_onnx_runtime_on_the_cpu_is_batch_invariant(
    resnet: Path, make_pictures: Callable, tmp_path: Path, threads: int
) -> None:
    session = OnnxSession(resnet, device="cpu", threads=threads)
    assert session.batch_invariant
    paths = make_pictures(tmp_path, 24)
    one, five, all_of_them = (lines(predict(paths, session, batch=batch)) for batch in (1, 5, 24))
    assert one == five == all_of_them


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
def test_out_of_memory_halves_the_batch_for_good_and_says_so(
    bright_session: Callable, error: Exception, fixed: bool
) -> None:
    session, messages = bright_session(), []
    sizes = limit_memory(session, 4, error)
    options = InferenceOptions(batch=16, fixed_batch=fixed)
    results = predict_stream(shades(range(38)), [session], options, print_message=messages.append)
    assert lines([r.record for r in results]) == lines(predict(shades(range(38)), bright_session(), batch=16))
    assert sizes == [16, 8, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4 if fixed else 2]
    assert messages == [
        "brightness on CPU: out of memory with a batch of 16; going on with 8",
        "brightness on CPU: out of memory with a batch of 8; going on with 4",
    ]


def test_memory_that_is_too_small_for_one_image_stops_the_run(bright_session: Callable) -> None:
    session = bright_session()
    sizes = limit_memory(session, 0, OutOfMemory("CUDA is full"))
    with pytest.raises(StoppedEarly, match=r"out of memory with a single image \(CUDA is full\); free memory there"):
        predict(shades(range(8)), session, batch=8)
    assert sizes == [8, 4, 2, 1]


def test_memory_that_fills_up_later_keeps_what_was_done(bright_session: Callable) -> None:
    session = bright_session()

    def shrink(images: ImageBatch) -> None:
        if len(session.batches) > 3 and len(images) > 2:
            raise OutOfMemory("full")

    wrap(session, shrink)
    assert predict(shades(range(40)), session, batch=4) == predict(shades(range(40)), bright_session(), batch=4)
    assert session.batches[-1] == 2


def test_only_the_session_that_is_short_of_memory_takes_smaller_batches(bright_session: Callable) -> None:
    small, large = bright_session(), bright_session()
    sizes = limit_memory(small, 2, OutOfMemory("full"))
    assert names(predict(shades(range(16)), small, large, batch=4)) == list(range(16))
    assert sizes == [4, 2, 2, 2, 2]
    assert large.batches == [4, 4]


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
