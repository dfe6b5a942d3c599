"""Helpers of the tests of the decoder pool: photographs, and comparing what two pools made of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from opal_deploy.inference.decoding.pool import CpuDecoderPool
from opal_deploy.inference.types import Prepared, Request

INPUT = (32, 48)


def photograph(path: Path, size: tuple[int, int] = (90, 70)) -> Path:
    coarse = np.random.default_rng(size[0]).integers(0, 255, (5, 6, 3), np.uint8)
    Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC).save(path, "JPEG", quality=95)
    return path


def prepare_all(pool: CpuDecoderPool, sources: Sequence[object]) -> list[Prepared]:
    requests = [one if isinstance(one, Request) else Request(str(one), one) for one in sources]  # type: ignore[arg-type]
    with pool:
        return [future.result(60) for future in [pool.submit(request) for request in requests]]


def code(prepared: Prepared) -> str | None:
    return None if prepared.error is None else prepared.error.code


def assert_alike(found: Sequence[Prepared], expected: Sequence[Prepared], counts: int = 0) -> None:
    """Compare everything that was prepared; pixels may differ by so many counts."""
    for one, other in zip(found, expected, strict=True):
        assert (one.request, one.geometry, one.file_sha256, repr(one.error)) == (
            other.request, other.geometry, other.file_sha256, repr(other.error),
        )  # fmt: skip
        assert (one.pixels is None, one.image is None) == (other.pixels is None, other.image is None)
        if one.pixels is not None and other.pixels is not None:
            assert np.abs(one.pixels.astype(int) - other.pixels).max() <= counts, one.request.name
        if one.image is not None and other.image is not None:
            assert one.image.mode == "RGB"
            assert np.array_equal(one.image, other.image), one.request.name  # type: ignore[arg-type]
