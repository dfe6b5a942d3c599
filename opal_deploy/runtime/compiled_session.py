"""Sessions on a checkpoint that torch.compile turned into kernels, for machines without TensorRT.

Weights are frozen into the code, so that batch norms fold into convolutions; convolutions are NHWC; normalisation is
part of the graph. Compiling for another batch size takes a minute, so batches are filled up to a compiled size. A size
answers only after its outputs on the test images were compared with those of the eager float32 network.

The session on a GPU was never run on hardware when this was written. Its batches travel through `runtime.pipeline`:
PyTorch computes on the pipeline's stream, in its device memory.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from opal_deploy.artifact.metadata import Metadata, Precision
from opal_deploy.artifact.outputs import INPUT, Outputs, TensorSpec, tensor_specs
from opal_deploy.errors import OpalError, StoppedEarly, UsageError, VerificationError, first_line
from opal_deploy.model import checkpoint as checkpoints
from opal_deploy.model.checkpoint import Checkpoint
from opal_deploy.model.graph import build_inference_graph
from opal_deploy.runtime.buffers import BufferSet
from opal_deploy.runtime.cuda import Cuda, Stream
from opal_deploy.runtime.diagnostics import find_compile_problem
from opal_deploy.runtime.gates import GATES
from opal_deploy.runtime.pipeline import PipelineSession
from opal_deploy.runtime.session import ImageBatch, check_batch
from opal_deploy.runtime.torch_session import TorchSession, to_tensor, torch_device, translate_error
from opal_deploy.runtime.verification import compare_outputs
from opal_deploy.synthetic import test_vector_images

# uint8 [N, H0, W0, 3] to the model's outputs, N a compiled size
Program = Callable[[Tensor], tuple[Tensor, ...]]
# every batch size of every network is compiled separately
_MAX_RECOMPILATIONS = 1024


def compile_graph(graph: nn.Module, *, cuda_graphs: bool = False) -> Program:
    """Return the graph, compiled by its first call with each batch size, its weights frozen.

    The program must be called in `torch.inference_mode()`. Autotuning is off: it multiplies the minutes of compiling,
    and its gain was never measured on a GPU here. With `cuda_graphs` torch.compile records CUDA graphs, which only the
    thread that compiled can launch.
    """
    # beyond its limits torch.compile would silently run eagerly
    torch._dynamo.config.recompile_limit = _MAX_RECOMPILATIONS
    torch._dynamo.config.accumulated_recompile_limit = _MAX_RECOMPILATIONS
    # it warns on every machine without a GPU
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    options: dict[str, Any] = {"freezing": True, "triton.cudagraphs": cuda_graphs}
    program: Program = torch.compile(graph, dynamic=False, options=options)
    return program


class CompiledSession:
    """A compiled checkpoint on the CPU, float32; `open_compiled_session` makes one. Kernels belong to a batch size."""

    batch_invariant = False
    default_precision: Precision = "fp32"

    def __init__(
        self,
        source: Path | Checkpoint,
        *,
        device: str = "cpu",
        threads: int | None = None,
        precision: Precision | None = None,
    ) -> None:
        """Load a checkpoint and run the eager network on the test images; batch sizes are compiled when added.

        Args:
            source, device, threads: see `TorchSession`; a device as the class requires.
            precision: precision of the backbone, as the exporter casts it: fp32, fp16 or bf16; None: the class's
                default.

        Raises:
            CheckpointError: not a checkpoint.
            UsageError: the requested GPU is missing, or nothing can be compiled here.
        """
        checkpoint = source if isinstance(source, Checkpoint) else checkpoints.load(source)
        self._origin = str(source) if isinstance(source, Path) else str(checkpoint.source.get("file", "the checkpoint"))
        self._device = torch_device(device)
        problem, advice = find_compile_problem(gpu=self._device.type == "cuda")
        if problem:
            raise self._unusable(f"{problem}: {advice}")
        precision = precision or self.default_precision
        eager = TorchSession(checkpoint, device=device, threads=threads)
        self.metadata: Metadata = replace(eager.metadata, precision=precision)
        self._reference = eager.run_reference(test_vector_images(*self.metadata.input_size))
        graph = build_inference_graph(
            checkpoint.network, self.metadata.mean, self.metadata.std, precision, channels_last=True
        )
        self._graph = compile_graph(graph.to(self._device))
        self._programs: dict[int, Program] = {}
        note = f", {torch.get_num_threads()} threads" if self._device.type == "cpu" else ""
        self.description = f"PyTorch {torch.__version__} compiled on {self._device}{note}, {precision}"

    def add_batch_size(self, size: int) -> None:
        """See `PaddingSession.add_batch_size`; compiles and checks a new size.

        Raises:
            UsageError: torch.compile does not work here.
            VerificationError: the compiled network's outputs differ too much from the eager one's.
        """
        if size not in self._programs:
            program = self._compile(size)
            self._verify(program, size)
            self._programs[size] = program

    def run(self, images: ImageBatch) -> Outputs:
        """See `Session.run`; without an added batch size, the first batch's is added.

        Raises:
            UsageError, VerificationError: see `add_batch_size`.
        """
        check_batch(images, self.metadata)
        self._ensure_size(len(images))
        largest, parts = max(self._programs), []
        for start in range(0, len(images), largest):
            part = images[start : start + largest]
            rows = _choose_size(self._programs, len(part))
            blank = np.zeros((rows - len(part), *images.shape[1:]), np.uint8)
            filled = np.concatenate([part, blank]) if len(blank) else part
            parts.append(self._compute(self._programs[rows], filled).rows(0, len(part)))
        return Outputs.concatenate(parts)

    def _ensure_size(self, images: int) -> None:
        if not self._programs:
            self.add_batch_size(images)

    def _compute(self, program: Program, images: ImageBatch) -> Outputs:
        """Run a program on a batch of its size and wait for the outputs."""
        try:
            with torch.inference_mode():
                tensors = program(to_tensor(images).to(self._device))
                arrays = [tensor.cpu().numpy() for tensor in tensors]
        except RuntimeError as error:
            raise translate_error(error, len(images)) from None
        return Outputs.from_arrays(dict(zip(self.metadata.outputs, arrays, strict=True)))

    def _unusable(self, reason: str) -> UsageError:
        return UsageError(
            f"{self._origin}: cannot be compiled here: {reason}; or run it with --runtime torch, or export it "
            "(opal-deploy export) and run the file"
        )

    def _compile(self, size: int) -> Program:
        """Return the program of a batch size, compiled and run once."""
        with self._translate_compile_errors(size):
            self._warm_up(size)
        return self._graph

    def _warm_up(self, size: int) -> Tensor:
        """Compile the graph for a batch size by running it; return the blank images that it ran on."""
        with torch.inference_mode():
            images = torch.zeros(size, *self.metadata.input_size, 3, dtype=torch.uint8, device=self._device)
            self._graph(images)
        return images

    @contextlib.contextmanager
    def _translate_compile_errors(self, size: int) -> Iterator[None]:
        try:
            yield
        except OpalError:
            raise
        except Exception as error:  # torch.compile raises many classes, its compilers' among them
            translated = translate_error(error, size) if isinstance(error, RuntimeError) else error
            raise (translated if isinstance(translated, StoppedEarly) else self._unusable(first_line(error))) from None

    def _verify(self, program: Program, size: int) -> None:
        """Compare the outputs on the test images, repeated to fill whole batches, with the eager network's."""
        images = self._reference.images
        filled = images[np.arange(-(-len(images) // size) * size) % len(images)]
        parts = [self._compute(program, filled[start : start + size]) for start in range(0, len(filled), size)]
        outputs = Outputs.concatenate(parts).rows(0, len(images))
        gate = GATES[self.metadata.precision].relaxed_for_machine()
        comparison = compare_outputs(self._reference, outputs, self.metadata, gate)
        if not comparison:
            raise VerificationError(
                f"{self._origin}: compiled for batches of {size}, {self.description} does not reproduce the eager "
                f"network: {'; '.join(comparison.failures)}; run it with --runtime torch, or export it"
            )


class RecordedProgram:
    """A program whose kernels are launched as one CUDA graph.

    torch.compile's own CUDA graphs would not do: they belong to the thread that compiled, and sessions run in another.
    """

    def __init__(self, program: Program, images: Tensor) -> None:
        """Record the kernels that run for images of this shape; the program must have run before."""
        self._images = images.clone()
        self._graph = torch.cuda.CUDAGraph()
        # errors of other threads are not this recording's
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            self._outputs = program(self._images)

    def __call__(self, images: Tensor) -> tuple[Tensor, ...]:
        """Queue copy and kernels; the next call overwrites the outputs."""
        self._images.copy_(images)
        self._graph.replay()
        return self._outputs


class ProgramKernels:
    """The `Kernels` of compiled programs, one for each batch size."""

    def __init__(self, programs: dict[int, Program], specs: dict[str, TensorSpec], index: int) -> None:
        """Queue nothing yet; more programs may be added later."""
        self._programs, self._specs, self._index = programs, specs, index

    @property
    def max_rows(self) -> int:
        return max(self._programs)

    def rows(self, images: int) -> int:
        return _choose_size(self._programs, images)

    def capacity(self, rows: int) -> int:
        return rows

    def enqueue(self, buffers: BufferSet, rows: int, stream: Stream) -> None:
        program, device = self._programs[rows], dict(buffers.device)

        def compute() -> None:
            # made in inference mode like the tensors compiled for: others would be compiled for anew
            with torch.inference_mode():
                tensors = {name: self._view(address, rows, name) for name, address in device.items()}
                outputs = program(tensors.pop(INPUT))
                for tensor, output in zip(tensors.values(), outputs, strict=True):
                    tensor.copy_(output)

        try:
            self._queue(compute, stream)
        except RuntimeError as error:
            raise translate_error(error, rows) from None

    def release_memory(self) -> None:
        """See `Kernels.release_memory`; the programs' own memory stays."""
        torch.cuda.empty_cache()

    def close(self) -> None:
        self._programs.clear()

    def _queue(self, work: Callable[[], None], stream: Stream) -> None:
        ours = torch.cuda.ExternalStream(int(stream), device=self._index)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(ours):
            work()

    def _view(self, address: int, rows: int, name: str) -> Tensor:
        """Return a tensor over the device memory of a batch."""
        shape, dtype = self._specs[name]
        interface = {"shape": (rows, *shape), "typestr": dtype.str, "data": (address, False), "version": 3}
        holder = type("DeviceMemory", (), {"__cuda_array_interface__": interface})()
        tensor: Tensor = torch.as_tensor(holder, device=f"cuda:{self._index}")
        return tensor


class CudaCompiledSession(PipelineSession, CompiledSession):
    """A compiled checkpoint on a GPU, by default float16; `open_compiled_session` makes one."""

    default_precision: Precision = "fp16"

    def __init__(self, source: Path | Checkpoint, *, cuda_graphs: bool = False, **options: Any) -> None:
        """Load a checkpoint; see `CompiledSession`.

        With `cuda_graphs` all kernels of a batch are launched as one CUDA graph, recorded once per batch size.

        Raises:
            MissingExtra: cuda-bindings, which PyTorch brings for GPUs, is not installed.
        """
        super().__init__(source, **options)
        self._cuda_graphs = cuda_graphs
        cuda = Cuda(self._device.index, "gpu")
        kernels = ProgramKernels(self._programs, tensor_specs(self.metadata), cuda.index)
        with cuda.activated():
            self._start_pipeline(cuda, kernels, cuda.create_stream())
        if cuda_graphs:
            self.description += ", CUDA graphs"

    def _prepare(self, images: ImageBatch) -> None:
        super()._prepare(images)
        self._ensure_size(len(images))

    def _compile(self, size: int) -> Program:
        with self._translate_compile_errors(size), torch.cuda.device(self._device):
            images = self._warm_up(size)
            if not self._cuda_graphs:
                return self._graph
            with torch.inference_mode():
                return RecordedProgram(self._graph, images)


def _choose_size(sizes: dict[int, Any], images: int) -> int:
    """Return the smallest size that has room for the images; there must be one."""
    return min(size for size in sizes if size >= images)


def open_compiled_session(
    source: Path | Checkpoint,
    *,
    device: str = "auto",
    threads: int | None = None,
    precision: Precision | None = None,
    cuda_graphs: bool = False,
) -> CompiledSession:
    """Return the session of a device: see `CompiledSession`, and `CudaCompiledSession` for `cuda_graphs`."""
    if torch_device(device).type == "cpu":
        return CompiledSession(source, device="cpu", threads=threads, precision=precision)
    return CudaCompiledSession(source, device=device, threads=threads, precision=precision, cuda_graphs=cuda_graphs)
