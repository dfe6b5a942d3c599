"""Helpers of the tests of the decoder pool: photographs, and comparing what two pools made of them."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import numpy as np
from PIL import Image

from opal_deploy.inference.decoding.pool import DecoderPool
from opal_deploy.inference.decoding.slots import PreparedBatch
from opal_deploy.inference.timing import NO_OP_TIMER, StageTimer
from opal_deploy.inference.types import InferenceOptions, InputImage, Prepared

INPUT = (32, 48)


def photograph(path: Path, size: tuple[int, int] = (90, 70)) -> Path:
    coarse = np.random.default_rng(size[0]).integers(0, 255, (5, 6, 3), np.uint8)
    Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC).save(path, "JPEG", quality=95)
    return path


def open_decoders(
    options: InferenceOptions, input_size: tuple[int, int], timer: StageTimer = NO_OP_TIMER, *, rows: int = 1
) -> DecoderPool:
    return DecoderPool(options, input_size, timer, slots=160, rows=rows)


def submit(pool: DecoderPool, request: InputImage) -> Future[Prepared]:
    """Begin to prepare an image alone; the result holds its pixels."""
    single: Future[Prepared] = Future()

    def finish(done: Future[PreparedBatch]) -> None:
        if done.cancelled():
            single.cancel()
        elif (error := done.exception()) is not None:
            single.set_exception(error)
        else:
            single.set_result(with_pixels(done.result())[0])

    pool.submit([request]).add_done_callback(finish)
    return single


def with_pixels(batch: PreparedBatch) -> list[Prepared]:
    rows = [None if image.error else pixels.copy() for image, pixels in zip(batch.images, batch.pixels, strict=False)]
    batch.release()
    return [replace(image, pixels=pixels) for image, pixels in zip(batch.images, rows, strict=True)]


def prepare_all(pool: DecoderPool, sources: Sequence[object]) -> list[Prepared]:
    """Prepare images in one batch after the other, as large as the pool's slots."""
    requests = [one if isinstance(one, InputImage) else InputImage(str(one), one) for one in sources]  # type: ignore[arg-type]
    rows = pool._slots.pixels.shape[1]
    with pool:
        batches = [pool.submit(requests[start : start + rows]) for start in range(0, len(requests), rows)]
        return [image for batch in batches for image in with_pixels(batch.result(60))]


def code(prepared: Prepared) -> str | None:
    return None if prepared.error is None else prepared.error.code


def assert_alike(found: Sequence[Prepared], expected: Sequence[Prepared], counts: int = 0) -> None:
    """Compare everything that was prepared; pixels may differ by so many counts."""
    for one, other in zip(found, expected, strict=True):
        assert (one.input, one.geometry, one.image_sha256, repr(one.error)) == (
            other.input, other.geometry, other.image_sha256, repr(other.error),
        )  # fmt: skip
        assert (one.pixels is None, one.image is None) == (other.pixels is None, other.image is None)
        if one.pixels is not None and other.pixels is not None:
            assert np.abs(one.pixels.astype(int) - other.pixels).max() <= counts, one.input.name
        if one.image is not None and other.image is not None:
            assert one.image.mode == "RGB"
            assert np.array_equal(one.image, other.image), one.input.name  # type: ignore[arg-type]
