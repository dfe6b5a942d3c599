"""Batches: the same pixels as everywhere, whatever the cache and the number of workers."""

import numpy as np
import pytest
import torch
from PIL import Image

from opal_deploy.artifact.metadata import IMAGENET_MEAN, IMAGENET_STD
from opal_deploy.datasets.samples import Sample
from opal_deploy.errors import UsageError
from opal_deploy.preprocess.decode import decode
from opal_deploy.preprocess.geometry import compute_geometry
from opal_deploy.preprocess.resize import normalise, to_input
from opal_deploy.train.images import Batches, PaperAugmentation, TrainImages, normalize


def _nothing(done, total, note): ...


@pytest.fixture
def samples(tmp_path):
    rng = np.random.default_rng(0)
    for index in range(9):
        Image.fromarray(rng.integers(0, 256, (50, 40, 3), dtype=np.uint8)).save(tmp_path / f"{index}.png")
    return [Sample(tmp_path / f"{index}.png", index % 3, (5.0, 5.0, 35.5, 45.0)) for index in range(9)]


def _epoch(samples, *, epoch=1, seed=0, workers=0, cached=False):
    images = TrainImages(samples, (32, 32), augmentation=PaperAugmentation((32, 32)), seed=seed)
    if cached:
        images.fill_cache(_nothing)
    batches = Batches(images, 4, shuffle_seed=seed, workers=workers)
    batches.epoch = epoch
    return b"".join(images.numpy().tobytes() + labels.numpy().tobytes() for images, labels in batches)


def test_evaluation_images_are_those_of_preprocess(samples):
    (images, labels), *_ = Batches(TrainImages(samples, (32, 64)), 9)
    assert images.dtype == torch.uint8
    assert labels.tolist() == [sample.label for sample in samples]
    for pixels, sample in zip(images, samples, strict=True):
        image = decode(sample.path)
        assert np.array_equal(pixels.numpy(), to_input(image, compute_geometry(image, sample.box), (32, 64)))


def test_normalisation_is_that_of_preprocess_bit_for_bit(samples):
    (images, _), *_ = Batches(TrainImages(samples, (32, 32)), 9)
    ours = normalize(images, IMAGENET_MEAN, IMAGENET_STD)
    assert np.array_equal(ours.numpy(), normalise(images.numpy(), IMAGENET_MEAN, IMAGENET_STD))
    assert ours.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("augmented", [False, True])
def test_exif_orientation_is_applied(tmp_path, augmented):
    # stored lying on its side, with the tag that turns it 90 degrees clockwise for a viewer
    upright = np.zeros((60, 40, 3), np.uint8)
    upright[:30] = (250, 0, 0)
    exif = Image.Exif()
    exif[0x0112] = 6
    path = tmp_path / "phone.jpg"
    Image.fromarray(np.rot90(upright).copy()).save(path, exif=exif, quality=95)
    augmentation = PaperAugmentation((32, 32)) if augmented else None
    images = TrainImages([Sample(path, 0), Sample(path, 0)], (32, 32), augmentation=augmentation)
    images.augmentation = None  # the squashed image itself, at the size that augmentation starts from
    (images, _), *_ = Batches(images, 2)
    assert images.shape[1] == (33 if augmented else 32)
    rows = images[0].numpy()[..., 0].mean(axis=1)
    assert rows[:12].min() > 200
    assert rows[-12:].max() < 50


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_an_epoch_depends_on_its_number_and_seed_alone(samples):
    plain = _epoch(samples)
    assert _epoch(samples, workers=2) == plain
    assert _epoch(samples, cached=True) == plain
    assert len({plain, _epoch(samples, epoch=2), _epoch(samples, seed=1)}) == 3


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_kept_workers_see_the_next_epoch(samples):
    images = TrainImages(samples, (32, 32), augmentation=PaperAugmentation((32, 32)))
    batches = Batches(images, 4, shuffle_seed=0, workers=1)
    for epoch in (1, 2):
        batches.epoch = epoch
        seen = b"".join(images.numpy().tobytes() + labels.numpy().tobytes() for images, labels in batches)
        assert seen == _epoch(samples, epoch=epoch)


def test_an_epoch_has_every_image_once_and_no_batch_of_one(samples):
    plan = Batches(TrainImages(samples, (32, 32)), 4, shuffle_seed=0).plan()
    assert [len(batch) for batch in plan] == [4, 5]
    assert sorted(index for batch in plan for _, index in batch) == list(range(9))


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("workers", [0, 1])
def test_a_image_that_breaks_off_is_named_in_one_line(samples, workers):
    bad = samples[4].path
    bad.write_bytes(bad.read_bytes()[:1500])
    with pytest.raises(UsageError, match=r"4\.png: .*remove or replace this image$") as caught:
        list(Batches(TrainImages(samples, (32, 32)), 4, workers=workers))
    assert "\n" not in str(caught.value)


def test_filling_the_cache_names_every_bad_image(samples):
    for index in (2, 6):
        samples[index].path.write_bytes(samples[index].path.read_bytes()[:1500])
    with pytest.raises(UsageError, match=r"2 image\(s\) cannot be decoded.*2\.png.*6\.png"):
        TrainImages(samples, (32, 32)).fill_cache(_nothing)
