"""An engine on an NVIDIA GPU: TensorRT's and TensorRT for RTX's plans alike, without torch.

A batch goes through two sets of buffers in turn, so that the pictures of the next part are copied to the device on a
stream of their own while the engine computes the last. Host buffers are pinned. The first time that a machine loads an
engine, the engine's own test vectors run before anything is answered.
"""

from __future__ import annotations

import contextlib
import datetime
import itertools
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from opal_deploy.artifact.engine_file import Check, Sidecar, find_passed_check, load_engine, record_check
from opal_deploy.artifact.metadata import Metadata
from opal_deploy.artifact.outputs import FloatArray, Outputs
from opal_deploy.errors import ArtifactError, OutOfMemory, StoppedEarly, UsageError, VerificationError
from opal_deploy.preprocess.resize import normalise
from opal_deploy.runtime.devices import parse_device
from opal_deploy.runtime.nvml import Driver, read_driver
from opal_deploy.runtime.session import BatchTimes, ImageBatch, check_batch
from opal_deploy.runtime.tensorrt import bindings as libraries
from opal_deploy.runtime.tensorrt.bindings import Bindings, first_error, make_logger
from opal_deploy.runtime.tensorrt.compatibility import find_incompatibility
from opal_deploy.runtime.tensorrt.cuda import Cuda
from opal_deploy.runtime.verification import verify_test_vectors

INPUT = "images"


@dataclass
class _Slot:
    """One set of buffers: device addresses by tensor, pinned host arrays by tensor, and when its work is done."""

    device: dict[str, int]
    host: dict[str, NDArray[Any]]
    copied: Any
    done: Any
    wanted: int = 0
    recorded: _Recorded | None = None


@dataclass
class _Recorded:
    """A CUDA graph of one batch size on one set of buffers, and the context that must outlive it unchanged."""

    count: int
    context: Any
    graph: Any


