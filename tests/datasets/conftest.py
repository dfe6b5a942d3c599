"""Small data sets in the layouts that adapters read."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

SHARED_DATA = Path(__file__).parents[2].parent / "shared" / "data"

Draw = Callable[..., Path]
WriteCub = Callable[..., Path]

_numbers = itertools.count()


def _draw(path: Path, size: tuple[int, int] = (16, 12), format: str | None = None) -> Path:
    """A image whose bytes no other has."""
    number = next(_numbers)
    path.parent.mkdir(parents=True, exist_ok=True)
    colour = (number % 256, number // 256 % 256, 30)
    Image.new("RGB", size, colour).save(path, format, comment=f"image {number}".encode())
    return path


@pytest.fixture(scope="session")
def draw() -> Draw:
    return _draw


@pytest.fixture
def write_cub() -> WriteCub:
    """Two classes with three training and one test image each, in CUB's tables; any may be given."""

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
    """Folders of images, one a class."""

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


PARTS = (
    "back", "beak", "belly", "breast", "crown", "forehead", "left eye", "left leg", "left wing", "nape", "right eye",
    "right leg", "right wing", "tail", "throat",
)  # fmt: skip
CLASSES = [f"{number:03}.Bird" for number in range(1, 7)]
PICTURES = 7


@pytest.fixture(scope="session")
def birds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("birds")
    rng = np.random.default_rng(0)
    tables: dict[str, list[str]] = {name: [] for name in ("images", "labels", "split", "boxes", "locations")}
    for label, name in enumerate(CLASSES, start=1):
        (root / "images" / name).mkdir(parents=True)
        for number in range(PICTURES):
            key = len(tables["images"]) + 1
            pixels = rng.integers(0, 256, (6, 8, 3), dtype=np.uint8).repeat(10, axis=0).repeat(10, axis=1)
            Image.fromarray(pixels).save(root / "images" / name / f"{number}.png")
            tables["images"].append(f"{key} {name}/{number}.png")
            tables["labels"].append(f"{key} {label}")
            tables["split"].append(f"{key} {int(number < PICTURES - 2)}")
            tables["boxes"].append(f"{key} 5.0 10.0 60.0 45.0")
            for part in range(1, len(PARTS) + 1):
                x, y, visible = rng.integers(5, 65), rng.integers(10, 55), rng.integers(0, 4) > 0
                where = f"{x}.0 {y}.0 1" if visible else "0.0 0.0 0"
                tables["locations"].append(f"{key} {part} {where}")
    (root / "parts").mkdir()
    files = {
        "images.txt": tables["images"],
        "image_class_labels.txt": tables["labels"],
        "train_test_split.txt": tables["split"],
        "bounding_boxes.txt": tables["boxes"],
        "classes.txt": [f"{label} {name}" for label, name in enumerate(CLASSES, start=1)],
        "parts/parts.txt": [f"{part} {name}" for part, name in enumerate(PARTS, start=1)],
        "parts/part_locs.txt": tables["locations"],
    }
    for name, lines in files.items():
        (root / name).write_text("\n".join(lines) + "\n")
    return root


@pytest.fixture(scope="session")
def cub_metadata_full() -> Path:
    return _shared("cub_metadata_full")
