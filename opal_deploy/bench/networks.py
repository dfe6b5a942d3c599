"""PyTorch networks to measure, their sessions, and the temporary ONNX files and engines made from them.

A network comes from a checkpoint, or from a backbone with random weights and one of the heads. Its files are what the
exporter writes, but unverified: verification takes long and does not affect speed. Their metadata says so.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import onnx
import torch
from torch import Tensor, nn

from opal_deploy.artifact import onnx_file
from opal_deploy.artifact.metadata import Metadata
from opal_deploy.artifact.outputs import Outputs
from opal_deploy.bench.measurement import OPAL
from opal_deploy.bench.options import ModelOptions
from opal_deploy.errors import StoppedEarly, UsageError, first_line
from opal_deploy.export.builder import choose_engine_targets
from opal_deploy.export.checkpoint_source import CheckpointSource, ExportGraph, trace
from opal_deploy.export.exporter import export
from opal_deploy.export.files import EngineTargets, plan_targets
from opal_deploy.export.images import Pixels
from opal_deploy.export.int8 import to_int8
from opal_deploy.export.options import ExportOptions
from opal_deploy.export.precision import to_bf16, to_fp16
from opal_deploy.model import backbones
from opal_deploy.model import checkpoint as checkpoints
from opal_deploy.model.checkpoint import Checkpoint, build_metadata
from opal_deploy.model.config import LINEAR_BASELINE, PLAIN_CLASSIFIER, HeadConfig, HeadKind, NetworkConfig
from opal_deploy.model.graph import TYPES, build_inference_graph
from opal_deploy.model.network import OpalNetwork
from opal_deploy.preprocess.resize import normalise
from opal_deploy.runtime.cuda import visible_driver
from opal_deploy.runtime.session import ImageBatch, check_batch
from opal_deploy.runtime.torch_session import torch_device
from opal_deploy.synthetic import example_images

if TYPE_CHECKING:
    from opal_deploy.bench.targets import Setup

ONNX_PRECISIONS = ("fp32", "fp16", "bf16", "int8")
_SEED = 0
# enough for ranges; they change int8's outputs, not its speed
_CALIBRATION_IMAGES = 8
_BATCH_NORM_IMAGES = 16
# torch.compile compiles every batch size of every network separately
_MAX_RECOMPILATIONS = 1024


@dataclass(frozen=True)
class NamedNetwork:
    """A network with a name for people.

    Attributes:
        name: the checkpoint's file name, or backbone and head.
        sha256: of the checkpoint; None where the weights are random.
    """

    name: str
    checkpoint: Checkpoint
    sha256: str | None = None

    @property
    def config(self) -> NetworkConfig:
        """Backbone, head, number of classes and input size."""
        return self.checkpoint.network.config

    @cached_property
    def metadata(self) -> Metadata:
        """The checkpoint's metadata."""
        return build_metadata(self.checkpoint)

    @cached_property
    def graph(self) -> ExportGraph:
        """The network as it is exported: uint8 images in, every output that its head has."""
        return ExportGraph(self.checkpoint.network, "uint8", self.metadata.mean, self.metadata.std)

    @cached_property
    def traced(self) -> onnx.ModelProto:
        """The exported graph in ONNX, float32; every precision starts from it, and tracing takes long.

        Raises:
            UsageError: the model exceeds ONNX's 2 GB.
        """
        return trace(self.graph)


def load_checkpoint_network(path: Path) -> NamedNetwork:
    """Load a checkpoint's network.

    Raises:
        CheckpointError, UsageError: see `model.checkpoint.load`.
    """
    checkpoint = checkpoints.load(path)
    return NamedNetwork(path.name, checkpoint, checkpoint.source["sha256"])


def build_networks(options: ModelOptions, head: HeadKind = OPAL) -> Iterator[NamedNetwork]:
    """Return the networks of `--backbone`, each built when needed, since all together may not fit into memory.

    Raises:
        UsageError: no such backbone or stride, layers that cannot be kept, or a size that does not fit; raised by this
            call, before anything is measured.
    """
    variants = list(backbones.list_variants(options.backbone, options.stride or (None,), options.keep_layers))
    for name, stride, keep in variants:
        backbone = backbones.build(name, stride=stride, keep_layers=keep, input_size=options.input_size, device="meta")
        backbone.grid(options.input_size)
        if head == "plain":
            backbones.build_classifier(name, options.classes, stride=stride, keep_layers=keep, device="meta")
    heads = {"linear": LINEAR_BASELINE, "plain": PLAIN_CLASSIFIER}
    config = heads.get(head) or HeadConfig(prototypes_per_class=options.prototypes)
    size = options.input_size
    return (
        build_random_network(name, options.classes, size, config, stride=stride, keep_layers=keep)
        for name, stride, keep in variants
    )


