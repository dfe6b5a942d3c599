"""The decoder pool with GPUs: the images that they decode, those left to the CPU, and the cost of a GPU that fails.

The codec is the real one, on the CPU; where it has to fail, it is made to.
"""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from opal_deploy.errors import ImageError
from opal_deploy.inference.decoding.gpu import GpuDecoderPool
from opal_deploy.inference.decoding.pool import CpuDecoderPool
from opal_deploy.inference.timing import StageTimer
from opal_deploy.inference.types import InferenceOptions, Prepared, Request
from opal_deploy.preprocess.gpu import GpuDecoder
from opal_deploy.preprocess.jpeg_header import Jpeg

pytest.importorskip("nvidia.nvimgcodec")
INPUT = (32, 48)


class CountingDecoder(GpuDecoder):
    """Counts what it is given, and fails where a test says so."""

    def __init__(self) -> None:
        self.ready = False
        self.batches: list[int] = []
        self.error: Exception | None = None
        self.most: int | None = None
        self.refuse: set[int] = set()
        self.fail_on: set[int] = set()
        self.decoded: set[int] = set()
        self.dead = False
        self.gate = threading.Event()
        self.gate.set()
        super().__init__("cpu")
        self.ready = True

    def decode(self, files: Sequence[Jpeg]) -> list[torch.Tensor | None]:
        widths = {file.stored[0] for file in files}
        if self.ready and not widths & {64}:  # not its own test image
            self.gate.wait()
            self.batches.append(len(files))
            if self.error is not None and (self.most is None or len(files) > self.most):
                raise self.error
            if widths & self.fail_on:
                raise RuntimeError("Provided interpolation parameters can not be handled")
        elif self.ready and self.error is not None and self.most is None:
            raise self.error
        if self.dead:
            return [None] * len(files)
        found = super().decode(files)
        self.decoded |= widths
        return [None if file.stored[0] in self.refuse else one for file, one in zip(files, found, strict=True)]


@pytest.fixture
def gpu() -> CountingDecoder:
    return CountingDecoder()


def photograph(path: Path, width: int = 90) -> Path:
    coarse = np.random.default_rng(width).integers(0, 255, (5, 6, 3), np.uint8)
    Image.fromarray(coarse).resize((width, 70), Image.Resampling.BICUBIC).save(path, "JPEG", quality=95)
    return path


@pytest.fixture
def jpegs(tmp_path: Path) -> list[Path]:
    return [photograph(tmp_path / f"{index}.jpg", 90 + index) for index in range(12)]


@pytest.fixture
def messages() -> list[str]:
    return []


def on_gpu(*gpus: GpuDecoder, messages: list[str] | None = None, **options: object) -> GpuDecoderPool:
    report = print if messages is None else messages.append
    settings = InferenceOptions(**{"workers": 2, "gpus": gpus, **options})  # type: ignore[arg-type]
    return GpuDecoderPool(settings, INPUT, print_message=report)


def on_cpu(**options: object) -> CpuDecoderPool:
    return CpuDecoderPool(InferenceOptions(**{"workers": 2, **options}), INPUT)  # type: ignore[arg-type]


def prepare_all(decoders: GpuDecoderPool | CpuDecoderPool, sources: Sequence[object]) -> list[Prepared]:
    requests = [one if isinstance(one, Request) else Request(str(one), one) for one in sources]  # type: ignore[arg-type]
    with decoders:
        futures = [decoders.submit(request) for request in requests]
        return [future.result(60) for future in futures]


def assert_alike(found: Sequence[Prepared], expected: Sequence[Prepared], counts: int = 1) -> None:
    for one, other in zip(found, expected, strict=True):
        assert (one.request, one.geometry, one.file_sha256, repr(one.error)) == (
            other.request, other.geometry, other.file_sha256, repr(other.error),
        )  # fmt: skip
        assert (one.pixels is None, one.image is None) == (other.pixels is None, other.image is None)
        if one.pixels is not None and other.pixels is not None:
            assert np.abs(one.pixels.astype(int) - other.pixels).max() <= counts
        if one.image is not None and other.image is not None:
            assert one.image.mode == "RGB"
            np.testing.assert_array_equal(np.asarray(one.image), np.asarray(other.image))


def wait_until(condition: Callable[[], bool]) -> None:
    limit = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.01)


def submit_held(decoders: GpuDecoderPool, gpu: CountingDecoder, paths: Sequence[Path]) -> list[Future[Prepared]]:
    """Submit files while the GPU is held, and let it go on once all are queued or in its hands."""
    gpu.gate.clear()
    futures = [decoders.submit(Request(str(path), path)) for path in paths]
    wait_until(lambda: decoders._queue._bytes == sum(path.stat().st_size for path in paths))
    gpu.gate.set()
    return futures


