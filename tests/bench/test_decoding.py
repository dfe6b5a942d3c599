"""`bench decoding`: what a decode path changes of plain Pillow's pixels."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from opal_deploy.bench import decoding


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    path = tmp_path / "picture.png"
    values = np.random.default_rng(0).integers(0, 256, (60, 80, 3), dtype=np.uint8)
    Image.fromarray(values).save(path)
    return path


@pytest.mark.data
def test_our_path_gives_plain_pillows_pixels(photographs: list[Path]) -> None:
    (result,) = decoding.compare(photographs[::11], (224, 224))

    assert result.images == len(photographs[::11])
    assert (result.largest, result.mean) == (0, 0.0)


def test_a_path_that_differs_is_found(picture: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def brighter(path: Path, size: tuple[int, int]) -> decoding.Pixels:
        pixels = decoding._pillow(path, size).astype(np.int16)
        pixels[0, 0, 0] += 7 if pixels[0, 0, 0] < 200 else -7
        return pixels.astype(np.uint8)

    monkeypatch.setattr(decoding, "PATHS", {"brighter": brighter})

    (result,) = decoding.compare([picture], (10, 12))

    assert result.largest == 7
    assert result.mean == pytest.approx(7 / (10 * 12 * 3))


def test_a_picture_that_cannot_be_read_takes_no_part(picture: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.jpg"
    broken.write_bytes(b"not a picture")

    (result,) = decoding.compare([picture, broken], (8, 8))

    assert result.images == 1
