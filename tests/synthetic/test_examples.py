from __future__ import annotations

import subprocess
import sys
from itertools import combinations

import numpy as np
import pytest

from opal_deploy.errors import UsageError
from opal_deploy.synthetic import draw_background, example_images, noise_image


def test_examples_are_the_same_each_time_and_do_not_depend_on_their_number() -> None:
    pictures = example_images(4, 64, 96)
    assert (pictures.shape, pictures.dtype) == ((4, 64, 96, 3), np.uint8)
    np.testing.assert_array_equal(pictures[:2], example_images(2, 64, 96))


def test_examples_are_all_different() -> None:
    for a, b in combinations(example_images(20, 64, 64), 2):
        assert (a != b).mean() > 0.5


def test_no_examples_is_an_empty_array() -> None:
    assert example_images(0, 64, 64).shape == (0, 64, 64, 3)


@pytest.mark.parametrize(("count", "height"), [(-1, 64), (1, 8)])
def test_impossible_examples_are_refused(count: int, height: int) -> None:
    with pytest.raises(UsageError):
        example_images(count, height, 64)


def test_noise_covers_all_values_and_stays_the_same() -> None:
    noise = noise_image(64, 96)
    assert (noise.shape, noise.dtype) == ((64, 96, 3), np.uint8)
    assert (noise.min(), noise.max()) == (0, 255)
    np.testing.assert_array_equal(noise, noise_image(64, 96))


def test_scenes_are_varied() -> None:
    means = np.array([draw_background(np.random.default_rng(i), (64, 64)).mean(axis=(0, 1)) for i in range(40)])
    assert means.std(axis=0).min() > 15


def test_the_room_needs_numpy_and_pillow_only() -> None:
    code = (
        "import sys, opal_deploy.synthetic; print(*sorted({'torch', 'sklearn', 'scipy', 'onnx'} & sys.modules.keys()))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == []
