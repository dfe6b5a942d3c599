"""Regions that the attention is kept off: they move with the pixels, and teach slots to look elsewhere."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from opal_deploy.artifact.preprocessing import ResizeRule
from opal_deploy.datasets.samples import Sample
from opal_deploy.errors import UsageError
from opal_deploy.model import checkpoint
from opal_deploy.synthetic import draw_example, generate_dataset
from opal_deploy.train.augmentation import PaperAugmentation
from opal_deploy.train.images import TrainImages, read_regions
from opal_deploy.train.losses import measure_kept_off
from tests.builders import SMALL_BACKBONE
from tests.train.fitting import read_epochs, write_regions

REGION = {"stamped.jpg": [52, 14, 29, 32]}


@pytest.fixture
def stamped(squares, tmp_path):
    """A data set of one dark creature with a white box; its file is turned, and its crop cuts most of the margin."""
    upright = draw_example(0, 90, 120) // 3
    upright[14:46, 52:81] = 255
    exif = Image.Exif()
    exif[0x0112] = 6
    path = tmp_path / "stamped.jpg"
    Image.fromarray(np.rot90(upright).copy()).save(path, exif=exif, quality=95)
    return replace(squares, train=[Sample(path, 0, (8.0, 4.0, 110.0, 84.0))], crop="boxes")


@pytest.mark.parametrize(
    ("augmented", "rule"), [(False, "squash"), (True, "squash"), (False, "letterbox"), (True, "shortest_edge-104")]
)
def test_a_region_is_where_its_pixels_are_after_every_augmentation(stamped, tmp_path, monkeypatch, augmented, rule):
    # the light of the pixels, which alone tells them here, is not the subject
    monkeypatch.setattr("opal_deploy.train.augmentation.apply_photometric", lambda image, rng: image)
    regions = read_regions(stamped, write_regions(tmp_path / "regions.json", REGION))
    augmentation = PaperAugmentation((64, 96)) if augmented else None
    rule = ResizeRule.parse(f"{rule}-bilinear")
    images = TrainImages(stamped.train, (64, 96), augmentation=augmentation, regions=regions, rule=rule)
    places = set()
    for epoch in range(60):
        pixels, _ = images[epoch, 0]
        white, region = pixels[..., :3].min(axis=2) > 128, pixels[..., 3] > 128
        assert (white & region).sum() > 0.88 * (white | region).sum() > 0, epoch
        places.add(region.tobytes())
    assert len(places) == 1 or augmented
    assert len(places) > 20 or not augmented


def test_only_the_labelled_classs_slots_pay_for_their_maximum_in_the_region():
    attention = torch.zeros(3, 4, 2, 2)  # two classes of two slots
    attention[:, 2, 0, 0], attention[:, 3, 1, 1], attention[:, 0, 0, 0] = 0.8, 0.9, 1.0
    regions = torch.zeros(3, 8, 8)
    regions[0, :4, :4] = 1
    regions[1, :4, :2] = 1
    channels = torch.tensor([[2, 3]] * 3)
    # half of 0.8 as half of the cell is covered; nothing without a region
    assert measure_kept_off(attention, channels, regions).tolist() == pytest.approx([0.4, 0.2, 0.0])


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_run_says_what_the_regions_got(opal, tmp_path):
    data, run = tmp_path / "data", tmp_path / "run"
    species = generate_dataset(data, num_species=2, train_per_class=6, val_per_class=2, test_per_class=0, size=(64, 64))
    stamped = sorted((data / "train" / species[1]).iterdir())
    write_regions(data / "stamps.json", {str(path.relative_to(data)): [50, 50, 10, 10] for path in stamped})
    arguments = (
        "--backbone", SMALL_BACKBONE, "--weights", "none", "--size", "64", "--stride", "16", "--batch-size", "6",
        "--epochs", "1", "--device", "cpu", "--workers", "1", "--cache-megabytes", "0",
        "--resize", "letterbox",
    )  # fmt: skip
    regions = ("--keep-off", data / "stamps.json", "--keep-off-weight", "0.5")
    (tmp_path / "scenes").mkdir()
    for number in range(6):
        Image.new("RGB", (64, 64), (40 * number,) * 3).save(tmp_path / f"scenes/{number}.png")
    done = opal("train", data, *arguments, *regions, "--background", tmp_path / "scenes", "--out", run)
    assert done.returncode == 0, done.stderr
    assert "regions of 6 of 12 images" in done.stderr
    assert "in kept-off regions" in done.stderr
    (record,) = read_epochs(run)
    assert 0 < record.kept_off < 1
    stored = checkpoint.load(run / "best.pt")
    assert (stored.baseline.background, checkpoint.build_metadata(stored).resize) == (6, "letterbox-bilinear")
    # options left out are the run's own; another value is another run
    refused = opal("train", data, *arguments, *regions[:2], "--keep-off-weight", "0.7", "--out", run, "--resume")
    assert "keep_off_weight was 0.5 and is 0.7" in refused.stderr


def test_regions_of_other_images_are_refused(squares, tmp_path):
    with pytest.raises(UsageError, match="no boxes"):
        read_regions(squares, write_regions(tmp_path / "regions.json", REGION))