def build_random_network(
    backbone: str,
    num_classes: int = 200,
    size: tuple[int, int] = (224, 224),
    head: HeadConfig | None = None,
    *,
    stride: int | None = None,
    keep_layers: bool = False,
) -> NamedNetwork:
    """Build a backbone with reproducible random weights, which do not affect speed; by default with the paper's head.

    Raises:
        UsageError: no such backbone or stride, or an unsupported input size.
    """
    config = NetworkConfig(backbone, num_classes, size, head or HeadConfig(), stride=stride, keep_layers=keep_layers)
    return _name_network(_build(config))


def _build(config: NetworkConfig) -> OpalNetwork:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_SEED)
        return OpalNetwork(config).eval()


def replace_head_with_linear(network: NamedNetwork) -> NamedNetwork:
    """Return the paper's linear head on the same backbone with the same weights; the dense layer is random."""
    linear = _build(replace(network.config, head=LINEAR_BASELINE))
    linear.backbone.load_state_dict(network.checkpoint.network.backbone.state_dict())
    return _name_network(linear)


def describe_backbone(config: NetworkConfig) -> str:
    """Return the backbone's name, with the stride where it was given: `resnet18, stride 16`, `..., all layers`."""
    stride = "" if config.stride is None else f", stride {config.stride}"
    return f"{config.backbone}{stride}{', all layers' if config.keep_layers else ''}"


def update_batch_norms(network: OpalNetwork, images: Pixels) -> None:
    """Move the batch norms of a random network half way to the statistics of some images, uint8 [N, H0, W0, 3].

    Without this the features of a deep random network are nearly constant, all cells tie, and comparing two precisions
    means little. The full statistics of a few images would magnify rounding.
    """
    batch = torch.from_numpy(normalise(images, network.config.mean, network.config.std))
    for module in network.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.momentum = 0.5
    network.train()
    with torch.no_grad():
        network(batch)
    network.eval()


def _name_network(network: OpalNetwork) -> NamedNetwork:
    labels = [f"class {number}" for number in range(network.config.num_classes)]
    return NamedNetwork(
        f"{describe_backbone(network.config)} + {network.config.head.kind}", Checkpoint(network, labels)
    )


def write_onnx(network: NamedNetwork, precision: str, path: Path) -> Metadata:
    """Write a network as an ONNX file with all outputs of its head; int8 is calibrated on generated creatures.

    Raises:
        UsageError: ONNX files have no such precision, or the model exceeds ONNX's 2 GB.
    """
    if precision not in ONNX_PRECISIONS:
        raise UsageError(f"ONNX files have no precision {precision}: expected {', '.join(ONNX_PRECISIONS)}")
    metadata = replace(
        network.metadata,
        outputs=network.graph.output_names,
        exporter={"torch": torch.__version__, "activations": "uint8"},
        precision=precision,  # type: ignore[arg-type]  # checked above
        verification={"skipped": "made to be timed"},
    )
    model = network.traced
    if precision == "int8":
        model = to_int8(model, example_images(_CALIBRATION_IMAGES, *metadata.input_size), metadata)
    elif precision != "fp32":
        model = {"fp16": to_fp16, "bf16": to_bf16}[precision](model)
    onnx_file.write_model(model, metadata, path)
    return replace(metadata, file_sha256=onnx_file.embed_digest(path))


def write_engine(checkpoint: Checkpoint, precision: str, folder: Path, *, random: bool) -> Path:
    """Write a network as an engine for this machine's GPU and return its path.

    An engine must reproduce its test vectors before it runs. The outputs of random weights are nearly equal, which no
    lower precision reproduces, so their batch norms are adapted to images first.

    Args:
        precision: of the ONNX file that the engine is built from.

    Raises:
        UsageError: no GPU, or the builder failed.
        MissingExtra: no TensorRT for the GPU.
    """
    driver = visible_driver()
    if not driver.gpus:
        raise UsageError(f"tensorrt: no GPU here ({driver.problem}); engines run on NVIDIA GPUs only")
    options = ExportOptions(verify=False, overwrite=True)
    engines = EngineTargets(choose_engine_targets(options, driver), folder, driver)
    if random:
        checkpoint = copy.deepcopy(checkpoint)
        update_batch_norms(
            checkpoint.network, example_images(_BATCH_NORM_IMAGES, *checkpoint.network.config.input_size)
        )
    source = CheckpointSource(checkpoint, folder / "timed.pt")
    targets = plan_targets(source, precision, engines=engines)  # type: ignore[arg-type]  # as above
    return export(source, targets, options).engines[0].path


