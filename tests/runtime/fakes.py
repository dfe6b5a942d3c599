"""Stand-ins for our own `Cuda` and for the part of TensorRT that a session calls.

A plan is the bytes of an ONNX file, computed by ONNX Runtime on the CPU. Memory is real memory, reached by address.
What is queued on a stream runs only when somebody waits for it, as late as a real GPU might: a session that overwrites
a buffer too early, or reads one too soon, gets wrong outputs here too. TestFakes compares them with the real classes.
"""

import contextlib
import ctypes
import threading
from types import SimpleNamespace

import numpy as np
import onnxruntime

_DTYPES = {"tensor(uint8)": np.uint8, "tensor(float)": np.float32, "tensor(int32)": np.int32}


# two threads may wait for one stream, and one stream for another: each piece of work runs once, in its order
_RUNNING = threading.RLock()


class FakeStream:
    def __init__(self, number):
        self.number = number
        self.queue = []
        self.captured = None

    def __int__(self):
        return self.number

    def push(self, work):
        (self.queue if self.captured is None else self.captured).append(work)

    def drain(self, until=None):
        with _RUNNING:
            while self.queue and (until is None or until in self.queue):
                self.queue.pop(0)()


class FakeCuda:
    """`Cuda` with deferred work."""

    def __init__(self, gpu):
        self.index, self.gpu, self.uuid = 0, gpu, bytes(range(16)).hex()
        self.memory = {}
        self.streams = {}
        self.live_events = self.launched = 0

    def activated(self):
        return contextlib.nullcontext()

    def allocate(self, size):
        block = np.full(size, 0xAB, np.uint8)  # rubbish: what is read before it was written shows
        self.memory[block.ctypes.data] = block
        return int(block.ctypes.data)

    def free(self, address):
        del self.memory[address]

    def allocate_pinned(self, shape, dtype):
        return self.memory[self.allocate(int(np.prod(shape)) * np.dtype(dtype).itemsize)].view(dtype).reshape(shape)

    def free_pinned(self, array):
        self.free(array.ctypes.data)

    def create_stream(self):
        stream = FakeStream(len(self.streams) + 1)
        self.streams[stream.number] = stream
        return stream

    def create_event(self):
        self.live_events += 1
        return SimpleNamespace(stream=FakeStream(0), marker=None)

    def record(self, event, stream):
        event.stream, event.marker = stream, lambda: None
        stream.push(event.marker)

    def wait_for_event(self, stream, event):
        stream.push(lambda waited=event.stream, marker=event.marker: waited.drain(marker))

    def synchronize_event(self, event):
        event.stream.drain(event.marker)

    def synchronize_stream(self, stream):
        stream.drain()

    def copy_to_device(self, device, host, stream):
        stream.push(lambda: ctypes.memmove(device, host.ctypes.data, host.nbytes))

    def copy_to_host(self, host, device, stream):
        stream.push(lambda: ctypes.memmove(host.ctypes.data, device, host.nbytes))

    def clear(self, device, size, stream):
        stream.push(lambda: ctypes.memset(device, 0, size))

    def record_graph(self, stream, queue):
        stream.captured = []
        queue()
        captured, stream.captured = stream.captured, None
        return captured

    def launch_graph(self, graph, stream):
        self.launched += 1
        stream.queue.extend(graph)

    def destroy(self, *, streams=(), events=(), graphs=()):
        self.live_events -= len(events)
        for stream in streams:
            del self.streams[stream.number]


class FakeTensorRT:
    """The library and its runtime in one object, with what TensorRT for RTX has on top."""

    ILogger = type("ILogger", (), {"__init__": lambda self: None})

    def __init__(self, cuda):
        self.cuda = cuda
        self.memory_is_full = False
        self.failures = 0  # executions that fail
        self.deserialized = 0
        self.executed = []
        self.strategies = []
        self.cache_reads = []
        self.DynamicShapesKernelSpecializationStrategy = SimpleNamespace(EAGER="eager")
        self.CudaGraphStrategy = SimpleNamespace(WHOLE_GRAPH_CAPTURE="whole")

    nptype = staticmethod(_DTYPES.__getitem__)

    def Runtime(self, logger):
        self.logger = logger
        return self

    def log_error(self, message):
        self.logger.log(SimpleNamespace(name="ERROR"), message)

    def deserialize_cuda_engine(self, plan):
        self.deserialized += 1
        return FakeEngine(self, plan)


class FakeEngine:
    """ICudaEngine over an ONNX file's bytes."""

    def __init__(self, trt, plan):
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.log_severity_level = 3
        self.trt = trt
        self.session = onnxruntime.InferenceSession(plan, options, providers=["CPUExecutionProvider"])
        self.tensors = {t.name: t for t in (*self.session.get_inputs(), *self.session.get_outputs())}
        self.num_io_tensors = len(self.tensors)

    def get_tensor_name(self, index):
        return list(self.tensors)[index]

    def get_tensor_dtype(self, name):
        return str(self.tensors[name].type)

    def get_tensor_shape(self, name):
        return tuple(-1 if isinstance(size, str) else size for size in self.tensors[name].shape)

    def create_runtime_config(self):
        return FakeRuntimeConfig(self.trt)

    def create_execution_context(self, configuration=None):
        if self.trt.memory_is_full:
            self.trt.log_error("Requested amount of GPU memory could not be allocated")
            return None
        if configuration is not None:
            strategy = configuration.dynamic_shapes_kernel_specialization_strategy
            self.trt.strategies.append((configuration.cuda_graph_strategy, strategy))
            assert configuration.cache is not None, "kernels are compiled at every start"
        return FakeContext(self)


class FakeRuntimeConfig:
    """IRuntimeConfig and its IRuntimeCache, which holds the batch sizes that were executed."""

    cuda_graph_strategy = dynamic_shapes_kernel_specialization_strategy = cache = None

    def __init__(self, trt):
        self.trt = trt

    def create_runtime_cache(self):
        return SimpleNamespace(
            serialize=lambda: bytes(sorted(set(self.trt.executed))),
            deserialize=lambda blob: self.trt.cache_reads.append(blob) is None,
        )

    def set_runtime_cache(self, cache):
        self.cache = cache


class FakeContext:
    """IExecutionContext: computes when its stream is drained, with the shape and addresses of when it was queued."""

    def __init__(self, engine):
        self.engine, self.addresses = engine, dict[str, int]()
        self.shape = ()

    def set_input_shape(self, name, shape):
        self.shape = shape
        return True

    def set_tensor_address(self, name, address):
        assert address in self.engine.trt.cuda.memory, "an address that nobody allocated"
        self.addresses[name] = address

    def execute_async_v3(self, stream):
        trt = self.engine.trt
        if trt.failures:
            trt.failures -= 1
            trt.log_error("Cask convolution execution failed")
            return False
        trt.cuda.streams[stream].push(lambda shape=self.shape, at=dict(self.addresses): self._compute(shape, at))
        return True

    def _compute(self, shape, addresses):
        trt, session = self.engine.trt, self.engine.session
        trt.executed.append(shape[0])
        dtype = np.dtype(trt.nptype(self.engine.get_tensor_dtype("images")))
        size = int(np.prod(shape)) * dtype.itemsize
        images = trt.cuda.memory[addresses["images"]][:size].view(dtype).reshape(shape)
        names = [output.name for output in session.get_outputs()]
        for name, value in zip(names, session.run(names, {"images": images}), strict=True):
            outputs = np.ascontiguousarray(value)
            ctypes.memmove(addresses[name], outputs.ctypes.data, outputs.nbytes)
