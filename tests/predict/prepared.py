"""Helpers of the tests of the decoder pool: photographs, and comparing what two pools made of them."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
from PIL import Image

from opal_deploy.predict.decoder_pool import DecoderPool
from opal_deploy.sources.image import InputImage
from opal_deploy.timing import NO_OP_TIMER

INPUT = (32, 48)


def photograph(path, size=(90, 70)):
    coarse = np.random.default_rng(size[0]).integers(0, 255, (5, 6, 3), np.uint8)
    Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC).save(path, "JPEG", quality=95)
    return path


def open_decoders(options, input_size, timer=NO_OP_TIMER, *, rows=1):
    return DecoderPool(options, input_size, timer, slots=160, rows=rows)


def submit(pool, image):
    """Begin to prepare an image alone; its result, to be taken once, holds the pixels."""
    batch = pool.submit([image])
    return SimpleNamespace(result=lambda timeout: with_pixels(batch.result(timeout))[0], cancelled=batch.cancelled)


def with_pixels(batch):
    rows = [None if image.error else pixels.copy() for image, pixels in zip(batch.images, batch.pixels, strict=False)]
    batch.release()
    return [replace(image, pixels=pixels) for image, pixels in zip(batch.images, rows, strict=True)]


def prepare_all(pool, sources):
    """Prepare images in one batch after the other, as large as the pool's slots."""
    requests = [one if isinstance(one, InputImage) else InputImage(str(one), one) for one in sources]
    rows = pool._slots.pixels.shape[1]
    with pool:
        batches = [pool.submit(requests[start : start + rows]) for start in range(0, len(requests), rows)]
        return [image for batch in batches for image in with_pixels(batch.result(60))]


def code(prepared):
    return None if prepared.error is None else prepared.error.code


def assert_alike(found, expected, counts=0):
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
            assert np.array_equal(one.image, other.image), one.input.name
