"""Where a cell lies on the picture: the exact inverse of orienting, cropping and squashing."""

import math
from itertools import product

import numpy as np
import pytest
from PIL import Image

from opal_deploy.artifact.preprocessing import InputForm
from opal_deploy.errors import ImageError
from opal_deploy.preprocess.geometry import compute_geometry
from opal_deploy.preprocess.resize import fit_input, normalise
from tests.builders import cell_box

GRID = (3, 4)
INPUT = (48, 64)


def brightest_cell(pixels):
    rows, cols = GRID
    height, width = pixels.shape[:2]
    cells = pixels.reshape(rows, height // rows, cols, width // cols, 3).mean(axis=(1, 3, 4))
    return divmod(int(cells.argmax()), cols)


def with_block(size, block):
    """Return a dark image with one bright block (x0, y0, x1, y1)."""
    image = Image.new("RGB", size, (20, 20, 20))
    image.paste((255, 255, 255), tuple(round(v) for v in block))
    return image


@pytest.mark.parametrize(
    ("size", "box"),
    [((120, 690), None), ((400, 300), (40, 30, 200, 300)), ((400, 300), (-50, -10, 900, 900))],
    ids=["tall", "cropped", "crop over the edges"],
)
def test_a_bright_block_in_a_cells_box_lights_that_cell_alone(size, box):
    for row, col in product(range(GRID[0]), range(GRID[1])):
        geometry = compute_geometry(size, box)
        image = with_block(size, cell_box(geometry, row, col, GRID))
        assert brightest_cell(fit_input(image, geometry, InputForm(*INPUT))[0]) == (row, col)


@pytest.mark.parametrize(
    ("box", "crop"),
    [
        pytest.param((10.9, 20.9, 30.9, 40.9), (10, 20, 30, 40), id="truncated"),
        pytest.param((-3, -4.5, 30, 40), (0, 0, 30, 40), id="below zero"),
        pytest.param((10, 20, 101, 1e300), (10, 20, 100, 50), id="over the edge"),
        pytest.param((-0.5, 0, 1, 1), (0, 0, 1, 1), id="truncated towards zero"),
    ],
)
def test_a_box_is_truncated_to_whole_pixels_and_cut_to_the_picture(box, crop):
    assert compute_geometry((100, 50), box).crop == crop


@pytest.mark.parametrize(
    "box", [(20, 10, 10, 20), (10.1, 10, 10.9, 20), (100, 0, 120, 50), (math.nan, 0, 10, 10), (0, 0, math.inf, 10)]
)
def test_a_box_without_a_pixel_of_the_picture_is_the_images_error(box):
    with pytest.raises(ImageError) as caught:
        compute_geometry((100, 50), box)
    assert caught.value.code == "bad_box"


def test_pixels_outside_the_crop_do_not_bleed_in():
    image = Image.new("RGB", (100, 100), (255, 255, 255))
    image.paste((0, 0, 0), (20, 20, 80, 80))
    assert fit_input(image, compute_geometry(image.size, (20, 20, 80, 80)), InputForm(32, 32))[0].max() == 0


def test_normalising_takes_mean_and_deviation_channel_by_channel():
    images = np.zeros((2, 1, 1, 3), np.uint8)
    images[1] = (51, 102, 255)
    found = normalise(images, (0.1, 0.2, 0.5), (0.5, 0.25, 2.0))
    assert (found.shape, found.dtype) == ((2, 3, 1, 1), np.float32)
    assert found[:, :, 0, 0] == pytest.approx(np.array([[-0.2, -0.8, -0.25], [0.2, 0.8, 0.25]]))
