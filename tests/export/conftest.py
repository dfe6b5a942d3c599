"""Networks that are exported for real: one that is tiny, and ResNet-18 with an attention that is far from uniform."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from opal_deploy.export import images as pictures
from opal_deploy.model.backbones import Backbone
from opal_deploy.model.checkpoint import Checkpoint
from opal_deploy.model.config import HeadConfig, NetworkConfig
from opal_deploy.model.network import OpalNetwork
from opal_deploy.synthetic import example_images

# the data that lies beside the project, not in it
SHARED_DATA = Path(__file__).parents[2].parent / "shared" / "data"
NAMES = ["Sooty Albatross", "Crested Auklet", "Äußerer Käuz", "Tern <b>", "Wren", "Jay", "Crow"]

MakeCheckpoint = Callable[..., Checkpoint]


@pytest.fixture(autouse=True, scope="session")
def _pictures_drawn_once() -> Iterator[None]:
    """Drawing the verification pictures takes longer than the rest of a tiny export; they are always the same."""
    drawn: dict[tuple[int, int, int], NDArray[np.uint8]] = {}

    def cached(count: int, height: int, width: int) -> NDArray[np.uint8]:
        key = (count, height, width)
        if key not in drawn:
            drawn[key] = example_images(count, height, width)
        return drawn[key].copy()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pictures, "example_images", cached)
        yield


class _TinyBody(nn.Module):
    """Two convolutions with 32 pixels a cell: traced in a second."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 12, 7, stride=8, padding=3)
        self.second = nn.Conv2d(12, 24, 5, stride=4, padding=2)

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        return {"features": torch.relu(self.second(torch.relu(self.first(images))))}


def sharpen(network: OpalNetwork) -> None:
    """Random weights leave the attention nearly uniform, where faults hide; this makes it as uneven as training does.

    The bias becomes one that matters.
    """
    if isinstance(network.head.projection, nn.Conv2d):
        with torch.no_grad():
            features = network.eval().backbone(torch.randn(4, 3, *network.config.input_size))
            network.head.projection.weight.mul_(2.0 / network.head.projection(features).std())
            network.head.projection.bias.normal_()  # type: ignore[union-attr]


def build(
    backbone: str = "tiny",
    head: HeadConfig | None = None,
    size: tuple[int, int] = (64, 96),
    num_classes: int = 4,
    *,
    seed: int = 0,
    sharp: bool = True,
) -> Checkpoint:
    """A checkpoint in memory; `tiny` is no network of torchvision's."""
    torch.manual_seed(seed)
    tiny = backbone == "tiny"
    config = NetworkConfig("shufflenet_v2_x0_5" if tiny else backbone, num_classes, size, head or HeadConfig())
    network = OpalNetwork(config)
    if tiny:
        network.backbone = Backbone("tiny", _TinyBody(), 24, 32)
        head_network = type(network.head)(24, num_classes, config.head)
        network.head = head_network
    if sharp:
        sharpen(network)
    source = {"file": "c.pt", "sha256": f"{seed:064x}", "format": "opal-deploy"}
    return Checkpoint(network.eval(), NAMES[:num_classes], source=source)


@pytest.fixture(scope="session")
def make_checkpoint() -> MakeCheckpoint:
    return build


@pytest.fixture(scope="session")
def resnet18() -> Checkpoint:
    return build("resnet18", HeadConfig(epsilon=0.1))


@pytest.fixture(scope="session")
def photographs() -> Path:
    folder = SHARED_DATA / "cub_mini" / "images"
    if not folder.is_dir():
        pytest.skip(f"no {folder}")
    return folder
