"""The paper's augmentation: sizes, bounds, and that only the given generator matters."""

import numpy as np
import pytest
from PIL import Image

from opal_deploy.train.transforms import PaperAugmentation, apply_geometric, apply_photometric, sample_resized_crop


def _noise(height, width, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


@pytest.mark.parametrize(
    ("input_size", "resize_size", "crop_size"),
    [((224, 224), (232, 232), (228, 228)), ((448, 448), (464, 464), (456, 456)), ((224, 448), (232, 464), (228, 456))],
)
def test_sizes_are_the_authors_scaled_to_the_input(input_size, resize_size, crop_size):
    augmentation = PaperAugmentation(input_size)
    assert augmentation.resize_size == resize_size
    assert augmentation.crop_size == crop_size


@pytest.mark.parametrize("input_size", [(64, 96), (32, 32)])
def test_a_draw_is_uint8_of_the_input_size_and_depends_on_the_generator_alone(input_size):
    augmentation = PaperAugmentation(input_size)
    pixels = _noise(*augmentation.resize_size)
    before = pixels.copy()
    first, again = ([augmentation(pixels, np.random.default_rng(seed)) for seed in range(30)] for _ in range(2))
    assert {(drawn.shape, drawn.dtype.name) for drawn in first} == {((*input_size, 3), "uint8")}
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert len({drawn.tobytes() for drawn in first}) > 22
    assert np.array_equal(pixels, before)


class _Scripted:
    """Stands in for a generator: one choice of operation, the largest strength, and a sign."""

    def __init__(self, choice, *, negative):
        self.choice, self.negative = choice, negative

    def integers(self, stop):
        assert self.choice < stop
        return self.choice

    def uniform(self, low, high):
        return high

    def random(self):
        return 0.0 if self.negative else 1.0


def _dot(rows, cols, size=201):
    pixels = np.zeros((size, size, 3), np.uint8)
    pixels[rows, cols] = 255
    return Image.fromarray(pixels)


def _centre(image):
    rows, cols = np.nonzero(np.asarray(image)[..., 0] > 127)
    return float(rows.mean()), float(cols.mean())


@pytest.mark.parametrize(
    ("choice", "negative", "expected"),
    [
        (0, False, (40.0, 80.0)),
        (1, False, (40.0, 60.0)),  # x moves by half of y
        (1, True, (40.0, 100.0)),
        (2, False, (0.0, 80.0)),  # y moves by half of x
        (2, True, (80.0, 80.0)),
        (3, False, (40.0, 96.0)),
        (3, True, (40.0, 64.0)),
        (4, False, (56.0, 80.0)),
        (4, True, (24.0, 80.0)),
    ],
    ids=["identity", "shear x", "shear -x", "shear y", "shear -y", "right", "left", "down", "up"],
)
def test_geometric_operations_at_their_strongest(choice, negative, expected):
    moved = apply_geometric(_dot(slice(39, 42), slice(79, 82)), _Scripted(choice, negative=negative))
    assert _centre(moved) == pytest.approx(expected, abs=1.6)


# positive angles turn counterclockwise
@pytest.mark.parametrize(("negative", "side"), [(False, -1), (True, 1)])
def test_rotation_is_at_most_sixty_degrees_about_the_centre(negative, side):
    turned = apply_geometric(_dot(slice(19, 22), slice(99, 102)), _Scripted(5, negative=negative))
    # 80 pixels above the centre
    assert _centre(turned) == pytest.approx((100 - 80 * 0.5, 100 + side * 80 * 0.866), abs=1.5)


class _Counting(np.random.Generator):
    """Remembers which operations were drawn."""

    def __init__(self, seed):
        super().__init__(np.random.PCG64(seed))
        self.drawn = []

    def integers(self, *args, **kwargs):
        self.drawn.append(int(super().integers(*args, **kwargs)))
        return self.drawn[-1]


@pytest.mark.parametrize(("operation", "count"), [(apply_geometric, 6), (apply_photometric, 8)])
def test_every_operation_is_drawn_about_equally_often(operation, count):
    rng = _Counting(0)
    for _ in range(400):
        operation(Image.fromarray(_noise(8, 8)), rng)
    shares = np.bincount(rng.drawn, minlength=count) / 400
    assert len(shares) == count
    assert np.abs(shares - 1 / count).max() < 0.06


@pytest.mark.parametrize("choice", range(8))
@pytest.mark.parametrize("negative", [False, True])
def test_photometric_operations_keep_size_and_mode(choice, negative):
    image = Image.fromarray(_noise(40, 30) // 2 + 40)  # leaves room at both ends
    changed = apply_photometric(image, _Scripted(choice, negative=negative))
    assert (changed.size, changed.mode) == (image.size, "RGB")
    assert (changed == image) == (choice == 0)


def test_brightness_changes_by_at_most_half():
    grey = Image.new("RGB", (4, 4), (100, 100, 100))
    up, down = (apply_photometric(grey, _Scripted(1, negative=negative)) for negative in (False, True))
    assert (up.getpixel((0, 0)), down.getpixel((0, 0))) == ((150, 150, 150), (50, 50, 50))


@pytest.mark.parametrize("size", [(232, 232), (464, 232)], ids=["square", "wide"])
def test_the_resized_crop_takes_at_least_95_percent_of_the_area(size):
    image = Image.new("RGB", size)
    rng = np.random.default_rng(0)
    areas = []
    for _ in range(300):
        top, left, rows, cols = sample_resized_crop(image, rng)
        assert 0 <= top <= top + rows <= image.height
        assert 0 <= left <= left + cols <= image.width
        areas.append(rows * cols / (image.width * image.height))
    assert min(areas) > 0.94
    assert len(set(areas)) > 20
