"""A tiny model with its data set and its export."""

import pytest
import torch

from opal_deploy.artifact import onnx_file
from opal_deploy.artifact.preprocessing import InputForm
from opal_deploy.datasets.registry import read_dataset
from opal_deploy.evaluation.session import load_pixels
from opal_deploy.export.api import export_model
from opal_deploy.model.checkpoint import Checkpoint, save
from opal_deploy.model.config import HeadConfig
from opal_deploy.synthetic import generate_dataset
from tests.builders import build_random_network


@pytest.fixture(scope="package")
def files(tmp_path_factory):
    """A folder with `data`, `model.pt` of its classes, that answers some images right, and `model.onnx`."""
    folder = tmp_path_factory.mktemp("edit")
    classes = generate_dataset(
        folder / "data", num_species=3, train_per_class=1, val_per_class=17, test_per_class=1, size=(64, 64)
    )
    network = build_random_network(3, HeadConfig(prototypes_per_class=3), (64, 64), stride=8)
    _train(network, read_dataset(folder / "data").val)
    save(folder / "model.pt", Checkpoint(network, classes))
    export_model(folder / "model.pt", threads=1, log=print)
    return folder


@pytest.fixture
def names(files):
    return onnx_file.read_metadata(files / "model.onnx").class_names


def _train(network, samples):
    network.eval()
    pixels = load_pixels(samples, InputForm(64, 64))
    images = torch.from_numpy(pixels).permute(0, 3, 1, 2) / 127.5 - 1
    labels = torch.tensor([sample.label for sample in samples])
    optimizer = torch.optim.Adam(network.parameters(), 1e-2)
    for _ in range(4):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(5 * network(images), labels).backward()
        optimizer.step()
