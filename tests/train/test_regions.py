"""Regions that the attention is kept off: they move with the pixels, cost attention, and teach slots to look elsewhere."""

import json
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from opal_deploy.datasets.samples import Sample
from opal_deploy.synthetic import draw_example
from opal_deploy.train import images as train_images
from opal_deploy.train.images import PaperAugmentation, TrainImages
from opal_deploy.train.regions import read_regions

WHITE = 240


def write_coco(path, boxes):
    """Write a COCO file of one box (x0, y0, x1, y1) per image name."""
    images = [{"id": i, "file_name": name} for i, name in enumerate(boxes)]
    annotations = [
        {"image_id": i, "bbox": [x0, y0, x1 - x0, y1 - y0]} for i, (x0, y0, x1, y1) in enumerate(boxes.values())
    ]
    path.write_text(json.dumps({"images": images, "annotations": annotations}), encoding="utf-8")
    return path


@pytest.fixture
def stamped(squares, tmp_path):
    """A data set of one dark creature, turned by its EXIF tag and cropped, with a white box, and the box's COCO file."""
    upright = draw_example(0, 90, 120) // 3
    upright[14:46, 52:81] = 255
    exif = Image.Exif()
    exif[0x0112] = 6
    path = tmp_path / "stamped.jpg"
    Image.fromarray(np.rot90(upright).copy()).save(path, exif=exif, quality=95)
    regions = write_coco(tmp_path / "regions.json", {"stamped.jpg": (52, 14, 81, 46)})
    return replace(squares, train=[Sample(path, 0, (8.0, 4.0, 110.0, 84.0))], crop="boxes"), regions


@pytest.mark.parametrize("augmented", [False, True])
def test_a_region_is_where_its_pixels_are_after_every_augmentation(stamped, monkeypatch, augmented):
    # the light of the pixels, which alone tells them here, is not the subject
    monkeypatch.setattr(train_images, "apply_photometric", lambda image, rng: image)
    data, path = stamped
    augmentation = PaperAugmentation((64, 96)) if augmented else None
    images = TrainImages(data.train, (64, 96), augmentation=augmentation, regions=read_regions(data, str(path)))
    places = set()
    for epoch in range(60):
        pixels, _ = images[epoch, 0]
        white, region = pixels[..., :3].min(axis=2) > 128, pixels[..., 3] > 128
        assert (white & region).sum() > 0.9 * (white | region).sum() > 0, epoch
        places.add(region.tobytes())
    assert len(places) == 1 or augmented
    assert len(places) > 20 or not augmented
