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
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from opal_deploy.errors import ImageError
from opal_deploy.inference.decoding.gpu import GpuDecoderPool
from opal_deploy.inference.decoding.pool import CpuDecoderPool
from opal_deploy.inference.timing import NO_OP_TIMER, StageTimer
from opal_deploy.inference.types import InferenceOptions, Prepared, Request
from opal_deploy.preprocess.gpu import GpuDecoder
from opal_deploy.preprocess.jpeg_header import Jpeg
from tests.inference.bright import wait_until
from tests.inference.decoding.prepared import INPUT, assert_alike, code, photograph, prepare_all

pytest.importorskip("nvidia.nvimgcodec")


class CountingDecoder(GpuDecoder):
    """Counts what it is given, and fails where a test says so; images are told apart by their widths."""

    def __init__(self) -> None:
        self.ready = self.dead = False
        self.batches: list[int] = []
        self.error: Exception | None = None
        self.most: int | None = None
        self.refuse: set[int] = set()
        self.fail_on: set[int] = set()
        self.decoded: set[int] = set()
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


@pytest.fixture
def jpegs(tmp_path: Path) -> list[Path]:
    return [photograph(tmp_path / f"{index}.jpg", (90 + index, 70)) for index in range(12)]


def on_gpu(
    *gpus: GpuDecoder, print_message: Callable[[str], None] = print, timer: StageTimer = NO_OP_TIMER, **options: Any
) -> GpuDecoderPool:
    settings = InferenceOptions(**{"workers": 2, "gpus": gpus, **options})
    return GpuDecoderPool(settings, INPUT, timer, print_message=print_message)


def on_cpu(sources: Sequence[object], **options: Any) -> list[Prepared]:
    return prepare_all(CpuDecoderPool(InferenceOptions(**{"workers": 2, **options}), INPUT), sources)


def submit_held(decoders: GpuDecoderPool, gpu: CountingDecoder, paths: Sequence[Path]) -> list[Future[Prepared]]:
    """Submit files while the GPU is held, and let it go on once all are queued or in its hands."""
    gpu.gate.clear()
    futures = [decoders.submit(Request(str(path), path)) for path in paths]
    wait_until(lambda: decoders._queue._bytes == sum(path.stat().st_size for path in paths))
    gpu.gate.set()
    return futures


# ---- images


@pytest.mark.parametrize("options", [{}, {"keep_images": True}, {"isolate": True}], ids=["plain", "kept", "isolated"])
def test_jpegs_go_to_the_gpu_and_the_rest_to_the_cpu(
    gpu: CountingDecoder, jpegs: list[Path], tmp_path: Path, options: dict[str, Any]
) -> None:
    bad = [tmp_path / f"{name}.jpg" for name in ("cut", "text", "empty", "folder", "nothing")]
    bad[0].write_bytes(jpegs[0].read_bytes()[:-50])
    bad[1].write_text("not an image")
    bad[2].touch()
    bad[3].mkdir()
    Image.open(jpegs[0]).save(tmp_path / "image.png")
    crop = Request("crop", jpegs[0], (5.0, 6.0, 50.0, 60.0))
    outside = Request("outside", jpegs[0], (500.0, 6.0, 550.0, 60.0))
    wrong = Request("wrong", jpegs[0], error=ImageError("no_box", "there is none"))
    rest = [tmp_path / "image.png", np.zeros((9, 9, 3), np.uint8), outside, wrong, *bad]
    sources = [*jpegs, jpegs[1].read_bytes(), crop, *rest]
    found = prepare_all(on_gpu(gpu, **options), sources)
    assert_alike(found, on_cpu(sources, **options), counts=1)
    assert sum(gpu.batches) == len(jpegs) + 2
    codes = [None, None, "bad_box", "no_box", "truncated_image", "not_an_image", "empty_file", "not_a_file"]
    assert [code(entry) for entry in found[14:]] == [*codes, "not_found"]


@pytest.mark.data
def test_every_odd_image_has_the_verdict_that_it_has_on_the_cpu(gpu: CountingDecoder, odd_images: Path) -> None:
    sources = sorted(path for path in odd_images.rglob("*") if path.is_file())
    assert len(sources) > 100
    assert_alike(prepare_all(on_gpu(gpu), sources), on_cpu(sources), counts=1)
    assert sum(gpu.batches) > 10


# ---- GPUs that fail


