"""A tiny network, traced in a second, and the sidecar of an engine: what tests of several folders build."""

import base64
import io
import os
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import nn

from opal_deploy.artifact.cells import CellGrid
from opal_deploy.artifact.engine_file import Sidecar
from opal_deploy.artifact.files import compute_sha256
from opal_deploy.artifact.patches import Patch, Patches, SlotPatches
from opal_deploy.bench.networks import update_batch_norms
from opal_deploy.model.backbones import Backbone
from opal_deploy.model.checkpoint import Checkpoint
from opal_deploy.model.config import HeadConfig, NetworkConfig
from opal_deploy.model.network import OpalNetwork
from opal_deploy.runtime.tensorrt import platform_name
from opal_deploy.synthetic import example_images

# timm's residual network for tests: so few layers that it is built, trained and traced in no time
SMALL_BACKBONE = "timm:test_resnet"
# as small, without batch statistics and chance: it answers in training as it does afterwards
NORM_FREE_BACKBONE = "timm:test_convnext"
CLASS_NAMES = ["Sooty Albatross", "Crested Auklet", "Äußerer Käuz", "Tern <b>", "Wren", "Jay", "Crow"]


class _TinyBody(nn.Module):
    """Two convolutions with 32 pixels a cell."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 12, 7, stride=8, padding=3)
        self.second = nn.Conv2d(12, 24, 5, stride=4, padding=2)

    def forward(self, images):
        return {"features": torch.relu(self.second(torch.relu(self.first(images))))}


def _sharpen(network):
    """Make the attention as uneven as training does, and the bias one that matters.

    Random weights leave the attention nearly uniform, where faults hide.
    """
    if isinstance(network.head.projection, nn.Conv2d):
        with torch.no_grad():
            features = network.eval().backbone(torch.randn(4, 3, *network.config.input_size))
            network.head.projection.weight.mul_(2.0 / network.head.projection(features).std())
            network.head.projection.bias.normal_()


def _open_branches(network):
    """Let residual branches count, whose last normalisation timm initialises with zeros."""
    for module in network.backbone.modules():
        if isinstance(module, nn.BatchNorm2d) and not module.weight.any():
            nn.init.uniform_(module.weight, 0.5, 1.5)


def build_checkpoint(backbone="tiny", head=None, size=(64, 96), num_classes=4, *, seed=0, sharp=True, **config):
    """Return a checkpoint in memory; `tiny` is no network of torchvision's."""
    torch.manual_seed(seed)
    tiny = backbone == "tiny"
    name = "shufflenet_v2_x0_5" if tiny else backbone
    config = NetworkConfig(name, num_classes, size, head or HeadConfig(), **config)
    network = OpalNetwork(config)
    if tiny:
        network.backbone = Backbone("tiny", _TinyBody(), 24, 32)
        network.head = type(network.head)(24, num_classes, config.head)
    _open_branches(network)
    if sharp:
        _sharpen(network)
    source = {"file": f"c{seed}.pt", "sha256": f"{seed:064x}", "format": "opal-deploy"}
    return Checkpoint(network.eval(), CLASS_NAMES[:num_classes], source=source)


class Payload:
    """An object whose unpickling makes a folder."""

    def __init__(self, proof):
        self.proof = proof

    def __reduce__(self):
        return os.mkdir, (str(self.proof),)


def build_random_network(num_classes, head, size=(96, 96), *, images=32, **config):
    """Return a network of the small backbone with random weights and the batch statistics of generated images."""
    torch.manual_seed(0)
    network = OpalNetwork(NetworkConfig(SMALL_BACKBONE, num_classes, size, head, **config))
    _open_branches(network)
    update_batch_norms(network, example_images(images, *size))
    return network


def export_onnx(source, out, precision="fp32", **options):
    """Write one ONNX file of a checkpoint, or of the path of one of ours, and return what `export` says of it."""
    from opal_deploy.export.checkpoint_source import CheckpointSource
    from opal_deploy.export.exporter import export
    from opal_deploy.export.onnx_source import OnnxSource
    from opal_deploy.export.options import ExportOptions
    from opal_deploy.export.plan import plan_export

    export_source = OnnxSource(source) if isinstance(source, Path) else CheckpointSource(source, out)
    options = ExportOptions(**{"threads": 2, "overwrite": True, "out": out, "precision": precision, **options})
    return export(plan_export(export_source, options)).onnx[0]


def build_sidecar(path, metadata, **changes):
    """Return the sidecar of the engine at `path`, built by TensorRT for an L4 from the ONNX file of the metadata."""
    parts = {
        "engine": {"file": path.name, "sha256": compute_sha256(path), "bytes": path.stat().st_size},
        "builder": {"name": "tensorrt", "version": "11.4.0.106", "cuda": 13, "platform": platform_name()},
        "target": {"sm": "sm89", "gpu": "NVIDIA L4", "current": False},
        "options": {"batch": [1, 2, 4]},
        "onnx": {"file": "c.onnx", "sha256": metadata.file_sha256, "graph": "0" * 64},
        "key": "1" * 64,
        "built": {"when": "2026-11-21T00:00:00+00:00", "seconds": 1.0, "opal_deploy": "0.1.0", "driver": None},
        "state": {"state": "unverified", "why": "never run"},
    }
    return Sidecar(**{**parts, **changes}, metadata=metadata)


def build_anchors(num_classes, m, dtype=torch.float32):
    """Return the anchors as a matrix [C, K]: 1/sqrt(m) on the block of each class and 0 elsewhere (paper, Eq. 1)."""
    return torch.kron(torch.eye(num_classes, dtype=dtype), torch.full((1, m), m**-0.5, dtype=dtype))


def cell_box(geometry, row, col, grid):
    """Return the box of one cell of an image."""
    return tuple(CellGrid(*grid).boxes([geometry.crop], np.array([[row]]), np.array([[col]]))[0, 0].tolist())


def make_patches(classes, m, names=("other.jpg", "b.jpg", "third.jpg")):
    """Return the patches of a model as its metadata keeps them, the same for each of `m` slots of each class."""
    buffer = io.BytesIO()
    Image.new("RGB", (70, 50), (1, 2, 3)).save(buffer, "JPEG")
    jpeg = base64.b64encode(buffer.getvalue()).decode()
    patches = tuple(Patch(name, 0.2, (0.4, 0.4, 0.6, 0.6), jpeg) for name in names)
    return Patches("train", 9, tuple(SlotPatches(c, s, patches) for c in range(classes) for s in range(m))).to_dict()
