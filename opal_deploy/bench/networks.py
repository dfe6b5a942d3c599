"""PyTorch networks to measure, their sessions, and the temporary ONNX files and engines made from them.

A network comes from a checkpoint, or from a backbone with random weights and one of the heads. Its files are what the
exporter writes, but unverified: verification takes long and does not affect speed.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from opal_deploy.artifact.outputs import Outputs
from opal_deploy.bench.options import SweepOptions
from opal_deploy.errors import StoppedEarly, UsageError, first_line
from opal_deploy.export.builder import choose_engine_targets
from opal_deploy.export.checkpoint_source import CheckpointSource
from opal_deploy.export.exporter import export
from opal_deploy.export.images import Pixels
from opal_deploy.export.options import ExportOptions
from opal_deploy.export.plan import EngineTargets, plan_export
from opal_deploy.model import backbones
from opal_deploy.model.checkpoint import Checkpoint, build_metadata, load
from opal_deploy.model.config import LINEAR_BASELINE, PLAIN_CLASSIFIER, HeadConfig, NetworkConfig
from opal_deploy.model.graph import TYPES, build_inference_graph
from opal_deploy.model.network import OpalNetwork
from opal_deploy.preprocess.resize import normalise
from opal_deploy.runtime.cuda import visible_driver
from opal_deploy.runtime.session import ImageBatch, check_batch
from opal_deploy.runtime.torch_session import torch_device
from opal_deploy.synthetic import example_images

# torch.compile compiles every batch size of every network separately
_MAX_RECOMPILATIONS = 1024


@dataclass(frozen=True)
class NamedNetwork:
    """A network, named by its checkpoint's file or by backbone and head; `sha256` is None for random weights."""

    name: str
    checkpoint: Checkpoint
    sha256: str | None = None


def load_checkpoint_network(path: Path) -> NamedNetwork:
    """Load a checkpoint's network; raises what `model.checkpoint.load` raises."""
    checkpoint = load(path)
    return NamedNetwork(path.name, checkpoint, checkpoint.source["sha256"])


def build_networks(options: SweepOptions) -> Iterator[NamedNetwork]:
    """Return the networks of `--backbone`, each built when needed, since all together may not fit into memory.

    Raises UsageError for a backbone, stride or size that does not fit, before anything is measured.
    """
    size = options.input_size
    heads = {"linear": LINEAR_BASELINE, "plain": PLAIN_CLASSIFIER}
    configs = []
    for name, stride, keep in backbones.list_variants(options.backbone, options.stride or (None,), options.keep_layers):
        backbones.build(name, stride=stride, keep_layers=keep, input_size=size, device="meta").grid(size)
        for head in options.head or ("opal",):
            if head == "plain":
                backbones.build_classifier(name, options.classes, stride=stride, device="meta")
            chosen = heads.get(head) or HeadConfig(prototypes_per_class=options.prototypes)
            configs.append(NetworkConfig(name, options.classes, size, chosen, stride=stride, keep_layers=keep))
    return map(_build, configs)


def build_random_network(backbone: str, num_classes: int = 200, size: tuple[int, int] = (224, 224)) -> NamedNetwork:
    """Build a backbone with the paper's head and reproducible random weights, which do not affect speed."""
    return _build(NetworkConfig(backbone, num_classes, size, HeadConfig()))


def _build(config: NetworkConfig) -> NamedNetwork:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = OpalNetwork(config).eval()
    stride = "" if config.stride is None else f", stride {config.stride}{', all layers' * config.keep_layers}"
    labels = [f"class {number}" for number in range(config.num_classes)]
    return NamedNetwork(f"{config.backbone}{stride} + {config.head.kind}", Checkpoint(network, labels))


def update_batch_norms(network: OpalNetwork, images: Pixels) -> None:
    """Move the batch norms of a random network half way to the statistics of some images, uint8 [N, H0, W0, 3].

    Without this all cells nearly tie, and comparing two precisions means little. The full statistics of a few images
    would magnify rounding.
    """
    batch = torch.from_numpy(normalise(images, network.config.mean, network.config.std))
    for module in network.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.momentum = 0.5
    network.train()
    with torch.no_grad():
        network(batch)
    network.eval()


