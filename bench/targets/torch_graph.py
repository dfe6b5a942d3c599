"""The exported graph itself in PyTorch, eager or compiled: what makes a comparison with other runtimes fair.

`runtime.torch_session` normalises with numpy and returns more than the graph does; here uint8 pictures go in, they are
normalised on the device, and the contract's outputs come out, as in every exported file.
"""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from opal_deploy.artifact.metadata import Metadata
from opal_deploy.artifact.outputs import Outputs
from opal_deploy.errors import StoppedEarly, UsageError, first_line
from opal_deploy.export.graph import ExportGraph
from opal_deploy.model.checkpoint import Checkpoint, build_metadata
from opal_deploy.runtime.session import BatchTimes, ImageBatch, check_batch
from opal_deploy.runtime.torch_session import torch_device

PRECISIONS = ("fp32", "tf32", "fp16", "bf16")
_TYPES = {"fp32": torch.float32, "tf32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
# a sweep compiles once a batch size, and one process may measure many networks; beyond its limit torch.compile
# silently runs eagerly
_RECOMPILATIONS = 1024


class TorchGraphSession:
    """A network as it is exported, run by PyTorch.

    Attributes:
        metadata: of the checkpoint.
        description: engine, device, threads, precision.
        device: `cpu` or `cuda:N`.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        device: str = "auto",
        threads: int | None = None,
        precision: str = "fp32",
        channels_last: bool = False,
        compiled: bool = False,
    ) -> None:
        """Put a copy of a network on a device.

        Args:
            checkpoint: the model; it is left as it is.
            device: `auto`, `cpu`, `cuda` or `cuda:N`.
            threads: of PyTorch in this process; None leaves them.
            precision: fp32, tf32 (GPUs only), fp16 or bf16: of the body, as the exporter casts it.
            channels_last: lay convolutions out as NHWC.
            compiled: by torch.compile, for each batch size anew.

        Raises:
            UsageError: no such device or precision, or torch.compile cannot work here.
        """
        if precision not in PRECISIONS:
            raise UsageError(f"precision {precision} in PyTorch: expected {', '.join(PRECISIONS)}")
        self._device = torch_device(device)
        self.device = "cpu" if self._device.type == "cpu" else f"cuda:{self._device.index or 0}"
        if precision == "tf32" and self._device.type == "cpu":
            raise UsageError("precision tf32: CPUs have none; choose fp32, or --device cuda")
        if threads is not None:
            torch.set_num_threads(threads)
        self.threads = torch.get_num_threads() if self._device.type == "cpu" else None
        self.metadata: Metadata = build_metadata(checkpoint)
        self._tf32 = precision == "tf32"
        graph = _build_graph(checkpoint, self.metadata, precision, channels_last=channels_last).to(self._device)
        self._names = graph.graph.output_names
        self._run: Any = torch.compile(graph, dynamic=False) if compiled else graph
        self._compiled = compiled
        if compiled:
            torch._dynamo.config.recompile_limit = _RECOMPILATIONS
            torch._dynamo.config.accumulated_recompile_limit = _RECOMPILATIONS
        how = "compiled" if compiled else "eager"
        layout = "NHWC" if channels_last else "NCHW"
        note = f", {self.threads} threads" if self.threads else ""
        self.description = f"PyTorch {torch.__version__} {how} on {self.device}{note}, {precision}, {layout}"

    def run(self, images: ImageBatch) -> Outputs:
        """See `Session.run`.

        Raises:
            StoppedEarly: memory is full. UsageError: torch.compile cannot work here.
        """
        check_batch(images, self.metadata)
        with torch.inference_mode(), self._failures(len(images)):
            return self._to_host(self._run(torch.from_numpy(images).to(self._device)))

    def run_staged(self, images: ImageBatch) -> tuple[Outputs, BatchTimes]:
        """See `StagedSession.run_staged`; on a GPU by CUDA events."""
        check_batch(images, self.metadata)
        with torch.inference_mode(), self._failures(len(images)):
            if self._device.type == "cpu":
                start = time.perf_counter()
                outputs = self._to_host(self._run(torch.from_numpy(images)))
                return outputs, BatchTimes(None, time.perf_counter() - start, None)
            return self._staged_on_gpu(images)

    def _staged_on_gpu(self, images: ImageBatch) -> tuple[Outputs, BatchTimes]:
        with torch.cuda.device(self._device):
            events = [torch.cuda.Event(enable_timing=True) for _ in range(4)]  # type: ignore[no-untyped-call]
            events[0].record()
            feed = torch.from_numpy(images).to(self._device)
            events[1].record()
            found = self._run(feed)
            events[2].record()
            outputs = self._to_host(found)
            events[3].record()
            events[3].synchronize()
        # `elapsed_time` counts milliseconds
        copied, computed, returned = (a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(events))
        return outputs, BatchTimes(copied, computed, returned)

    def _to_host(self, found: tuple[Tensor, ...]) -> Outputs:
        arrays = {name: tensor.cpu().numpy() for name, tensor in zip(self._names, found, strict=True)}
        return Outputs(arrays["logits"], arrays.get("argmax"), arrays.get("scores"))

    @contextmanager
    def _failures(self, batch: int) -> Iterator[None]:
        """Settings that are the whole process's, for this session; and failures in our words."""
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
            # a compiler or Triton that is missing, or an operation that it refuses: many classes, all RuntimeErrors
            raise UsageError(f"torch.compile cannot work here: {first_line(error)}") from None


class _ServedGraph(nn.Module):
    """An export graph without the tensors that only name the body's ends in a file."""

    def __init__(self, graph: ExportGraph) -> None:
        super().__init__()
        self.graph = graph
        self.count = len(graph.output_names)

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        found: tuple[Tensor, ...] = self.graph(images)[: self.count]
        return found


class _Body(nn.Module):
    """A backbone in its precision and layout, whatever comes in; out comes what the exporter's cast gives out."""

    def __init__(self, backbone: nn.Module, precision: str, *, channels_last: bool) -> None:
        super().__init__()
        self.layout = torch.channels_last if channels_last else torch.contiguous_format
        self.dtype = _TYPES[precision]
        # bfloat16 has too few digits for the projection: see `export.precision`
        self.returned = torch.float32 if precision == "bf16" else self.dtype
        self.backbone = backbone.to(self.dtype).to(memory_format=self.layout)

    def forward(self, images: Tensor) -> Tensor:
        # uint8 pictures are NHWC: permuted to NCHW they stay so in memory, unless told otherwise
        features: Tensor = self.backbone(images.to(self.dtype).contiguous(memory_format=self.layout))
        return features.to(self.returned)


def _build_graph(checkpoint: Checkpoint, metadata: Metadata, precision: str, *, channels_last: bool) -> _ServedGraph:
    network = copy.deepcopy(checkpoint.network).eval()
    body = _Body(network.backbone, precision, channels_last=channels_last)
    network.head.projection.to(body.returned).to(memory_format=body.layout)
    network.backbone = body  # type: ignore[assignment]  # only `forward` is called from here on
    return _ServedGraph(ExportGraph(network, "uint8", metadata.mean, metadata.std)).eval()
