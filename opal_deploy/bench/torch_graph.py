"""The exported graph in PyTorch, eager or compiled, for a fair comparison with other runtimes.

`runtime.torch_session` is float32 and returns more than the graph does. This session returns the outputs of an exported
file (docs/contract.md), in any precision.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor

from opal_deploy.artifact.metadata import Metadata
from opal_deploy.artifact.outputs import Outputs
from opal_deploy.errors import StoppedEarly, UsageError, first_line
from opal_deploy.model.checkpoint import Checkpoint, build_metadata
from opal_deploy.model.graph import TYPES, build_inference_graph
from opal_deploy.runtime.compiled_session import compile_graph
from opal_deploy.runtime.session import ImageBatch, check_batch
from opal_deploy.runtime.torch_session import torch_device

PRECISIONS = tuple(TYPES)


class TorchGraphSession:
    """A network as it is exported, run by PyTorch.

    Attributes:
        metadata: the checkpoint's metadata.
        description: library, device, threads and precision.
        device: `cpu` or `cuda:N`.
        cuda_graphs: whether kernels are recorded as CUDA graphs.
        compile_options: torch.compile's options in words; empty without it.
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
        cuda_graphs: bool = False,
    ) -> None:
        """Put a copy of a network on a device.

        Args:
            checkpoint: the model; it is copied, not changed.
            device: `auto`, `cpu`, `cuda` or `cuda:N`.
            threads: PyTorch's threads in this process; None leaves their number.
            precision: fp32, tf32 (GPUs only), fp16 or bf16, of the backbone, as the exporter casts it.
            channels_last: run convolutions as NHWC.
            compiled: run torch.compile as `infer --runtime compiled` does, once per batch size.
            cuda_graphs: record torch.compile's kernels as CUDA graphs; only on a GPU.

        Raises:
            UsageError: no such device or precision, or torch.compile does not work here.
        """
        if precision not in PRECISIONS:
            raise UsageError(f"PyTorch has no precision {precision}: expected {', '.join(PRECISIONS)}")
        self._device = torch_device(device)
        self.device = "cpu" if self._device.type == "cpu" else f"cuda:{self._device.index or 0}"
        if precision == "tf32" and self._device.type == "cpu":
            raise UsageError("CPUs have no precision tf32: choose fp32, or --device cuda")
        if threads is not None:
            torch.set_num_threads(threads)
        self.threads = torch.get_num_threads() if self._device.type == "cpu" else None
        self.metadata: Metadata = build_metadata(checkpoint)
        self._tf32 = precision == "tf32"
        graph = build_inference_graph(
            checkpoint.network, self.metadata.mean, self.metadata.std, precision, channels_last=channels_last
        ).to(self._device)
        self._names = graph.output_names
        self.cuda_graphs = cuda_graphs and compiled and self._device.type == "cuda"
        self.compile_options = f"freezing{', CUDA graphs' * self.cuda_graphs}" * compiled
        self._run: Any = compile_graph(graph, cuda_graphs=self.cuda_graphs) if compiled else graph
        self._compiled = compiled
        # page-locked arrays that outputs are copied to, by name and shape
        self._host: dict[tuple[str, torch.Size], Tensor] = {}
        how = "compiled" if compiled else "eager"
        layout = "NHWC" if channels_last else "NCHW"
        note = f", {self.threads} threads" if self.threads else ""
        self.description = f"PyTorch {torch.__version__} {how} on {self.device}{note}, {precision}, {layout}"

    def run(self, images: ImageBatch) -> Outputs:
        """Run a batch, as `Session.run` does.

        Raises:
            StoppedEarly: memory is full.
            UsageError: torch.compile does not work here.
        """
        check_batch(images, self.metadata)
        with torch.inference_mode(), self._global_settings(len(images)):
            return self._to_host(self._run(self._to_device(images)))

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

    def _to_device(self, images: ImageBatch) -> Tensor:
        if self.cuda_graphs:
            # the outputs of the last batch were copied and may be overwritten
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        # from page-locked memory the copy is queued; from other memory it has been read when the call returns
        return torch.from_numpy(images).to(self._device, non_blocking=True)

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
