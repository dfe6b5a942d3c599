"""Networks to time: a checkpoint's, or a backbone's with random weights, with OPAL's head or the linear one.

Files made only to be timed: the graphs that the exporter writes, without its gates.

Whether a file answers rightly is the exporter's question and takes long; what it costs does not depend on it. The
file's own metadata says that nobody compared it with anything."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import onnx
import torch

from opal_deploy.artifact import onnx_file
from opal_deploy.artifact.metadata import IMAGENET_MEAN, IMAGENET_STD, Metadata
from opal_deploy.bench.measurement import LINEAR, OPAL, Head
from opal_deploy.errors import UsageError
from opal_deploy.export.checkpoint_source import CheckpointSource
from opal_deploy.export.exporter import export
from opal_deploy.export.graph import ExportGraph, trace
from opal_deploy.export.images import Pixels
from opal_deploy.export.options import ExportOptions, plan_targets
from opal_deploy.export.precision import to_bf16, to_fp16
from opal_deploy.export.quantization import to_int8
from opal_deploy.export.tensorrt.options import EngineRequest, choose_engine_targets
from opal_deploy.model import checkpoint as checkpoints
from opal_deploy.model.checkpoint import Checkpoint, build_metadata
from opal_deploy.model.config import LINEAR_BASELINE, HeadConfig, NetworkConfig
from opal_deploy.model.network import OpalNetwork
from opal_deploy.preprocess.resize import normalise
from opal_deploy.runtime.tensorrt.cuda import visible_driver
from opal_deploy.synthetic import example_images

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
        return build_metadata(self.checkpoint)

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


def load_checkpoint_network(path: Path) -> NamedNetwork:
    """A checkpoint's network. Raises CheckpointError, UsageError: see `model.checkpoint.load`."""
    checkpoint = checkpoints.load(path)
    return NamedNetwork(path.name, checkpoint, checkpoint.source["sha256"])


def build_random_network(
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


def replace_head_with_linear(network: NamedNetwork) -> NamedNetwork:
    """The paper's linear baseline on the same backbone with the same weights; the dense layer's own are random."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_SEED)
        linear = OpalNetwork(replace(network.config, head=LINEAR_BASELINE)).eval()
    linear.backbone.load_state_dict(network.checkpoint.network.backbone.state_dict())
    return NamedNetwork(f"{network.config.backbone} + {LINEAR}", _numbered(linear))


def update_batch_norms(network: OpalNetwork, images: Pixels) -> None:
    """Move the batch norms of a random network half way to the statistics of some images, uint8 [N, H0, W0, 3].

    With random weights alone the features of a deep network are nearly constant, all cells tie, and comparing two
    precisions means little; statistics of a few images alone would magnify rounding.
    """
    batch = torch.from_numpy(normalise(images, IMAGENET_MEAN, IMAGENET_STD))
    for module in network.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.momentum = 0.5
    network.train()
    with torch.no_grad():
        network(batch)
    network.eval()


def _numbered(network: OpalNetwork) -> Checkpoint:
    return Checkpoint(network, [f"class {number}" for number in range(network.config.num_classes)])


ONNX_PRECISIONS = ("fp32", "fp16", "bf16", "int8")
# enough for ranges; they change what int8 answers, not what it costs
_CALIBRATION_PICTURES = 8
_SETTLING_PICTURES = 16


def write_onnx(network: NamedNetwork, precision: str, path: Path) -> Metadata:
    """A network as an ONNX file, all outputs that its head explains with; int8 is calibrated on generated creatures.

    Raises:
        UsageError: no such precision of ONNX files, or over ONNX's 2 GB.
    """
    if precision not in ONNX_PRECISIONS:
        raise UsageError(f"precision {precision} in an ONNX file: expected {', '.join(ONNX_PRECISIONS)}")
    metadata = replace(
        network.described,
        outputs=network.graph.output_names,
        exporter={"torch": torch.__version__},
        precision=precision,  # type: ignore[arg-type]  # checked above
        verification={"skipped": "made to be timed"},
    )
    model = network.traced
    if precision == "fp16":
        model = to_fp16(model)
    elif precision == "bf16":
        model = to_bf16(model)
    elif precision == "int8":
        model = to_int8(model, example_images(_CALIBRATION_PICTURES, *metadata.input_size), metadata)
    onnx_file.write_model(model, metadata, path)
    return replace(metadata, file_sha256=onnx_file.embed_digest(path))


def write_engine(checkpoint: Checkpoint, precision: str, folder: Path, *, random: bool) -> Path:
    """A network as an engine for the GPU that is here.

    An engine reproduces its test vectors before it answers anything. With random weights the answers are all alike,
    which no lower precision can reproduce; so they are settled on pictures first.

    Raises:
        UsageError: no GPU, or the builder gave up. MissingExtra: no TensorRT for it.
    """
    driver = visible_driver()
    if not driver.gpus:
        raise UsageError(f"tensorrt: no GPU here ({driver.problem}); engines run on NVIDIA GPUs only")
    request = EngineRequest(choose_engine_targets(None, [], driver), folder, driver)
    if random:
        checkpoint = copy.deepcopy(checkpoint)
        update_batch_norms(
            checkpoint.network, example_images(_SETTLING_PICTURES, *checkpoint.network.config.input_size)
        )
    source = CheckpointSource(checkpoint, folder / "timed.pt")
    targets = plan_targets(source, precision, engines=request)  # type: ignore[arg-type]  # as above
    return export(source, targets, ExportOptions(verify=False)).engines[0].path
