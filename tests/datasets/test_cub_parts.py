"""CUB's part tables: which row belongs to which image, and where a part comes to lie on the cropped input."""

from __future__ import annotations

import errno
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from opal_deploy.datasets import cub, registry
from opal_deploy.datasets.cub import PartLocations
from opal_deploy.errors import UsageError


def _one(point: tuple[float, float], box: tuple[float, float, float, float]) -> PartLocations:
    return PartLocations(("beak",), np.array([[point]]), np.array([[True]]), np.array([box]))


@pytest.mark.parametrize(
    ("point", "box", "expected"),
    [
        ((30.0, 20.0), (10.0, 10.0, 40.0, 20.0), (112, 112)),  # the middle
        ((10.0, 30.0), (10.0, 10.0, 40.0, 20.0), (0, 224)),  # a corner
        ((31.9, 20.9), (10.7, 10.7, 40.7, 20.7), (117, 112)),  # part and box lose their fractions first: 117.6
        ((9.0, 12.0), (10.0, 10.0, 300.0, 300.0), (0, 1)),  # -0.7 and 1.5, toward zero
        ((8.0, 10.0), (10.0, 10.0, 300.0, 300.0), (-1, 0)),  # -1.5, toward zero and not down
    ],
)
def test_truncated_coordinates(
    point: tuple[float, float], box: tuple[float, float, float, float], expected: tuple[int, int]
) -> None:
    assert tuple(_one(point, box).truncated_input_points(224)[0, 0]) == expected
    bx, by, bw, bh = map(int, box)  # the protocol's own words
    assert expected == (int(224 * ((int(point[0]) - bx) / bw)), int(224 * ((int(point[1]) - by) / bh)))


def test_exact_coordinates_keep_their_fractions() -> None:
    parts = _one((31.5, 20.0), (10.5, 10.0, 42.0, 40.0))
    assert parts.input_points(224)[0, 0].tolist() == [112.0, 56.0]


def test_rows_are_those_of_the_images_asked_for(birds: Path) -> None:
    data = registry.read_dataset(birds)
    chosen = [data.test[7], data.test[2]]

    found = cub.read_parts(birds, chosen)

    lines = (birds / "parts" / "part_locs.txt").read_text().splitlines()
    keys = [line.split()[0] for line in (birds / "images.txt").read_text().splitlines()
            if any(sample.path.as_posix().endswith(line.split()[1]) for sample in chosen)][::-1]  # fmt: skip
    expected = [[line.split()[2:] for line in lines if line.split()[0] == key] for key in keys]
    assert found.points.tolist() == [[[float(x), float(y)] for x, y, _ in rows] for rows in expected]
    assert found.visible.tolist() == [[visible == "1" for *_, visible in rows] for rows in expected]
    assert found.boxes.tolist() == [[5.0, 10.0, 60.0, 45.0]] * 2
    assert found.names[6] == "left eye"


def test_only_cubs_layout_with_its_part_table_has_parts(birds: Path, tmp_path: Path) -> None:
    data = registry.read_dataset(birds)
    assert cub.has_parts(data)
    assert not cub.has_parts(replace(data, layout="imagefolder"))
    assert not cub.has_parts(replace(data, root=tmp_path))


@pytest.mark.parametrize(
    ("table", "old", "new", "message"),
    [
        ("parts/part_locs.txt", "\n7 15 ", "\n7 16 ", r"lacks lines of 1 image id: 7; mend it, or"),
        ("parts/part_locs.txt", "7 15 ", "7 x ", r"part_locs.txt: not CUB's table of numbers .*; mend it, or"),
        ("parts/part_locs.txt", "\n", " 1\n", r"6 columns found, CUB's table has 5; mend it"),
        ("parts/part_locs.txt", "0.0 0.0 0", "0.0 inf 0", r"'\d+ \d+ 0.0 inf 0' is not all finite numbers"),
        ("parts/part_locs.txt", None, "", r"part_locs.txt: the table is empty"),
        ("parts/part_locs.txt", None, "1\n", r"part_locs.txt: 1 column found, CUB's table has 5"),
        ("parts/parts.txt", None, "\n", r"parts.txt: it names no part"),
        ("parts/parts.txt", "7 left eye", "¹ left eye", r"'¹ left eye' is not CUB's format"),
        ("parts/parts.txt", "7 left eye", "left eye", r"'left eye' is not CUB's format, a numeric id and a name"),
        ("bounding_boxes.txt", "7 5.0 10.0 60.0", "7 5.0 10.0 0.5", r"less than a pixel for image ids 7"),
        ("images.txt", "7 001.Bird/6.png", "7 001.Bird/9.png", r"images.txt does not have 001.Bird/6.png"),
    ],
)
def test_a_bad_table_is_refused_in_one_line(
    birds: Path, tmp_path: Path, table: str, old: str | None, new: str, message: str
) -> None:
    samples = registry.read_dataset(birds).test
    for name in (*(path.name for path in birds.glob("*.txt")), "parts"):
        copy = shutil.copytree if name == "parts" else shutil.copy
        copy(birds / name, tmp_path / name)
    text = (tmp_path / table).read_text()
    (tmp_path / table).write_text(new if old is None else text.replace(old, new))
    moved = [replace(sample, path=tmp_path / sample.path.relative_to(birds)) for sample in samples]

    with pytest.raises(UsageError, match=message) as caught:
        cub.read_parts(tmp_path, moved)
    assert "\n" not in str(caught.value)
    assert str(caught.value).endswith("; mend it, or leave the parts out with --no-parts")


@pytest.mark.parametrize("change", ["tabs", "byte order mark"])
def test_tabs_and_a_byte_order_mark_do_no_harm(birds: Path, tmp_path: Path, change: str) -> None:
    samples = registry.read_dataset(birds).test
    shutil.copytree(birds, tmp_path / "copy")
    for table in (tmp_path / "copy").rglob("*.txt"):
        text = table.read_text()
        table.write_text(
            text.replace(" ", "\t", 1 if table.name == "parts.txt" else -1) if change == "tabs" else text,
            encoding="utf-8" if change == "tabs" else "utf-8-sig",
        )
    moved = [replace(sample, path=tmp_path / "copy" / sample.path.relative_to(birds)) for sample in samples]
    found, expected = cub.read_parts(tmp_path / "copy", moved), cub.read_parts(birds, samples)
    assert found.names == expected.names
    assert (found.points == expected.points).all()
    assert (found.boxes == expected.boxes).all()


@pytest.mark.parametrize("call", ["is_file", "read_text"])
def test_parts_that_may_not_be_read_are_named(birds: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    data = registry.read_dataset(birds)
    usual = getattr(Path, call)

    def refuse(path: Path, *args: Any, **options: Any) -> Any:
        if path.name == "part_locs.txt":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return usual(path, *args, **options)

    monkeypatch.setattr(Path, call, refuse)
    with pytest.raises(UsageError, match=r"part_locs.txt: cannot be read \(Permission denied\); .*--no-parts$"):
        _ = cub.has_parts(data) and cub.read_parts(birds, data.test)
