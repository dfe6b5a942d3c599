"""Batches and their augmentation: the same pixels as everywhere, whatever the cache and the number of workers."""

from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import InterpolationMode
from torchvision.transforms.autoaugment import _apply_op

from opal_deploy.artifact.metadata import IMAGENET_MEAN, IMAGENET_STD
from opal_deploy.artifact.preprocessing import InputForm, ResizeRule
from opal_deploy.datasets.samples import Sample
from opal_deploy.errors import UsageError
from opal_deploy.evaluation.session import load_pixels
from opal_deploy.logs import no_progress
from opal_deploy.preprocess.resize import normalise
from opal_deploy.synthetic import draw_example
from opal_deploy.train.augmentation import PaperAugmentation, apply_photometric, sample_geometric, sample_resized_crop
from opal_deploy.train.images import WHOLE, Batches, TrainImages, normalize, read_images


@pytest.fixture
def samples(tmp_path):
    for index in range(9):
        Image.fromarray(draw_example(index, 50, 40)).save(tmp_path / f"{index}.png")
    return [Sample(tmp_path / f"{index}.png", index % 3, (5.0, 5.0, 35.5, 45.0)) for index in range(9)]


def _epoch(samples, *, epoch=1, seed=0, workers=0, cached=False):
    images = TrainImages(samples, (32, 32), augmentation=PaperAugmentation((32, 32)), seed=seed)
    if cached:
        images, _, _ = read_images(images, no_progress, keep=True)
    batches = Batches(images, 4, shuffle_seed=seed, workers=workers)
    batches.epoch = epoch
    return b"".join(images.numpy().tobytes() + labels.numpy().tobytes() for images, labels in batches)


@pytest.mark.parametrize("rule", ["squash-bilinear", "shortest_edge-104-bilinear", "letterbox-bilinear"])
def test_training_sees_the_pixels_that_inference_does(samples, rule):
    form = InputForm(64, 96, ResizeRule.parse(rule))
    expected = load_pixels(samples, form)
    images = TrainImages(samples, form.size, rule=form.rule)
    (pixels, labels), *_ = Batches(images, 9)
    assert pixels.dtype == torch.uint8
    assert labels.tolist() == [sample.label for sample in samples]
    assert np.array_equal(pixels.numpy(), expected)
    # training images are made larger first, which moves them by half a pixel at most
    images = replace(images, augmentation=PaperAugmentation(form.size))
    whole = np.stack([images[WHOLE, index][0] for index in range(9)])
    assert np.abs(whole.astype(float) - expected).mean() < 3


def test_normalisation_is_that_of_preprocess_bit_for_bit(samples):
    (images, _), *_ = Batches(TrainImages(samples, (32, 32)), 9)
    ours = normalize(images, IMAGENET_MEAN, IMAGENET_STD)
    assert np.array_equal(ours.numpy(), normalise(images.numpy(), IMAGENET_MEAN, IMAGENET_STD))
    assert ours.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_an_epoch_depends_on_its_number_and_seed_alone(samples):
    plain = _epoch(samples)
    assert _epoch(samples, workers=2) == plain
    assert _epoch(samples, cached=True) == plain
    assert len({plain, _epoch(samples, epoch=2), _epoch(samples, seed=1)}) == 3


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_truncated_images_are_named_or_left_out_and_nearly_black_ones_are_named(samples):
    for index in (2, 6):
        samples[index].path.write_bytes(samples[index].path.read_bytes()[:1500])
    images = TrainImages(samples, (32, 32))
    with pytest.raises(UsageError, match=r"\A.*2\.png: .*\Z"):
        list(Batches(images, 4, workers=1))
    # 12-bit data in a 16-bit file
    Image.fromarray(np.full((50, 40), 4095, np.uint16)).save(samples[4].path)
    readable, problems, black = read_images(images, no_progress, keep=False)
    assert black == [str(samples[4].path)]
    assert len(problems) == 2
    assert [sample.path.stem for sample in readable.samples] == list("0134578")


