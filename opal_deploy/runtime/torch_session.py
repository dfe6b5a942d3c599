"""A session on a checkpoint in PyTorch: the reference that every other session is compared with."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from opal_deploy.artifact.metadata import Metadata
from opal_deploy.artifact.outputs import OUTPUT_SPECS, FloatArray, Outputs
from opal_deploy.artifact.test_vectors import Reference, find_top2_margin
from opal_deploy.errors import OutOfMemory, StoppedEarly, UsageError, first_line
from opal_deploy.model import checkpoint as checkpoints
from opal_deploy.model.checkpoint import Checkpoint
from opal_deploy.model.head import HeadOutputs
from opal_deploy.runtime.devices import find_gpu_problem, parse_device
from opal_deploy.runtime.session import ImageBatch, check_batch


class TorchSession:
    """A checkpoint in PyTorch, float32, TF32 off."""

    def __init__(self, source: Path | Checkpoint, *, device: str = "auto", threads: int | None = None) -> None:
        """Load a checkpoint; `threads` of PyTorch in this process, None leaves their number.

        Raises:
            CheckpointError: not a checkpoint.
            UsageError: the requested GPU is missing.
        """
        checkpoint = source if isinstance(source, Checkpoint) else checkpoints.load(source)
        self.metadata: Metadata = checkpoints.build_metadata(checkpoint)
        self._device = torch_device(device)
        if threads is not None:
            torch.set_num_threads(threads)
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False
        self._network = checkpoint.network.to(self._device).eval()
        self._mean, self._std = (
            torch.tensor(values, dtype=torch.float32, device=self._device).reshape(1, 3, 1, 1)
            for values in (self.metadata.mean, self.metadata.std)
        )
        note = f", {torch.get_num_threads()} threads" if self._device.type == "cpu" else ""
        self.device = str(self._device)
        self.description = f"PyTorch {torch.__version__} on {self._device}{note}, fp32"

    def run(self, images: ImageBatch) -> Outputs:
        """See `Session.run`."""
        check_batch(images, self.metadata)
        return to_outputs(self._explain(self._normalise, images))

    @property
    def float32_runs(self) -> tuple[Callable[[ImageBatch], Outputs], ...]:
        """`run`, and runs whose convolutions sum in other orders; their spread shows float32's error on a processor."""
        return self.run, self._run_channels_last, self._run_without_onednn

    def _run_channels_last(self, images: ImageBatch) -> Outputs:
        self._network.to(memory_format=torch.channels_last)
        try:
            return self.run(images)
        finally:
            self._network.to(memory_format=torch.contiguous_format)

    def _run_without_onednn(self, images: ImageBatch) -> Outputs:
        # `flags`, the context manager, warns about a setting for Intel GPUs
        set_flags: Any = torch.backends.mkldnn.set_flags
        before, *_ = set_flags(_enabled=False)
        try:
            return self.run(images)
        finally:
            set_flags(_enabled=before)

    def run_float64(self, images: ImageBatch) -> Outputs:
        """Run in float64, with float64 logits and scores; the difference from `run` is the error of float32."""
        self._network.double()
        try:
            tensors = self._explain(functools.partial(self._normalise, dtype=torch.float64), images)
        finally:
            # exact: these numbers came from float32
            self._network.float()
        named = _named(tensors, attention=False)
        arrays: dict[str, Any] = {name: tensor.cpu().numpy() for name, tensor in named.items()}
        return Outputs(**arrays)

    def run_reference(self, images: ImageBatch) -> Reference:
        """Return the outputs with the relative lead of each channel's best cell over its second."""
        check_batch(images, self.metadata)
        tensors = self._explain(self._normalise, images)
        attention = tensors.attention
        top2_margin = None if attention is None else find_top2_margin(attention.flatten(2).cpu().numpy())
        return Reference(images, to_outputs(tensors), top2_margin)

    def run_normalised(self, images: FloatArray) -> Outputs:
        """Run float32 [N, 3, H0, W0], already normalised; the outputs hold the attention maps too."""
        return to_outputs(self._explain(self._upload, images), attention=True)

    def run_with_attention(self, images: ImageBatch) -> Outputs:
        """See `AttentionSession.run_with_attention`."""
        return to_outputs(self._explain(self._normalise, images), attention=True)

    def _explain(self, prepare: Callable[[NDArray[Any]], torch.Tensor], images: NDArray[Any]) -> HeadOutputs:
        """Run the network on `prepare(images)`: float32 [N, 3, H0, W0] on the device, normalised."""
        try:
            with torch.inference_mode():
                return self._network.explain(prepare(images))
        except RuntimeError as error:
            raise _translate_error(error, len(images)) from None

    def _upload(self, images: NDArray[Any]) -> torch.Tensor:
        return to_tensor(images).to(self._device)

    def _normalise(self, images: ImageBatch, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return the images on the device, normalised there by the arithmetic of `preprocess.resize.normalise`."""
        pixels = self._upload(images).permute(0, 3, 1, 2).to(dtype, memory_format=torch.contiguous_format)
        # a tensor, since CUDA multiplies by the rounded reciprocal of a number
        return pixels.div_(pixels.new_tensor(255.0)).sub_(self._mean.to(dtype)).div_(self._std.to(dtype))


def to_tensor(array: NDArray[Any]) -> torch.Tensor:
    """Return a tensor of an array, without a copy where PyTorch can share the memory."""
    return torch.from_numpy(np.require(array, requirements=["C", "W"]))


def _translate_error(error: RuntimeError, batch: int) -> Exception:
    """Return OutOfMemory or StoppedEarly for full memory or a lost device; any other error is returned as it is."""
    line = first_line(error)
    if isinstance(error, torch.OutOfMemoryError) or "allocate memory" in line:
        return OutOfMemory(f"PyTorch failed on a batch of {batch} ({line}); use a smaller --batch")
    if "CUDA error" in line:
        return StoppedEarly(f"PyTorch failed on a batch of {batch} ({line}); see `opal-deploy doctor`")
    return error


def to_outputs(tensors: HeadOutputs, *, attention: bool = False) -> Outputs:
    """Copy the network's tensors to arrays on the host, the large attention maps on request."""
    named = _named(tensors, attention=attention)
    arrays: dict[str, Any] = {
        name: tensor.cpu().numpy().astype(OUTPUT_SPECS[name].dtype, copy=False) for name, tensor in named.items()
    }
    return Outputs(**arrays)


def _named(tensors: HeadOutputs, *, attention: bool) -> dict[str, torch.Tensor]:
    """Return the tensors that a network has, by the names of outputs."""
    values = {name: getattr(tensors, name, None) for name in OUTPUT_SPECS if attention or name != "attention"}
    return {name: tensor for name, tensor in values.items() if tensor is not None}


def torch_device(name: str) -> torch.device:
    """Return PyTorch's device for `auto`, `cpu`, `cuda` or `cuda:N`; UsageError for another name or a missing GPU."""
    kind, index = parse_device(name)
    if kind == "cpu" or (kind == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        problem = find_gpu_problem() or "PyTorch sees no CUDA GPU; see `opal-deploy doctor`, or use --device cpu"
        raise UsageError(f"device {name}: {problem}")
    if index >= torch.cuda.device_count():
        raise UsageError(f"device {name}: PyTorch sees {torch.cuda.device_count()} CUDA GPUs, counted from 0")
    # without a number PyTorch would take whichever GPU is the thread's current one
    return torch.device("cuda", index)
