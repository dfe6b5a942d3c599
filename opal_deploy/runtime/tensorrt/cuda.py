"""The few CUDA calls that a session needs, through NVIDIA's own bindings: memory, copies, streams, events, graphs."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from opal_deploy.errors import OutOfMemory, StoppedEarly, UsageError, require
from opal_deploy.runtime.diagnostics import is_importable
from opal_deploy.runtime.nvml import Driver, Gpu, read_driver

Stream = Any
Event = Any
Graph = Any


# cudaErrorMemoryAllocation
_OUT_OF_MEMORY = 2


class Cuda:
    """One GPU. Every failing call raises StoppedEarly with CUDA's own words.

    Attributes:
        index: of the device, as CUDA counts (CUDA_VISIBLE_DEVICES applied).
        gpu: name, memory and compute capability.
        uuid: of the GPU, in hex.
        count: of devices that CUDA shows this process.
    """

    def __init__(self, index: int, runtime: Any = None) -> None:
        """Take a device.

        Args:
            index: of the device.
            runtime: `cuda.bindings.runtime`, or what stands in for it.

        Raises:
            MissingExtra: no cuda-bindings. UsageError: no such device.
        """
        if runtime is None:
            require("cuda.bindings", "trt-rtx", "running an engine", pip_name="cuda-bindings")
            from cuda.bindings import runtime as found

            runtime = found
        self._cuda = runtime
        self.index = index
        error, count = runtime.cudaGetDeviceCount()
        if int(error) != 0:
            raise UsageError(f"CUDA finds no usable GPU ({self._words(error)}); see `opal-deploy doctor`")
        if index >= count:
            raise UsageError(f"device cuda:{index}: CUDA sees {count} GPUs, counted from 0")
        self.count = int(count)
        self.use()
        properties = self._call("cudaGetDeviceProperties", index)
        name = properties.name.decode() if isinstance(properties.name, bytes) else str(properties.name)
        # tells two GPUs of one kind apart
        self.uuid = bytes(properties.uuid.bytes).hex()
        self.gpu = Gpu(index, name, int(properties.totalGlobalMem), (int(properties.major), int(properties.minor)))

    def use(self) -> None:
        """Make this the calling thread's device: CUDA keeps that apart for every thread."""
        self._call("cudaSetDevice", self.index)

    def allocate(self, size: int) -> int:
        """Address of `size` bytes on the device."""
        return int(self._call("cudaMalloc", size))

    def free(self, address: int) -> None:
        self._cuda.cudaFree(address)

    def pinned(self, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
        """A host array that the device copies from and to without another copy between; release with `unpin`."""
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        address = int(self._call("cudaHostAlloc", size, self._cuda.cudaHostAllocDefault))
        memory = (ctypes.c_ubyte * size).from_address(address)
        return np.frombuffer(memory, dtype).reshape(shape)

    def unpin(self, array: NDArray[Any]) -> None:
        self._cuda.cudaFreeHost(array.ctypes.data)

    def stream(self) -> Stream:
        return self._call("cudaStreamCreateWithFlags", self._cuda.cudaStreamNonBlocking)

    def event(self) -> Event:
        return self._call("cudaEventCreateWithFlags", self._cuda.cudaEventDisableTiming)

    def timed_event(self) -> Event:
        """An event that `seconds_between` can read; others cost less."""
        return self._call("cudaEventCreateWithFlags", self._cuda.cudaEventDefault)

    def seconds_between(self, first: Event, second: Event) -> float:
        """Of two timed events that have both come to pass."""
        return float(self._call("cudaEventElapsedTime", first, second)) / 1e3

    def record(self, event: Event, stream: Stream) -> None:
        self._call("cudaEventRecord", event, stream)

    def wait(self, stream: Stream, event: Event) -> None:
        """What is queued on `stream` from now on begins after `event`."""
        self._call("cudaStreamWaitEvent", stream, event, 0)

    def join_event(self, event: Event) -> None:
        """Wait for it on the host."""
        self._call("cudaEventSynchronize", event)

    def join(self, stream: Stream) -> None:
        """Wait on the host for all that is queued on a stream."""
        self._call("cudaStreamSynchronize", stream)

    def copy_in(self, device: int, host: NDArray[Any], stream: Stream) -> None:
        """Queue a copy of a pinned, contiguous array to the device."""
        kind = self._cuda.cudaMemcpyKind.cudaMemcpyHostToDevice
        self._call("cudaMemcpyAsync", device, host.ctypes.data, host.nbytes, kind, stream)

    def copy_out(self, host: NDArray[Any], device: int, stream: Stream) -> None:
        """Queue a copy from the device into a pinned, contiguous array."""
        kind = self._cuda.cudaMemcpyKind.cudaMemcpyDeviceToHost
        self._call("cudaMemcpyAsync", host.ctypes.data, device, host.nbytes, kind, stream)

    def begin_capture(self, stream: Stream) -> None:
        mode = self._cuda.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
        self._call("cudaStreamBeginCapture", stream, mode)

    def end_capture(self, stream: Stream) -> Graph:
        """What was queued since `begin_capture`, ready to be launched."""
        graph = self._call("cudaStreamEndCapture", stream)
        ready = self._call("cudaGraphInstantiate", graph, 0)
        self._cuda.cudaGraphDestroy(graph)
        return ready

    def launch(self, graph: Graph, stream: Stream) -> None:
        self._call("cudaGraphLaunch", graph, stream)

    def destroy(self, *, streams: tuple[Stream, ...], events: tuple[Event, ...], graphs: tuple[Graph, ...]) -> None:
        """Give back; a device that is lost has nothing to give back, so errors are not raised."""
        for graph in graphs:
            self._cuda.cudaGraphExecDestroy(graph)
        for event in events:
            self._cuda.cudaEventDestroy(event)
        for stream in streams:
            self._cuda.cudaStreamDestroy(stream)

    def _call(self, function: str, *arguments: Any) -> Any:
        error, *values = getattr(self._cuda, function)(*arguments)
        if int(error) != 0:
            words = self._words(error)
            if int(error) == _OUT_OF_MEMORY:
                raise OutOfMemory(f"CUDA device {self.index}: {function} failed: {words}; free memory on that GPU")
            hint = "see `opal-deploy doctor`"
            raise StoppedEarly(f"CUDA device {self.index}: {function} failed: {words} ({int(error)}); {hint}")
        return values[0] if values else None

    def _words(self, error: Any) -> str:
        _, text = self._cuda.cudaGetErrorString(error)
        return text.decode() if isinstance(text, bytes) else str(text)


def visible_driver() -> Driver:
    """This machine's driver with the GPUs that CUDA shows this process, in CUDA's order.

    NVML lists all GPUs in another order and knows nothing of CUDA_VISIBLE_DEVICES. Without CUDA's bindings its list has
    to do.
    """
    driver = read_driver()
    if not driver.gpus or not is_importable("cuda.bindings"):
        return driver
    try:
        first = Cuda(0)
        gpus = (first.gpu, *(Cuda(index).gpu for index in range(1, first.count)))
    except (UsageError, StoppedEarly) as error:
        return replace(driver, gpus=(), problem=str(error))
    return replace(driver, gpus=gpus)
