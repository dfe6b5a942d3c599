"""The images that an export is verified on and calibrated with: the model's own data first, no image in both."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from opal_deploy.artifact import onnx_file
from opal_deploy.datasets.registry import read_dataset
from opal_deploy.export.images import choose_images
from opal_deploy.export.options import ExportOptions

CLASSES = ("a", "b", "c", "d")


@pytest.fixture
def trained(fp32, tmp_path):
    """Metadata of a model that was trained on an ImageFolder of 20, 3 and 2 images a class."""
    root = tmp_path / "beetles"
    for split, count in (("train", 20), ("val", 3), ("test", 2)):
        for name in CLASSES:
            (root / split / name).mkdir(parents=True)
            for index in range(count):
                noise = np.random.default_rng([index, count]).integers(0, 256, (40, 40, 3), np.uint8)
                Image.fromarray(noise).save(root / split / name / f"{index}.png")
    return _trained_on(read_dataset(root), fp32)


def _trained_on(data, fp32):
    metadata = onnx_file.read_metadata(fp32)
    # earlier versions kept the whole path
    training = {"data": {**data.summary(), "root": str(data.root)}}
    return replace(metadata, class_names=tuple(data.class_names), crop=data.crop, training=training)


def test_the_models_own_validation_images_come_first_and_others_fill_up(trained):
    images = choose_images(trained, ExportOptions(), calibrate=False).verification.first(64)
    assert images.description == "64 images from beetles (12 validation, 8 test, 44 training)"
    assert [Path(name).parts[-3] for name in images.names[:21]] == ["val"] * 12 + ["test"] * 8 + ["train"]
    assert images.pixels.shape == (64, *trained.input_size, 3)
    # a model that names its data set, and a run's folder that says where it is
    root, training = Path(trained.training["data"]["root"]), dict(trained.training)
    training["data"] = {**training["data"], "root": root.name}
    (root.parent / "paths.json").write_text(json.dumps({"data": str(root)}))
    named = replace(trained, training=training)
    pool = choose_images(named, ExportOptions(), calibrate=False, model=root.parent / "model.onnx").verification
    assert pool.first(64).names == images.names


def test_int8_is_calibrated_on_training_images_and_judged_on_others(trained):
    choice = choose_images(trained, ExportOptions(), calibrate=True)
    assert choice.calibration.description == "80 images from beetles (80 training)"
    judges = choice.verification.first(576)
    assert judges.description == "20 images from beetles (12 validation, 8 test)"
    assert not set(judges.names) & set(choice.calibration.names)


def test_data_that_are_not_those_of_the_run_are_left_and_said(trained):
    root, said = Path(trained.training["data"]["root"]), []
    (root / "train" / "a").rename(root / "train" / "e")
    choice = choose_images(trained, ExportOptions(log=said.append), calibrate=False)
    assert choice.verification.first(3).description == "3 generated creatures"
    assert "--images" in said[0]
