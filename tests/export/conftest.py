"""Networks that are exported for real: one that is tiny, and ResNet-18 with an attention that is far from uniform."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from opal_deploy.artifact.metadata import Precision
from opal_deploy.export import images
from opal_deploy.export.checkpoint_source import CheckpointSource
from opal_deploy.export.exporter import ExportedOnnx, export
from opal_deploy.export.onnx_source import OnnxSource
from opal_deploy.export.options import ExportOptions, ExportTargets
from opal_deploy.model.backbones import Backbone
from opal_deploy.model.checkpoint import Checkpoint
from opal_deploy.model.config import HeadConfig, NetworkConfig
from opal_deploy.model.network import OpalNetwork
from opal_deploy.synthetic import example_images

NAMES = ["Sooty Albatross", "Crested Auklet", "Äußerer Käuz", "Tern <b>", "Wren", "Jay", "Crow"]

MakeCheckpoint = Callable[..., Checkpoint]
WriteOnnx = Callable[..., ExportedOnnx]


@pytest.fixture(autouse=True, scope="session")
def _images_drawn_once() -> Iterator[None]:
    """Drawing the verification images takes longer than the rest of a tiny export; they are always the same."""
    drawn: dict[tuple[int, int, int], NDArray[np.uint8]] = {}

    def cached(count: int, height: int, width: int) -> NDArray[np.uint8]:
        key = (count, height, width)
        if key not in drawn:
            drawn[key] = example_images(count, height, width)
        return drawn[key].copy()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(images, "example_images", cached)
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
    """Make the attention as uneven as training does, and the bias one that matters.

    Random weights leave the attention nearly uniform, where faults hide.
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
        network.head = type(network.head)(24, num_classes, config.head)
    if sharp:
        sharpen(network)
    source = {"file": "c.pt", "sha256": f"{seed:064x}", "format": "opal-deploy"}
    return Checkpoint(network.eval(), NAMES[:num_classes], source=source)


@pytest.fixture(scope="session")
def make_checkpoint() -> MakeCheckpoint:
    return build


@pytest.fixture(scope="session")
def overflowing() -> Checkpoint:
    """A tiny network whose activations overflow float16 although no weight does."""
    checkpoint = build(seed=3)
    body: Any = checkpoint.network.backbone.body
    body.first.weight.data.mul_(3e4)
    body.first.bias.data.mul_(3e4)
    body.second.weight.data.div_(3e4)
    return checkpoint


@pytest.fixture(scope="session")
def resnet18() -> Checkpoint:
    return build("resnet18", HeadConfig(epsilon=0.1))


@pytest.fixture(scope="session")
def write_onnx() -> WriteOnnx:
    """`write_onnx(source, out, precision, **options)`: one ONNX file of a checkpoint, or of the path of one of ours."""

    def write(source: Checkpoint | Path, out: Path, precision: Precision = "fp32", **options: Any) -> ExportedOnnx:
        from_file = isinstance(source, Path)
        export_source = OnnxSource(source) if from_file else CheckpointSource(source, out)
        return export(export_source, ExportTargets({precision: out}), ExportOptions(threads=2, **options)).onnx[0]

    return write


@pytest.fixture(scope="session")
def fp32(write_onnx: WriteOnnx, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`c.onnx` of a tiny network; whoever writes beside it copies it first."""
    return write_onnx(build(seed=8), tmp_path_factory.mktemp("fp32") / "c.onnx").path


@pytest.fixture(scope="session")
def photographs(cub_mini: Path) -> Path:
    """A folder of photographs, one subfolder a class."""
    return cub_mini / "images"