# ---- images


def test_jpegs_go_to_the_gpu_and_the_rest_to_the_cpu(gpu: CountingDecoder, jpegs: list[Path], tmp_path: Path) -> None:
    bad = [tmp_path / f"{name}.jpg" for name in ("cut", "text", "empty", "folder", "nothing")]
    bad[0].write_bytes(jpegs[0].read_bytes()[:-50])
    bad[1].write_text("not an image")
    bad[2].touch()
    bad[3].mkdir()
    Image.open(jpegs[0]).save(tmp_path / "image.png")
    sources = [*jpegs, jpegs[1].read_bytes(), tmp_path / "image.png", np.zeros((9, 9, 3), np.uint8), *bad]
    found = prepare_all(on_gpu(gpu), sources)
    assert_alike(found, prepare_all(on_cpu(), sources))
    assert sum(gpu.batches) == len(jpegs) + 1
    codes = [entry.error.code for entry in found if entry.error is not None]
    assert codes == ["truncated_image", "not_an_image", "empty_file", "not_a_file", "not_found"]


@pytest.mark.data
def test_every_odd_image_has_the_verdict_that_it_has_on_the_cpu(gpu: CountingDecoder, odd_images: Path) -> None:
    sources = sorted(path for path in odd_images.rglob("*") if path.is_file())
    assert len(sources) > 100
    assert_alike(prepare_all(on_gpu(gpu), sources), prepare_all(on_cpu(), sources))
    assert sum(gpu.batches) > 10


@pytest.mark.parametrize("options", [{"keep_images": True}, {"isolate": True}], ids=["kept", "isolated"])
def test_boxes_and_kept_images(gpu: CountingDecoder, jpegs: list[Path], tmp_path: Path, options: dict) -> None:
    Image.open(jpegs[0]).save(tmp_path / "image.png")
    requests = [
        Request("crop", jpegs[0], (5.0, 6.0, 50.0, 60.0)),
        Request("outside", jpegs[0], (500.0, 6.0, 550.0, 60.0)),
        Request("wrong", jpegs[0], error=ImageError("bad_box", "there is none")),
        Request("whole", jpegs[0]),
        Request("png", tmp_path / "image.png"),
    ]
    assert_alike(prepare_all(on_gpu(gpu, **options), requests), prepare_all(on_cpu(**options), requests))


# ---- GPUs that fail


def test_files_that_the_codec_refuses_are_decoded_on_the_cpu(gpu: CountingDecoder, jpegs: list[Path]) -> None:
    gpu.refuse = {93, 95}
    found, expected = prepare_all(on_gpu(gpu), jpegs), prepare_all(on_cpu(), jpegs)
    assert_alike(found, expected)
    # those two are the CPU's own, bit for bit
    for index in (3, 5):
        np.testing.assert_array_equal(found[index].pixels, expected[index].pixels)


def fail(gpu: CountingDecoder) -> None:
    gpu.error = RuntimeError("CUDA error: an illegal memory access was encountered\nmore")


def decode_nothing(gpu: CountingDecoder) -> None:
    gpu.dead = True


@pytest.mark.parametrize(
    ("break_gpu", "message"),
    [
        (fail, "decoding on cpu failed (CUDA error: an illegal memory access was encountered); "
               "images are decoded on the CPU from here on"),
        (decode_nothing, "nvImageCodec decodes nothing there"),
    ],
)  # fmt: skip
def test_a_gpu_that_fails_costs_no_image_and_is_reported_once(
    gpu: CountingDecoder, jpegs: list[Path], messages: list[str], break_gpu: Callable, message: str
) -> None:
    break_gpu(gpu)
    assert_alike(prepare_all(on_gpu(gpu, messages=messages), jpegs * 5), prepare_all(on_cpu(), jpegs * 5), counts=0)
    (line,) = messages
    assert message in line


def test_a_callback_that_fails_costs_no_image(gpu: CountingDecoder, jpegs: list[Path]) -> None:
    def report(_: str) -> None:
        raise OSError(28, "No space left on device")

    gpu.error = RuntimeError("gone")
    decoders = GpuDecoderPool(InferenceOptions(workers=2, gpus=(gpu,)), INPUT, print_message=report)
    assert [entry.error for entry in prepare_all(decoders, jpegs * 3)] == [None] * 36


def test_an_image_on_which_the_gpu_fails_goes_alone_to_the_cpu(
    gpu: CountingDecoder, jpegs: list[Path], messages: list[str]
) -> None:
    gpu.fail_on = {94}
    with on_gpu(gpu, messages=messages) as decoders:
        found = [future.result(60) for future in submit_held(decoders, gpu, jpegs)]
        # and it goes on afterwards
        before = sum(gpu.batches)
        assert decoders.submit(Request(None, jpegs[0])).result(60).error is None
        assert sum(gpu.batches) == before + 1
    assert gpu.decoded >= {*range(90, 102)} - {94}
    assert 94 not in gpu.decoded
    assert_alike(found, prepare_all(on_cpu(), jpegs))
    assert messages == []