class TorchGraphSession:
    """A network as it is exported (docs/contract.md), run by PyTorch in any precision, eager or compiled.

    `runtime.torch_session` is float32 and returns more than an exported file does.

    Attributes:
        compile_options: torch.compile's options in words; empty without it.
    """

    def __init__(self, checkpoint: Checkpoint, setup: Setup) -> None:
        """Put a copy of a network on a device.

        Compiled, it has frozen weights and runs through torch.compile once per batch size; on a GPU, on request, with
        its kernels recorded as CUDA graphs.

        Raises:
            UsageError: no such device or precision, or torch.compile does not work here.
        """
        precision = setup.precision or "fp32"
        if precision not in TYPES:
            raise UsageError(f"PyTorch has no precision {precision}: expected {', '.join(TYPES)}")
        self._device = torch_device(setup.device)
        self.device = str(self._device)
        if precision == "tf32" and self._device.type == "cpu":
            raise UsageError("CPUs have no precision tf32: choose fp32, or --device cuda")
        if setup.threads is not None:
            torch.set_num_threads(setup.threads)
        self.threads = torch.get_num_threads() if self._device.type == "cpu" else None
        self.metadata: Metadata = build_metadata(checkpoint)
        self._tf32 = precision == "tf32"
        graph = build_inference_graph(
            checkpoint.network, self.metadata.mean, self.metadata.std, precision, channels_last=setup.channels_last
        ).to(self._device)
        self._names = graph.output_names
        self._compiled = setup.runtime == "compile"
        self.cuda_graphs = setup.cuda_graphs and self._compiled and self._device.type == "cuda"
        self.compile_options = f"freezing{', CUDA graphs' * self.cuda_graphs}" * self._compiled
        self._run: Any = _compile_graph(graph, cuda_graphs=self.cuda_graphs) if self._compiled else graph
        # page-locked arrays that outputs are copied to, by name and shape
        self._host: dict[tuple[str, torch.Size], Tensor] = {}
        self.description = f"PyTorch {torch.__version__} {setup.runtime} on {self.device}, {precision}"

    def run(self, images: ImageBatch) -> Outputs:
        """Run a batch, as `Session.run` does.

        Raises:
            StoppedEarly: memory is full.
            UsageError: torch.compile does not work here.
        """
        check_batch(images, self.metadata)
        with torch.inference_mode(), self._global_settings(len(images)):
            if self.cuda_graphs:
                # the outputs of the last batch were copied and may be overwritten
                torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
            # from page-locked memory the copy is queued; from other memory it has been read when the call returns
            return self._to_host(self._run(torch.from_numpy(images).to(self._device, non_blocking=True)))

    def register_buffer(self, address: int, size: int) -> bool:
        """Page-lock memory, as `PinningSession.register_buffer` does; False on the CPU."""
        if self._device.type == "cpu":
            return False
        with torch.cuda.device(self._device):
            runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            registered = int(runtime.cudaHostRegister(address, size, 0)) == 0
            if not registered:
                # CUDA reports a failure again on the next call; this one is handled here
                with suppress(RuntimeError):
                    torch.zeros(1, device=self._device)
            return registered

    def unregister_buffer(self, address: int) -> None:
        """Unlock memory, as `PinningSession.unregister_buffer` does."""
        with torch.cuda.device(self._device):
            torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]

    def _to_host(self, tensors: tuple[Tensor, ...]) -> Outputs:
        named = dict(zip(self._names, tensors, strict=True))
        if self._device.type == "cpu":
            arrays = {name: tensor.numpy() for name, tensor in named.items()}
        else:
            copies = {name: self._pinned_copy(name, tensor) for name, tensor in named.items()}
            torch.cuda.current_stream(self._device).synchronize()
            # copies, since the page-locked arrays are reused
            arrays = {name: tensor.numpy().copy() for name, tensor in copies.items()}
        return Outputs(arrays["logits"], arrays.get("argmax"), arrays.get("scores"))

    def _pinned_copy(self, name: str, tensor: Tensor) -> Tensor:
        """Queue the copy of an output into page-locked memory."""
        key = name, tensor.shape
        if key not in self._host:
            self._host[key] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return self._host[key].copy_(tensor, non_blocking=True)

    @contextmanager
    def _global_settings(self, batch: int) -> Iterator[None]:
        """Apply this session's process-wide PyTorch settings, and translate its errors."""
        torch.backends.cuda.matmul.allow_tf32 = self._tf32
        torch.backends.cudnn.allow_tf32 = self._tf32
        try:
            yield
        except torch.cuda.OutOfMemoryError:
            torch.cuda.empty_cache()
            raise StoppedEarly(f"PyTorch: out of memory on {self.device} at a batch of {batch}") from None
        except RuntimeError as error:
            if "allocate memory" in str(error):
                raise StoppedEarly(f"PyTorch: out of memory at a batch of {batch}") from None
            if not self._compiled:
                raise
            # a missing compiler or Triton, or an unsupported operation: many classes, all RuntimeErrors
            raise UsageError(f"torch.compile does not work here: {first_line(error)}") from None


def _compile_graph(graph: nn.Module, *, cuda_graphs: bool) -> Any:
    """Return the graph, compiled by its first call with each batch size; called in `torch.inference_mode()`.

    Autotuning is off: it multiplies the minutes of compiling, and its gain was never measured on a GPU here.
    """
    # beyond its limits torch.compile would silently run eagerly
    torch.compiler.config.recompile_limit = _MAX_RECOMPILATIONS
    torch.compiler.config.accumulated_recompile_limit = _MAX_RECOMPILATIONS
    # it warns on every machine without a GPU
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    return torch.compile(graph, dynamic=False, options={"freezing": True, "triton.cudagraphs": cuda_graphs})
