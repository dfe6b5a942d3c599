"""Stand-ins for `tensorrt_rtx` and `cuda.bindings.runtime` with the names and habits of the real ones.

A plan is the bytes of an ONNX file, computed by ONNX Runtime on the CPU. Memory is real memory, reached by address.
What is queued on a stream runs only when somebody waits for it, as late as a real GPU might: a session that overwrites
a buffer too early, or reads one too soon, gets wrong answers here too.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime

Work = Callable[[], None]


class FakeStream:
    def __init__(self, number: int) -> None:
        self.number = number
        self.queue: list[Work] = []
        self.captured: list[Work] | None = None

    def __int__(self) -> int:
        return self.number

    def push(self, work: Work) -> None:
        (self.queue if self.captured is None else self.captured).append(work)

    def drain(self, length: int | None = None) -> None:
        for _ in range(len(self.queue) if length is None else length):
            if self.queue:
                self.queue.pop(0)()


class FakeEvent:
    """Remembers how much of a stream it waits for, by a marker in its queue, and when that came to pass."""

    def __init__(self, *, timed: bool = False) -> None:
        self.stream: FakeStream | None = None
        self.marker: Work | None = None
        self.timed = timed
        self.at: float | None = None

    def pass_now(self) -> None:
        self.at = time.perf_counter()

    def join(self) -> None:
        if self.stream is not None and self.marker in self.stream.queue:
            self.stream.drain(self.stream.queue.index(self.marker) + 1)


class FakeCudart:
    """The part of `cuda.bindings.runtime` that `Cuda` calls; every function returns (error, value...)."""

    cudaHostAllocDefault = 0
    cudaStreamNonBlocking = 1
    cudaEventDefault = 0
    cudaEventDisableTiming = 2
    cudaMemcpyKind = SimpleNamespace(cudaMemcpyHostToDevice=1, cudaMemcpyDeviceToHost=2)
    cudaStreamCaptureMode = SimpleNamespace(cudaStreamCaptureModeThreadLocal=1)

    def __init__(self, name: str = "NVIDIA L4", capability: tuple[int, int] = (8, 9), count: int = 1) -> None:
        self.name, self.capability, self.count = name, capability, count
        self.uuid = bytes(range(16))
        self.memory: dict[int, Any] = {}
        self.streams: dict[int, FakeStream] = {}
        self.failing: dict[str, int] = {}
        self.launched = 0
        self.events_alive = 0
        self.devices_used: list[int] = []

    def fail(self, function: str, code: int = 719) -> None:
        """Let the function fail from now on: 2 out of memory, 719 an unspecified launch failure."""
        self.failing[function] = code

    def _error(self, function: str) -> int:
        return self.failing.get(function, 0)

    def cudaGetErrorString(self, error: int) -> tuple[int, bytes]:
        return 0, {2: b"out of memory", 35: b"CUDA driver version is insufficient"}.get(error, b"launch failure")

    def cudaGetDeviceCount(self) -> tuple[int, int]:
        return self._error("cudaGetDeviceCount"), self.count

    def cudaSetDevice(self, index: int) -> tuple[int]:
        self.devices_used.append(index)
        return (self._error("cudaSetDevice"),)

    def cudaGetDeviceProperties(self, index: int) -> tuple[int, Any]:
        major, minor = self.capability
        uuid = SimpleNamespace(bytes=self.uuid)
        name = self.name.encode()
        return 0, SimpleNamespace(name=name, totalGlobalMem=24 << 30, major=major, minor=minor, uuid=uuid)

    def cudaMalloc(self, size: int) -> tuple[int, int]:
        if self._error("cudaMalloc"):
            return self._error("cudaMalloc"), 0
        return 0, self._block(size)

    def _block(self, size: int) -> int:
        # rubbish inside, as on a device: what is read before it was written shows
        block = (ctypes.c_ubyte * size)(*([0xAB] * min(size, 64)))
        address = ctypes.addressof(block)
        self.memory[address] = block
        return address

    def cudaHostAlloc(self, size: int, flags: int) -> tuple[int, int]:
        if self._error("cudaHostAlloc"):
            return self._error("cudaHostAlloc"), 0
        return 0, self._block(size)

    def cudaFree(self, address: int) -> tuple[int]:
        del self.memory[address]
        return (0,)

    cudaFreeHost = cudaFree

    def cudaStreamCreateWithFlags(self, flags: int) -> tuple[int, FakeStream]:
        stream = FakeStream(len(self.streams) + 1)
        self.streams[stream.number] = stream
        return self._error("cudaStreamCreateWithFlags"), stream

    def cudaStreamDestroy(self, stream: FakeStream) -> tuple[int]:
        del self.streams[stream.number]
        return (0,)

    def cudaStreamSynchronize(self, stream: FakeStream) -> tuple[int]:
        stream.drain()
        return (self._error("cudaStreamSynchronize"),)

    def cudaEventCreateWithFlags(self, flags: int) -> tuple[int, FakeEvent]:
        self.events_alive += 1
        return 0, FakeEvent(timed=not flags & self.cudaEventDisableTiming)

    def cudaEventDestroy(self, event: FakeEvent) -> tuple[int]:
        self.events_alive -= 1
        return (0,)

    def cudaEventElapsedTime(self, first: FakeEvent, second: FakeEvent) -> tuple[int, float]:
        """Milliseconds; 400 for events without timing, 600 for those that are still to come, as CUDA has it."""
        if not (first.timed and second.timed):
            return 400, 0.0
        if first.at is None or second.at is None:
            return 600, 0.0
        return self._error("cudaEventElapsedTime"), 1e3 * (second.at - first.at)

    def cudaEventRecord(self, event: FakeEvent, stream: FakeStream) -> tuple[int]:
        event.at = None
        # a new object each time: `join` finds it in the queue
        event.stream, event.marker = stream, lambda: event.pass_now()
        stream.push(event.marker)
        return (self._error("cudaEventRecord"),)

    def cudaStreamWaitEvent(self, stream: FakeStream, event: FakeEvent, flags: int) -> tuple[int]:
        waited = FakeEvent()
        waited.stream, waited.marker = event.stream, event.marker
        stream.push(waited.join)
        return (0,)

    def cudaEventSynchronize(self, event: FakeEvent) -> tuple[int]:
        event.join()
        return (self._error("cudaEventSynchronize"),)

    def cudaMemcpyAsync(self, to: int, source: int, size: int, kind: int, stream: FakeStream) -> tuple[int]:
        stream.push(lambda: ctypes.memmove(to, source, size) and None)
        return (self._error("cudaMemcpyAsync"),)

    def cudaStreamBeginCapture(self, stream: FakeStream, mode: int) -> tuple[int]:
        stream.captured = []
        return (0,)

    def cudaStreamEndCapture(self, stream: FakeStream) -> tuple[int, list[Work]]:
        captured, stream.captured = stream.captured, None
        return 0, captured or []

    def cudaGraphInstantiate(self, graph: list[Work], flags: int) -> tuple[int, list[Work]]:
        return 0, graph

    def cudaGraphDestroy(self, graph: list[Work]) -> tuple[int]:
        return (0,)

    def cudaGraphExecDestroy(self, graph: list[Work]) -> tuple[int]:
        return (0,)

    def cudaGraphLaunch(self, graph: list[Work], stream: FakeStream) -> tuple[int]:
        self.launched += 1
        for work in graph:
            stream.push(work)
        return (self._error("cudaGraphLaunch"),)


class FakeTensorRT:
    """The part of `tensorrt` that a session touches. TensorRT for RTX has CudaGraphStrategy on top."""

    def __init__(self, cudart: FakeCudart, *, rtx: bool = False) -> None:
        trt = self
        self.cudart = cudart
        self.deserialised = 0
        self.host_code_allowed = False
        self.refitted: list[str] = []
        self.refuse = ""
        self.fail_execution = 0
        self.shapes_refused = False
        self.no_room = False
        self.executed: list[int] = []
        self.strategies: list[Any] = []

        class ILogger:
            Severity = SimpleNamespace(ERROR=SimpleNamespace(name="ERROR"))

            def __init__(self) -> None: ...

        class Runtime:
            def __init__(self, logger: Any) -> None:
                self.logger = logger

            def __setattr__(self, name: str, value: Any) -> None:
                if name == "engine_host_code_allowed":
                    trt.host_code_allowed = value
                object.__setattr__(self, name, value)

            def deserialize_cuda_engine(self, plan: bytes) -> Any:
                trt.deserialised += 1
                if trt.refuse:
                    self.logger.log(ILogger.Severity.ERROR, trt.refuse)
                    return None
                return FakeEngine(trt, plan, self.logger)

        class Refitter:
            def __init__(self, engine: Any, logger: Any) -> None: ...

            def refit_cuda_engine(self) -> bool:
                return True

        class OnnxParserRefitter:
            def __init__(self, refitter: Any, logger: Any) -> None: ...

            def refit_from_file(self, model: str) -> bool:
                trt.refitted.append(model)
                return True

        self.ILogger, self.Runtime, self.Refitter, self.OnnxParserRefitter = (
            ILogger, Runtime, Refitter, OnnxParserRefitter,
        )  # fmt: skip
        if rtx:
            self.CudaGraphStrategy = SimpleNamespace(WHOLE_GRAPH_CAPTURE="whole")

    @staticmethod
    def nptype(dtype: str) -> Any:
        return {"tensor(uint8)": np.uint8, "tensor(float)": np.float32, "tensor(int32)": np.int32}[dtype]


class FakeEngine:
    """ICudaEngine over an ONNX file's bytes."""

    def __init__(self, trt: FakeTensorRT, plan: bytes, logger: Any) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.log_severity_level = 3
        self.trt, self.logger = trt, logger
        self.session = onnxruntime.InferenceSession(plan, options, providers=["CPUExecutionProvider"])
        self.tensors = {t.name: t for t in (*self.session.get_inputs(), *self.session.get_outputs())}
        self.num_io_tensors = len(self.tensors)

    def get_tensor_name(self, index: int) -> str:
        return list(self.tensors)[index]

    def get_tensor_dtype(self, name: str) -> str:
        return str(self.tensors[name].type)

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return tuple(-1 if isinstance(size, str) else size for size in self.tensors[name].shape)

    def create_runtime_config(self) -> Any:
        return SimpleNamespace(cuda_graph_strategy=None)

    def create_execution_context(self, configuration: Any = None) -> FakeContext | None:
        if self.trt.no_room:
            self.logger.log(self.trt.ILogger.Severity.ERROR, "Requested amount of GPU memory could not be allocated")
            return None
        if configuration is not None:
            self.trt.strategies.append(configuration.cuda_graph_strategy)
        return FakeContext(self)