def test_two_gpus_share_the_work_and_one_that_fails_leaves_it_to_the_other(
    jpegs: list[Path], messages: list[str]
) -> None:
    first, second = CountingDecoder(), CountingDecoder()
    assert_alike(prepare_all(on_gpu(first, second), jpegs * 10), prepare_all(on_cpu(), jpegs * 10))
    assert sum(first.batches) + sum(second.batches) == 120
    second.batches.clear()
    first.error = RuntimeError("gone")
    found = prepare_all(on_gpu(first, second, messages=messages), jpegs * 20)
    assert [entry.error for entry in found] == [None] * 240
    assert all(line == "decoding on cpu failed (gone); the other GPUs go on" for line in messages)
    # all but what the bad one had when it failed
    assert sum(second.batches) >= 240 - 64


def test_too_little_memory_means_fewer_at_a_time(gpu: CountingDecoder, jpegs: list[Path], messages: list[str]) -> None:
    gpu.error, gpu.most = torch.OutOfMemoryError("CUDA out of memory"), 4
    with on_gpu(gpu, messages=messages) as decoders:
        found = [future.result(60) for future in submit_held(decoders, gpu, jpegs * 3)]
        gpu.batches.clear()
        assert [future.result(60).error for future in submit_held(decoders, gpu, jpegs)] == [None] * 12
        # the limit stays
        assert max(gpu.batches) <= 4
    assert_alike(found, prepare_all(on_cpu(), jpegs * 3))
    assert messages == []


# ---- the queue


def test_files_that_wait_are_decoded_together(gpu: CountingDecoder, jpegs: list[Path]) -> None:
    with on_gpu(gpu) as decoders:
        assert [future.result(60).error for future in submit_held(decoders, gpu, jpegs)] == [None] * 12
    assert sum(gpu.batches) == len(jpegs)
    assert len(gpu.batches) <= 3


def test_the_queue_is_bounded_by_bytes(gpu: CountingDecoder, jpegs: list[Path]) -> None:
    gpu.gate.clear()
    size = max(path.stat().st_size for path in jpegs)
    decoders = on_gpu(gpu, workers=1)
    decoders._queue._max_bytes = 3 * size
    futures = [decoders.submit(Request(None, path)) for path in jpegs * 4]
    time.sleep(0.3)
    assert 0 < decoders._queue._bytes <= 3 * size
    gpu.gate.set()
    assert all(future.result(60).error is None for future in futures)
    decoders.close()
    assert decoders._queue._bytes == 0


def test_an_idle_pool_keeps_no_image(gpu: CountingDecoder, jpegs: list[Path]) -> None:
    with on_gpu(gpu) as decoders:
        kept = []
        for path in jpegs[:4]:
            future = decoders.submit(Request(None, path))
            future.result(60)
            kept.append(weakref.ref(future))
            del future
        wait_until(lambda: gc.collect() >= 0 and all(ref() is None for ref in kept))


def test_cancelled_files_are_not_decoded_and_closing_ends_every_future(gpu: CountingDecoder, jpegs: list[Path]) -> None:
    gpu.gate.clear()
    decoders = on_gpu(gpu, workers=1)
    futures = [decoders.submit(Request(None, path)) for path in jpegs * 20]
    assert futures[-1].cancel()
    closing = threading.Thread(target=decoders.close)
    closing.start()
    time.sleep(0.1)
    gpu.gate.set()
    closing.join(60)
    assert not closing.is_alive()
    assert all(future.cancelled() or future.result(0).error is None for future in futures)


def test_the_stages_of_a_gpu_are_the_decoders_stages(gpu: CountingDecoder, jpegs: list[Path]) -> None:
    timer = StageTimer()
    prepare_all(GpuDecoderPool(InferenceOptions(workers=2, gpus=(gpu,)), INPUT, timer), jpegs)
    stages = {row.stage: row.calls for row in timer.read().select_role("decoders")}
    assert stages["resize"] == len(gpu.batches)
    assert stages["decode"] == len(gpu.batches) + len(jpegs)


def test_a_bug_is_raised_by_the_future(
    gpu: CountingDecoder, jpegs: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise KeyError("ours")

    monkeypatch.setattr("opal_deploy.inference.decoding.gpu.read_header", fail)
    with on_gpu(gpu) as decoders, pytest.raises(KeyError, match="ours"):
        decoders.submit(Request(None, jpegs[0])).result(60)
