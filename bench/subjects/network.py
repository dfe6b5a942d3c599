"""Networks to time: a checkpoint's, or a backbone's with random weights, with OPAL's head or the linear one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import onnx
import torch

from opal_deploy.artifact.metadata import Metadata
from opal_deploy.bench.subjects.names import LINEAR, OPAL, Head
from opal_deploy.export.graph import ExportGraph
from opal_deploy.export.onnx_graph import trace
from opal_deploy.model import checkpoint as checkpoints
from opal_deploy.model.checkpoint import Checkpoint, describe
from opal_deploy.model.config import LINEAR_BASELINE, HeadConfig, NetworkConfig
from opal_deploy.model.network import OpalNetwork

_SEED = 0


@dataclass(frozen=True)
class NamedNetwork:
    """A network with what a person calls it; `sha256` of its checkpoint, None where its weights are random."""

    name: str
    checkpoint: Checkpoint
    sha256: str | None = None

    @property
    def config(self) -> NetworkConfig:
        """Backbone, head, C and input size."""
        return self.checkpoint.network.config

    @cached_property
    def described(self) -> Metadata:
        """What the checkpoint says of itself."""
        return describe(self.checkpoint)

    @cached_property
    def graph(self) -> ExportGraph:
        """The network as it is exported: uint8 pictures in, every output that its head has."""
        return ExportGraph(self.checkpoint.network, "uint8", self.described.mean, self.described.std)

    @cached_property
    def traced(self) -> onnx.ModelProto:
        """The same in ONNX, float32: tracing takes long, and every precision begins with it.

        Raises:
            UsageError: over ONNX's 2 GB.
        """
        return trace(self.graph)


def from_checkpoint(path: Path) -> NamedNetwork:
    """A checkpoint's network. Raises CheckpointError, UsageError: see `model.checkpoint.load`."""
    checkpoint = checkpoints.load(path)
    return NamedNetwork(path.name, checkpoint, checkpoint.source["sha256"])


def random_network(
    backbone: str, *, head: Head = OPAL, num_classes: int = 200, prototypes: int = 5, size: tuple[int, int] = (224, 224)
) -> NamedNetwork:
    """A backbone with random weights, the same every time: what a network answers does not change what it costs.

    Raises:
        UsageError: no such backbone, or a size that it cannot take.
    """
    configured = LINEAR_BASELINE if head == LINEAR else HeadConfig(prototypes_per_class=prototypes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_SEED)
        network = OpalNetwork(NetworkConfig(backbone, num_classes, size, configured)).eval()
    return NamedNetwork(f"{backbone} + {head}", _numbered(network))


def with_linear_head(network: NamedNetwork) -> NamedNetwork:
    """The paper's linear baseline on the same backbone with the same weights; the dense layer's own are random."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_SEED)
        linear = OpalNetwork(replace(network.config, head=LINEAR_BASELINE)).eval()
    linear.backbone.load_state_dict(network.checkpoint.network.backbone.state_dict())
    return NamedNetwork(f"{network.config.backbone} + {LINEAR}", _numbered(linear))


def _numbered(network: OpalNetwork) -> Checkpoint:
    return Checkpoint(network, [f"class {number}" for number in range(network.config.num_classes)])
