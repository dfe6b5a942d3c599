"""The paper's augmentation: sizes, bounds, and that only the given generator matters."""

from itertools import product

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import InterpolationMode
from torchvision.transforms.autoaugment import _apply_op

from opal_deploy.train.images import PaperAugmentation, apply_geometric, apply_photometric, sample_resized_crop


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
    """Stands in for a generator: one choice of operation, one of the 31 strengths, and a sign."""

    def __init__(self, choice, strength, *, negative):
        self.choice, self.strength, self.negative = choice, strength, negative

    def integers(self, stop):
        return self.strength if stop == 31 else self.choice

    def random(self):
        return 0.0 if self.negative else 1.0


# the authors' spaces, in the order of our choices: the operation's name in torchvision, 31 strengths, with a sign
GEOMETRIC = [
    ("Identity", None, False),
    ("ShearX", torch.linspace(0.0, 0.5, 31), True),
    ("ShearY", torch.linspace(0.0, 0.5, 31), True),
    ("TranslateX", torch.linspace(0.0, 16.0, 31), True),
    ("TranslateY", torch.linspace(0.0, 16.0, 31), True),
    ("Rotate", torch.linspace(0.0, 60.0, 31), True),
]
PHOTOMETRIC = [
    ("Identity", None, False),
    ("Brightness", torch.linspace(0.0, 0.5, 31), True),
    ("Contrast", torch.linspace(0.0, 0.5, 31), True),
    ("Sharpness", torch.linspace(0.0, 0.5, 31), True),
    ("Color", torch.linspace(0.0, 0.02, 31), True),
    ("Posterize", 8 - (torch.arange(31) / (30 / 6)).round().int(), False),
    ("AutoContrast", None, False),
    ("Equalize", None, False),
]


@pytest.mark.parametrize(("ours", "space"), [(apply_geometric, GEOMETRIC), (apply_photometric, PHOTOMETRIC)])
def test_operations_are_those_of_torchvisions_trivial_augment_in_the_authors_spaces(ours, space):
    image = Image.fromarray(_noise(40, 60) // 2 + 40)
    for (choice, (name, strengths, has_sign)), k, negative in product(enumerate(space), range(31), (False, True)):
        magnitude = 0.0 if strengths is None else float(strengths[k])
        magnitude *= -1.0 if negative and has_sign else 1.0
        expected = _apply_op(image, name, magnitude, InterpolationMode.NEAREST, None)
        found = ours(image, _Scripted(choice, k, negative=negative))
        assert np.array_equal(np.asarray(found), np.asarray(expected)), (name, magnitude)


class _Counting(np.random.Generator):
    """Remembers which operations were drawn."""

    def __init__(self, seed):
        super().__init__(np.random.PCG64(seed))
        self.drawn = []

    def integers(self, *args, **kwargs):
        number = int(super().integers(*args, **kwargs))
        if args[0] != 31:
            self.drawn.append(number)
        return number


@pytest.mark.parametrize(("operation", "count"), [(apply_geometric, 6), (apply_photometric, 8)])
def test_every_operation_is_drawn_about_equally_often(operation, count):
    rng = _Counting(0)
    for _ in range(400):
        operation(Image.fromarray(_noise(8, 8)), rng)
    shares = np.bincount(rng.drawn, minlength=count) / 400
    assert len(shares) == count
    assert np.abs(shares - 1 / count).max() < 0.06


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
