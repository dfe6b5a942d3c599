"""Near copies are found among real photographs, and photographs of one kind are not taken for them."""

import io

import numpy as np
import pytest
from PIL import Image

from opal_deploy.datasets.checks import compute_thumbnail, find_near_copies
from opal_deploy.datasets.registry import read_dataset


def shrink(image):
    return compute_thumbnail(np.asarray(image.convert("RGB").resize((224, 224), Image.Resampling.BILINEAR)))


def save_again(image, quality, scale):
    stream = io.BytesIO()
    image.convert("RGB").resize([round(side * scale) for side in image.size]).save(stream, "JPEG", quality=quality)
    return Image.open(stream)


@pytest.mark.data
def test_photographs_saved_again_or_resized_are_found_and_others_are_not(cub_mini):
    data = read_dataset(cub_mini, needs_validation=lambda _: False)
    train = [Image.open(sample.path) for sample in data.train[::3]]
    known = np.array([shrink(image) for image in train])
    others = np.array([shrink(Image.open(sample.path)) for sample in data.test[::2]])
    for quality, scale in ((92, 1.0), (60, 1.0), (80, 0.5)):
        copies = np.array([shrink(save_again(image, quality, scale)) for image in train[:30]])
        assert find_near_copies(known, np.concatenate([copies, others])).tolist() == [*range(30), *[-1] * len(others)]


def test_what_one_camera_took_from_one_place_is_not_a_copy():
    rng = np.random.default_rng(0)
    scene = rng.integers(0, 200, (64, 64, 3))
    images = [np.uint8(scene + np.kron(rng.integers(0, 20, (8, 8, 3)), np.ones((8, 8, 1)))) for _ in range(40)]
    thumbnails = np.array([compute_thumbnail(image) for image in images])
    assert (find_near_copies(thumbnails[:20], thumbnails[20:]) == -1).all()
    assert find_near_copies(thumbnails[:20], thumbnails[7:8]).tolist() == [7]


def test_an_image_of_one_colour_is_no_copy_of_another():
    black, white = np.zeros((9, 9, 3), np.uint8), np.full((9, 9, 3), 255, np.uint8)
    thumbnails = np.array([compute_thumbnail(image) for image in (black, white)])
    assert find_near_copies(thumbnails, thumbnails).tolist() == [-1, -1]
