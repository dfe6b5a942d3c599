"""A data set in CUB's layout, small and generated: six classes, random images, fifteen parts each."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

PARTS = (
    "back", "beak", "belly", "breast", "crown", "forehead", "left eye", "left leg", "left wing", "nape", "right eye",
    "right leg", "right wing", "tail", "throat",
)  # fmt: skip
CLASSES = [f"{number:03}.Bird" for number in range(1, 7)]
# images of a class, the last two of which are for testing
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
