"""CUDA for sessions on a GPU: calls through NVIDIA's cuda-bindings, and the libraries that ONNX Runtime needs."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from opal_deploy.errors import OutOfMemory, StoppedEarly, UsageError, is_installed, require
from opal_deploy.runtime.devices import NO_GPU_ADVICE, Driver, Gpu, read_driver

if TYPE_CHECKING:
    # `doctor` works without numpy
    from numpy.typing import NDArray

Stream = Any
Event = Any
Graph = Any

# cudaErrorMemoryAllocation, cudaErrorDevicesUnavailable, cudaErrorNoDevice,
# cudaErrorHostMemoryAlreadyRegistered
_OUT_OF_MEMORY, _UNAVAILABLE, _NO_DEVICE, _ALREADY_REGISTERED = 2, 46, 100, 712
# what the extras `gpu`, `trt` and `trt-rtx` bring, and the lowest compute capability that it has kernels for
CUDA_VERSION = (13, 0)
_OLDEST_GPU = (7, 5)
# libraries of ONNX Runtime's CUDA provider, each after those it needs; it opens cuDNN at the first convolution
_LIBRARIES = ("cudart", "nvJitLink", "nvrtc", "cublasLt", "cublas", "curand", "cufft", "cudnn")


class Cuda:
    """One GPU. A call that fails raises StoppedEarly with CUDA's error text, or OutOfMemory where memory is full.

    Attributes:
        index: the device's number as CUDA counts, CUDA_VISIBLE_DEVICES applied.
        gpu: name, memory and compute capability.
        uuid: the GPU's UUID in hex, which distinguishes two GPUs of one kind.
    """

    def __init__(self, index: int, extra: str) -> None:
        """Read a device's properties, which takes no memory on it and changes no thread's device.

        Raises:
            MissingExtra: cuda-bindings is not installed; `extra` of opal-deploy brings it.
            UsageError: there is no such device, or CUDA does not start.
        """
        require("cuda.bindings", extra, "running on a GPU", pip_name="cuda-bindings")
        from cuda.bindings import runtime

        self._cuda = runtime
        self.index = index
        error, count = runtime.cudaGetDeviceCount()
        if int(error) != 0:
            problem, advice = diagnose_gpu(read_driver())
            raise UsageError(f"device cuda:{index}: {problem}; {advice}, or use --device cpu")
        if index >= count:
            raise UsageError(f"device cuda:{index}: CUDA sees {count} GPUs, counted from 0")
        properties = self._call("cudaGetDeviceProperties", index)
        name = properties.name.decode() if isinstance(properties.name, bytes) else str(properties.name)
        self.uuid = bytes(properties.uuid.bytes).hex()
        self.gpu = Gpu(index, name, int(properties.totalGlobalMem), (int(properties.major), int(properties.minor)))

    @contextlib.contextmanager
    def activated(self) -> Iterator[None]:
        """Make this the calling thread's device during the block; restore the previous one afterwards.

        Raises:
            UsageError: the device is reserved for another process.
        """
        before = int(self._call("cudaGetDevice"))
        self._call("cudaSetDevice", self.index)
        try:
            yield
        finally:
            # a device that was never used is the current one only by default: choosing it would take memory there
            if before != self.index and self._is_in_use(before):
                self._cuda.cudaSetDevice(before)

    def _is_in_use(self, index: int) -> bool:
        from cuda.bindings import driver

        _, device = driver.cuDeviceGet(index)
        error, _, active = driver.cuDevicePrimaryCtxGetState(device)
        return int(error) == 0 and bool(active)

    def allocate(self, size: int) -> int:
        """Allocate `size` bytes on the device and return their address."""
        return int(self._call("cudaMalloc", size))

    def free(self, address: int) -> None:
        """Free memory of `allocate`."""
        self._cuda.cudaFree(address)

    def allocate_pinned(self, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
        """Allocate a host array that the device copies from and to directly; free it with `free_pinned`."""
        import numpy as np

        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        address = int(self._call("cudaHostAlloc", size, self._cuda.cudaHostAllocDefault))
        memory = (ctypes.c_ubyte * size).from_address(address)
        return np.frombuffer(memory, dtype).reshape(shape)

    def free_pinned(self, array: NDArray[Any]) -> None:
        """Free an array of `allocate_pinned`."""
        self._cuda.cudaFreeHost(array.ctypes.data)

    def register(self, address: int, size: int) -> bool:
        """Page-lock host memory that this process has already, so that every GPU copies from it directly.

        Returns:
            Whether this call locked the memory, and `unregister` must unlock it. False where other code had locked it.

        Raises:
            StoppedEarly: the system does not lock it: its limit is reached, or it cannot lock memory of this kind.
        """
        (error,) = self._cuda.cudaHostRegister(address, size, self._cuda.cudaHostRegisterPortable)
        if int(error) != 0:
            # CUDA keeps a failure for the next call, and this one is handled here
            self._cuda.cudaGetLastError()
        if int(error) == _ALREADY_REGISTERED:
            return False
        self._check("cudaHostRegister", error)
        return True

    def unregister(self, address: int) -> None:
        """Unlock memory that `register` locked; errors are ignored, since the memory stays usable."""
        self._cuda.cudaHostUnregister(address)

    def create_stream(self) -> Stream:
        """Create a stream that does not synchronise with the default stream."""
        return self._call("cudaStreamCreateWithFlags", self._cuda.cudaStreamNonBlocking)

    def create_event(self) -> Event:
        """Create an event for which a thread waits asleep."""
        # without the first flag a waiting thread spins on a core that decodes images
        flags = self._cuda.cudaEventBlockingSync | self._cuda.cudaEventDisableTiming
        return self._call("cudaEventCreateWithFlags", flags)

    def record(self, event: Event, stream: Stream) -> None:
        """Record an event after the work queued on a stream."""
        self._call("cudaEventRecord", event, stream)

    def wait_for_event(self, stream: Stream, event: Event) -> None:
        """Let work queued on `stream` from now on begin after `event`."""
        self._call("cudaStreamWaitEvent", stream, event, 0)

    def synchronize_event(self, event: Event) -> None:
        """Wait on the host for an event."""
        self._call("cudaEventSynchronize", event)

    def synchronize_stream(self, stream: Stream) -> None:
        """Wait on the host for everything that is queued on a stream."""
        self._call("cudaStreamSynchronize", stream)

    def copy_to_device(self, device: int, host: NDArray[Any], stream: Stream) -> None:
        """Queue a copy of a pinned, contiguous array to the device."""
        kind = self._cuda.cudaMemcpyKind.cudaMemcpyHostToDevice
        self._call("cudaMemcpyAsync", device, host.ctypes.data, host.nbytes, kind, stream)

    def copy_to_host(self, host: NDArray[Any], device: int, stream: Stream) -> None:
        """Queue a copy from the device into a pinned, contiguous array."""
        kind = self._cuda.cudaMemcpyKind.cudaMemcpyDeviceToHost
        self._call("cudaMemcpyAsync", host.ctypes.data, device, host.nbytes, kind, stream)

    def clear(self, device: int, size: int, stream: Stream) -> None:
        """Queue filling device memory with zeros."""
        self._call("cudaMemsetAsync", device, 0, size, stream)

    def record_graph(self, stream: Stream, queue: Callable[[], None]) -> Graph:
        """Return the work that `queue` queues on a stream as a graph for `launch_graph`; nothing runs yet.

        Other threads may allocate and copy meanwhile; any thread may launch the graph.
        """
        mode = self._cuda.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
        self._call("cudaStreamBeginCapture", stream, mode)
        try:
            queue()
        except BaseException:
            # every capture must end; CUDA keeps the failure of this one for the next call
            self._cuda.cudaStreamEndCapture(stream)
            self._cuda.cudaGetLastError()
            raise
        graph = self._call("cudaStreamEndCapture", stream)
        executable = self._call("cudaGraphInstantiate", graph, 0)
        self._cuda.cudaGraphDestroy(graph)
        return executable

    def launch_graph(self, graph: Graph, stream: Stream) -> None:
        """Queue a recorded graph on a stream."""
        self._call("cudaGraphLaunch", graph, stream)

    def destroy(
        self, *, streams: tuple[Stream, ...] = (), events: tuple[Event, ...] = (), graphs: tuple[Graph, ...] = ()
    ) -> None:
        """Destroy streams, events and graphs; errors are ignored, since a lost device has nothing to free."""
        for graph in graphs:
            self._cuda.cudaGraphExecDestroy(graph)
        for event in events:
            self._cuda.cudaEventDestroy(event)
        for stream in streams:
            self._cuda.cudaStreamDestroy(stream)

    def _call(self, function: str, *arguments: Any) -> Any:
        error, *values = getattr(self._cuda, function)(*arguments)
        self._check(function, error)
        return values[0] if values else None

    def _check(self, function: str, error: Any) -> None:
        """Raise the error of a call that failed."""
        if int(error) != 0:
            text = _read_error(self._cuda, error)
            failure = f"CUDA device {self.index}: {function} failed: {text}"
            if int(error) == _OUT_OF_MEMORY:
                raise OutOfMemory(f"{failure}; free memory on that GPU")
            if int(error) == _UNAVAILABLE:
                raise UsageError(
                    f"device cuda:{self.index}: {text}: its compute mode keeps this process out; "
                    "choose another --device, reset it (sudo nvidia-smi -c 0), or use --device cpu"
                )
            raise StoppedEarly(f"{failure} ({int(error)}); see `opal-deploy doctor`")


def visible_driver() -> Driver:
    """Return this machine's driver with the GPUs that CUDA shows this process, in CUDA's order.

    A GPU that does not answer is left out. NVML, which lists all GPUs in an order of its own, is the substitute where
    cuda-bindings is not installed.
    """
    driver = read_driver()
    if not driver.gpus or not is_installed("cuda.bindings"):
        return driver
    from cuda.bindings import runtime

    _, count = runtime.cudaGetDeviceCount()
    gpus, problem = [], ""
    # without any, the attempt tells why
    for index in range(count or 1):
        try:
            gpus.append(Cuda(index, "gpu").gpu)
        except (UsageError, StoppedEarly) as error:
            problem = str(error)
    return replace(driver, gpus=tuple(gpus), problem=problem)


def diagnose_gpu(driver: Driver) -> tuple[str, str]:
    """Return why no GPU here runs programs for CUDA 13 and what to do; two empty strings where one does.

    Args:
        driver: as `read_driver` returns it, with all GPUs.
    """
    gpus = driver.gpus
    if not gpus:
        return driver.problem, NO_GPU_ADVICE
    needed, oldest = (".".join(map(str, version)) for version in (CUDA_VERSION, _OLDEST_GPU))
    if driver.cuda and driver.cuda < CUDA_VERSION:
        newest = ".".join(map(str, driver.cuda))
        return (
            f"driver {driver.version} runs CUDA {newest} at most, and this needs {needed}",
            "update the NVIDIA driver",
        )
    if all(gpu.compute_capability < _OLDEST_GPU for gpu in gpus):
        names = ", ".join(gpu.name for gpu in gpus)
        return f"CUDA {needed} needs compute capability {oldest} or newer, and this is {names}", "use the CPU"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    error, text = start_cuda() if is_installed("cuda.bindings") else (0, "")
    if visible is not None and (visible.strip() in ("", "-1", "NoDevFiles") or error == _NO_DEVICE):
        return f"CUDA_VISIBLE_DEVICES={visible!r} hides every GPU", "unset CUDA_VISIBLE_DEVICES"
    if error:
        advice = "restart after an update of the driver; in a container, set NVIDIA_DRIVER_CAPABILITIES=compute,utility"
        return f"CUDA does not start ({text})", advice
    return "", ""


def start_cuda() -> tuple[int, str]:
    """Start CUDA in this process, which takes no memory on a GPU; return its error's number, 0 for none, and text."""
    from cuda.bindings import runtime

    error, _ = runtime.cudaGetDeviceCount()
    return int(error), _read_error(runtime, error)


def _read_error(runtime: Any, error: Any) -> str:
    _, text = runtime.cudaGetErrorString(error)
    return text.decode() if isinstance(text, bytes) else str(text)


def load_cuda_libraries() -> None:
    """Load the libraries of ONNX Runtime's CUDA provider into this process.

    NVIDIA's `cuda.pathfinder` searches site-packages, Conda, CUDA_PATH and the system's folders. A missing library is
    not an error here: ONNX Runtime names it.
    """
    from cuda import pathfinder

    for name in _LIBRARIES:
        # not found, does not load, or not known to this version
        with contextlib.suppress(RuntimeError, OSError, ValueError):
            pathfinder.load_nvidia_dynamic_lib(name)
