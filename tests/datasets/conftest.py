"""Small data sets in the layouts that adapters read."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

SHARED_DATA = Path(__file__).parents[3].parent / "shared" / "data"

Draw = Callable[..., Path]
WriteCub = Callable[..., Path]

_numbers = itertools.count()


def _draw(path: Path, size: tuple[int, int] = (16, 12), format: str | None = None) -> Path:
    """A picture whose bytes no other has."""
    number = next(_numbers)
    path.parent.mkdir(parents=True, exist_ok=True)
    colour = (number % 256, number // 256 % 256, 30)
    Image.new("RGB", size, colour).save(path, format, comment=f"picture {number}".encode())
    return path


@pytest.fixture(scope="session")
def draw() -> Draw:
    return _draw


@pytest.fixture
def write_cub() -> WriteCub:
    """Two classes with three training and one test picture each, in CUB's tables; any may be given."""

    def write(root: Path, lines: dict[str, list[str]] | None = None) -> Path:
        names = [f"{c}/{i}.png" for c in ("001.Auk", "002.Jay") for i in range(4)]
        for name in names:
            _draw(root / "images" / name)
        tables = {
            "images.txt": [f"{i} {name}" for i, name in enumerate(names, 1)],
            "image_class_labels.txt": [f"{i} {1 + (i > 4)}" for i in range(1, 9)],
            "train_test_split.txt": [f"{i} {int(i % 4 != 0)}" for i in range(1, 9)],
            "bounding_boxes.txt": [f"{i} 2.0 3.0 10.0 8.0" for i in range(1, 9)],
            "classes.txt": ["1 001.Auk", "2 002.Jay"],
        }
        for file, content in {**tables, **(lines or {})}.items():
            (root / file).write_text("\n".join(content) + "\n")
        return root

    return write


@pytest.fixture
def class_folders() -> Callable[..., Path]:
    """Folders of pictures, one a class."""

    def write(root: Path, names: str | list[str] = "ab", count: int = 5) -> Path:
        for name in names:
            for index in range(count):
                _draw(root / name / f"{index}.png")
        return root

    return write


def _shared(name: str) -> Path:
    folder = SHARED_DATA / name
    if not folder.is_dir():
        pytest.skip(f"no {folder}")
    return folder


@pytest.fixture(scope="session")
def pets_mini() -> Path:
    return _shared("pets_mini")


@pytest.fixture(scope="session")
def flowers102_annotations() -> Path:
    return _shared("flowers102_annotations")


@pytest.fixture(scope="session")
def cub100_227px() -> Path:
    return _shared("cub100_227px")
