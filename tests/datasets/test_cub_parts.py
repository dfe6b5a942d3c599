"""CUB's part tables: which row belongs to which image, and where a part lies on the cropped input."""

from dataclasses import replace

import numpy as np
import pytest

from opal_deploy.datasets.cub import PartLocations, has_parts, read_parts
from opal_deploy.datasets.registry import read_dataset
from opal_deploy.errors import UsageError
from tests.datasets.layouts import write_cub, write_parts


def _one(point, box):
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
def test_truncated_coordinates(point, box, expected):
    assert tuple(_one(point, box).truncated_input_points(224)[0, 0]) == expected
    bx, by, bw, bh = map(int, box)  # the formula of the published protocol
    assert expected == (int(224 * ((int(point[0]) - bx) / bw)), int(224 * ((int(point[1]) - by) / bh)))


def test_exact_coordinates_keep_their_fractions():
    parts = _one((31.5, 20.0), (0.0, 0.0, 1.0, 1.0))
    assert parts.input_points(224, np.array([[10.5, 10.0, 52.5, 50.0]]))[0, 0].tolist() == [112.0, 56.0]


def test_rows_are_those_of_the_samples(tmp_path):
    root = write_parts(tmp_path)
    for table in root.rglob("*.txt"):
        # with a byte order mark
        table.write_text(table.read_text(), encoding="utf-8-sig")
    parts = read_parts(root, read_dataset(root).test[::-1])  # images 8 and 4
    assert parts.points.tolist() == [[[8.0, 10.5], [0.0, 0.0]], [[4.0, 10.5], [0.0, 0.0]]]
    assert parts.visible.tolist() == [[True, False]] * 2
    assert parts.boxes.tolist() == [[2.0, 3.0, 10.0, 8.0]] * 2
    assert parts.names == ("beak", "left tail")


def test_only_cub_with_its_part_table_has_parts(tmp_path):
    data = read_dataset(write_parts(tmp_path / "parts"))
    assert has_parts(data)
    assert not has_parts(replace(data, layout="imagefolder"))
    assert not has_parts(replace(data, root=write_cub(tmp_path / "cub")))


@pytest.mark.parametrize(
    ("table", "old", "new", "message"),
    [
        ("parts/part_locs.txt", "\n8 2 ", "\n8 3 ", "lack .*8 2"),
        ("parts/part_locs.txt", "0.0 0.0 0", "0.0 inf 0", "format"),
        ("bounding_boxes.txt", "8 2.0 3.0 10.0", "8 2.0 3.0 0.5", "pixel: 8"),
    ],
)
def test_a_bad_table_is_refused_in_one_line(tmp_path, table, old, new, message):
    samples = read_dataset(write_parts(tmp_path)).test
    text = (tmp_path / table).read_text()
    (tmp_path / table).write_text(text.replace(old, new))
    with pytest.raises(UsageError, match=message) as caught:
        read_parts(tmp_path, samples)
    assert "\n" not in str(caught.value)
    assert "--no-parts" in str(caught.value)