# augmentation ---------------------------------------------------------------------------------------------------------


def _noise(height, width, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def test_a_draw_is_uint8_of_the_input_size_and_depends_on_the_generator_alone():
    augmentation = PaperAugmentation(input_size := (64, 96))
    assert augmentation.resize_size == (66, 99)
    pixels = _noise(*augmentation.resize_size)
    before = pixels.copy()
    first, again = ([augmentation(pixels, np.random.default_rng(seed)) for seed in range(30)] for _ in range(2))
    assert {(drawn.shape, drawn.dtype.name) for drawn in first} == {((*input_size, 3), "uint8")}
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert len({drawn.tobytes() for drawn in first}) > 22
    assert np.array_equal(pixels, before)


def test_erasing_covers_a_rectangle_of_half_of_the_images_and_changes_nothing_else():
    plain, erasing = (PaperAugmentation((64, 96), erase=erase) for erase in (False, True))
    pixels = _noise(*plain.resize_size)
    shares = []
    for seed in range(200):
        before, after = (each(pixels, np.random.default_rng(seed)) for each in (plain, erasing))
        rows, cols = np.nonzero((before != after).any(axis=2))
        if len(rows):
            covered = after[rows.min() : rows.max() + 1, cols.min() : cols.max() + 1]
            assert len(np.unique(covered.reshape(-1, 3), axis=0)) == 1
            shares.append(covered[..., 0].size / before[..., 0].size)
    assert 80 < len(shares) < 120
    assert 0.01 < min(shares) < max(shares) <= 0.25


def _script(choice, strength, *, negative):
    """Return a generator's stand-in: one choice of operation, one of the 31 strengths, and a sign."""
    return SimpleNamespace(
        integers=lambda stop: strength if stop == 31 else choice, random=lambda: 0.0 if negative else 1.0
    )


# the authors' spaces, in the order of our choices: by the operation's name in torchvision the largest of 31 strengths,
# which take either sign, or all strengths, which do not
GEOMETRIC = {"Identity": 0.0, "ShearX": 0.5, "ShearY": 0.5, "TranslateX": 16.0, "TranslateY": 16.0, "Rotate": 60.0}
PHOTOMETRIC = {
    "Identity": 0.0, "Brightness": 0.5, "Contrast": 0.5, "Sharpness": 0.5, "Color": 0.02,
    "Posterize": 8 - (torch.arange(31) / (30 / 6)).round().int(), "AutoContrast": 0.0, "Equalize": 0.0,
}  # fmt: skip


def apply_geometric(image, rng):
    return sample_geometric(rng)(image)


@pytest.mark.parametrize(("ours", "space"), [(apply_geometric, GEOMETRIC), (apply_photometric, PHOTOMETRIC)])
def test_operations_are_those_of_torchvisions_trivial_augment_in_the_authors_spaces(ours, space):
    image = Image.fromarray(_noise(40, 60) // 2 + 40)
    for (choice, (name, limit)), k, negative in product(enumerate(space.items()), range(31), (False, True)):
        has_sign = isinstance(limit, float)
        magnitude = float((torch.linspace(0.0, limit, 31) if has_sign else limit)[k])
        magnitude *= -1.0 if negative and has_sign else 1.0
        expected = _apply_op(image, name, magnitude, InterpolationMode.NEAREST, None)
        found = ours(image, _script(choice, k, negative=negative))
        assert np.array_equal(np.asarray(found), np.asarray(expected)), (name, magnitude)


def test_the_resized_crop_takes_at_least_95_percent_of_the_area():
    image, rng = Image.new("RGB", (464, 232)), np.random.default_rng(0)
    top, left, rows, cols = np.array([sample_resized_crop(image, rng) for _ in range(300)]).T
    assert min(top.min(), left.min()) >= 0
    assert ((top + rows <= 232) & (left + cols <= 464)).all()
    assert (rows * cols).min() > 0.94 * 464 * 232
    assert len(set(rows * cols)) > 20