def write_model(network: NamedNetwork, precision: str, folder: Path, *, engine: bool = False) -> Path:
    """Export a network, unverified, to an ONNX file or to an engine for this machine's GPU; return its path.

    An engine must reproduce its test vectors before it runs. The outputs of random weights are nearly equal, which no
    lower precision reproduces, so their batch norms are adapted to images first.

    Raises UsageError for a precision that the runtime does not have, or an engine without a GPU.
    """
    options = ExportOptions(verify=False, overwrite=True, precision=precision)  # type: ignore[arg-type]  # checked there
    checkpoint, engines = network.checkpoint, None
    if engine:
        driver = visible_driver()
        if not driver.gpus:
            raise UsageError(f"tensorrt: no GPU here ({driver.problem}); engines run on NVIDIA GPUs only")
        engines = EngineTargets(choose_engine_targets(options, driver), folder, driver)
        if network.sha256 is None:
            checkpoint = copy.deepcopy(checkpoint)
            update_batch_norms(checkpoint.network, example_images(16, *checkpoint.network.config.input_size))
    result = export(plan_export(CheckpointSource(checkpoint, folder / "timed.pt"), options, engines))
    return result.engines[0].path if engine else result.onnx[0].path


class TorchGraphSession:
    """A network as it is exported (docs/contract.md), run by PyTorch in any precision, eager or compiled.

    `runtime.torch_session` is float32 and returns more than an exported file does. Compiled, the weights are frozen.
    Convolutions run as NHWC on a GPU. Autotuning is off: it multiplies the minutes of compiling, and its gain was never
    measured. `options` are torch.compile's options in words.
    """

    def __init__(self, checkpoint: Checkpoint, setup: SweepOptions, precision: str) -> None:
        if precision not in TYPES:
            raise UsageError(f"PyTorch has no precision {precision}: expected {', '.join(TYPES)}")
        self._device = torch_device(setup.device)
        self.device, self.precision = str(self._device), precision
        if precision == "tf32" and self.device == "cpu":
            raise UsageError("CPUs have no precision tf32: choose fp32, or --device cuda")
        if setup.threads is not None:
            torch.set_num_threads(setup.threads)
        self.threads, self.metadata = torch.get_num_threads(), build_metadata(checkpoint)
        graph = build_inference_graph(
            checkpoint.network, self.metadata.mean, self.metadata.std, precision, channels_last=self.device != "cpu"
        ).to(self._device)
        self._run: Any = graph
        self._names = graph.output_names
        self._compiled = setup.runtime == ("compile",)
        self._cuda_graphs = setup.cuda_graphs and self._compiled and self.device != "cpu"
        words = "freezing" * self._compiled, "CUDA graphs" * self._cuda_graphs
        self.options = ", ".join(filter(None, words))
        self.description = f"PyTorch {torch.__version__} {setup.runtime[0]} on {self.device}, {precision}"
        if self._compiled:
            # beyond its limits torch.compile would silently run eagerly
            torch.compiler.config.recompile_limit = _MAX_RECOMPILATIONS
            torch.compiler.config.accumulated_recompile_limit = _MAX_RECOMPILATIONS
            # it warns on every machine without a GPU
            logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
            options: dict[str, Any] = {"freezing": True, "triton.cudagraphs": self._cuda_graphs}
            self._run = torch.compile(graph, dynamic=False, options=options)

    def run(self, images: ImageBatch) -> Outputs:
        """Run a batch, as `Session.run` does; UsageError if torch.compile does not work here."""
        check_batch(images, self.metadata)
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = self.precision == "tf32"
        try:
            with torch.inference_mode():
                if self._cuda_graphs:
                    # the outputs of the last batch were copied and may be overwritten
                    torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
                tensors = self._run(torch.from_numpy(images).to(self._device))
                arrays = {name: tensor.cpu().numpy() for name, tensor in zip(self._names, tensors, strict=True)}
        except RuntimeError as error:
            if isinstance(error, torch.cuda.OutOfMemoryError) or "allocate memory" in str(error):
                torch.cuda.empty_cache()
                raise StoppedEarly(f"PyTorch: out of memory on {self.device} at a batch of {len(images)}") from None
            if not self._compiled:
                raise
            # a missing compiler or Triton, or an unsupported operation: many classes, all RuntimeErrors
            raise UsageError(f"torch.compile does not work here: {first_line(error)}") from None
        return Outputs(arrays["logits"], arrays.get("argmax"), arrays.get("scores"))
