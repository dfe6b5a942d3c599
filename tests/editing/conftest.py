"""A tiny model with its data set and its export."""

import pytest
import torch

from opal_deploy.artifact import onnx_file
from opal_deploy.bench.networks import update_batch_norms
from opal_deploy.datasets.registry import read_dataset
from opal_deploy.evaluation.session import load_pixels
from opal_deploy.export.api import export_model
from opal_deploy.model.checkpoint import Checkpoint, save
from opal_deploy.model.config import HeadConfig, NetworkConfig
from opal_deploy.model.network import OpalNetwork
from opal_deploy.synthetic import example_images, generate_dataset

M = 3


@pytest.fixture(scope="package")
def files(tmp_path_factory):
    """A folder with `data`, `model.pt` of its classes, that answers some images right, and `model.onnx`."""
    folder = tmp_path_factory.mktemp("edit")
    data = generate_dataset(
        folder / "data", num_species=3, train_per_class=1, val_per_class=17, test_per_class=1, size=(64, 64)
    )
    torch.manual_seed(0)
    head = HeadConfig(prototypes_per_class=3)
    network = OpalNetwork(NetworkConfig("shufflenet_v2_x0_5", 3, (64, 64), head, stride=8))
    update_batch_norms(network, example_images(32, 64, 64))
    _train(network, read_dataset(folder / "data").val)
    save(folder / "model.pt", Checkpoint(network, list(data.classes)))
    export_model(folder / "model.pt", threads=1, log=print)
    return folder


@pytest.fixture
def names(files):
    return onnx_file.read_metadata(files / "model.onnx").class_names


def _train(network, samples):
    network.eval()
    pixels = load_pixels(samples, (64, 64))
    images = torch.from_numpy(pixels).permute(0, 3, 1, 2) / 127.5 - 1
    labels = torch.tensor([sample.label for sample in samples])
    optimizer = torch.optim.Adam(network.parameters(), 1e-2)
    for _ in range(4):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(5 * network(images), labels).backward()
        optimizer.step()