def report_to_a_full_disk(_: str) -> None:
    raise OSError(28, "No space left on device")


def test_a_gpu_that_fails_costs_no_image_and_is_reported_once(jpegs: list[Path]) -> None:
    expected = on_cpu(jpegs * 5)
    for changes, message in (
        ({"error": RuntimeError("CUDA error: an illegal memory access was encountered\nmore")},
         "decoding on cpu failed (CUDA error: an illegal memory access was encountered); "
         "images are decoded on the CPU from here on"),
        ({"dead": True}, "nvImageCodec decodes nothing there"),
    ):  # fmt: skip
        gpu, messages = CountingDecoder(), []
        vars(gpu).update(changes)
        assert_alike(prepare_all(on_gpu(gpu, print_message=messages.append), jpegs * 5), expected)
        (line,) = messages
        assert message in line
    assert_alike(prepare_all(on_gpu(gpu, print_message=report_to_a_full_disk), jpegs * 5), expected)


def test_images_that_the_codec_refuses_or_on_which_the_gpu_fails_go_alone_to_the_cpu(
    gpu: CountingDecoder, jpegs: list[Path]
) -> None:
    gpu.refuse, gpu.fail_on = {93, 95}, {94}
    messages: list[str] = []
    with on_gpu(gpu, print_message=messages.append) as decoders:
        found = [future.result(60) for future in submit_held(decoders, gpu, jpegs)]
        # and it goes on afterwards
        before = sum(gpu.batches)
        assert decoders.submit(Request(None, jpegs[0])).result(60).error is None
        assert sum(gpu.batches) == before + 1
    assert gpu.decoded - {64} == {*range(90, 102)} - {94}
    expected = on_cpu(jpegs)
    assert_alike(found, expected, counts=1)
    # those three are the CPU's own, bit for bit
    assert_alike(found[3:6], expected[3:6])
    assert messages == []


def test_two_gpus_share_the_work_and_one_that_fails_leaves_it_to_the_other(jpegs: list[Path]) -> None:
    first, second = CountingDecoder(), CountingDecoder()
    messages: list[str] = []
    assert_alike(prepare_all(on_gpu(first, second), jpegs * 10), on_cpu(jpegs * 10), counts=1)
    assert sum(first.batches) + sum(second.batches) == 120
    second.batches.clear()
    first.error = RuntimeError("gone")
    found = prepare_all(on_gpu(first, second, print_message=messages.append), jpegs * 20)
    assert [entry.error for entry in found] == [None] * 240
    assert all(line == "decoding on cpu failed (gone); the other GPUs go on" for line in messages)
    # all but what the bad one had when it failed
    assert sum(second.batches) >= 240 - 64


def test_too_little_memory_means_fewer_at_a_time(gpu: CountingDecoder, jpegs: list[Path]) -> None:
    gpu.error, gpu.most = torch.OutOfMemoryError("CUDA out of memory"), 4
    messages: list[str] = []
    with on_gpu(gpu, print_message=messages.append) as decoders:
        found = [future.result(60) for future in submit_held(decoders, gpu, jpegs * 3)]
        gpu.batches.clear()
        assert [future.result(60).error for future in submit_held(decoders, gpu, jpegs)] == [None] * 12
        # the limit stays
        assert max(gpu.batches) <= 4
    assert_alike(found, on_cpu(jpegs * 3), counts=1)
    assert messages == []


# ---- the queue


def test_files_that_wait_are_decoded_together_and_the_stages_are_the_decoders(
    gpu: CountingDecoder, jpegs: list[Path]
) -> None:
    timer = StageTimer()
    with on_gpu(gpu, timer=timer) as decoders:
        assert [future.result(60).error for future in submit_held(decoders, gpu, jpegs)] == [None] * 12
    assert sum(gpu.batches) == len(jpegs)
    assert len(gpu.batches) <= 3
    stages = {row.stage: row.calls for row in timer.read().select_role("decoders")}
    assert (stages["resize"], stages["decode"]) == (len(gpu.batches), len(gpu.batches) + len(jpegs))


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


def test_a_bug_is_raised_by_the_future(
    gpu: CountingDecoder, jpegs: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("opal_deploy.inference.decoding.gpu.read_header", lambda *_: {}["ours"])
    with on_gpu(gpu) as decoders, pytest.raises(KeyError, match="ours"):
        decoders.submit(Request(None, jpegs[0])).result(60)