class FakeContext:
    """IExecutionContext: computes when its stream is drained, with the shape and addresses of when it was queued."""

    def __init__(self, engine: FakeEngine) -> None:
        self.engine = engine
        self.shape: tuple[int, ...] = ()
        self.addresses: dict[str, int] = {}

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        self.shape = shape
        return not self.engine.trt.shapes_refused

    def set_tensor_address(self, name: str, address: int) -> bool:
        assert address in self.engine.trt.cudart.memory, "an address that nobody allocated"
        self.addresses[name] = address
        return True

    def execute_async_v3(self, stream_handle: int) -> bool:
        trt = self.engine.trt
        if trt.fail_execution:
            trt.fail_execution -= 1
            self.engine.logger.log(trt.ILogger.Severity.ERROR, "Cask convolution execution failed")
            return False
        shape, addresses = self.shape, dict(self.addresses)
        trt.cudart.streams[stream_handle].push(lambda: self._compute(shape, addresses))
        return True

    def _compute(self, shape: tuple[int, ...], addresses: dict[str, int]) -> None:
        self.engine.trt.executed.append(shape[0])
        dtype = FakeTensorRT.nptype(self.engine.get_tensor_dtype("images"))
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        feed = np.frombuffer((ctypes.c_ubyte * size).from_address(addresses["images"]), dtype).reshape(shape)
        names = [output.name for output in self.engine.session.get_outputs()]
        for name, value in zip(names, self.engine.session.run(names, {"images": feed}), strict=True):
            content = np.ascontiguousarray(value)
            ctypes.memmove(addresses[name], content.ctypes.data, content.nbytes)