class EngineSession:
    """A loaded engine.

    Attributes:
        metadata: the model's, from the sidecar.
        description: library, GPU, precision, and when this machine checked it.
        sidecar: what is known of the engine.
    """

    def __init__(
        self,
        path: Path,
        *,
        device: str = "auto",
        cuda_graphs: bool = False,
        library: Bindings | None = None,
        cuda_runtime: Any = None,
        driver: Driver | None = None,
    ) -> None:
        """Check the files, then the machine; load the plan; run its test vectors if this machine never did.

        Args:
            path: of the engine; its sidecar lies beside it.
            device: `auto`, `cuda` or `cuda:N`.
            cuda_graphs: record the engine's kernels once a batch size and launch them as one.
            library, cuda_runtime, driver: stand-ins for the bindings, `cuda.bindings.runtime` and the machine's driver.

        Raises:
            ArtifactError: a file is missing, damaged or does not fit this machine. UsageError: no GPU, or no such
            device. MissingExtra: a library is not installed. VerificationError: the test vectors are not reproduced.
        """
        self._slots: list[_Slot] = []
        self.sidecar: Sidecar
        self.sidecar, plan = load_engine(path)
        self._rebuild = self.sidecar.rebuild_command(path)
        self.metadata: Metadata = self.sidecar.metadata
        index = _device_index(path, device, self.sidecar)
        driver = read_driver() if driver is None else driver
        name = str(self.sidecar.builder["name"])
        if not driver.gpus:
            _refuse(path, self.sidecar, find_incompatibility(self.sidecar, None, driver, None))
        self._cuda = Cuda(index, cuda_runtime)
        version = library.version if library is not None else libraries.installed_version(name)
        _refuse(path, self.sidecar, find_incompatibility(self.sidecar, self._cuda.gpu, driver, version))
        self._library = library or libraries.load(name, "running this engine")
        # what its outcome on this machine depends on
        self._machine = {
            "gpu": self._cuda.gpu.name,
            "compute_capability": list(self._cuda.gpu.compute_capability),
            "driver": driver.version,
            "runtime": f"{name} {self._library.version}",
            "gpu_uuid": self._cuda.uuid,
        }
        self._runtime: Any = None
        self._engine: Any = None
        self._context: Any = None
        self._copy: Any = None
        self._compute: Any = None
        self._recording = False
        self._load(path, plan, cuda_graphs)
        checked = self._checked_before_answering(path)
        # from here on: what the test vectors' batch looks like is of no use to anybody
        self._recording = self._own_graphs
        self.description = f"{self._library.title} on {self._cuda.gpu.name}, {self.metadata.precision}, {checked}"

    @property
    def device(self) -> str:
        """`cuda:N` and the GPU's name."""
        return f"cuda:{self._cuda.index} {self._cuda.gpu.name}"

    @property
    def max_batch(self) -> int:
        """Pictures that one execution takes; larger batches are taken in parts."""
        return self.sidecar.batch.max

    def run(self, images: ImageBatch) -> Outputs:
        """See `Session.run`."""
        check_batch(images, self.metadata)
        return self._answer(images)

    def run_staged(self, images: ImageBatch) -> tuple[Outputs, BatchTimes]:
        """See `StagedSession.run_staged`; on one stream, in which nothing overlaps."""
        check_batch(images, self.metadata)
        self._cuda.use()
        events = tuple(self._cuda.timed_event() for _ in range(4))
        parts: list[Outputs] = []
        seconds = [0.0, 0.0, 0.0]
        slot = self._slots[0]
        try:
            for start in range(0, len(images), self.max_batch):
                count = self._fill(slot, images[start : start + self.max_batch])
                self._cuda.record(events[0], self._compute)
                self._cuda.copy_in(slot.device[INPUT], slot.host[INPUT][:count], self._compute)
                self._cuda.record(events[1], self._compute)
                self._execute(slot, count)
                self._cuda.record(events[2], self._compute)
                self._copy_outputs(slot, count)
                self._cuda.record(events[3], self._compute)
                self._cuda.record(slot.done, self._compute)
                parts.append(self._collect(slot))
                for index, (before, after) in enumerate(itertools.pairwise(events)):
                    seconds[index] += self._cuda.seconds_between(before, after)
        except StoppedEarly:
            with contextlib.suppress(StoppedEarly):
                self._cuda.join(self._compute)
            raise
        finally:
            self._cuda.destroy(streams=(), events=events, graphs=())
        return Outputs.concatenate(parts), BatchTimes(*seconds)

    def run_normalised(self, images: FloatArray) -> Outputs:
        """`run` for float32 [N, 3, H0, W0], already normalised; only for an engine whose input is float32."""
        return self._answer(images)

    def _answer(self, images: NDArray[Any]) -> Outputs:
        self._cuda.use()
        parts: list[Outputs] = []
        working: deque[_Slot] = deque()
        try:
            for number, start in enumerate(range(0, len(images), self.max_batch)):
                slot = self._slots[number % len(self._slots)]
                if slot in working:
                    parts.append(self._collect(working.popleft()))
                self._start(slot, images[start : start + self.max_batch])
                working.append(slot)
            while working:
                parts.append(self._collect(working.popleft()))
        except StoppedEarly:
            # nothing of a failed batch may still be writing into the buffers
            with contextlib.suppress(StoppedEarly):
                self._cuda.join(self._compute)
            raise
        return parts[0] if len(parts) == 1 else Outputs.concatenate(parts)

    def __del__(self) -> None:
        # at the interpreter's end the libraries may be gone already, and the memory with them
        with contextlib.suppress(Exception):
            self.close()

    def close(self) -> None:
        """Give device and pinned memory back."""
        for slot in self._slots:
            for address in slot.device.values():
                self._cuda.free(address)
            for array in slot.host.values():
                self._cuda.unpin(array)
            graphs = (slot.recorded.graph,) if slot.recorded is not None else ()
            slot.recorded = None
            self._cuda.destroy(streams=(), events=(slot.copied, slot.done), graphs=graphs)
        if self._slots:
            self._cuda.destroy(streams=(self._copy, self._compute), events=(), graphs=())
        self._slots = []
        self._context = self._engine = self._runtime = None

    def _load(self, path: Path, plan: bytes, cuda_graphs: bool) -> None:
        trt = self._library.module
        self._logger = make_logger(trt)
        self._runtime = trt.Runtime(self._logger)
        if self.sidecar.options.get("version_compatible"):
            # such a plan brings its own runtime, which is host code; the user trusts the file, as the README says
            self._runtime.engine_host_code_allowed = True
        engine = self._runtime.deserialize_cuda_engine(plan)
        if engine is None:
            raise ArtifactError(
                f"{path}: {self._library.title} refuses the engine ({first_error(self._logger)}); rebuild it with: "
                f"{self._rebuild}"
            )
        self._engine = engine
        if self.sidecar.options.get("strip_weights"):
            self._refit(path)
        self._check_tensors(path)
        by_library = self._make_context(cuda_graphs)
        self._own_graphs = cuda_graphs and not by_library
        if self._context is None:
            raise self._no_room(path, first_error(self._logger))
        self._copy, self._compute = self._cuda.stream(), self._cuda.stream()
        try:
            self._slots = [self._slot(), self._slot()]
        except OutOfMemory as error:
            raise self._no_room(path, str(error)) from None

    def _no_room(self, path: Path, reason: str) -> UsageError:
        memory = f"{(self._cuda.gpu.memory or 0) / 2**30:.0f} GiB"
        smaller = f"{max(1, self.max_batch // 16)}:{max(1, self.max_batch // 8)}:{max(1, self.max_batch // 4)}"
        source = path.with_name(str(self.sidecar.onnx["file"]))
        return UsageError(
            f"{path}: no room for batches of up to {self.max_batch} on {self._cuda.gpu.name} ({memory}): {reason}; "
            "free memory there, or build for smaller ones: opal-deploy export "
            f"{source} --trt --rebuild --batch {smaller}"
        )

    def _make_context(self, cuda_graphs: bool) -> bool:
        """Whether the library records CUDA graphs by itself, as TensorRT for RTX does when its context is told to."""
        strategies = getattr(self._library.module, "CudaGraphStrategy", None)
        if cuda_graphs and strategies is not None:
            configuration = self._engine.create_runtime_config()
            configuration.cuda_graph_strategy = strategies.WHOLE_GRAPH_CAPTURE
            self._context = self._engine.create_execution_context(configuration)
            return True
        self._context = self._engine.create_execution_context()
        return False

    def _refit(self, path: Path) -> None:
        """Put the weights back into a plan that was built without them, from the ONNX file that it was built from."""
        from opal_deploy.artifact import onnx_file

        source = path.with_name(str(self.sidecar.onnx["file"]))
        if not source.is_file():
            raise ArtifactError(
                f"{path}: built with --strip-weights, and {source.name}, which holds its weights, is not beside it; "
                "copy that file here too"
            )
        found = onnx_file.read_metadata(source)
        onnx_file.check_digest(source, found)
        if found.file_sha256 != self.sidecar.onnx["sha256"]:
            raise ArtifactError(
                f"{path}: {source.name} is not the file that it was built from; copy that one here, or rebuild with: "
                f"{self._rebuild}"
            )
        trt = self._library.module
        refitter = trt.Refitter(self._engine, self._logger)
        if not trt.OnnxParserRefitter(refitter, self._logger).refit_from_file(str(source)) or (
            not refitter.refit_cuda_engine()
        ):
            raise ArtifactError(
                f"{path}: its weights cannot be put back from {source.name} ({first_error(self._logger)}); "
                f"rebuild with: {self._rebuild}"
            )

    def _check_tensors(self, path: Path) -> None:
        """The engine's inputs and outputs must be what the metadata promises: buffers are made by that."""
        expected = {INPUT: self._tensor(INPUT), **{name: self._tensor(name) for name in self.metadata.outputs}}
        found: dict[str, tuple[tuple[int, ...], np.dtype[Any]]] = {}
        for index in range(self._engine.num_io_tensors):
            name = self._engine.get_tensor_name(index)
            dtype = np.dtype(self._library.module.nptype(self._engine.get_tensor_dtype(name)))
            found[name] = (tuple(self._engine.get_tensor_shape(name))[1:], dtype)
        if found != expected:
            raise ArtifactError(
                f"{path}: the engine's tensors are {_listed(found)}, and its sidecar promises {_listed(expected)}; "
                f"rebuild it with: {self._rebuild}"
            )

    def _tensor(self, name: str) -> tuple[tuple[int, ...], np.dtype[Any]]:
        """Shape of one picture's part of a tensor, and its type."""
        height, width = self.metadata.input_size
        channels, cells = self.metadata.num_prototypes, self.metadata.grid
        if name == INPUT:
            if self.metadata.input_kind == "float32":
                return (3, height, width), np.dtype(np.float32)
            return (height, width, 3), np.dtype(np.uint8)
        shape: tuple[int, ...] = {"logits": (self.metadata.num_classes,), "attention": (channels, *cells)}.get(
            name, (channels,)
        )
        return shape, np.dtype(np.int32 if name == "argmax" else np.float32)

    def _slot(self) -> _Slot:
        device, host = {}, {}
        for name in (INPUT, *self.metadata.outputs):
            shape, dtype = self._tensor(name)
            host[name] = self._cuda.pinned((self.max_batch, *shape), dtype)
            device[name] = self._cuda.allocate(host[name].nbytes)
        return _Slot(device, host, self._cuda.event(), self._cuda.event())

    def _start(self, slot: _Slot, images: NDArray[Any]) -> None:
        """Queue everything for at most `most` pictures."""
        count = self._fill(slot, images)
        self._cuda.copy_in(slot.device[INPUT], slot.host[INPUT][:count], self._copy)
        self._cuda.record(slot.copied, self._copy)
        self._cuda.wait(self._compute, slot.copied)
        self._execute(slot, count)
        self._copy_outputs(slot, count)
        self._cuda.record(slot.done, self._compute)

    def _fill(self, slot: _Slot, images: NDArray[Any]) -> int:
        """Put pictures into a slot's pinned buffer; how many the engine is to be run with."""
        count = max(len(images), self.sidecar.batch.min)
        feed = slot.host[INPUT]
        if images.dtype == np.uint8 and self.metadata.input_kind == "float32":
            feed[: len(images)] = normalise(images, self.metadata.mean, self.metadata.std)
        else:
            feed[: len(images)] = images
        # an engine for at least so many pictures answers for the last one again; those answers are dropped
        feed[len(images) : count] = feed[len(images) - 1]
        slot.wanted = len(images)
        return count

    def _copy_outputs(self, slot: _Slot, count: int) -> None:
        for name in self.metadata.outputs:
            self._cuda.copy_out(slot.host[name][:count], slot.device[name], self._compute)

    def _execute(self, slot: _Slot, count: int) -> None:
        if self._recording and slot.recorded is None:
            slot.recorded = self._record(slot, count)
        if slot.recorded is not None and slot.recorded.count == count:
            self._cuda.launch(slot.recorded.graph, self._compute)
            return
        self._prepare(self._context, slot, count)
        self._enqueue(self._context, count)

    def _record(self, slot: _Slot, count: int) -> _Recorded | None:
        """The kernels of the first batch's size, as one graph a set of buffers; batches of other sizes run plainly.

        A graph stays true only while its context keeps the shape and addresses that it was recorded with, so that each
        has a context of its own. Where there is no room for that, nothing is recorded.
        """
        context = self._engine.create_execution_context()
        if context is None:
            self._recording = False
            return None
        self._prepare(context, slot, count)
        # a plain run first, in which the library prepares what may not happen while recording
        self._enqueue(context, count)
        self._cuda.join(self._compute)
        self._cuda.begin_capture(self._compute)
        try:
            self._enqueue(context, count)
        finally:
            graph = self._cuda.end_capture(self._compute)
        return _Recorded(count, context, graph)

    def _prepare(self, context: Any, slot: _Slot, count: int) -> None:
        shape, _ = self._tensor(INPUT)
        if not context.set_input_shape(INPUT, (count, *shape)):
            raise StoppedEarly(f"the engine refuses a batch of {count} ({first_error(self._logger)})")
        for name, address in slot.device.items():
            context.set_tensor_address(name, address)

    def _enqueue(self, context: Any, count: int) -> None:
        if not context.execute_async_v3(int(self._compute)):
            raise StoppedEarly(
                f"{self._library.title} failed on a batch of {count} on {self._cuda.gpu.name}: "
                f"{first_error(self._logger)}; see `opal-deploy doctor`"
            )

    def _collect(self, slot: _Slot) -> Outputs:
        self._cuda.join_event(slot.done)
        # copies: the buffers are used again
        found = {name: slot.host[name][: slot.wanted].copy() for name in self.metadata.outputs}
        return Outputs(found["logits"], found.get("argmax"), found.get("scores"), found.get("attention"))

    def _checked_before_answering(self, path: Path) -> str:
        """Run the test vectors unless this plan passed them on this machine before; the outcome is kept beside it."""
        sha256 = str(self.sidecar.engine["sha256"])
        earlier = find_passed_check(path, sha256, self._machine)
        if earlier is not None:
            return f"checked here {earlier.when[:10]}"
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        self.description = f"{self._library.title} on {self._cuda.gpu.name}"
        try:
            report = verify_test_vectors(self, str(path)).to_dict()
        except VerificationError as error:
            record_check(path, Check(sha256, self._machine, now, False, {"failure": str(error)}))
            raise VerificationError(f"{error}; rebuild it with: {self._rebuild}") from None
        kept = record_check(path, Check(sha256, self._machine, now, True, report))
        return "checked now" if kept else "checked now (its folder is read-only: checked at every start)"


def _device_index(path: Path, device: str, sidecar: Sidecar) -> int:
    kind, index = parse_device(device)
    if kind == "cpu":
        raise UsageError(
            f"{path}: an engine runs on an NVIDIA GPU only; for the CPU use {sidecar.onnx['file']} or the fp32 "
            "ONNX file"
        )
    return index


def _refuse(path: Path, sidecar: Sidecar, reason: str) -> None:
    if reason:
        onnx = "the fp32 or fp16 ONNX file" if sidecar.metadata.precision == "bf16" else sidecar.onnx["file"]
        raise ArtifactError(
            f"{path}: {reason}; run {onnx} instead, or on the GPU that is to run it rebuild with: "
            f"{sidecar.rebuild_command(path)}"
        )


def _listed(tensors: dict[str, tuple[tuple[int, ...], np.dtype[Any]]]) -> str:
    return ", ".join(f"{name} {dtype} {['N', *shape]}" for name, (shape, dtype) in sorted(tensors.items()))
