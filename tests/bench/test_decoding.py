"""`bench decoding`: the pixels of our decode paths against plain Pillow."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from opal_deploy.bench import decoding


@pytest.fixture
def image_file(tmp_path: Path) -> Path:
    path = tmp_path / "image.png"
    values = np.random.default_rng(0).integers(0, 256, (60, 80, 3), dtype=np.uint8)
    Image.fromarray(values).save(path)
    return path


@pytest.mark.data
def test_our_paths_differ_from_plain_pillow_as_documented(photographs: list[Path]) -> None:
    results = {result.name: result for result in decoding.compare_paths(photographs[::11], (160, 160))}
    assert {result.images for result in results.values()} == {len(photographs[::11])}
    assert (results["exact"].largest, results["exact"].mean, results["exact"].share_equal) == (0, 0.0, 1.0)
    assert results["default"].largest == 1
    assert 0 < results["default"].mean < 0.3
    assert results["fast"].largest > 1


def test_a_path_that_differs_is_found(image_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def brighter(file: Path, size: tuple[int, int]) -> decoding.Pixels:
        pixels = decoding._decode_with_pillow(file, size).astype(np.int16)
        pixels[0, 0, 0] += 7 if pixels[0, 0, 0] < 200 else -7
        return pixels.astype(np.uint8)

    monkeypatch.setattr(decoding, "DECODE_PATHS", {"brighter": brighter})
    (result,) = decoding.compare_paths([image_file], (10, 12))
    assert result.largest == 7
    assert result.mean == pytest.approx(7 / (10 * 12 * 3))
    assert result.share_equal == pytest.approx(1 - 1 / (10 * 12 * 3))


def test_an_unreadable_image_is_left_out(image_file: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.jpg"
    broken.write_bytes(b"not an image")
    done: list[tuple[int, int]] = []
    results = decoding.compare_paths([image_file, broken], (8, 8), lambda *counts: done.append(counts))
    assert [result.images for result in results] == [1, 1, 1]
    assert done == [(count, 6) for count in range(1, 7)]
